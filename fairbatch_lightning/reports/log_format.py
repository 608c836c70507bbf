"""The names of all logged values: written and read here, and nowhere else.

First what the callbacks log, then how it is read back from the log of Lightning's CSVLogger.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.fairness.audit import Audit, FairnessRecord
from fairbatch_lightning.reports.curves import FairnessCurves, SharesOverTime, fairness_curves
from fairbatch_lightning.rules.history import UpdateRecord

_Key = tuple[str, ...]
_Row = dict[_Key, float]

FAIRBATCH, FAIRNESS = "fairbatch", "fairness"
GAP_MAX = f"{FAIRBATCH}/gap_max"
"""The largest gap of an update; only the row of an update has it."""
_OF_GROUPS = "group_accuracy"
_EMPTY = "%empty"


def log_name(*parts: str) -> str:
    """Return the name under which something is logged; a slash in the name of a label or group does not split it.

    Loggers may keep a file for each name: none may be a folder of another, and no part may mean something in a path.

    >>> log_name("fairbatch", "share", "1", "Asian/Pacific")
    'fairbatch/share/1/Asian%2FPacific'
    """
    return "/".join(_escaped(part) for part in parts)


def _escaped(part: str) -> str:
    if not part.strip("."):  # in a path nothing, ".", or ".." are no names
        return part.replace(".", "%2E") or _EMPTY
    return part.replace("%", "%25").replace("/", "%2F")


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name made by `log_name`."""
    return tuple(_unescaped(part) for part in name.split("/"))


def _unescaped(part: str) -> str:
    return "" if part == _EMPTY else part.replace("%2F", "/").replace("%2E", ".").replace("%25", "%")


def share_values(shares: Tensor, index: GroupIndex) -> dict[str, float]:
    """Return the `(Y, Z)` shares of the cells that have samples, by name."""
    return _cell_values("share", shares, index)


def update_values(record: UpdateRecord, index: GroupIndex) -> dict[str, float]:
    """Return the largest gap, the new shares, the losses or error rates and the gaps of an update, by name."""
    values = {GAP_MAX: record.gap_max, **share_values(record.shares_after, index)}
    values |= _cell_values(record.unit, record.losses, index)
    for label, gap in zip(index.label_names, record.gaps.tolist(), strict=True):
        if not math.isnan(gap):
            values[log_name(FAIRBATCH, "gap", label)] = gap
    return values


def _cell_values(kind: str, values: Tensor, index: GroupIndex) -> dict[str, float]:
    numbers = values.tolist()
    return {
        log_name(FAIRBATCH, kind, index.label_names[label], index.group_names[group]): numbers[label][group]
        for label, group in (index.counts > 0).nonzero().tolist()
    }


def monitor_prefix(name: str | None) -> str:
    """Return what the names of a monitor's values begin with."""
    return FAIRNESS if name is None else f"{FAIRNESS}_{name}"


def record_values(record: FairnessRecord, prefix: str) -> dict[str, float]:
    """Return accuracies, disparities and the groups' accuracies, by name."""
    values = {log_name(prefix, record.stage, name): value for name, value in record.values.items()}
    for group, value in record.group_accuracies.items():
        values[log_name(prefix, record.stage, _OF_GROUPS, group)] = value
    return values


def count_values(audit: Audit, record: FairnessRecord, prefix: str) -> dict[str, float]:
    """Return what a log has to hold to know an audit again, by name, with the epoch that a CSV log has next to it."""
    groups, labels = enumerate(audit.group_names), list(enumerate(audit.label_names))
    counts: dict[_Key, int] = {
        ("count", group, label, prediction): int(audit.confusion[z, y, p])
        for (z, group), (y, label), (p, prediction) in product(groups, labels, labels)
    }
    counts["nan",], counts["min_samples",] = audit.num_broken, audit.min_samples
    for y, label in labels:
        counts["positive", label] = int(audit.positive in (None, y))
    return {"epoch": record.epoch, **{log_name(prefix, record.stage, *key): n for key, n in counts.items()}}


@dataclass(frozen=True)
class Run:
    """What the CSV log of one training run says; parts that were not logged are missing."""

    name: str
    shares: SharesOverTime | None
    curves: dict[str, FairnessCurves]
    audits: dict[str, Audit]

    def finals(self) -> dict[str, Audit]:
        """Return the last counts of predictions, by where they are from: of test data if there are any."""
        tested = {stage: audit for stage, audit in self.audits.items() if stage.split("/")[-1].startswith("test")}
        return tested or self.audits


def find_logs(directories: Iterable[Path]) -> dict[str, Path]:
    """Return the CSV logs in the directories, by names that tell them apart."""
    found: list[Path] = []
    for directory in directories:
        logs = sorted(directory.resolve().rglob("metrics.csv"))
        if not logs:
            raise FileNotFoundError(
                f"Expected a log of Lightning's CSVLogger in {directory} but found no metrics.csv there. Train with"
                " Trainer(logger=CSVLogger(...)); next to another logger: Trainer(logger=[CSVLogger(...), ...])."
            )
        found += logs
    places = [path.parent for path in dict.fromkeys(found)]
    shared = _shared_parts(places) if len(places) > 1 else len(places[0].parts) - 1
    return {"/".join(place.parts[shared:]) or place.name: place / "metrics.csv" for place in places}


def read_run(name: str, path: Path) -> Run:
    """Read one log."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            keys = _our_columns(reader.fieldnames or [])
            rows = [_our_values(row, keys) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"Expected a log of Lightning's CSVLogger but {path} is no table of numbers: {error}"
        ) from error
    stages = sorted({stage for row in rows for key in row if (stage := _stage(key))})
    curves = {stage: _curves(rows, stage) for stage in stages}
    audits = {stage: _audit(rows, stage) for stage in stages}
    return Run(
        name,
        _shares(rows),
        {stage: found for stage, found in curves.items() if found is not None},
        {stage: found for stage, found in audits.items() if found is not None},
    )


_GAP_MAX = parts_of(GAP_MAX)


def _our_columns(names: Iterable[str]) -> dict[str, _Key]:
    """Return the parts of the names that the callbacks logged under; CSVLogger can put a prefix before them."""
    ours = re.compile(rf"(?:[^/]*-)?(epoch|step|(?:{FAIRBATCH}|{FAIRNESS}(?:_[^/]*)?)/.+)$")
    return {name: parts_of(match[1]) for name in names if (match := ours.match(name))}


def _our_values(row: dict[str, str], keys: dict[str, _Key]) -> _Row:
    found = {}
    for name, key in keys.items():
        if row[name]:
            with contextlib.suppress(ValueError):  # somebody else's, of a like name
                found[key] = float(row[name])
    return found


def _stage(key: _Key) -> str:
    """Return where FairnessMonitor measured it, as "val", "test_1" or "gender/val"; "" if it did not."""
    if key[0].split("_")[0] != FAIRNESS or len(key) < 3 or not re.fullmatch(r"(val|test)(_\d+)?", key[1]):
        return ""
    name = key[0].removeprefix(FAIRNESS).removeprefix("_")
    return f"{name}/{key[1]}" if name else key[1]


def _shares(rows: list[_Row]) -> SharesOverTime | None:
    updates = [row for row in rows if _GAP_MAX in row]
    cells = {key[2:] for row in updates for key in row if key[:2] == (FAIRBATCH, "share")}
    if not cells:
        return None
    labels, groups = _in_order(cell[0] for cell in cells), _in_order(cell[1] for cell in cells)
    unit = "error" if any(key[:2] == (FAIRBATCH, "error") for row in updates for key in row) else "loss"
    others = (row for row in rows if _GAP_MAX not in row)
    start: _Row = next((row for row in others if any(key[:2] == (FAIRBATCH, "share") for key in row)), {})

    def matrix(kind: str, row: _Row) -> list[list[float]]:
        return [[row.get((FAIRBATCH, kind, y, z), math.nan) for z in groups] for y in labels]

    return SharesOverTime(
        labels,
        groups,
        shares=torch.tensor([matrix("share", row) for row in (start, *updates)]),
        losses=torch.tensor([matrix(unit, row) for row in updates]),
        gaps=torch.tensor([[row.get((FAIRBATCH, "gap", y), math.nan) for y in labels] for row in updates]),
        unit=unit,
    )


def _curves(rows: list[_Row], stage: str) -> FairnessCurves | None:
    measured = [(row, found) for row in rows if ("accuracy",) in (found := _of_stage(row, stage))]
    if not measured:
        return None
    groups = [
        {key[1]: n for key, n in found.items() if len(key) == 2 and key[0] == _OF_GROUPS} for _, found in measured
    ]
    return fairness_curves(
        [row.get(("epoch",), math.nan) for row, _ in measured],
        [row.get(("step",), math.nan) for row, _ in measured],
        [{key[0]: value for key, value in found.items() if len(key) == 1} for _, found in measured],
        groups,
        _in_order(group for found in groups for group in found),
    )


def _audit(rows: list[_Row], stage: str) -> Audit | None:
    """Return the last counts of predictions of a stage."""
    for row in reversed(rows):
        found = _of_stage(row, stage)
        counts = {key[1:]: value for key, value in found.items() if key[0] == "count" and len(key) == 4}
        if counts:
            groups, labels = _in_order(key[0] for key in counts), _in_order(key[1] for key in counts)
            confusion = [[[counts.get((z, y, p), 0.0) for p in labels] for y in labels] for z in groups]
            positive = [y for y in range(len(labels)) if found.get(("positive", labels[y]))]
            only = positive[0] if len(positive) == 1 else None
            for key, value in found.items():
                if key[1:] in counts or key in (("nan",), ("min_samples",)):
                    _check_count(value, stage, key)
            counted = torch.tensor(confusion, dtype=torch.int64)
            others = int(found.get(("nan",), 0)), int(found.get(("min_samples",), 1))
            return Audit(counted, tuple(labels), tuple(groups), only, *others)
    return None


def _check_count(value: float, stage: str, key: _Key) -> None:
    monitor, _, place = stage.rpartition("/")
    if not (0 <= value <= 2**53 and value == int(value)):
        name = log_name(monitor_prefix(monitor or None), place, *key)
        raise ValueError(f"Expected {name} to be a count of samples but got {value:g}: the log is damaged.")


def _of_stage(row: _Row, stage: str) -> _Row:
    """Return what FairnessMonitor logged for a stage, by the parts of the name after the stage."""
    return {key[2:]: value for key, value in row.items() if _stage(key) == stage}


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
