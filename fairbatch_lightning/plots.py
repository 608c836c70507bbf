"""Pictures, from plain numbers and names. Needs matplotlib, which is imported only here.

Lines differ in colour (Okabe and Ito's, which the colour-blind can tell apart), in style and in marker, and confusion
matrices in lightness, so that all of them can be read in greyscale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MANY_LABELS = 12
"""Of more labels than this a picture shows those with the largest gaps, and matrices no numbers."""


@dataclass(frozen=True)
class SharesOverTime:
    """What FairBatch did in T updates.

    Args:
        label_names: The labels, Y of them.
        group_names: The groups, Z of them.
        shares: At the start and after every update, `(T + 1, Y, Z)`; NaN where they are not known.
        losses: The cells' losses that the updates saw, `(T, Y, Z)`.
        gaps: How unequal the labels' groups were, `(T, Y)`; NaN for labels that were not compared.
    """

    label_names: Sequence[str]
    group_names: Sequence[str]
    shares: Tensor
    losses: Tensor
    gaps: Tensor


def shares_figure(over_time: SharesOverTime) -> Figure:
    """Draw the share and loss of every cell and the gap of every label over the updates."""
    groups = over_time.group_names
    largest = over_time.gaps.nan_to_num(0).amax(0).argsort(descending=True, stable=True)[:MANY_LABELS]
    labels = {label: over_time.label_names[label] for label in sorted(largest.tolist())}
    figure, rows = _panels(len(labels), bands=3)
    for place, (label, name) in enumerate(labels.items()):
        panel = rows[0][place]
        _draw_lines(panel, _named(groups, over_time.shares[:, label]), first=0)
        panel.set(title=_plain(f"shares of label {name}"), ylabel="part of the label's draws", ylim=(0, None))
        panel = rows[1][place]
        _draw_lines(panel, _named(groups, over_time.losses[:, label]), first=1)
        panel.set(title=_plain(f"losses of label {name}"), ylabel="mean loss", ylim=(0, None))
    gaps, legend = rows[2][0], rows[2][1]
    names = [f"label {name}" for name in labels.values()]
    _draw_lines(gaps, _named(names, over_time.gaps[:, list(labels)]), first=1)
    some = f", {len(labels)} of {len(over_time.label_names)} labels" if len(labels) < len(over_time.label_names) else ""
    gaps.set(title=f"gap between groups{some}", ylabel="difference of loss", ylim=(0, None))
    gaps.legend(frameon=False)
    _legend(legend, rows[0][0], "group")
    _finish(rows, xlabel="update")
    return figure


def times_of(epochs: Sequence[float], steps: Sequence[float]) -> tuple[list[float], str]:
    """Return when things happened, and in which unit: in steps if there are several in an epoch."""
    return (list(steps), "step") if len(set(epochs)) < len(epochs) else (list(epochs), "epoch")


def fairness_figure(
    times: Sequence[float],
    values: Mapping[str, Sequence[float]],
    by_group: Mapping[str, Sequence[float]],
    xlabel: str = "epoch",
) -> Figure:
    """Draw accuracies and disparities over time.

    Args:
        times: When they were measured.
        values: Accuracies and disparities by name; those named "...accuracy" go to one panel, the others to another.
        by_group: The accuracy of every group, by the group's name.
        xlabel: What the times are.
    """
    figure, rows = _panels(3, bands=1)
    named = {name.replace("_", " "): line for name, line in values.items()}
    accuracies = {name: line for name, line in named.items() if name.endswith("accuracy")}
    for panel, title, lines in (
        (rows[0][0], "accuracy", accuracies),
        (rows[0][1], "disparity (0 is fair)", {name: line for name, line in named.items() if name not in accuracies}),
        (rows[0][2], "accuracy by group", by_group),
    ):
        _draw_lines(panel, lines, places=times)
        panel.set(title=title)
        panel.legend(frameon=False, fontsize="small")
    rows[0][1].set(ylim=(0, None))
    _finish(rows, xlabel=xlabel)
    return figure


def runs_figure(
    runs: Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]], names: Sequence[str], xlabel: str
) -> Figure:
    """Draw what several runs measured over time, one panel for each of the `names`.

    Args:
        runs: When it was measured, and the values by name, of every run.
        names: Which values to draw.
        xlabel: What the times are.
    """
    figure, rows = _panels(len(names), bands=1)
    for panel, name in zip(rows[0], names, strict=False):
        for number, (run, (times, values)) in enumerate(runs.items()):
            _draw_line(panel, number, run, times, values[name])
        panel.set(title=name.replace("_", " "))
        panel.legend(frameon=False, fontsize="small")
    _finish(rows, xlabel=xlabel)
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
    labels = list(map(_plain, range(confusion.shape[1]) if label_names is None else label_names))
    groups = list(map(_plain, range(len(confusion)) if group_names is None else group_names))
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


@dataclass(frozen=True)
class TradeOffPoint:
    """How one training run came out.

    Args:
        name: What to write next to it.
        accuracy: Higher is better.
        disparity: Lower is fairer.
        disparity_interval: The ends of its confidence interval, if known.
        accuracy_interval: The ends of its confidence interval, if known.
    """

    name: str
    accuracy: float
    disparity: float
    disparity_interval: tuple[float, float] | None = None
    accuracy_interval: tuple[float, float] | None = None


def pareto_front(points: Sequence[TradeOffPoint]) -> list[TradeOffPoint]:
    """Return the points that no other beats in both accuracy and disparity, by rising disparity.

    >>> points = [TradeOffPoint("a", 0.9, 0.2), TradeOffPoint("b", 0.8, 0.1), TradeOffPoint("c", 0.7, 0.15)]
    >>> [point.name for point in pareto_front(points)]
    ['b', 'a']
    """
    front: list[TradeOffPoint] = []
    known = [point for point in points if math.isfinite(point.accuracy) and math.isfinite(point.disparity)]
    for point in sorted(known, key=lambda point: (point.disparity, -point.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def tradeoff_figure(points: Sequence[TradeOffPoint], criterion: str) -> Figure:
    """Draw accuracy against disparity, with a line along the Pareto front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    panel = figure.subplots()
    known = [point for point in points if math.isfinite(point.accuracy) and math.isfinite(point.disparity)]
    front = pareto_front(known)
    panel.plot(
        [p.disparity for p in front], [p.accuracy for p in front], "-", color="0.6", zorder=0, label="Pareto front"
    )
    panel.errorbar(
        [p.disparity for p in known],
        [p.accuracy for p in known],
        xerr=_errors([p.disparity for p in known], [p.disparity_interval for p in known]),
        yerr=_errors([p.accuracy for p in known], [p.accuracy_interval for p in known]),
        linestyle="none",
        marker="o",
        color=_COLOURS[0],
        elinewidth=0.6,
    )
    for point in known:
        panel.annotate(
            _plain(point.name), (point.disparity, point.accuracy), (5, 4), textcoords="offset points", fontsize="small"
        )
    panel.set(xlabel=f"{criterion} disparity (left is fairer)", ylabel="accuracy (up is better)", xlim=(0, None))
    panel.legend(frameon=False, fontsize="small")
    _tidy(panel)
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
        style = {"color": _COLOURS[number % 7], "linestyle": _STYLES[number % 4], "marker": _MARKERS[number % 7]}
        every = max(1, len(values) // 12)
        panel.plot(places, values, markersize=4, markevery=every, label=_plain(name), **style)


def _plain(name: object) -> str:
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
        _tidy(panel)
        panel.xaxis.get_major_locator().set_params(integer=True)


def _tidy(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)


def _write_counts(panel: Any, rates: Tensor, counts: Tensor) -> None:
    for (label, predicted), rate in zip(
        torch.cartesian_prod(*map(torch.arange, rates.shape)), rates.flatten(), strict=True
    ):
        colour = "white" if rate > 0.5 else "black"
        text = f"{float(rate):.2f}\n{int(counts[label, predicted])}" if not rate.isnan() else "none"
        panel.text(predicted, label, text, ha="center", va="center", color=colour, fontsize="small")


def _errors(values: Sequence[float], intervals: Sequence[tuple[float, float] | None]) -> list[list[float]] | None:
    """Return how far intervals reach below and above values, as matplotlib wants it; None if there are none."""
    if not any(intervals):
        return None
    known = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, known, strict=True)]
    return [below, [max(0.0, high - value) for value, (_, high) in zip(values, known, strict=True)]]
