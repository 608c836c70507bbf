"""How much accuracy fairness costs at least: the best thresholds for each group (after Hardt et al., 2016).

    python examples/paper/best_thresholds.py --data DIRECTORY

A reference for the tables of `run.py`, on the same splits of COMPAS and Adult. Plain logistic regression is solved
exactly. Then, of all pairs of thresholds, one for each group (up to 400 of each), whose disparity on the training set
is at most --disparity, the most accurate is taken. A method that leaves the order of people within a group as plain
training has it, and draws no lots, can hardly be more accurate at this disparity, on the training set.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch

from data import problem  # isort: skip - first: it tells where the other examples are
from methods import solved
from scores import confusion, scores
from synthetic import DISPARITIES
from tables import PROBLEMS, interval, markdown, short
from torch import Tensor
from tqdm.auto import tqdm

MOST = 400
"""How many thresholds of a group are tried at most: between any two scores, or at evenly spread quantiles of them."""


def counts_above(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return thresholds, and for each the counts of labels and predictions of one group, `(T, Y, Yhat)`."""
    scores = logits.sort().values
    scores = torch.cat([scores[:1] - 1, scores, scores[-1:] + 1])
    apart = scores.diff() > 1e-9  # the same person twice may have scores that differ in the last bit
    thresholds = ((scores[1:] + scores[:-1]) / 2)[apart]
    if len(thresholds) > MOST:
        thresholds = thresholds[torch.linspace(0, len(thresholds) - 1, MOST).long()]
    above = logits > thresholds.unsqueeze(1)
    positive = torch.stack([(above & (y == label)).sum(1) for label in (0, 1)], 1)
    return thresholds, torch.stack([torch.bincount(y, minlength=2) - positive, positive], 2)


def best_thresholds(logits: Tensor, y: Tensor, z: Tensor, criterion: str, most: float) -> Tensor:
    """Return the most accurate thresholds of the groups 0 and 1 among those that are fair enough, `(2,)`."""
    (first, counts), (second, other) = (counts_above(logits[z == group], y[z == group]) for group in (0, 1))
    pairs = torch.stack(torch.broadcast_tensors(counts.unsqueeze(1), other.unsqueeze(0)), 2)  # (T, T, Z, Y, Yhat)
    right = pairs.diagonal(dim1=3, dim2=4).sum((2, 3))
    place = int(torch.where(DISPARITIES[criterion](pairs) <= most, right, -1).argmax())
    return torch.stack([first[place // len(second)], second[place % len(second)]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory with the data")
    parser.add_argument("--problems", nargs="+", default=["compas", "adult"], choices=["synthetic", "compas", "adult"])
    parser.add_argument("--seeds", type=int, default=10, help="how many splits")
    parser.add_argument("--disparity", type=float, default=0.02, help="what is fair enough, on the training set")
    args = parser.parse_args()
    rows = [["problem", "criterion", "plain", "best thresholds", "change of accuracy", "on the training set"]]
    for name in args.problems:
        found: dict[str, list[tuple[float, ...]]] = {criterion: [] for criterion in DISPARITIES}
        for seed in tqdm(range(args.seeds), name):
            given = problem(name, args.data, seed)
            x, y, z = given.train.tensors
            logits = solved(x, y, torch.ones(len(y)))
            for criterion in DISPARITIES:
                line: tuple[float, ...] = ()
                chosen = best_thresholds(logits(x), y, z, criterion, args.disparity)
                for part in (given.test, given.train):
                    samples, _, groups = part.tensors
                    for thresholds in (torch.zeros(2), chosen):
                        line += scores(confusion(logits(samples) - thresholds[groups], part), criterion)
                found[criterion].append(line)
        for criterion, lines in found.items():
            means = [fmean(values) for values in zip(*lines, strict=True)]
            plain, fair = (f"{short(means[place])} / {short(means[place + 1])}" for place in (0, 2))
            changes = [[line[place + 2] - line[place] for line in lines] for place in (0, 4)]
            on_test, on_train = (interval(values, PROBLEMS[name]) for values in changes)
            rows.append([name, criterion.replace("_", " "), plain, fair, on_test, on_train])
    print(markdown(rows))


if __name__ == "__main__":
    main()
