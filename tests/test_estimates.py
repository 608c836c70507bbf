"""The cheap estimates measure what they say, against brute force, and cost what they say."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from fairbatch_lightning import (
    Estimate,
    ExactEstimate,
    FairBatch,
    FairBatchWarning,
    FairSampler,
    GroupIndex,
    OnlineEstimate,
    SampledEstimate,
    ValidationEstimate,
)
from fairbatch_lightning.estimate import TrainingRun
from fairbatch_lightning.evaluated import draw
from fairbatch_lightning.evaluation import EvaluationBatches
from fairbatch_lightning.losses import SampleLoss, cross_entropy
from fairbatch_lightning.online import RecentBatches, affordable


class Recording(ToyModule):
    """Keeps what every forward pass saw and gave: (mode, samples, losses); with dropout, so that modes matter."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(), torch.nn.Linear(16, 2))
        self.passes = []

    def step(self, batch):
        x, y, index = batch
        logits = self(x)
        losses = functional.cross_entropy(logits, y, reduction="none")
        self.passes.append((self.training, index.tolist(), losses.detach().double().tolist()))
        return losses.mean()

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def on_train_epoch_start(self):
        self.passes.append("epoch")

    def epochs(self):
        """Return the passes of each epoch."""
        groups = itertools.groupby(self.passes, lambda entry: entry == "epoch")
        return [list(entries) for is_mark, entries in groups if not is_mark]


class Watched(Recording):
    """Runs `training_step` to its end in evaluations too: it returns its logits."""

    def step(self, batch):
        x, y, index = batch
        logits = self(x)
        losses = functional.cross_entropy(logits, y, reduction="none")
        self.passes.append((self.training, index.tolist(), losses.detach().double().tolist()))
        return {"loss": losses.mean(), "logits": logits}


def cell_means(passes, dataset):
    """Return the mean loss of every cell over some passes, one sample at a time."""
    sums, counts = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for _, samples, losses in passes:
        for sample, loss in zip(samples, losses, strict=True):
            cell = int(dataset.targets[sample]), int(dataset.group_ids[sample])
            sums[cell] += loss
            counts[cell] += 1
    return sums / counts, counts


def fit(module, data=None, estimate="online", epochs=3, validation=None, fairbatch=None, **options):
    callback = FairBatch(**{"groups": "group", "alpha": 0.05, "estimate": estimate, **(fairbatch or {})})
    run = trainer(callback, max_epochs=epochs, **{"num_sanity_val_steps": 0, **options})
    run.fit(module, loader() if data is None else data, validation)
    return callback


def bare_run(device, trainer=None, **settings):
    """Return what an estimate works with, without a Trainer."""
    index, module = GroupIndex.from_values(Toy().targets, Toy().group), SimpleNamespace(device=torch.device(device))
    return TrainingRun(trainer, module, None, index, SampleLoss(index, cross_entropy, None), None, **settings)


def observe_zeros(estimate, run, number):
    """Show an estimate some batches."""
    for _ in range(number):
        estimate.observe(run, torch.zeros(20, 2, device=run.module.device), run.index.cells[:20])


class TestDraw:
    index = GroupIndex.from_values(np.repeat([0, 0, 1, 1], [5, 40, 200, 3]), np.repeat([0, 1, 0, 1], [5, 40, 200, 3]))

    def test_is_stratified_and_without_replacement(self):
        chosen = draw(self.index, np.arange(4), 20, 0, 0)
        assert len(set(chosen)) == len(chosen)
        assert np.bincount(self.index.cells[chosen]).tolist() == [5, 20, 20, 3]

    def test_only_from_the_cells_asked_for(self):
        assert set(self.index.cells[draw(self.index, np.array([0, 2]), 20, 0, 0)]) == {0, 2}

    def test_is_fresh_for_every_key_and_the_same_for_one(self):
        draws = [draw(self.index, np.arange(4), 20, 0, number).tolist() for number in (0, 1, 0)]
        assert draws[0] != draws[1]
        assert draws[0] == draws[2]

    def test_every_sample_is_equally_likely(self):
        times = np.zeros(len(self.index))
        for number in range(2000):
            times[draw(self.index, np.arange(4), 20, 7, number)] += 1
        expected = 2000 * np.minimum(20 / self.index.counts.flatten().numpy(), 1)[self.index.cells]
        assert (np.abs(times - expected) <= 5 * np.sqrt(expected)).all()


class TestSampled:
    def test_measures_a_fresh_draw_in_evaluation_mode(self):
        module, dataset = Watched(), Toy()
        callback = fit(module, estimate=SampledEstimate(samples_per_cell=10))
        drawn = []
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            evaluated = [entry for entry in passes if not entry[0]]
            samples = list(itertools.chain(*(samples for _, samples, _ in evaluated)))
            losses = list(itertools.chain(*(losses for _, _, losses in evaluated)))
            distinct = dict(zip(samples, losses, strict=True))  # what fills up the last batch is there twice
            expected, counts = cell_means([(False, list(distinct), list(distinct.values()))], dataset)
            assert (counts == 10).all()
            torch.testing.assert_close(record.losses, expected)
            drawn.append(frozenset(distinct))
        assert len(set(drawn)) == 3

    @pytest.mark.parametrize("num_samples", [240, 2400])
    def test_cost_does_not_grow_with_the_data(self, num_samples):
        module = Watched()
        fit(module, loader(Toy(num_samples)), SampledEstimate(samples_per_cell=10), epochs=1)
        assert sum(len(samples) for mode, samples, _ in module.epochs()[0] if not mode) <= 80

    def test_of_all_samples_is_exact(self):
        sampled, exact = fit(ToyModule(), estimate=SampledEstimate(10**6)), fit(ToyModule(), estimate="exact")
        for record, expected in zip(sampled.history, exact.history, strict=True):
            torch.testing.assert_close(record.losses, expected.losses)


class TestOnline:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_measures_the_training_batches(self, num_workers):
        module, dataset = Recording(), Toy()
        callback = fit(module, loader(num_workers=num_workers), OnlineEstimate(samples_per_cell=4))
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            expected, counts = cell_means(passes, dataset)
            assert (counts >= 2).all()
            torch.testing.assert_close(record.losses, expected)
            assert all(mode for mode, _, _ in passes)

    def test_updates_within_epochs_count_what_came_since_the_last(self):
        module, dataset = Recording(), Toy()
        callback = fit(module, estimate=OnlineEstimate(samples_per_cell=1), epochs=2, fairbatch={"update_every": 8})
        batches = [entry for entry in module.passes if entry != "epoch"]
        assert len(callback.history) == 3
        for number, record in enumerate(callback.history):
            expected, _ = cell_means(batches[8 * number : 8 * (number + 1)], dataset)
            torch.testing.assert_close(record.losses, expected)

    def test_a_starved_cell_has_its_row_evaluated(self):
        """Group c of label 1 is never drawn any more; label 0 is still measured in training."""
        module, dataset = Watched(), Toy()
        callback = FairBatch(groups="group", alpha=1e-300, estimate=OnlineEstimate(samples_per_cell=12))
        run = trainer(callback, max_epochs=1)

        def starve(training):
            shares = training.controller.shares
            shares[1] = torch.tensor([0.5, 0.5, 0.0])
            training.controller.load_state_dict({**training.controller.state_dict(), "shares": shares})
            training._sampler.shares = shares

        run.callbacks.append(AtStart(lambda: starve(callback._training)))
        run.fit(module, loader())
        trained = [entry for entry in module.epochs()[0] if entry[0]]
        evaluated = [entry for entry in module.epochs()[0] if not entry[0]]
        in_training, counts = cell_means(trained, dataset)
        assert counts[1, 2] == 0
        distinct = {s: loss for _, samples, losses in evaluated for s, loss in zip(samples, losses, strict=True)}
        in_probe, probed = cell_means([(False, list(distinct), list(distinct.values()))], dataset)
        assert probed.tolist() == [[0, 0, 0], [12, 12, 12]]
        torch.testing.assert_close(callback.history[0].losses[0], in_training[0])
        torch.testing.assert_close(callback.history[0].losses[1], in_probe[1])

    def test_no_more_is_evaluated_than_was_trained_on(self):
        module = Watched()
        fit(module, loader(Toy(2400)), OnlineEstimate(), epochs=1, limit_train_batches=6)
        passes = module.epochs()[0]
        assert sum(len(samples) for mode, samples, _ in passes if mode) == 120
        assert 60 < sum(len(samples) for mode, samples, _ in passes if not mode) <= 120

    @pytest.mark.parametrize("total", [0, 1, 5, 17, 100, 1000])
    def test_what_is_affordable_is_used(self, total):
        sizes = np.random.default_rng(total).integers(1, 60, size=9)
        per_cell = affordable(sizes, total)
        assert np.minimum(sizes, per_cell).sum() <= max(total, 9)
        assert np.minimum(sizes, per_cell + 1).sum() > total or per_cell >= sizes.max()

    def test_rows_that_the_criterion_ignores_are_not_evaluated(self):
        module = Watched()
        callback = FairBatch("equal_opportunity", groups="group", estimate=OnlineEstimate(10**6))
        trainer(callback, max_epochs=1, limit_train_batches=2).fit(module, loader(batch_size=8))
        dataset = Toy()
        evaluated = {s for mode, samples, _ in module.epochs()[0] for s in samples if not mode}
        assert evaluated
        assert {int(dataset.targets[sample]) for sample in evaluated} == {1}

    def test_a_cell_smaller_than_what_is_enough_is_not_starved(self):
        module = Watched()
        fit(module, estimate=OnlineEstimate(samples_per_cell=10**6), epochs=1)
        assert all(mode for mode, _, _ in module.epochs()[0])

    def test_batches_without_a_forward_pass_are_left_out(self):
        class Skipping(Recording):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None

        module = Skipping()
        callback = fit(module, estimate=OnlineEstimate(samples_per_cell=4), epochs=1)
        expected, _ = cell_means(module.epochs()[0], Toy())
        torch.testing.assert_close(callback.history[0].losses, expected)

    def test_a_loader_that_is_cycled(self):
        """The fair loader is the shorter one and starts again within an epoch of the other."""

        class Two(Recording):
            def training_step(self, batch, batch_idx):
                return self.step(batch[0])

        module = Two()
        data = [loader(), loader(Toy(400))]
        callback = fit(module, data, OnlineEstimate(samples_per_cell=4), fairbatch={"loader": 0})
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            assert len(passes) == 20
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_loader_that_is_cycled_next_to_one_without_a_length(self, num_workers):
        """Lightning then fetches a batch ahead."""

        class Endless(IterableDataset):
            def __iter__(self):
                return iter(torch.zeros(30, 1))

        class Two(Recording):
            def training_step(self, batch, batch_idx):
                return self.step(batch[0])

        module, data = Two(), [loader(num_workers=num_workers), DataLoader(Endless(), batch_size=1)]
        callback = fit(module, data, OnlineEstimate(samples_per_cell=4), fairbatch={"loader": 0})
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            assert len(passes) == 30
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    def test_a_loader_that_is_through_before_the_others(self):
        class Two(Recording):
            def training_step(self, batch, batch_idx):
                return self.step(batch[0]) if batch[0] is not None else self.net[0].weight.sum() * 0

        module, data = Two(), CombinedLoader([loader(), loader(Toy(400))], "max_size")
        callback = fit(module, data, OnlineEstimate(samples_per_cell=4), fairbatch={"loader": 0})
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            assert len(passes) == 12
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    def test_steps_that_fetch_two_batches(self):
        """The logits are those of the first."""

        class Both(Recording):
            def training_step(self, dataloader_iter):
                loss = self.step(next(dataloader_iter)[0])
                next(dataloader_iter)
                return loss

        module = Both()
        callback = fit(module, estimate=OnlineEstimate(samples_per_cell=2))
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    @pytest.mark.slow
    def test_someone_else_who_iterates_the_loader(self):
        class Nosy(L.Callback):
            def on_train_batch_end(self, run, module, *args):
                next(iter(run.train_dataloader))

        module, callback = Recording(), FairBatch(groups="group", estimate=OnlineEstimate(samples_per_cell=4))
        trainer(callback, Nosy(), max_epochs=2).fit(module, loader())
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    def test_the_first_batch_may_be_left_out(self):
        class Skipping(Recording):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch, batch_idx) if batch_idx else None

        assert len(fit(Skipping(), estimate="online").history) == 3

    def test_bad_losses_are_refused_at_once(self):
        """Although losses are computed many batches at a time."""
        module = Recording()
        with pytest.raises(ValueError, match=r"shape \(20,\), but got \(\)"):
            fit(module, estimate="online", fairbatch={"loss": lambda logits, labels: logits.mean()})
        assert len(module.passes) == 2  # the mark of the epoch, and a batch

    @pytest.mark.parametrize("earlier", ["exact", "validation"])
    def test_goes_on_from_another_estimate(self, earlier, tmp_path):
        first = FairBatch(groups="group", alpha=0.05, estimate=earlier)
        run = trainer(first, max_epochs=2)
        run.fit(WithValidation(), loader(), held_out())
        run.save_checkpoint(tmp_path / "last.ckpt")
        second = FairBatch(groups="group", alpha=0.05)
        resume(trainer(second, max_epochs=3), WithValidation(), loader(), tmp_path / "last.ckpt")
        assert len(second.history) == 3

    def test_made_before_the_module_moves(self):
        """`estimated_stepping_batches` in `setup` has the loader built before the module is on its device."""
        run, estimate = bare_run("cpu"), OnlineEstimate()
        estimate.start(run)
        run.module.device = torch.device("meta")
        observe_zeros(estimate, run, 40)
        assert estimate._seen.sums.is_meta

    def test_after_a_failure_a_process_waits_for_no_other(self):
        def fail(values):
            raise AssertionError("waited for the others")

        trainer = SimpleNamespace(strategy=SimpleNamespace(all_gather=fail), world_size=2)
        run, estimate = bare_run("cpu", trainer, num_replicas=2), OnlineEstimate()
        estimate.start(run)
        observe_zeros(estimate, run, 1)
        with pytest.raises(AssertionError):
            estimate.state_dict(run)
        run.failed = True
        state = estimate.state_dict(run)
        assert state["counts"].shape == (1, 2, 3)
        assert state["counts"].sum() == 20

    def test_epochs_that_end_early(self):
        module = Recording()
        callback = fit(module, loader(num_workers=2), OnlineEstimate(samples_per_cell=2), limit_train_batches=5)
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            assert len(passes) == 5
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    def test_waits_for_no_device(self):
        """The meta device has no values: whoever asks it for one, as `item()` and `cpu()` do, gets an error."""
        run, estimate = bare_run("meta"), OnlineEstimate()
        estimate.start(run)
        observe_zeros(estimate, run, 40)
        assert estimate._seen.sums.is_meta
        with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
            estimate._seen.counts.sum().item()


class TestRecentBatches:
    """Losses do not depend on when they are computed, to the last bit."""

    @staticmethod
    def focal(logits, cells):
        """A loss whose values depend on their place in the tensor: torch computes the last few of it differently."""
        return torch.sigmoid(logits.view(len(logits), -1)[:, 0]) ** 1.7

    @pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 50_000)])
    @pytest.mark.parametrize("stops", [[], [1], [3, 40], list(range(70))])
    def test_any_time_is_the_same(self, shape, stops):
        expected, found = self.losses(shape, []), self.losses(shape, stops)
        assert len(found) == 70 * 7
        assert torch.equal(found, expected)

    def losses(self, shape, stops):
        generator = torch.Generator().manual_seed(0)
        batches, losses = RecentBatches(torch.zeros(shape)), []

        def take():
            logits, cells, new = batches.take()
            losses.append(self.focal(logits, cells)[new])

        for number in range(70):
            batches.append(torch.randn(shape, generator=generator), np.arange(7) % 2)
            if batches.full or number in stops:
                take()
        if batches.waiting:
            take()
        return torch.cat(losses)

    def test_another_kind_of_logits(self):
        batches = RecentBatches(torch.zeros(4, 2))
        assert batches.fit(torch.ones(4, 2))
        assert not batches.fit(torch.ones(4, 3))
        assert not batches.fit(torch.ones(4, 2, dtype=torch.float64))
        assert not batches.fit(torch.ones(4, 2, device="meta"))
        assert not RecentBatches().fit(torch.ones(4, 2))


class AtStart(L.Callback):
    def __init__(self, act):
        self.act = act

    def on_train_start(self, run, module):
        self.act()


class WithValidation(Recording):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(batch)


def held_out(**kwargs):
    return DataLoader(Toy(130, seed=5), batch_size=40, **kwargs)


class TestValidation:
    def test_measures_the_validation_set(self):
        module, dataset = WithValidation(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out())
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            expected, counts = cell_means([entry for entry in passes if not entry[0]], dataset)
            assert counts.sum() == 130
            torch.testing.assert_close(record.losses, expected)

    def test_the_sanity_check_is_not_a_measurement(self):
        callback = fit(WithValidation(), estimate="validation", validation=held_out(), num_sanity_val_steps=2)
        assert [record.epoch for record in callback.history] == [0, 1, 2]

    def test_updates_after_every_validation(self):
        callback = fit(WithValidation(), estimate="validation", validation=held_out(), val_check_interval=4)
        assert [record.step for record in callback.history] == list(range(4, 37, 4))
        callback = fit(
            WithValidation(), estimate="validation", validation=held_out(), check_val_every_n_epoch=2, epochs=4
        )
        assert [record.epoch for record in callback.history] == [1, 3]

    def test_sampler_follows_within_the_epoch(self):
        module, data = WithValidation(), Toy()
        callback = fit(module, estimate="validation", validation=held_out(), val_check_interval=4, epochs=1)
        sampler = FairSampler(data.targets, data.group, 20, drop_last=False)
        stream, expected = sampler.batches(), []
        for record in callback.history:
            assert not torch.equal(record.shares_before, record.shares_after)
            expected += [next(stream) for _ in range(4)]
            sampler.shares = record.shares_after
        assert [samples for mode, samples, _ in module.epochs()[0] if mode] == expected

    def test_part_of_the_validation_set(self):
        module, dataset = WithValidation(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out(), limit_val_batches=2, epochs=1)
        expected, counts = cell_means([entry for entry in module.epochs()[0] if not entry[0]], dataset)
        assert counts.sum() == 80
        torch.testing.assert_close(callback.history[0].losses, expected)

    def test_standalone_validation_changes_nothing(self):
        module = WithValidation()
        callback = FairBatch(groups="group", estimate="validation")
        run = trainer(callback, max_epochs=2)
        run.fit(module, loader(), held_out())
        run.validate(module, held_out(), verbose=False)
        run.test(TestStep(), held_out(), verbose=False)
        assert len(callback.history) == 2

    def test_one_of_several_loaders(self):
        module = WithValidation()
        both = [DataLoader(Toy(30, seed=6), batch_size=40), held_out()]
        callback = fit(module, estimate=ValidationEstimate(loader=1), validation=both, epochs=1)
        expected, counts = cell_means([p for p in module.epochs()[0] if not p[0]][1:], Toy(130, seed=5))
        assert counts.sum() == 130
        torch.testing.assert_close(callback.history[0].losses, expected)

    def test_sources_of_its_own(self):
        """Groups given as an array are those of the training set only."""
        train, other = Toy(), Toy(130, seed=5)
        callback = FairBatch(groups=train.group, estimate=ValidationEstimate(groups=other.group))
        trainer(callback, max_epochs=1).fit(WithValidation(), loader(train), held_out())
        assert callback.history[0].losses.isfinite().all()

    def test_groups_unknown_in_training_are_left_out_with_a_word(self):
        train = Toy()
        known = Subset(train, [i for i in range(240) if train.group[i] != "c"])
        with pytest.warns(FairBatchWarning, match=r"\d+ of the 130 validation samples are left out.*'c'"):
            callback = fit(WithValidation(), loader(known), "validation", validation=held_out(), epochs=1)
        assert callback.history[0].losses.shape == (2, 2)

    def test_groups_missing_in_validation_take_no_part(self):
        other = Toy(130, seed=5)
        some = Subset(other, [i for i in range(130) if other.group[i] != "c"])
        callback = fit(WithValidation(), None, "validation", validation=DataLoader(some, batch_size=40), epochs=1)
        assert callback.history[0].losses[:, 2].isnan().all()
        before, after = callback.history[0].shares_before, callback.history[0].shares_after
        assert torch.equal(before[:, 2], after[:, 2])
        assert not torch.equal(before, after)

    def test_values_are_logged_for_other_callbacks(self):
        from lightning.pytorch.callbacks import EarlyStopping

        callback = FairBatch(groups="group", estimate="validation")
        run = trainer(callback, EarlyStopping("fairbatch/gap_max", patience=9), max_epochs=2)
        run.fit(WithValidation(), loader(), held_out())
        assert float(run.callback_metrics["fairbatch/gap_max"]) == pytest.approx(callback.history[-1].gap_max)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"validation": None}, "needs a validation loop"),
            ({"limit_val_batches": 0}, "needs a validation loop"),
            ({"validation": held_out(shuffle=True)}, "shuffles.*Use shuffle=False"),
            ({"validation": held_out(sampler=SubsetRandomSampler(range(99)))}, "shuffles"),
            ({"validation": held_out(num_workers=1, in_order=False)}, "in_order=False"),
            (
                {
                    "validation": CombinedLoader([held_out(), held_out()], "max_size"),
                    "estimate": ValidationEstimate(loader=0),
                },
                "one after the other.*'max_size'",
            ),
            ({"fairbatch": {"groups": Toy().group}}, r"ValidationEstimate\(groups=...\)"),
            ({"estimate": ValidationEstimate(groups=["x"] * 130)}, "130 of the 130 validation samples are left out"),
            ({"validation": [held_out(), held_out()]}, r"got 2. Name it by its position"),
            ({"estimate": ValidationEstimate(loader=3)}, "from 0 to 0.*but got 3"),
            ({"estimate": ValidationEstimate(loader="val")}, "from 0 to 0.*but got 'val'"),
            ({"estimate": ValidationEstimate(groups="nothing")}, "looks for labels and groups in the validation set"),
            ({"fairbatch": {"update_every": 3}}, "val_check_interval"),
        ],
    )
    def test_what_cannot_work_is_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            fit(module := WithValidation(), **{"estimate": "validation", "validation": held_out(), **arguments})
        assert not [entry for entry in module.passes if entry != "epoch"]  # before any training

    def test_returned_logits_win_over_the_modules_output(self):
        class Embedding(ToyModule):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(2, 2)

            def step(self, batch):
                logits = self.head(self(batch[0]))
                return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

            def training_step(self, batch, batch_idx):
                return self.step(batch)

            def validation_step(self, batch, batch_idx):
                return self.step(batch)

        module, dataset = Embedding(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out(), epochs=1)
        with torch.no_grad():
            losses = functional.cross_entropy(module.head(module(dataset.x)), dataset.targets, reduction="none")
        cell = (dataset.targets == 1) & (dataset.group_ids == 2)
        assert float(callback.history[0].losses[1, 2]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)

    def test_validation_without_logits_is_refused(self):
        class NoForward(ToyModule):
            def validation_step(self, batch, batch_idx):
                self.net(batch[0])

        with pytest.raises(RuntimeError, match="`validation_step` did not call"):
            fit(NoForward(), estimate="validation", validation=held_out())

    def test_returned_logits_will_do(self):
        class Returns(ToyModule):
            def validation_step(self, batch, batch_idx):
                return {"logits": self.net(batch[0])}

        callback = fit(Returns(), estimate="validation", validation=held_out(), epochs=1)
        assert callback.history[0].losses.isfinite().all()


class TestStep(ToyModule):
    __test__ = False

    def test_step(self, batch, batch_idx):
        pass


class TestEvaluationBatches:
    @pytest.mark.parametrize("num_samples", [1, 2, 20, 21, 41, 60])
    @pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (2, 7), (10, 10)])
    @pytest.mark.parametrize("num_replicas", [1, 2, 3])
    @pytest.mark.parametrize("as_array", [False, True])
    def test_every_sample_is_counted_once(self, num_samples, smallest, largest, num_replicas, as_array):
        samples = np.arange(num_samples, dtype=np.int32)[::-1] if as_array else range(num_samples)
        counted, lengths = [], set()
        for rank in range(num_replicas):
            batches = EvaluationBatches()
            batches.choose(samples, smallest, largest, rank, num_replicas)
            drawn = list(batches)
            lengths.add((len(drawn), *{len(batch) for batch in drawn}))
            assert all(type(sample) is int and 0 <= sample < num_samples for batch in drawn for sample in batch)
            for number, batch in enumerate(drawn):
                chosen = batches.samples(number)
                assert [sample for sample in chosen if sample >= 0] == batch[: (chosen >= 0).sum()]
                counted.extend(chosen[chosen >= 0])
        assert sorted(counted) == list(range(num_samples))
        assert len(lengths) == 1  # all processes have equally many batches, all of one size
        assert smallest <= lengths.pop()[1] <= largest


class TestExact:
    def test_batches_are_four_times_as_large(self):
        assert self.sizes(ToySizes(), "exact") == {80}

    def test_batch_size_of_ones_own(self):
        assert self.sizes(ToySizes(), ExactEstimate(batch_size=30)) == {30}

    def test_training_with_single_samples_is_evaluated_so(self):
        assert self.sizes(ToySizes(), "exact", loader(batch_size=1)) == {1}

    def test_memory_format_is_kept(self):
        class Convolution(ToyModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 1), torch.nn.Flatten(), torch.nn.Linear(32, 2))
                self.to(memory_format=torch.channels_last)
                self.formats = set()

            def on_after_batch_transfer(self, batch, dataloader_idx):
                x = batch[0][:, :, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last)
                return x, *batch[1:]

            def training_step(self, batch, batch_idx):
                self.formats.add((self.training, batch[0].is_contiguous(memory_format=torch.channels_last)))
                return super().training_step(batch, batch_idx)

        module = Convolution()
        fit(module, estimate="exact", epochs=1)
        assert module.formats == {(True, True), (False, True)}
        assert module.net[0].weight.is_contiguous(memory_format=torch.channels_last)

    def test_falls_back_when_memory_runs_out(self):
        module = ToySizes(limit=20)
        callback = fit(module, estimate="exact")
        expected = fit(ToySizes(), estimate="exact")
        assert module.sizes == {80, 20}
        torch.testing.assert_close(callback.history[-1].losses, expected.history[-1].losses)

    @pytest.mark.parametrize("num_samples", [240, 241])
    def test_compiled_modules_see_no_other_size(self, num_samples):
        module = ToySizes()
        module.net = torch.compile(module.net, backend="eager")
        assert self.sizes(module, "exact", loader(Toy(num_samples), drop_last=True)) == {20}

    def test_several_loaders_are_evaluated_in_their_sizes(self):
        class Mixed(ToySizes):
            def training_step(self, batch, batch_idx):
                x = batch[0][0] + 0 * batch[1][0]
                return super().training_step([x, *batch[0][1:]], batch_idx)

        module = Mixed()
        fit(module, [loader(), loader()], "exact", epochs=1, fairbatch={"loader": 0})
        assert module.sizes == {20}

    def test_other_errors_are_not_swallowed(self):
        with pytest.raises(torch.OutOfMemoryError):
            fit(ToySizes(limit=2), estimate="exact")

    @staticmethod
    def sizes(module, estimate, data=None):
        fit(module, data, estimate, epochs=1)
        return module.sizes


class ToySizes(ToyModule):
    """Remembers the sizes of batches that are evaluated; refuses those above a limit as a full device does."""

    def __init__(self, limit=10**6):
        super().__init__()
        self.sizes, self.limit = set(), limit

    def training_step(self, batch, batch_idx):
        if not self.training:
            self.sizes.add(len(batch[0]))
            if len(batch[0]) > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [SampledEstimate, OnlineEstimate])
@pytest.mark.parametrize("number", [0, -1, 2.5, True, "many"])
def test_bad_numbers_of_samples_are_refused(make, number):
    with pytest.raises(ValueError, match=f"`samples_per_cell` to be a positive integer but got {number!r}"):
        make(number)


@pytest.mark.parametrize("make", [SampledEstimate, OnlineEstimate, ExactEstimate])
@pytest.mark.parametrize("size", [0, 1.5, "big"])
def test_bad_batch_sizes_are_refused(make, size):
    with pytest.raises(ValueError, match=f"`batch_size` to be a positive integer but got {size!r}"):
        make(batch_size=size)


def test_estimate_of_ones_own():
    """Such as one that only looks at the last batch before an update."""

    class LastBatch(Estimate):
        watches_training = True

        def observe(self, run, logits, cells):
            self.metric = run.new_metric()
            run.add_losses(self.metric, logits, cells)

        def measure(self, run):
            return self.metric

    module = Recording()
    callback = fit(module, estimate=LastBatch(), epochs=2)
    for record, passes in zip(callback.history, module.epochs(), strict=True):
        expected, _ = cell_means(passes[-1:], Toy())
        torch.testing.assert_close(record.losses, expected, equal_nan=True)


@pytest.mark.parametrize("make", [ExactEstimate, SampledEstimate, OnlineEstimate, ValidationEstimate])
def test_a_used_callback_can_be_pickled(make):
    callback = FairBatch(groups="group", estimate=make())
    trainer(callback, max_epochs=1).fit(WithValidation(), loader(), held_out())
    again = copy.deepcopy(pickle.loads(pickle.dumps(callback)))
    trainer(again, max_epochs=1).fit(WithValidation(), loader(), held_out())
    assert torch.equal(again.history[0].losses, callback.history[0].losses)


def test_an_estimate_object_can_be_used_again():
    estimate = OnlineEstimate(samples_per_cell=4)
    first, again = fit(Recording(), estimate=estimate), fit(Recording(), estimate=estimate)
    for record, expected in zip(again.history, first.history, strict=True):
        assert torch.equal(record.losses, expected.losses)
