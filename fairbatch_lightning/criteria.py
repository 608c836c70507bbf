"""Fairness criteria: from the cells' losses to a signal that must become equal between groups.

Sections 2 and 3 of the paper, its Algorithms 1-3, and its section on demographic parity. All matrices
are `(Y, Z)`: labels first, groups second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Compare = Literal["row", "neighbours", "all"]


def check_compare(compare: str) -> None:
    """Raise unless `compare` names one of the three comparisons."""
    if compare not in get_args(Compare):
        raise ValueError(f"Expected argument `compare` to be one of {get_args(Compare)} but got {compare!r}.")


class Criterion(ABC):
    """What must be equal between the groups. A criterion is a short subclass that names its signal.

    The signal of a cell says how much the cell needs more share: in every row share moves from the
    groups with the smaller signal to those with the larger one. NaN marks a cell that takes no part.
    """

    @property
    def target(self) -> int | None:
        """The label (a row) that every sample's loss is measured against; None means its own label."""
        return None

    @abstractmethod
    def signal(self, losses: Tensor, counts: Tensor) -> Tensor:
        """Return the `(Y, Z)` signal for mean `losses` `(Y, Z)` and sample `counts` `(Y, Z)`."""


@dataclass(frozen=True)
class EqualizedOdds(Criterion):
    r"""Equal error rates of all groups, for every label: `L[y, z] = L[y, z']` for all y, z, z'.

    The signal is the mean loss in the cell; all rows are adjusted.

    >>> losses = torch.tensor([[0.2, 0.6], [0.3, 0.4]])
    >>> EqualizedOdds().signal(losses, counts=torch.tensor([[10, 20], [30, 40]]))
    tensor([[0.2000, 0.6000],
            [0.3000, 0.4000]])
    """

    def signal(self, losses: Tensor, counts: Tensor) -> Tensor:
        """Return the losses, NaN where a cell is empty or its loss is not finite."""
        return _present(losses, losses, counts)


@dataclass(frozen=True)
class EqualOpportunity(Criterion):
    r"""Equal error rates of all groups for the positive label: `L[1, z] = L[1, z']` for all z, z'.

    The signal is the mean loss in the cell; only row `positive` (a row's number, not a label) is adjusted.

    >>> losses = torch.tensor([[0.2, 0.6], [0.3, 0.4]])
    >>> EqualOpportunity().signal(losses, counts=torch.tensor([[10, 20], [30, 40]]))
    tensor([[   nan,    nan],
            [0.3000, 0.4000]])
    """

    positive: int = 1

    def signal(self, losses: Tensor, counts: Tensor) -> Tensor:
        """Return the positive row's losses, NaN elsewhere."""
        rows = torch.arange(len(losses), device=losses.device).unsqueeze(1)
        return _present(losses, losses, counts).where(rows == self.positive, torch.nan)


@dataclass(frozen=True)
class DemographicParity(Criterion):
    r"""Equal rates of positive predictions in all groups: `P(yhat=1 | z) = P(yhat=1 | z')`.

    Losses are measured against the positive label, row `positive` (a row's number), for every sample. The size of the
    signal is the cell's part in its group's mean loss, `sum of losses in the cell / samples of the group`. Rows of the
    other labels have it negated: among those it is the group predicted positive too often that needs more share.

    >>> losses = torch.tensor([[2.0, 1.0], [0.3, 0.4]])
    >>> DemographicParity().signal(losses, counts=torch.tensor([[10, 20], [30, 20]]))
    tensor([[-0.5000, -0.5000],
            [ 0.2250,  0.2000]])
    """

    positive: int = 1

    @property
    def target(self) -> int:
        """The positive label."""
        return self.positive

    def signal(self, losses: Tensor, counts: Tensor) -> Tensor:
        """Return each cell's part in its group's mean loss, negated for every label but the positive."""
        part = losses * counts / counts.sum(0)
        rows = torch.arange(len(losses), device=losses.device).unsqueeze(1)
        return _present(torch.where(rows == self.positive, part, -part), losses, counts)


def _present(signal: Tensor, losses: Tensor, counts: Tensor) -> Tensor:
    return signal.where((counts > 0) & losses.isfinite(), torch.nan)


def row_gaps(signal: Tensor, compare: Compare = "row") -> Tensor:
    """Return how unequal every row of the `(Y, Z)` signal is: `(Y,)`, NaN with fewer than two groups.

    "row" and "all": the largest signal minus the smallest. "neighbours": the largest difference between
    one group and the next that has a signal.

    >>> row_gaps(torch.tensor([[1.0, 2.0, 4.0], [3.0, torch.nan, 0.0], [1.0, torch.nan, torch.nan]]))
    tensor([3., 3., nan])
    >>> row_gaps(torch.tensor([[1.0, 2.0, 4.0]]), "neighbours")
    tensor([2.])
    """
    absent = signal.isnan()
    if compare == "neighbours":
        steps = [row[~missing].diff().abs() for row, missing in zip(signal, absent, strict=True)]
        gaps = torch.stack([step.max() if len(step) else signal.new_tensor(torch.nan) for step in steps])
    else:
        gaps = signal.masked_fill(absent, -torch.inf).amax(1) - signal.masked_fill(absent, torch.inf).amin(1)
    return gaps.masked_fill(absent.sum(1) > signal.shape[1] - 2, torch.nan)
