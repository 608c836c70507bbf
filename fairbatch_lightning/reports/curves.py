"""What happened over time, as plain numbers and names: from histories or logs, for pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.fairness.audit import ACCURACIES, CRITERIA, FairnessRecord
from fairbatch_lightning.rules.history import UpdateRecord


@dataclass(frozen=True)
class SharesOverTime:
    """What FairBatch did in T updates.

    Args:
        label_names: The labels, Y of them.
        group_names: The groups, Z of them.
        shares: At the start and after every update, `(T + 1, Y, Z)`; NaN where they are not known.
        losses: The cells' losses that the updates saw, `(T, Y, Z)`.
        gaps: How unequal the labels' groups were, `(T, Y)`; NaN for labels that were not compared.
        unit: What the losses are: "error" or "loss".
    """

    label_names: Sequence[str]
    group_names: Sequence[str]
    shares: Tensor
    losses: Tensor
    gaps: Tensor
    unit: str = "loss"


def over_time(history: Sequence[UpdateRecord], index: GroupIndex) -> SharesOverTime:
    """Return what is known of one or more updates."""
    return SharesOverTime(
        index.label_names,
        index.group_names,
        shares=torch.stack([history[0].shares_before, *(record.shares_after for record in history)]),
        losses=torch.stack([record.losses for record in history]),
        gaps=torch.stack([record.gaps for record in history]),
        unit=history[-1].unit,
    )


@dataclass(frozen=True)
class FairnessCurves:
    """Accuracies and disparities over time.

    Args:
        times: When they were measured.
        values: Accuracies and disparities, by name.
        by_group: The accuracies of the groups, by the group's name.
        xlabel: What the times are: steps or epochs.
    """

    times: Sequence[float]
    values: dict[str, list[float]]
    by_group: dict[str, list[float]]
    xlabel: str


def fairness_curves(
    epochs: Sequence[float],
    steps: Sequence[float],
    values: Sequence[Mapping[str, float]],
    accuracies: Sequence[Mapping[str, float]],
    groups: Iterable[str],
) -> FairnessCurves:
    """Return what was measured at several times; in steps if there are several in an epoch.

    Args:
        epochs: The epoch of each time.
        steps: The step of each time.
        values: Accuracies and disparities by name, of each time.
        accuracies: The groups' accuracies by the group's name, of each time.
        groups: The groups to draw.
    """
    several = len(set(epochs)) < len(epochs)
    return FairnessCurves(
        list(steps if several else epochs),
        {name: [found.get(name, math.nan) for found in values] for name in (*ACCURACIES, *CRITERIA)},
        {group: [found.get(group, math.nan) for found in accuracies] for group in groups},
        xlabel="step" if several else "epoch",
    )


def curves_of_history(records: Sequence[FairnessRecord]) -> FairnessCurves:
    """Return the curves of one or more records of a stage."""
    return fairness_curves(
        [record.epoch for record in records],
        [record.step for record in records],
        [record.values for record in records],
        [record.group_accuracies for record in records],
        records[-1].group_accuracies,
    )
