"""Tables of texts: how numbers are written, what tables an audit has, and what they look like in a terminal.

`page.py` shows the same tables as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fairbatch_lightning.fairness.audit import Audit

SMALL = 30
"""Cells with fewer samples than this are flagged."""
MANY = 60
"""Of more cells than this a terminal shows those that are worst off."""


class Table(NamedTuple):
    """A table of texts; the first `words` columns are words, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


def as_text(table: Table) -> str:
    """Return a table with words to the left and numbers to the right.

    >>> print(as_text(Table("Ages", ["name", "age"], [["Ada", "36"], ["Emmy", "8"]])))
    Ages
    name  age
    Ada    36
    Emmy    8
    """
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.title] if table.title else []
    for row in (table.header, *table.rows):
        cells = zip(row, widths, strict=True)
        aligned = (cell.ljust(w) if place < table.words else cell.rjust(w) for place, (cell, w) in enumerate(cells))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def number_texts(value: float, interval: tuple[float, float] | None = None) -> tuple[str, str]:
    """Return how a value and its confidence interval are written, wherever they are shown.

    >>> number_texts(0.25, (0.1, 0.5)), number_texts(0.25), number_texts(math.nan, (0.0, 1.0))
    (('0.250', '0.100 to 0.500'), ('0.250', ''), ('undefined', ''))
    """
    if math.isnan(value):
        return "undefined", ""
    known = interval is not None and not math.isnan(interval[0])
    return f"{value:.3f}", f"{interval[0]:.3f} to {interval[1]:.3f}" if interval is not None and known else ""


def cell_table(audit: Audit, title: str = "", most: int | None = None) -> Table:
    """Return a table of every cell: how many samples it has, and what part of them is predicted right.

    Args:
        audit: What is known.
        title: What it is about; notes are added to it.
        most: If there are more cells, show only as many, those that are worst off.
    """
    cells, notes = audit.cells(), [f"{audit.num_samples} samples"]
    if most is not None and len(cells) > most:
        notes.append(f"the {most} of {len(cells)} cells that are worst off")
        cells = sorted((cell for cell in cells if cell.samples), key=lambda cell: cell.right)[:most]
    if any(cell.samples < SMALL for cell in cells):
        notes.append(f"cells of fewer than {SMALL} samples say little")
    rows = [
        [cell.label, cell.group, str(cell.samples), *number_texts(cell.right, cell.interval), _flag(cell.samples)]
        for cell in cells
    ]
    header = ("label", "group", "samples", "right", "95% interval", "")
    return Table(f"{title}: {'; '.join(notes)}" if title else "", header, rows, words=2)


def _flag(samples: int) -> str:
    return "" if samples >= SMALL else "small" if samples else "none"


def measure_table(audit: Audit) -> Table:
    """Return a table of accuracies, those of every group unless there are very many, and of disparities."""
    values, intervals = audit.values(), audit.intervals()

    def texts(name: str) -> tuple[str, str]:
        return number_texts(values[name], intervals.get(name)) if name in values else ("", "")

    names = [name for name in values if not name.endswith("_ratio")]
    first, *others = [[name.replace("_", " "), *texts(name), *texts(f"{name}_ratio")] for name in names]
    groups = audit.group_accuracies() if len(audit.group_names) <= MANY // 3 else {}
    ends = audit.group_intervals()
    of_groups = [[f"accuracy of {group}", *number_texts(right, ends[group]), "", ""] for group, right in groups.items()]
    title = "Fair is a difference of 0 and a ratio of 1 (four-fifths rule: 0.8 for demographic parity)"
    if audit.min_samples > 1:
        title += f"; disparities are of cells of at least {audit.min_samples} samples"
    if (caution := audit.one_sided()) is not None:
        title += f". But {caution}"
    return Table(title, ["", "value", "95% interval", "ratio", "95% interval"], [first, *of_groups, *others])
