"""Pictures, from plain numbers and names. Needs matplotlib, which is imported only here.

Lines differ in colour (Okabe and Ito's, which the colour-blind can tell apart), in style and in marker, and confusion
matrices in lightness, so that all of them can be read in greyscale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairbatch_lightning.reports.curves import FairnessCurves, SharesOverTime

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WORDS = {
    "loss": ("losses", "mean loss", "difference of loss"),
    "error": ("errors", "rate of wrong predictions", "from the rate of all groups"),
}
"""What values are called by their unit: many of them, one of them, and how groups differ in them."""
MANY_LABELS = 12
"""Of more labels than this a picture shows those with the largest gaps, and matrices no numbers."""


def shares_figure(over_time: SharesOverTime) -> Figure:
    """Draw the share and loss, or error rate, of every cell and the gap of every label over the updates."""
    losses, loss, difference = WORDS[over_time.unit]
    groups = over_time.group_names
    largest = over_time.gaps.nan_to_num(0).amax(0).argsort(descending=True, stable=True)[:MANY_LABELS]
    labels = {label: over_time.label_names[label] for label in sorted(largest.tolist())}
    figure, rows = _panels(len(labels), bands=3)
    for place, (label, name) in enumerate(labels.items()):
        panel = rows[0][place]
        _draw_lines(panel, _named(groups, over_time.shares[:, label]), first=0)
        panel.set(title=shown(f"shares of label {name}"), ylabel="part of the label's draws", ylim=(0, None))
        panel = rows[1][place]
        _draw_lines(panel, _named(groups, over_time.losses[:, label]), first=1)
        panel.set(title=shown(f"{losses} of label {name}"), ylabel=loss, ylim=(0, None))
    gaps, legend = rows[2][0], rows[2][1]
    names = [f"label {name}" for name in labels.values()]
    _draw_lines(gaps, _named(names, over_time.gaps[:, list(labels)]), first=1)
    some = f", {len(labels)} of {len(over_time.label_names)} labels" if len(labels) < len(over_time.label_names) else ""
    gaps.set(title=f"gap between groups{some}", ylabel=difference, ylim=(0, None))
    gaps.legend(frameon=False)
    _legend(legend, rows[0][0], "group")
    _finish(rows, xlabel="update")
    return figure


def fairness_figure(curves: FairnessCurves) -> Figure:
    """Draw accuracies and disparities over time: of all and of every group."""
    figure, rows = _panels(3, bands=1)
    named = {name.replace("_", " "): line for name, line in curves.values.items()}
    accuracies = {name: line for name, line in named.items() if name.endswith("accuracy")}
    for panel, title, lines in (
        (rows[0][0], "accuracy", accuracies),
        (rows[0][1], "disparity (0 is fair)", {name: line for name, line in named.items() if name not in accuracies}),
        (rows[0][2], "accuracy by group", curves.by_group),
    ):
        _draw_lines(panel, lines, places=curves.times)
        panel.set(title=title)
        panel.legend(frameon=False, fontsize="small")
    rows[0][1].set(ylim=(0, None))
    _finish(rows, xlabel=curves.xlabel)
    return figure


def runs_figure(runs: Mapping[str, FairnessCurves], names: Sequence[str]) -> Figure:
    """Draw what several runs measured over time, one panel for each of the `names`; all in steps or all in epochs."""
    figure, rows = _panels(len(names), bands=1)
    for panel, name in zip(rows[0], names, strict=False):
        for number, (run, curves) in enumerate(runs.items()):
            _draw_line(panel, number, run, curves.times, curves.values[name])
        panel.set(title=name.replace("_", " "))
        panel.legend(frameon=False, fontsize="small")
    _finish(rows, xlabel=next(iter(runs.values())).xlabel)
    return figure


def confusion_figure(
    confusion: Tensor, label_names: Sequence[str] | None = None, group_names: Sequence[str] | None = None
) -> Figure:
    """Draw one confusion matrix per group: the part of each label's samples with each prediction, and their number.

    Args:
        confusion: The counts of groups, labels and predictions, `(Z, Y, Y)`.
        label_names: The labels; default: their numbers.
        group_names: The groups; default: their numbers.
    """
    confusion = confusion.cpu()
    labels = list(map(shown, range(confusion.shape[1]) if label_names is None else label_names))
    groups = list(map(shown, range(len(confusion)) if group_names is None else group_names))
    figure, rows = _panels(len(groups), bands=1, panel_size=min(max(2.6, 0.6 * len(labels)), 0.6 * MANY_LABELS))
    rates = confusion / confusion.sum(2, keepdim=True)
    for group, (panel, name) in enumerate(zip(rows[0], groups, strict=False)):
        panel.imshow(rates[group].nan_to_num(0).numpy(), vmin=0, vmax=1, cmap="Blues")
        if len(labels) <= MANY_LABELS:
            _write_counts(panel, rates[group], confusion[group])
        panel.set(title=f"{name} ({int(confusion[group].sum())})", xlabel="predicted", ylabel="label")
        if len(labels) <= 3 * MANY_LABELS:
            panel.set_xticks(range(len(labels)), labels, rotation=90 if max(map(len, labels)) > 8 else 0)
            panel.set_yticks(range(len(labels)), labels)
    for panel in rows[0][len(groups) :]:
        panel.axis("off")
    return figure


def _panels(number: int, bands: int, panel_size: float = 3.2) -> tuple[Figure, list[list[Any]]]:
    """Return a figure and, for each band, `number` panels or some more, at most four side by side."""
    from matplotlib.figure import Figure

    columns = max(2, min(number, 4))
    lines = math.ceil(number / columns)
    figure = Figure(figsize=(columns * panel_size * 1.25, bands * lines * panel_size), layout="constrained")
    grid = figure.subplots(bands * lines, columns, squeeze=False)
    return figure, [list(grid[band * lines : (band + 1) * lines].flat) for band in range(bands)]


def _named(names: Sequence[str], values: Tensor) -> dict[str, list[float]]:
    return {name: values[:, number].tolist() for number, name in enumerate(names)}


def _draw_lines(
    panel: Any, lines: Mapping[str, Sequence[float]], *, first: int = 0, places: Sequence[float] | None = None
) -> None:
    for number, (name, values) in enumerate(lines.items()):
        _draw_line(panel, number, name, range(first, first + len(values)) if places is None else places, values)


def _draw_line(panel: Any, number: int, name: str, places: Sequence[float], values: Sequence[float]) -> None:
    """Draw a line in the style of its number; one of nothing but NaN is left out."""
    if not all(math.isnan(value) for value in values):
        style = {"color": COLOURS[number % 7], "linestyle": _STYLES[number % 4], "marker": _MARKERS[number % 7]}
        every = max(1, len(values) // 12)
        panel.plot(places, values, markersize=4, markevery=every, label=shown(name), **style)


def shown(name: object) -> str:
    """Return a user's name so that matplotlib shows it as it is: no formula, and no line without a legend."""
    text = str(name).replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text


def _legend(panel: Any, drawn: Any, title: str) -> None:
    panel.axis("off")
    panel.legend(*drawn.get_legend_handles_labels(), title=title, loc="upper left", frameon=False)


def _finish(rows: list[list[Any]], xlabel: str) -> None:
    """Make panels with lines look alike, and hide those that were not needed."""
    for panel in (panel for row in rows for panel in row):
        if not panel.lines:
            panel.axis("off")
            continue
        panel.set(xlabel=xlabel)
        tidy(panel)
        panel.xaxis.get_major_locator().set_params(integer=True)


def tidy(panel: Any) -> None:
    """Make a panel look like the others."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)


def _write_counts(panel: Any, rates: Tensor, counts: Tensor) -> None:
    for (label, predicted), rate in zip(
        torch.cartesian_prod(*map(torch.arange, rates.shape)), rates.flatten(), strict=True
    ):
        colour = "white" if rate > 0.5 else "black"
        text = f"{float(rate):.2f}\n{int(counts[label, predicted])}" if not rate.isnan() else "none"
        panel.text(predicted, label, text, ha="center", va="center", color=colour, fontsize="small")
