"""Measurements on the accelerator, as torchmetrics `Metric`s: exact under DDP, cheap to sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fairbatch_lightning.disparities import places_in_confusion
from fairbatch_lightning.plots import confusion_figure
from fairbatch_lightning.values import check_range


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


class GroupConfusion(Metric):
    r"""One confusion matrix per group: how often group z's samples of label y were predicted to be yhat.

    As input to `update` the metric takes, for `B` samples:

    - `preds`: predicted labels `(B,)`, or scores `(B, Y)` of which the largest counts, or with two labels the scores
      `(B,)` or `(B, 1)` of label 1, which count as 1 above `threshold`
    - `target`: the label of every sample `(B,)`, from 0 to `num_labels - 1`
    - `groups`: the group of every sample `(B,)`, from 0 to `num_groups - 1`, whichever of them occur

    `compute` returns the counts `(Z, Y, Y)`, from which accuracies and disparities follow.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> metric = GroupConfusion(num_labels=2, num_groups=2)
    >>> metric.update(torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    >>> metric.compute()
    tensor([[[0, 0],
             [0, 1]],
    <BLANKLINE>
            [[1, 1],
             [0, 0]]])
    """

    full_state_update = False
    is_differentiable = False

    confusion: Tensor

    def __init__(self, num_labels: int, num_groups: int, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, number, least in (("num_labels", num_labels, 2), ("num_groups", num_groups, 1)):
            if number < least:
                raise ValueError(f"Expected argument `{name}` to be at least {least} but got {number}.")
        self.num_labels, self.num_groups, self.threshold = num_labels, num_groups, threshold
        shape = num_groups, num_labels, num_labels
        self.add_state("confusion", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, groups: Tensor) -> None:
        """Add samples: their predictions, labels and groups."""
        preds = self._predicted(preds)
        if not preds.ndim == target.ndim == groups.ndim == 1 or not len(preds) == len(target) == len(groups):
            raise ValueError(
                "Expected `preds`, `target` and `groups` to be of the same length, the latter two vectors, but got"
                f" shapes {tuple(preds.shape)}, {tuple(target.shape)} and {tuple(groups.shape)}."
            )
        for name, values, number in (
            ("preds", preds, self.num_labels),
            ("target", target, self.num_labels),
            ("groups", groups, self.num_groups),
        ):
            if values.is_floating_point():
                raise ValueError(f"Expected `{name}` to be integers but got {values.dtype}. Use `{name}.long()`.")
            check_range(name, values, number)
        self.add(places_in_confusion(preds.long(), target.long(), groups.long(), self.num_labels))

    def add(self, places: Tensor) -> None:
        """Add samples by their places in the flattened counts: `update` without its checks, which await the device."""
        self.confusion.view(-1).index_add_(0, places, torch.ones_like(places))

    def compute(self) -> Tensor:
        """Return the counts, `(Z, Y, Y)`."""
        return self.confusion.clone()

    def plot(self, val: Tensor | None = None, group_names: Sequence[str] | None = None) -> tuple[Any, Any]:
        """Draw the confusion matrix of every group; returns the figure and its axes."""
        confusion = self.compute() if val is None else val
        figure = confusion_figure(confusion, None, group_names)
        return figure, figure.axes

    def _predicted(self, preds: Tensor) -> Tensor:
        if not preds.is_floating_point():
            return preds
        if bool(preds.isnan().any()):
            raise ValueError(
                f"Expected `preds` to be numbers but {int(preds.isnan().sum())} of {preds.numel()} are NaN: the model"
                " has diverged. Look at its training loss."
            )
        if self.num_labels == 2 and preds.ndim == 2 and preds.shape[1] == 1:
            preds = preds[:, 0]
        if preds.ndim == 2 and preds.shape[1] == self.num_labels:
            return preds.argmax(1)
        if self.num_labels != 2 or preds.ndim != 1:
            raise ValueError(
                f"Expected scores `preds` to have one column for each of the {self.num_labels} labels but got the shape"
                f" {tuple(preds.shape)}."
            )
        if self.threshold == 0.5 and len(preds) and not 0 <= float(preds.min()) <= float(preds.max()) <= 1:
            raise ValueError(
                f"Expected scores `preds` to be from 0 to 1 but got some from {float(preds.min()):g} to"
                f" {float(preds.max()):g}. For logits use {type(self).__name__}(..., threshold=0)."
            )
        return (preds > self.threshold).long()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
