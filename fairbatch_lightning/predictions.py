"""Predictions on held-out data, counted on the accelerator without a look into the batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fairbatch_lightning.audit import Audit
from fairbatch_lightning.estimate import to_device
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.held_out import num_replicas, samples_of_batches
from fairbatch_lightning.losses import classes_of_labels, num_classes, predicted
from fairbatch_lightning.metrics import GroupConfusion


class CountedPredictions:
    """Counts the predictions for one pass over a validation or test DataLoader.

    Args:
        loader: The loader.
        index: The labels and groups of its dataset.
        device: Where to count.
    """

    def __init__(self, loader: DataLoader[Any], index: GroupIndex, device: torch.device) -> None:
        self.loader, self.index, self._device = loader, index, device
        self._batches: Iterator[np.ndarray[Any, Any]] = samples_of_batches(loader)
        self._metric: GroupConfusion | None = None
        self.samples: np.ndarray[Any, Any] = np.empty(0, np.int64)

    def next_batch(self) -> np.ndarray[Any, Any]:
        """Return the samples of the next batch."""
        self.samples = next(self._batches, np.empty(0, np.int64))
        return self.samples

    def add(self, logits: Tensor) -> None:
        """Count the predictions for the samples of the batch."""
        if self._metric is None:
            self._metric = self._start(num_classes(logits))
        counted = self.samples >= 0
        labels, groups = self.index.labels_and_groups(self.samples[counted])
        predictions = predicted(logits if counted.all() else logits[torch.from_numpy(counted).to(logits.device)])
        device = self._metric.device
        self._metric.add(predictions.to(device), to_device(self._classes[labels], device), to_device(groups, device))

    def _start(self, number: int) -> GroupConfusion:
        """Make room for the counts, now that the number of classes is known."""
        self._classes = classes_of_labels(self.index, number)
        values = self.index.label_values
        if len(values) < number and self._classes.tolist() != list(values):
            raise ValueError(
                f"The model tells {number} classes apart, but the data has the labels {list(values)}, of which it is"
                " not known which class each is. Give the labels as numbers of classes, from 0 to"
                f" {number - 1}: FairnessMonitor(labels=...)."
            )
        return GroupConfusion(number, len(self.index.group_names)).to(self._device)

    def audit(self, positive_label: int | str | None, world_size: int) -> Audit | None:
        """Return what was counted, by all processes; None if there was no batch."""
        if self._metric is None:
            return None
        with self._metric.sync_context():
            confusion = self._metric.confusion.to("cpu", copy=True)
        copies = world_size // num_replicas(self.loader)
        if copies > 1 and not (confusion % copies).any():  # as many processes saw the same samples
            confusion = confusion // copies
        number = confusion.shape[1]
        names = [str(label) for label in range(number)]
        for row, label in enumerate(self._classes.tolist()):
            names[label] = self.index.label_names[row]
        positive = 1 if number == 2 else None
        if positive_label is not None:
            positive = int(self._classes[self.index.row_of(positive_label)])
        return Audit(confusion, tuple(names), self.index.group_names, positive)
