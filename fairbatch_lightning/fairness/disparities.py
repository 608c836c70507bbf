"""How unfair predictions are: the disparities of the paper's section 4, from counts of predictions.

All take the `(Z, Y, Y)` counts of groups, labels and predictions that `group_confusion` returns, or a batch of them
`(..., Z, Y, Y)`. As "difference" they say how far the group that is furthest from everybody's rate is away from it: 0
is fair. As "ratio" they divide the smallest group's rate by the largest: 1 is fair. (Of demographic parity, less than
0.8 is what the four-fifths rule objects to.)

Where a cell has no sample its rate is undefined: it is left out, never counted as 0. Where fewer than two groups are
left there is nothing to compare, and the result is NaN.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fairbatch_lightning._support.devices import most_precise

Form: TypeAlias = Literal["difference", "ratio"]


class Rates(NamedTuple):
    """Rates that should be equal between groups: each group's `(..., Z, K)`, and everybody's `(..., K)`.

    `samples` `(..., Z, K)` says of how many samples each group's rate is.
    """

    by_group: Tensor
    overall: Tensor
    samples: Tensor

    def without(self, left_out: Tensor) -> Rates:
        """Return the rates without those of groups that are not to be compared; `left_out` is `(Z, K)`."""
        return self._replace(by_group=self.by_group.masked_fill(left_out, torch.nan))


def group_confusion(predictions: Tensor, labels: Tensor, groups: Tensor, num_labels: int, num_groups: int) -> Tensor:
    """Return how often each group's samples of each label were predicted to be each label: `(Z, Y, Y)`.

    >>> group_confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), 2, 2)
    tensor([[[0, 0],
             [0, 1]],
    <BLANKLINE>
            [[1, 1],
             [0, 0]]])
    """
    flat = places_in_confusion(predictions, labels, groups, num_labels)
    return torch.bincount(flat, minlength=num_groups * num_labels**2).view(num_groups, num_labels, num_labels)


def places_in_confusion(predictions: Tensor, labels: Tensor, groups: Tensor, num_labels: int) -> Tensor:
    """Return where each sample counts in the flattened `(Z, Y, Y)` counts."""
    return (groups * num_labels + labels) * num_labels + predictions


def equal_opportunity_disparity(confusion: Tensor, positive: int | None = 1, form: Form = "difference") -> Tensor:
    """Return `max over z of |P(yhat=1 | z, y=1) - P(yhat=1 | y=1)|`, or the ratio between groups of that rate.

    With `positive=None` every label is the positive one in turn, and the worst counts.
    """
    return disparity(equal_opportunity_rates(confusion, positive), form)


def equalized_odds_disparity(confusion: Tensor, positive: int | None = None, form: Form = "difference") -> Tensor:
    """Return `max over z, y, yhat of |P(yhat | z, y) - P(yhat | y)|`, or the smallest ratio between groups of a rate.

    With a number as `positive`, only predictions of this label are looked at. With two labels the difference stays the
    same, and the ratio is that of true and false positive rates.
    """
    return disparity(equalized_odds_rates(confusion, positive), form)


def demographic_parity_disparity(confusion: Tensor, positive: int | None = None, form: Form = "difference") -> Tensor:
    """Return `max over z of |P(yhat=1 | z) - P(yhat=1)|`, or the ratio between groups of that rate.

    With `positive=None` every label is the positive one in turn, and the worst counts: with two labels the difference
    stays the same.
    """
    return disparity(demographic_parity_rates(confusion, positive), form)


def accuracy_disparity(confusion: Tensor, form: Form = "difference") -> Tensor:
    """Return `max over z of |P(yhat=y | z) - P(yhat=y)|`, or the ratio between groups of the accuracies."""
    return disparity(accuracy_rates(confusion), form)


def group_accuracy(confusion: Tensor) -> Tensor:
    """Return the part of each group's samples that are predicted right, `(..., Z)`; NaN for groups without samples."""
    return accuracy_rates(confusion).by_group.squeeze(-1)


def worst_group_accuracy(confusion: Tensor) -> Tensor:
    """Return the smallest of the groups' accuracies."""
    return _extreme(group_accuracy(confusion), -1, largest=False)


def worst_cell_accuracy(confusion: Tensor) -> Tensor:
    """Return the smallest part of a cell, a label's samples of one group, that is predicted right."""
    return _extreme(equal_opportunity_rates(confusion, None).by_group.flatten(-2), -1, largest=False)


def accuracy(confusion: Tensor) -> Tensor:
    """Return the part of all samples that are predicted right."""
    return accuracy_rates(confusion).overall.squeeze(-1)


def equal_opportunity_rates(confusion: Tensor, positive: int | None) -> Rates:
    """Return `P(yhat=y | z, y)` for the positive label, or for every one."""
    rates = _rates_within_labels(confusion)
    return Rates(*(_only(part.diagonal(dim1=-2, dim2=-1), positive) for part in rates))


def equalized_odds_rates(confusion: Tensor, positive: int | None) -> Rates:
    """Return `P(yhat | z, y)` for all labels y, and predictions of the positive label or of every one."""
    return Rates(*(_only(part, positive).flatten(-2) for part in _rates_within_labels(confusion)))


def demographic_parity_rates(confusion: Tensor, positive: int | None) -> Rates:
    """Return `P(yhat | z)` for predictions of the positive label, or of every one."""
    predicted = _floating(confusion).sum(-2)
    total, number = predicted.sum(-2), predicted.sum(-1, keepdim=True)
    rates = predicted / number, total / total.sum(-1, keepdim=True), number.expand_as(predicted)
    return Rates(*(_only(part, positive) for part in rates))


def accuracy_rates(confusion: Tensor) -> Rates:
    """Return `P(yhat=y | z)`."""
    confusion = _floating(confusion)
    right, all_ = confusion.diagonal(dim1=-2, dim2=-1).sum(-1), confusion.sum((-2, -1))
    rates = right / all_, right.sum(-1) / all_.sum(-1), all_
    return Rates(*(part.unsqueeze(-1) for part in rates))


def disparity(rates: Rates, form: Form) -> Tensor:
    """Return how unequal rates are between groups: the worst of the K."""
    by_group, overall, _ = rates
    if form == "difference":
        unequal = _extreme((by_group - overall.unsqueeze(-2)).abs(), -2, largest=True)
    elif form == "ratio":
        unequal = _extreme(by_group, -2, largest=False) / _extreme(by_group, -2, largest=True)
    else:
        raise ValueError(f'Expected argument `form` to be "difference" or "ratio" but got {form!r}.')
    comparable = (~by_group.isnan()).sum(-2) > 1
    return _extreme(torch.where(comparable, unequal, torch.nan), -1, largest=form == "difference")


def _floating(confusion: Tensor) -> Tensor:
    return confusion.to(most_precise(confusion.device))


def _rates_within_labels(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `P(yhat | z, y)` as `(..., Z, Y, Y)`, `P(yhat | y)` as `(..., Y, Y)`, and the number of samples.

    Rates are NaN where there is no sample.
    """
    confusion = _floating(confusion)
    overall, number = confusion.sum(-3), confusion.sum(-1, keepdim=True)
    return confusion / number, overall / overall.sum(-1, keepdim=True), number.expand_as(confusion)


def _only(rates: Tensor, positive: int | None) -> Tensor:
    """Return the rates of one label, the last dimension, which is kept; None for all."""
    return rates if positive is None else rates[..., positive].unsqueeze(-1)


def _extreme(values: Tensor, dim: int, *, largest: bool) -> Tensor:
    """Return the largest or smallest of the values that are not NaN; NaN if there is none."""
    none = -torch.inf if largest else torch.inf
    known = torch.where(values.isnan(), none, values)
    found = known.amax(dim) if largest else known.amin(dim)
    return torch.where(found == none, torch.nan, found)
