"""The update rule against the paper: its Algorithms 1-3, its proposition, and what holds for any labels and groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity, ShareController
from fairbatch_lightning.criteria import row_gaps

# ---- Algorithms 1, 2 and 3 for binary labels and groups, as printed in the paper's appendix -------------------------
# Lambda here is in units of shares: the part of label y's draws that go to group 0, between 0 and 1.


def algorithm_1(lam, loss, alpha):
    """Equal opportunity. `loss[y][z]` lists the losses of the samples in a cell."""
    f, g = mean(loss[1][0]), mean(loss[1][1])
    if f > g:
        lam[1] += alpha
    elif f < g:
        lam[1] -= alpha


def algorithm_2(lam, loss, alpha):
    """Equalized odds."""
    d0 = mean(loss[0][0]) - mean(loss[0][1])
    d1 = mean(loss[1][0]) - mean(loss[1][1])
    if abs(d0) > abs(d1):
        lam[0] += alpha if d0 > 0 else -alpha if d0 < 0 else 0
    else:
        lam[1] += alpha if d1 > 0 else -alpha if d1 < 0 else 0


def algorithm_3(lam, loss, alpha):
    """Demographic parity; losses against label 1."""
    len0 = len(loss[0][0]) + len(loss[1][0])
    len1 = len(loss[0][1]) + len(loss[1][1])
    d0 = sum(loss[0][0]) / len0 - sum(loss[0][1]) / len1
    d1 = sum(loss[1][0]) / len0 - sum(loss[1][1]) / len1
    if abs(d0) > abs(d1):
        lam[0] += -alpha if d0 > 0 else alpha if d0 < 0 else 0
    else:
        lam[1] += alpha if d1 > 0 else -alpha if d1 < 0 else 0


def mean(values):
    return sum(values) / len(values)


ALGORITHMS = [
    (algorithm_1, EqualOpportunity()),
    (algorithm_2, EqualizedOdds()),
    (algorithm_3, DemographicParity()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "criterion"), ALGORITHMS)
@pytest.mark.parametrize("compare", ["row", "neighbours", "all"])
def test_binary_case_is_the_papers_algorithm(algorithm, criterion, compare):
    """Whole trajectories on thousands of random losses, including ties, up to the bounds of the shares."""
    generator = torch.Generator().manual_seed(0)
    steps = bounded = 0
    for run in range(30):
        counts = 2 ** torch.randint(0, 4, (2, 2), generator=generator)
        alpha = [0.005, 0.05, 0.3][run % 3]
        controller = ShareController(counts, alpha=alpha, compare=compare)
        lam = (counts[:, 0].double() / counts.sum(1)).tolist()
        for _ in range(100):
            # Multiples of 1/8 in cells of 1, 2, 4 or 8 samples have exact means, and produce many ties.
            losses = [
                [(torch.randint(0, 4, (int(n),), generator=generator) / 8).tolist() for n in row] for row in counts
            ]
            algorithm(lam, losses, alpha)
            clipped = [min(max(value, 0.0), 1.0) for value in lam]
            bounded += clipped != lam
            lam = clipped
            means = torch.tensor([[mean(cell) for cell in row] for row in losses], dtype=torch.float64)
            controller.update(criterion.signal(means, counts))
            torch.testing.assert_close(
                controller.shares[:, 0], torch.tensor(lam, dtype=torch.float64), atol=1e-9, rtol=0
            )
            steps += 1
    assert steps == 3000
    assert bounded > 20


@pytest.mark.parametrize(("algorithm", "criterion"), ALGORITHMS)
def test_equal_rows_move_the_one_the_paper_moves(algorithm, criterion):
    """|d0| == |d1| takes the paper's `else` branch."""
    counts = torch.full((2, 2), 2)
    losses = [[[0.5, 0.5], [0.25, 0.25]], [[0.25, 0.25], [0.5, 0.5]]]
    lam = [0.5, 0.5]
    algorithm(lam, losses, 0.1)
    controller = ShareController(counts, alpha=0.1)
    controller.update(criterion.signal(torch.tensor([[0.5, 0.25], [0.25, 0.5]]), counts))
    assert controller.shares[:, 0].tolist() == pytest.approx(lam)


def test_neighbouring_floats_still_differ():
    """The mean of two neighbouring floats is one of them; the larger must gain all the same."""
    low = 0.1
    high = math.nextafter(low, 1)
    controller = ShareController(torch.tensor([[5, 5]]), alpha=0.1)
    controller.update(torch.tensor([[high, low]], dtype=torch.float64))
    assert controller.shares[0].tolist() == pytest.approx([0.6, 0.4])


def test_tie_moves_nothing():
    controller = ShareController(torch.tensor([[1, 3], [2, 2]]), alpha=0.1)
    before = controller.shares
    gaps = controller.update(torch.full((2, 2), 0.7))
    assert gaps.tolist() == [0, 0]
    assert torch.equal(controller.shares, before)


def test_threshold_leaves_gaps_up_to_it_alone():
    controller = ShareController(torch.tensor([[2, 2]]), alpha=0.1, threshold=0.25)
    controller.update(torch.tensor([[0.5, 0.25]], dtype=torch.float64))
    assert controller.shares.tolist() == [[0.5, 0.5]]
    controller.update(torch.tensor([[0.5, 0.2499]], dtype=torch.float64))
    assert controller.shares[0].tolist() == pytest.approx([0.6, 0.4])


def test_alpha_schedule_counts_updates():
    seen = []

    def alpha(update):
        seen.append(update)
        return 0.1 / (update + 1)

    controller = ShareController(torch.tensor([[2, 2]]), alpha=alpha)
    for _ in range(3):
        controller.update(torch.tensor([[1.0, 0.0]]))
    assert seen == [0, 1, 2]
    assert controller.shares[0, 0] == pytest.approx(0.5 + 0.1 + 0.05 + 0.1 / 3)


def test_alpha_schedule_that_returns_nonsense_is_refused():
    controller = ShareController(torch.tensor([[2, 2]]), alpha=lambda update: -1)
    with pytest.raises(ValueError, match="number above 0 but got -1 from the function for update 0"):
        controller.update(torch.tensor([[1.0, 0.0]]))


# ---- the paper's example of a quasi-convex, non-convex outer objective ----------------------------------------------


def test_reaches_the_optimum_at_the_rate_of_the_proposition():
    """f = (e^w + e^-w)/5, g = (w-1)^2: |lam_t - lam*| <= max(|lam_0 - lam*| - t alpha, alpha)."""

    def f(w):
        return (math.exp(w) + math.exp(-w)) / 5

    def g(w):
        return (w - 1) ** 2

    def inner_solution(lam):
        low, high = -5.0, 5.0
        for _ in range(200):
            w = (low + high) / 2
            slope = lam * (math.exp(w) - math.exp(-w)) / 5 + (1 - lam) * 2 * (w - 1)
            low, high = (low, w) if slope > 0 else (w, high)
        return w

    grid = [i / 10000 for i in range(10001)]
    optimum = min(grid, key=lambda lam: abs(f(inner_solution(lam)) - g(inner_solution(lam))))
    assert 0.05 < optimum < 0.95
    alpha = 0.01
    for counts in ([1, 99], [99, 1], [50, 50]):
        controller = ShareController(torch.tensor([counts]), alpha=alpha)
        start = float(controller.shares[0, 0])
        for t in range(1, 150):
            w = inner_solution(float(controller.shares[0, 0]))
            controller.update(torch.tensor([[f(w), g(w)]], dtype=torch.float64))
            bound = max(abs(start - optimum) - t * alpha, alpha)
            assert abs(float(controller.shares[0, 0]) - optimum) <= bound + 1e-4


# ---- any number of labels and groups --------------------------------------------------------------------------------


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
    signals = [EqualizedOdds().signal(signal, counts) for signal in signals]
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
    controller = ShareController(counts, alpha=alpha, min_share=min_share, compare=compare)
    present = counts > 0
    for signal in signals:
        before = controller.shares
        gaps = controller.update(signal)
        shares = controller.shares
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
        controller = ShareController(torch.tensor([[30, 10], [20, 20]]), alpha=0.1, pull=2.0)
        controller.update(torch.tensor([[0.2, 0.6], [0.3, 0.4]]))
        torch.testing.assert_close(controller.shares[0, 1], torch.tensor(0.25 + 0.8 * 0.1).double())
        controller.update(torch.tensor([[0.2, 0.2], [0.3, 0.4]]))
        torch.testing.assert_close(controller.shares[0, 1], torch.tensor(0.25 + 0.8**2 * 0.1).double())
        torch.testing.assert_close(controller.shares[1, 1], torch.tensor(0.5 + 0.8 * 0.1).double())

    @pytest.mark.parametrize("pull", [1.5, 4.0, 1000.0])
    def test_shares_go_no_further_than_it_lets_them(self, pull):
        controller = ShareController(torch.tensor([[90, 10]]), alpha=0.01, pull=pull)
        for _ in range(2000):
            controller.update(torch.tensor([[0.1, 0.9]]))
        assert controller.shares[0, 1] - 0.1 <= 1 / pull
        if pull < 100:
            assert controller.shares[0, 1] - 0.1 > 0.95 * min(1 / pull - 0.01, 0.9)

    def test_no_drift_along_equally_fair_shares(self):
        """Where only the difference of the labels' shares matters, and nothing is fair to both labels at once."""
        ends = {}
        for pull in (0.0, 3.0):
            controller = ShareController(torch.tensor([[60, 40], [60, 40]]), alpha=0.005, pull=pull)
            for _ in range(2000):
                lean = float(controller.shares[0, 0] - controller.shares[1, 0])
                controller.update(torch.tensor([[0.2 - lean, 0.1], [0.2 + lean, 0.1]]))
            ends[pull] = controller.shares[:, 0]
        assert (ends[0.0] > 0.99).all()
        torch.testing.assert_close(ends[3.0], torch.full((2,), 0.6 + 1 / 6).double(), atol=0.01, rtol=0)

    @settings(deadline=None, max_examples=100)
    @given(problems(), st.sampled_from([0.1, 3.0, 50.0]), st.sampled_from([0.0, 0.2]))
    def test_shares_stay_shares(self, problem, pull, min_share):
        counts, signals = problem
        controller = ShareController(counts, alpha=0.1, pull=pull, min_share=min_share)
        for signal in signals:
            controller.update(signal)
            torch.testing.assert_close(controller.shares.sum(1), torch.ones(len(counts), dtype=torch.float64))
            assert (controller.shares[counts > 0] >= min_share - 1e-12).all()
            assert (controller.shares[counts == 0] == 0).all()


@settings(deadline=None, max_examples=200)
@given(problems(distinct=True), st.sampled_from(["row", "all"]), st.randoms(use_true_random=False))
def test_order_of_groups_does_not_matter(problem, compare, random):
    counts, signals = problem
    order = list(range(counts.shape[1]))
    random.shuffle(order)
    one = ShareController(counts, alpha=0.05, compare=compare)
    other = ShareController(counts[:, order], alpha=0.05, compare=compare)
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
    one = ShareController(counts, alpha=0.05, compare=compare)
    other = ShareController(counts[order], alpha=0.05, compare=compare)
    for signal in signals:
        gaps = row_gaps(signal, compare)
        known = gaps[~gaps.isnan()]
        if len(known) and (known == known.max()).sum() > 1:
            continue  # of equal gaps the last row moves, which is a matter of order
        one.update(signal)
        other.update(signal[order])
        torch.testing.assert_close(one.shares[order], other.shares)


def test_row_comparison_moves_alpha_from_below_to_above_the_mean():
    controller = ShareController(torch.tensor([[1, 1, 1, 1]]), alpha=0.1)
    controller.update(torch.tensor([[0.1, 0.2, 0.3, 0.9]]))  # mean 0.375: one gains, three give
    assert controller.shares[0].tolist() == pytest.approx([0.25 - 0.1 / 3] * 3 + [0.35])


def test_row_comparison_takes_from_those_who_have_something_left():
    controller = ShareController(torch.tensor([[1, 1, 1, 1]]), alpha=0.1)
    controller.shares = torch.tensor([[0.0, 0.0, 0.4, 0.6]], dtype=torch.float64)
    controller.update(torch.tensor([[0.1, 0.2, 0.3, 0.9]]))
    assert controller.shares[0].tolist() == pytest.approx([0, 0, 0.3, 0.7])


def test_neighbours_move_every_pair():
    controller = ShareController(torch.tensor([[1, 1, 1]]), alpha=0.1, compare="neighbours")
    gaps = controller.update(torch.tensor([[0.1, 0.9, 0.5]]))  # 0 gives to 1, 2 gives to 1
    assert gaps.tolist() == pytest.approx([0.8])
    assert controller.shares[0].tolist() == pytest.approx([1 / 3 - 0.1, 1 / 3 + 0.2, 1 / 3 - 0.1])


def test_all_moves_every_pair():
    controller = ShareController(torch.tensor([[1, 1, 1]]), alpha=0.1, compare="all")
    controller.update(torch.tensor([[0.1, 0.9, 0.5]]))  # 0 gives twice, 2 gives once and gains once
    assert controller.shares[0].tolist() == pytest.approx([1 / 3 - 0.2, 1 / 3 + 0.2, 1 / 3])


def test_neighbours_skip_empty_cells():
    controller = ShareController(torch.tensor([[2, 0, 2]]), alpha=0.1, compare="neighbours")
    gaps = controller.update(torch.tensor([[0.1, torch.nan, 0.5]]))
    assert gaps.tolist() == pytest.approx([0.4])
    assert controller.shares[0].tolist() == pytest.approx([0.4, 0, 0.6])


def test_floor_lifts_the_start():
    controller = ShareController(torch.tensor([[1, 99], [0, 7]]), min_share=0.1)
    torch.testing.assert_close(controller.shares, torch.tensor([[0.1, 0.9], [0, 1]], dtype=torch.float64))


def test_state_restores_shares_and_schedule():
    def new():
        return ShareController(torch.tensor([[3, 5]]), alpha=lambda update: 0.1 / (update + 1))

    one, other = new(), new()
    one.update(torch.tensor([[0.3, 0.6]]))
    other.load_state_dict(one.state_dict())
    one.update(torch.tensor([[0.3, 0.6]]))
    other.update(torch.tensor([[0.3, 0.6]]))
    assert torch.equal(one.shares, other.shares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, "`alpha` to be a number above 0 but got 0"),
        ({"alpha": -0.1}, "`alpha` to be a number above 0 but got -0.1"),
        ({"alpha": "0.1"}, "`alpha` to be a number above 0 but got '0.1'"),
        ({"alpha": math.nan}, "`alpha` to be a number above 0 but got nan"),
        ({"threshold": -1}, "`threshold` to be a number of at least 0 but got -1"),
        ({"min_share": 1.5}, "`min_share` to be between 0 and 1 but got 1.5"),
        ({"min_share": 0.6}, "`min_share` to be at most 1/2 because a label has 2 groups, but got 0.6"),
        ({"pull": -1}, "`pull` to be a number of at least 0 but got -1"),
        ({"pull": math.inf}, "`pull` to be a number of at least 0 but got inf"),
        ({"compare": "pairs"}, "`compare` to be one of .* but got 'pairs'"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShareController(torch.tensor([[1, 2]]), **arguments)
