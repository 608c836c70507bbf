"""Cases between two features: logits returned now and then, checkpoints that are only tested, data that is refused."""

import lightning as L
import pytest
import torch
from canonical import CALLBACKS, new_fairbatch
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Manual, Validated
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from fairbatch_lightning import RuleState, SampledEstimate, UpdateRule


class ManualAndReturned(Manual):
    """Calls `self(x)`, and returns the logits as well."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            return {"logits": self(batch[0])}


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_that_are_returned_under_manual_optimization(compiled):
    """They are not needed, as `self(x)` is called; also where its hook is compiled and does not watch the training."""
    module, callback = ManualAndReturned(), new_fairbatch(estimate="exact")
    if compiled:
        module.compile(backend="eager")
    trainer(callback, max_epochs=2).fit(module, loader())
    assert len(callback.history) == 2


class Averaged(ToyModule):
    """Trains one network and validates another."""

    def __init__(self):
        super().__init__()
        self.average = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"logits": self.average(batch[0])}


def test_a_named_submodule_that_validation_does_not_call():
    """What `validation_step` returns is taken instead."""
    module, callback = Averaged(), new_fairbatch(estimate="validation", logits="net")
    run = trainer(callback, max_epochs=1, num_sanity_val_steps=0)
    run.fit(module, loader(), DataLoader(toy := Toy(seed=2), batch_size=50))
    with torch.no_grad():
        losses = functional.cross_entropy(module.average(toy.x), toy.targets, reduction="none")
    cell = (toy.targets == 1) & (toy.group_ids == 2)
    assert float(callback.history[0].losses[1, 2]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


class ReturnsOnce(ToyModule):
    """Returns logits with its third batch only, which are not those of the model."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "logits": torch.zeros(len(batch[0]), 2)} if batch_idx == 2 else loss


def test_what_one_batch_returns_changes_nothing():
    plain, once = new_fairbatch(), new_fairbatch()
    trainer(plain, max_epochs=2).fit(ToyModule(), loader())
    trainer(once, max_epochs=2).fit(ReturnsOnce(), loader())
    for record, expected in zip(once.history, plain.history, strict=True):
        assert torch.equal(record.losses, expected.losses)


class Tested(Validated):
    def test_step(self, batch, batch_idx):
        self(batch[0])


@pytest.mark.parametrize("name", ["online", "group dro"])
def test_a_checkpoint_that_is_tested_changes_nothing(name, tmp_path):
    """Nor is it refused because the callback has seen other data since."""
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer(CALLBACKS[name](), keep, max_epochs=1, enable_checkpointing=True).fit(Tested(), loader(Toy(200, seed=1)))
    callback = CALLBACKS[name]()
    run = trainer(callback, max_epochs=3)
    run.fit(module := Tested(), loader())
    before = callback.state_dict()
    run.test(module, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert len(getattr(callback, "history", [])) == (3 if name == "online" else 0)
    assert repr(callback.state_dict()["learnt"]) == repr(before["learnt"])


class Shrinking(L.LightningDataModule):
    """Loads data without group c from the second epoch on."""

    def train_dataloader(self):
        toy = Toy()
        kept = range(240) if self.trainer.current_epoch == 0 else (toy.group_ids < 2).nonzero().flatten().tolist()
        return loader(Subset(toy, kept))


def test_data_that_is_refused_leaves_everything_as_it_was():
    callback = new_fairbatch()
    with pytest.raises(ValueError, match="reloaded training set"):
        trainer(callback, reload_dataloaders_every_n_epochs=1).fit(ToyModule(), datamodule=Shrinking())
    assert callback.counts.shape == callback.shares.shape == (2, 3)
    assert callback.plot().axes


def test_other_data_in_a_second_fit_of_a_trainer_is_refused_with_the_way_out():
    run = trainer(new_fairbatch(), max_epochs=1)
    run.fit(ToyModule(), loader())
    run.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match=r"or of this Trainer's earlier fit.*in a new Trainer"):
        run.fit(ToyModule(), loader(Toy(seed=1)))


class Forgetful(UpdateRule):
    """Does not count its updates."""

    def update(self, state, measured):
        return RuleState(state.shares)


class Numbered(SampledEstimate):
    numbers = []  # noqa: RUF012 - of all copies

    def measure(self, run, update, *, uniform):
        self.numbers.append(update)
        return super().measure(run, update, uniform=uniform)


def test_updates_are_counted_whatever_a_rule_returns():
    trainer(new_fairbatch(rule=Forgetful(), estimate=Numbered(5)), max_epochs=3).fit(ToyModule(), loader())
    assert Numbered.numbers == [0, 1, 2]
