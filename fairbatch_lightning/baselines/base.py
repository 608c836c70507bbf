"""What all baselines have in common: they change what is trained on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Subset

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning._warnings import warn
from fairbatch_lightning.callback import FairBatch
from fairbatch_lightning.columns import Source
from fairbatch_lightning.comparable import check_same_cells
from fairbatch_lightning.draws import Array
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import FairBatchSampler, TrainLoader, replace_train_loader, with_batches
from fairbatch_lightning.sampler import FairSampler
from fairbatch_lightning.settings import CRITERIA, positive_row

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Baseline(AnyCallback):
    """A callback that makes training fair in another way than FairBatch, by other samples; subclasses say which.

    Args:
        groups: The sensitive attribute, as for [`FairBatch`][fairbatch_lightning.FairBatch].
        labels: The labels, likewise.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides the order of the samples.
    """

    def __init__(
        self, *, groups: Source = None, labels: Source = None, loader: int | str | None = None, seed: int = 0
    ) -> None:
        self._groups, self._labels, self._loader, self._seed = groups, labels, loader, seed
        self._cleanup = ExitStack()
        self._batches: FairBatchSampler | None = None
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] | None = None
        self.index: GroupIndex | None = None
        """The cell of every sample that is trained on; None before the training data is known."""

    @property
    def counts(self) -> Tensor | None:
        """How many samples of each cell are trained on, `(Y, Z)`; None before the training data is known."""
        return None if self.index is None else self.index.counts.clone()

    def samples(self, index: GroupIndex) -> Array | None:
        """Return the samples that make up an epoch, some perhaps several times; None for all of them once."""
        return None

    def shares(self, index: GroupIndex) -> Tensor | None:
        """Return the `(Y, Z)` shares of the groups; None for those of the data."""
        return None

    def start(self, index: GroupIndex, batch_size: int) -> None:
        """Get ready to train on these samples, in batches of this size over all processes."""

    def learnt(self) -> dict[str, Any]:
        """Return what the method has learnt so far, for checkpoints."""
        return {}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from what was learnt before a checkpoint; called after `start`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in the way of the train DataLoader: Lightning asks for it next."""
        if stage != "fit":
            return
        self._check_alone(trainer)
        goes_on = trainer is self._trainer and trainer.current_epoch > 0  # an earlier fit of the same Trainer
        self._restored = self.state_dict() if goes_on else None
        self._trainer, self._batches = trainer, None
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            warn(
                f"{type(self).__name__} stays inactive: Trainer(overfit_batches=...) trains on the same few batches"
                " again and again. Leave that out to train fairly."
            )
            return
        self._cleanup.callback(replace_train_loader(trainer, lambda given: self._new_loader(given, trainer, pl_module)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: Any) -> None:
        """Forget the batch."""
        if self._batches is not None:
            self._batches.take()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget a batch that Lightning has fetched in vain."""
        if self._batches is not None:
            self._batches.forget()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._cleanup.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no trace in the user's objects: Lightning calls no teardown when training fails."""
        self._cleanup.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and what was learnt, to go on from there."""
        if self._batches is None or self._trainer is None:
            return {}
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        sampler = self._batches.sampler.state_dict(progress.processed)  # worker processes have fetched more
        return {"sampler": sampler, "learnt": self.learnt()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training data is known."""
        self._restored = state_dict or None
        if self._batches is not None:
            self._restore(self._batches.sampler)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what there is to know about the fit, not the Trainer, module and data it was made with."""
        live = {"_cleanup": ExitStack(), "_batches": None, "_trainer": None}
        return {**vars(self), **live}

    def _restore(self, sampler: FairSampler) -> None:
        """Go on from a checkpoint, if there is one that nothing has gone on from yet."""
        if self._restored is not None:
            sampler.load_state_dict(self._restored["sampler"])
            self.go_on_from(self._restored["learnt"])
            self._restored = None

    def _check_alone(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [one for one in callbacks if isinstance(one, FairBatch | Baseline) and one is not self]
        if others:
            names = f"{type(self).__name__} and {type(others[0]).__name__}"
            raise ValueError(
                f"Expected one way to fair training but got {names}, each of which decides about the batches. Leave one"
                " of them out of Trainer(callbacks=...)."
            )

    def _new_loader(self, given: Any, trainer: Trainer, module: LightningModule) -> Any:
        """Return what Lightning was about to train on, with other samples or in other batches."""
        found = TrainLoader.find(given, self._loader, type(self).__name__)
        before, index = self._batches, GroupIndex.from_dataset(found.loader.dataset, self._labels, self._groups)
        dataset, epoch_size = found.loader.dataset, found.epoch_size
        if (chosen := self.samples(index)) is not None:
            index, dataset, epoch_size = index.part(chosen), Subset(dataset, chosen.tolist()), len(chosen)
        if before is not None and self.index is not None:
            check_same_cells(self.index, index)
        self.index = index
        processes = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        settings = {"seed": self._seed, "drop_last": found.drop_last, "epoch_size": epoch_size, **processes}
        sampler = FairSampler.from_index(index, found.batch_size, shares=self.shares(index), **settings)
        if before is None:
            self.start(index, found.batch_size * sampler.num_replicas)
        elif not before.sampler.started:  # a place in the epoch that was restored, but not yet gone on from
            sampler.load_state_dict(before.sampler.state_dict())
        self._restore(sampler)
        self._batches = FairBatchSampler(sampler)
        return found.put_back(with_batches(found.loader, self._batches, dataset=dataset))


class ForCriterion(Baseline):
    """A baseline that depends on what is to be equal.

    Args:
        criterion: "equal_opportunity", "equalized_odds" or "demographic_parity".
        positive_label: The label that equal opportunity and demographic parity are about, as the data has it.
        arguments: Of every baseline.
    """

    def __init__(self, criterion: str = "equalized_odds", *, positive_label: int | str = 1, **arguments: Any) -> None:
        if not isinstance(criterion, str) or criterion not in CRITERIA:
            raise ValueError(f"Expected argument `criterion` to be one of {list(CRITERIA)} but got {criterion!r}.")
        super().__init__(**arguments)
        self.criterion, self._positive_label = criterion, positive_label

    def positive(self, index: GroupIndex) -> int:
        """Return the row of the positive label."""
        return positive_row(index, self._positive_label)
