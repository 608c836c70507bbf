"""Per-sample losses: from a model's output to one value per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fairbatch_lightning.cells.classes import ClassNumbers, is_binary, num_classes, predicted
from fairbatch_lightning.cells.index import GroupIndex

PerSampleLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return every sample's cross-entropy: binary for logits `(B,)` or `(B, 1)`, over classes for `(B, C)`."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if is_binary(logits):
        logits = logits.flatten()
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return functional.cross_entropy(logits, labels, reduction="none")


def error(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for every wrong prediction and 0 for every right one, NaN where there is none: the loss of the theory.

    >>> error(torch.tensor([2.0, -1.0, 3.0, torch.nan]), torch.tensor([1, 1, 0, 1]))
    tensor([0., 1., 1., nan])
    """
    wrong = (predicted(logits) != labels).to(logits.dtype)
    return wrong.masked_fill(logits.reshape(len(logits), -1).isnan().any(1), torch.nan)


def resolve_loss(loss: PerSampleLoss | str | None, default: PerSampleLoss = cross_entropy) -> PerSampleLoss:
    """Return the loss that the user means: None for the default, "error" for the 0/1 loss, or a callable."""
    if loss is None:
        return default
    if loss == "error":
        return error
    if not callable(loss):
        raise ValueError(
            f'Expected argument `loss` to be None, "error" or a function (logits, labels) -> values but got {loss!r}.'
        )
    return loss


class SampleLoss:
    """The loss of samples whose cells are known, against their own label or against one for all.

    Args:
        index: The labels of the data.
        loss: A function of logits and class numbers `(B,)` that returns one value per sample.
        target: The row that all samples are measured against; None for each sample's own.
        classes: Which of the model's classes labels are, if more is known than follows from their numbers.
    """

    def __init__(
        self, index: GroupIndex, loss: PerSampleLoss, target: int | None, classes: ClassNumbers | None = None
    ) -> None:
        self._index, self._loss, self._target = index, loss, target
        self._numbers = ClassNumbers() if classes is None else classes
        self._classes: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def is_error(self) -> bool:
        """Whether it is 1 for wrong predictions and 0 for right ones."""
        return self._loss is error

    def __call__(self, logits: Tensor, cells: Tensor) -> Tensor:
        """Return the losses `(B,)` of samples with the given logits and cells' numbers `(B,)`."""
        losses = self._loss(logits, self.classes(logits, cells))
        if not isinstance(losses, Tensor) or losses.shape != cells.shape:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"Expected `loss` to return one value per sample, shape {tuple(cells.shape)}, but got {got}."
                " Losses of torch take reduction='none'."
            )
        return losses

    def classes(self, logits: Tensor, cells: Tensor) -> Tensor:
        """Return which of the model's classes the samples are measured against, `(B,)`."""
        known = num_classes(logits), logits.device
        if known not in self._classes:
            self._classes[known] = self._classes_of_cells(known[0]).to(logits.device)
        return self._classes[known][cells.to(logits.device)]

    def _classes_of_cells(self, number: int) -> Tensor:
        """Return the class number that each cell's samples are measured against, `(Y * Z,)`."""
        found = self._numbers.find(self._index.label_values, number)
        classes = torch.tensor([found[label] for label in self._index.label_values])
        if self._target is not None:
            classes = classes[self._target].expand_as(classes)
        return classes.repeat_interleave(self._index.shape[1])
