"""What is known about a model's fairness from its predictions on one set of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fairbatch_lightning import disparities
from fairbatch_lightning.disparities import Form, Rates, disparity
from fairbatch_lightning.intervals import bootstrap_interval, wilson_interval
from fairbatch_lightning.tables import Table

CRITERIA: dict[str, Callable[[Tensor, int | None], Rates]] = {
    "equal_opportunity": disparities.equal_opportunity_rates,
    "equalized_odds": disparities.equalized_odds_rates,
    "demographic_parity": disparities.demographic_parity_rates,
}
ACCURACIES = ("accuracy", "worst_group_accuracy", "worst_cell_accuracy")
SMALL = 30
"""Cells with fewer samples than this are flagged."""
MANY = 60
"""Of more cells than this a table shows those that are worst off."""
CELL_HEADER = ("label", "group", "samples", "right", "95% interval", "")
_RESAMPLED_ENTRIES = 2 * 10**7


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
    """

    confusion: Tensor
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    positive: int | None = 1
    num_broken: int = 0
    min_samples: int = 1

    @property
    def num_samples(self) -> int:
        """How many samples were looked at."""
        return int(self.confusion.sum())

    def values(self) -> dict[str, float]:
        """Return accuracies, and disparities as differences and as ratios, by names that never change."""
        found = {
            "accuracy": float(disparities.accuracy(self.confusion)),
            "worst_group_accuracy": float(disparities.worst_group_accuracy(self.confusion)),
            "worst_cell_accuracy": float(disparities.worst_cell_accuracy(self.confusion)),
        }
        for name in CRITERIA:
            found[name] = float(disparity(self.rates(name), "difference"))
        for name in CRITERIA:
            found[f"{name}_ratio"] = float(disparity(self.rates(name), "ratio"))
        return dict.fromkeys(found, math.nan) if self.num_broken else found

    def group_accuracies(self) -> dict[str, float]:
        """Return the accuracy of every group, by the group's name."""
        accuracies = dict(zip(self.group_names, disparities.group_accuracy(self.confusion).tolist(), strict=True))
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

    def problems(self, place: str) -> list[str]:
        """Return what people should know before they believe the values; `place` says what data it is."""
        number = self.confusion.sum(2)
        absent = [self.label_names[y] for y in (number.sum(0) == 0).nonzero().flatten().tolist()]
        empty = ((number == 0) & (number.sum(0) > 0)).nonzero().tolist()
        cells = [f"(label {self.label_names[y]}, group {self.group_names[z]})" for z, y in empty]
        found = []
        if self.num_broken:
            found.append(
                f"the logits of {self.num_broken} {place} samples are NaN: the model has diverged, and nothing is known"
                " of its fairness. Look at its training loss."
            )
        if len(self.group_names) == 1:
            found.append(
                f"all {place} samples are of the group {self.group_names[0]}: disparities are NaN. Evaluate on data"
                " that has others as well."
            )
        if self.min_samples > 1 and math.isnan(self.values()["equalized_odds"]) and not self.num_broken:
            found.append(
                f"no label has {self.min_samples} {place} samples of two groups: disparities are NaN. Use a smaller"
                " `min_samples`."
            )
        if absent:
            found.append(
                f"the model tells {len(self.label_names)} classes apart, but {place} data has no samples of"
                f" {_some(absent)}. If these are not its classes, say where the logits are:"
                " FairnessMonitor(logits=...)."
            )
        if cells:
            found.append(
                f"there are no {place} samples of the cells {_some(cells)}. Their rates are undefined and left out;"
                " where fewer than two groups are left, a disparity is NaN. Evaluate on data that has all of them."
            )
        return found

    def named_counts(self) -> dict[tuple[str, ...], int]:
        """Return what a log has to hold to know all this again, by parts of names."""
        counts: dict[tuple[str, ...], int] = {
            ("count", group, label, prediction): int(self.confusion[z, y, p])
            for z, group in enumerate(self.group_names)
            for y, label in enumerate(self.label_names)
            for p, prediction in enumerate(self.label_names)
        }
        counts["nan",], counts["min_samples",] = self.num_broken, self.min_samples
        for y, label in enumerate(self.label_names):
            counts["positive", label] = int(self.positive in (None, y))
        return counts

    def cell_rows(self) -> list[list[str]]:
        """Return label, group, number of samples, part that is predicted right, its interval, and a flag, as text."""
        number = self.confusion.sum(2)
        right = self.confusion.diagonal(dim1=1, dim2=2)
        low, high = wilson_interval(right, number)
        rows = []
        for y, label in enumerate(self.label_names):
            for z, group in enumerate(self.group_names):
                n = int(number[z, y])
                share = f"{int(right[z, y]) / n:.3f}" if n else "-"
                interval = f"{low[z, y]:.3f} to {high[z, y]:.3f}" if n else "-"
                rows.append([label, group, str(n), share, interval, "" if n >= SMALL else "small" if n else "none"])
        return rows

    def measure_rows(self) -> list[list[str]]:
        """Return what is measured, its value and interval, and the same as a ratio, as text."""
        values, intervals = self.values(), self.intervals()

        def text(name: str) -> list[str]:
            low, high = intervals.get(name, (float("nan"), float("nan")))
            known = name in values and values[name] == values[name]
            interval = f"{low:.3f} to {high:.3f}" if known and low == low else ""
            return [f"{values[name]:.3f}" if known else "-" if name in values else "", interval]

        names = [name for name in values if not name.endswith("_ratio")]
        first, *others = [[name.replace("_", " "), *text(name), *text(f"{name}_ratio")] for name in names]
        return [first, *self._group_rows(), *others]

    def _group_rows(self) -> list[list[str]]:
        """Return the accuracy of every group with its interval, as text; none if there are very many groups."""
        right, number = self.confusion.diagonal(dim1=1, dim2=2).sum(1), self.confusion.sum((1, 2))
        ends = zip(*wilson_interval(right, number).tolist(), strict=True)
        accuracies = self.group_accuracies().items() if len(self.group_names) <= MANY // 3 else ()
        return [
            [
                f"accuracy of {group}",
                *([f"{value:.3f}", f"{low:.3f} to {high:.3f}"] if value == value else ["-", ""]),
                "",
                "",
            ]
            for (group, value), (low, high) in zip(accuracies, ends, strict=False)
        ]

    def tables(self, title: str) -> list[Table]:
        """Return the tables that tell people about it: every cell, and accuracies and disparities."""
        rows = self.cell_rows()
        notes = [f"{self.num_samples} samples"]
        if len(rows) > MANY:
            notes.append(f"the {MANY} of {len(rows)} cells that are worst off")
            rows = sorted((row for row in rows if row[3] != "-"), key=lambda row: float(row[3]))[:MANY]
        if any(row[-1] for row in rows):
            notes.append(f"cells of fewer than {SMALL} samples say little")
        measures = ["", "value", "95% interval", "ratio", "95% interval"]
        fair = "Fair is a difference of 0 and a ratio of 1 (four-fifths rule: 0.8 for demographic parity)"
        if self.min_samples > 1:
            fair += f"; disparities are of cells of at least {self.min_samples} samples"
        return [
            Table(f"{title}: {'; '.join(notes)}", CELL_HEADER, rows, words=2),
            Table(fair, measures, self.measure_rows()),
        ]


def _compared_rates(criterion: str, positive: int | None, left_out: Tensor, confusion: Tensor) -> Rates:
    return CRITERIA[criterion](confusion, positive).without(left_out)


def _some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
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
