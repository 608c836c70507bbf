"""What an estimate is: it measures the mean loss of every cell with the current model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning.capture import LogitsCapture
from fairbatch_lightning.columns import Source
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import TrainLoader
from fairbatch_lightning.losses import SampleLoss
from fairbatch_lightning.metrics import GroupLoss, to_device

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass
class TrainingRun:
    """What an estimate has to work with."""

    trainer: Trainer
    module: LightningModule
    loader: TrainLoader
    index: GroupIndex
    sample_loss: SampleLoss
    capture: LogitsCapture
    rank: int = 0
    num_replicas: int = 1
    seed: int = 0
    """Of the callback; together with `num_updates` decides what an estimate draws."""
    labels: Source = None
    """Where the labels are found in a dataset."""
    groups: Source = None
    """Where the groups are found in a dataset."""
    compared: Tensor | None = None
    """The rows that the criterion looks at, `(Y,)`; None for all."""
    uniform: bool = True
    """Whether training batches hold a cell's samples equally often, so that they tell its loss."""
    num_updates: int = 0
    """How many updates there have been."""
    whole_step: bool = False
    """Whether `training_step` has to run to its end: because it returns the logits, or see `needs_whole_step`."""
    logits_returned: bool = False
    """Whether the logits are what `training_step` returns, as `{"logits": ...}`."""
    failed: bool = False
    """Whether an exception has ended the fit: the other processes may be gone, so wait for none of them."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """What an estimate wants done at the end of the fit."""

    @property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` has the hook inside of what it compiles."""
        return getattr(self.module, "_compiler_ctx", None) is not None or self.capture.is_compiled

    @property
    def copies(self) -> int:
        """How many processes see the same samples: with tensor parallelism, all that share a model."""
        return int(self.trainer.world_size) // self.num_replicas

    def new_metric(self) -> GroupLoss:
        """Return an empty measurement on the module's device."""
        device = self.module.device
        sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        return GroupLoss(*self.index.shape, sum_dtype=sum_dtype).to(device)

    def add_losses(self, metric: GroupLoss, logits: Tensor, cells: np.ndarray[Any, Any]) -> None:
        """Add samples to a measurement: their logits, and their cells `(B,)`. Waits for no device."""
        numbers = to_device(torch.from_numpy(cells.astype(np.int64)), metric.device)
        metric.add(self.sample_loss(logits, numbers).to(metric.device), numbers)


class Estimate(ABC):
    """Measures the cells' losses. Write a subclass and pass an object of it as `FairBatch(estimate=...)`.

    Only `measure` is needed. An estimate that watches the training is shown the logits of every batch in `observe`.
    Every fit gets a copy of the object.
    """

    watches_training = False

    @abstractmethod
    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells as of now: on each process its own part, which are then added up.

        Look at them before the next measurement, which may use the same object again.
        """

    def start(self, run: TrainingRun) -> None:  # noqa: B027 - optional
        """Forget what was observed: a fit begins."""

    def observe(self, run: TrainingRun, logits: Tensor, cells: np.ndarray[Any, Any]) -> None:  # noqa: B027 - optional
        """See the logits of a training batch, and the cells of its samples `(B,)`."""

    def state_dict(self, run: TrainingRun) -> dict[str, Any]:
        """Return what is to be saved in a checkpoint; called on all processes."""
        return {}

    def load_state_dict(self, run: TrainingRun, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Go on from what was saved, perhaps by another estimate."""


def on_modules_device(metric: GroupLoss, run: TrainingRun) -> GroupLoss:
    """Return a measurement where the module is: it may have been made before the module was moved."""
    return metric if metric.device == run.module.device else metric.to(run.module.device)
