"""Quotas, walks and weights, each against a count of what was drawn."""

import itertools

import numpy as np
import pytest
import torch
from cell_data import SIZES, batches, data, random_shares, some_weights, weighted_data
from hypothesis import given, settings
from hypothesis import strategies as st

from fairbatch_lightning import FairSampler
from fairbatch_lightning.batches.draws import (
    CellWalks,
    EpochDraws,
    fill_batches,
    permutation,
    rounding_offsets,
    systematic,
)


@pytest.fixture(params=SIZES, ids=str)
def cells(request):
    return data(SIZES[request.param])


class TestQuotas:
    @pytest.mark.parametrize("batch_size", [1, 7, 32])
    def test_every_batch_and_the_epoch_hold_what_the_shares_say(self, cells, batch_size):
        """Each quota, and each cell's total over an epoch, is the expected number rounded up or down."""
        labels, groups = cells
        for epoch in range(5):
            shares = random_shares(labels, groups, seed=epoch)
            sampler = FairSampler(labels, groups, batch_size, shares=shares)
            sampler.set_epoch(epoch)
            drawn = batches(sampler)
            assert drawn.shape == (len(labels) // batch_size, batch_size)
            mass = torch.bincount(labels).double() / len(labels)
            for y, z in itertools.product(range(shares.shape[0]), range(shares.shape[1])):
                hits = (labels[drawn] == y) & (groups[drawn] == z)
                p = float(mass[y] * shares[y, z])
                assert (hits.sum(1) - p * batch_size).abs().max() < 1 + 1e-9
                assert abs(float(hits.sum()) - p * drawn.numel()) < 1 + 1e-6

    def test_totals_stay_close_after_any_number_of_batches(self):
        labels, groups = data(SIZES["20 cells"])
        shares = random_shares(labels, groups)
        sampler = FairSampler(labels, groups, 32, shares=shares)
        mass = (torch.bincount(labels).double() / len(labels)).unsqueeze(1) * shares
        for epoch in range(20):
            sampler.set_epoch(epoch)
            drawn = batches(sampler)
            cell_of = labels[drawn] * 5 + groups[drawn]
            counts = torch.nn.functional.one_hot(cell_of, 20).sum(1).cumsum(0)
            expected = mass.flatten() * 32 * torch.arange(1, len(drawn) + 1).unsqueeze(1)
            assert (counts - expected).abs().max() < 3

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any), st.integers(1, 40), st.integers(1, 30))
    def test_any_probabilities_are_rounded_up_or_down(self, parts, batch_size, num_batches):
        probabilities = np.array(parts) / sum(parts)
        filled = fill_batches(probabilities, batch_size, rounding_offsets(num_batches, seed=0, epoch=0))
        numbers = np.stack([(filled == cell).sum(1) for cell in range(len(parts))], 1)
        assert filled.shape == (num_batches, batch_size)
        assert (np.abs(numbers - probabilities * batch_size) < 1 + 1e-9).all()
        assert (np.abs(numbers.sum(0) - probabilities * batch_size * num_batches) < 1 + 1e-6).all()
        assert not numbers[:, probabilities == 0].any()

    @pytest.mark.parametrize("number", [1, 2, 3, 10, 97, 100])
    def test_offsets_are_evenly_spaced_in_another_order_and_elsewhere_every_epoch(self, number):
        offsets = rounding_offsets(number, seed=0, epoch=3)
        assert np.allclose(np.diff(np.sort(offsets)), 1 / number)
        assert 0 <= offsets.min() <= offsets.max() < 1
        assert not np.allclose(offsets, rounding_offsets(number, seed=0, epoch=4))
        assert not np.allclose(offsets, rounding_offsets(number, seed=1, epoch=3))

    @pytest.mark.parametrize("used", [1, 10, 37, 99])
    @pytest.mark.parametrize("seed", range(3))
    def test_no_cell_is_starved_where_only_the_first_batches_of_epochs_are_used(self, used, seed):
        """As by Trainer(limit_train_batches=10): 100 x 10 batches of 20 hold 40 samples of a cell of 4 in 2,000."""
        sizes, batch_size, epochs = np.array([4, 96, 300, 1600]), 20, 100
        offsets = [rounding_offsets(100, seed, epoch)[:used] for epoch in range(epochs)]
        filled = fill_batches(sizes / sizes.sum(), batch_size, np.concatenate(offsets))
        expected = sizes / sizes.sum() * batch_size * used * epochs
        assert np.abs(np.bincount(filled.ravel()) - expected).max() <= 5


class TestWalks:
    def test_no_sample_repeats_before_its_whole_cell_was_drawn(self, cells):
        labels, groups = cells
        sampler = FairSampler(labels, groups, 10, shares=random_shares(labels, groups, seed=3))
        walks = {}
        for i in sampler:
            walks.setdefault((int(labels[i]), int(groups[i])), []).append(i)
        for (y, z), walk in walks.items():
            size = int(((labels == y) & (groups == z)).sum())
            # Within a batch the order is shuffled, so compare how often samples were drawn, after every draw.
            times = np.bincount(walk, minlength=len(labels))[((labels == y) & (groups == z)).numpy()]
            assert times.max() - times.min() <= 1
            assert times.sum() == len(walk)
            assert len(set(walk)) == min(size, len(walk))

    def test_small_cell_walks_through_permutation_after_permutation(self):
        """A cell of 3 that fills every batch of 1: three batches hold all of its samples, whatever the epoch."""
        sampler = FairSampler([0, 0, 0, 0], ["a", "a", "a", "b"], 1, shares=torch.tensor([[1.0, 0.0]]))
        for epoch in range(50):
            sampler.set_epoch(epoch)
            assert sorted(list(sampler)[:3]) == [0, 1, 2]

    @pytest.mark.parametrize("size", [3, 1024, 1500])
    def test_any_stretch_is_the_same_without_those_before_it(self, size):
        def walks():
            return CellWalks(np.arange(size + 5), np.array([0, 5, size + 5]), seed=0, epoch=0)

        whole = walks().take(1, 0, 4000)
        for start, count in ((0, 1), (1023, 2), (1490, 1100), (3999, 1)):
            assert walks().take(1, start, count).tolist() == whole[start : start + count].tolist()
        assert set(whole.tolist()) == set(range(5, size + 5))

    def test_a_permutation_holds_every_number_once_and_depends_on_its_key(self):
        orders = [permutation(100, *key).tolist() for key in ((0, 1), (0, 1), (1, 0), (0, 2))]
        assert sorted(orders[0]) == list(range(100))
        assert orders[0] == orders[1]
        assert orders[0] not in orders[2:]


class TestWeights:
    def test_a_sample_is_drawn_as_often_as_its_weight_says(self):
        """In an epoch its expected number rounded up or down, so that the error of many epochs is small."""
        labels, groups = weighted_data()
        weights = some_weights(len(labels))
        sampler = FairSampler(labels, groups, 20, weights=weights)
        epochs = 40
        samples = torch.cat([batches(sampler).flatten() for _ in range(epochs)])
        drawn = np.bincount(samples, minlength=len(labels))
        for cell in np.unique(labels * 3 + groups):
            members = np.flatnonzero(labels * 3 + groups == cell)
            expected = drawn[members].sum() * weights[members] / weights[members].sum()
            assert np.abs(drawn[members] - expected).max() < 2 * np.sqrt(epochs)

    def test_equal_weights_draw_every_sample_once(self):
        labels, groups = weighted_data()
        sampler = FairSampler(labels, groups, 20, weights=np.full(len(labels), 0.3))
        assert sorted(batches(sampler).numpy().ravel()) == list(range(len(labels)))

    def test_quotas_do_not_depend_on_weights(self):
        labels, groups = weighted_data()
        plain, weighted = (FairSampler(labels, groups, 20, weights=w) for w in (None, some_weights(len(labels))))
        cells = labels * 3 + groups
        assert (cells[batches(plain).numpy()] == cells[batches(weighted).numpy()]).all()

    def test_a_weight_of_zero_leaves_a_sample_out(self):
        labels, groups = weighted_data()
        weights = np.ones(len(labels))
        weights[:50] = 0
        drawn = batches(FairSampler(labels, groups, 20, weights=weights)).numpy()
        assert drawn.min() == 50

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any), st.integers(1, 200), st.integers(0, 5))
    def test_systematic_draws_are_the_expected_numbers_rounded_up_or_down(self, weights, count, seed):
        weights = np.array(weights, float)
        drawn = systematic(weights, count, np.random.default_rng(seed))
        numbers = np.bincount(drawn, minlength=len(weights))
        assert len(drawn) == count
        assert (np.abs(numbers - count * weights / weights.sum()) < 1 + 1e-9).all()
        assert not numbers[weights == 0].any()

    def test_a_place_behind_the_last_weight_is_never_drawn(self):
        """Rounding may put a point at the very end of the line."""

        class Last:
            def random(self):
                return 1.0

        assert systematic(np.array([0.1] * 10 + [0.0]), 10, Last()).max() == 9

    def test_new_weights_begin_new_walks_and_the_old_ones_come_back(self):
        order, edges = np.arange(50), np.array([0, 50])
        draws = EpochDraws(order, edges, num_batches=5, batch_size=10, seed=0, epoch=0)
        cells, drawn = draws.cells(np.ones(1), 0, 5), np.zeros(1, np.int64)
        plain = draws.samples(cells, drawn)
        weights = np.where(order < 10, 1.0, 0.0)
        assert draws.samples(cells, drawn, weights).max() == 9
        assert np.array_equal(draws.samples(cells, drawn), plain)
