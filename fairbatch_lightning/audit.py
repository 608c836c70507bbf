"""What is known about a model's fairness from its predictions on one set of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fairbatch_lightning import disparities
from fairbatch_lightning.disparities import Rates, disparity
from fairbatch_lightning.intervals import bootstrap_interval, wilson_interval

CRITERIA: dict[str, Callable[[Tensor, int | None], Rates]] = {
    "equal_opportunity": disparities.equal_opportunity_rates,
    "equalized_odds": disparities.equalized_odds_rates,
    "demographic_parity": disparities.demographic_parity_rates,
}
SMALL = 30
"""Cells with fewer samples than this are flagged."""


@dataclass(frozen=True)
class Audit:
    """How a model does on one set of data, group by group.

    Args:
        confusion: The counts of groups, labels and predictions, `(Z, Y, Y)`.
        label_names: The labels as people read them.
        group_names: The groups as people read them.
        positive: The number of the label that equal opportunity and the ratios are about; None for all in turn.
    """

    confusion: Tensor
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    positive: int | None = 1

    @property
    def num_samples(self) -> int:
        """How many samples were looked at."""
        return int(self.confusion.sum())

    def values(self) -> dict[str, float]:
        """Return accuracies, and disparities as differences and as ratios, by names that never change."""
        found = {
            "accuracy": float(disparities.accuracy(self.confusion)),
            "worst_group_accuracy": float(disparities.worst_group_accuracy(self.confusion)),
        }
        for name in CRITERIA:
            found[name] = float(disparity(self.rates(name), "difference"))
        for name in CRITERIA:
            found[f"{name}_ratio"] = float(disparity(self.rates(name), "ratio"))
        return found

    def group_accuracies(self) -> dict[str, float]:
        """Return the accuracy of every group, by the group's name."""
        accuracies = disparities.group_accuracy(self.confusion).tolist()
        return dict(zip(self.group_names, accuracies, strict=True))

    def rates(self, criterion: str) -> Rates:
        """Return the rates that a criterion wants to be equal."""
        return CRITERIA[criterion](self.confusion, self.positive)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95% confidence intervals of `values`; none for the worst group, which is chosen by its value."""
        right, number = self.confusion.diagonal(dim1=1, dim2=2).sum(), self.confusion.sum()
        found = {"accuracy": wilson_interval(right, number)}
        for name, rates in CRITERIA.items():

            def measured(confusion: Tensor, rates: Callable[[Tensor, int | None], Rates] = rates) -> Rates:
                return rates(confusion, self.positive)

            found[name] = bootstrap_interval(self.confusion, measured, "difference")
            found[f"{name}_ratio"] = bootstrap_interval(self.confusion, measured, "ratio")
        return {name: (float(low), float(high)) for name, (low, high) in found.items()}

    def empty_cells(self) -> str:
        """Return the names of the cells without samples, for messages."""
        empty = (self.confusion.sum(2) == 0).nonzero().tolist()
        return ", ".join(f"(label {self.label_names[y]}, group {self.group_names[z]})" for z, y in empty)

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
        return [[name.replace("_", " "), *text(name), *text(f"{name}_ratio")] for name in names]

    def text(self, title: str) -> str:
        """Return the tables as plain text."""
        return "\n\n".join(_aligned(*table) for table in self._tables(title))

    def show(self, title: str) -> None:
        """Print the tables, with rich if it is installed."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self.text(title))
            return
        for heading, header, rows in self._tables(title):
            table = Table(title=heading, title_justify="left")
            for name in header:
                table.add_column(name, justify="left" if name in ("", "label", "group") else "right")
            for row in rows:
                table.add_row(*row, style="yellow" if row[-1] in ("small", "none") else None)
            Console().print(table)

    def _tables(self, title: str) -> list[tuple[str, list[str], list[list[str]]]]:
        cells = ["label", "group", "samples", "right", "95% interval", ""]
        measures = ["", "value", "95% interval", "ratio", "95% interval"]
        flagged = any(row[-1] for row in self.cell_rows())
        warning = f"; cells of fewer than {SMALL} samples say little" if flagged else ""
        return [
            (f"{title}: {self.num_samples} samples{warning}", cells, self.cell_rows()),
            ("Fair is a difference of 0 and a ratio of 1 (four-fifths rule: 0.8)", measures, self.measure_rows()),
        ]


def _aligned(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    to_left = [name in ("", "label", "group") for name in header]
    lines = [title]
    for row in (header, *rows):
        cells = zip(row, widths, to_left, strict=True)
        lines.append(
            "  ".join(cell.ljust(width) if left else cell.rjust(width) for cell, width, left in cells).rstrip()
        )
    return "\n".join(lines)
