"""Whether there is anything to compare in the data, and whether it is the data that shares are for."""

from __future__ import annotations

import torch
from torch import Tensor

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.criteria import Criterion, row_gaps
from fairbatch_lightning.groups import GroupIndex


def signal_of(criterion: Criterion, losses: Tensor, index: GroupIndex, min_samples: int = 1) -> Tensor:
    """Return a criterion's `(Y, Z)` signal, NaN for cells with fewer than `min_samples` training samples."""
    return criterion.signal(losses, index.counts).masked_fill(index.counts < min_samples, torch.nan)


def compared_rows(criterion: Criterion, index: GroupIndex, min_samples: int = 1) -> Tensor:
    """Return the rows that the criterion compares, `(Y,)`; refuse data without any, and say which cells are empty."""
    positive = getattr(criterion, "positive", 0)
    if not 0 <= positive < index.shape[0]:
        raise ValueError(
            f"Expected `positive` of {criterion} to be the row of a label, from 0 to {index.shape[0] - 1}: the labels"
            f" are {list(index.label_names)}."
        )
    compared = ~row_gaps(signal_of(criterion, torch.zeros(index.shape), index, min_samples)).isnan()
    if not compared.any():
        samples = f"{min_samples} samples" if min_samples > 1 else "samples"
        raise ValueError(
            f"Expected a label with {samples} of at least two groups to compare, but the labels"
            f" {list(index.label_names)} and groups {list(index.group_names)} have the counts {index.counts.tolist()}."
            " Check the arguments `groups`, `labels`, `positive_label` and `min_samples`."
        )
    if (empty := index.counts == 0).any():
        warn(
            f"The training set has no samples in the cells {index.cell_names(empty)}. They take no part; the other"
            " groups of these labels are balanced among themselves."
        )
    return compared


def check_same_cells(before: GroupIndex, now: GroupIndex) -> None:
    """Refuse a reloaded training set whose cells are not those that the shares are for."""
    if names_of(before) != names_of(now) or not torch.equal(before.counts > 0, now.counts > 0):
        raise ValueError(
            "Expected the reloaded training set to have samples in the cells that it had before: labels and groups"
            f" {names_of(before)} with the counts {before.counts.tolist()}, but got {names_of(now)} with"
            f" {now.counts.tolist()}. Shares cannot go on from one to the other; start a new fit."
        )


def names_of(index: GroupIndex) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the labels and of the groups."""
    return index.label_names, index.group_names
