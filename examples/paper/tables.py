"""The paper's tables, from the files that `run.py` leaves: ours, with the paper's numbers beside them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

import data  # noqa: F401  # isort: skip - first: it tells where the other examples are
from methods import METHODS
from paper_numbers import PAPER, PAPER_SECONDS
from synthetic import DISPARITIES
from torch import Tensor

PROBLEMS = ("synthetic", "compas", "adult")
T_975 = [0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]  # Student's quantile by degrees of freedom
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


def interval(differences: Sequence[float]) -> str:
    """Return the mean and, of up to ten, half the width of its 95% confidence interval."""
    number = len(differences)
    half = T_975[min(number, 10) - 1] * stdev(differences) / number**0.5 if number > 1 else None
    return short(fmean(differences), "+") + ("" if half is None else f" ± {short(half)}")


def scores(confusion: Tensor, criterion: str) -> tuple[float, float]:
    """Return accuracy and disparity."""
    right = confusion.diagonal(dim1=1, dim2=2).sum() / confusion.sum()
    return float(right), float(DISPARITIES[criterion](confusion))


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
            row.append(PAPER[criterion].get(method.split(",")[0], ("",) * 3)[PROBLEMS.index(name)])
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


def noise(confusion: Tensor, criterion: str, draws: int = 200) -> float:
    """Return the mean disparity that a perfectly fair model would show, because the test set is finite.

    It predicts as many positives as the given one, but alike for all groups: among the samples of a label, or, for
    "demographic_parity", among all.

    Args:
        confusion: The counts of predictions, `(Z, Y, Yhat)`.
        criterion: Which disparity.
        draws: How many test sets to draw.
    """
    counts = confusion.double()
    if criterion == "demographic_parity":
        counts = counts.sum(1, keepdim=True).expand(-1, 2, -1) / 2  # of which the label is of no importance
        counts[:, 1] = 0
        counts[:, 0] *= 2
    sizes = counts.sum(2)
    rates = (counts.sum(0)[:, 1] / counts.sum((0, 2)).clamp(min=1)).expand_as(sizes)
    random = torch.Generator().manual_seed(0)
    positive = torch.binomial(sizes.expand(draws, -1, -1), rates.expand(draws, -1, -1), generator=random)
    drawn = torch.stack([sizes - positive, positive], 3)
    return fmean(float(DISPARITIES[criterion](one)) for one in drawn)


def changes(results: Results, criterion: str) -> list[list[str]]:
    """Return what the methods change, compared with plain training of the same seeds, and what they do in the paper.

    That is the part of the disparity that is removed, by the means over seeds; the same with the noise of the test set
    taken off; and the difference in accuracy with its 95% confidence interval.
    """
    rows = [["problem", "method", "removed", "of what is not noise", "accuracy", "paper: removed", "paper: accuracy"]]
    for name in PROBLEMS:
        plain = {result["seed"]: result for result in results.get((name, criterion, "LR"), [])}
        for method in list(METHODS)[1:]:
            found = [result for result in results.get((name, criterion, method), []) if result["seed"] in plain]
            if found:
                pairs = [(scores_of(plain[one["seed"]], criterion), scores_of(one, criterion)) for one in found]
                before, after = (fmean(pair[side][1] for pair in pairs) for side in (0, 1))
                floor = fmean(noise(torch.tensor(one["confusion"]), criterion) for one in found)
                rest = max(0.0, after - floor) / (before - floor) if before > floor else 0.0
                accuracy = interval([new[0] - old[0] for old, new in pairs])
                paper = paper_change(criterion, method, PROBLEMS.index(name))
                rows.append([name, method, f"{1 - after / before:.0%}", f"{1 - rest:.0%}", accuracy, *paper])
    return rows


def paper_change(criterion: str, method: str, place: int) -> tuple[str, str]:
    """Return the part of the disparity that a method removes in the paper, and its change of accuracy."""
    numbers = PAPER[criterion].get(method.split(",")[0])
    if numbers is None:
        return "", ""
    (accuracy, disparity), (old_accuracy, old_disparity) = (
        map(float, line[place].split(" / ")[:2]) for line in (numbers, PAPER[criterion]["LR"])
    )
    return f"{1 - disparity / old_disparity:.0%}", short(accuracy - old_accuracy, "+")


def times(results: Results) -> list[list[str]]:
    """Return the time of a whole training and of an epoch, as ratios to plain training of the same seeds."""
    rows = [["method", *(f"{name}: {what}" for name in PROBLEMS for what in ("total", "per epoch", "paper's total"))]]
    for method in list(METHODS)[1:]:
        row = [method]
        for place, name in enumerate(PROBLEMS):
            plain = {result["seed"]: result for result in results.get((name, "equal_opportunity", "LR"), [])}
            found = results.get((name, "equal_opportunity", method), [])
            pairs = [(result, plain[result["seed"]]) for result in found if result["seed"] in plain]
            totals = [one["seconds"] / other["seconds"] for one, other in pairs]
            epochs = [
                ratio * other["epochs"] / one["epochs"] for ratio, (one, other) in zip(totals, pairs, strict=True)
            ]
            row += [f"{median(values):.2f}" if values else "" for values in (totals, epochs)]
            paper = PAPER_SECONDS.get(method)
            row.append(f"{paper[place] / PAPER_SECONDS['LR'][place]:.2f}" if paper else "")
        rows.append(row)
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    header, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rest])


def write_tables(folder: Path) -> str:
    """Write all tables of the results in a folder; return them as Markdown."""
    results = read(folder)
    tables: dict[str, list[list[str]]] = {}
    for name in PAPER:
        if any(key[1] == name for key in results):
            tables[name] = comparison(results, name)
            tables[f"{name}_changes"] = changes(results, name)
    tables["time"] = times(results)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        if name in PAPER:
            tables[name] = merged(rows)
    text = "\n\n".join(f"## {name.replace('_', ' ').capitalize()}\n\n{markdown(rows)}" for name, rows in tables.items())
    (folder / "tables.md").write_text(f"{text}\n")
    return text
