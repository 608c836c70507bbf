"""Run the paper's comparison of methods on synthetic data, COMPAS and Adult, and write its tables.

    python examples/paper/run.py --data DIRECTORY

`data.py` says which files the directory holds. Settings of methods are chosen by cross-validation on the training set
of the first seed, for all seeds, and recorded: of those about as fair as the fairest, the most accurate. (Of COMPAS and
Adult, other seeds' test sets share samples with it.)

Every run leaves a file in --output, and is not repeated when the script is started again; several processes can share
out the work by --problems, --criteria and --methods. At the end it writes, of all that is there, `tables.md` and one
CSV file per table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from data import Problem, problem  # isort: skip - first: it tells where the other examples are
from cross_validation import choose, folds
from methods import CANDIDATES, METHODS
from scores import confusion_of, scores
from synthetic import DISPARITIES, quiet
from tables import write_tables
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

SAME_FOR_ALL = ("LR", "RW", "GroupDRO")
"""Methods that train the same model whatever the criterion is."""


class Run(NamedTuple):
    """One model."""

    problem: str
    criterion: str
    method: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{'_'.join(map(str, self))}.json"


def wanted(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs that were asked for, seeds last, so that tables fill up evenly."""
    for seed in range(args.seeds):
        for name in args.problems:
            for method in args.methods:
                for criterion in args.criteria if method not in SAME_FOR_ALL else ["any"]:
                    if method != "FairDRO" or criterion == "equalized_odds":
                        yield Run(name, criterion, method, seed)


def chosen_setting(args: argparse.Namespace, run: Run, given: Problem) -> dict[str, Any]:
    """Return the setting for a method, by cross-validation on a training set; its results are kept in a file."""
    candidates = CANDIDATES.get(run.method, [{}])
    if len(candidates) == 1:
        return candidates[0]
    file = args.output / f"{'_'.join(run[:3])}_choice.json"
    if not file.exists():
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(candidates))}
        commonest = []
        for rest, part in folds(len(given.train), args.folds):
            inner, held_out = (TensorDataset(*given.train[samples]) for samples in (rest, part))
            commonest.append(float(held_out.tensors[1].bincount().max() / len(part)))
            for number, setting in enumerate(candidates):
                trained = METHODS[run.method](replace(given, train=inner), run.criterion, 0, **setting)
                found[number].append(scores(confusion_of(trained.logits, held_out), run.criterion))
        chosen = candidates[choose(worth_having(found, commonest))]
        save(file, {"candidates": candidates, "folds": list(found.values()), "chosen": chosen, "epochs": given.epochs})
    kept = json.loads(file.read_text())
    check_epochs(file, kept["epochs"], given.epochs)
    if kept["candidates"] != candidates:
        raise SystemExit(f"{file} is of other candidates, {kept['candidates']}. Remove it, or choose another --output.")
    return kept["chosen"]


def worth_having(found: dict[int, list[tuple[float, float]]], commonest: list[float]) -> dict:
    """Leave out settings that are fair because they hardly tell the labels apart.

    Args:
        found: Accuracy and disparity of every setting, for every fold.
        commonest: How accurate it would be, in every fold, to predict always the same label.
    """
    told_apart = {
        setting: scores
        for setting, scores in found.items()
        if all(accuracy > rate for (accuracy, _), rate in zip(scores, commonest, strict=True))
    }
    return told_apart or found


def check_epochs(file: Path, found: int, wanted: int) -> None:
    """Refuse to mix results of trainings of different lengths."""
    if found != wanted:
        raise SystemExit(f"{file} is of models of {found} epochs, not {wanted}. Choose another --output.")


def save(file: Path, content: Any) -> None:
    """Write a file all at once: a run that is stopped leaves none."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content))
    os.replace(part, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with the data")
    parser.add_argument("--download", action="store_true", help="download what is missing there of COMPAS and Adult")
    parser.add_argument("--output", type=Path, default=Path("paper_results"), help="directory for results")
    problems = ["synthetic", "compas", "adult"]
    parser.add_argument("--problems", nargs="+", default=problems, choices=problems)
    parser.add_argument("--criteria", nargs="+", default=list(DISPARITIES), choices=list(DISPARITIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--folds", type=int, default=3, help="of the cross-validation")
    parser.add_argument("--epochs", type=int, help="of every model; default: 450, 300 and 200")
    args = parser.parse_args()
    quiet()
    args.output.mkdir(parents=True, exist_ok=True)

    @cache
    def load(name: str, seed: int) -> Problem:
        loaded = problem(name, args.data, seed, download=args.download)
        return loaded if args.epochs is None else replace(loaded, epochs=args.epochs)

    progress = tqdm(list(wanted(args)))
    for run in progress:
        progress.set_description(" ".join(map(str, run)))
        file, given = run.file(args.output), load(run.problem, run.seed)
        if file.exists():
            check_epochs(file, json.loads(file.read_text())["epochs_of_a_model"], given.epochs)
        else:
            setting = chosen_setting(args, run, load(run.problem, 0))
            trained = METHODS[run.method](given, run.criterion, run.seed, **setting)
            result = {"setting": setting, "confusion": confusion_of(trained.logits, given.test).tolist()}
            result |= {"seed": run.seed, "epochs_of_a_model": given.epochs, "epochs": trained.epochs}
            result["models"] = trained.models
            save(file, {**result, "weights": [] if run.seed else trained.weights})
    print(write_tables(args.output))


if __name__ == "__main__":
    main()
