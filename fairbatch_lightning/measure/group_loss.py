"""The mean loss of every cell, as a torchmetrics `Metric`: exact under DDP, cheap to sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fairbatch_lightning._support.checks import check_range


class GroupLoss(Metric):
    r"""Mean loss of every cell: `L[y, z] = sum of losses in the cell / samples in the cell`.

    As input to `update` the metric takes, all of shape `(B,)`:

    - `losses`: the loss of every sample
    - `labels`: the row of every sample, from 0 to `num_labels - 1`
    - `groups`: the column of every sample, from 0 to `num_groups - 1`

    `compute` returns the `(Y, Z)` means, NaN for cells without samples. The states `sums` and `counts` `(Y, Z)` are
    added up over processes, so that no sample counts more than another. A NaN loss makes its own cell NaN, no other.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        sum_dtype: The precision of the sums; float32 for devices that have nothing better.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> metric = GroupLoss(num_labels=2, num_groups=2)
    >>> metric.update(torch.tensor([0.5, 1.5, 4.0]), torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    >>> metric.compute()
    tensor([[nan, 1.],
            [4., nan]], dtype=torch.float64)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False

    sums: Tensor
    counts: Tensor

    def __init__(self, num_labels: int, num_groups: int, sum_dtype: torch.dtype = torch.float64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        shape = num_labels, num_groups
        self.add_state("sums", torch.zeros(shape, dtype=sum_dtype), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add samples: their losses, rows and columns, each `(B,)`."""
        if not losses.ndim == labels.ndim == groups.ndim == 1 or not len(losses) == len(labels) == len(groups):
            raise ValueError(
                "Expected `losses`, `labels` and `groups` to be vectors of the same length but got shapes"
                f" {tuple(losses.shape)}, {tuple(labels.shape)} and {tuple(groups.shape)}."
            )
        if losses.device.type == "cpu":  # elsewhere the check would wait for the device
            check_range("labels", labels, self.counts.shape[0])
            check_range("groups", groups, self.counts.shape[1])
        self.add(losses, labels * self.counts.shape[1] + groups)

    def add(self, losses: Tensor, cells: Tensor) -> None:
        """Add samples by their cells' numbers, `label * num_groups + group`: `update` without its checks."""
        self.sums.view(-1).index_add_(0, cells, losses.detach().to(self.sums.dtype))
        self.counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> Tensor:
        """Return the mean loss of every cell, `(Y, Z)`."""
        return self.sums / self.counts
