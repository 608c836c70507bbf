"""The paper's comparison: data as it was published, methods that are no callbacks, and the tables."""

import csv
import hashlib
import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes
import pytest
import torch

from fairbatch_lightning.disparities import group_confusion

PAPER = Path(__file__).parent.parent / "examples" / "paper"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Let the example's modules be imported, and forget them afterwards: their names are common ones."""
    monkeypatch.syspath_prepend(PAPER)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(PAPER.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def module(name):
    return importlib.import_module(name)


COMPAS = """\
id,sex,age_cat,race,priors_count,days_b_screening_arrest,c_charge_degree,is_recid,score_text,two_year_recid
1,Male,25 - 45,African-American,0,-1,F,0,Low,0
2,Female,Less than 25,Caucasian,2,30,M,1,High,1
3,Male,Greater than 45,Caucasian,4,0,F,1,Low,1
4,Male,25 - 45,Other,0,-1,F,0,Low,0
5,Male,25 - 45,Caucasian,0,31,F,0,Low,0
6,Male,25 - 45,Caucasian,0,,F,0,Low,0
7,Male,25 - 45,Caucasian,0,0,O,0,Low,0
8,Male,25 - 45,Caucasian,0,0,F,-1,Low,0
9,Male,25 - 45,Caucasian,0,0,F,0,N/A,0
"""
ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Private, 83311, HS-grad, 9, Divorced, Sales, Husband, Black, Female, 0, 0, 13, United-States, >50K
38, ?, 1, HS-grad, 9, Divorced, ?, Husband, White, Male, 0, 0, 40, United-States, >50K
30, Private, 2, HS-grad, 9, Divorced, Sales, Husband, Other, Male, 0, 0, 40, Peru, >50K

"""
ADULT_TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40, United-States, >50K.
"""


class TestData:
    def test_compas(self, tmp_path):
        (tmp_path / "compas-scores-two-years.csv").write_text(COMPAS)
        x, y, z, names = module("data").compas(tmp_path)
        assert y.tolist() == [0, 1, 1]
        assert z.tolist() == [0, 1, 0]
        second = dict(zip(names, x[1].tolist(), strict=True))
        assert {name for name, value in second.items() if value} == {
            "sex",
            "race",
            "age_cat=Less than 25",
            "priors_count=1 to 3",
            "c_charge_degree=M",
        }

    def test_adult(self, tmp_path):
        """Rows with missing values and of other races are left out; the latter's values have columns all the same."""
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw" / "adult.data").write_text(ADULT)
        (tmp_path / "raw" / "adult.test").write_text(ADULT_TEST)
        x, y, z, names = module("data").adult(tmp_path)
        assert y.tolist() == [1, 0, 1]
        assert z.tolist() == [1, 1, 0]
        first = dict(zip(names, x[0].tolist(), strict=True))
        assert (first["age"], first["hours-per-week"], first["race"], first["education=11th"]) == (25, 40, 0, 1)
        assert "native-country=Peru" in names
        assert "fnlwgt" not in names

    def test_missing_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"(?s)no adult.test in .*archive.ics.uci.edu"):
            module("data").problem("adult", tmp_path, 0)
        with pytest.raises(FileNotFoundError, match="Give the directory"):
            module("data").problem("compas", None, 0)

    def test_download(self, tmp_path, monkeypatch):
        """A file with another checksum is refused, and not left where the next run would take it for good."""
        data = module("data")
        source = tmp_path / "source"
        source.write_text("as published")
        checksum = hashlib.sha256(b"as published").hexdigest()
        monkeypatch.setattr(data, "SOURCES", {"adult.data": (source.as_uri(), checksum)})
        found = data.find(tmp_path / "new" / "directory", "adult.data", download=True)
        assert found.read_text() == "as published"
        source.write_text("as changed")
        assert data.find(found.parent, "adult.data", download=True).read_text() == "as published"
        found.unlink()
        with pytest.raises(RuntimeError, match="invalid hash value"):
            data.find(found.parent, "adult.data", download=True)
        assert not list(found.parent.iterdir())
        with pytest.raises(FileNotFoundError, match=r"no adult.test"):
            data.find(found.parent, "adult.test", download=True)

    def test_split_is_by_the_seed_and_scaled_by_the_training_set(self):
        random = np.random.default_rng(0)
        x = np.column_stack([random.normal(5, 3, 100), np.ones(100)])
        table = x, random.integers(2, size=100), random.integers(2, size=100), ["a", "b"]
        train, test = module("data").split(table, 0)
        assert (len(train), len(test)) == (80, 20)
        torch.testing.assert_close(train.tensors[0].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
        assert train.tensors[0][:, 0].std(correction=0) == pytest.approx(1, abs=1e-5)
        again, other = (module("data").split(table, seed)[0].tensors[0] for seed in (0, 1))
        assert torch.equal(again, train.tensors[0])
        assert not torch.equal(other, train.tensors[0])


RATES = torch.tensor([[0.1, 0.3, 0.2], [0.9, 0.6, 0.8], [0.5, 0.4, 0.46]])
"""Of positive predictions: among labels 0 and 1 and all, of groups 0 and 1 and both."""


class TestMethods:
    def test_rates_are_those_of_counting(self):
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

    def test_violations(self):
        violations = module("methods").violations
        for criterion, expected in {
            "equal_opportunity": [[0, 0], [0.1, -0.2]],
            "equalized_odds": [[0.1, -0.1], [0.1, -0.2]],
            "demographic_parity": [[0, 0], [0.04, -0.06]],
        }.items():
            torch.testing.assert_close(violations(RATES, criterion), torch.tensor(expected, dtype=torch.float32))

    def test_bias_weights_move_away_from_the_group_that_is_better_off(self):
        methods = module("methods")
        for criterion in ("equal_opportunity", "equalized_odds", "demographic_parity"):
            weights = methods.bias_weights(-methods.violations(RATES, criterion), criterion)
            assert weights[1, 0] < 1 < weights[1, 1]
            if criterion != "equalized_odds":
                torch.testing.assert_close(weights.sum(0), torch.full((2,), 2.0))

    def test_fairness_costs(self):
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
    def test_methods_lower_the_disparity(self, method):
        """On generated data, with a larger learning rate than the paper's, to be done in a few seconds."""
        methods, synthetic = module("methods"), module("synthetic")
        problem = replace(module("data").problem("synthetic", None, 0), epochs=20, lr=0.01)
        plain = methods.plain(problem, "equal_opportunity", 0)
        fair = methods.METHODS[method](problem, "equal_opportunity", 0)
        before, after = (synthetic.evaluate(found.logits, problem.test) for found in (plain, fair))
        assert after["EO"] < (0.3 if method == "LBC" else 0.75) * before["EO"]
        assert after["accuracy"] > before["accuracy"] - 0.08

    def test_adafair_keeps_the_models_that_do_best(self):
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
    def test_training_comes_to_what_is_solved(self):
        methods = module("methods")
        problem = replace(module("data").problem("synthetic", None, 0), epochs=60, lr=0.01)
        x, y, _ = problem.train.tensors
        trained, solved = methods.plain(problem, "any", 0).logits(x), methods.solved(x, y, torch.ones(len(y)))(x)
        assert ((trained > 0) == (solved > 0)).double().mean() > 0.99


@pytest.mark.slow
def test_the_race_against_adafair():
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


class TestChoice:
    def test_what_does_not_tell_labels_apart_is_left_out(self):
        """However fair it is, unless nothing else is to be had."""
        worth_having = module("run").worth_having
        found = {0: [(0.7, 0.2), (0.7, 0.2)], 1: [(0.6, 0.1), (0.55, 0.0)], 2: [(0.55, 0.0), (0.55, 0.0)]}
        assert list(worth_having(found, [0.56, 0.54])) == [0, 1]
        assert worth_having(found, [0.9, 0.9]) == found

    def test_tables_of_what_was_tried_and_chosen(self, tmp_path):
        """Also of problems for which other settings were tried."""
        tables = module("tables")
        assert tables.write_tables(tmp_path) == ""
        for name, alphas in (("synthetic", [0.1, 0.2]), ("compas", [0.05, 0.1, 0.2])):
            candidates = [{"alpha": alpha} for alpha in alphas]
            folds = [[(0.5, alpha), (0.7, 0.0)] for alpha in alphas]
            choice = {"candidates": candidates, "folds": folds, "chosen": candidates[-1]}
            (tmp_path / f"{name}_equalized_odds_FairBatch_choice.json").write_text(json.dumps(choice))
        choices = tables.read_choices(tmp_path)
        assert tables.chosen(choices)[1:] == [["FairBatch", "equalized odds", "alpha 0.2", "alpha 0.2", ""]]
        assert tables.by_setting(choices, "FairBatch") == [
            ["setting", "synthetic, equalized odds", "compas, equalized odds"],
            ["alpha 0.1", ".600 / .050", ".600 / .050"],
            ["alpha 0.2", ".600 / .100", ".600 / .100"],
            ["alpha 0.05", "", ".600 / .025"],
        ]
        assert "| alpha 0.05 |  | .600 / .025 |" in tables.write_tables(tmp_path)


def test_disparities_over_models(tmp_path, capsys):
    figures = module("figures")
    assert figures.disparities_over_models(tmp_path, None) is None
    assert "for lack of" in capsys.readouterr().out
    for method, models in (("LBC", 3), ("AdaFair", 4)):
        for criterion in figures.CRITERIA:
            result = {"models": models, "setting": {}}
            (tmp_path / f"synthetic_{criterion}_{method}_0.json").write_text(json.dumps(result))
    panels = figures.disparities_over_models(tmp_path, None).axes
    lines = [line for panel in panels for line in panel.lines if len(line.get_xdata()) > 1]
    assert [len(line.get_xdata()) for line in lines] == [3, 4, 3, 4]
    assert all(line.get_ydata()[-1] < line.get_ydata()[0] for line in lines[::2])  # AdaFair takes more


class TestReferences:
    def test_solved_is_where_the_slope_is_zero(self):
        x, y, z = module("data").problem("synthetic", None, 0).train.tensors
        weights = torch.tensor([[0.5, 2.0], [1.0, 1.5]])[y, z].double()
        logits = module("methods").solved(x, y, weights)(x)
        slope = x.T.double() @ (weights * (torch.sigmoid(logits) - y))
        assert slope.abs().max() < 0.01  # but for the tiny ridge

    @pytest.mark.parametrize("criterion", ["equal_opportunity", "equalized_odds", "demographic_parity"])
    def test_best_thresholds_are_those_of_trying_all(self, criterion):
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

    def test_noise_is_what_a_fair_model_shows(self):
        """Two groups of 50 and 200 positives, half of them found: by how much the small one's rate is off by chance."""
        noise = module("tables").noise
        confusion = torch.tensor([[[30, 20], [25, 25]], [[100, 100], [100, 100]]])
        expected = 0.8 * math.sqrt(2 / math.pi) * math.sqrt(0.25 / 50 + 0.25 / 200)
        assert noise(confusion, "equal_opportunity", 20_000).mean() == pytest.approx(expected, rel=0.05)
        assert noise(confusion, "equalized_odds", 2_000).mean() > 1.2 * expected
        rate, sizes = 245 / 500, (100, 400)
        expected = 0.8 * math.sqrt(2 / math.pi * rate * (1 - rate) * sum(1 / size for size in sizes))
        assert noise(confusion, "demographic_parity", 20_000).mean() == pytest.approx(expected, rel=0.05)

    @pytest.mark.parametrize(("gap", "tolerance"), [(0.0, 0.016), (0.1, 0.006), (0.2, 0.003)])
    def test_noise_is_taken_off(self, gap, tolerance):
        """Many test sets of a model whose true positive rate differs by a known gap between equally large groups."""
        random = np.random.default_rng(0)
        results = []
        for _ in range(400):
            found = random.binomial(100, [0.5 + gap / 2, 0.5 - gap / 2])
            results.append({"confusion": [[[50, 50], [100 - int(right), int(right)]] for right in found]})
        tables = module("tables")
        assert np.mean([tables.scores_of(one, "equal_opportunity")[1] for one in results]) > gap / 2 + 0.001
        assert tables.beyond_noise(results, "equal_opportunity") == pytest.approx(gap / 2, abs=tolerance)

    def test_intervals_of_splits_that_share_samples_are_wider(self):
        interval = module("tables").interval
        values = [0.01, 0.02, 0.03]
        assert interval(values) == "+.020 ± .025"  # 4.30 * 0.01 / sqrt(3)
        assert interval(values, 0.25) == "+.020 ± .033"
        assert interval([0.01]) == "+.010"

    def test_epoch_from_which_on_it_is_low(self):
        low_from = module("figures").low_from
        assert low_from([0.3, 0.1, 0.3, 0.1, 0.1], 0.1) == 4
        assert low_from([0.1, 0.1], 0.1) == 1
        assert low_from([0.1, 0.3], 0.1) is None

    def test_surface_is_low_where_the_groups_are_drawn_alike(self):
        """On data whose groups differ in nothing but their number."""
        x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
        z = (torch.arange(4000) % 4 == 0).long()
        y = (x[:, 0] + torch.randn(4000, generator=torch.Generator().manual_seed(1)) > 0).long()
        data = module("data")
        dataset = torch.utils.data.TensorDataset(torch.column_stack([x, z]), y, z)
        given = data.Problem("toy", dataset, dataset, 100, 0.1, 1)
        found = module("figures").surface(given, torch.tensor([0.1, 0.5, 0.9]))
        assert found.diagonal().max() < 0.05
        assert min(found[0, 2], found[2, 0]) > 0.3


def test_the_path_of_the_shares_starts_at_those_of_the_data(tmp_path, capsys):
    assert module("figures").share_path(tmp_path, 1) is None
    assert "for lack of COMPAS" in capsys.readouterr().out
    random = np.random.default_rng(0)
    names = "sex race age_cat priors_count c_charge_degree two_year_recid days_b_screening_arrest is_recid score_text"
    with (tmp_path / "compas-scores-two-years.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names.split())
        for sex, recid in random.integers(2, size=(400, 2)):
            age, priors = random.choice(["Less than 25", "25 - 45"]), random.integers(5)
            writer.writerow([["Male", "Female"][sex], "Caucasian", age, priors, "F", recid, 0, 0, "Low"])
    _, y, z = module("data").problem("compas", tmp_path, 0).train.tensors
    panel = module("figures").share_path(tmp_path, 3).axes[0]
    paths = [line.get_xydata() for line in panel.lines if len(line.get_xydata()) > 1]
    assert [len(path) for path in paths] == [4, 4]
    for path in paths:
        assert path[0] == pytest.approx([float(z[y == label].float().mean()) for label in (1, 0)])


@pytest.mark.slow
def test_tables_are_written_and_nothing_is_trained_twice(tmp_path):
    options = ["--problems", "synthetic", "--criteria", "equalized_odds", "--epochs", 1, "--seeds", 2, "--folds", 2]
    methods = ["--methods", "LR", "Cutting", "LBC", "AdaFair", "FairDRO", "FairBatch"]
    run = [PAPER / "run.py", *options, *methods, "--output", tmp_path / "out"]
    first = processes.run_script(*run, output=tmp_path / "first")
    assert first.returncode == 0, first.stderr[-3000:]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*_[0-9].json")}
    assert len(files) == 12
    longer = [2 if option == 1 else option for option in run]
    other = processes.run_script(*longer, output=tmp_path / "other")
    assert "is of models of 1 epochs, not 2" in other.stderr
    again = processes.run_script(*run, output=tmp_path / "again")
    assert again.stdout == first.stdout
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    choice = json.loads((tmp_path / "out" / "synthetic_equalized_odds_FairBatch_choice.json").read_text())
    assert choice["chosen"] in choice["candidates"]
    with (tmp_path / "out" / "equalized_odds.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows["FairBatch"]["synthetic: paper"] == ".856 / .038 / 400"
    assert rows["LBC"]["synthetic: epochs"] == "20"
    with (tmp_path / "out" / "equalized_odds_changes.csv").open() as file:
        changed = {row["method"]: row for row in csv.DictReader(file)}
    assert changed["FairBatch"]["accuracy"].count("±") == 1
    assert (changed["FairBatch"]["paper: removed"], changed["FairBatch"]["paper: accuracy"]) == ("67%", "-.029")
    assert "| .856 / .038 / 400 |" in first.stdout
    pictures = [PAPER / "figures.py", "--epochs", 2, "--seeds", 1, "--output", tmp_path / "out"]
    figures = processes.run_script(*pictures, "--pictures", tmp_path / "pictures", output=tmp_path / "figures")
    assert figures.returncode == 0, figures.stderr[-3000:]
    assert "for lack of" in figures.stdout
    drawn = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    tradeoffs = {"tradeoff_equal_opportunity", "tradeoff_demographic_parity"}
    assert drawn == {"class_weights", "curves", "importance", *tradeoffs}
    assert rows["LR"]["synthetic: accuracy"].count("±") == 1


@pytest.mark.slow
def test_times_are_compared_with_plain_training(tmp_path):
    options = ["--problems", "synthetic", "--methods", "LBC", "FairBatch", "--rounds", 1, "--epochs", 2]
    done = processes.run_script(PAPER / "times.py", *options, "--output", tmp_path / "out", output=tmp_path / "log")
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "out" / "time.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows["FairBatch"]["synthetic: paper, all epochs"] == "0.92"
    assert rows["LBC"]["synthetic: all epochs"] == "20.00"
    epoch, whole = (float(rows["FairBatch"][f"synthetic: {what}"]) for what in ("an epoch", "all epochs"))
    assert 0.5 < epoch == whole
