"""What FairnessMonitor leaves behind: tables, logs, pictures, histories and checkpoints."""

import csv
import re

import pytest
import torch
from evaluated import Evaluated, by_hand, held_out
from helpers import GROUPS, Toy, loader, resume, trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor
from fairbatch_lightning.reports.log_format import find_logs, read_run


def test_table_at_the_end_of_a_test(capsys):
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor)
    run.test(model, held_out(Toy(seed=3, num_samples=150)))
    printed = capsys.readouterr().out
    assert "Fairness on test data: 150 samples" in printed
    counts = by_hand(model, Toy(seed=3, num_samples=150)).sum(2)
    assert printed.count("small") == int((counts < 30).sum()) > 0
    assert "equalized odds" in printed
    assert "four-fifths rule" in printed
    for group, value in monitor.audits["test"].group_accuracies().items():
        assert re.search(rf"accuracy of {group}\s+{value:.3f}", printed)
    run.test(model, held_out(Toy(seed=3)), verbose=False)
    assert "Fairness on test data" not in capsys.readouterr().out


def test_counts_go_to_the_csv_log_only(tmp_path):
    monitor = FairnessMonitor(groups="group")
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    model = Evaluated()
    run = trainer(FairBatch(groups="group"), monitor, max_epochs=2, logger=loggers)
    run.fit(model, loader(), held_out())
    run.test(model, held_out(Toy(seed=3)), verbose=False)
    with open(f"{loggers[0].log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    counts = [row for row in rows if row["fairness/val/count/a/0/0"]]
    assert len(counts) == 2
    assert float(counts[-1]["fairness/val/count/b/1/0"]) == by_hand(model, Toy(seed=1))[1, 1, 0]
    assert [row["epoch"] for row in counts] == ["0", "1"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(loggers[1].log_dir)
    board.Reload()
    tags = board.Tags()
    assert "fairness/val/equalized_odds" in tags["scalars"]
    assert not [tag for tag in tags["scalars"] if "count" in tag]
    assert set(tags["images"]) == {
        "fairbatch/curves",
        "fairness/val/curves",
        "fairness/val/confusion",
        "fairness/test/confusion",
    }


def test_counts_of_very_many_labels_are_not_logged(tmp_path):
    data = Toy(seed=1, num_labels=2)
    logger = CSVLogger(tmp_path)
    with pytest.warns(FairBatchWarning, match="tells 60 classes apart"):
        trainer(FairnessMonitor(groups="group"), logger=logger).validate(
            Evaluated(num_labels=60), held_out(data), verbose=False
        )
    with open(f"{logger.log_dir}/metrics.csv") as file:
        assert len(next(csv.reader(file))) < 30


def test_pictures_show_what_was_measured():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=3)
    run.fit(model, loader(), held_out())
    disparity = monitor.plot().axes[1]
    drawn = {line.get_label(): list(line.get_ydata()) for line in disparity.lines}
    assert drawn["equalized odds"] == [record.values["equalized_odds"] for record in monitor.history]
    assert disparity.get_xlabel() == "epoch"
    titles = [axes.get_title() for axes in monitor.plot_confusion().axes]
    counts = by_hand(model, Toy(seed=1)).sum((1, 2)).tolist()
    assert titles[:3] == [f"{group} ({count})" for group, count in zip(GROUPS, counts, strict=True)]
    with pytest.raises(ValueError, match=r"one of \['val'\], but got 'test'"):
        monitor.plot("test")


def test_checkpoints_and_early_stopping_follow_it(tmp_path):
    monitor = FairnessMonitor(groups="group")
    best = ModelCheckpoint(tmp_path, monitor="fairness/val/equalized_odds", mode="min")
    stop = EarlyStopping("fairness/val/worst_group_accuracy", mode="max", patience=1)
    run = trainer(monitor, best, stop, max_epochs=30, enable_checkpointing=True)
    run.fit(Evaluated(lr=1.0), loader(), held_out())
    values = [record.values["equalized_odds"] for record in monitor.history]
    assert float(best.best_model_score) == pytest.approx(min(values))
    assert run.current_epoch < 30


def test_history_goes_on_after_resuming(tmp_path):
    first = FairnessMonitor(groups="group")
    run = trainer(first, max_epochs=2)
    run.fit(Evaluated(), loader(), held_out())
    run.save_checkpoint(tmp_path / "a.ckpt")
    second = FairnessMonitor(groups="group")
    run = trainer(second, max_epochs=3)
    resume(run, Evaluated(), loader(), tmp_path / "a.ckpt", held_out())
    assert [record.epoch for record in second.history] == [0, 1, 2]
    assert second.history[:2] == first.history


def test_another_fit_starts_afresh():
    monitor = FairnessMonitor(groups="group")
    for _ in range(2):
        trainer(monitor, max_epochs=2).fit(Evaluated(), loader(), held_out())
    assert [record.epoch for record in monitor.history] == [0, 1]


def test_testing_a_checkpoint_does_not_undo_what_was_measured(tmp_path):
    monitor = FairnessMonitor(groups="group")
    first = ModelCheckpoint(tmp_path, monitor="epoch_number", mode="min")

    class Numbered(Evaluated):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self(batch[0])
            self.log("epoch_number", float(self.current_epoch))

    model = Numbered()
    run = trainer(monitor, first, max_epochs=3, enable_checkpointing=True)
    run.validate(model, held_out(), verbose=False)
    run.fit(model, loader(), held_out())
    run.test(model, held_out(), ckpt_path="best", verbose=False)
    run.test(model, held_out(), ckpt_path="best", verbose=False)
    assert [record.stage for record in monitor.history] == ["val"] * 4 + ["test"] * 2


def test_no_table_of_an_earlier_test(capsys):
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor)
    run.test(model, [held_out(), held_out()])
    assert capsys.readouterr().out.count("Fairness on test_") == 2
    run.test(model, held_out())
    printed = capsys.readouterr().out
    assert "test_0" not in printed
    assert printed.count("Fairness on test data") == 1
    assert list(monitor.audits) == ["test"]


def test_two_monitors_of_two_attributes(tmp_path):
    data = Toy(seed=1)
    data.half = [i % 2 for i in range(len(data))]
    by_group, by_half = FairnessMonitor(groups="group"), FairnessMonitor(groups="half", name="half")
    run = trainer(by_group, by_half, max_epochs=1)
    run.fit(Evaluated(), loader(), held_out(data))
    logged = run.callback_metrics
    assert float(logged["fairness/val/accuracy"]) == float(logged["fairness_half/val/accuracy"])
    assert "fairness_half/val/group_accuracy/1" in logged
    run.save_checkpoint(tmp_path / "a.ckpt")
    resumed = FairnessMonitor(groups="half", name="half"), FairnessMonitor(groups="group")
    resume(trainer(*resumed, max_epochs=2), Evaluated(), loader(), tmp_path / "a.ckpt", held_out(data))
    assert resumed[0].history[0] == by_half.history[0]
    assert resumed[1].history[0] == by_group.history[0]


@pytest.mark.slow
@pytest.mark.parametrize("names", [["$0_$25k", "$25k_$50k", "_other"], ["[/none]", "[unknown]", "a/b 50%"]])
def test_names_are_shown_as_they_are(names, tmp_path, capsys):
    data = Toy(seed=1)
    data.income = [names[z] for z in data.group_ids]
    train = Toy()
    train.income = [names[z] for z in train.group_ids]
    fairbatch, monitor = FairBatch(groups="income"), FairnessMonitor(groups="income")
    run = trainer(fairbatch, monitor, max_epochs=1, logger=TensorBoardLogger(tmp_path))
    model = Evaluated()
    run.fit(model, loader(train), held_out(data))
    run.test(model, held_out(data))
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    for figure in (fairbatch.plot(), monitor.plot(), monitor.plot_confusion()):
        figure.savefig(tmp_path / "figure.png")
    shown = [text.get_text().strip("\u200b") for text in fairbatch.plot().axes[-1].get_legend().get_texts()]
    assert shown == [name.replace("$", r"\$") for name in sorted(names)]


def test_rates_of_few_samples_can_be_left_out(tmp_path, capsys):
    monitors = [FairnessMonitor("group"), FairnessMonitor("group", min_samples=12, name="large")]
    run = trainer(*monitors, logger=CSVLogger(tmp_path))
    run.test(Evaluated(), DataLoader(Toy(70), batch_size=20))
    whole, large = (monitor.audits["test"] for monitor in monitors)
    assert torch.equal(whole.confusion, large.confusion)
    assert whole.confusion.sum(2).min() < 12
    assert large.values()["equalized_odds"] != whole.values()["equalized_odds"]
    assert "cells of at least 12 samples" in capsys.readouterr().out.replace("\n", " ")
    (path,) = find_logs([tmp_path]).values()
    assert read_run("run", path).audits["large/test"].min_samples == 12
