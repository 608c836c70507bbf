"""The life of a fit that every callback shares which changes batches: other batches, and no trace."""

import multiprocessing

import lightning as L
import pytest
import torch
from by_hand import ToyData, fit, reference_run
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import Subset

from fairbatch_lightning import FairBatch, SignedSteps


class OwnLoader(ToyModule):
    def train_dataloader(self):
        return loader()


@pytest.mark.parametrize("source", ["datamodule", "module", "loader", "list", "dict", "combined"])
def test_every_source_of_the_train_loader(source):
    _, batches, _, _ = reference_run(3)
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
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
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    module = fit(callback, data=loader(num_workers=num_workers, persistent_workers=persistent))
    assert module.batches == batches
    torch.testing.assert_close(callback.shares, shares)
    assert not multiprocessing.active_children()


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
