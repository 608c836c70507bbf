"""Counts of predictions on the accelerator: exact under DDP, cheap to sync.

`GroupConfusion` is for anybody's own loop. `HeldOutPass` counts while somebody else's loop runs, without a look into
its batches: it is told their logits, and knows their samples, as held-out data is not shuffled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from fairbatch_lightning._support.checks import check_range
from fairbatch_lightning._support.devices import to_device
from fairbatch_lightning._support.processes import gathered
from fairbatch_lightning.batches.held_out import num_replicas, samples_of_batches
from fairbatch_lightning.cells.classes import ClassNumbers, is_binary, num_classes, predicted
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.fairness.audit import Audit
from fairbatch_lightning.fairness.disparities import places_in_confusion


class GroupConfusion(Metric):
    r"""One confusion matrix per group: how often group z's samples of label y were predicted to be yhat.

    As input to `update` the metric takes, for `B` samples:

    - `preds`: predicted labels `(B,)`, or scores `(B, Y)` of which the largest counts, or with two labels the scores
      `(B,)` or `(B, 1)` of label 1, which count as 1 above `threshold`
    - `target`: the label of every sample `(B,)`, from 0 to `num_labels - 1`
    - `groups`: the group of every sample `(B,)`, from 0 to `num_groups - 1`, whichever of them occur

    `compute` returns the counts `(Z, Y, Y)`, from which accuracies and disparities follow; they are drawn by
    `fairbatch_lightning.reports.figures.confusion_figure`.

    Args:
        num_labels: Number of labels, Y.
        num_groups: Number of groups, Z.
        threshold: Where scores `(B,)` are cut: 0.5 for probabilities, 0 for logits.
        kwargs: Arguments of every `torchmetrics.Metric`.

    >>> metric = GroupConfusion(num_labels=2, num_groups=2)
    >>> metric.update(torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    >>> metric.compute()
    tensor([[[0, 0],
             [0, 1]],
    <BLANKLINE>
            [[1, 1],
             [0, 0]]])
    """

    full_state_update = False
    is_differentiable = False

    confusion: Tensor

    def __init__(self, num_labels: int, num_groups: int, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, number, least in (("num_labels", num_labels, 2), ("num_groups", num_groups, 1)):
            if number < least:
                raise ValueError(f"Expected argument `{name}` to be at least {least} but got {number}.")
        self.num_labels, self.num_groups, self.threshold = num_labels, num_groups, threshold
        shape = num_groups, num_labels, num_labels
        self.add_state("confusion", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, groups: Tensor) -> None:
        """Add samples: their predictions, labels and groups."""
        preds = self._predicted(preds)
        if not preds.ndim == target.ndim == groups.ndim == 1 or not len(preds) == len(target) == len(groups):
            raise ValueError(
                "Expected `preds`, `target` and `groups` to be of the same length, the latter two vectors, but got"
                f" shapes {tuple(preds.shape)}, {tuple(target.shape)} and {tuple(groups.shape)}."
            )
        for name, values, number in (
            ("preds", preds, self.num_labels),
            ("target", target, self.num_labels),
            ("groups", groups, self.num_groups),
        ):
            if values.is_floating_point():
                raise ValueError(f"Expected `{name}` to be integers but got {values.dtype}. Use `{name}.long()`.")
            check_range(name, values, number)
        self.add(places_in_confusion(preds.long(), target.long(), groups.long(), self.num_labels))

    def add(self, places: Tensor) -> None:
        """Add samples by their places in the flattened counts: `update` without its checks, which await the device."""
        self.confusion.view(-1).index_add_(0, places, torch.ones_like(places))

    def compute(self) -> Tensor:
        """Return the counts, `(Z, Y, Y)`."""
        return self.confusion.clone()

    def _predicted(self, preds: Tensor) -> Tensor:
        if not preds.is_floating_point():
            return preds
        if bool(preds.isnan().any()):
            raise ValueError(
                f"Expected `preds` to be numbers but {int(preds.isnan().sum())} of {preds.numel()} are NaN: the model"
                " has diverged. Look at its training loss."
            )
        if self.num_labels == 2 and preds.ndim == 2 and preds.shape[1] == 1:
            preds = preds[:, 0]
        if preds.ndim == 2 and preds.shape[1] == self.num_labels:
            return preds.argmax(1)
        if self.num_labels != 2 or preds.ndim != 1:
            raise ValueError(
                f"Expected scores `preds` to have one column for each of the {self.num_labels} labels but got the shape"
                f" {tuple(preds.shape)}."
            )
        if self.threshold == 0.5 and len(preds) and not 0 <= float(preds.min()) <= float(preds.max()) <= 1:
            raise ValueError(
                f"Expected scores `preds` to be from 0 to 1 but got some from {float(preds.min()):g} to"
                f" {float(preds.max()):g}. For logits use {type(self).__name__}(..., threshold=0)."
            )
        return (preds > self.threshold).long()


@dataclass(frozen=True)
class Reading:
    """How predictions are read.

    Args:
        positive_label: The label that disparities are about; None for the second of two, and of more each in turn.
        threshold: Where a single output per sample is cut.
        min_samples: Rates of fewer samples are left out of the disparities.
    """

    positive_label: int | str | None = None
    threshold: float = 0.0
    min_samples: int = 1


@dataclass(frozen=True, eq=False)
class HeldOutSet:
    """What all processes together know of a validation or test set, of which each may have other labels and groups.

    Args:
        index: The cells of this process's samples.
        label_names: The names of all processes' labels, by the labels.
        group_names: All processes' groups.
        copies: How many processes count the same samples.
    """

    index: GroupIndex
    label_names: Mapping[int | str, str]
    group_names: tuple[str, ...]
    copies: int

    @classmethod
    def of_loader(cls, loader: DataLoader[Any], index: GroupIndex) -> HeldOutSet:
        """Ask all processes what data they have; every one has to ask."""
        own = (index.label_values, index.label_names, index.group_names, zlib.crc32(index.cells.tobytes()))
        all_ = gathered(own)
        return cls(
            index,
            {value: name for values, names, *_ in all_ for value, name in zip(values, names, strict=True)},
            tuple(dict.fromkeys(name for _, _, names, _ in all_ for name in names)),
            copies=max(1, len(all_) // num_replicas(loader)) if all(other == own for other in all_) else 1,
        )


class HeldOutCounts(GroupConfusion):
    """Counts for one held-out set and one model, of which it is known by now how many classes it tells apart.

    Also counted: of how many samples the logits were NaN, and whether all outputs were from 0 to 1. Nothing waits for
    the device until `audit`.

    Args:
        data: The held-out set.
        logits: The model's first logits, which tell the number of classes.
        classes: Which of them a label is.
        reading: How predictions are read.
    """

    num_broken: Tensor
    all_in_unit: Tensor

    def __init__(self, data: HeldOutSet, logits: Tensor, classes: ClassNumbers, reading: Reading) -> None:
        number = num_classes(logits)
        super().__init__(number, len(data.group_names), reading.threshold)
        self.add_state("num_broken", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("all_in_unit", torch.ones((), dtype=torch.int64), dist_reduce_fx="min")
        found = classes.find(sorted(data.label_names), number)
        self._data, self._reading, self._is_single = data, reading, is_binary(logits)
        self._label_names = _names_of_classes(found, data.label_names, number)
        self._positive = _positive_class(reading.positive_label, found, self._label_names)
        rows = torch.tensor([found[value] for value in data.index.label_values])
        columns = torch.tensor([data.group_names.index(name) for name in data.index.group_names])
        self._first_places = places_in_confusion(torch.zeros(()).long(), rows[:, None], columns, number).flatten()

    def count(self, samples: np.ndarray[Any, Any], logits: Tensor) -> None:
        """Count the predictions for samples, given by their numbers in the set; -1 for what is not to be counted."""
        counted = samples >= 0
        if not counted.all():
            logits = logits[torch.from_numpy(counted).to(logits.device)]
        cells = torch.from_numpy(self._data.index.cells[samples[counted]].astype(np.int64))
        first = to_device(self._first_places[cells], self.device)
        self.add(first + predicted(logits, self.threshold).to(self.device))
        broken = logits.isnan()
        self.num_broken += (broken if logits.ndim == 1 else broken.any(1)).sum().to(self.device)
        self.all_in_unit &= ((logits >= 0) & (logits <= 1)).all().to(self.device)

    def audit(self) -> Audit:
        """Return what all processes have counted."""
        with self.sync_context():
            confusion = self.confusion.to("cpu", copy=True)
            num_broken, all_in_unit = int(self.num_broken), bool(self.all_in_unit)
        return Audit(
            confusion // self._data.copies,
            self._label_names,
            self._data.group_names,
            self._positive,
            num_broken // self._data.copies,
            self._reading.min_samples,
            like_probabilities=self._is_single and self.threshold == 0 and all_in_unit,
        )


def _names_of_classes(
    classes: Mapping[int | str, int], label_names: Mapping[int | str, str], number: int
) -> tuple[str, ...]:
    """Return the names of all classes: those of labels, and for others their numbers where no label is called so."""
    names = {label: label_names.get(value, str(value)) for value, label in classes.items()}
    taken = set(names.values())
    others = (str(label) if str(label) not in taken else f"class {label}" for label in range(number))
    return tuple(names.get(label, other) for label, other in enumerate(others))


def _positive_class(wanted: int | str | None, classes: Mapping[int | str, int], names: tuple[str, ...]) -> int | None:
    """Return the class that a user means by a label's value or name; by default the second of two, else none."""
    if wanted is None:
        of_labels = sorted(classes.values()) if len(classes) == 2 else range(len(names))
        return of_labels[1] if len(of_labels) == 2 else None
    for value, label in classes.items():
        if wanted in (value, str(value), names[label]):
            return label
    raise ValueError(
        f"Expected argument `positive_label` to be one of the data's labels {list(classes)} but got {wanted!r}."
    )


class HeldOutPass:
    """One pass over a validation or test DataLoader.

    Args:
        loader: The loader.
        index: The labels and groups of its dataset.
        device: Where to count.
        classes: What labels mean.
        reading: How predictions are read.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        index: GroupIndex,
        device: torch.device,
        classes: ClassNumbers,
        reading: Reading | None = None,
    ) -> None:
        self.loader, self.data = loader, HeldOutSet.of_loader(loader, index)
        self._device, self._classes, self._reading = device, classes, reading or Reading()
        self._batches = samples_of_batches(loader)
        self.counts: HeldOutCounts | None = None
        """What was counted; None until the first logits tell how many classes there are."""

    def next_batch(self) -> np.ndarray[Any, Any]:
        """Return the samples of the next batch, `(B,)`."""
        return next(self._batches, np.empty(0, np.int64))

    def add(self, samples: np.ndarray[Any, Any], logits: Tensor) -> None:
        """Count the predictions for the samples of a batch."""
        if self.counts is None:
            self.counts = HeldOutCounts(self.data, logits, self._classes, self._reading).to(self._device)
        self.counts.count(samples, logits)
