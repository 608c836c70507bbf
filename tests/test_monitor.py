"""FairnessMonitor in real Trainers, against an evaluation of the model by hand."""

import builtins
import copy
import csv
import math
import pickle
import re
import types
from contextlib import nullcontext

import lightning as L
import pytest
import pytorch_lightning
import torch
from helpers import GROUPS, Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Subset

from fairbatch_lightning import Audit, FairBatch, FairBatchWarning, FairnessMonitor, GroupIndex
from fairbatch_lightning import disparities as d
from fairbatch_lightning.csv_logs import find_logs, read_run
from fairbatch_lightning.plots import confusion_figure
from fairbatch_lightning.predictions import ClassNumbers, CountedPredictions
from fairbatch_lightning.tables import show


class Evaluated(ToyModule):
    """Calls `self(x)` in validation and test."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    test_step = validation_step


class Returning(ToyModule):
    """Does not call `self(x)` but returns the logits."""

    def validation_step(self, batch, batch_idx):
        return {"logits": self.net(batch[0])}


class Named(ToyModule):
    """Calls a submodule only."""

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


class Embedding(ToyModule):
    """What `self(x)` returns is not the logits."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        return {"logits": self.net(batch[0])}

    def forward(self, x):
        return -self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Binary(Evaluated):
    """One logit per sample."""

    def __init__(self, columns=False):
        super().__init__(num_labels=1)
        self.columns = columns

    def forward(self, x):
        return self.net(x) if self.columns else self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0]).flatten()
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[1].float())


class Wrapping(Evaluated):
    """An object with `logits`, like Hugging Face's."""

    def forward(self, x):
        return types.SimpleNamespace(logits=self.net(x))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]).logits, batch[1])


def held_out(dataset=None, batch_size=33, **kwargs):
    return DataLoader(Toy(seed=1) if dataset is None else dataset, batch_size=batch_size, **kwargs)


def by_hand(module, dataset, num_labels=2):
    """The confusion of a module's predictions on a dataset, without our code for it."""
    with torch.no_grad():
        logits = module.net(dataset.x)
    guesses = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
    counts = torch.zeros(len(GROUPS), num_labels, num_labels, dtype=torch.long)
    for group, label, guess in zip(dataset.group_ids, dataset.targets, guesses, strict=True):
        counts[group, label, guess] += 1
    return counts


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Evaluated, {}),
        (Returning, {}),
        (Named, {"logits": "net"}),
        (Embedding, {}),
        (Binary, {}),
        (lambda: Binary(columns=True), {}),
        (Wrapping, {}),
        (lambda: Evaluated(num_labels=4), {}),
    ],
    ids=["forward", "returned", "named", "embedding", "(B,)", "(B, 1)", "object", "many labels"],
)
def test_counts_are_those_of_an_evaluation_by_hand(module, options):
    model = module()
    labels = 4 if model.net.out_features == 4 else 2
    monitor = FairnessMonitor(groups="group", **options)
    run = trainer(monitor, max_epochs=2, num_sanity_val_steps=2)
    validation = Toy(seed=1, num_labels=labels)
    run.fit(model, loader(Toy(num_labels=labels)), held_out(validation))
    expected = by_hand(model, validation, labels)
    assert torch.equal(monitor.audits["val"].confusion, expected)
    assert monitor.audits["val"].group_names == GROUPS
    assert len(monitor.history) == 2
    logged = run.callback_metrics
    assert float(logged["fairness/val/equalized_odds"]) == pytest.approx(float(d.equalized_odds_disparity(expected)))
    assert float(logged["fairness/val/demographic_parity"]) == pytest.approx(
        float(d.demographic_parity_disparity(expected))
    )
    opportunity = d.equal_opportunity_disparity(expected, 1 if labels == 2 else None)
    assert float(logged["fairness/val/equal_opportunity"]) == pytest.approx(float(opportunity))
    assert float(logged["fairness/val/accuracy"]) == pytest.approx(float(d.accuracy(expected)))
    assert float(logged["fairness/val/worst_group_accuracy"]) == pytest.approx(float(d.worst_group_accuracy(expected)))
    right = expected.diagonal(dim1=1, dim2=2) / expected.sum(2)
    assert float(logged["fairness/val/worst_cell_accuracy"]) == pytest.approx(float(right.min()))
    for group, accuracy in zip(GROUPS, d.group_accuracy(expected), strict=True):
        assert float(logged[f"fairness/val/accuracy/{group}"]) == pytest.approx(float(accuracy))
    ratio = d.demographic_parity_disparity(expected, 1 if labels == 2 else None, "ratio")
    assert float(logged["fairness/val/demographic_parity_ratio"]) == pytest.approx(float(ratio))


NAMES = {
    f"fairness/val/{name}"
    for name in (
        "accuracy",
        "worst_group_accuracy",
        "worst_cell_accuracy",
        "equal_opportunity",
        "equalized_odds",
        "demographic_parity",
        "equal_opportunity_ratio",
        "equalized_odds_ratio",
        "demographic_parity_ratio",
    )
}


def test_names_do_not_depend_on_the_data():
    for data in (Toy(seed=1), Toy(seed=2, num_samples=40), Subset(Toy(), [0, 1, 2])):
        monitor = FairnessMonitor(groups="group")
        run = trainer(monitor, max_epochs=1)
        with pytest.warns(FairBatchWarning) if len(data) == 3 else nullcontext():
            run.fit(Evaluated(), loader(), held_out(data))
        assert set(run.callback_metrics) >= NAMES
        rest = set(run.callback_metrics) - NAMES - {"train_loss"}
        assert all(name.startswith("fairness/val/accuracy/") for name in rest)


def test_test_and_validate_on_their_own():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor)
    (result,) = run.test(model, held_out(Toy(seed=3)), verbose=False)
    assert result["fairness/test/accuracy"] == pytest.approx(float(d.accuracy(by_hand(model, Toy(seed=3)))))
    (result,) = run.validate(model, held_out(), verbose=False)
    assert result["fairness/val/accuracy"] == pytest.approx(float(d.accuracy(by_hand(model, Toy(seed=1)))))
    assert list(monitor.audits) == ["test", "val"]
    assert [record.stage for record in monitor.history] == ["test", "val"]


@pytest.mark.parametrize("stages", ["test", ["test"], ("test",)])
def test_only_the_stages_asked_for(stages):
    monitor = FairnessMonitor(groups="group", stages=stages)
    run = trainer(monitor, max_epochs=1)
    run.fit(Evaluated(), loader(), held_out(shuffle=True))  # not looked at
    assert not monitor.history
    run.test(Evaluated(), held_out(), verbose=False)
    assert [record.stage for record in monitor.history] == ["test"]


def test_several_loaders():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    run.fit(model, loader(), [held_out(), held_out(Toy(seed=2), batch_size=7)])
    for number, seed in enumerate((1, 2)):
        expected = by_hand(model, Toy(seed=seed))
        assert torch.equal(monitor.audits[f"val_{number}"].confusion, expected)
        logged = run.callback_metrics[f"fairness/val_{number}/equalized_odds"]
        assert float(logged) == pytest.approx(float(d.equalized_odds_disparity(expected)))


def test_part_of_the_data_and_several_validations_per_epoch():
    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=2, val_check_interval=4, limit_val_batches=3)
    run.fit(Evaluated(), loader(), held_out(batch_size=20))
    assert [record.step for record in monitor.history] == [4, 8, 12, 16, 20, 24]
    assert monitor.audits["val"].num_samples == 60
    figure = monitor.plot()
    assert figure.axes[0].get_xlabel() == "step"


def test_groups_and_labels_as_users_have_them():
    """Several attributes, through a Subset, with labels that are names."""
    data = Toy(seed=1)
    data.targets_as_words = ["no" if y == 0 else "yes" for y in data.targets]
    data.half = [i % 2 for i in range(len(data))]
    part = Subset(data, range(200))
    monitor = FairnessMonitor(groups=["group", "half"], labels="targets_as_words", positive_label="no")
    model = Evaluated()
    trainer(monitor, max_epochs=1).fit(model, loader(), held_out(part))
    audit = monitor.audits["val"]
    assert audit.label_names == ("no", "yes")
    assert audit.positive == 0
    assert audit.group_names[0] == "group=a, half=0"
    assert audit.num_samples == 200


def test_labels_of_an_unknown_class_are_refused():
    data = Toy(seed=1)
    data.words = ["no" if y == 0 else "yes" for y in data.targets]
    monitor = FairnessMonitor(groups="group", labels="words")
    with pytest.raises(ValueError, match=r"tells 4 classes apart, but the data has the labels \['no', 'yes'\]"):
        trainer(monitor, max_epochs=1).fit(Evaluated(num_labels=4), loader(), held_out(data))


def test_a_class_that_validation_does_not_have_keeps_its_place():
    """Labels 0 and 2 of a model with three classes: the confusion has three rows, one of them empty."""
    data = Toy(seed=1, num_labels=3)
    keep = [i for i, y in enumerate(data.targets) if y != 1]
    monitor = FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match="tells 3 classes apart, but val data has no samples of 1. If") as caught:
        trainer(monitor, max_epochs=3).fit(
            Evaluated(num_labels=3), loader(Toy(num_labels=3)), held_out(Subset(data, keep))
        )
    assert len([w for w in caught if issubclass(w.category, FairBatchWarning)]) == 1
    confusion = monitor.audits["val"].confusion
    assert confusion.shape == (3, 3, 3)
    assert confusion[:, 1].sum() == 0
    assert confusion[:, 2].sum() > 0


def test_one_group_only_is_undefined_not_fair():
    data = Toy(seed=1)
    alone = Subset(data, [i for i, group in enumerate(data.group) if group == "a"])
    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    with pytest.warns(
        FairBatchWarning,
        match="all val samples are of the group a: disparities are NaN",
    ):
        run.fit(Evaluated(), loader(), held_out(alone))
    assert math.isnan(run.callback_metrics["fairness/val/equalized_odds"])
    assert not math.isnan(run.callback_metrics["fairness/val/accuracy"])


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


def test_next_to_fairbatch_with_the_validation_estimate():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    fairbatch = FairBatch(groups="group", estimate="validation", alpha=0.05)
    trainer(monitor, fairbatch, max_epochs=2).fit(model, loader(), held_out())
    assert len(fairbatch.history) == 2
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


def test_in_a_trainer_of_the_other_namespace():
    class Module(pytorch_lightning.LightningModule):
        __init__, forward, training_step = ToyModule.__init__, ToyModule.forward, ToyModule.training_step
        configure_optimizers = ToyModule.configure_optimizers
        validation_step = Evaluated.validation_step

    def init(self):
        pytorch_lightning.LightningModule.__init__(self)
        self.net, self.lr, self.batches = torch.nn.Linear(4, 2), 0.1, []

    Module.__init__ = init
    model, monitor = Module(), FairnessMonitor(groups="group")
    run = pytorch_lightning.Trainer(
        max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    run.fit(model, loader(), held_out())
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


# ---- what it leaves behind, and where things live -------------------------------------------------------------------


def test_leaves_no_trace():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    run.fit(model, loader(), held_out())
    assert not model._forward_hooks
    assert pickle.loads(pickle.dumps(monitor)).history == monitor.history
    copy.deepcopy(monitor)

    class Broken(Evaluated):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    model = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(monitor, max_epochs=1, num_sanity_val_steps=0).fit(model, loader(), held_out())
    assert not model._forward_hooks


def test_training_is_the_same_with_and_without():
    weights = []
    for callbacks in ([], [FairnessMonitor(groups="group")]):
        model = Evaluated()
        L.seed_everything(0)
        trainer(*callbacks, max_epochs=2).fit(model, loader(), held_out())
        weights.append((model.net.weight.detach().clone(), model.batches))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_counts_live_where_the_module_is():
    data = Toy(seed=1)
    index = GroupIndex.from_dataset(data, groups="group")
    counted = CountedPredictions(held_out(data), index, torch.device("meta"), ClassNumbers())
    size = len(counted.next_batch())
    counted.add(torch.zeros(size, 2, device="meta"))
    assert counted._metric.confusion.device.type == "meta"


# ---- tables, logs, pictures -----------------------------------------------------------------------------------------


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
        assert re.search(rf"accuracy of {group}\s*│\s*{value:.3f}", printed)
    run.test(model, held_out(Toy(seed=3)), verbose=False)
    assert "Fairness on test data" not in capsys.readouterr().out


def test_table_without_rich(monkeypatch, capsys):
    real_import = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor)
    run.test(Evaluated(), held_out(Toy(seed=3)), verbose=False)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    show(monitor.audits["test"].tables("Fairness")[0])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Fairness: 240 samples")
    assert lines[1].split() == ["label", "group", "samples", "right", "95%", "interval"]
    assert len({line.index("to") for line in lines[2:8]}) == 1


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
    assert set(tags["images"]) == {"fairbatch", "fairness/val", "fairness/val/confusion", "fairness/test/confusion"}


def test_pictures_show_what_was_measured():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    with pytest.raises(ValueError, match="Nothing has been monitored yet: fit, validate or test"):
        monitor.plot()
    with pytest.raises(ValueError, match="Nothing has been monitored yet"):
        monitor.plot_confusion()
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


# ---- wrong use ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Toy()[0]])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda: held_out(shuffle=True), ValueError, "FairnessMonitor has to know .* but the DataLoader shuffles"),
        (lambda: DataLoader(Stream(), batch_size=2), TypeError, "map-style dataset. It got DataLoader of Stream"),
        (
            lambda: CombinedLoader({"a": held_out(), "b": held_out()}, "max_size"),
            ValueError,
            "one after the other.*'max_size'",
        ),
    ],
    ids=["shuffled", "stream", "combined"],
)
def test_loaders_whose_samples_are_unknown_are_refused(data, error, message):
    class Any(Evaluated):
        def validation_step(self, batch, batch_idx):
            pass

    run = trainer(FairnessMonitor(groups="group"), max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(error, match=message):
        run.fit(Any(), loader(), data())


def test_logits_out_of_reach_are_refused():
    class Hiding(ToyModule):
        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    with pytest.raises(RuntimeError, match=r"FairnessMonitor found no logits .* `validation_step` did not call"):
        trainer(FairnessMonitor(groups="group"), max_epochs=1).fit(Hiding(), loader(), held_out())
    with pytest.raises(ValueError, match=r"`logits` to name a submodule of Hiding but got 'head'. It has \['net'\]"):
        trainer(FairnessMonitor(groups="group", logits="head"), max_epochs=1).fit(Hiding(), loader(), held_out())


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"`stages` to be some of \['validate', 'test'\] but got \['val'\]"):
        FairnessMonitor(groups="group", stages="val")
    with pytest.raises(ValueError, match="`stages`"):
        FairnessMonitor(groups="group", stages=[])
    with pytest.raises(ValueError, match="`logits` to be the name of a submodule but got 3"):
        FairnessMonitor(groups="group", logits=3)
    with pytest.raises(ValueError, match="Found no groups in Toy"):
        trainer(FairnessMonitor(groups="race"), max_epochs=1).fit(Evaluated(), loader(), held_out())
    with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 1\] but got 'maybe'"):
        trainer(FairnessMonitor(groups="group", positive_label="maybe"), max_epochs=1).fit(
            Evaluated(), loader(), held_out()
        )
    for values in (Toy().group, torch.zeros(240), [0, 1, 2]):
        with pytest.raises(ValueError, match=r"`groups` of FairnessMonitor to be the name .* but got values"):
            FairnessMonitor(groups=values)


@pytest.mark.parametrize(
    ("options", "loaders"),
    [
        ({"groups": "race"}, held_out),
        ({"groups": "group", "logits": "head"}, held_out),
        ({"groups": "group"}, lambda: held_out(shuffle=True)),
    ],
    ids=["groups", "logits", "shuffled"],
)
def test_mistakes_are_found_before_the_training(options, loaders):
    run = trainer(FairnessMonitor(**options), max_epochs=1, num_sanity_val_steps=1)
    with pytest.raises(ValueError, match=r"Found no groups|name a submodule|shuffles"):
        run.fit(Evaluated(), loader(), loaders())
    assert run.global_step == 0


# ---- models and data that could be mistaken -------------------------------------------------------------------------


class Sigmoid(Binary):
    """Gives probabilities instead of logits."""

    def forward(self, x):
        return torch.sigmoid(self.net(x)).squeeze(1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.binary_cross_entropy(self(batch[0]), batch[1].float())


def test_probabilities_are_noticed():
    model, monitor = Sigmoid(), FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match=r"probabilities rather than logits, use FairnessMonitor.threshold=0.5"):
        trainer(monitor, max_epochs=2).fit(model, loader(), held_out())
    monitor = FairnessMonitor(groups="group", threshold=0.5)
    model = Sigmoid()
    trainer(monitor, max_epochs=2).fit(model, loader(), held_out())
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


def test_a_diverged_model_is_not_fair():
    class Diverged(Evaluated):
        def forward(self, x):
            return self.net(x) * (torch.nan if not self.training else 1)

    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    with pytest.warns(FairBatchWarning, match="the logits of 240 val samples are NaN: the model has diverged"):
        run.fit(Diverged(), loader(), held_out())
    assert all(math.isnan(run.callback_metrics[name]) for name in NAMES)


def test_labels_mean_the_same_class_in_data_that_lacks_one():
    """Labels 1, 2, 3 of three classes; without 3 the others would look like class numbers."""
    data, fewer = Toy(seed=1, num_labels=3), Toy(seed=1, num_labels=3)
    data.label = [int(y) + 1 for y in data.targets]
    keep = [i for i, y in enumerate(fewer.targets) if y != 2]
    fewer.label = [int(y) + 1 for y in fewer.targets]
    model, monitor = Evaluated(num_labels=3), FairnessMonitor(groups="group", labels="label", positive_label=3)
    run = trainer(monitor)
    run.validate(model, held_out(data), verbose=False)
    with pytest.warns(FairBatchWarning, match="no samples of 3"):
        run.test(model, held_out(Subset(fewer, keep)), verbose=False)
    expected = by_hand(model, data, 3)
    assert torch.equal(monitor.audits["val"].confusion, expected)
    assert torch.equal(monitor.audits["test"].confusion[:, :2], expected[:, :2])
    assert monitor.audits["test"].positive == 2
    assert monitor.audits["test"].label_names == ("1", "2", "3")
    run = trainer(FairnessMonitor(groups="group", labels="label"))
    with pytest.warns(FairBatchWarning):
        run.validate(model, held_out(Subset(fewer, keep)), verbose=False)  # 1 and 2 may be class numbers
    with pytest.raises(
        ValueError, match=r"labels \[1, 2, 3\], of which it is not known .*elsewhere it has \{1: 1, 2: 2\}"
    ):
        run.test(model, held_out(data), verbose=False)  # but then 3 is not


def test_names_of_classes_that_do_not_occur_do_not_collide():
    data = Toy(seed=1, num_labels=3)
    data.classes = ["1", "2", "3"]
    keep = [i for i, y in enumerate(data.targets) if y != 1]
    monitor = FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match="no samples of class 1"):
        trainer(monitor).validate(Evaluated(num_labels=3), held_out(Subset(data, keep)), verbose=False)
    assert monitor.audits["val"].label_names == ("1", "class 1", "3")


def test_several_outputs_in_a_step_are_refused():
    class Augmenting(ToyModule):
        def validation_step(self, batch, batch_idx):
            return {"logits": self(batch[0]) + self(-batch[0])} if self.returns else self(batch[0]) + self(-batch[0])

    model = Augmenting()
    model.returns = False
    with pytest.raises(RuntimeError, match=r"cannot tell which output .* test-time augmentation. Return \{\"logits\""):
        trainer(FairnessMonitor(groups="group")).validate(model, held_out(), verbose=False)
    model.returns = True
    monitor = FairnessMonitor(groups="group")
    trainer(monitor).validate(model, held_out(), verbose=False)
    assert monitor.audits["val"].num_samples == 240


def test_an_embedding_is_not_taken_for_logits_in_silence():
    class Embedded(Evaluated):
        def forward(self, x):
            return torch.cat([x, x, x, x], 1)

    with pytest.warns(FairBatchWarning, match="tells 16 classes apart, .* say where the logits are"):
        trainer(FairnessMonitor(groups="group")).validate(Embedded(), held_out(), verbose=False)


# ---- what was measured is not lost or mixed up ----------------------------------------------------------------------


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
    assert "fairness_half/val/accuracy/1" in logged
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


@pytest.mark.slow
def test_many_labels_stay_bearable(tmp_path):
    generator = torch.Generator().manual_seed(0)
    confusion = torch.randint(3, (4, 40, 40), generator=generator)
    audit = Audit(confusion, tuple(map(str, range(40))), tuple("abcd"), None)
    cells, measures = audit.tables("Fairness")
    assert len(cells.rows) == 60
    assert "the 60 of 160 cells that are worst off" in cells.title
    assert float(cells.rows[0][3]) == float(smallest_part_right(confusion))
    assert measures.rows[4][2]
    width, height = confusion_figure(confusion).get_size_inches()
    assert width * height < 600
    large = Audit(torch.ones(3, 300, 300, dtype=torch.long), tuple(map(str, range(300))), tuple("abc"), None)
    assert all(math.isnan(low) for name, (low, _) in large.intervals().items() if name != "accuracy")


def smallest_part_right(confusion):
    """The smallest part of a cell that is predicted right, as the table prints it."""
    right = confusion.diagonal(dim1=1, dim2=2) / confusion.sum(2)
    return f"{float(right.min()):.3f}"


def test_counts_of_very_many_labels_are_not_logged(tmp_path):
    data = Toy(seed=1, num_labels=2)
    logger = CSVLogger(tmp_path)
    with pytest.warns(FairBatchWarning, match="tells 60 classes apart"):
        trainer(FairnessMonitor(groups="group"), logger=logger).validate(
            Evaluated(num_labels=60), held_out(data), verbose=False
        )
    with open(f"{logger.log_dir}/metrics.csv") as file:
        assert len(next(csv.reader(file))) < 30


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


def test_impossible_number_of_samples():
    with pytest.raises(ValueError, match="`min_samples` to be an integer of at least 1 but got 0"):
        FairnessMonitor("group", min_samples=0)
