"""The one line in a real Trainer."""

import csv
import multiprocessing
import pickle
from pathlib import Path

import lightning as L
import pytest
import pytorch_lightning
import torch
from helpers import GROUPS, Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from fairbatch_lightning import EqualizedOdds, FairBatch, FairSampler, GroupIndex, ShareController


class ToyData(L.LightningDataModule):
    def setup(self, stage):
        self.dataset = Toy()

    def train_dataloader(self):
        return loader(self.dataset)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=20)


class OwnLoader(ToyModule):
    def train_dataloader(self):
        return loader()


def fit(callback, module=None, data=None, **kwargs):
    module = ToyModule() if module is None else module
    run = trainer(callback, **kwargs)
    run.fit(module, loader() if data is None else data)
    return module


def reference_run(num_epochs, alpha=0.05, num_labels=2):
    """Train by hand with the parts, without Lightning: what the callback must do."""
    dataset, module = Toy(num_labels=num_labels), ToyModule(num_labels)
    index = GroupIndex.from_dataset(dataset, groups="group")
    controller = ShareController(index.counts, alpha=alpha)
    sampler = FairSampler(dataset.targets, dataset.group, 20, drop_last=False)
    optimizer = module.configure_optimizers()
    batches, losses = [], []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        sampler.shares = controller.shares
        for batch in sampler.batches():
            batches.append(batch)
            optimizer.zero_grad()
            functional.cross_entropy(module(dataset.x[batch]), dataset.targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            per_sample = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none")
        cells = torch.zeros(index.shape, dtype=torch.float64)
        cells.index_put_((dataset.targets, dataset.group_ids), per_sample.double(), accumulate=True)
        losses.append(cells / index.counts)
        controller.update(EqualizedOdds().signal(losses[-1], index.counts))
    return module, batches, losses, controller.shares


@pytest.mark.parametrize("num_labels", [2, 3])
def test_equals_the_parts_put_together_by_hand(num_labels):
    """Batches, losses, shares and weights of a Trainer with the callback are those of a plain loop."""
    callback = FairBatch("equalized_odds", groups="group", estimate="exact", alpha=0.05)
    module = fit(callback, ToyModule(num_labels), loader(Toy(num_labels=num_labels)), max_epochs=6)
    expected, batches, losses, shares = reference_run(6, num_labels=num_labels)
    assert module.batches == batches
    for record, loss in zip(callback.history, losses, strict=True):
        torch.testing.assert_close(record.losses, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(callback.shares, shares)
    assert (callback.shares - callback.history[0].shares_before).abs().max() > 0.04
    torch.testing.assert_close(module.net.weight, expected.net.weight)


def test_history_tells_the_story():
    callback = FairBatch(groups="group", alpha=0.05)
    assert callback.shares is None
    assert callback.counts is None
    assert callback.history == []
    fit(callback, max_epochs=4)
    assert [record.epoch for record in callback.history] == [0, 1, 2, 3]
    assert [record.step for record in callback.history] == [12, 24, 36, 48]
    assert callback.counts.sum() == 240
    for before, after in zip(callback.history, callback.history[1:], strict=False):
        assert torch.equal(before.shares_after, after.shares_before)
    assert torch.equal(callback.history[-1].shares_after, callback.shares)
    for record in callback.history:
        assert record.gap_max == record.gaps.max()
        spread = record.losses.max(1).values - record.losses.min(1).values
        torch.testing.assert_close(record.gaps, spread)


@pytest.mark.parametrize("source", ["datamodule", "module", "loader", "list", "dict", "combined"])
def test_every_source_of_the_train_loader(source):
    _, batches, _, _ = reference_run(3)
    callback = FairBatch(groups="group", alpha=0.05)
    module = OwnLoader() if source == "module" else ToyModule()
    run = trainer(callback)
    given = loader()
    if source in ("list", "dict", "combined"):
        inside = [given] if source == "list" else {"only": given}
        unwrap = (lambda batch: batch[0]) if source == "list" else (lambda batch: batch["only"])
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(unwrap(batch), batch_idx)
        given = CombinedLoader(inside, "min_size") if source == "combined" else inside
    run.fit(module, **{"datamodule": {"datamodule": ToyData()}, "module": {}}.get(source, {"train_dataloaders": given}))
    assert module.batches == batches


def test_users_objects_are_as_before():
    given, module = loader(), ToyModule()
    before = dict(vars(given))
    run = trainer(FairBatch(groups="group"))
    run.fit(module, given)
    assert vars(given) == before
    assert not module._forward_hooks
    assert "dataloader" not in vars(run.fit_loop._data_source)
    assert "log" not in vars(module)


class Holding(L.LightningDataModule):
    """Hands out the same loader every time."""

    def __init__(self):
        super().__init__()
        self.held = loader()

    def train_dataloader(self):
        return self.held


@pytest.mark.parametrize("source", ["loader", "datamodule"])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_batch_end"])
def test_users_objects_are_as_before_after_an_exception(source, hook):
    def fail(*args):
        raise RuntimeError("boom")

    data, module = Holding(), ToyModule()
    setattr(module, hook, fail)
    given = data.held
    before, before_module = dict(vars(given)), set(vars(data))
    run = trainer(FairBatch(groups="group"))
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(module, **({"datamodule": data} if source == "datamodule" else {"train_dataloaders": given}))
    assert vars(given) == before
    assert set(vars(data)) == before_module
    assert not module._forward_hooks
    assert "dataloader" not in vars(run.fit_loop._data_source)


def test_a_second_fit_starts_afresh():
    callback = FairBatch(groups="group", alpha=0.05)
    first = fit(callback)
    second = fit(callback)
    assert first.batches == second.batches
    assert len(callback.history) == 3


def test_a_used_callback_can_be_pickled():
    """As the processes of `ddp_spawn` need it; what happened in the fit comes along."""
    callback = FairBatch(groups="group", alpha=0.05)
    fit(callback, data=loader(num_workers=1, persistent_workers=True))
    callback.log = callback.log_dict = None  # Lightning's, bound to the module
    copy = pickle.loads(pickle.dumps(callback))
    assert torch.equal(copy.shares, callback.shares)
    assert torch.equal(copy.counts, callback.counts)
    assert len(copy.history) == 3
    assert copy.state_dict() == {}
    copy.teardown(None, None, "validate")
    fit(copy)
    assert torch.equal(copy.shares, callback.shares)


def test_drop_last_and_epoch_length_are_the_loaders():
    dataset = Subset(Toy(), range(230))
    for drop_last in (True, False):
        plain = loader(dataset, drop_last=drop_last)
        module = fit(FairBatch(groups="group"), data=plain, max_epochs=1)
        assert len(module.batches) == len(plain)
        assert {len(batch) for batch in module.batches} == {20}


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_workers_change_nothing(num_workers, persistent):
    _, batches, _, shares = reference_run(3)
    callback = FairBatch(groups="group", alpha=0.05)
    module = fit(callback, data=loader(num_workers=num_workers, persistent_workers=persistent))
    assert module.batches == batches
    torch.testing.assert_close(callback.shares, shares)
    assert not multiprocessing.active_children()


def test_updates_within_an_epoch():
    callback = FairBatch(groups="group", alpha=0.05, update_every=5)
    module = fit(callback, max_epochs=2)
    assert [record.step for record in callback.history] == [5, 10, 15, 20]
    index = callback.index
    expected = FairSampler(Toy().targets, Toy().group, 20, drop_last=False)
    batches = []
    for epoch in range(2):
        expected.set_epoch(epoch)
        for batch in expected.batches():
            batches.append(batch)
            if len(batches) % 5 == 0:
                expected.shares = callback.history[len(batches) // 5 - 1].shares_after
    assert module.batches == batches
    assert index.group_names == GROUPS


def test_logs_have_stable_names(tmp_path):
    callback = FairBatch(groups="group", alpha=0.05)
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

    run = trainer(FairBatch(groups="group"), Count(), logger=CSVLogger(tmp_path))
    run.fit(ToyModule(), loader())
    assert rows == [2, 3, 4]  # a header, the shares at the start, and the updates


@pytest.mark.parametrize("every", ["epoch", 5])
def test_all_values_can_be_monitored(tmp_path, every):
    callback = FairBatch(groups="group", alpha=0.05, update_every=every)
    best = ModelCheckpoint(tmp_path, monitor="fairbatch/gap/1", save_on_train_epoch_end=True)
    run = trainer(callback, best, enable_checkpointing=True)
    run.fit(ToyModule(), loader())
    last_of_epoch = {record.epoch: float(record.gaps[1]) for record in callback.history}
    assert float(best.best_model_score) == pytest.approx(min(last_of_epoch.values()))
    assert len(set(last_of_epoch.values())) == 3


def test_every_update_within_epochs_is_logged(tmp_path):
    callback = FairBatch(groups="group", alpha=0.05, update_every=5)
    run = trainer(callback, logger=CSVLogger(tmp_path), log_every_n_steps=50)
    run.fit(ToyModule(), loader())
    with open(f"{run.logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fairbatch/gap_max"]]
    assert [int(row["step"]) for row in rows] == [4, 9, 14, 19, 24, 29, 34]
    assert float(rows[-1]["fairbatch/gap_max"]) == pytest.approx(callback.history[-1].gap_max, rel=1e-5)


def test_reloading_ends_the_workers_of_the_old_loader():
    counts = []

    class Reloading(ToyData):
        def train_dataloader(self):
            return loader(self.dataset, num_workers=1, persistent_workers=True)

    class Count(L.Callback):
        def on_train_epoch_end(self, *args):
            counts.append(len(multiprocessing.active_children()))

    run = trainer(
        FairBatch(groups="group", estimate="exact"), Count(), max_epochs=4, reload_dataloaders_every_n_epochs=1
    )
    run.fit(ToyModule(), datamodule=Reloading())
    assert counts == [2, 2, 2, 2]
    assert not multiprocessing.active_children()


def test_reloaded_data_must_have_the_same_cells():
    class Changing(L.LightningDataModule):
        calls = 0

        def train_dataloader(self):
            self.calls += 1
            dataset = Toy()
            if self.calls > 1:
                pairs = zip(dataset.group, dataset.targets, strict=True)
                dataset.group = ["a" if name == "b" and y else name for name, y in pairs]
            return loader(dataset)

    run = trainer(FairBatch(groups="group"), reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ValueError, match=r"samples in the cells that it had before.*start a new fit"):
        run.fit(ToyModule(), datamodule=Changing())


def test_intersectional_groups_have_readable_names():
    dataset = Toy()
    dataset.age = ["old" if i % 2 else "young" for i in range(240)]
    callback = FairBatch(groups=["group", "age"], alpha=0.05)
    fit(callback, data=loader(dataset), max_epochs=1)
    assert callback.shares.shape == (2, 6)
    assert callback.index.group_names[0] == "group=a, age=old"


def test_criterion_object_and_string_are_the_same():
    by_string, by_object = FairBatch("equalized_odds", groups="group"), FairBatch(EqualizedOdds(), groups="group")
    assert fit(by_string).batches == fit(by_object).batches


def test_alpha_can_be_a_schedule():
    callback = FairBatch(groups="group", alpha=lambda update: 0.1 / 2**update)
    fit(callback)
    moved = [(r.shares_after - r.shares_before).clamp(min=0).sum().item() for r in callback.history]
    assert moved == pytest.approx([0.1, 0.05, 0.025])


def test_error_as_loss_counts_wrong_predictions():
    callback = FairBatch(groups="group", estimate="exact", loss="error")
    module = fit(callback, max_epochs=1)
    dataset = Toy()
    with torch.no_grad():
        wrong = module(dataset.x).argmax(1) != dataset.targets
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(wrong[cell].double().mean()))


def test_demographic_parity_measures_against_the_positive_label():
    callback = FairBatch("demographic_parity", groups="group", estimate="exact", positive_label=0)
    module = fit(callback, max_epochs=1)
    dataset = Toy()
    with torch.no_grad():
        losses = functional.cross_entropy(module(dataset.x), torch.zeros(240, dtype=torch.long), reduction="none")
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


def test_resume_at_the_end_of_an_epoch(tmp_path):
    whole = FairBatch(groups="group", alpha=0.05)
    uninterrupted = fit(whole, max_epochs=5)
    first = FairBatch(groups="group", alpha=0.05)
    run = trainer(first, max_epochs=2)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    second, module = FairBatch(groups="group", alpha=0.05), ToyModule()
    resume(trainer(second, max_epochs=5), module, loader(), tmp_path / "last.ckpt")
    assert module.batches == uninterrupted.batches[24:]
    assert torch.equal(module.net.weight, uninterrupted.net.weight)
    assert torch.equal(second.shares, whole.shares)
    assert [r.epoch for r in second.history] == [0, 1, 2, 3, 4]


def test_checkpoints_with_and_without_the_callback(tmp_path):
    run = trainer(FairBatch(groups="group"), max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "with.ckpt")
    resume(trainer(max_epochs=2), ToyModule(), loader(), tmp_path / "with.ckpt")
    run = trainer(max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "without.ckpt")
    callback = FairBatch(groups="group")
    resume(trainer(callback, max_epochs=2), ToyModule(), loader(), tmp_path / "without.ckpt")
    assert [record.epoch for record in callback.history] == [1]


def test_resume_on_other_data_is_refused(tmp_path):
    run = trainer(FairBatch(groups="group"), max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    other = loader(Toy(seed=1))
    with pytest.raises(ValueError, match=r"had the counts .*, now .*'0', '1'.* have"):
        resume(trainer(FairBatch(groups="group"), max_epochs=2), ToyModule(), other, tmp_path / "last.ckpt")


class OtherNamespace(pytorch_lightning.LightningModule):
    """ToyModule for `pytorch_lightning`, which has its own copy of every class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr, self.batches = torch.nn.Linear(4, 2), 0.1, []

    forward = ToyModule.forward
    training_step = ToyModule.training_step
    configure_optimizers = ToyModule.configure_optimizers


def test_works_in_both_of_lightnings_namespaces():
    module, callback = OtherNamespace(), FairBatch(groups="group", alpha=0.05)
    run = pytorch_lightning.Trainer(
        max_epochs=3, callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    run.fit(module, loader())
    assert module.batches == fit(FairBatch(groups="group", alpha=0.05)).batches
    assert len(callback.history) == 3


def test_validate_and_test_are_untouched():
    class Validated(ToyModule):
        def validation_step(self, batch, batch_idx):
            self.log("seen", float(batch_idx))

        test_step = validation_step

    run = trainer(FairBatch(groups="group"))
    module = Validated()
    run.validate(module, ToyData(), verbose=False)
    run.fit(module, ToyData())
    run.test(module, loader(), verbose=False)


class WithTinyCell(Toy):
    """The cell (1, "c") has three samples, which no model gets right."""

    def __init__(self):
        super().__init__()
        tiny = ((self.targets == 1) & (self.group_ids == 2)).nonzero().flatten()
        self.targets[tiny[3:]] = 0
        self.x[tiny[:3]] = -self.x[self.targets == 1].mean(0) * 20


@pytest.mark.parametrize("min_samples", [1, 10])
def test_cells_of_few_samples_can_be_left_alone(min_samples):
    data, callback = WithTinyCell(), FairBatch(groups="group", alpha=0.02, min_samples=min_samples)
    trainer(callback, max_epochs=5).fit(ToyModule(), loader(data))
    assert int(callback.counts[1, 2]) == 3
    before, after = callback.history[0].shares_before[1], callback.shares[1]
    if min_samples == 1:
        assert after[2] > before[2] + 0.05
    else:
        assert after[2] == before[2]
        gap = callback.history[-1].losses[1, :2]
        assert float(callback.history[-1].gaps[1]) == pytest.approx(float(gap.max() - gap.min()))
