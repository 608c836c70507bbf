"""What the silent pass evaluates at once: every sample once, as many as there is room for."""

import time

import numpy as np
import pytest
import torch
from estimating import fit
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import ExactEstimate, FairBatch
from fairbatch_lightning.measure.estimates.silent_pass import EvaluationBatches


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


class TestSizes:
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


def test_fast_dev_run_is_fast():
    seen = []

    class Counting(ToyModule):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    trainer(FairBatch(groups="group", estimate="exact"), fast_dev_run=2).fit(Counting(), loader())
    assert len(seen) == 4


class SlowStart(Toy):
    """Its first samples take long, so that a second worker overtakes the first."""

    def __getitem__(self, index):
        time.sleep(0.05 if index < 20 else 0)
        return super().__getitem__(index)


@pytest.mark.slow
def test_batches_are_told_apart_when_workers_overtake_each_other():
    expected, callback = FairBatch(groups="group", estimate="exact"), FairBatch(groups="group", estimate="exact")
    trainer(expected, max_epochs=1).fit(ToyModule(), loader())
    trainer(callback, max_epochs=1).fit(ToyModule(), loader(SlowStart(), num_workers=2, in_order=False))
    torch.testing.assert_close(callback.history[0].losses, expected.history[0].losses)


def test_modules_that_cannot_take_a_single_sample():
    """241 samples leave one for the last batch: it is filled up, and the filling not counted."""

    class Squeezing(ToyModule):
        def forward(self, x):
            return self.net(x).diff().squeeze()

        def training_step(self, batch, batch_idx):
            return functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

    module, callback, dataset = Squeezing(), FairBatch(groups="group", rule="paper"), Toy(241)
    trainer(callback, max_epochs=1).fit(module, DataLoader(dataset, batch_size=20, shuffle=True, drop_last=True))
    with torch.no_grad():
        losses = functional.binary_cross_entropy_with_logits(
            module(dataset.x), dataset.targets.float(), reduction="none"
        )
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)
