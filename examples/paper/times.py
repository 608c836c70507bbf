"""How long the methods take, compared with plain training: the paper's Table 5, as ratios.

    python examples/paper/times.py --data DIRECTORY

Trainings with and without a method take turns in one process, with one thread; what counts is the time that the
process is at work, so that others on the machine disturb little. A ratio is the median over --rounds. Methods that
train one model after the other are not measured: each of their models takes as long as plain training. Writes `time.md`
and `time.csv` into --output.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from data import Problem, problem  # isort: skip - first: it tells where the other examples are
from methods import METHODS, MODELS
from paper_numbers import PAPER_SECONDS
from synthetic import quiet
from tables import PROBLEMS, markdown, write_csv
from tqdm.auto import tqdm


def seconds_per_epoch(method: str, given: Problem, seed: int) -> tuple[float, int]:
    """Return how long the process is at work for an epoch, and how many epochs the method trains for."""
    start = time.process_time()
    trained = METHODS[method](given, "equal_opportunity", seed)
    return (time.process_time() - start) / trained.epochs, trained.epochs


def compared(method: str, given: Problem, rounds: int) -> tuple[float, float]:
    """Return how long a method takes compared with plain training: for an epoch, and in all."""
    if method in MODELS:
        return 1.0, METHODS[method](given, "equal_opportunity", 0).epochs / given.epochs
    ratios = []
    for seed in range(rounds + 1):
        plain, epochs = seconds_per_epoch("LR", given, seed)
        other, more_epochs = seconds_per_epoch(method, given, seed)
        ratios.append(other / plain)
    ratio = median(ratios[1:])  # the first warms up
    return ratio, ratio * more_epochs / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with the data")
    parser.add_argument("--output", type=Path, default=Path("paper_results"), help="directory for the table")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[1:], choices=list(METHODS)[1:])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="of each training; default: as in run.py")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    header = [f"{name}: {what}" for name in args.problems for what in ("an epoch", "all epochs", "paper, all epochs")]
    rows = {method: [method] for method in args.methods}
    for name in args.problems:
        given = problem(name, args.data, 0)
        given = given if args.epochs is None else replace(given, epochs=args.epochs)
        for method in tqdm(args.methods, name):
            ratios = compared(method, given, args.rounds)
            paper = PAPER_SECONDS.get(method)
            place = list(PROBLEMS).index(name)
            published = f"{paper[place] / PAPER_SECONDS['LR'][place]:.2f}" if paper else ""
            rows[method] += [*(f"{ratio:.2f}" for ratio in ratios), published]
    table = [["method", *header], *rows.values()]
    write_csv(args.output / "time.csv", table)
    (args.output / "time.md").write_text(markdown(table) + "\n")
    print(markdown(table))


if __name__ == "__main__":
    main()
