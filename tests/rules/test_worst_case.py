"""FairDRO's rule against brute force over mixtures of groups."""

import math

import numpy as np
import pytest
import torch
from helpers import ToyModule, loader, measurement, trainer

from fairbatch_lightning import FairBatch, WorstCase
from fairbatch_lightning.rules.worst_case import worst_shares


class TestWorstCase:
    @pytest.mark.parametrize("radius", [0.01, 0.2, 0.5, 1.0, 5.0])
    def test_shares_are_the_worst_within_the_radius(self, radius):
        """No point of many within the radius is worse, and the result is within it itself."""
        random = np.random.default_rng(0)
        for _ in range(20):
            number = int(random.integers(2, 6))
            losses = torch.tensor(random.exponential(size=number))
            found = worst_shares(losses, radius)
            others = torch.tensor(random.dirichlet(np.full(number, 0.5), size=20_000))
            distance = ((number * others - 1) ** 2).sum(1, keepdim=True) / (2 * number)
            others = 1 / number + (others - 1 / number) * (radius / distance).sqrt().clamp(max=1)  # all within it
            assert float(((number * found - 1) ** 2).sum() / (2 * number)) <= radius + 1e-9
            assert float(found.sum()) == pytest.approx(1)
            assert found.min() >= 0
            assert float((others @ losses).max()) <= float(found @ losses) + 1e-9

    def test_equal_losses_have_equal_shares(self):
        torch.testing.assert_close(worst_shares(torch.ones(4), 0.5), torch.full((4,), 0.25))

    def test_starts_with_equal_shares_and_moves_towards_the_worst(self):
        callback = FairBatch(groups="group", rule=WorstCase(alpha=0.25, radius=0.1))
        trainer(callback, max_epochs=1).fit(ToyModule(), loader())
        record = callback.history[0]
        assert torch.equal(record.shares_before, torch.full((2, 3), 1 / 3, dtype=torch.float64))
        for row in range(2):
            expected = 0.75 / 3 + 0.25 * worst_shares(record.losses[row], 0.1)
            torch.testing.assert_close(record.shares_after[row], expected)

    def test_groups_without_a_signal_keep_their_share(self):
        rule, counts = WorstCase(alpha=0.5, radius=0.1), torch.tensor([[5, 5, 5, 0], [5, 5, 0, 0]])
        start = rule.start(counts)
        assert torch.equal(
            start.shares, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [0.5, 0.5, 0, 0]], dtype=torch.float64)
        )
        nan = torch.nan
        state = rule.update(start, measurement(torch.tensor([[0.1, nan, 0.7, nan], [nan, nan, nan, nan]]), counts))
        assert state.shares[0, 1] == start.shares[0, 1]
        assert torch.equal(state.shares[1], start.shares[1])
        expected = 0.5 / 3 + 0.5 * 2 / 3 * worst_shares(torch.tensor([0.1, 0.7]).double(), 0.1)
        torch.testing.assert_close(state.shares[0, [0, 2]], expected)

    def test_alpha_may_fall_from_1_to_0(self):
        counts, signal = torch.tensor([[5, 5, 5]]), torch.tensor([[0.1, 0.2, 0.9]]).double()
        rule = WorstCase(alpha=lambda update: (1.0, 0.5, 0.0, 5.0)[update], radius=0.1)
        state = rule.update(rule.start(counts), measurement(signal, counts))
        worst = worst_shares(signal[0], 0.1)
        torch.testing.assert_close(state.shares[0], worst)
        again = rule.update(state, measurement(signal.flip(1), counts))
        torch.testing.assert_close(again.shares[0], (worst + worst.flip(0)) / 2)
        third = rule.update(again, measurement(signal, counts))
        assert torch.equal(third.shares, again.shares)
        with pytest.raises(ValueError, match=r"from 0 to 1 but got 5.0 from the function for update 3"):
            rule.update(third, measurement(signal, counts))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"radius": 0}, "`radius` to be a number above 0 but got 0"),
            ({"radius": -1.0}, "`radius` to be a number above 0 but got -1.0"),
            ({"radius": math.nan}, "`radius` to be a number above 0 but got nan"),
            ({"radius": "0.5"}, "`radius` to be a number above 0 but got '0.5'"),
            ({"alpha": -0.1}, "`alpha` to be a number from 0 to 1 but got -0.1"),
        ],
    )
    def test_bad_settings_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            WorstCase(**arguments)
