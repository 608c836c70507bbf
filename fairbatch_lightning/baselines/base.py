"""What all baselines have in common: they change what is trained on, or what is added to the loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning.callback import FairBatch
from fairbatch_lightning.capture import LogitsCapture, not_a_submodule, shadowed, watch
from fairbatch_lightning.columns import Source
from fairbatch_lightning.draws import Array
from fairbatch_lightning.estimate import to_device
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import FairBatchSampler, TrainLoader, replace_train_loader, with_batches
from fairbatch_lightning.losses import PerSampleLoss, SampleLoss, resolve_loss
from fairbatch_lightning.sampler import FairSampler
from fairbatch_lightning.settings import CRITERIA

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Baseline(AnyCallback):
    """A callback that makes training fair in another way than FairBatch; subclasses say how.

    Args:
        criterion: "equal_opportunity", "equalized_odds" or "demographic_parity".
        groups: The sensitive attribute, as for [`FairBatch`][fairbatch_lightning.FairBatch].
        labels: The labels, likewise.
        positive_label: The label that equal opportunity and demographic parity are about, as the data has it.
        loss: The loss per sample, as for FairBatch. For those that change the loss it must be the one trained with.
        logits: The name of the submodule that computes the logits, as for FairBatch.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides the order of the samples.
    """

    changes_loss = False
    """Whether `loss_term` is to be called."""

    def __init__(
        self,
        criterion: str = "equalized_odds",
        *,
        groups: Source = None,
        labels: Source = None,
        positive_label: int | str = 1,
        loss: PerSampleLoss | None = None,
        logits: str | None = None,
        loader: int | str | None = None,
        seed: int = 0,
    ) -> None:
        if criterion not in CRITERIA:
            raise ValueError(f"Expected argument `criterion` to be one of {list(CRITERIA)} but got {criterion!r}.")
        self.criterion = criterion
        self._groups, self._labels, self._positive_label = groups, labels, positive_label
        self._loss, self._logits, self._loader, self._seed = resolve_loss(loss), logits, loader, seed
        self._cleanup = ExitStack()
        self._capture: LogitsCapture | None = None
        self._batches: FairBatchSampler | None = None
        self._batch: list[int] | None = None
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] | None = None
        self.index: GroupIndex | None = None
        """The cell of every sample that is trained on; None before the training data is known."""
        self.positive: int | None = None
        """The row of the positive label, once the training data is known; None for equalized odds, which has none."""

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

    def start(self, index: GroupIndex) -> None:
        """Get ready to train on these samples."""

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what is added to the loss of a batch.

        Args:
            logits: What the model says, with its gradient: `(B,)`, `(B, 1)` or `(B, C)`.
            losses: The losses of the samples, `(B,)`.
            cells: The numbers of their cells, `(B,)`.
        """
        raise NotImplementedError

    def learnt(self) -> dict[str, Any]:
        """Return what the method has learnt so far, for checkpoints."""
        return {}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from what was learnt before a checkpoint; called after `start`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in the way of the train DataLoader and, if need be, of the loss."""
        if stage != "fit":
            return
        self._check_alone(trainer)
        self._restored, self._trainer, self._batches = None, trainer, None
        self._cleanup.callback(replace_train_loader(trainer, lambda given: self._new_loader(given, trainer)))
        if self.changes_loss:
            self._stand_in_the_way_of_the_loss(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Know which samples are in the batch."""
        if self._batches is not None:
            self._batch = self._batches.take()

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

    def _restore(self, sampler: FairSampler) -> None:
        """Go on from a checkpoint, if there is one; only the first loader after it does."""
        if self._restored is not None:
            sampler.load_state_dict(self._restored["sampler"])
            self.go_on_from(self._restored["learnt"])
            self._restored = None

    def _check_alone(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [one for one in callbacks if isinstance(one, FairBatch | Baseline) and one is not self]
        if others:
            names = f"{type(self).__name__} and {type(others[0]).__name__}"
            raise ValueError(f"Expected one way to fair training but got {names}: each decides about the batches.")

    def _new_loader(self, given: Any, trainer: Trainer) -> Any:
        """Return what Lightning was about to train on, with other samples or in other batches."""
        found = TrainLoader.find(given, self._loader, type(self).__name__)
        index, dataset = GroupIndex.from_dataset(found.loader.dataset, self._labels, self._groups), found.loader.dataset
        self.index, self.positive = index, None
        if self.criterion != "equalized_odds":
            self.positive = index.row_of(self._positive_label)
        if (chosen := self.samples(index)) is not None:
            self.index, dataset = index.part(chosen), Subset(dataset, chosen.tolist())
        processes = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        settings = {"seed": self._seed, "drop_last": found.drop_last, **processes}
        sampler = FairSampler.from_index(self.index, found.batch_size, shares=self.shares(self.index), **settings)
        self._sample_loss = SampleLoss(self.index, self._loss, None)
        if self._batches is None:
            self.start(self.index)
        self._restore(sampler)
        self._batches = FairBatchSampler(sampler)
        return found.put_back(with_batches(found.loader, self._batches, dataset=dataset))

    def _stand_in_the_way_of_the_loss(self, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise RuntimeError(
                f"{type(self).__name__} changes the loss that `training_step` returns, but with manual optimization"
                " nobody uses that. Use automatic optimization."
            )
        step = module.training_step

        @functools.wraps(step)
        def fair_step(*args: Any, **kwargs: Any) -> Any:
            return self._add_to_loss(step, args, kwargs)

        self._capture = watch(None, module, self._logits)
        if self._capture is None:
            raise ValueError(not_a_submodule(module, self._logits))
        self._cleanup.callback(self._capture.remove)
        self._cleanup.enter_context(shadowed(module, training_step=fair_step))

    def _add_to_loss(self, step: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's `training_step`, and add to its loss."""
        if self._batch is None or self._capture is None or self.index is None:
            return step(*args, **kwargs)
        self._capture.arm(len(self._batch), keep_graph=True)
        output = step(*args, **kwargs)
        logits = self._capture.take()
        if output is None:
            return None
        if logits is None:
            logits = returned_logits(output, len(self._batch))
        if logits is None:
            raise RuntimeError(no_logits(len(self._batch), callback=type(self).__name__))
        cells = to_device(torch.from_numpy(self.index.cells[self._batch].astype(np.int64)), logits.device)
        term = self.loss_term(logits, self._sample_loss(logits, cells), cells)
        return {**output, "loss": output["loss"] + term} if isinstance(output, Mapping) else output + term


def world_sum(values: Tensor) -> Tensor:
    """Return a sum over all processes, of values without a gradient."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        values = values.clone()
        torch.distributed.all_reduce(values)
    return values


def world_size() -> int:
    """Return the number of processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1
