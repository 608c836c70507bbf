"""The life of a fit that every callback shares which changes batches: other batches, and no trace."""

import multiprocessing

import lightning as L
import numpy as np
import pytest
import torch
from by_hand import ToyData, fit, reference_run, trained_on
from canonical import new_fairbatch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import Subset

from fairbatch_lightning import FairBatch, SignedSteps
from fairbatch_lightning.callbacks.base import ChangesBatches


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


class Told(ChangesBatches):
    """Changes nothing, and writes down when it is asked or told something, and what."""

    def __init__(self, **arguments):
        super().__init__(groups="group", **arguments)
        self.calls, self.data = [], []

    def begin(self, trainer, module):
        self.calls.append("begin")
        assert self.index is None

    def samples(self, index):
        self.calls.append("samples")

    def start(self, data):
        self.calls.append("start")
        self.data.append(data)

    def reload(self, data):
        self.calls.append("reload")
        self.data.append(data)

    def shares_of(self, index):
        self.calls.append("shares_of")

    def learnt(self, *, alone):
        self.calls.append("learnt alone" if alone else "learnt")
        return {"number": torch.tensor(7)}

    def go_on_from(self, learnt):
        self.calls.append(f"go_on_from {int(learnt['number'])}")


FIRST = ["begin", "samples", "start", "shares_of"]


class TestWhatSubclassesAreTold:
    def test_in_which_order(self):
        callback = Told()
        fit(callback, max_epochs=2)
        assert callback.calls == FIRST

    def test_about_the_data(self):
        callback, module, given, run = Told(), ToyModule(), loader(), None
        run = trainer(callback, max_epochs=1)
        run.fit(module, given)
        (data,) = callback.data
        assert data.trainer is run
        assert data.module is module
        assert data.loader.loader is given
        assert data.index is callback.index
        assert not data.same_samples
        assert callback.counts.sum() == 240

    @pytest.mark.parametrize("same", [True, False])
    def test_about_data_that_is_loaded_anew(self, same):
        """The same samples, even in another object, or others in the same cells."""

        class Anew(ToyModule):
            def train_dataloader(self):
                return loader(Toy(seed=0 if same else self.current_epoch))

        callback = Told()
        trainer(callback, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Anew())
        again = ["samples", "reload", "shares_of"]
        assert callback.calls == [*FIRST, *again, *again]
        assert [data.same_samples for data in callback.data] == [False, same, same]
        assert callback.index is callback.data[-1].index

    def test_about_a_checkpoint(self, tmp_path):
        first, second = Told(), Told()
        run = trainer(first, max_epochs=1)
        run.fit(ToyModule(), loader())
        run.save_checkpoint(tmp_path / "last.ckpt")
        assert first.calls == [*FIRST, "learnt"]
        resume(trainer(second, max_epochs=2), ToyModule(), loader(), tmp_path / "last.ckpt")
        assert second.calls == [*FIRST, "go_on_from 7"]

    def test_about_a_fit_that_goes_on(self):
        """Of the same Trainer; with another one everything starts afresh."""
        callback = Told()
        run = trainer(callback, max_epochs=1)
        run.fit(ToyModule(), loader())
        run.fit_loop.max_epochs = 2
        run.fit(ToyModule(), loader())
        assert callback.calls == [*FIRST, "learnt", *FIRST, "go_on_from 7"]
        fit(callback, max_epochs=1)
        assert callback.calls[-len(FIRST) :] == FIRST

    def test_that_it_is_alone_after_an_error(self):
        """Checkpoints that are saved then must not wait for other processes, which may be gone."""

        class Fails(ToyModule):
            def on_train_batch_end(self, *args):
                raise RuntimeError("boom")

        callback = Told()
        with pytest.raises(RuntimeError, match="boom"):
            fit(callback, Fails())
        state = callback.state_dict()
        assert callback.calls == [*FIRST, "learnt alone"]
        assert state["learnt"] == {"number": torch.tensor(7)}
        fit(callback)
        callback.state_dict()
        assert callback.calls[-1] == "learnt"  # a new fit is not alone


def test_nothing_is_known_before_a_fit():
    callback = ChangesBatches(groups="group")
    assert (callback.index, callback.counts, callback.state_dict()) == (None, None, {})


def test_samples_that_make_up_an_epoch():
    """Some left out, some repeated; the index is that of what is trained on."""

    class Chosen(ChangesBatches):
        def samples(self, index):
            return np.array([*range(100), *range(50), *range(50)])

    callback = Chosen(groups="group")
    module = fit(callback, data=loader(batch_size=10), max_epochs=1)
    assert sorted(trained_on(module).tolist()) == sorted([*range(100), *range(50), *range(50)])
    toy = Toy()
    expected = torch.bincount(toy.targets[:100] * 3 + toy.group_ids[:100], minlength=6)
    expected += 2 * torch.bincount(toy.targets[:50] * 3 + toy.group_ids[:50], minlength=6)
    assert torch.equal(callback.counts, expected.view(2, 3))


def test_shares_to_draw_by():
    class Halves(ChangesBatches):
        def shares_of(self, index):
            return torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])

    module, toy = fit(Halves(groups="group"), max_epochs=4), Toy()
    drawn = trained_on(module)
    table = torch.bincount(toy.targets[drawn] * 3 + toy.group_ids[drawn], minlength=6).view(2, 3)
    torch.testing.assert_close(table / table.sum(1, keepdim=True), Halves().shares_of(None), atol=0.02, rtol=0)


def test_counts_are_a_copy():
    callback = ChangesBatches(groups="group")
    fit(callback, max_epochs=1)
    callback.counts.zero_()
    assert callback.counts.sum() == 240


@pytest.mark.parametrize("seed", [-1, 1.5, None, "0"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match=rf"`seed` to be an integer of at least 0 but got {seed!r}"):
        ChangesBatches(seed=seed)


def test_two_that_decide_about_the_batches_are_refused():
    expected = (
        r"one callback that decides about the batches but got FairBatch and Told: a batch can follow only one of them."
        r" Leave one out of .*; for several attributes use FairBatch\(groups=\[...\]\)"
    )
    with pytest.raises(ValueError, match=expected):
        trainer(FairBatch(groups="group"), Told()).fit(ToyModule(), loader())


def test_no_worker_of_a_loader_that_starts_again_outlives_the_fit():
    """The fair loader is the shorter one and starts again within an epoch of the other."""

    class Two(ToyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    trainer(new_fairbatch(loader=0), max_epochs=2).fit(Two(), [loader(num_workers=1), loader(Toy(400))])
    assert not multiprocessing.active_children()
