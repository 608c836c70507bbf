"""`fairbatch tradeoff`: train with several tolerances, and draw accuracy against disparity with the Pareto front.

This is the trade-off of the paper's appendix: differences of rates up to the tolerance are left alone, so that a larger
one gives away less accuracy. An infinite tolerance is plain training.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from fairbatch_lightning._support.lightning import say_less
from fairbatch_lightning.cli import demo
from fairbatch_lightning.cli.extras import need
from fairbatch_lightning.fairness.audit import CRITERIA
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.reports.pareto import TradeOffPoint, pareto_front, tradeoff_figure
from fairbatch_lightning.reports.tables import Table, as_text, number_texts

Train = Callable[[float, int, Path], object]
"""Trains with a tolerance and a seed, and writes a CSV log with the counts of FairnessMonitor into a directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "training",
        nargs="?",
        help="your training command with {tolerance}, {seed} and {log} in it, where {log} is a directory for a CSV log"
        " with FairnessMonitor's values; without it, the demo is trained",
    )
    tolerances = [0.0, 0.02, 0.05, 0.1, float("inf")]
    parser.add_argument("--tolerances", type=float, nargs="+", default=tolerances, help="inf is plain training")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to average over")
    parser.add_argument("--criterion", choices=list(CRITERIA), default="equalized_odds", help="whose disparity to draw")
    folder = Path("fairbatch_tradeoff")
    parser.add_argument("--output", type=Path, default=folder, help="directory for logs and curve; runs there are kept")
    demo.add_training_arguments(parser.add_argument_group("the demo's training"))


def run(args: argparse.Namespace) -> None:
    """Train, print the table, and draw the curve."""
    if args.training is not None:
        need("matplotlib")
        train, what = training_command(args.training, args.seeds), args.training
    else:
        need("matplotlib", "torchvision")
        say_less()
        train = partial(_train_demo, args)
        what = f"the demo, {args.criterion}, epochs={args.epochs}, faces={args.faces}"
    points = sweep(train, what, args.tolerances, args.seeds, args.criterion, args.output)
    print("\n" + as_text(write_tradeoff(points, args.criterion, args.output)))
    print(f"\nThe curve: {args.output / 'tradeoff.png'}")


def _train_demo(args: argparse.Namespace, tolerance: float, seed: int, log: Path) -> None:
    fairbatch = demo.the_one_line(args.criterion, tolerance, seed)
    demo.train(log, [fairbatch], args.epochs, args.faces, seed)


def training_command(template: str, seeds: int = 1) -> Train:
    """Return how to train with a command that has {tolerance}, {log} and, for several seeds, {seed} in it."""
    wanted = ["{tolerance}", "{log}", *(["{seed}"] if seeds > 1 else [])]
    missing = [name for name in wanted if name not in template]
    if missing:
        raise ValueError(
            f"Expected the training command to have {' and '.join(missing)} in it, where the tolerance, the directory"
            f" for the CSV log and the seed belong, but got {template!r}."
        )

    try:
        in_template = shlex.split(template)
    except ValueError as error:
        raise ValueError(f"Expected a training command as a shell takes it but got {template!r}: {error}.") from error

    def train(tolerance: float, seed: int, log: Path) -> None:
        values = {"{tolerance}": f"{tolerance:g}", "{seed}": str(seed), "{log}": str(log)}
        words = in_template
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        program = sys.executable if words[0] == "python" else words[0]
        try:
            done = subprocess.run([program, *words[1:]])  # noqa: S603 - the user's own command
        except OSError as error:
            raise ValueError(
                f"The training command could not be started: {error}. It is: {shlex.join(words)}"
            ) from error
        if done.returncode:
            raise RuntimeError(
                f"The training command failed with exit code {done.returncode}, see above: {shlex.join(words)}"
            )

    return train


def sweep(
    train: Train, what: str, tolerances: Sequence[float], seeds: int, criterion: str, output: Path
) -> list[TradeOffPoint]:
    """Train with every tolerance and seed, unless that was done before, and return the mean over seeds of each.

    Args:
        train: Trains once.
        what: What is trained, to tell it from anything else.
        tolerances: The tolerances to try.
        seeds: How many seeds, from 0 on.
        criterion: Whose disparity to look at.
        output: Where logs go; what is there already is not trained again.
    """
    if seeds < 1:
        raise ValueError(f"Expected at least one seed but got {seeds}.")
    _check_same(what, output / "training.txt")
    points = []
    for number, tolerance in enumerate(tolerances):
        measured = []
        for seed in range(seeds):
            log = output / f"tolerance_{tolerance:g}" / f"seed_{seed}"
            if not log.exists():
                print(f"{number * seeds + seed + 1}/{len(tolerances) * seeds} tolerance {tolerance:g}, seed {seed}")
                unfinished = log.with_name(f"{log.name}_unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                train(tolerance, seed, unfinished)
                _measured(unfinished, criterion)  # or it is not finished
                unfinished.rename(log)
            measured.append(_measured(log, criterion))
        points.append(_mean(f"{tolerance:g}", measured))
    return points


def write_tradeoff(points: Sequence[TradeOffPoint], criterion: str, output: Path) -> Table:
    """Write the curve as picture and table, `tradeoff.png` and `tradeoff.csv`, and return the table for people."""
    front = pareto_front(points)
    name = criterion.replace("_", " ")
    output.mkdir(parents=True, exist_ok=True)
    tradeoff_figure(points, name).savefig(output / "tradeoff.png", dpi=150)
    with (output / "tradeoff.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tolerance", "accuracy", criterion, "pareto"])
        writer.writerows([p.name, p.accuracy, p.disparity, int(p in front)] for p in points)
    rows = [
        [p.name, number_texts(p.accuracy)[0], number_texts(p.disparity)[0], "yes" if p in front else ""] for p in points
    ]
    return Table("", ["tolerance", "accuracy", name, "on the Pareto front"], rows)


def _check_same(what: str, path: Path) -> None:
    """Refuse to mix runs of different trainings."""
    if path.exists() and path.read_text() != what:
        raise ValueError(
            f"Expected {path.parent} to hold runs of the same training but it has those of {path.read_text()!r}, not of"
            f" {what!r}. Choose another --output, or delete it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(what)


def _measured(log: Path, criterion: str) -> tuple[float, float]:
    """Return accuracy and disparity at the end of a run."""
    audits = [audit for name, path in find_logs([log]).items() for audit in read_run(name, path).finals().values()]
    if len(audits) != 1:
        raise ValueError(
            f"Expected the training command to leave one CSV log in {log} with the counts of FairnessMonitor on one"
            f" test or validation set but found {len(audits)}. Use Trainer(callbacks=[FairnessMonitor(...), ...],"
            " logger=CSVLogger(log))."
        )
    values = audits[0].values()
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
