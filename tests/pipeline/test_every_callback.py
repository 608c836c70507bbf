"""What is promised of every callback that changes batches, FairBatch and the baselines alike."""

import pickle

import pytest
import torch
from canonical import CALLBACKS
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Subset

from fairbatch_lightning import FairBatchWarning
from fairbatch_lightning.callbacks.base import ChangesBatches

every_callback = pytest.mark.parametrize("new", CALLBACKS.values(), ids=CALLBACKS)


class Scheduled(ToyModule):
    """A learning rate schedule that asks how long the training is has the first loader replaced by another."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 17
        return super().configure_optimizers()


@every_callback
def test_changes_the_model(new):
    """Compared with a callback that changes nothing, and so trains on the same order of samples."""
    plain, fair = ToyModule(), ToyModule()
    trainer(ChangesBatches(groups="group"), max_epochs=2).fit(plain, loader())
    trainer(new(), max_epochs=2).fit(fair, loader())
    assert not torch.allclose(plain.net.weight, fair.net.weight, atol=1e-4)


@every_callback
def test_leaves_no_trace(new):
    data, module = loader(), ToyModule()
    before = dict(vars(data))
    run = trainer(new(), max_epochs=1)
    run.fit(module, data)
    assert vars(data) == before
    assert "dataloader" not in vars(run.fit_loop._data_source)
    assert not {"training_step", "log", "log_dict"} & set(vars(module))
    assert not any(part._forward_hooks for part in module.modules())


@every_callback
def test_a_second_fit_starts_afresh(new):
    callback, first, second = new(), ToyModule(), ToyModule()
    trainer(callback, max_epochs=2).fit(first, loader())
    trainer(callback, max_epochs=2).fit(second, loader())
    assert first.batches == second.batches
    assert torch.equal(first.net.weight, second.net.weight)


@pytest.mark.parametrize("name", [name for name in CALLBACKS if name != "the bare line"])
def test_training_goes_on_in_another_fit(name):
    """Of the same Trainer, with more epochs, as if there had been one; the bare line knows how long a training is."""
    new = CALLBACKS[name]
    whole, parts = ToyModule(), ToyModule()
    trainer(new(), max_epochs=3).fit(whole, loader())
    run = trainer(new(), max_epochs=2)
    run.fit(parts, loader())
    run.fit_loop.max_epochs = 3
    run.fit(parts, loader())
    assert parts.batches == whole.batches
    torch.testing.assert_close(parts.net.weight, whole.net.weight)


@every_callback
def test_a_copy_that_was_pickled_after_a_fit(new):
    """It knows what happened, holds nothing of the Trainer, and can be used again."""
    callback, first, second = new(), ToyModule(), ToyModule()
    trainer(callback, max_epochs=2).fit(first, loader(num_workers=1, persistent_workers=True))
    callback.log = callback.log_dict = None  # Lightning's, bound to the module
    copy = pickle.loads(pickle.dumps(callback))
    assert torch.equal(copy.counts, callback.counts)
    assert len(getattr(copy, "history", [])) == len(getattr(callback, "history", []))
    assert copy.state_dict() == {}
    trainer(copy, max_epochs=2).fit(second, loader(num_workers=1))
    assert torch.equal(first.net.weight, second.net.weight)


@pytest.mark.slow
@every_callback
def test_resumes_exactly(new, tmp_path):
    """From the middle of the first epoch, the end of it, and the middle of the second; with a worker process ahead."""
    data, whole = loader(num_workers=1), ToyModule()
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)
    trainer(new(), keep, max_epochs=3, enable_checkpointing=True).fit(whole, data)
    for step in (6, 12, 18):
        resumed = ToyModule()
        resume(trainer(new(), max_epochs=3), resumed, data, tmp_path / f"step={step}.ckpt")
        assert resumed.batches == whole.batches[step:]
        assert torch.equal(resumed.net.weight, whole.net.weight)


@pytest.mark.slow
@every_callback
def test_resumes_where_loaders_are_made_twice(new, tmp_path):
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    whole, first, second = Scheduled(), Scheduled(), Scheduled()
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=17, save_top_k=-1)
    trainer(new(), **options).fit(whole, loader(batch_size=10))
    trainer(new(), keep, **options, enable_checkpointing=True).fit(first, loader(batch_size=10))
    resume(trainer(new(), **options), second, loader(batch_size=10), tmp_path / "step=17.ckpt")
    assert second.batches == whole.batches[17:]
    assert torch.equal(second.net.weight, whole.net.weight)


@every_callback
def test_resume_on_other_data_is_refused(new, tmp_path):
    run = trainer(new(), max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"had the counts .*, now .*'0', '1'.* have"):
        resume(trainer(new(), max_epochs=2), ToyModule(), loader(Toy(seed=1)), tmp_path / "last.ckpt")


@every_callback
def test_other_cells_in_a_reloaded_training_set(new):
    class Shrinks(ToyModule):
        def train_dataloader(self):
            kept = range(240) if self.current_epoch == 0 else [i for i in range(240) if Toy().group_ids[i] < 2]
            return loader(Subset(Toy(), list(kept)))

    with pytest.raises(ValueError, match="the reloaded training set to have samples in the cells"):
        trainer(new(), reload_dataloaders_every_n_epochs=1).fit(Shrinks())


@every_callback
def test_overfitting_on_purpose(new):
    callback = new()
    run = trainer(callback, overfit_batches=2, max_epochs=1)
    with pytest.warns(FairBatchWarning, match="stays inactive"):
        run.fit(ToyModule(), loader())
    assert run.global_step == 2
    assert callback.counts is None


@every_callback
def test_not_together_with_another(new):
    with pytest.raises(ValueError, match="one callback that decides about the batches but got"):
        trainer(new(), ChangesBatches(groups="group")).fit(ToyModule(), loader())
