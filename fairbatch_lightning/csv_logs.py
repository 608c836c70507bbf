"""Reads back what FairBatch and FairnessMonitor wrote to the log of Lightning's CSVLogger."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairbatch_lightning.audit import CRITERIA, Audit
from fairbatch_lightning.logs import parts_of
from fairbatch_lightning.plots import SharesOverTime

_Row = dict[str, float]


@dataclass(frozen=True)
class FairnessCurves:
    """Accuracies and disparities over time: by name, and the groups' accuracies by group."""

    times: list[float]
    values: dict[str, list[float]]
    by_group: dict[str, list[float]]
    xlabel: str


@dataclass(frozen=True)
class Run:
    """What the CSV log of one training run says; parts that were not logged are missing."""

    name: str
    shares: SharesOverTime | None
    curves: dict[str, FairnessCurves]
    audits: dict[str, Audit]

    @property
    def final(self) -> tuple[str, Audit] | None:
        """The last counts of predictions, and where they are from: test data if there are any."""
        stages = sorted(self.audits, key=lambda stage: not stage.startswith("test"))
        return (stages[0], self.audits[stages[0]]) if stages else None


def find_logs(directories: Iterable[Path]) -> dict[str, Path]:
    """Return the CSV logs in the directories, by names that tell them apart."""
    found: list[Path] = []
    for directory in directories:
        logs = sorted(directory.rglob("metrics.csv"))
        if not logs:
            raise FileNotFoundError(
                f"Expected a log of Lightning's CSVLogger in {directory} but found no metrics.csv there. Train with"
                " Trainer(logger=CSVLogger(...)); next to another logger: Trainer(logger=[CSVLogger(...), ...])."
            )
        found += logs
    places = [path.parent for path in dict.fromkeys(found)]
    shared = len(places[0].parent.parts) if len(places) == 1 else _shared_parts(places)
    return {"/".join(place.parts[shared:]): place / "metrics.csv" for place in places}


def read_run(name: str, path: Path) -> Run:
    """Read one log."""
    with path.open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    stages = sorted({key[1] + _suffix(key) for row in rows for key in map(parts_of, row) if key[0] == "fairness"})
    curves = {stage: _curves(rows, stage) for stage in stages}
    audits = {stage: _audit(rows, stage) for stage in stages}
    return Run(
        name,
        _shares(rows),
        {stage: found for stage, found in curves.items() if found is not None},
        {stage: found for stage, found in audits.items() if found is not None},
    )


def _shares(rows: list[_Row]) -> SharesOverTime | None:
    updates = [row for row in rows if "fairbatch/gap_max" in row]
    names = dict.fromkeys(key for row in updates for key in map(parts_of, row) if key[:2] == ("fairbatch", "share"))
    if not names:
        return None
    labels, groups = _in_order(key[2] for key in names), _in_order(key[3] for key in names)
    first = next((row for row in rows if "fairbatch/gap_max" not in row and _has(row, "fairbatch", "share")), {})

    def matrix(kind: str, row: _Row) -> list[list[float]]:
        known = {parts_of(key): value for key, value in row.items()}
        return [[known.get(("fairbatch", kind, y, z), math.nan) for z in groups] for y in labels]

    gaps = [
        [{parts_of(k): v for k, v in row.items()}.get(("fairbatch", "gap", y), math.nan) for y in labels]
        for row in updates
    ]
    return SharesOverTime(
        labels,
        groups,
        shares=torch.tensor([matrix("share", row) for row in (first, *updates)]),
        losses=torch.tensor([matrix("loss", row) for row in updates]),
        gaps=torch.tensor(gaps),
    )


def _curves(rows: list[_Row], stage: str) -> FairnessCurves | None:
    named = [_of_stage(row, stage) for row in rows]
    measured = [(row, values) for row, values in zip(rows, named, strict=True) if ("accuracy",) in values]
    if not measured:
        return None
    epochs = [row.get("epoch", math.nan) for row, _ in measured]
    several = len(set(epochs)) < len(epochs)
    groups = _in_order({key[1] for _, values in measured for key in values if len(key) == 2 and key[0] == "accuracy"})
    return FairnessCurves(
        [row["step"] for row, _ in measured] if several else epochs,
        {n: [v.get((n,), math.nan) for _, v in measured] for n in ("accuracy", "worst_group_accuracy", *CRITERIA)},
        {group: [values.get(("accuracy", group), math.nan) for _, values in measured] for group in groups},
        "step" if several else "epoch",
    )


def _audit(rows: list[_Row], stage: str) -> Audit | None:
    """Return the last counts of predictions of a stage."""
    for row in reversed(rows):
        named = _of_stage(row, stage)
        counts = {key[1:]: value for key, value in named.items() if key[0] == "count"}
        if counts:
            groups, labels = _in_order(key[0] for key in counts), _in_order(key[1] for key in counts)
            confusion = [[[counts.get((z, y, p), 0.0) for p in labels] for y in labels] for z in groups]
            positive = [y for y in range(len(labels)) if named.get(("positive", labels[y]))]
            only = positive[0] if len(positive) == 1 else None
            return Audit(torch.tensor(confusion, dtype=torch.int64), tuple(labels), tuple(groups), only)
    return None


def _of_stage(row: _Row, stage: str) -> dict[tuple[str, ...], float]:
    """Return what FairnessMonitor logged for a stage: {parts of the name after the stage: value}."""
    found = {}
    for name, value in row.items():
        key = parts_of(name)
        if key[0] == "fairness" and key[1] + _suffix(key) == stage:
            found[key[2 : len(key) - bool(_suffix(key))]] = value
    return found


def _suffix(key: Sequence[str]) -> str:
    return f"/{key[-1]}" if key[-1].startswith("dataloader_idx_") else ""


def _has(row: _Row, *start: str) -> bool:
    return any(parts_of(key)[: len(start)] == start for key in row)


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names without repetition, numbers by size."""
    distinct = set(names)
    return sorted(distinct, key=lambda name: (not _is_number(name), float(name) if _is_number(name) else 0.0, name))


def _is_number(name: str) -> bool:
    return name.lstrip("-").isdigit()


def _shared_parts(places: Sequence[Path]) -> int:
    """Return how many parts all paths begin with."""
    shared = 0
    for parts in zip(*(place.parts for place in places), strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return shared
