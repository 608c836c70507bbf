"""What the paper's comparison chooses, how its tables come about, and the scripts that write them."""

import csv
import json
import math

import numpy as np
import pytest
import torch


def test_what_does_not_tell_labels_apart_is_left_out(module):
    """However fair it is, unless nothing else is to be had."""
    worth_having = module("run").worth_having
    found = {0: [(0.7, 0.2), (0.7, 0.2)], 1: [(0.6, 0.1), (0.55, 0.0)], 2: [(0.55, 0.0), (0.55, 0.0)]}
    assert list(worth_having(found, [0.56, 0.54])) == [0, 1]
    assert worth_having(found, [0.9, 0.9]) == found


def test_tables_of_what_was_tried_and_chosen(module, tmp_path):
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


def test_noise_is_what_a_fair_model_shows(module):
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
def test_noise_is_taken_off(module, gap, tolerance):
    """Many test sets of a model whose true positive rate differs by a known gap between equally large groups."""
    random = np.random.default_rng(0)
    results = []
    for _ in range(400):
        found = random.binomial(100, [0.5 + gap / 2, 0.5 - gap / 2])
        results.append({"confusion": [[[50, 50], [100 - int(right), int(right)]] for right in found]})
    tables = module("tables")
    assert np.mean([tables.scores_of(one, "equal_opportunity")[1] for one in results]) > gap / 2 + 0.001
    assert tables.beyond_noise(results, "equal_opportunity") == pytest.approx(gap / 2, abs=tolerance)


def test_intervals_of_splits_that_share_samples_are_wider(module):
    interval = module("tables").interval
    values = [0.01, 0.02, 0.03]
    assert interval(values) == "+.020 ± .025"  # 4.30 * 0.01 / sqrt(3)
    assert interval(values, 0.25) == "+.020 ± .033"
    assert interval([0.01]) == "+.010"


@pytest.mark.slow
def test_tables_are_written_and_nothing_is_trained_twice(run_script, tmp_path):
    options = ["--problems", "synthetic", "--criteria", "equalized_odds", "--epochs", 1, "--seeds", 2, "--folds", 2]
    methods = ["--methods", "LR", "Cutting", "LBC", "AdaFair", "FairDRO", "FairBatch"]
    run = ["paper/run.py", *options, *methods, "--output", tmp_path / "out"]
    first = run_script(*run)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*_[0-9].json")}
    assert len(files) == 12
    with pytest.raises(AssertionError, match="is of models of 1 epochs, not 2"):
        run_script(*(2 if option == 1 else option for option in run))
    assert run_script(*run) == first
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
    assert "| .856 / .038 / 400 |" in first
    pictures = ["paper/figures.py", "--epochs", 2, "--seeds", 1, "--output", tmp_path / "out"]
    assert "for lack of" in run_script(*pictures, "--pictures", tmp_path / "pictures")
    drawn = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    tradeoffs = {"tradeoff_equal_opportunity", "tradeoff_demographic_parity"}
    assert drawn == {"class_weights", "curves", "importance", *tradeoffs}
    assert rows["LR"]["synthetic: accuracy"].count("±") == 1


@pytest.mark.slow
def test_times_are_compared_with_plain_training(run_script, tmp_path):
    options = ["--problems", "synthetic", "--methods", "LBC", "FairBatch", "--rounds", 1, "--epochs", 2]
    run_script("paper/times.py", *options, "--output", tmp_path / "out")
    with (tmp_path / "out" / "time.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows["FairBatch"]["synthetic: paper, all epochs"] == "0.92"
    assert rows["LBC"]["synthetic: all epochs"] == "20.00"
    epoch, whole = (float(rows["FairBatch"][f"synthetic: {what}"]) for what in ("an epoch", "all epochs"))
    assert 0.5 < epoch == whole
