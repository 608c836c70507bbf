"""The estimate on held-out data: the losses of the validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.columns import Source, fits, is_array
from fairbatch_lightning.estimate import Estimate, TrainingRun, on_modules_device
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.held_out import check_held_out, held_out_loaders, samples_of_batches
from fairbatch_lightning.metrics import GroupLoss


class ValidationEstimate(Estimate):
    """Takes the losses of the validation loop that runs anyway: makes the model fair on data it was not trained on.

    The shares are updated after every validation: set Trainer(val_check_interval=...) for more than one per epoch.

    Args:
        loader: The number of the validation DataLoader if there are several.
        labels: Where the labels of the validation set are, as for FairBatch; default: as in the training set.
        groups: Where its groups are; default: as in the training set.
    """

    def __init__(self, loader: int | None = None, *, labels: Source = None, groups: Source = None) -> None:
        self._number, self._labels, self._groups = loader, labels, groups
        self._dataset: Any = None
        self._batches: Iterator[np.ndarray[Any, Any]] = iter(())
        self._current: np.ndarray[Any, Any] | None = None

    def start(self, run: TrainingRun) -> None:
        """Forget an earlier fit."""
        self._seen, self._dataset = run.new_metric(), None

    def check(self, run: TrainingRun) -> None:
        """Refuse what cannot work before the training, as far as there are validation loaders already."""
        if held_out_loaders(run.trainer):
            self._choose(run)

    def before_validation(self, run: TrainingRun) -> None:
        """Get ready for a pass over the validation set."""
        self._seen = on_modules_device(self._seen, run)
        self._seen.reset()
        self._batches = _cells_of_batches(self._choose(run), self._cells)

    def before_batch(self, run: TrainingRun, loader: int) -> None:
        """Watch for the logits of the next batch, if it is one of the chosen loader's."""
        self._current = next(self._batches, None) if loader == (self._number or 0) else None
        if self._current is not None:
            run.capture.arm(len(self._current))

    def after_batch(self, run: TrainingRun, outputs: Any) -> None:
        """Add the losses of the batch."""
        logits = run.capture.take()
        if self._current is None:
            return
        size = len(self._current)
        if run.logits_returned or logits is None:
            logits = returned_logits(outputs, size)
        if logits is None:
            raise RuntimeError(no_logits(size, "validation_step"))
        counted = self._current >= 0
        run.add_losses(self._seen, logits if counted.all() else logits[counted.nonzero()[0]], self._current[counted])

    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells in the last validation."""
        return self._seen

    def _choose(self, run: TrainingRun) -> DataLoader[Any]:
        """Return the loader, once the cells of its samples are known."""
        loaders = held_out_loaders(run.trainer)
        if self._number is None and len(loaders) > 1:
            raise ValueError(
                f"FairBatch takes the losses of one validation DataLoader but got {len(loaders)}. Name it by its"
                " position: FairBatch(estimate=ValidationEstimate(loader=0))."
            )
        if self._number not in (None, *range(len(loaders))):
            raise ValueError(
                f"Expected argument `loader` of ValidationEstimate to be from 0 to {len(loaders) - 1}, the number of a"
                f" validation DataLoader, but got {self._number!r}."
            )
        loader = loaders[self._number or 0]
        check_held_out(run.trainer, [loader], 'FairBatch(estimate="validation")')
        if loader.dataset is not self._dataset:
            self._cells = self._find_cells(run, loader.dataset)
            self._dataset = loader.dataset
        return loader

    def _find_cells(self, run: TrainingRun, dataset: Any) -> np.ndarray[Any, Any]:
        """Return the cells of the validation samples, by the training set's numbers; -1 for those without."""
        labels = _source(self._labels, run.labels, run, "labels")
        groups = _source(self._groups, run.groups, run, "groups")
        try:
            held_out = GroupIndex.from_dataset(dataset, labels, groups)
        except (ValueError, TypeError) as error:
            raise type(error)(
                'FairBatch(estimate="validation") looks for labels and groups in the validation set as in the training'
                f" set, or where ValidationEstimate(labels=..., groups=...) says: {error}"
            ) from error
        cells = run.index.cells_of(held_out)
        unknown = (
            f"{int((cells < 0).sum())} of the {len(held_out)} validation samples are left out: their labels"
            f" {list(held_out.label_names)} or groups {list(held_out.group_names)} are not all in the training set,"
            f" which has {list(run.index.label_names)} and {list(run.index.group_names)}. Name them as there, or say"
            " where they are: ValidationEstimate(labels=..., groups=...)."
        )
        if (cells < 0).all():
            raise ValueError(unknown)
        if (cells < 0).any():
            warn(unknown)
        return cells


def _source(own: Source, of_training: Source, run: TrainingRun, name: str) -> Source:
    """Return where to look for labels or groups."""
    if own is None and is_array(of_training) and fits(of_training, run.loader.loader.dataset):
        raise ValueError(
            f"Expected the {name} of the validation set as well: those given are an array for the training set. Use"
            f" FairBatch(estimate=ValidationEstimate({name}=...))."
        )
    return of_training if own is None else own


def _cells_of_batches(loader: DataLoader[Any], cells: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the cells of each batch of a loader; -1 for samples that do not count."""
    for samples in samples_of_batches(loader):
        yield np.where(samples < 0, -1, cells[samples].astype(np.int64))


class Validating(NamedTuple):
    """An estimate that watches the validation, and what it works with."""

    estimate: ValidationEstimate
    run: TrainingRun
