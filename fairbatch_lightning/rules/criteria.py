"""Fairness criteria: from the cells' losses to a signal that must become equal between groups.

Sections 2 and 3 of the paper, its Algorithms 1-3, and its section on demographic parity. All matrices
are `(Y, Z)`: labels first, groups second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.cells.index import GroupIndex

Compare = Literal["row", "neighbours", "all"]


class Criterion(ABC):
    """What must be equal between the groups. A criterion is a short subclass that names its signal.

    The signal of a cell says how much the cell needs more share: in every row share moves from the
    groups with the smaller signal to those with the larger one. NaN marks a cell that takes no part.
    """

    min_samples: int = 1
    """Cells with fewer training samples than this are not compared, and keep their share."""

    def __post_init__(self) -> None:
        check_at_least("min_samples", self.min_samples, 1)

    def target(self, index: GroupIndex) -> int | None:
        """Return the row of the label that every sample's loss is measured against; None means its own label."""
        return None

    @abstractmethod
    def signal(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return the `(Y, Z)` signal for mean `losses` `(Y, Z)`."""

    def compared(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return the signal, NaN for cells that cannot be compared: too few samples, or a loss that is not finite."""
        return self.signal(losses, index).masked_fill(self._left_out(losses, index), torch.nan)

    def differences(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return how far each cell is from all groups together, `(Y, Z)`, positive where it needs more share.

        With errors for losses, the largest of them in size is the disparity that is reported. Here it is the signal
        minus the mean of its row, which counts every sample alike; NaN for cells that cannot be compared.
        """
        signal = self.compared(losses, index)
        weights = index.counts.where(~signal.isnan(), 0)
        return signal - (signal.nan_to_num(0) * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)

    def noise(self, errors: Tensor, samples: Tensor, index: GroupIndex) -> Tensor:
        """Return the standard errors of the rates that `differences` are of, `(Y, Z)`, by the samples seen."""
        return _variances(errors, samples).sqrt()

    def _left_out(self, losses: Tensor, index: GroupIndex) -> Tensor:
        return (index.counts < max(1, self.min_samples)) | ~losses.isfinite()


@dataclass(frozen=True)
class EqualizedOdds(Criterion):
    r"""Equal error rates of all groups, for every label: `L[y, z] = L[y, z']` for all y, z, z'.

    The signal is the mean loss in the cell; all rows are adjusted.

    Args:
        min_samples: Cells with fewer training samples than this are not compared, and keep their share: a handful of
            samples says little about a group, but may have the largest loss of all.
    """

    min_samples: int = 1

    def signal(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return the losses."""
        return losses


@dataclass(frozen=True)
class EqualOpportunity(Criterion):
    r"""Equal error rates of all groups for the positive label: `L[1, z] = L[1, z']` for all z, z'.

    The signal is the mean loss in the cell; only the positive label's row is adjusted.

    >>> index = GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "b"])
    >>> EqualOpportunity(positive_label=1).signal(torch.tensor([[0.2, 0.6], [0.3, 0.4]]), index)
    tensor([[   nan,    nan],
            [0.3000, 0.4000]])

    Args:
        positive_label: The label that it is about, as the data has it. None takes the second of two labels, and of more
            than two each in turn, of which the worst counts.
        min_samples: As for [`EqualizedOdds`][fairbatch_lightning.EqualizedOdds].
    """

    positive_label: int | str | None = None
    min_samples: int = 1

    def signal(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return the positive row's losses, NaN elsewhere."""
        positive = index.positive_row(self.positive_label)
        return losses if positive is None else losses.where(_is_row(positive, losses), torch.nan)


@dataclass(frozen=True)
class DemographicParity(Criterion):
    r"""Equal rates of positive predictions in all groups: `P(yhat=1 | z) = P(yhat=1 | z')`.

    Losses are measured against the positive label for every sample. The size of the signal is the cell's part in its
    group's mean loss, `sum of losses in the cell / samples of the group`. Rows of the other labels have it negated:
    among those it is the group predicted positive too often that needs more share.

    >>> index = GroupIndex.from_values([0, 0, 0, 1, 1, 1], ["a", "b", "b", "a", "a", "b"])
    >>> DemographicParity().signal(torch.tensor([[2.0, 1.0], [0.3, 0.6]]), index)
    tensor([[-0.6667, -0.6667],
            [ 0.2000,  0.2000]])

    Args:
        positive_label: The label that it is about, as the data has it; None takes the second of two labels.
        min_samples: As for [`EqualizedOdds`][fairbatch_lightning.EqualizedOdds].
    """

    positive_label: int | str | None = None
    min_samples: int = 1

    def target(self, index: GroupIndex) -> int:
        """Return the positive label's row."""
        positive = index.positive_row(self.positive_label)
        if positive is None:
            raise ValueError(
                "Expected argument `positive_label` for demographic parity, whose losses are measured against one of"
                f" the {index.shape[0]} labels {list(index.label_values)}: DemographicParity(positive_label=...)."
            )
        return positive

    def signal(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return each cell's part in its group's mean loss, negated for every label but the positive."""
        part = losses * index.counts / index.counts.sum(0)
        return torch.where(_is_row(self.target(index), losses), part, -part)

    def differences(self, losses: Tensor, index: GroupIndex) -> Tensor:
        """Return how much each group's mean loss is above that of all, negated for every label but the positive.

        With errors for losses: `P(yhat=1) - P(yhat=1 | z)`. A cell that cannot be compared counts like its label.
        """
        left_out = self._left_out(losses, index)
        counts = index.counts.where(~left_out, 0)
        sums = (losses.where(~left_out, 0) * counts).sum(1, keepdim=True)
        losses = losses.where(~left_out, sums / counts.sum(1, keepdim=True)).nan_to_num(0)
        sums = losses * index.counts
        above = sums.sum(0, keepdim=True) / index.counts.sum(0) - sums.sum() / index.counts.sum()
        return torch.where(_is_row(self.target(index), losses), above, -above).masked_fill(left_out, torch.nan)

    def noise(self, errors: Tensor, samples: Tensor, index: GroupIndex) -> Tensor:
        """Return the standard error of every group's rate, put together from its cells, `(Y, Z)`."""
        parts = index.counts / index.counts.sum(0)
        variances = (parts**2 * _variances(errors, samples)).where(parts > 0, 0).sum(0, keepdim=True)
        return variances.sqrt().expand(index.shape)


CRITERIA: dict[str, type[Criterion]] = {
    "equal_opportunity": EqualOpportunity,
    "equalized_odds": EqualizedOdds,
    "demographic_parity": DemographicParity,
}
"""What each name stands for."""


def _variances(errors: Tensor, samples: Tensor) -> Tensor:
    """Return the variances of rates, infinite where nothing was seen; as if one more were wrong, and one right."""
    rates = ((errors.nan_to_num(0) * samples + 1) / (samples + 2)).clamp(0, 1)
    return rates * (1 - rates) / samples


def _is_row(row: int, matrix: Tensor) -> Tensor:
    return (torch.arange(len(matrix), device=matrix.device) == row).unsqueeze(1)


def compared_rows(criterion: Criterion, index: GroupIndex) -> Tensor:
    """Return the rows that the criterion compares, `(Y,)`; refuse data without any, and say which cells are empty."""
    compared = ~row_gaps(criterion.compared(torch.zeros(index.shape), index)).isnan()
    if not compared.any():
        samples = f"{criterion.min_samples} samples" if criterion.min_samples > 1 else "samples"
        raise ValueError(
            f"Expected a label with {samples} of at least two groups to compare, but the labels"
            f" {list(index.label_names)} and groups {list(index.group_names)} have the counts {index.counts.tolist()}."
            f" Check the arguments `groups` and `labels`, and those of {criterion}."
        )
    if (empty := index.counts == 0).any():
        warn(
            f"The training set has no samples in the cells {index.cell_names(empty)}. They take no part; the other"
            " groups of these labels are balanced among themselves."
        )
    return compared


def check_positive(criterion: Criterion, index: GroupIndex, classes: Mapping[int | str, int]) -> None:
    """Refuse to take the second of two names for the positive label where it is the model's first class.

    >>> index = GroupIndex.from_values(["hired", "unhired"], ["a", "a"])
    >>> check_positive(EqualOpportunity(), index, {"hired": 0, "unhired": 1})
    >>> check_positive(EqualOpportunity("hired"), index, {"hired": 1, "unhired": 0})
    >>> check_positive(EqualizedOdds(), index, {"hired": 1, "unhired": 0})
    """
    labels = index.label_values
    if getattr(criterion, "positive_label", "") is not None or len(labels) != 2:
        return
    if classes[labels[0]] > classes[labels[1]]:
        raise ValueError(
            f"Expected argument `positive_label`: of the labels {list(labels)} the second is {labels[1]!r}, but the"
            f" model's second class is {labels[0]!r}. Say which one is meant, for instance"
            f" {type(criterion).__name__}(positive_label={labels[0]!r})."
        )


def check_compare(compare: str) -> None:
    """Raise unless `compare` names one of the three comparisons."""
    if compare not in get_args(Compare):
        raise ValueError(f"Expected argument `compare` to be one of {get_args(Compare)} but got {compare!r}.")


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
