"""The bare line on the paper's problems, against the paper's rule with the best step for each of them.

    python examples/paper/out_of_the_box.py --data DIRECTORY

Nothing is set but criterion and groups, whether a training is as long as the paper's, a tenth of that (with ten times
the learning rate) or three times as long. The paper's rule has the step that cross-validation chose for each data set
and criterion (docs/paper.md). "population" are fresh draws from the paper's synthetic distribution, with 40,000 test
samples.

Every run leaves a file in --output and is not repeated; several processes can share out the work by --problems.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from data import Problem, problem
from methods import METHODS
from scores import confusion_of, scores
from synthetic import DISPARITIES, generate, quiet

from fairbatch_lightning import FairBatchWarning

BEST_STEP = {
    ("population", "equal_opportunity"): 0.005,
    ("population", "equalized_odds"): 0.005,
    ("population", "demographic_parity"): 0.005,
    ("compas", "equal_opportunity"): 0.001,
    ("compas", "equalized_odds"): 0.02,
    ("compas", "demographic_parity"): 0.0005,
    ("adult", "equal_opportunity"): 0.0005,
    ("adult", "equalized_odds"): 0.0005,
    ("adult", "demographic_parity"): 0.05,
}
METHODS_COMPARED = {"plain": "LR", "paper": "FairBatch", "bare line": "FairBatch, adaptive"}


def problem_of(name: str, data: Path, seed: int, length: float, epochs: int | None = None) -> Problem:
    """Return a data set, to be trained for as many times the paper's epochs; in fewer with a larger rate."""
    if name == "population":
        train, test = generate(2000, seed=1000 + seed), generate(40_000, seed=777)
        found = Problem(name, train, test, batch_size=100, lr=0.0005, epochs=450)
    else:
        found = problem(name, data, seed)
    return replace(found, epochs=max(1, round((epochs or found.epochs) * length)), lr=found.lr / min(1.0, length))


def run(args: argparse.Namespace, name: str, criterion: str, method: str, length: float, seed: int) -> list[float]:
    """Train, unless that was done before; return accuracy and disparity on the test set."""
    of = "any" if method == "plain" else criterion
    file = args.output / f"{name}-{of}-{method.replace(' ', '_')}-{length:g}-{seed}.json"
    if not file.exists():
        settings: dict[str, Any] = {"alpha": BEST_STEP[name, criterion]} if method == "paper" else {}
        given = problem_of(name, args.data, seed, length, args.epochs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FairBatchWarning)  # that no shares are fair: that is what the table tells
            trained = METHODS[METHODS_COMPARED[method]](given, criterion, seed, **settings)
        counts = confusion_of(trained.logits, given.test)
        file.write_text(json.dumps({each: scores(counts, each) for each in DISPARITIES}))
    return list(json.loads(file.read_text())[criterion])


def table(args: argparse.Namespace) -> list[str]:
    """Train all, and return the lines of a table in Markdown: mean accuracy / disparity over the seeds."""
    columns = [
        (method, length) for length in args.lengths for method in METHODS_COMPARED if (method, length) not in args.skip
    ]
    header = [f"{method}, x{length:g}" for method, length in columns]
    lines = [f"| data | criterion | {' | '.join(header)} |", "|---" * (2 + len(columns)) + "|"]
    for name, criterion in itertools.product(args.problems, args.criteria):
        cells = []
        for method, length in columns:
            found = [run(args, name, criterion, method, length, seed) for seed in args.seeds]
            means = [fmean(values) for values in zip(*found, strict=True)]
            cells.append(" / ".join(f"{mean:.3f}".replace("0.", ".") for mean in means))
        lines.append(f"| {name} | {criterion.replace('_', ' ')} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory with the data")
    parser.add_argument("--output", type=Path, default=Path("out_of_the_box"), help="directory for results")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(15, 25)))
    names = ["population", "compas", "adult"]
    parser.add_argument("--problems", nargs="+", default=names, choices=names)
    parser.add_argument("--criteria", nargs="+", default=list(DISPARITIES), choices=list(DISPARITIES))
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 0.1, 3.0])
    parser.add_argument("--epochs", type=int, help="instead of the paper's")
    args = parser.parse_args()
    args.skip = {("paper", length) for length in args.lengths if length != 1.0}  # its step is for one length
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    quiet()
    print("\n".join(["", *table(args)]))


if __name__ == "__main__":
    main()
