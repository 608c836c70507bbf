"""The methods of the paper's comparison that are no callbacks, what they are held against, and a race."""

import math
from dataclasses import replace

import pytest
import torch

from fairbatch_lightning.fairness.disparities import group_confusion

RATES = torch.tensor([[0.1, 0.3, 0.2], [0.9, 0.6, 0.8], [0.5, 0.4, 0.46]])
"""Of positive predictions: among labels 0 and 1 and all, of groups 0 and 1 and both."""


def test_rates_are_those_of_counting(module):
    problem = module("data").problem("synthetic", None, 0)
    _, y, z = problem.train.tensors
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    found = module("methods").rates(logits, problem)
    for group in (0, 1):
        for label in (0, 1):
            expected = (logits[(y == label) & (z == group)] > 0).double().mean()
            assert found[label, group] == pytest.approx(float(expected))
        assert found[2, group] == pytest.approx(float((logits[z == group] > 0).double().mean()))
        assert found[group, 2] == pytest.approx(float((logits[y == group] > 0).double().mean()))
    assert found[2, 2] == pytest.approx(float((logits > 0).double().mean()))


def test_violations(module):
    violations = module("methods").violations
    for criterion, expected in {
        "equal_opportunity": [[0, 0], [0.1, -0.2]],
        "equalized_odds": [[0.1, -0.1], [0.1, -0.2]],
        "demographic_parity": [[0, 0], [0.04, -0.06]],
    }.items():
        torch.testing.assert_close(violations(RATES, criterion), torch.tensor(expected, dtype=torch.float32))


def test_bias_weights_move_away_from_the_group_that_is_better_off(module):
    methods = module("methods")
    for criterion in ("equal_opportunity", "equalized_odds", "demographic_parity"):
        weights = methods.bias_weights(-methods.violations(RATES, criterion), criterion)
        assert weights[1, 0] < 1 < weights[1, 1]
        if criterion != "equalized_odds":
            torch.testing.assert_close(weights.sum(0), torch.full((2,), 2.0))


def test_fairness_costs(module):
    y, z = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    costs = module("methods").fairness_costs
    for criterion, expected in {
        "equal_opportunity": [0, 0, 0, 0.3],
        "equalized_odds": [0, 0.2, 0, 0.3],
        "demographic_parity": [0, 0, 0, 0.1],
    }.items():
        torch.testing.assert_close(costs(RATES, y, z, criterion, 0.0), torch.tensor(expected))
    assert not costs(RATES, y, z, "equal_opportunity", 0.4).any()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LBC", "AdaFair", "FC"])
def test_methods_lower_the_disparity(module, method):
    """On generated data, with a larger learning rate than the paper's, to be done in a few seconds."""
    methods, synthetic = module("methods"), module("synthetic")
    problem = replace(module("data").problem("synthetic", None, 0), epochs=20, lr=0.01)
    plain = methods.plain(problem, "equal_opportunity", 0)
    fair = methods.METHODS[method](problem, "equal_opportunity", 0)
    before, after = (synthetic.evaluate(found.logits, problem.test) for found in (plain, fair))
    assert after["EO"] < (0.3 if method == "LBC" else 0.75) * before["EO"]
    assert after["accuracy"] > before["accuracy"] - 0.08


def test_adafair_keeps_the_models_that_do_best(module):
    """As many as make error plus disparity on the training set least, of all numbers of models."""
    methods, scores = module("methods"), module("scores")
    problem = module("data").problem("synthetic", None, 0)

    def objective(rounds):
        found = methods.adafair(problem, "demographic_parity", 0, rounds=rounds)
        confusion = scores.confusion_of(found.logits, problem.train)
        accuracy, disparity = scores.scores(confusion, "demographic_parity")
        return found.models, 1 - accuracy + disparity

    assert objective(1)[0] == 1
    tried = dict(objective(rounds) for rounds in range(1, 21))
    models, least = objective(20)
    assert 1 < models < 20
    assert least == tried[models] == min(tried.values())


@pytest.mark.slow
def test_training_comes_to_what_is_solved(module):
    methods = module("methods")
    problem = replace(module("data").problem("synthetic", None, 0), epochs=60, lr=0.01)
    x, y, _ = problem.train.tensors
    trained, solved = methods.plain(problem, "any", 0).logits(x), methods.solved(x, y, torch.ones(len(y)))(x)
    assert ((trained > 0) == (solved > 0)).double().mean() > 0.99


def test_solved_is_where_the_slope_is_zero(module):
    x, y, z = module("data").problem("synthetic", None, 0).train.tensors
    weights = torch.tensor([[0.5, 2.0], [1.0, 1.5]])[y, z].double()
    logits = module("methods").solved(x, y, weights)(x)
    slope = x.T.double() @ (weights * (torch.sigmoid(logits) - y))
    assert slope.abs().max() < 0.01  # but for the tiny ridge


@pytest.mark.parametrize("criterion", ["equal_opportunity", "equalized_odds", "demographic_parity"])
def test_best_thresholds_are_those_of_trying_all(module, criterion):
    random = torch.Generator().manual_seed(0)
    y, z = torch.randint(2, (2, 60), generator=random)
    logits = (torch.randn(60, generator=random).double() + y + 0.8 * z).round(decimals=1) / 3  # with many ties
    scores = module("tables").scores
    tried = []
    for first in [logits.min() - 2, *logits]:
        for second in [logits.min() - 2, *logits]:
            positive = (logits > torch.where(z == 0, first, second)).long()
            confusion = group_confusion(positive, y, z, num_labels=2, num_groups=2)
            tried.append(scores(confusion, criterion))
    chosen = module("best_thresholds").best_thresholds(logits, y, z, criterion, 0.05)
    positive = (logits > chosen[z]).long()
    found = scores(group_confusion(positive, y, z, num_labels=2, num_groups=2), criterion)
    assert found[1] <= 0.05
    assert found[0] == max(accuracy for accuracy, disparity in tried if disparity <= 0.05)


@pytest.mark.slow
def test_the_race_against_adafair(module):
    """It ends when FairBatch is as fair as AdaFair for good; standing still it never is."""
    race, methods, scores = module("adafair_speed").race, module("methods"), module("scores")
    problem = replace(module("data").problem("synthetic", None, 0), epochs=20, lr=0.01)
    disparity, kept, trained, own = race(problem, "equal_opportunity", 0, {"alpha": 0.05})
    rival = methods.adafair(problem, "equal_opportunity", 0)
    assert (kept, trained) == (20 * rival.models, rival.epochs)
    assert kept < trained
    assert own <= 20
    as_fair = methods.METHODS["FairBatch"](replace(problem, epochs=own), "equal_opportunity", 0, alpha=0.05)
    assert scores.scores(scores.confusion_of(as_fair.logits, problem.train), "equal_opportunity")[1] <= disparity
    assert race(problem, "equal_opportunity", 0, {"alpha": 1e-6}).own == math.inf


@pytest.mark.slow
def test_out_of_the_box(run_script, tmp_path):
    """A table of the bare line at several lengths; what was trained is not trained again."""
    options = [
        "--problems",
        "population",
        "--criteria",
        "equal_opportunity",
        "--seeds",
        "0",
        "1",
        "--lengths",
        "1",
        "0.5",
    ]
    options = [*options, "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--epochs", "4"]
    printed = run_script("paper/out_of_the_box.py", *options)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert "| plain, x1 | paper, x1 | bare line, x1 | plain, x0.5 | bare line, x0.5 |" in printed
    assert lines[-1].count(" / ") == 5
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) == 10
    for path in (tmp_path / "out").iterdir():
        path.write_text('{"equal_opportunity": [0.5, 0.25]}')
    assert ".500 / .250" in run_script("paper/out_of_the_box.py", *options)
