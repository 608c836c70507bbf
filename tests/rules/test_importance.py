"""Which samples of a cell are drawn more often."""

import numpy as np
import pytest
from cell_data import weighted_data

from fairbatch_lightning import GroupIndex, LossRank


class TestLossRank:
    def test_ranks_within_cells(self):
        """Against a plain loop, with unknown losses counted as the largest."""
        labels, groups = weighted_data()
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
        index, losses = GroupIndex.from_values(*weighted_data()), np.arange(600.0)
        rank = LossRank(pressure=100, decay=0.9)
        assert (rank.weights(losses, index, update=43) < 1).any()
        assert (rank.weights(losses, index, update=44) == 1).all()

    def test_the_default_is_mild_and_falls_slowly(self):
        index, losses = GroupIndex.from_values(*weighted_data()), np.arange(600.0)
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

    def test_losses_are_not_changed(self):
        index, losses = GroupIndex.from_values(*weighted_data()), np.random.default_rng(0).random(600)
        losses[::7] = np.nan
        before = losses.copy()
        LossRank().weights(losses, index, update=0)
        np.testing.assert_array_equal(losses, before)

    def test_is_read_as_it_is_written(self):
        assert repr(LossRank(10, decay=0.98)) == "LossRank(pressure=10, decay=0.98)"
