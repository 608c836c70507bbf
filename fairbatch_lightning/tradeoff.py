"""`fairbatch tradeoff`: train with several thresholds, and draw accuracy against disparity with the Pareto front.

This is the trade-off of the paper's appendix: gaps up to the threshold are left alone, so that a larger one gives away
less accuracy. An infinite threshold is plain training.
"""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from fairbatch_lightning.csv_logs import find_logs, read_run
from fairbatch_lightning.plots import TradeOffPoint, pareto_front, tradeoff_figure

Train = Callable[[float, int, Path], object]
"""Trains with a threshold and a seed, and writes a CSV log with the counts of FairnessMonitor into a directory."""


def training_command(template: str) -> Train:
    """Return how to train with a command that has {threshold}, {seed} and {log} in it."""
    missing = [name for name in ("{threshold}", "{log}") if name not in template]
    if missing:
        raise ValueError(
            f"Expected the training command to have {' and '.join(missing)} in it, where the threshold and the"
            f" directory for the CSV log belong, but got {template!r}."
        )

    def train(threshold: float, seed: int, log: Path) -> None:
        words = [word.format(threshold=threshold, seed=seed, log=log) for word in shlex.split(template)]
        done = subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:]])  # noqa: S603 - the user's own command
        if done.returncode:
            raise RuntimeError(f"The training command failed with exit code {done.returncode}: {shlex.join(words)}")

    return train


def sweep(train: Train, thresholds: Sequence[float], seeds: int, criterion: str, output: Path) -> list[TradeOffPoint]:
    """Train with every threshold and seed, unless that was done before, and return the mean over seeds of each.

    Args:
        train: Trains once.
        thresholds: The thresholds to try.
        seeds: How many seeds, from 0 on.
        criterion: Whose disparity to look at.
        output: Where logs go; what is there already is not trained again.
    """
    points = []
    for number, threshold in enumerate(thresholds):
        measured = []
        for seed in range(seeds):
            log = output / f"threshold_{threshold:g}" / f"seed_{seed}"
            if not log.exists():
                print(f"{number * seeds + seed + 1}/{len(thresholds) * seeds} threshold {threshold:g}, seed {seed}")
                unfinished = log.with_name(f"{log.name}_unfinished")
                train(threshold, seed, unfinished)
                _measured(unfinished, criterion)  # or it is not finished
                unfinished.rename(log)
            measured.append(_measured(log, criterion))
        points.append(_mean(f"{threshold:g}", measured))
    return points


def write_tradeoff(points: Sequence[TradeOffPoint], criterion: str, output: Path) -> str:
    """Write the curve as picture and table, `tradeoff.png` and `tradeoff.csv`, and return the table as text."""
    front = pareto_front(points)
    name = criterion.replace("_", " ")
    output.mkdir(parents=True, exist_ok=True)
    tradeoff_figure(points, name).savefig(output / "tradeoff.png", dpi=150)
    with (output / "tradeoff.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["threshold", "accuracy", criterion, "pareto"])
        writer.writerows([p.name, p.accuracy, p.disparity, int(p in front)] for p in points)
    lines = [f"{'threshold':<12}{'accuracy':>10}{name:>22}  on the Pareto front"]
    lines += [f"{p.name:<12}{p.accuracy:>10.3f}{p.disparity:>22.3f}  {'yes' if p in front else ''}" for p in points]
    return "\n".join(line.rstrip() for line in lines)


def _measured(log: Path, criterion: str) -> tuple[float, float]:
    """Return accuracy and disparity at the end of a run."""
    (name, path), *others = find_logs([log]).items()
    final = read_run(name, path).final
    if final is None or others:
        raise ValueError(
            f"Expected the training command to leave one CSV log with the counts of FairnessMonitor in {log} but found"
            f" {len(others) + 1} logs{'' if final else ' without them'}. Use Trainer(callbacks=[FairnessMonitor(...),"
            " ...], logger=CSVLogger(log))."
        )
    values = final[1].values()
    return values["accuracy"], values[criterion]


def _mean(name: str, measured: Sequence[tuple[float, float]]) -> TradeOffPoint:
    accuracies, disparities = zip(*measured, strict=True)
    several = len(measured) > 1
    return TradeOffPoint(
        name,
        mean(accuracies),
        mean(disparities),
        accuracy_interval=(min(accuracies), max(accuracies)) if several else None,
        disparity_interval=(min(disparities), max(disparities)) if several else None,
    )
