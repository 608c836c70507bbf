"""The paper's tables, from the files that `run.py` leaves: ours, with the paper's numbers beside them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import data  # noqa: F401  # isort: skip - first: it tells where the other examples are
from methods import METHODS
from paper_numbers import PAPER
from scores import scores
from synthetic import DISPARITIES, T_975
from torch import Tensor

PROBLEMS = {"synthetic": 0.0, "compas": 0.25, "adult": 0.25}
"""And the size of the test sets compared with the training sets, where seeds split the same samples anew."""
Results = dict[tuple[str, str, str], list[dict[str, Any]]]


def read(folder: Path) -> Results:
    """Return the results of all seeds by problem, criterion and method; "any" stands for all criteria."""
    results: Results = {}
    for file in sorted(folder.glob("*_*_*_[0-9]*.json")):
        name, rest = file.stem.split("_", 1)
        if name in PROBLEMS:
            criterion, method, _ = rest.rsplit("_", 2)
            result = json.loads(file.read_text())
            for one in DISPARITIES if criterion == "any" else [criterion]:
                results.setdefault((name, one, method), []).append(result)
    return results


def short(value: float, sign: str = "") -> str:
    """Return a number in the paper's way, without the leading zero.

    >>> short(0.0123), short(0.5, "+"), short(1.25)
    ('.012', '+.500', '1.250')
    """
    return f"{value:{sign}.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:{sign}.3f}"


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    return short(fmean(values)) + (f" ± {short(stdev(values))}" if len(values) > 1 else "")


def interval(differences: Sequence[float], shared: float = 0.0) -> str:
    """Return the mean and half the width of its 95% confidence interval, for up to ten differences.

    Args:
        differences: Of two methods, on several splits.
        shared: The size of test sets compared with training sets, if all are drawn from the same samples: such splits
            are not independent, and the interval is wider (Nadeau and Bengio, 2003).
    """
    number = len(differences)
    if not 1 < number <= len(T_975):
        return short(fmean(differences), "+")
    half = T_975[number - 1] * stdev(differences) * (1 / number + shared) ** 0.5
    return f"{short(fmean(differences), '+')} ± {short(half)}"


def scores_of(result: dict[str, Any], criterion: str) -> tuple[float, float]:
    """Return accuracy and disparity on the test set."""
    return scores(torch.tensor(result["confusion"]), criterion)


def comparison(results: Results, criterion: str) -> list[list[str]]:
    """Return a table: methods, and for each problem accuracy, disparity, epochs and seeds, and the paper's."""
    present = [name for name in PROBLEMS if any(key[:2] == (name, criterion) for key in results)]
    header = ["method"]
    for name in present:
        header += [f"{name}: {what}" for what in ("accuracy", "disparity", "epochs", "seeds", "paper")]
    rows = [header]
    for method in METHODS:
        row = [method]
        for name in present:
            row += cells(results.get((name, criterion, method), []), criterion)
            row.append(PAPER[criterion].get(method, ("",) * 3)[list(PROBLEMS).index(name)])
        if any(row[1:]):
            rows.append(row)
    return rows


def cells(found: list[dict[str, Any]], criterion: str) -> list[str]:
    """Return accuracy, disparity, epochs and the number of seeds."""
    if not found:
        return [""] * 4
    accuracies, disparities = zip(*(scores_of(result, criterion) for result in found), strict=True)
    epochs = fmean(result["epochs"] for result in found)
    return [spread(accuracies), spread(disparities), f"{epochs:.0f}", str(len(found))]


def merged(rows: list[list[str]]) -> list[list[str]]:
    """Return a table of `comparison` with a single column for each problem, as in the paper."""
    header, *rest = rows
    places = range(1, len(header), 5)
    most = max((row[place + 3] for row in rest for place in places), key=lambda seeds: int(seeds or 0))
    merged = [["method", *(text for place in places for text in (header[place].split(":")[0], "paper"))]]
    for row in rest:
        line = [row[0]]
        for place in places:
            few = f" (seeds: {row[place + 3]})" if row[place + 3] not in ("", most) else ""
            line += [" / ".join(filter(None, row[place : place + 3])) + few, row[place + 4]]
        merged.append(line)
    return merged


def noise(confusion: Tensor, criterion: str, draws: int = 500) -> Tensor:
    """Return disparities that a perfectly fair model would show on other test sets of this size, `(draws,)`.

    It predicts as many positives as the given one, but alike for all groups: among the samples of a label, or, for
    "demographic_parity", among all.

    Args:
        confusion: The counts of predictions, `(Z, Y, Yhat)`.
        criterion: Which disparity.
        draws: How many test sets to draw.
    """
    counts = confusion.double()
    if criterion == "demographic_parity":  # for which labels are of no importance
        totals = counts.sum(1)
        counts = torch.stack([totals, torch.zeros_like(totals)], 1)
    sizes = counts.sum(2)
    rates = (counts.sum(0)[:, 1] / counts.sum((0, 2)).clamp(min=1)).expand_as(sizes)
    random = torch.Generator().manual_seed(0)
    positive = torch.binomial(sizes.expand(draws, -1, -1), rates.expand(draws, -1, -1), generator=random)
    return DISPARITIES[criterion](torch.stack([sizes - positive, positive], 3))


def beyond_noise(results: list[dict[str, Any]], criterion: str) -> float:
    """Return the root mean square disparity, with the part that the finite test sets add taken off."""
    seen = fmean(scores_of(result, criterion)[1] ** 2 for result in results)
    by_chance = fmean(float(noise(torch.tensor(one["confusion"]), criterion).square().mean()) for one in results)
    return max(0.0, seen - by_chance) ** 0.5


def removed(before: float, after: float) -> str:
    """Return how much of a disparity is gone, in percent; nothing where there was none."""
    return f"{1 - after / before:.0%}" if before > 0 else ""


def changes(results: Results, criterion: str) -> list[list[str]]:
    """Return what the methods change, compared with plain training of the same seeds, and what they do in the paper.

    That is the part of the mean disparity that is removed; of the disparity without the noise of the test sets; and the
    difference in accuracy with its 95% confidence interval.
    """
    rows = [["problem", "method", "removed", "beyond noise", "accuracy", "paper: removed", "paper: accuracy"]]
    for name, shared in PROBLEMS.items():
        plain = {result["seed"]: result for result in results.get((name, criterion, "LR"), [])}
        for method in list(METHODS)[1:]:
            found = [result for result in results.get((name, criterion, method), []) if result["seed"] in plain]
            if not found:
                continue
            old = [plain[result["seed"]] for result in found]
            means = [fmean(scores_of(one, criterion)[1] for one in each) for each in (old, found)]
            without = [beyond_noise(each, criterion) for each in (old, found)]
            pairs = zip(old, found, strict=True)
            differences = [scores_of(new, criterion)[0] - scores_of(one, criterion)[0] for one, new in pairs]
            paper = paper_change(criterion, method, list(PROBLEMS).index(name))
            rows.append([name, method, removed(*means), removed(*without), interval(differences, shared), *paper])
    return rows


def merged_changes(rows: list[list[str]]) -> list[list[str]]:
    """Return a table of `changes` with a row for each method: removed (beyond noise) / change of accuracy."""
    found = {(name, method): values for name, method, *values in rows[1:]}
    names = [name for name in PROBLEMS if any(key[0] == name for key in found)]
    merged = [["method", *(text for name in names for text in (name, "paper"))]]
    for method in dict.fromkeys(key[1] for key in found):
        line = [method]
        for name in names:
            gone, beyond, change, *paper = found.get((name, method), [""] * 5)
            line += [f"{gone} ({beyond}) / {change}" if gone else "", " / ".join(filter(None, paper))]
        merged.append(line)
    return merged


def paper_change(criterion: str, method: str, place: int) -> tuple[str, str]:
    """Return the part of the disparity that a method removes in the paper, and its change of accuracy."""
    numbers = PAPER[criterion].get(method)
    if numbers is None:
        return "", ""
    (new, disparity), (old, old_disparity) = (
        map(float, line[place].split(" / ")[:2]) for line in (numbers, PAPER[criterion]["LR"])
    )
    return removed(old_disparity, disparity), short(new - old, "+")


Choices = dict[tuple[str, str, str], dict[str, Any]]


def read_choices(folder: Path) -> Choices:
    """Return what cross-validation found, by problem, criterion and method."""
    choices: Choices = {}
    for name in PROBLEMS:
        for criterion in PAPER:
            for method in METHODS:
                file = folder / f"{name}_{criterion}_{method}_choice.json"
                if file.exists():
                    choices[name, criterion, method] = json.loads(file.read_text())
    return choices


def setting_name(setting: dict[str, float]) -> str:
    """Return a setting as text.

    >>> setting_name({"alpha": 0.005, "pull": 3.0})
    'alpha 0.005, pull 3'
    """
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def chosen(choices: Choices) -> list[list[str]]:
    """Return a table of the settings that were chosen, for every method and criterion."""
    rows = [["method", "criterion", *PROBLEMS]]
    for method in METHODS:
        for criterion in PAPER:
            kept = [choices.get((name, criterion, method)) for name in PROBLEMS]
            if any(kept):
                settings = [setting_name(one["chosen"]) if one else "" for one in kept]
                rows.append([method, criterion.replace("_", " "), *settings])
    return rows


def by_setting(choices: Choices, method: str) -> list[list[str]]:
    """Return a table of accuracy / disparity on the folds that were left out, for every setting of a method."""
    columns = {}
    for (name, criterion, of), one in choices.items():
        if of == method:
            settings = map(setting_name, one["candidates"])
            means = [[fmean(values) for values in zip(*folds, strict=True)] for folds in one["folds"]]
            column = dict(zip(settings, (" / ".join(map(short, pair)) for pair in means), strict=True))
            columns[f"{name}, {criterion.replace('_', ' ')}"] = column
    settings = dict.fromkeys(setting for column in columns.values() for setting in column)
    return [
        ["setting", *columns],
        *([name, *(column.get(name, "") for column in columns.values())] for name in settings),
    ]


def markdown(rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    header, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rest])


def write_tables(folder: Path) -> str:
    """Write all tables of the results in a folder; return them as Markdown."""
    results = read(folder)
    parts = []
    for name in PAPER:
        if any(key[1] == name for key in results):
            table, changed = comparison(results, name), changes(results, name)
            write_csv(folder / f"{name}.csv", table)
            write_csv(folder / f"{name}_changes.csv", changed)
            parts += [
                f"## {name.replace('_', ' ').capitalize()}",
                markdown(merged(table)),
                markdown(merged_changes(changed)),
            ]
    if choices := read_choices(folder):
        parts += ["## What was chosen", markdown(chosen(choices))]
    if len(table := by_setting(choices, "FairBatch")) > 1:
        parts += ["## FairBatch by its step", markdown(table)]
    text = "\n\n".join(parts)
    (folder / "tables.md").write_text(f"{text}\n")
    return text


def write_csv(path: Path, rows: list[list[str]]) -> None:
    """Write a table to a file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
