"""What baselines have in common that add to the loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.devices import to_device
from fairbatch_lightning._support.lightning import shadowed
from fairbatch_lightning.batches.train_loader import TrainLoader
from fairbatch_lightning.callbacks.base import ChangesBatches, LoadedData
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.measure.evidence import Evidence
from fairbatch_lightning.measure.logits import LogitsReader
from fairbatch_lightning.measure.outputs import returned_logits
from fairbatch_lightning.measure.per_sample import PerSampleLoss, SampleLoss, resolve_loss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LossChanging(ChangesBatches):
    """A baseline that adds to the loss.

    Args:
        loss: The loss that is trained with, as a function `(logits, labels) -> values` with one value per sample; None
            for cross-entropy (binary for logits of shape `(B,)` or `(B, 1)`).
        logits: The name of the submodule that computes the logits, as for FairBatch.
        arguments: Of every callback that changes batches: groups, labels, loader, seed.
    """

    def __init__(self, *, loss: PerSampleLoss | None = None, logits: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        if isinstance(loss, str):
            raise ValueError(
                f"Expected argument `loss` of {type(self).__name__} to be None or a function (logits, labels) -> values"
                f" that can be differentiated but got {loss!r}."
            )
        self._loss, self._logits = resolve_loss(loss), logits
        self._reader = LogitsReader(type(self).__name__, logits)
        self._in_training_batch = False
        self._module: LightningModule | None = None
        self._given: TrainLoader | None = None
        self._evidence: Evidence | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the module and the data."""
        return {**super().__getstate__(), "_module": None, "_given": None, "_evidence": None}

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what is added to the loss of a batch.

        Args:
            logits: What the model says, with its gradient: `(B,)`, `(B, 1)` or `(B, C)`.
            losses: The losses of the samples, `(B,)`.
            cells: The numbers of their cells, `(B,)`.
        """
        raise NotImplementedError

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Stand in the way of the loss."""
        if not module.automatic_optimization:
            self._cleanup.close()
            raise RuntimeError(
                f"{type(self).__name__} changes the loss that `training_step` returns, but with manual optimization"
                " nobody uses that. Use automatic optimization."
            )
        self._reader.attach(module, required=False)  # a submodule may be built only later
        self._cleanup.callback(self._reader.detach)
        step = module.training_step

        @functools.wraps(step)
        def fair_step(*args: Any, **kwargs: Any) -> Any:
            return self._add_to_loss(step, args, kwargs)

        fair_step.__wrapped__ = getattr(step, "__wrapped__", step)  # Lightning looks behind one wrapper only
        self._cleanup.enter_context(shadowed(module, training_step=fair_step))

    def start(self, data: LoadedData) -> None:
        """Know the samples' losses, once batches tell which classes labels are."""
        self._reader.attach(data.module)
        self._classes = ClassNumbers()
        self.reload(data)

    def reload(self, data: LoadedData) -> None:
        """Know the losses of other samples."""
        self._sample_loss = SampleLoss(data.index, self._loss, None, self._classes)
        who, loader = type(self).__name__, data.loader.loader
        self._evidence = Evidence(who, data.index, self._labels, self._groups, self._classes, loader)
        self._module, self._given = data.module, data.loader

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Get ready: other calls of `training_step`, such as in validation, are not for training."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._in_training_batch = self._batches is not None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget the batch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._in_training_batch = False

    def _forget(self) -> None:
        super()._forget()
        self._reader, self._in_training_batch = LogitsReader(type(self).__name__, self._logits), False

    def _add_to_loss(self, step: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's `training_step`, and add to the loss that it returns."""
        if not self._in_training_batch or self._batches is None:
            return step(*args, **kwargs)
        if self._module is None or self._given is None or self._evidence is None:
            raise RuntimeError("Expected a fit to be going on, but there is none.")
        self._reader.expect(self._batches.batch_size, keep_graph=True)
        watched = self._evidence.watch(self._module, self._batches.batch_size, None)
        output = step(*args, **kwargs) if watched is None else watched.run(step, *args, **kwargs)
        batch = self._batches.delivered()
        if output is None or batch is None:
            return output
        logits = self._reader.require(output, len(batch.samples))
        given = self._given.unwrap(next(iter([*args, *kwargs.values()])))
        told = returned_logits(output, len(batch.samples)) is logits
        self._evidence.check_step(watched, logits, given, batch.cells, told=told, sure=self._reader.name is not None)
        cells = to_device(torch.from_numpy(batch.cells.astype(np.int64)), logits.device)
        losses = self._sample_loss(logits, cells)
        if not losses.requires_grad:
            raise RuntimeError(
                f"{type(self).__name__} changes the loss, but the gradient is lost on the way to it: return logits"
                " that are not detached, and give a `loss` that can be differentiated."
            )
        term = self.loss_term(logits, losses, cells)
        return {**output, "loss": output["loss"] + term} if isinstance(output, Mapping) else output + term
