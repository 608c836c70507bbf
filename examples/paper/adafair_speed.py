"""How much sooner FairBatch is as fair as AdaFair gets.

    python examples/paper/adafair_speed.py --data DIRECTORY

AdaFair's ensemble has a certain disparity on the training set once it has as many models as it keeps; to find out how
many to keep it trains more. FairBatch, with the setting that `run.py` has chosen (found in --output), gets there and
stays there after some epochs of one model, or never. All are counted in epochs, of which FairBatch's take a little
longer (see `times.py`). Medians over --seeds.
"""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from data import Problem, problem  # isort: skip - first: it tells where the other examples are
from figures import Watch, low_from
from methods import METHODS
from run import check_epochs
from scores import confusion_of, scores
from synthetic import DISPARITIES, quiet
from tables import PROBLEMS, markdown, short
from tqdm.auto import tqdm


class Race(NamedTuple):
    """AdaFair's disparity, its epochs, and those until FairBatch is as fair for good: infinite if it never is."""

    disparity: float
    kept: int
    trained: int
    own: float


def race(given: Problem, criterion: str, seed: int, setting: dict[str, float]) -> Race:
    """Let both methods train."""
    rival = METHODS["AdaFair"](given, criterion, seed)
    _, disparity = scores(confusion_of(rival.logits, given.train), criterion)
    watch = Watch(given.train, criterion)
    METHODS["FairBatch"](given.watched_by(watch), criterion, seed, **setting)
    epochs = low_from([found for _, found in watch.scores], disparity)
    return Race(disparity, rival.models * given.epochs, rival.epochs, inf if epochs is None else epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with the data")
    parser.add_argument("--output", type=Path, default=Path("paper_results"), help="where the results of run.py are")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    quiet()
    rivals = ["AdaFair, models kept", "AdaFair, all models"]
    rows = [["problem", "criterion", "disparity", *rivals, "FairBatch", "times as fast: kept", "all"]]
    for name in args.problems:
        for criterion in tqdm(DISPARITIES, name):
            problems = [problem(name, args.data, seed) for seed in range(args.seeds)]
            file = args.output / f"{name}_{criterion}_FairBatch_choice.json"
            choice = json.loads(file.read_text())
            check_epochs(file, choice["epochs"], problems[0].epochs)
            races = [race(given, criterion, seed, choice["chosen"]) for seed, given in enumerate(problems)]
            disparity, kept, trained, own = (median(values) for values in zip(*races, strict=True))
            faster = [f"{rival / own:.0f}" if own < inf else "" for rival in (kept, trained)]
            epochs = [f"{number:.0f}" if number < inf else "never" for number in (kept, trained, own)]
            rows.append([name, criterion.replace("_", " "), short(disparity), *epochs, *faster])
    print(markdown(rows))


if __name__ == "__main__":
    main()
