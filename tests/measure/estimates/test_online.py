"""The estimate that costs nothing: it measures the batches that are trained on, and others only where it must."""

from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from estimating import Recording, Watched, WithValidation, bare_run, cell_means, fit, held_out
from helpers import Toy, loader, resume, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from fairbatch_lightning import FairBatch, OnlineEstimate, SignedSteps
from fairbatch_lightning.measure.estimates.online import RecentBatches, affordable


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
        rule, estimate = SignedSteps(alpha=1e-300), OnlineEstimate(samples_per_cell=12)
        callback = FairBatch(groups="group", rule=rule, estimate=estimate)
        run = trainer(callback, max_epochs=1)

        def starve():
            shares = callback.shares
            shares[1] = torch.tensor([0.5, 0.5, 0.0])
            callback._fit.state = replace(callback._fit.state, shares=shares)
            callback._batches.sampler.shares = shares

        run.callbacks.append(AtStart(starve))
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
        rule, estimate = SignedSteps(), OnlineEstimate(10**6)
        callback = FairBatch("equal_opportunity", groups="group", rule=rule, estimate=estimate)
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

        module, estimate = Recording(), OnlineEstimate(samples_per_cell=4)
        callback = FairBatch(groups="group", rule=SignedSteps(), estimate=estimate)
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
        first = FairBatch(groups="group", rule=SignedSteps(alpha=0.05), estimate=earlier)
        run = trainer(first, max_epochs=2)
        run.fit(WithValidation(), loader(), held_out())
        run.save_checkpoint(tmp_path / "last.ckpt")
        second = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
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
        with pytest.raises(AssertionError, match="waited for the others"):
            estimate.state_dict(run, alone=False)
        state = estimate.state_dict(run, alone=True)
        assert state["counts"].shape == (1, 2, 3)
        assert state["counts"].sum() == 20

    def test_epochs_that_end_early(self):
        module = Recording()
        callback = fit(module, loader(num_workers=2), OnlineEstimate(samples_per_cell=2), limit_train_batches=5)
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            assert len(passes) == 5
            torch.testing.assert_close(record.losses, cell_means(passes, Toy())[0])

    def test_waits_for_no_device(self):
        """The meta device has no values: observing would fail if it asked for one, as measuring and saving do."""
        run, estimate = bare_run("meta"), OnlineEstimate()
        estimate.start(run)
        observe_zeros(estimate, run, 40)
        assert estimate._batches.number == 40  # more than wait to be added at once
        logits, _ = estimate._batches.all()
        assert all(values.is_meta for values in (logits, estimate._seen.sums, estimate._seen.counts))
        with pytest.raises(NotImplementedError, match="meta"):
            estimate.measure(run, 0, uniform=True)
        with pytest.raises(NotImplementedError, match="meta"):
            estimate.state_dict(run, alone=True)


def observe_zeros(estimate, run, number):
    """Show an estimate some batches."""
    for _ in range(number):
        estimate.observe(run, torch.zeros(20, 2, device=run.module.device), run.index.cells[:20])


class AtStart(L.Callback):
    def __init__(self, act):
        self.act = act

    def on_train_start(self, run, module):
        self.act()


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
            values = self.focal(*batches.all())
            losses.append(values[batches.take()])

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
