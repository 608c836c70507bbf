"""How much sooner FairBatch is as fair as AdaFair gets.

    python examples/paper/adafair_speed.py --data DIRECTORY

AdaFair's ensemble has a certain disparity on the training set once it has as many models as it takes. FairBatch, with
the setting that `run.py` has chosen (found in --output), gets there and stays there after some epochs of one model, or
never. Both are counted in epochs, of which FairBatch's take a little longer (see `times.py`). Medians over --seeds.
"""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path
from statistics import median

from data import Problem, problem  # isort: skip - first: it tells where the other examples are
from figures import Watch, low_from
from methods import METHODS
from run import check_epochs
from scores import confusion_of, scores
from synthetic import DISPARITIES, quiet
from tables import PROBLEMS, markdown, short
from tqdm.auto import tqdm


def race(given: Problem, criterion: str, seed: int, setting: dict[str, float]) -> tuple[float, int, float]:
    """Return AdaFair's disparity, its epochs, and the epochs until FairBatch is as fair for good: infinite if never."""
    rival = METHODS["AdaFair"](given, criterion, seed)
    _, disparity = scores(confusion_of(rival.logits, given.train), criterion)
    watch = Watch(given.train, criterion)
    METHODS["FairBatch"](given.watched_by(watch), criterion, seed, **setting)
    epochs = low_from([found for _, found in watch.scores], disparity)
    return disparity, rival.models * given.epochs, inf if epochs is None else epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with the data")
    parser.add_argument("--output", type=Path, default=Path("paper_results"), help="where the results of run.py are")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    quiet()
    rows = [["problem", "criterion", "disparity", "AdaFair's epochs", "FairBatch's epochs", "times as fast"]]
    for name in args.problems:
        for criterion in tqdm(DISPARITIES, name):
            problems = [problem(name, args.data, seed) for seed in range(args.seeds)]
            file = args.output / f"{name}_{criterion}_FairBatch_choice.json"
            kept = json.loads(file.read_text())
            check_epochs(file, kept["epochs"], problems[0].epochs)
            races = [race(given, criterion, seed, kept["chosen"]) for seed, given in enumerate(problems)]
            disparity, rival, own = (median(values) for values in zip(*races, strict=True))
            reached = [f"{own:.0f}", f"{rival / own:.0f}"] if own < inf else ["never", ""]
            rows.append([name, criterion.replace("_", " "), short(disparity), f"{rival:.0f}", *reached])
    print(markdown(rows))


if __name__ == "__main__":
    main()
