"""Estimates that evaluate training samples measure what they say, and cost what they say."""

import itertools

import numpy as np
import pytest
import torch
from estimating import Watched, cell_means, fit
from helpers import Toy, ToyModule, loader

from fairbatch_lightning import ExactEstimate, GroupIndex, SampledEstimate
from fairbatch_lightning.measure.estimates.training_set import draw


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


class TestExact:
    def test_measures_every_sample_once_in_evaluation_mode(self):
        module, dataset = Watched(), Toy(241)
        callback = fit(module, loader(dataset), ExactEstimate())
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            evaluated = {
                sample: loss
                for mode, samples, losses in passes
                if not mode
                for sample, loss in zip(samples, losses, strict=True)  # what fills up the last batch is there twice
            }
            expected, counts = cell_means([(False, list(evaluated), list(evaluated.values()))], dataset)
            assert counts.sum() == 241
            torch.testing.assert_close(record.losses, expected)

    def test_by_name_and_as_an_object_are_the_same(self):
        by_name, as_object = fit(ToyModule(), estimate="exact"), fit(ToyModule(), estimate=ExactEstimate())
        for record, expected in zip(as_object.history, by_name.history, strict=True):
            assert torch.equal(record.losses, expected.losses)


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
