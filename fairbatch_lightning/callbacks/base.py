"""What all callbacks share that change batches: the life of a fit, from the user's DataLoader to a resumed run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.lightning import (
    batches_ever_trained_on,
    batches_trained_on,
    fetches_itself,
    is_spawned,
    processes_of,
    replace_train_loader,
)
from fairbatch_lightning._support.processes import called_by_signal, leave_group_at_exit
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.delivery import FairBatchSampler, with_batches
from fairbatch_lightning.batches.sampler import FairSampler
from fairbatch_lightning.batches.train_loader import TrainLoader
from fairbatch_lightning.callbacks.any_callback import AnyCallback
from fairbatch_lightning.cells.index import GroupIndex, check_same_cells
from fairbatch_lightning.cells.lookup import Source
from fairbatch_lightning.cells.values import Array

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class LoadedData:
    """What Lightning has just loaded to train on.

    Args:
        trainer: The Trainer.
        module: The module that it trains.
        loader: The DataLoader, and what it was given in.
        index: The cell of every sample that is trained on.
        same_samples: Whether they are those that were loaded before in this fit.
    """

    trainer: Trainer
    module: LightningModule
    loader: TrainLoader
    index: GroupIndex
    same_samples: bool


class ChangesBatches(AnyCallback):
    """A callback that decides which samples batches hold; subclasses say which.

    Args:
        groups: The sensitive attribute, as for [`FairBatch`][fairbatch_lightning.FairBatch].
        labels: The labels, likewise.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides the order of the samples.
    """

    def __init__(
        self, groups: Source = None, *, labels: Source = None, loader: int | str | None = None, seed: int = 0
    ) -> None:
        check_at_least("seed", seed, 0)
        self._groups, self._labels, self._loader, self._seed = groups, labels, loader, seed
        self._cleanup = ExitStack()
        self._trainer: Trainer | None = None
        self._batches: FairBatchSampler | None = None
        self._whole: tuple[Any, GroupIndex] | None = None
        self._restored: dict[str, Any] | None = None
        self._fitting, self._failed = True, False
        self.index: GroupIndex | None = None
        """The cell of every sample that is trained on, and their names; None before the training data is known."""

    @property
    def counts(self) -> Tensor | None:
        """How many samples of each cell are trained on, `(Y, Z)`; None before the training data is known."""
        return None if self.index is None else self.index.counts.clone()

    # What subclasses decide.

    def samples(self, index: GroupIndex) -> Array | None:
        """Return the samples that make up an epoch, some perhaps several times; None for all of them once."""
        return None

    def shares_of(self, index: GroupIndex) -> Tensor | None:
        """Return the `(Y, Z)` shares to draw by; None for those of the data."""
        return None

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Get ready for a fit, before the training data is known."""

    def start(self, data: LoadedData) -> None:
        """Get ready to train, now that the training data is known."""

    def reload(self, data: LoadedData) -> None:
        """Go on with data that Lightning has loaded anew."""

    def learnt(self, *, alone: bool) -> dict[str, Any]:
        """Return what was learnt so far, for checkpoints; called on all processes, unless this one is `alone`."""
        return {}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from what was learnt before a checkpoint; called after `start`."""

    # The life of a fit.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in the way of the train DataLoader: Lightning asks for it next."""
        self._fitting = stage == "fit"
        if not self._fitting:
            return
        self._check_alone(trainer)
        self._restored = self._left_by_earlier_fit(trainer)
        self._forget()
        self._trainer = trainer
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            warn(
                f"{type(self).__name__} stays inactive: Trainer(overfit_batches=...) trains on the same few batches"
                " again and again. Leave that out to train fairly."
            )
            return
        self._cleanup.callback(replace_train_loader(trainer, lambda given: self._new_loader(given, trainer, pl_module)))
        self.begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget what a step has fetched by itself but not trained on."""
        if self._batches is not None and fetches_itself(trainer):
            self._batches.forget()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget the batch."""
        if self._batches is not None:
            self._batches.take()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget a batch that Lightning has fetched in vain, next to a loader without a length."""
        if self._batches is not None:
            self._batches.end_pass()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._cleanup.close()
        if is_spawned(trainer):  # after a failure nobody comes here, and the other processes may be anywhere
            leave_group_at_exit()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no trace in the user's objects: Lightning calls no teardown when training fails."""
        self._failed = True  # checkpoint callbacks come next, and the other processes may be gone
        self._cleanup.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and what was learnt, to go on from there."""
        if self._batches is None or self._trainer is None or self.index is None:
            return {}
        return {
            "names": [list(names) for names in self.index.names],
            "counts": self.index.counts,
            "sampler": self._batches.sampler.state_dict(batches_trained_on(self._trainer)),
            "learnt": self.learnt(alone=self._failed or self._trainer.interrupted or called_by_signal()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training data is known; a checkpoint that is tested changes nothing."""
        if not self._fitting:
            return
        self._restored = state_dict if Saved(state_dict, type(self).__name__).entries() else None
        if self._batches is not None:
            self._restore(self._batches.sampler)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what there is to know about the fit, not the Trainer, module and data it was made with."""
        return {**vars(self), "_cleanup": ExitStack(), "_batches": None, "_trainer": None, "_whole": None}

    def _left_by_earlier_fit(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the state after this Trainer's earlier fit; an epoch that was interrupted is repeated by Lightning."""
        if trainer is not self._trainer or self._batches is None or not batches_ever_trained_on(trainer):
            return None
        return {**self.state_dict(), "sampler": self._batches.sampler.state_to_repeat()}

    def _forget(self) -> None:
        """Start afresh."""
        self._batches = self._whole = self.index = None
        self._failed = False

    def _check_alone(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [one for one in callbacks if isinstance(one, ChangesBatches) and one is not self]
        if others:
            raise ValueError(
                f"Expected one callback that decides about the batches but got {type(self).__name__} and"
                f" {type(others[0]).__name__}: a batch can follow only one of them. Leave one out of"
                f" Trainer(callbacks=...); for several attributes use {type(self).__name__}(groups=[...])."
            )

    def _new_loader(self, given: Any, trainer: Trainer, module: LightningModule) -> Any:
        """Return what Lightning was about to train on, with other samples or in other batches."""
        found = TrainLoader.find(given, self._loader, type(self).__name__)
        index, dataset, epoch_size = self._index_of(found), found.loader.dataset, found.epoch_size
        if (chosen := self.samples(index)) is not None:
            index, dataset, epoch_size = index.part(chosen), Subset(dataset, chosen.tolist()), len(chosen)
        before, earlier = self._batches, self.index
        if earlier is not None:
            check_same_cells(earlier, index)
        self.index = index
        if before is None or earlier is None:
            self.start(LoadedData(trainer, module, found, index, same_samples=False))
        else:
            same_samples = np.array_equal(index.cells, earlier.cells)  # the dataset may be the same, but made anew
            self.reload(LoadedData(trainer, module, found, index, same_samples))
        settings = {"seed": self._seed, "drop_last": found.drop_last, "epoch_size": epoch_size, **processes_of(trainer)}
        sampler = FairSampler.from_index(index, found.batch_size, shares=self.shares_of(index), **settings)
        if before is not None and not before.sampler.started:  # a place that was restored, but not yet gone on from
            sampler.load_state_dict({**before.sampler.state_dict(), **({} if same_samples else {"weights": None})})
        elif before is not None and same_samples:
            sampler.weights = before.sampler.weights
        self._batches = FairBatchSampler(sampler)
        self._restore(sampler)
        return found.put_back(with_batches(found.loader, self._batches, dataset=dataset))

    def _index_of(self, found: TrainLoader) -> GroupIndex:
        """Return the cells of all samples of a loader's dataset."""
        dataset = found.loader.dataset
        if self._whole is None or self._whole[0] is not dataset:
            self._whole = dataset, GroupIndex.from_dataset(dataset, self._labels, self._groups)
        return self._whole[1]

    def _restore(self, sampler: FairSampler) -> None:
        """Go on from a checkpoint, if there is one that nothing has gone on from yet."""
        state, self._restored = self._restored, None
        if state is not None and self.index is not None:
            saved = Saved(state)
            _check_same_data(saved, self.index)
            sampler.load_state_dict(saved["sampler"])
            _check_place(state["sampler"], sampler)
            self.go_on_from(saved["learnt"].whole())


def _check_same_data(saved: Saved, index: GroupIndex) -> None:
    names = [list(names) for names in index.names]
    before = [[name.text() for name in column] for column in saved["names"].several(2)]
    counts = saved["counts"].tensor(*map(len, before), whole=True)
    if before != names or not torch.equal(counts, index.counts):
        raise ValueError(
            "Expected to go on with the training data of the checkpoint, or of this Trainer's earlier fit. Its labels"
            f" and groups {before} had the counts {counts.tolist()}, now {names} have"
            f" {index.counts.tolist()}. To train on other data, start without the checkpoint, in a new Trainer."
        )


def _check_place(state: dict[str, Any], sampler: FairSampler) -> None:
    """Say so if a place in the middle of an epoch means nothing here, because batches are of another size."""
    if not sampler.fits(state) and 0 < state["next_batch"] < state["num_batches"]:
        now = sampler.state_dict()
        warn(
            f"The checkpoint is from the middle of epoch {state['epoch']}, which had {state['num_batches']} batches"
            f" of {state['batch_size']} samples and now has {now['num_batches']} of {now['batch_size']}. The rest"
            " of this epoch is drawn anew from the same shares; the next epoch is as it would have been."
        )
