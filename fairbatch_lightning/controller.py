"""The outer optimisation: from signals to the shares of the cells.

Section 3 of the paper: a signed step of size alpha on the worst disparity, here for any number of labels
and groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning.criteria import Compare, check_compare, row_gaps

Alpha = float | Callable[[int], float]


def natural_shares(counts: Tensor) -> Tensor:
    """Return the `(Y, Z)` shares of ordinary uniform sampling: every row's counts, scaled to sum to 1.

    >>> natural_shares(torch.tensor([[1, 3], [5, 0]]))
    tensor([[0.2500, 0.7500],
            [1.0000, 0.0000]], dtype=torch.float64)
    """
    counts = counts.double()
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


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


class ShareController:
    """Holds the `(Y, Z)` shares and shifts them after every measurement.

    Args:
        counts: How many training samples each cell has, `(Y, Z)`. Empty cells keep share 0 for good.
        alpha: The step, in units of shares; a function of the update's number (0, 1, ...) for a schedule.
        threshold: Gaps up to this size are left alone: the trade-off between accuracy and fairness.
        min_share: No cell with samples gets less of its row than this. Shares that start below are lifted to it.
        compare: How the groups of a row are compared: "row", "neighbours" (as the paper implemented it) or "all".
        pull: With every update all shares go back towards those they started from by `pull * alpha` of the way.

    >>> controller = ShareController(torch.tensor([[30, 10], [20, 20]]), alpha=0.1)
    >>> controller.update(torch.tensor([[0.2, 0.6], [0.3, 0.4]]))
    tensor([0.4000, 0.1000], dtype=torch.float64)
    >>> controller.shares
    tensor([[0.6500, 0.3500],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    def __init__(
        self,
        counts: Tensor,
        *,
        alpha: Alpha = 0.005,
        threshold: float = 0.0,
        min_share: float = 0.0,
        compare: Compare = "row",
        pull: float = 0.0,
    ) -> None:
        check_settings(alpha, threshold, min_share, compare, pull)
        self.alpha, self.threshold, self.min_share, self.compare = alpha, threshold, min_share, compare
        self.pull = pull
        self._present = counts > 0
        self._check_room()
        self._start = lift_to_floor(natural_shares(counts), self._present, min_share)
        self.shares = self._start.clone()
        self.updates = 0

    def update(self, signal: Tensor) -> Tensor:
        """Shift the row with the largest gap, if that is above the threshold, then pull; return all gaps `(Y,)`."""
        signal = signal.detach().to("cpu", torch.float64)
        gaps = row_gaps(signal, self.compare)
        worst, alpha = _last_argmax(gaps), self._step_size()
        shares = self.shares.clone()
        if worst is not None and gaps[worst] > self.threshold:
            shares[worst] = shift_row(shares[worst], signal[worst], alpha, self.min_share, self.compare)
        self.shares = torch.lerp(shares, self._start, min(1.0, self.pull * alpha)) if self.pull else shares
        self.updates += 1
        return gaps

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes: the shares and the number of updates."""
        return {"shares": self.shares.clone(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        if state["shares"].shape != self.shares.shape:
            raise ValueError(
                f"Expected saved shares of shape {tuple(self.shares.shape)} (labels, groups) but got"
                f" {tuple(state['shares'].shape)}: the training data has other labels or groups than when it was saved."
            )
        self.shares = state["shares"].clone()
        self.updates = int(state["updates"])

    def _step_size(self) -> float:
        alpha = self.alpha(self.updates) if callable(self.alpha) else self.alpha
        _check_alpha(alpha, f" from the function for update {self.updates}" if callable(self.alpha) else "")
        return float(alpha)

    def _check_room(self) -> None:
        most = int(self._present.sum(1).max())
        if self.min_share * most > 1:
            raise ValueError(
                f"Expected argument `min_share` to be at most 1/{most} because a label has {most} groups,"
                f" but got {self.min_share}."
            )


def check_settings(alpha: Alpha, threshold: float, min_share: float, compare: str, pull: float) -> None:
    """Raise for settings that no data could make right, so that mistakes surface before training starts."""
    if not callable(alpha):
        _check_alpha(alpha)
    if not (isinstance(threshold, Real) and threshold >= 0):
        raise ValueError(f"Expected argument `threshold` to be a number of at least 0 but got {threshold!r}.")
    if not (isinstance(min_share, Real) and 0 <= min_share <= 1):
        raise ValueError(f"Expected argument `min_share` to be between 0 and 1 but got {min_share!r}.")
    check_compare(compare)
    if isinstance(pull, bool) or not (isinstance(pull, Real) and 0 <= pull < math.inf):
        raise ValueError(f"Expected argument `pull` to be a number of at least 0 but got {pull!r}.")


def _check_alpha(alpha: object, origin: str = "") -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < float(alpha) < math.inf:
        raise ValueError(f"Expected argument `alpha` to be a number above 0 but got {alpha!r}{origin}.")


def _last_argmax(gaps: Tensor) -> int | None:
    """Return the row with the largest gap, of equal ones the last (as in the paper's Algorithms 2 and 3)."""
    known = [(gap, row) for row, gap in enumerate(gaps.tolist()) if not math.isnan(gap)]
    return max(known)[1] if known else None
