"""The paper's tables, from the files that `run.py` leaves: ours, with the paper's numbers beside them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import data  # noqa: F401 - tells where the other examples are
import torch
from synthetic import DISPARITIES

PROBLEMS = ("synthetic", "compas", "adult")
PAPER = {  # accuracy / disparity / epochs on synthetic data, COMPAS and Adult: the paper's Tables 1, 4 and 2
    "equal_opportunity": {
        "LR": (".885 / .115 / 400", ".681 / .239 / 300", ".845 / .054 / 300"),
        "Cutting": (".858 / .028 / 800", ".674 / .055 / 600", ".802 / .054 / 600"),
        "RW": (".858 / .020 / 800", ".685 / .137 / 300", ".835 / .134 / 100"),
        "LBC": (".858 / .022 / 11200", ".673 / .031 / 3900", ".841 / .011 / 6300"),
        "FC": (".833 / .007 / 700", ".656 / .059 / 100", ".844 / .021 / 300"),
        "AD": (".837 / .026 / 200", ".683 / .067 / 300", ".841 / .016 / 400"),
        "AdaFair": (".868 / .043 / 16000", ".664 / .018 / 9600", ".844 / .038 / 9000"),
        "FairBatch": (".855 / .012 / 300", ".681 / .022 / 100", ".844 / .011 / 400"),
    },
    "equalized_odds": {
        "LR": (".885 / .115 / 400", ".681 / .239 / 300", ".845 / .056 / 300"),
        "Cutting": (".859 / .036 / 650", ".665 / .066 / 400", ".802 / .062 / 600"),
        "RW": (".856 / .038 / 350", ".685 / .137 / 300", ".835 / .134 / 100"),
        "LBC": (".858 / .026 / 8800", ".673 / .063 / 9000", ".840 / .027 / 3300"),
        "FC": (".865 / .030 / 800", ".677 / .101 / 50", ".841 / .038 / 300"),
        "AD": (".857 / .030 / 1200", ".683 / .082 / 450", ".843 / .033 / 500"),
        "AdaFair": (".868 / .029 / 22400", ".675 / .066 / 9600", ".843 / .038 / 7800"),
        "FairBatch": (".856 / .038 / 400", ".682 / .052 / 100", ".843 / .036 / 500"),
    },
    "demographic_parity": {
        "LR": (".885 / .257 / 400", ".681 / .192 / 300", ".845 / .125 / 300"),
        "Cutting": (".885 / .258 / 500", ".677 / .205 / 400", ".846 / .123 / 300"),
        "RW": (".857 / .164 / 400", ".685 / .103 / 300", ".835 / .052 / 300"),
        "LBC": (".768 / .042 / 16000", ".671 / .032 / 7800", ".815 / .011 / 12600"),
        "FC": (".785 / .058 / 600", ".684 / .083 / 70", ".812 / .025 / 100"),
        "AD": (".812 / .063 / 700", ".683 / .054 / 550", ".815 / .018 / 400"),
        "AdaFair": (".784 / .089 / 52000", ".642 / .033 / 6300", ".825 / .040 / 27000"),
        "FairBatch": (".794 / .040 / 450", ".681 / .036 / 300", ".823 / .010 / 600"),
    },
}
PAPER_SECONDS = {  # the paper's Table 5, equal opportunity
    "LR": (5.71, 6.07, 22.96),
    "Cutting": (5.67, 3.34, 7.70),
    "RW": (17.24, 7.48, 10.02),
    "LBC": (208.47, 94.10, 558.31),
    "FC": (16.05, 2.76, 28.71),
    "AD": (3.97, 6.93, 31.76),
    "AdaFair": (294.31, 215.39, 791.58),
    "FairBatch": (5.25, 3.00, 46.79),
}
METHODS = ("LR", "Cutting", "Boosting", "RW", "LBC", "FC", "AD", "AdaFair", "GroupDRO", "FairDRO", "FairBatch")
Results = dict[tuple[str, str, str], list[dict[str, Any]]]


def read(folder: Path) -> Results:
    """Return the results of all seeds by problem, criterion and method; "any" stands for all criteria."""
    results: Results = {}
    for file in sorted(folder.glob("*_*_*_[0-9]*.json")):
        name, rest = file.stem.split("_", 1)
        criterion, method, _ = rest.rsplit("_", 2)
        result = json.loads(file.read_text())
        for one in DISPARITIES if criterion == "any" else [criterion]:
            results.setdefault((name, one, method), []).append(result)
    return results


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, in the paper's way."""
    deviation = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{deviation}".replace("0.", ".")


def cells(found: list[dict[str, Any]], criterion: str) -> list[str]:
    """Return accuracy, disparity and epochs over seeds."""
    confusions = [torch.tensor(result["confusion"]) for result in found]
    accuracies = [float(one.diagonal(dim1=1, dim2=2).sum() / one.sum()) for one in confusions]
    disparities = [float(DISPARITIES[criterion](one)) for one in confusions]
    return [spread(accuracies), spread(disparities), f"{fmean(result['epochs'] for result in found):.0f}"]


def comparison(results: Results, criterion: str) -> list[list[str]]:
    """Return a table: methods, and for each problem accuracy, disparity, epochs, and the paper's."""
    present = [name for name in PROBLEMS if any(key[:2] == (name, criterion) for key in results)]
    header = ["method"]
    for name in present:
        header += [f"{name}: accuracy", "disparity", "epochs", "paper"]
    rows = [header]
    for method in METHODS:
        row = [method]
        for name in present:
            found = results.get((name, criterion, method))
            paper = PAPER[criterion].get(method, ("",) * 3)[PROBLEMS.index(name)]
            row += [*(cells(found, criterion) if found else ["", "", ""]), paper]
        if any(row[1:]):
            rows.append(row)
    return rows


def times(results: Results) -> list[list[str]]:
    """Return the time of a whole training and of an epoch, as ratios to plain training of the same seeds."""
    rows = [["method", *(f"{name}: {what}" for name in PROBLEMS for what in ("total", "per epoch", "paper's total"))]]
    for method in METHODS[1:]:
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
    tables = {name: comparison(results, name) for name in PAPER if any(key[1] == name for key in results)}
    tables["time"] = times(results)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    text = "\n\n".join(f"## {name.replace('_', ' ').capitalize()}\n\n{markdown(rows)}" for name, rows in tables.items())
    (folder / "tables.md").write_text(f"{text}\n")
    return text
