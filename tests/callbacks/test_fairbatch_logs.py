"""What FairBatch logs, and when."""

import csv
from pathlib import Path

import lightning as L
import pytest
from helpers import GROUPS, ToyModule, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from fairbatch_lightning import FairBatch, SignedSteps


def test_logs_have_stable_names(tmp_path):
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    run = trainer(callback, logger=CSVLogger(tmp_path))
    run.fit(ToyModule(), loader())
    with open(f"{run.logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fairbatch/gap_max"]]
    assert len(rows) == 3
    for row, record in zip(rows, callback.history, strict=True):
        assert float(row["fairbatch/gap_max"]) == pytest.approx(record.gap_max, rel=1e-5)
        for y in range(2):
            for z, group in enumerate(GROUPS):
                assert float(row[f"fairbatch/loss/{y}/{group}"]) == pytest.approx(float(record.losses[y, z]), rel=1e-5)
                share = float(record.shares_after[y, z])
                assert float(row[f"fairbatch/share/{y}/{group}"]) == pytest.approx(share, rel=1e-5)
        assert int(row["epoch"]) == record.epoch
        assert int(row["step"]) == record.step - 1  # where Lightning puts the values of an epoch
    assert run.progress_bar_metrics["fairbatch/gap_max"] == pytest.approx(callback.history[-1].gap_max, rel=1e-5)
    assert run.logged_metrics["fairbatch/share/1/a"] == pytest.approx(float(callback.shares[1, 0]))


def test_logs_are_written_as_training_goes_on(tmp_path):
    """Not only at its end: a run that is killed leaves what happened, even if the module logs nothing itself."""
    rows = []

    class Count(L.Callback):
        def on_train_epoch_start(self, run, module):
            path = Path(run.logger.log_dir) / "metrics.csv"
            rows.append(path.read_text().count("\n") if path.exists() else 0)

    run = trainer(FairBatch(groups="group", update_every="epoch"), Count(), logger=CSVLogger(tmp_path))
    run.fit(ToyModule(), loader())
    assert rows == [2, 3, 4]  # a header, the shares at the start, and the updates


@pytest.mark.parametrize("every", ["epoch", 5])
def test_all_values_can_be_monitored(tmp_path, every):
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05), update_every=every)
    best = ModelCheckpoint(tmp_path, monitor="fairbatch/gap/1", save_on_train_epoch_end=True)
    run = trainer(callback, best, enable_checkpointing=True)
    run.fit(ToyModule(), loader())
    last_of_epoch = {record.epoch: float(record.gaps[1]) for record in callback.history}
    assert float(best.best_model_score) == pytest.approx(min(last_of_epoch.values()))
    assert len(set(last_of_epoch.values())) == 3


def test_every_update_within_epochs_is_logged(tmp_path):
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05), update_every=5)
    run = trainer(callback, logger=CSVLogger(tmp_path), log_every_n_steps=50)
    run.fit(ToyModule(), loader())
    with open(f"{run.logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fairbatch/gap_max"]]
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19, 24, 29, 34]
    assert float(rows[-1]["fairbatch/gap_max"]) == pytest.approx(callback.history[-1].gap_max, rel=1e-5)
