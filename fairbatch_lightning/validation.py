"""The estimate on held-out data: the losses of the validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.columns import Source
from fairbatch_lightning.estimate import Estimate, TrainingRun
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.metrics import GroupLoss


class ValidationEstimate(Estimate):
    """Takes the losses of the validation loop that runs anyway: makes the model fair on data it was not trained on.

    The shares are updated after every validation: set Trainer(val_check_interval=...) for more than one per epoch.

    Args:
        loader: The number of the validation DataLoader if there are several.
        labels: Where the labels of the validation set are, as for FairBatch; default: as in the training set.
        groups: Where its groups are; default: as in the training set.
    """

    watches = "validation"

    def __init__(self, loader: int | None = None, *, labels: Source = None, groups: Source = None) -> None:
        self._number, self._labels, self._groups = loader, labels, groups
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[np.ndarray[Any, Any]] = iter(())
        self._current: np.ndarray[Any, Any] | None = None

    def start(self, run: TrainingRun) -> None:
        """Forget an earlier fit."""
        self._seen, self._loader = run.new_metric(), None

    def before_validation(self, run: TrainingRun) -> None:
        """Get ready for a pass over the validation set."""
        self._seen.reset()
        loaders = tree_leaves(run.trainer.val_dataloaders)
        if self._number is None and len(loaders) > 1:
            raise ValueError(
                f"FairBatch takes the losses of one validation DataLoader but got {len(loaders)}. Name it by its"
                " position: FairBatch(estimate=ValidationEstimate(loader=0))."
            )
        if not 0 <= (self._number or 0) < len(loaders):
            raise ValueError(
                f"Expected argument `loader` of ValidationEstimate to be from 0 to {len(loaders) - 1}, the number of a"
                f" validation DataLoader, but got {self._number!r}."
            )
        self._choose(run, loaders[self._number or 0])
        self._batches = _cells_of_batches(self._loader, self._cells)

    def before_batch(self, run: TrainingRun, loader: int) -> None:
        """Watch for the logits of the next batch, if it is one of the chosen loader's."""
        self._current = None
        if loader == (self._number or 0):
            cells = self._current = next(self._batches)
            run.capture.arm(len(cells))

    def after_batch(self, run: TrainingRun, outputs: Any) -> None:
        """Add the losses of the batch."""
        logits = run.capture.take()
        if self._current is None:
            return
        size = len(self._current)
        logits = returned_logits(outputs, size) if logits is None else logits
        if logits is None:
            raise RuntimeError(no_logits(size, "validation_step"))
        counted = self._current >= 0
        run.add_losses(self._seen, logits if counted.all() else logits[counted.nonzero()[0]], self._current[counted])

    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells in the last validation."""
        return self._seen

    def _choose(self, run: TrainingRun, loader: Any) -> None:
        """Find out the cells of the validation samples, once for each loader."""
        if loader is self._loader:
            return
        _check_loader(loader)
        labels = run.labels if self._labels is None else self._labels
        groups = run.groups if self._groups is None else self._groups
        try:
            held_out = GroupIndex.from_dataset(loader.dataset, labels, groups)
        except (ValueError, TypeError) as error:
            raise type(error)(
                'FairBatch(estimate="validation") looks for labels and groups in the validation set as in the training'
                f" set, or where ValidationEstimate(labels=..., groups=...) says: {error}"
            ) from error
        self._loader, self._cells = loader, run.index.cells_of(held_out)
        if (self._cells < 0).any():
            warn(
                f"{int((self._cells < 0).sum())} of the {len(held_out)} validation samples are left out: their labels"
                f" {list(held_out.label_names)} or groups {list(held_out.group_names)} are not all in the training set,"
                f" which has {list(run.index.label_names)} and {list(run.index.group_names)}."
            )


def _cells_of_batches(loader: Any, cells: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the cells of each batch of a loader; -1 for samples that do not count."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    padded = type(sampler) is DistributedSampler and not sampler.drop_last
    position = 0
    for batch in loader.batch_sampler:
        found = cells[batch].astype(np.int64)
        if padded:  # the last samples are repeated, so that all processes have the same number
            places = np.arange(position, position + len(batch)) * sampler.num_replicas + sampler.rank
            found[places >= len(cells)] = -1
            position += len(batch)
        yield found


def _check_loader(loader: Any) -> None:
    """Refuse a loader whose batches cannot be told without it."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise TypeError(
            'FairBatch(estimate="validation") needs a torch.utils.data.DataLoader with a batch_size for validation but'
            f" got {type(loader).__name__}: it has to know which samples a batch holds."
        )
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False):
        raise ValueError(
            'FairBatch(estimate="validation") has to know which samples a validation batch holds, but the validation'
            " DataLoader shuffles. Use shuffle=False, as Lightning advises too."
        )
