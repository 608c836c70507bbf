"""What an estimate is: it measures the mean loss of every cell with the current model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.devices import most_precise, to_device
from fairbatch_lightning._support.lightning import has_compiled_parts, is_compiled
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.batches.train_loader import TrainLoader
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.group_loss import GroupLoss
from fairbatch_lightning.measure.logits import LogitsReader
from fairbatch_lightning.measure.per_sample import SampleLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class CellLosses(NamedTuple):
    """What was measured, over all processes: mean losses `(Y, Z)`, NaN where there is no sample, and sample counts."""

    means: Tensor
    counts: Tensor

    @classmethod
    def of(cls, metric: GroupLoss) -> CellLosses:
        """Add up what each process has measured."""
        with metric.sync_context():
            counts = metric.counts.cpu()
            return cls(metric.sums.cpu().double() / counts, counts.clone())

    @classmethod
    def load(cls, saved: Saved, shape: tuple[int, int]) -> CellLosses:
        """Return a measurement of `(Y, Z)` cells from a checkpoint."""
        means, counts = saved.several(2)
        return cls(means.tensor(*shape), counts.tensor(*shape, finite=True, least=0))

    def together_with(self, earlier: CellLosses, kept: float) -> CellLosses:
        """Return what this measurement and an earlier one say, of whose samples only a part is `kept`.

        What was not finite this time stays so; what was not the last time does not count.

        >>> now = CellLosses(torch.tensor([[1.0]]), torch.tensor([[2]]))
        >>> now.together_with(CellLosses(torch.tensor([[0.0]]), torch.tensor([[12]])), kept=0.5)
        CellLosses(means=tensor([[0.2500]]), counts=tensor([[8.]]))
        """
        counts, before = self.counts, kept * earlier.counts.where(earlier.means.isfinite(), 0)
        sums = (self.means * counts).where(counts > 0, 0) + (earlier.means * before).where(before > 0, 0)
        return CellLosses(sums / (counts + before), counts + before)


@dataclass(frozen=True)
class TrainingRun:
    """What an estimate has to work with. It stays as it is until the training data is loaded anew."""

    trainer: Trainer
    module: LightningModule
    loader: TrainLoader
    index: GroupIndex
    sample_loss: SampleLoss
    reader: LogitsReader
    rank: int = 0
    num_replicas: int = 1
    seed: int = 0
    """Of the callback; together with the number of the update decides what an estimate draws."""
    labels: Source = None
    """Where the labels are found in a dataset."""
    groups: Source = None
    """Where the groups are found in a dataset."""
    compared: Tensor | None = None
    """The rows that the criterion looks at, `(Y,)`; None for all."""
    starves_cells: bool = True
    """Whether a cell may have next to no share, so that training batches say nothing about it."""
    classes: ClassNumbers = field(default_factory=ClassNumbers)
    """Which of the model's classes labels are, as far as batches have told."""

    @property
    def has_compiled_parts(self) -> bool:
        """Whether something would be compiled anew for batches of another size, or with another hook."""
        return self.is_compiled or has_compiled_parts(self.module)

    @property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` has the hook for the logits inside of what it compiles."""
        return is_compiled(self.module) or self.reader.is_compiled

    @property
    def copies(self) -> int:
        """How many processes see the same samples: with tensor parallelism, all that share a model."""
        return int(self.trainer.world_size) // self.num_replicas

    def new_metric(self) -> GroupLoss:
        """Return an empty measurement on the module's device."""
        device = self.module.device
        return GroupLoss(*self.index.shape, sum_dtype=most_precise(device)).to(device)

    def add_losses(self, metric: GroupLoss, logits: Tensor, cells: Array) -> None:
        """Add samples to a measurement: their logits, and their cells `(B,)`. Waits for no device."""
        numbers = to_device(torch.from_numpy(cells.astype(np.int64)), metric.device)
        metric.add(self.sample_loss(logits, numbers).to(metric.device), numbers)


class Estimate(ABC):
    """Measures the cells' losses. Write a subclass and pass an object of it as `FairBatch(estimate=...)`.

    Only `measure` is needed. An estimate that watches the training, or the validation, is shown their batches. Every
    fit gets a copy of the object.

    >>> class LastBatch(Estimate):
    ...     '''Knows nothing but the last training batch.'''
    ...     watches_training = True
    ...     def observe(self, run, logits, cells):
    ...         self.metric = run.new_metric()
    ...         run.add_losses(self.metric, logits, cells)
    ...     def measure(self, run, update, *, uniform):
    ...         return CellLosses.of(self.metric)
    """

    watches_training = False
    """Whether it is shown the logits of training batches."""
    watches_validation = False
    """Whether it is told of validations; the shares are then updated after each of them, not after epochs."""

    def start(self, run: TrainingRun) -> None:  # noqa: B027 - optional, as all that follow
        """Forget what was observed: a fit begins."""

    def check(self, run: TrainingRun) -> None:  # noqa: B027
        """Refuse what cannot work: the training begins."""

    def observe(self, run: TrainingRun, logits: Tensor, cells: Array) -> None:  # noqa: B027
        """See the logits of a training batch, and the cells of its samples `(B,)`."""

    def before_validation(self, run: TrainingRun) -> None:  # noqa: B027
        """Get ready for a pass over the validation set."""

    def before_validation_batch(self, run: TrainingRun, loader: int) -> None:  # noqa: B027
        """Get ready for the next batch of the validation loader with this number."""

    def after_validation_batch(self, run: TrainingRun, output: Any, batch: Any) -> None:  # noqa: B027
        """See what `validation_step` returned for the batch."""

    @abstractmethod
    def measure(self, run: TrainingRun, update: int, *, uniform: bool) -> CellLosses:
        """Return the losses of the cells as of now.

        Args:
            run: What there is to work with.
            update: The number of the update that this is for, from 0.
            uniform: Whether training batches hold a cell's samples equally often, so that they tell its loss.
        """

    def state_dict(self, run: TrainingRun, *, alone: bool) -> dict[str, Any]:
        """Return what is to be saved in a checkpoint; called on all processes, unless this one is `alone`."""
        return {}

    def load_state_dict(self, run: TrainingRun, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what was saved, perhaps by another estimate."""

    def close(self) -> None:  # noqa: B027
        """Let go of what the fit needed."""


def on_modules_device(metric: GroupLoss, run: TrainingRun) -> GroupLoss:
    """Return a measurement where the module is: it may have been made before the module was moved."""
    return metric if metric.device == run.module.device else metric.to(run.module.device)
