"""What baselines have in common that add to the loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning.baselines.base import Baseline
from fairbatch_lightning.capture import LogitsCapture, not_a_submodule, shadowed, watch
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.loaders import fetches_itself
from fairbatch_lightning.losses import PerSampleLoss, SampleLoss, resolve_loss
from fairbatch_lightning.metrics import to_device

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class LossChanging(Baseline):
    """A baseline that adds to the loss.

    Args:
        loss: The loss that is trained with, as a function `(logits, labels) -> values` with one value per sample; None
            for cross-entropy (binary for logits of shape `(B,)` or `(B, 1)`).
        logits: The name of the submodule that computes the logits, as for FairBatch.
        arguments: Of every baseline.
    """

    def __init__(self, *, loss: PerSampleLoss | None = None, logits: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loss, self._logits = resolve_loss(loss), logits
        self._capture: LogitsCapture | None = None
        self._in_training_batch = False

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what is added to the loss of a batch.

        Args:
            logits: What the model says, with its gradient: `(B,)`, `(B, 1)` or `(B, C)`.
            losses: The losses of the samples, `(B,)`.
            cells: The numbers of their cells, `(B,)`.
        """
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in the way of the train DataLoader and of the loss."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return
        if not pl_module.automatic_optimization:
            self._cleanup.close()
            raise RuntimeError(
                f"{type(self).__name__} changes the loss that `training_step` returns, but with manual optimization"
                " nobody uses that. Use automatic optimization."
            )
        self._in_training_batch, self._capture = False, None
        self._watch(pl_module)  # a submodule may be built only later
        step = pl_module.training_step

        @functools.wraps(step)
        def fair_step(*args: Any, **kwargs: Any) -> Any:
            return self._add_to_loss(step, args, kwargs)

        fair_step.__wrapped__ = getattr(step, "__wrapped__", step)  # Lightning looks behind one wrapper only
        self._cleanup.enter_context(shadowed(pl_module, training_step=fair_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Get ready: other calls of `training_step`, such as in validation, are not for training."""
        self._in_training_batch = self._batches is not None
        if self._batches is not None and fetches_itself(trainer):
            self._batches.forget()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: Any) -> None:
        """Forget the batch."""
        self._in_training_batch = False
        super().on_train_batch_end(trainer, pl_module, *others)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the module."""
        return {**super().__getstate__(), "_capture": None}

    def _new_loader(self, given: Any, trainer: Trainer, module: LightningModule) -> Any:
        self._watch(module)
        if self._capture is None:
            raise ValueError(not_a_submodule(module, self._logits))
        loader = super()._new_loader(given, trainer, module)
        if self.index is not None:
            self._sample_loss = SampleLoss(self.index, self._loss, None)
        return loader

    def _watch(self, module: LightningModule) -> None:
        before, self._capture = self._capture, watch(self._capture, module, self._logits)
        if self._capture is not None and before is None:
            self._cleanup.callback(self._capture.remove)

    def _add_to_loss(self, step: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's `training_step`, and add to the loss that it returns."""
        if not self._in_training_batch or self._batches is None or self._capture is None or self.index is None:
            return step(*args, **kwargs)
        self._capture.arm(self._batches.batch_size, keep_graph=True)
        output = step(*args, **kwargs)
        captured, batch = self._capture.take(), self._batches.delivered()
        if output is None or batch is None:
            return output
        returned = returned_logits(output, len(batch.samples)) if self._logits is None else None
        logits = captured if returned is None else returned
        if logits is None:
            raise RuntimeError(no_logits(len(batch.samples), callback=type(self).__name__))
        cells = to_device(torch.from_numpy(batch.cells.astype(np.int64)), logits.device)
        losses = self._sample_loss(logits, cells)
        if not losses.requires_grad:
            raise RuntimeError(
                f"{type(self).__name__} changes the loss, but the gradient is lost on the way to it: return logits"
                " that are not detached, and give a `loss` that can be differentiated."
            )
        term = self.loss_term(logits, losses, cells)
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
