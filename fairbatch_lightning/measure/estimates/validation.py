"""The estimate on held-out data: the losses of the validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from fairbatch_lightning._support.lightning import held_out_loaders
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.held_out import check_held_out, samples_of_batches
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source, are_values_of
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.estimates.base import CellLosses, Estimate, TrainingRun, on_modules_device
from fairbatch_lightning.measure.evidence import Evidence, WatchedStep
from fairbatch_lightning.measure.outputs import returned_logits


class ValidationEstimate(Estimate):
    """Takes the losses of the validation loop that runs anyway: makes the model fair on data it was not trained on.

    The shares are updated after every validation: set Trainer(val_check_interval=...) for more than one per epoch.

    Args:
        loader: The number of the validation DataLoader if there are several.
        labels: Where the labels of the validation set are, as for FairBatch; default: as in the training set.
        groups: Where its groups are; default: as in the training set.
    """

    watches_validation = True

    def __init__(self, loader: int | None = None, *, labels: Source = None, groups: Source = None) -> None:
        self._number, self._labels, self._groups = loader, labels, groups
        self._dataset: Any = None
        self._batches: Iterator[Array] = iter(())
        self._current: Array | None = None
        self._step: WatchedStep | None = None

    def start(self, run: TrainingRun) -> None:
        """Forget an earlier fit."""
        self._seen, self._dataset = run.new_metric(), None

    def check(self, run: TrainingRun) -> None:
        """Refuse to take losses from a validation that does not take place, or that cannot be understood."""
        if not run.trainer.enable_validation:
            raise ValueError(
                'FairBatch(estimate="validation") needs a validation loop: a validation DataLoader, a `validation_step`'
                " and limit_val_batches above 0."
            )
        if held_out_loaders(run.trainer):  # otherwise there are none yet
            self._choose(run)

    def before_validation(self, run: TrainingRun) -> None:
        """Get ready for a pass over the validation set."""
        self._seen = on_modules_device(self._seen, run)
        self._seen.reset()
        self._batches = _cells_of_batches(self._choose(run), self._cells)

    def before_validation_batch(self, run: TrainingRun, loader: int) -> None:
        """Watch for the logits of the next batch, if it is one of the chosen loader's."""
        self._current = next(self._batches, None) if loader == (self._number or 0) else None
        if self._current is not None:
            run.reader.expect(len(self._current), training_step=False)
            self._step = self._evidence.watch(run.module, len(self._current), "validation_step")

    def after_validation_batch(self, run: TrainingRun, output: Any, batch: Any) -> None:
        """Add the losses of the batch, once it is sure whose they are."""
        if self._current is None:
            return
        step, self._step = self._step, None
        if step is not None:
            step.leave()
        logits = run.reader.require(output, len(self._current), "validation_step")
        counted = self._current >= 0
        if counted.all():
            told = returned_logits(output, len(self._current)) is logits
            self._evidence.check_step(step, logits, batch, self._current, told=told, sure=True)
        run.add_losses(self._seen, logits if counted.all() else logits[counted.nonzero()[0]], self._current[counted])

    def measure(self, run: TrainingRun, update: int, *, uniform: bool) -> CellLosses:
        """Return the losses of the cells in the last validation."""
        return CellLosses.of(self._seen)

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
            labels, groups = self._sources(run)
            self._evidence = Evidence(run.reader.who, run.index, labels, groups, run.classes, loader)
        return loader

    def _sources(self, run: TrainingRun) -> tuple[Source, Source]:
        """Return where the labels and the groups of the validation set are."""
        labels = _source(self._labels, run.labels, run, "labels")
        return labels, _source(self._groups, run.groups, run, "groups")

    def close(self) -> None:
        """Leave no trace in the module."""
        step, self._step = self._step, None
        if step is not None:
            step.leave()

    def _find_cells(self, run: TrainingRun, dataset: Any) -> Array:
        """Return the cells of the validation samples, by the training set's numbers; -1 for those without."""
        labels, groups = self._sources(run)
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
    if own is None and are_values_of(of_training, run.loader.loader.dataset):
        raise ValueError(
            f"Expected the {name} of the validation set as well: those given are an array for the training set. Use"
            f" FairBatch(estimate=ValidationEstimate({name}=...))."
        )
    return of_training if own is None else own


def _cells_of_batches(loader: DataLoader[Any], cells: Array) -> Iterator[Array]:
    """Yield the cells of each batch of a loader; -1 for samples that do not count."""
    for samples in samples_of_batches(loader):
        yield np.where(samples < 0, -1, cells[samples].astype(np.int64))
