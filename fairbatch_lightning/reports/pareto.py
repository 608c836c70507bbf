"""Accuracy against fairness: how training runs came out, and which of them no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairbatch_lightning.reports.figures import COLOURS, shown, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    >>> ", ".join(point.name for point in pareto_front(points))
    'b, a'
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
        color=COLOURS[0],
        elinewidth=0.6,
    )
    for point in known:
        panel.annotate(
            shown(point.name), (point.disparity, point.accuracy), (5, 4), textcoords="offset points", fontsize="small"
        )
    panel.set(xlabel=f"{criterion} disparity (left is fairer)", ylabel="accuracy (up is better)", xlim=(0, None))
    panel.legend(frameon=False, fontsize="small")
    tidy(panel)
    return figure


def _errors(values: Sequence[float], intervals: Sequence[tuple[float, float] | None]) -> list[list[float]] | None:
    """Return how far intervals reach below and above values, as matplotlib wants it; None if there are none."""
    if not any(intervals):
        return None
    known = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, known, strict=True)]
    return [below, [max(0.0, high - value) for value, (_, high) in zip(values, known, strict=True)]]
