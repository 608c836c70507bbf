"""Logged values: their names, and that CSV logs of real runs are read back as they were."""

import csv
import math
from pathlib import Path

import pytest
import torch
from evaluated import Evaluated, fit_with_log, held_out
from helpers import GROUPS, Toy, loader, trainer
from lightning.pytorch.loggers import CSVLogger

from fairbatch_lightning import FairBatch, FairnessMonitor, GroupIndex, SignedSteps
from fairbatch_lightning.fairness import Audit, FairnessRecord
from fairbatch_lightning.reports.log_format import (
    count_values,
    find_logs,
    log_name,
    monitor_prefix,
    parts_of,
    read_run,
    record_values,
    share_values,
    update_values,
)
from fairbatch_lightning.reports.page import write_report
from fairbatch_lightning.rules.history import UpdateRecord


def test_names_with_slashes():
    name = log_name("fairness", "val", "count", "Asian/Pacific", "0", "1")
    assert parts_of(name) == ("fairness", "val", "count", "Asian/Pacific", "0", "1")
    assert parts_of(log_name("%2F", "50%", "a/b")) == ("%2F", "50%", "a/b")


def test_names_of_an_update():
    index = GroupIndex.from_values(labels=[0, 0, 1], groups=["a/b", "c", "c"])
    shares, nan = torch.tensor([[0.25, 0.75], [0.0, 1.0]]), math.nan
    record = UpdateRecord(0, 3, torch.tensor([[1.0, 2.0], [nan, 4.0]]), torch.tensor([1.0, nan]), shares, shares)
    expected = {"fairbatch/share/0/a%2Fb": 0.25, "fairbatch/share/0/c": 0.75, "fairbatch/share/1/c": 1.0}
    assert share_values(shares, index) == expected
    losses = {"fairbatch/loss/0/a%2Fb": 1.0, "fairbatch/loss/0/c": 2.0, "fairbatch/loss/1/c": 4.0}
    assert update_values(record, index) == {"fairbatch/gap_max": 1.0, "fairbatch/gap/0": 1.0, **expected, **losses}


def test_names_of_an_audit():
    audit = Audit(torch.tensor([[[1, 2], [3, 4]]]), ("no", "yes"), ("all",), positive=1, num_broken=5, min_samples=6)
    record = FairnessRecord("val", 7, 8, {"accuracy": 0.5, "equalized_odds": math.nan}, {"all": 0.5})
    assert set(record_values(record, monitor_prefix("race"))) == {
        "fairness_race/val/accuracy",
        "fairness_race/val/equalized_odds",
        "fairness_race/val/group_accuracy/all",
    }
    assert count_values(audit, record, monitor_prefix(None)) == {
        "epoch": 7,
        "fairness/val/count/all/no/no": 1,
        "fairness/val/count/all/no/yes": 2,
        "fairness/val/count/all/yes/no": 3,
        "fairness/val/count/all/yes/yes": 4,
        "fairness/val/nan": 5,
        "fairness/val/min_samples": 6,
        "fairness/val/positive/no": 0,
        "fairness/val/positive/yes": 1,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, and the callbacks of the second."""
    folder = tmp_path_factory.mktemp("runs")
    fit_with_log(folder, "plain", FairnessMonitor(groups="group"))
    callbacks = FairBatch(groups="group", rule=SignedSteps(alpha=0.05)), FairnessMonitor(groups="group")
    fit_with_log(folder, "fair", *callbacks)
    return folder, *callbacks


def test_log_is_read_back_as_it_was(runs):
    folder, fairbatch, monitor = runs
    run = read_run("fair", folder / "fair" / "metrics.csv")
    assert list(run.shares.label_names) == ["0", "1"]
    assert list(run.shares.group_names) == list(GROUPS)
    history = fairbatch.history
    shares = torch.stack([history[0].shares_before, *(record.shares_after for record in history)])
    torch.testing.assert_close(run.shares.shares, shares.float())
    torch.testing.assert_close(run.shares.losses, torch.stack([record.losses for record in history]).float())
    torch.testing.assert_close(run.shares.gaps, torch.stack([record.gaps for record in history]).float())
    for stage in ("val", "test"):
        assert torch.equal(run.audits[stage].confusion, monitor.audits[stage].confusion)
        assert run.audits[stage].values() == monitor.audits[stage].values()
    curve = run.curves["val"]
    measured = [record for record in monitor.history if record.stage == "val"]
    assert curve.times == [0, 1, 2]
    assert curve.values["equalized_odds"] == pytest.approx([r.values["equalized_odds"] for r in measured])
    assert curve.by_group["b"] == pytest.approx([r.group_accuracies["b"] for r in measured])
    assert list(run.finals()) == ["test"]


def test_what_was_not_logged_is_missing(runs, tmp_path):
    folder, *_ = runs
    assert read_run("plain", folder / "plain" / "metrics.csv").shares is None
    only = fit_with_log(tmp_path, "only", FairBatch(groups="group", update_every="epoch"), test=False)
    run = read_run("only", only / "metrics.csv")
    assert run.shares.shares.shape == (4, 2, 3)
    assert not run.audits
    assert not run.finals()
    assert write_report([run], tmp_path / "report").exists()


def test_names_with_slashes_and_numbers_and_a_positive_label_of_ones_own(tmp_path):
    data = Toy(seed=1)
    data.region = [["10", "9", "Asian/Pacific"][z] for z in data.group_ids]
    monitor = FairnessMonitor(groups="region", positive_label=0)
    place = fit_with_log(tmp_path, "run", monitor, test=False, validation=held_out(data))
    audit = read_run("run", place / "metrics.csv").audits["val"]
    assert audit.group_names == ("9", "10", "Asian/Pacific")
    assert audit.positive == 0
    expected = monitor.audits["val"]
    order = [expected.group_names.index(name) for name in audit.group_names]
    assert torch.equal(audit.confusion, expected.confusion[order])
    assert audit.values() == expected.values()


def test_several_validation_loaders_and_validations(tmp_path):
    monitor = FairnessMonitor(groups="group")
    validation = [held_out(Toy(seed=seed)) for seed in (1, 2)]
    place = fit_with_log(tmp_path, "run", monitor, test=False, validation=validation, val_check_interval=6)
    run = read_run("run", place / "metrics.csv")
    assert list(run.audits) == ["val_0", "val_1"]
    for stage in run.audits:
        assert torch.equal(run.audits[stage].confusion, monitor.audits[stage].confusion)
    assert run.curves["val_1"].times == [5, 11, 17, 23, 29, 35]
    assert run.curves["val_1"].xlabel == "step"
    write_report([run], tmp_path / "report")
    assert (tmp_path / "report" / "run0_val_1_confusion.png").exists()


def test_logs_are_found_and_told_apart(runs, tmp_path, monkeypatch):
    folder, *_ = runs
    assert list(find_logs([folder])) == ["fair", "plain"]
    assert list(find_logs([folder / "plain", folder / "fair"])) == ["plain", "fair"]
    assert list(find_logs([folder / "plain", folder / "plain"])) == ["plain"]
    monkeypatch.chdir(folder / "plain")
    assert list(find_logs([Path(".")])) == ["plain"]
    with pytest.raises(FileNotFoundError, match=r"found no metrics.csv there. Train with Trainer\(logger=CSVLogger"):
        find_logs([tmp_path])


@pytest.mark.slow
def test_columns_of_others_do_no_harm(tmp_path):
    class Chatty(Evaluated):
        def on_validation_epoch_end(self):
            for name in ("fairness", "fairness/gap", "fairness/val", "fairbatch", "fairness_x/y/z"):
                self.log(name, 1.0)

    monitors = FairnessMonitor(groups="group"), FairnessMonitor(groups="group", name="again")
    logger = CSVLogger(tmp_path, name="", version="run", prefix="exp-1")
    run = trainer(FairBatch(groups="group", update_every="epoch"), *monitors, logger=logger)
    run.fit(Chatty(), loader(), held_out())
    path = tmp_path / "run" / "metrics.csv"
    rows = list(csv.DictReader(path.open()))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "comment", "exp-1-fairness/val/note"])
        writer.writeheader()
        writer.writerows({**row, "comment": "True", "exp-1-fairness/val/note": "words"} for row in rows)
    read = read_run("run", path)
    assert list(read.audits) == ["again/val", "val"]
    assert torch.equal(read.audits["again/val"].confusion, monitors[1].audits["val"].confusion)
    assert read.shares.shares.shape == (4, 2, 3)
    assert len(read.curves["val"].times) == 3
    write_report([read], tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert "again/val, 240" in text
