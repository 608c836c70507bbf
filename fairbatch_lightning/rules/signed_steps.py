"""The paper's rule for the shares.

Its section 3: a signed step of size alpha on the worst disparity, here for any number of labels and groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning.cells.index import natural_shares
from fairbatch_lightning.rules.base import Measurement, RuleState, UpdateRule, check_tolerance
from fairbatch_lightning.rules.criteria import Compare, check_compare

Alpha = float | Callable[[int], float]


def lift_to_floor(shares: Tensor, present: Tensor, min_share: float) -> Tensor:
    """Raise the shares of `present` cells to at least `min_share`, at the cost of those above it.

    >>> lift_to_floor(torch.tensor([[0.01, 0.39, 0.6]]), torch.ones(1, 3, dtype=torch.bool), 0.1)
    tensor([[0.1000, 0.3570, 0.5430]])
    """
    floor = min_share * present.to(shares.dtype)
    above = (shares - floor).clamp(min=0)
    room = 1 - floor.sum(1, keepdim=True)
    scale = room / above.sum(1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)
    return torch.where((shares < floor).any(1, keepdim=True), floor + above * scale, shares)


def transfers(signal: Tensor, can_give: Tensor, compare: Compare) -> Tensor:
    """Return who gives to whom in one row, in units of alpha: `(Z, Z)`, givers first.

    `signal` `(Z,)` has NaN for groups that take no part; `can_give` `(Z,)` says who has share left to give.
    "row": the groups below the mean give alpha together, those above it gain as much, in equal parts.
    "neighbours" and "all": every compared pair moves alpha from its smaller to its larger side.

    >>> transfers(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, True]), "row")
    tensor([[0.0000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    larger = signal.unsqueeze(0) > signal.unsqueeze(1)  # as all comparisons with NaN, false for groups without part
    if compare == "row":
        present = signal[~signal.isnan()]
        mean = present.mean()
        # The extremes are named as well, because the mean of two neighbouring floats rounds to one of them.
        gains = (signal > mean) | (signal == present.max())
        gives = ((signal < mean) | (signal == present.min())) & can_give
        moves = (gives.unsqueeze(1) & gains.unsqueeze(0) & larger).to(signal.dtype)
        return moves / moves.sum().clamp(min=1)
    if compare == "neighbours":
        place = (~signal.isnan()).cumsum(0)
        larger &= (place.unsqueeze(0) - place.unsqueeze(1)).abs() == 1
    return larger.to(signal.dtype)


def shift_row(shares: Tensor, signal: Tensor, alpha: float, min_share: float, compare: Compare) -> Tensor:
    """Return one row's shares `(Z,)` after one step of size `alpha`.

    A group never gives more than it has above `min_share`; what the others get from it shrinks in proportion.

    >>> shift_row(torch.tensor([0.5, 0.5]), torch.tensor([0.7, 0.3]), 0.1, 0.0, "row")
    tensor([0.6000, 0.4000])
    """
    spare = (shares - min_share).clamp(min=0)
    moves = alpha * transfers(signal, spare > 0, compare)
    wanted = moves.sum(1)
    moves *= torch.where(wanted > spare, spare / wanted, 1).unsqueeze(1)
    shifted = shares - moves.sum(1) + moves.sum(0)
    return shifted.where(shares == 0, shifted.clamp(min=min_share)).clamp(0, 1)


@dataclass(frozen=True)
class SignedSteps(UpdateRule):
    """The paper's rule: a signed step of size `alpha` for the label where the groups differ most.

    Args:
        alpha: The step, in units of shares; a function of the update's number (0, 1, ...) for a schedule.
        tolerance: Gaps up to this size, in units of the loss, are left alone: the trade-off between accuracy and
            fairness.
        min_share: No cell with samples gets less of its row than this. Shares that start below are lifted to it.
        compare: How the groups of a row are compared: "row" (with their mean), "neighbours" (as the paper implemented
            it) or "all" (every pair). With two groups all three are the same.
        pull: How strongly all shares are drawn back to those they started from: in every update by `pull * alpha` of
            the way. It keeps them from drifting where many are equally fair, and from going far; see "How it works".

    >>> from fairbatch_lightning import EqualizedOdds, GroupIndex, Measurement
    >>> index = GroupIndex.from_values([0, 0, 0, 0, 1, 1], ["a", "a", "a", "b", "a", "b"])
    >>> losses, rule = torch.tensor([[0.2, 0.6], [0.3, 0.4]]), SignedSteps(alpha=0.1)
    >>> rule.update(rule.start(index.counts), Measurement(losses, index.counts, index, EqualizedOdds())).shares
    tensor([[0.6500, 0.3500],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    alpha: Alpha = 0.005
    tolerance: float = 0.0
    min_share: float = 0.0
    compare: Compare = "row"
    pull: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.alpha):
            check_number("alpha", self.alpha, 0, above=True)
        check_tolerance(self.tolerance)
        check_number("min_share", self.min_share, 0, 1)
        check_compare(self.compare)
        check_number("pull", self.pull, 0)

    def start(self, counts: Tensor) -> RuleState:
        """Return the data's own shares, but none below `min_share`."""
        most = int((counts > 0).sum(1).max())
        if self.min_share * most > 1:
            raise ValueError(
                f"Expected argument `min_share` to be at most 1/{most} because a label has {most} groups,"
                f" but got {self.min_share}."
            )
        return RuleState(lift_to_floor(natural_shares(counts), counts > 0, self.min_share))

    def resumed(self, state: RuleState, counts: Tensor) -> RuleState:
        """Return the saved shares, lifted to `min_share` if that was smaller when they were saved."""
        return replace(state, shares=lift_to_floor(state.shares, counts > 0, self.min_share))

    def update(self, state: RuleState, measured: Measurement) -> RuleState:
        """Shift the row with the largest gap, if that is above the tolerance, then pull."""
        gaps, alpha, shares = self.gaps(measured), step_size(self.alpha, state.updates), state.shares.clone()
        worst = _last_argmax(gaps)
        if worst is not None and gaps[worst] > self.tolerance:
            shares[worst] = shift_row(shares[worst], measured.signal[worst], alpha, self.min_share, self.compare)
        if self.pull:
            shares = torch.lerp(shares, self.start(measured.counts).shares, min(1.0, self.pull * alpha))
        return state.after(shares)


def step_size(alpha: Alpha, update: int) -> float:
    """Return the step of an update, by its number."""
    step = alpha(update) if callable(alpha) else alpha
    check_number("alpha", step, 0, above=True, origin=f" from the function for update {update}")
    return float(step)


def _last_argmax(gaps: Tensor) -> int | None:
    """Return the row with the largest gap, of equal ones the last (as in the paper's Algorithms 2 and 3)."""
    known = [(gap, row) for row, gap in enumerate(gaps.tolist()) if not math.isnan(gap)]
    return max(known)[1] if known else None
