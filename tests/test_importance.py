"""Importance sampling within cells: what is drawn of a cell changes, how much of it does not."""

import itertools

import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional

from fairbatch_lightning import FairBatch, FairSampler, GroupIndex, Importance, LossRank


def data(num_samples=600, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(2, size=num_samples), random.integers(3, size=num_samples)


def some_weights(num_samples, seed=0):
    return np.random.default_rng(seed).random(num_samples) ** 3 + 0.01


def batches(sampler):
    return np.array(list(sampler)).reshape(-1, sampler.batch_size)


class TestSampler:
    def test_a_sample_is_drawn_as_often_as_its_weight_says(self):
        """In an epoch its expected number rounded up or down, so that the error of many epochs is small."""
        labels, groups = data()
        weights = some_weights(len(labels))
        sampler = FairSampler(labels, groups, 20, weights=weights)
        epochs = 40
        drawn = np.bincount(np.concatenate([batches(sampler).ravel() for _ in range(epochs)]), minlength=len(labels))
        for cell in np.unique(labels * 3 + groups):
            members = np.flatnonzero(labels * 3 + groups == cell)
            expected = drawn[members].sum() * weights[members] / weights[members].sum()
            assert np.abs(drawn[members] - expected).max() < 2 * np.sqrt(epochs)

    def test_equal_weights_draw_every_sample_once(self):
        labels, groups = data()
        sampler = FairSampler(labels, groups, 20, weights=np.full(len(labels), 0.3))
        assert sorted(batches(sampler).ravel()) == list(range(len(labels)))

    def test_quotas_do_not_depend_on_weights(self):
        labels, groups = data()
        plain, weighted = (FairSampler(labels, groups, 20, weights=w) for w in (None, some_weights(len(labels))))
        cells = labels * 3 + groups
        assert (cells[batches(plain)] == cells[batches(weighted)]).all()

    def test_a_weight_of_zero_leaves_a_sample_out(self):
        labels, groups = data()
        weights = np.ones(len(labels))
        weights[:50] = 0
        drawn = batches(FairSampler(labels, groups, 20, weights=weights))
        assert drawn.min() == 50

    def test_new_weights_hold_from_the_next_batch_on(self):
        labels, groups = data()
        sampler, plain = FairSampler(labels, groups, 20), FairSampler(labels, groups, 20)
        stream, expected = sampler.batches(), plain.batches()
        assert [next(stream) for _ in range(3)] == [next(expected) for _ in range(3)]
        weights = np.zeros(len(labels))
        weights[-200:] = 1
        sampler.weights = weights
        assert min(min(batch) for batch in stream) >= len(labels) - 200

    @pytest.mark.parametrize("trained", [0, 4, 7, 12, 29])
    def test_state_continues_the_stream(self, trained):
        """Also where workers had fetched batches in advance, from before and after the weights changed."""
        labels, groups = data()

        def play(sampler, until):
            drawn, stream = [], sampler.batches()
            for number in range(until):
                if number in (5, 10):
                    sampler.weights = some_weights(len(labels), seed=number)
                drawn.append(next(stream))
            return drawn

        fetched = min(trained + 8, 30)
        sampler, resumed = (FairSampler(labels, groups, 20) for _ in range(2))
        drawn = play(sampler, fetched)
        resumed.load_state_dict(sampler.state_dict(trained))
        assert resumed.state_dict()["next_batch"] == trained
        assert list(itertools.islice(resumed.batches(), fetched - trained)) == drawn[trained:]

    def test_state_holds_no_more_weights_than_are_needed(self):
        labels, groups = data()
        sampler = FairSampler(labels, groups, 20)
        stream = sampler.batches()
        for number in range(10):
            sampler.weights = some_weights(len(labels), seed=number)
            next(stream)
        kept = [weights is not None for weights in sampler.state_dict(8)["weights"]]
        assert kept == [False] * 8 + [True] * 2

    def test_processes_share_out_the_stream_of_one(self):
        labels, groups = data()
        weights = some_weights(len(labels))
        alone = batches(FairSampler(labels, groups, 20, weights=weights))
        parts = [
            batches(FairSampler(labels, groups, 10, weights=weights, num_replicas=2, rank=rank)) for rank in (0, 1)
        ]
        assert (np.stack(parts, 2).reshape(alone.shape) == alone).all()

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (np.ones(5), "of shape (600,)"),
            (np.full(600, -1.0), "numbers of at least 0"),
            (np.full(600, np.nan), "numbers of at least 0"),
            (np.zeros(600), "above 0 in every cell"),
        ],
    )
    def test_bad_weights_are_refused(self, weights, message):
        with pytest.raises(ValueError, match="weights") as error:
            FairSampler(*data(), 20, weights=weights)
        assert message in str(error.value)

    def test_a_state_with_weights_of_other_samples_is_refused(self):
        labels, groups = data()
        state = FairSampler(labels, groups, 20, weights=some_weights(len(labels))).state_dict()
        with pytest.raises(ValueError, match="one per sample"):
            FairSampler(*data(500), 20).load_state_dict(state)

    def test_takes_tensors(self):
        labels, groups = data()
        weights = torch.tensor(some_weights(len(labels)))
        sampler = FairSampler(labels, groups, 20, weights=weights)
        weights.zero_()
        assert (sampler.weights == some_weights(len(labels))).all()


class TestLossRank:
    def test_ranks_within_cells(self):
        """Against a plain loop, with unknown losses counted as the largest."""
        labels, groups = data()
        index = GroupIndex.from_values(labels, groups)
        losses = np.random.default_rng(1).random(len(labels))
        losses[::7] = np.nan
        weights = LossRank(pressure=100, decay=0.5).weights(losses, index, update=1)
        for cell in range(6):
            members = [sample for sample in range(len(labels)) if labels[sample] * 3 + groups[sample] == cell]
            ranked = sorted(members, key=lambda sample: -np.inf if np.isnan(losses[sample]) else -losses[sample])
            expected = {sample: 50 ** (-rank / len(members)) for rank, sample in enumerate(ranked)}
            assert weights[members] == pytest.approx([expected[sample] for sample in members])

    def test_in_the_end_all_samples_are_alike(self):
        index, losses = GroupIndex.from_values(*data()), np.arange(600.0)
        rank = LossRank(pressure=100, decay=0.9)
        assert (rank.weights(losses, index, update=43) < 1).any()
        assert (rank.weights(losses, index, update=44) == 1).all()

    def test_the_default_is_mild_and_falls_slowly(self):
        index, losses = GroupIndex.from_values(*data()), np.arange(600.0)
        for update, most in ((0, 3), (200, 2.02), (550, 1)):
            weights = LossRank().weights(losses, index, update)
            assert most * 0.98 < weights.max() / weights.min() <= most

    @pytest.mark.parametrize("pressure", [0.5, float("inf"), float("nan"), "high", True])
    def test_bad_pressure_is_refused(self, pressure):
        with pytest.raises(ValueError, match="`pressure` to be a number of at least 1 but got"):
            LossRank(pressure)

    @pytest.mark.parametrize("decay", [-0.1, 1.1])
    def test_bad_decay_is_refused(self, decay):
        with pytest.raises(ValueError, match="`decay` to be a number from 0 to 1 but got"):
            LossRank(decay=decay)


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
        fairbatch = FairBatch(groups="group", importance="loss", estimate=estimate)
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
            with pytest.raises(ValueError, match="`importance` to be None, one of"):
                FairBatch(groups="group", importance=importance)

    def test_bad_weights_of_an_own_importance_are_refused(self):
        class Wrong(Importance):
            def weights(self, losses, index, update):
                return losses[:3]

        with pytest.raises(ValueError, match="one per sample"):
            trainer(FairBatch(groups="group", importance=Wrong())).fit(ToyModule(), loader())
