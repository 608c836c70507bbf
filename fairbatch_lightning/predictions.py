"""Predictions on held-out data, counted on the accelerator without a look into the batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from fairbatch_lightning.audit import Audit
from fairbatch_lightning.disparities import places_in_confusion
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.held_out import num_replicas, samples_of_batches
from fairbatch_lightning.losses import classes_of_labels, num_classes, predicted
from fairbatch_lightning.metrics import GroupConfusion, to_device


class ClassNumbers:
    """Which of the model's classes each label is, in all data that it is evaluated on.

    A label must not mean another class because some data lacks one.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int | str, int]] = {}

    def find(self, values: list[int | str], number: int) -> dict[int | str, int]:
        """Return the class of every label, of `number` classes."""
        known = self._known.setdefault(number, {})
        if set(values) <= set(known):
            return known
        found = dict(zip(values, classes_of_labels(values, number), strict=True))
        unclear = len(values) < number and any(label != value for label, value in found.items())
        if unclear or any(known.get(label, value) != value for label, value in found.items()):
            raise ValueError(
                f"The model tells {number} classes apart, but the data has the labels {values}, of which it is not"
                f" known which class each is{f' (elsewhere it has {known})' if known else ''}. Give the labels as"
                f" numbers of classes, from 0 to {number - 1}: FairnessMonitor(labels=...)."
            )
        known.update(found)
        return known


class _Counts(GroupConfusion):
    """The counts, of how many samples the logits were NaN, and whether all outputs were from 0 to 1."""

    num_broken: Tensor
    all_in_unit: Tensor

    def __init__(self, num_labels: int, num_groups: int) -> None:
        super().__init__(num_labels, num_groups)
        self.add_state("num_broken", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("all_in_unit", torch.ones((), dtype=torch.int64), dist_reduce_fx="min")

    def look_at(self, logits: Tensor) -> None:
        """Notice outputs that cannot be right, without waiting for the device."""
        broken = logits.isnan()
        self.num_broken += (broken if logits.ndim == 1 else broken.any(1)).sum().to(self.device)
        self.all_in_unit &= ((logits >= 0) & (logits <= 1)).all().to(self.device)


class CountedPredictions:
    """Counts the predictions for one pass over a validation or test DataLoader.

    Args:
        loader: The loader.
        index: The labels and groups of its dataset.
        device: Where to count.
        classes: What labels mean.
        positive_label: The label that disparities are about, if the user named one.
        threshold: Where a single output per sample is cut.
        min_samples: Rates of fewer samples are left out of the disparities.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        index: GroupIndex,
        device: torch.device,
        classes: ClassNumbers,
        positive_label: int | str | None = None,
        threshold: float = 0.0,
        min_samples: int = 1,
    ) -> None:
        self.loader, self.index, self._device, self._classes = loader, index, device, classes
        self._positive_label, self._threshold, self._min_samples = positive_label, threshold, min_samples
        self._batches: Iterator[np.ndarray[Any, Any]] = samples_of_batches(loader)
        self._metric: _Counts | None = None
        self._is_single = False
        self.samples: np.ndarray[Any, Any] = np.empty(0, np.int64)
        self._agree()

    def _agree(self) -> None:
        """Find out what data the other processes have: perhaps other groups and labels."""
        index = self.index
        own = (index.label_values, index.label_names, index.group_names, zlib.crc32(index.cells.tobytes()))
        all_ = _gathered(own)
        self._copies = len(all_) // num_replicas(self.loader) if all(other == own for other in all_) else 1
        self._label_names = {value: name for other in all_ for value, name in zip(other[0], other[1], strict=True)}
        self.group_names = tuple(dict.fromkeys(name for other in all_ for name in other[2]))
        self._columns = torch.tensor([self.group_names.index(name) for name in index.group_names])

    def next_batch(self) -> np.ndarray[Any, Any]:
        """Return the samples of the next batch."""
        self.samples = next(self._batches, np.empty(0, np.int64))
        return self.samples

    def add(self, logits: Tensor) -> None:
        """Count the predictions for the samples of the batch."""
        if self._metric is None:
            self._metric = self._start(num_classes(logits))
        counted = self.samples >= 0
        if not counted.all():
            logits = logits[torch.from_numpy(counted).to(logits.device)]
        cells = torch.from_numpy(self.index.cells[self.samples[counted]].astype(np.int64))
        device = self._metric.device
        self._metric.add(to_device(self._first_places[cells], device) + predicted(logits, self._threshold).to(device))
        self._metric.look_at(logits)
        self._is_single = logits.ndim == 1 or logits.shape[1] == 1

    def _start(self, number: int) -> _Counts:
        """Make room for the counts, now that the number of classes is known."""
        values = sorted(self._label_names)
        classes = self._classes.find(values, number)
        names = {label: self._label_names.get(value, str(value)) for value, label in classes.items()}
        taken = set(names.values())
        self.label_names = tuple(
            names.get(label, str(label) if str(label) not in taken else f"class {label}") for label in range(number)
        )
        rows = torch.tensor([classes[value] for value in self.index.label_values])
        self._first_places = places_in_confusion(torch.zeros(()).long(), rows[:, None], self._columns, number).flatten()
        self._positive = 1 if number == 2 else None
        if self._positive_label is not None:
            self._positive = self._find_positive(classes)
        return _Counts(number, len(self.group_names)).to(self._device)

    def _find_positive(self, classes: dict[int | str, int]) -> int:
        for value, label in classes.items():
            if self._positive_label in (value, str(value), self.label_names[label]):
                return label
        raise ValueError(
            f"Expected argument `positive_label` to be one of the data's labels {list(classes)} but got"
            f" {self._positive_label!r}."
        )

    def problems(self, place: str, audit: Audit) -> list[str]:
        """Return what the user should know about the predictions."""
        problems = audit.problems(place)
        if self._is_single and self._threshold == 0 and self._all_in_unit:
            problems.append(
                f"all outputs on {place} data are from 0 to 1. If they are probabilities rather than logits, use"
                " FairnessMonitor(threshold=0.5)."
            )
        return problems

    def audit(self) -> Audit | None:
        """Return what was counted, by all processes; None if there was no batch."""
        if self._metric is None:
            return None
        with self._metric.sync_context():
            confusion = self._metric.confusion.to("cpu", copy=True)
            num_broken, self._all_in_unit = int(self._metric.num_broken), bool(self._metric.all_in_unit)
        confusion //= self._copies  # as many processes saw the same samples
        names = self.label_names, self.group_names
        return Audit(confusion, *names, self._positive, num_broken // self._copies, self._min_samples)


def _gathered(own: Any) -> list[Any]:
    """Return an object of every process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
