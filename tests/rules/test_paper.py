"""The update rule against the paper: its Algorithms 1-3 and its proposition."""

import math

import pytest
import torch
from helpers import FollowedRule

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity, SignedSteps

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
        training = FollowedRule(SignedSteps(alpha=alpha, compare=compare), counts)
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
            training.update(means, criterion)
            torch.testing.assert_close(training.shares[:, 0], torch.tensor(lam, dtype=torch.float64), atol=1e-9, rtol=0)
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
    training = FollowedRule(SignedSteps(alpha=0.1), counts)
    training.update(torch.tensor([[0.5, 0.25], [0.25, 0.5]]), criterion)
    assert training.shares[:, 0].tolist() == pytest.approx(lam)


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
        training = FollowedRule(SignedSteps(alpha=alpha), torch.tensor([counts]))
        start = float(training.shares[0, 0])
        for t in range(1, 150):
            w = inner_solution(float(training.shares[0, 0]))
            training.update(torch.tensor([[f(w), g(w)]], dtype=torch.float64))
            bound = max(abs(start - optimum) - t * alpha, alpha)
            assert abs(float(training.shares[0, 0]) - optimum) <= bound + 1e-4
