"""What is known about a model's fairness from its predictions on one set of data: numbers, and what to doubt in them.

How they are shown is another matter: `reports/tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.fairness.disparities import (
    Form,
    Rates,
    accuracy,
    demographic_parity_rates,
    disparity,
    equal_opportunity_rates,
    equalized_odds_rates,
    group_accuracy,
    worst_cell_accuracy,
    worst_group_accuracy,
)
from fairbatch_lightning.fairness.intervals import bootstrap_interval, wilson_interval

CRITERIA: dict[str, Callable[[Tensor, int | None], Rates]] = {
    "equal_opportunity": equal_opportunity_rates,
    "equalized_odds": equalized_odds_rates,
    "demographic_parity": demographic_parity_rates,
}
ACCURACIES: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": accuracy,
    "worst_group_accuracy": worst_group_accuracy,
    "worst_cell_accuracy": worst_cell_accuracy,
}
_RESAMPLED_ENTRIES = 2 * 10**7
ONE_SIDED = 0.1
"""If labels other than the one that is mostly predicted are predicted less than this part of how often they occur, a
model hardly tells labels apart."""


class Cell(NamedTuple):
    """How one cell does: its number of samples, the part of them that is predicted right, and that one's interval."""

    label: str
    group: str
    samples: int
    right: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Audit:
    """How a model does on one set of data, group by group.

    Args:
        confusion: The counts of groups, labels and predictions, `(Z, Y, Y)`.
        label_names: The labels as people read them.
        group_names: The groups as people read them.
        positive: The number of the label that disparities are about; None for all in turn.
        num_broken: Of how many samples the logits were NaN; if there are any, nothing is known.
        min_samples: Rates of fewer samples than this are left out of the disparities: chance decides the largest of
            many differences if some are of a handful of samples.
        like_probabilities: Whether single outputs were cut at 0, as logits are, but all of them are from 0 to 1.
    """

    confusion: Tensor
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    positive: int | None = 1
    num_broken: int = 0
    min_samples: int = 1
    like_probabilities: bool = False

    @property
    def num_samples(self) -> int:
        """How many samples were looked at."""
        return int(self.confusion.sum())

    def values(self) -> dict[str, float]:
        """Return accuracies, and disparities as differences and as ratios, by names that never change."""
        found = {name: float(of(self.confusion)) for name, of in ACCURACIES.items()}
        for name in CRITERIA:
            found[name] = float(disparity(self.rates(name), "difference"))
        for name in CRITERIA:
            found[f"{name}_ratio"] = float(disparity(self.rates(name), "ratio"))
        return dict.fromkeys(found, math.nan) if self.num_broken else found

    def group_accuracies(self) -> dict[str, float]:
        """Return the accuracy of every group, by the group's name."""
        accuracies = dict(zip(self.group_names, group_accuracy(self.confusion).tolist(), strict=True))
        return dict.fromkeys(accuracies, math.nan) if self.num_broken else accuracies

    def rates(self, criterion: str) -> Rates:
        """Return the rates that a criterion wants to be equal."""
        return self._rates_of(criterion)(self.confusion)

    def _rates_of(self, criterion: str) -> Callable[[Tensor], Rates]:
        """Return a criterion's rates as a function of counts: which of them are compared is decided by those here."""
        samples = CRITERIA[criterion](self.confusion, self.positive).samples
        return partial(_compared_rates, criterion, self.positive, samples < self.min_samples)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95% confidence intervals of `values`, but for the worst ones, which are chosen by their value.

        With so many labels that it would take minutes, those of disparities are NaN.
        """
        right, number = self.confusion.diagonal(dim1=1, dim2=2).sum(), self.confusion.sum()
        found = {"accuracy": wilson_interval(right, number)}
        resamples = min(1000, _RESAMPLED_ENTRIES // self.confusion.numel())
        known = resamples >= 100 and not self.num_broken
        forms: tuple[tuple[str, Form], ...] = (("", "difference"), ("_ratio", "ratio"))
        for name, (ending, form) in product(CRITERIA, forms):
            found[name + ending] = (
                bootstrap_interval(self.confusion, self._rates_of(name), form, resamples=resamples)
                if known
                else torch.full((2,), math.nan)
            )
        return {name: (float(low), float(high)) for name, (low, high) in found.items()}

    def group_intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95% confidence intervals of the groups' accuracies, by the group's name."""
        right, number = self.confusion.diagonal(dim1=1, dim2=2).sum(1), self.confusion.sum((1, 2))
        low, high = wilson_interval(right, number).tolist()
        return dict(zip(self.group_names, zip(low, high, strict=True), strict=True))

    def cells(self) -> list[Cell]:
        """Return how every cell does, label by label."""
        number, right = self.confusion.sum(2).tolist(), self.confusion.diagonal(dim1=1, dim2=2).tolist()
        low, high = wilson_interval(torch.tensor(right), torch.tensor(number)).tolist()
        return [
            Cell(
                self.label_names[y],
                self.group_names[z],
                number[z][y],
                right[z][y] / number[z][y] if number[z][y] else math.nan,
                (low[z][y], high[z][y]),
            )
            for y, z in product(range(len(self.label_names)), range(len(self.group_names)))
        ]

    def one_sided(self) -> str | None:
        """Return a word of caution if nearly all predictions are of one class: equal errors then say little.

        >>> Audit(torch.tensor([[[50, 0], [50, 0]]]), ("no", "yes"), ("all",)).one_sided()
        'nearly all predictions (100%) are no: the model hardly tells labels apart'
        """
        predicted, occurring = self.confusion.sum((0, 1)), self.confusion.sum((0, 2))
        most = int(predicted.argmax())
        others, expected = self.num_samples - int(predicted[most]), self.num_samples - int(occurring[most])
        if not expected or others > ONE_SIDED * expected:
            return None
        part = round(100 * float(predicted[most]) / self.num_samples)
        return f"nearly all predictions ({part}%) are {self.label_names[most]}: the model hardly tells labels apart"

    def problems(self, place: str) -> list[str]:
        """Return what people should know before they believe the values; `place` says what data it is."""
        return [*self._undefined(place), *self._missing(place), *self._mistaken(place)]

    def _undefined(self, place: str) -> Iterator[str]:
        """Yield why values are NaN."""
        if self.num_broken:
            yield (
                f"the logits of {self.num_broken} {place} samples are NaN: the model has diverged, and nothing is known"
                " of its fairness. Look at its training loss."
            )
        if len(self.group_names) == 1:
            yield (
                f"all {place} samples are of the group {self.group_names[0]}: disparities are NaN. Evaluate on data"
                " that has others as well."
            )
        if self.min_samples > 1 and math.isnan(self.values()["equalized_odds"]) and not self.num_broken:
            yield (
                f"no label has {self.min_samples} {place} samples of two groups: disparities are NaN. Use a smaller"
                " `min_samples`."
            )

    def _missing(self, place: str) -> Iterator[str]:
        """Yield what the data has no samples of."""
        number = self.confusion.sum(2)
        absent = [self.label_names[y] for y in (number.sum(0) == 0).nonzero().flatten().tolist()]
        empty = ((number == 0) & (number.sum(0) > 0)).nonzero().tolist()
        cells = [f"(label {self.label_names[y]}, group {self.group_names[z]})" for z, y in empty]
        if absent:
            yield (
                f"the model tells {len(self.label_names)} classes apart, but {place} data has no samples of"
                f" {some_of(absent)}. If these are not its classes, say where the logits are:"
                " FairnessMonitor(logits=...)."
            )
        if cells:
            yield (
                f"there are no {place} samples of the cells {some_of(cells)}. Their rates are undefined and left out;"
                " where fewer than two groups are left, a disparity is NaN. Evaluate on data that has all of them."
            )

    def _mistaken(self, place: str) -> Iterator[str]:
        """Yield what may not be what it is taken for."""
        if self.like_probabilities:
            yield (
                f"all outputs on {place} data are from 0 to 1. If they are probabilities rather than logits, use"
                " FairnessMonitor(threshold=0.5)."
            )


def _compared_rates(criterion: str, positive: int | None, left_out: Tensor, confusion: Tensor) -> Rates:
    return CRITERIA[criterion](confusion, positive).without(left_out)


def some_of(names: list[str]) -> str:
    """Return the first names, and how many more there are.

    >>> some_of(list("abcdefghijkl"))
    'a, b, c, d, e, f, g, h, i, j and 2 more'
    """
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


@dataclass(frozen=True)
class FairnessRecord:
    """What was measured in one validation or test.

    Args:
        stage: "val" or "test", or "val_0", "val_1" and so on if there are several DataLoaders.
        epoch: The epoch in which it happened.
        step: The Trainer's `global_step` at that time.
        values: Accuracies and disparities by name.
        group_accuracies: The accuracy of every group, by the group's name.
    """

    stage: str
    epoch: int
    step: int
    values: dict[str, float]
    group_accuracies: dict[str, float]

    @classmethod
    def load(cls, saved: Saved) -> FairnessRecord:
        """Return a record from a checkpoint."""
        numbers = (
            {name: value.number() for name, value in saved[kind].entries().items()}
            for kind in ("values", "group_accuracies")
        )
        return cls(saved["stage"].text(), saved["epoch"].integer(), saved["step"].integer(), *numbers)
