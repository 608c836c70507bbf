"""The default rule: one set of constants for any labels, groups and lengths of training."""

import math

import numpy as np
import pytest
import torch
from helpers import FollowedRule, index_of_counts, measurement
from hypothesis import given, settings
from hypothesis import strategies as st

from fairbatch_lightning import Adaptive, DemographicParity, EqualizedOdds, EqualOpportunity
from fairbatch_lightning.rules import adaptive
from fairbatch_lightning.rules.adaptive import DAMPING, DOUBT, GAIN, LIMIT, SETTLING

COUNTS = torch.tensor([[300, 100], [200, 200]])
ERRORS = torch.tensor([[0.1, 0.3], [0.4, 0.2]], dtype=torch.float64)


def by_hand(errors_of_updates, counts, passed=0.01, common=adaptive.COMMON):
    """The formula of the docs, cell by cell in numpy, for equalized odds and errors `(Y, Z)` of every update."""
    counts = np.asarray(counts, dtype=float)
    natural = counts / counts.sum(1, keepdims=True)
    integral, turns, before = np.zeros_like(counts), 0, np.zeros_like(counts)
    for errors in np.asarray(errors_of_updates):
        difference = np.zeros_like(errors)
        for y in range(len(errors)):
            mean = (errors[y] * counts[y]).sum() / counts[y].sum()
            for z in range(len(errors[y])):
                rate = (errors[y, z] * counts[y, z] + 1) / (counts[y, z] + 2)
                noise = DOUBT * math.sqrt(rate * (1 - rate) / counts[y, z])
                away = errors[y, z] - mean
                difference[y, z] = np.sign(away) * max(0.0, abs(away) - noise)
        turns = turns + ((difference * before).sum(1) < 0)
        before, slowed = difference, difference / (1 + DAMPING * np.broadcast_to(turns, 2))[:, None]
        integral = integral + GAIN * passed / SETTLING * slowed
        integral = integral - common * passed * integral.mean(0)
        integral = integral.clip(-LIMIT, LIMIT)
        weights = natural * np.exp((integral + GAIN * slowed).clip(-LIMIT, LIMIT))
    return weights / weights.sum(1, keepdims=True)


class TestFormula:
    @pytest.mark.parametrize("updates", [1, 2, 30])
    def test_is_that_of_the_docs(self, updates):
        training = FollowedRule(Adaptive(), COUNTS)
        for _ in range(updates):
            gaps = training.update(ERRORS)
        torch.testing.assert_close(training.shares, torch.tensor(by_hand([ERRORS.numpy()] * updates, COUNTS)))
        assert gaps.tolist() == pytest.approx([0.15, 0.1])  # from .15 and .3, the rates of all

    def test_who_is_worse_off_gains_in_all_rows_at_once(self):
        training = FollowedRule(Adaptive(), COUNTS)
        training.update(ERRORS)
        assert training.shares[0, 1] > 0.25
        assert training.shares[1, 0] > 0.5

    def test_equal_errors_move_nothing(self):
        training = FollowedRule(Adaptive(), COUNTS)
        for _ in range(10):
            training.update(torch.full((2, 2), 0.3))
        torch.testing.assert_close(training.shares, COUNTS / COUNTS.sum(1, keepdim=True).double())

    def test_shares_stay_when_nothing_is_known(self):
        training = FollowedRule(Adaptive(), COUNTS)
        for _ in range(5):
            training.update(ERRORS)
        before = training.state.memory["integral"]
        training.update(torch.full((2, 2), torch.nan), passed=0.0)
        assert torch.equal(training.state.memory["integral"], before)

    def test_turning_round_slows_a_row_and_no_other(self):
        training = FollowedRule(Adaptive(), COUNTS)
        turned = ERRORS.clone()
        turned[0] = torch.tensor([0.3, 0.1])
        for number in range(6):
            training.update(turned if number % 2 else ERRORS)
        assert training.state.memory["turns"].tolist() == [5, 0]
        expected = by_hand([turned.numpy() if number % 2 else ERRORS.numpy() for number in range(6)], COUNTS)
        torch.testing.assert_close(training.shares, torch.tensor(expected))

    def test_a_training_of_few_updates_takes_no_wild_steps(self):
        """A third of a training is more than the settling time; it counts as a part of it."""
        short, long = FollowedRule(Adaptive(), COUNTS), FollowedRule(Adaptive(), COUNTS)
        short.update(ERRORS, passed=1 / 3)
        long.update(ERRORS, passed=1.0)
        change = short.state.memory["integral"].abs().max()
        assert 0 < change <= GAIN * 0.5 * 0.15
        assert float(long.state.memory["integral"].abs().max()) <= GAIN * 0.5 * 0.15

    def test_what_may_be_noise_is_left_alone(self):
        moved = []
        for number in (2.0, 30.0, 1e9):
            training = FollowedRule(Adaptive(), COUNTS)
            training.update(ERRORS, samples=torch.full((2, 2), number))
            moved.append(float(np.log(training.shares[0, 1] / training.shares[0, 0] * 3)))
        assert moved[0] == pytest.approx(0)
        assert 0 < moved[1] < 0.6 * moved[2]


class TestAnyData:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_shares_stay_shares_and_nobody_is_starved(self, data):
        labels, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        seed = data.draw(st.integers(0, 10**6))
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 50, (labels, groups), generator=generator)
        counts[:, 0] += 1
        criterion = data.draw(
            st.sampled_from([EqualizedOdds(), EqualOpportunity(0), DemographicParity(0), EqualizedOdds(min_samples=5)])
        )
        training = FollowedRule(Adaptive(), counts)
        for _ in range(30):
            errors = torch.rand((labels, groups), generator=generator).round(decimals=1)
            samples = torch.randint(0, 30, (labels, groups), generator=generator)
            gaps = training.update(errors.where(samples > 0, torch.nan), criterion, samples=samples, passed=0.2)
            shares = training.shares
            assert shares.isfinite().all()
            torch.testing.assert_close(shares.sum(1), torch.ones(labels).double())
            assert ((shares == 0) == (counts == 0)).all()
            assert (gaps.isnan() | (gaps >= 0)).all()
            natural = counts / counts.sum(1, keepdim=True).double()
            assert (shares >= natural / 64 - 1e-12).all()

    def test_a_thousand_cells(self):
        counts = torch.full((20, 50), 3)
        training = FollowedRule(Adaptive(), counts)
        for number in range(20):
            samples = torch.zeros(20, 50)
            samples.view(-1)[number::20] = 1  # a small batch sees few of them
            training.update((samples / 2).where(samples > 0, torch.nan), samples=samples)
        assert training.shares.isfinite().all()

    @pytest.mark.parametrize("row", [0, 1])
    def test_equal_opportunity_moves_the_positive_row_only(self, row):
        training = FollowedRule(Adaptive(), COUNTS)
        for _ in range(20):
            gaps = training.update(ERRORS, EqualOpportunity(positive_label=row))
        natural = COUNTS / COUNTS.sum(1, keepdim=True).double()
        torch.testing.assert_close(training.shares[1 - row], natural[1 - row])
        assert (training.shares[row] - natural[row]).abs().max() > 0.05
        assert gaps.isnan().tolist() == [row == 1, row == 0]

    def test_demographic_parity_gives_who_is_predicted_positive_too_seldom_more_of_it_and_less_of_the_rest(self):
        against_positive = torch.tensor([[0.9, 0.5], [0.6, 0.1]])  # group 0 is predicted positive less often
        training = FollowedRule(Adaptive(), COUNTS)
        gaps = training.update(against_positive, DemographicParity(positive_label=1))
        rates = ((1 - against_positive) * COUNTS).sum(0) / COUNTS.sum(0)
        overall = float(((1 - against_positive) * COUNTS).sum() / COUNTS.sum())
        assert gaps.tolist() == pytest.approx([float((rates - overall).abs().max())] * 2)
        assert training.shares[1, 0] > 0.5
        assert training.shares[0, 0] < 0.75

    def test_order_of_groups_does_not_matter(self):
        order = [2, 0, 1]
        counts = torch.tensor([[30, 100, 20], [50, 60, 70]])
        errors = torch.tensor([[0.1, 0.3, 0.2], [0.4, 0.2, 0.3]])
        one, other = FollowedRule(Adaptive(), counts), FollowedRule(Adaptive(), counts[:, order])
        for _ in range(5):
            one.update(errors)
            other.update(errors[:, order])
        torch.testing.assert_close(other.shares, one.shares[:, order])


def settled(rule, response=0.4, updates=200, noise=0.0):
    """Let the rule control a classifier with a threshold for each group, which answers the shares; return the last gap.

    What a group gains with one label it loses with the other.
    """
    generator = np.random.default_rng(0)
    training = FollowedRule(rule, COUNTS)
    natural = COUNTS / COUNTS.sum(1, keepdim=True).double()
    errors = torch.tensor([[0.2, 0.3], [0.3, 0.2]], dtype=torch.float64)
    recent, kept = errors, math.exp(-1 / updates / rule.window)
    for _ in range(updates):
        tilt = (training.shares / natural).log()
        lower = response * (tilt[1] - tilt[0])
        now = (errors + torch.stack([lower, -lower])).clamp(0, 1)
        seen = now + noise * torch.tensor(generator.normal(size=(2, 2)))
        recent = torch.lerp(seen.clamp(0, 1), recent, kept)
        training.update(recent, samples=torch.full((2, 2), 1e5), passed=1 / updates)
    return float(rule.gaps(measurement(now, COUNTS)).max())


class TestControl:
    @pytest.mark.parametrize("response", [0.1, 0.2, 0.4, 0.6])
    @pytest.mark.parametrize("updates", [50, 200, 1000])
    def test_gaps_close_whatever_the_response_and_the_length(self, response, updates):
        assert settled(Adaptive(), 0.0) > 0.06
        assert settled(Adaptive(), response, updates=updates) < 0.01

    @pytest.mark.parametrize("noise", [0.02, 0.05])
    def test_noise_does_not_carry_it_away(self, noise):
        assert settled(Adaptive(), noise=noise) < noise

    @pytest.mark.parametrize("tolerance", [0.01, 0.02, 0.05])
    def test_tolerance_is_where_gaps_stop(self, tolerance):
        assert settled(Adaptive(tolerance)) == pytest.approx(tolerance, abs=0.01)

    @pytest.mark.parametrize("tolerance", [0.2, math.inf])
    def test_a_tolerance_that_is_met_changes_nothing(self, tolerance):
        training = FollowedRule(Adaptive(tolerance), COUNTS)
        training.update(ERRORS)
        torch.testing.assert_close(training.shares, COUNTS / COUNTS.sum(1, keepdim=True).double())

    @pytest.mark.parametrize("tolerance", [-0.1, math.nan, "much", True])
    def test_a_tolerance_is_a_number(self, tolerance):
        with pytest.raises(ValueError, match="argument `tolerance` to be a number of at least 0 but got"):
            Adaptive(tolerance)


class TestRemark:
    def remark(self, errors, updates=200, rule=None, criterion=None, counts=None):
        counts = torch.full((2, 2), 1000) if counts is None else counts
        training = FollowedRule(rule or Adaptive(), counts)
        for _ in range(updates):
            training.update(errors, criterion, passed=1 / updates)
        return training.rule.remark(training.state, measurement(errors, counts, criterion))

    def test_nothing_to_say_of_fair_or_young_trainings(self):
        assert self.remark(torch.full((2, 2), 0.3)) is None
        assert self.remark(torch.tensor([[0.3, 0.31], [0.3, 0.29]])) is None  # noise
        assert self.remark(torch.tensor([[0.1, 0.9], [0.3, 0.3]]), updates=5) is None

    def test_shares_at_their_limit(self):
        text = self.remark(torch.tensor([[0.3, 0.3], [0.1, 0.9]]), criterion=EqualOpportunity())
        assert text.startswith("No composition of the batches makes the groups equal here")
        assert "by -0.400 for label 1, group 0, +0.400 for label 1, group 1. The shares stand at their limit." in text
        assert "data of group" in text
        assert "tolerance" in text

    def test_labels_that_ask_for_opposite_things(self):
        text = self.remark(torch.tensor([[0.2, 0.3], [0.2, 0.3]]))
        assert "Labels ask for opposite things" in text

    def test_a_gap_within_the_tolerance_is_no_cause_for_a_word(self):
        assert self.remark(torch.tensor([[0.2, 0.3], [0.2, 0.3]]), rule=Adaptive(tolerance=0.06)) is None

    def test_who_would_need_data_is_worse_off(self):
        text = self.remark(torch.tensor([[0.1, 0.3], [0.1, 0.3]]), counts=torch.tensor([[200, 2000], [200, 2000]]))
        assert "by -0." in text  # the small group is further from all
        assert "More or better data of group 1 would help" in text

    @pytest.mark.parametrize(
        ("criterion", "errors"),
        [
            (EqualizedOdds(), [[0.0, 0.01], [0.001, 0.0]]),
            (DemographicParity(), [[1.0, 0.995], [0.001, 0.0]]),  # against the positive label
        ],
    )
    def test_a_training_set_learnt_by_heart(self, criterion, errors):
        text = self.remark(torch.tensor(errors), criterion=criterion)
        assert "next to no errors" in text
        assert 'estimate="validation"' in text


def test_the_gap_is_the_disparity_that_is_reported():
    """Of random predictions: what the monitor calls equalized odds, equal opportunity and demographic parity."""
    from fairbatch_lightning.fairness import Audit

    generator = torch.Generator().manual_seed(0)
    confusion = torch.randint(1, 60, (3, 2, 2), generator=generator)  # (groups, labels, predictions)
    audit = Audit(confusion, ("0", "1"), ("a", "b", "c"), 1).values()
    counts = confusion.sum(2).T
    wrong = torch.stack([confusion[:, 0, 1], confusion[:, 1, 0]]) / counts
    negative = confusion[:, :, 0].T / counts
    for criterion, name, errors in (
        (EqualizedOdds(), "equalized_odds", wrong),
        (EqualOpportunity(), "equal_opportunity", wrong),
        (DemographicParity(), "demographic_parity", negative),
    ):
        gaps = Adaptive().gaps(measurement(errors, counts, criterion))
        assert float(gaps.nan_to_num(0).max()) == pytest.approx(audit[name], abs=1e-6), name


@pytest.mark.parametrize("criterion", [EqualizedOdds(), DemographicParity()])
def test_noise_is_how_much_measured_rates_scatter(criterion):
    """Brute force: the spread of rates over many draws of samples, of cells that are seen unequally often."""
    index, samples = index_of_counts([[30, 10], [10, 20]]), torch.tensor([[50.0, 80.0], [500.0, 40.0]])
    errors = torch.tensor([[0.3, 0.1], [0.4, 0.2]]).double()
    random = np.random.default_rng(0)
    seen = torch.tensor(random.binomial(samples.long().numpy(), errors.numpy(), size=(20_000, 2, 2))) / samples
    rates = seen
    if isinstance(criterion, DemographicParity):
        parts = index.counts / index.counts.sum(0)
        rates = (seen * parts).sum(1, keepdim=True).expand(-1, 2, -1)
    torch.testing.assert_close(criterion.noise(errors, samples, index), rates.std(0).double(), rtol=0.05, atol=0.0)


def test_nothing_seen_is_nothing_known():
    index = index_of_counts([[30, 10], [10, 20]])
    noise = EqualizedOdds().noise(torch.full((2, 2), torch.nan), torch.zeros(2, 2), index)
    assert noise.isinf().all()
