"""The paper's rule for any number of labels and groups."""

import math

import pytest
import torch
from helpers import FollowedRule, index_of_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from fairbatch_lightning import EqualizedOdds, RuleState, SignedSteps
from fairbatch_lightning.rules.criteria import row_gaps
from fairbatch_lightning.rules.signed_steps import lift_to_floor, transfers


def test_neighbouring_floats_still_differ():
    """The mean of two neighbouring floats is one of them; the larger must gain all the same."""
    low = 0.1
    high = math.nextafter(low, 1)
    training = FollowedRule(SignedSteps(alpha=0.1), torch.tensor([[5, 5]]))
    training.update(torch.tensor([[high, low]], dtype=torch.float64))
    assert training.shares[0].tolist() == pytest.approx([0.6, 0.4])


def test_tie_moves_nothing():
    training = FollowedRule(SignedSteps(alpha=0.1), torch.tensor([[1, 3], [2, 2]]))
    before = training.shares
    gaps = training.update(torch.full((2, 2), 0.7))
    assert gaps.tolist() == [0, 0]
    assert torch.equal(training.shares, before)


def test_tolerance_leaves_gaps_up_to_it_alone():
    training = FollowedRule(SignedSteps(alpha=0.1, tolerance=0.25), torch.tensor([[2, 2]]))
    training.update(torch.tensor([[0.5, 0.25]], dtype=torch.float64))
    assert training.shares.tolist() == [[0.5, 0.5]]
    training.update(torch.tensor([[0.5, 0.2499]], dtype=torch.float64))
    assert training.shares[0].tolist() == pytest.approx([0.6, 0.4])


def test_an_infinite_tolerance_is_plain_training():
    training = FollowedRule(SignedSteps(alpha=0.1, tolerance=math.inf), torch.tensor([[2, 3]]))
    training.update(torch.tensor([[9.0, 0.0]]))
    assert training.shares.tolist() == [[0.4, 0.6]]


def test_alpha_schedule_counts_updates():
    seen = []

    def alpha(update):
        seen.append(update)
        return 0.1 / (update + 1)

    training = FollowedRule(SignedSteps(alpha=alpha), torch.tensor([[2, 2]]))
    for _ in range(3):
        training.update(torch.tensor([[1.0, 0.0]]))
    assert seen == [0, 1, 2]
    assert training.shares[0, 0] == pytest.approx(0.5 + 0.1 + 0.05 + 0.1 / 3)


def test_alpha_schedule_that_returns_nonsense_is_refused():
    training = FollowedRule(SignedSteps(alpha=lambda update: -1), torch.tensor([[2, 2]]))
    with pytest.raises(ValueError, match="number above 0 but got -1 from the function for update 0"):
        training.update(torch.tensor([[1.0, 0.0]]))


@st.composite
def problems(draw, distinct=False):
    num_labels, num_groups = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = num_labels * num_groups
    counts = torch.tensor(draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))).view(num_labels, num_groups)
    counts[:, 0] = counts[:, 0].clamp(min=1)
    values = st.floats(0, 5) if not distinct else st.floats(0, 5, width=32)
    signals = [
        torch.tensor(draw(st.lists(values, min_size=size, max_size=size, unique=distinct)), dtype=torch.float64).view(
            num_labels, num_groups
        )
        for _ in range(draw(st.integers(1, 6)))
    ]
    signals = [EqualizedOdds().compared(signal, index_of_counts(counts)) for signal in signals]
    return counts, signals


@settings(deadline=None, max_examples=300)
@given(
    problems(),
    st.sampled_from(["row", "neighbours", "all"]),
    st.sampled_from([0.001, 0.1, 0.7]),
    st.sampled_from([0.0, 0.02, 0.2]),
)
def test_shares_stay_shares(problem, compare, alpha, min_share):
    counts, signals = problem
    training = FollowedRule(SignedSteps(alpha=alpha, min_share=min_share, compare=compare), counts)
    present = counts > 0
    for signal in signals:
        before = training.shares
        gaps = training.update(signal)
        shares = training.shares
        torch.testing.assert_close(shares.sum(1), torch.ones(len(shares), dtype=torch.float64))
        assert (shares[present] >= min_share).all()
        assert (shares <= 1 + 1e-12).all()
        assert (shares[~present] == 0).all()
        moved = (shares != before).any(1).nonzero().flatten().tolist()
        known = gaps[~gaps.isnan()]
        assert all(gaps[row] == known.max() for row in moved)
        assert len(moved) <= 1


class TestPull:
    def test_all_rows_go_back_after_the_step(self):
        training = FollowedRule(SignedSteps(alpha=0.1, pull=2.0), torch.tensor([[30, 10], [20, 20]]))
        training.update(torch.tensor([[0.2, 0.6], [0.3, 0.4]]))
        torch.testing.assert_close(training.shares[0, 1], torch.tensor(0.25 + 0.8 * 0.1).double())
        training.update(torch.tensor([[0.2, 0.2], [0.3, 0.4]]))
        torch.testing.assert_close(training.shares[0, 1], torch.tensor(0.25 + 0.8**2 * 0.1).double())
        torch.testing.assert_close(training.shares[1, 1], torch.tensor(0.5 + 0.8 * 0.1).double())

    @pytest.mark.parametrize("pull", [1.5, 4.0, 1000.0])
    def test_shares_go_no_further_than_it_lets_them(self, pull):
        training = FollowedRule(SignedSteps(alpha=0.01, pull=pull), torch.tensor([[90, 10]]))
        for _ in range(2000):
            training.update(torch.tensor([[0.1, 0.9]]))
        assert training.shares[0, 1] - 0.1 <= 1 / pull
        if pull < 100:
            assert training.shares[0, 1] - 0.1 > 0.95 * min(1 / pull - 0.01, 0.9)

    def test_no_drift_along_equally_fair_shares(self):
        """Where only the difference of the labels' shares matters, and nothing is fair to both labels at once."""
        ends = {}
        for pull in (0.0, 3.0):
            training = FollowedRule(SignedSteps(alpha=0.005, pull=pull), torch.tensor([[60, 40], [60, 40]]))
            for _ in range(2000):
                lean = float(training.shares[0, 0] - training.shares[1, 0])
                training.update(torch.tensor([[0.2 - lean, 0.1], [0.2 + lean, 0.1]]))
            ends[pull] = training.shares[:, 0]
        assert (ends[0.0] > 0.99).all()
        torch.testing.assert_close(ends[3.0], torch.full((2,), 0.6 + 1 / 6).double(), atol=0.01, rtol=0)

    @settings(deadline=None, max_examples=100)
    @given(problems(), st.sampled_from([0.1, 3.0, 50.0]), st.sampled_from([0.0, 0.2]))
    def test_shares_stay_shares(self, problem, pull, min_share):
        counts, signals = problem
        training = FollowedRule(SignedSteps(alpha=0.1, pull=pull, min_share=min_share), counts)
        for signal in signals:
            training.update(signal)
            torch.testing.assert_close(training.shares.sum(1), torch.ones(len(counts), dtype=torch.float64))
            assert (training.shares[counts > 0] >= min_share - 1e-12).all()
            assert (training.shares[counts == 0] == 0).all()


@settings(deadline=None, max_examples=200)
@given(problems(distinct=True), st.sampled_from(["row", "all"]), st.randoms(use_true_random=False))
def test_order_of_groups_does_not_matter(problem, compare, random):
    counts, signals = problem
    order = list(range(counts.shape[1]))
    random.shuffle(order)
    one = FollowedRule(SignedSteps(alpha=0.05, compare=compare), counts)
    other = FollowedRule(SignedSteps(alpha=0.05, compare=compare), counts[:, order])
    for signal in signals:
        one.update(signal)
        other.update(signal[:, order])
        torch.testing.assert_close(one.shares[:, order], other.shares)


@settings(deadline=None, max_examples=200)
@given(problems(distinct=True), st.sampled_from(["row", "neighbours", "all"]), st.randoms(use_true_random=False))
def test_order_of_labels_does_not_matter(problem, compare, random):
    counts, signals = problem
    order = list(range(counts.shape[0]))
    random.shuffle(order)
    one = FollowedRule(SignedSteps(alpha=0.05, compare=compare), counts)
    other = FollowedRule(SignedSteps(alpha=0.05, compare=compare), counts[order])
    for signal in signals:
        gaps = row_gaps(signal, compare)
        known = gaps[~gaps.isnan()]
        if len(known) and (known == known.max()).sum() > 1:
            continue  # of equal gaps the last row moves, which is a matter of order
        one.update(signal)
        other.update(signal[order])
        torch.testing.assert_close(one.shares[order], other.shares)


def test_row_comparison_moves_alpha_from_below_to_above_the_mean():
    training = FollowedRule(SignedSteps(alpha=0.1), torch.tensor([[1, 1, 1, 1]]))
    training.update(torch.tensor([[0.1, 0.2, 0.3, 0.9]]))  # mean 0.375: one gains, three give
    assert training.shares[0].tolist() == pytest.approx([0.25 - 0.1 / 3] * 3 + [0.35])


def test_row_comparison_takes_from_those_who_have_something_left():
    training = FollowedRule(SignedSteps(alpha=0.1), torch.tensor([[1, 1, 1, 1]]))
    training.state = RuleState(torch.tensor([[0.0, 0.0, 0.4, 0.6]], dtype=torch.float64))
    training.update(torch.tensor([[0.1, 0.2, 0.3, 0.9]]))
    assert training.shares[0].tolist() == pytest.approx([0, 0, 0.3, 0.7])


def test_neighbours_move_every_pair():
    training = FollowedRule(SignedSteps(alpha=0.1, compare="neighbours"), torch.tensor([[1, 1, 1]]))
    gaps = training.update(torch.tensor([[0.1, 0.9, 0.5]]))  # 0 gives to 1, 2 gives to 1
    assert gaps.tolist() == pytest.approx([0.8])
    assert training.shares[0].tolist() == pytest.approx([1 / 3 - 0.1, 1 / 3 + 0.2, 1 / 3 - 0.1])


def test_all_moves_every_pair():
    training = FollowedRule(SignedSteps(alpha=0.1, compare="all"), torch.tensor([[1, 1, 1]]))
    training.update(torch.tensor([[0.1, 0.9, 0.5]]))  # 0 gives twice, 2 gives once and gains once
    assert training.shares[0].tolist() == pytest.approx([1 / 3 - 0.2, 1 / 3 + 0.2, 1 / 3])


def test_neighbours_skip_empty_cells():
    training = FollowedRule(SignedSteps(alpha=0.1, compare="neighbours"), torch.tensor([[2, 0, 2]]))
    gaps = training.update(torch.tensor([[0.1, torch.nan, 0.5]]))
    assert gaps.tolist() == pytest.approx([0.4])
    assert training.shares[0].tolist() == pytest.approx([0.4, 0, 0.6])


def test_nobody_gives_what_is_not_there():
    """Of two that gain from the same group each gets its part of what that has left."""
    training = FollowedRule(SignedSteps(alpha=0.1, compare="all"), torch.tensor([[10, 45, 45]]))
    training.update(torch.tensor([[0.1, 0.5, 0.5]]))
    assert training.shares[0].tolist() == pytest.approx([0, 0.5, 0.5])


def test_groups_without_a_signal_take_no_part():
    nan = torch.nan
    for compare in ("row", "neighbours", "all"):
        moves = transfers(torch.tensor([0.1, nan, 0.5]), torch.tensor([True, True, True]), compare)
        assert moves.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_floor_lifts_the_start():
    training = FollowedRule(SignedSteps(min_share=0.1), torch.tensor([[1, 99], [0, 7]]))
    torch.testing.assert_close(training.shares, torch.tensor([[0.1, 0.9], [0, 1]], dtype=torch.float64))


def test_floor_leaves_rows_above_it_alone():
    shares = torch.tensor([[0.3, 0.7], [0.05, 0.95]])
    lifted = lift_to_floor(shares, torch.ones(2, 2, dtype=torch.bool), 0.1)
    assert torch.equal(lifted[0], shares[0])
    torch.testing.assert_close(lifted[1], torch.tensor([0.1, 0.9]))


def test_state_restores_shares_and_schedule():
    def new():
        return FollowedRule(SignedSteps(alpha=lambda update: 0.1 / (update + 1)), torch.tensor([[3, 5]]))

    one, other = new(), new()
    one.update(torch.tensor([[0.3, 0.6]]))
    other.state = other.state.load(one.state.state_dict())
    one.update(torch.tensor([[0.3, 0.6]]))
    other.update(torch.tensor([[0.3, 0.6]]))
    assert torch.equal(one.shares, other.shares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, "`alpha` to be a number above 0 but got 0"),
        ({"alpha": -0.1}, "`alpha` to be a number above 0 but got -0.1"),
        ({"alpha": "0.1"}, "`alpha` to be a number above 0 but got '0.1'"),
        ({"alpha": True}, "`alpha` to be a number above 0 but got True"),
        ({"alpha": math.inf}, "`alpha` to be a number above 0 but got inf"),
        ({"tolerance": math.nan}, "`tolerance` to be a number of at least 0 but got nan"),
        ({"tolerance": "0"}, "`tolerance` to be a number of at least 0 but got '0'"),
        ({"alpha": math.nan}, "`alpha` to be a number above 0 but got nan"),
        ({"tolerance": -1}, "`tolerance` to be a number of at least 0 but got -1"),
        ({"min_share": 1.5}, "`min_share` to be a number from 0 to 1 but got 1.5"),
        ({"min_share": 0.6}, "`min_share` to be at most 1/2 because a label has 2 groups, but got 0.6"),
        ({"pull": -1}, "`pull` to be a number of at least 0 but got -1"),
        ({"pull": math.inf}, "`pull` to be a number of at least 0 but got inf"),
        ({"compare": "pairs"}, "`compare` to be one of .* but got 'pairs'"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FollowedRule(SignedSteps(**arguments), torch.tensor([[1, 2]]))
