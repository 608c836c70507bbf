"""Draw how the rooms of the package hang together, from what their files import.

    python examples/draw_architecture.py docs/images/architecture.svg

An arrow goes from a room to one that imports it, unless a longer way along other arrows says so already.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import fairbatch_lightning

PACKAGE = Path(fairbatch_lightning.__file__).parent
ROOMS = ["_support", "cells", "batches", "measure", "rules", "fairness", "reports", "callbacks", "vision", "cli"]
"""In the order in which they may import each other: only what comes before."""
COLUMNS = {
    "measure": 0,
    "cells": 1,
    "batches": 1,
    "fairness": 1,
    "reports": 1,
    "callbacks": 1,
    "cli": 1,
    "rules": 2,
    "vision": 2,
}
"""Only for looks; how far down a room is follows from who imports it."""
WIDTH, HEIGHT, ACROSS, DOWN = 215, 86, 250, 132


def imported(file: Path) -> Iterator[str]:
    """Yield the full names of what a file imports at run time, at its top or in a function, also relatively."""
    tree = ast.parse(file.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    typing_only = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    package = file.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """Return the room of something of the package's, by its full name; None for what is not the package's."""
    package, _, rest = name.partition(".")
    if package != "fairbatch_lightning" or not rest:
        return None
    first = rest.split(".")[0]
    return first if first in ROOMS else room_of(fairbatch_lightning._MODULE_OF.get(first, "")) or first


def imports_of_rooms() -> dict[str, set[str]]:
    """Return which rooms each room imports; the support of all of them is left out."""
    rooms = ROOMS[1:]
    found = {
        room: {room_of(name) for file in (PACKAGE / room).rglob("*.py") for name in imported(file)} for room in rooms
    }
    return {room: {other for other in rooms if other in names and other != room} for room, names in found.items()}


def draw() -> str:
    """Return the picture as SVG."""
    imports = imports_of_rooms()
    from_end: dict[str, int] = {}
    for room in reversed(imports):  # those that import it come first
        from_end[room] = 1 + max((from_end[other] for other in from_end if room in imports[other]), default=-1)
    last = max(from_end.values())
    width, height = ACROSS * (1 + max(COLUMNS.values())) + 20, DOWN * (last + 1) + 10
    place = {room: (22 + ACROSS * COLUMNS[room], 20 + DOWN * (last - from_end[room])) for room in imports}
    parts = [_arrow(place[other], place[room]) for room in imports for other in _direct(imports, room)]
    parts += [_box(room, *place[room]) for room in imports]
    note = "All of them use _support. Data flows along the arrows; callbacks close the loop."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif"'
        ' font-size="14" role="img" aria-label="How the rooms hang together">\n'
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#444"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + f'\n<text x="{width / 2:g}" y="{height - 12}" text-anchor="middle" fill="#444" font-size="12">{note}</text>\n'
        "</svg>\n"
    )


def _direct(imports: dict[str, set[str]], room: str) -> list[str]:
    """Return the rooms that a room imports, without those that it reaches through another of them anyway."""

    def reached(start: str) -> set[str]:
        return imports[start].union(*(reached(other) for other in imports[start]))

    through_others = set().union(*(reached(other) for other in imports[room]))
    return [other for other in imports if other in imports[room] - through_others]


def _box(room: str, x: float, y: float) -> str:
    folder = PACKAGE / room
    names = [file.stem for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
    names += [f"{inner.name}/" for inner in sorted(folder.iterdir()) if (inner / "__init__.py").exists()]
    lines = [""]
    for name in names:
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        lines = [*lines[:-1], longer] if len(longer) <= 34 else [*lines, name]
    middle = x + WIDTH / 2
    text = "".join(
        f'<text x="{middle:g}" y="{y + 40 + 15 * number:g}" text-anchor="middle" fill="#333" font-size="11">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#e3eef6" stroke="#777"/>\n'
        f'<text x="{middle:g}" y="{y + 21:g}" text-anchor="middle" font-weight="600" fill="#111">{room}</text>{text}'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    aside = (end[0] > start[0]) - (end[0] < start[0])  # to the right, to the left, or straight down
    from_x, from_y = start[0] + WIDTH * (0.5 + 0.44 * aside), start[1] + HEIGHT
    to_x, to_y = end[0] + WIDTH * (0.5 - 0.2 * aside), end[1] - 2
    return f'<path d="M{from_x:g} {from_y:g}L{to_x:g} {to_y:g}" stroke="#444" fill="none" marker-end="url(#a)"/>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
