"""How unfair predictions are: the disparities of the paper's section 4, from counts of predictions.

All take the `(Z, Y, Y)` counts of groups, labels and predictions that `group_confusion` returns. Where a cell has no
sample its rate is undefined: it is left out of the maximum, never counted as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_confusion(predictions: Tensor, labels: Tensor, groups: Tensor, num_labels: int, num_groups: int) -> Tensor:
    """Return how often each group's samples of each label were predicted to be each label: `(Z, Y, Y)`.

    >>> group_confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), 2, 2)
    tensor([[[0, 0],
             [0, 1]],
    <BLANKLINE>
            [[1, 1],
             [0, 0]]])
    """
    flat = (groups * num_labels + labels) * num_labels + predictions
    shape = num_groups, num_labels, num_labels
    return torch.bincount(flat, minlength=num_groups * num_labels * num_labels).view(shape)


def equal_opportunity_disparity(confusion: Tensor, positive: int = 1) -> Tensor:
    """Return `max over z of |P(yhat=1 | z, y=1) - P(yhat=1 | y=1)|`."""
    return _largest(_label_deviations(confusion)[:, positive, positive])


def equalized_odds_disparity(confusion: Tensor) -> Tensor:
    """Return `max over z, y, yhat of |P(yhat | z, y) - P(yhat | y)|`."""
    return _largest(_label_deviations(confusion))


def demographic_parity_disparity(confusion: Tensor, positive: int | None = None) -> Tensor:
    """Return `max over z of |P(yhat=1 | z) - P(yhat=1)|`; over all predicted labels if `positive` is None."""
    by_group = confusion.sum(1).double()
    overall = by_group.sum(0)
    deviations = by_group / by_group.sum(1, keepdim=True) - overall / overall.sum()
    return _largest(deviations if positive is None else deviations[:, positive])


def _label_deviations(confusion: Tensor) -> Tensor:
    """Return `P(yhat | z, y) - P(yhat | y)` as `(Z, Y, Y)`, NaN where a cell has no sample."""
    confusion = confusion.double()
    overall = confusion.sum(0)
    return confusion / confusion.sum(2, keepdim=True) - overall / overall.sum(1, keepdim=True)


def _largest(deviations: Tensor) -> Tensor:
    known = deviations[~deviations.isnan()].abs()
    return known.max() if len(known) else deviations.new_tensor(torch.nan)
