"""How accurate and how fair a model is on a data set."""

from __future__ import annotations

from collections.abc import Callable

import torch

import data  # noqa: F401  # isort: skip - first: it tells where the other examples are
from synthetic import DISPARITIES
from torch import Tensor
from torch.utils.data import TensorDataset

from fairbatch_lightning.fairness.disparities import accuracy, group_confusion


def confusion_of(model: Callable[[Tensor], Tensor], samples: TensorDataset) -> Tensor:
    """Return the counts of a model's predictions on some samples, `(Z, Y, Yhat)`."""
    with torch.no_grad():
        return confusion(model(samples.tensors[0]), samples)


def confusion(logits: Tensor, samples: TensorDataset) -> Tensor:
    """Return the counts of predictions, `(Z, Y, Yhat)`, for the logits of some samples."""
    _, y, z = samples.tensors
    return group_confusion((logits > 0).long(), y, z, num_labels=2, num_groups=2)


def scores(confusion: Tensor, criterion: str) -> tuple[float, float]:
    """Return accuracy and disparity."""
    return float(accuracy(confusion)), float(DISPARITIES[criterion](confusion))
