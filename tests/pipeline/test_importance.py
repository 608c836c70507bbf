"""Importance sampling in whole runs: what is drawn of a cell changes, how much of it does not."""

import lightning as L
import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional

from fairbatch_lightning import FairBatch, Importance, LossRank


def recorded(shown):
    """Return weights that depend on the losses in a simple way, and add to a list what they are shown."""

    class Recorded(Importance):
        def weights(self, losses, index, update):
            assert update == len(shown)
            shown.append(losses)
            return np.where(np.isnan(losses), 1.0, losses)

    return Recorded()


class TestTraining:
    def test_losses_are_those_of_the_trained_samples(self):
        """With a model that does not change, the losses are known, and all samples have been met once."""
        shown, module, dataset = [], ToyModule(lr=0.0), Toy()
        run = trainer(FairBatch(groups="group", importance=recorded(shown)), max_epochs=2)
        run.fit(module, loader(dataset))
        expected = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none")
        assert len(shown) == 2
        torch.testing.assert_close(torch.tensor(shown[0]), expected.detach())
        drawn = np.bincount(np.concatenate(module.batches[12:]), minlength=240)
        assert np.corrcoef(drawn, shown[0])[0, 1] > 0.6

    def test_demographic_parity_ranks_by_the_samples_own_labels(self):
        shown, module, dataset = [], ToyModule(lr=0.0), Toy()
        run = trainer(FairBatch("demographic_parity", groups="group", importance=recorded(shown)), max_epochs=1)
        run.fit(module, loader(dataset))
        expected = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none")
        torch.testing.assert_close(torch.tensor(shown[0]), expected.detach())

    @pytest.mark.parametrize("estimate", ["online", "sampled", "exact"])
    def test_estimates_are_not_misled(self, estimate):
        """The measured losses are the cells' means although samples with large losses are drawn more often."""
        dataset, module = Toy(), ToyModule(lr=0.0)
        fairbatch = FairBatch(groups="group", rule="paper", importance="loss", estimate=estimate)
        trainer(fairbatch, max_epochs=3).fit(module, loader(dataset))
        losses = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none").detach()
        index = fairbatch.index
        means = np.bincount(index.cells, losses, 6) / np.bincount(index.cells, minlength=6)
        torch.testing.assert_close(fairbatch.history[-1].losses.flatten(), torch.tensor(means), atol=1e-5, rtol=1e-5)

    def test_training_tells_the_losses_again_when_all_samples_are_alike(self):
        """Samples are evaluated only after the second epoch: it was the only one with weights."""
        module, calls = ToyModule(), []
        module.net.register_forward_hook(lambda *_: calls.append(module.training))
        fairbatch = FairBatch(groups="group", importance=LossRank(pressure=5.0, decay=0.1))
        trainer(fairbatch, max_epochs=4).fit(module, loader(Toy()))
        assert calls.count(True) == 48
        assert 0 < calls.count(False) == sum(not training for training in calls[24:30])

    def test_weights_of_earlier_updates_are_not_kept(self):
        kept = []

        class Count(L.Callback):
            def on_train_batch_end(self, trainer, *args):
                current = trainer.callbacks[0]._batches.sampler._pass
                kept.append(sum(plan.weights is not None for plan in current.plans))

        run = trainer(FairBatch(groups="group", importance="loss", update_every=1), Count(), max_epochs=2)
        run.fit(ToyModule(), loader())
        assert set(kept[1:]) == {1}  # those of the next batch

    @pytest.mark.parametrize("update_every", ["epoch", 5])
    @pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_resumes_as_if_nothing_had_happened(self, update_every, num_workers, tmp_path):
        def new():
            return ToyModule(), FairBatch(groups="group", importance="loss", update_every=update_every)

        data = loader(Toy(), num_workers=num_workers)
        whole, callback = new()
        save = ModelCheckpoint(tmp_path, every_n_train_steps=17, save_top_k=-1)
        trainer(callback, save, enable_checkpointing=True).fit(whole, data)
        resumed, second = new()
        resume(trainer(second), resumed, data, tmp_path / "epoch=1-step=17.ckpt")
        assert resumed.batches == whole.batches[17:]
        assert torch.equal(resumed.net.weight, whole.net.weight)
        assert torch.equal(second.shares, callback.shares)

    def test_a_dataset_that_is_made_anew_keeps_its_weights(self):
        """And so the training is the same as with one dataset for all epochs."""

        class Anew(ToyModule):
            def train_dataloader(self):
                return loader(Toy())

        anew, once = Anew(), ToyModule()
        for module, data in ((anew, None), (once, loader(Toy()))):
            reload = {"reload_dataloaders_every_n_epochs": 1} if data is None else {}
            trainer(FairBatch(groups="group", importance="loss"), **reload).fit(module, data)
        assert anew.batches == once.batches
        assert len(set(np.concatenate(anew.batches[12:24]))) < 240

    def test_bad_argument_is_refused(self):
        for importance in ("gradient", ["loss"]):
            with pytest.raises(ValueError, match=r"`importance` to be one of \['loss'\] or an object of Importance"):
                FairBatch(groups="group", importance=importance)

    def test_bad_weights_of_an_own_importance_are_refused(self):
        class Wrong(Importance):
            def weights(self, losses, index, update):
                return losses[:3]

        with pytest.raises(ValueError, match="one per sample"):
            trainer(FairBatch(groups="group", importance=Wrong())).fit(ToyModule(), loader())
