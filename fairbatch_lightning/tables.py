"""Tables as text, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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


def show(table: Table) -> None:
    """Print a table, with rich if it is installed."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        print(as_text(table) + "\n")
        return
    rich = RichTable(title=escape(table.title), title_justify="left")
    for place, name in enumerate(table.header):
        rich.add_column(escape(name), justify="left" if place < table.words else "right")
    for row in table.rows:
        rich.add_row(*map(escape, row))
    Console().print(rich)
