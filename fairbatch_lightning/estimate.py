"""Estimates: measure the mean loss of every cell with the current model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import Metric

from fairbatch_lightning._random import preserved_rng
from fairbatch_lightning.capture import ForwardDone, LogitsCapture, shadowed
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import TrainLoader, with_batches
from fairbatch_lightning.losses import SampleLoss, find_logits
from fairbatch_lightning.metrics import GroupLoss

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
    rank: int
    num_replicas: int
    whole_step: bool = False
    """Whether the logits are what `training_step` returns, so that it has to run to its end."""

    def new_metric(self) -> GroupLoss:
        """Return an empty measurement on the module's device."""
        device = self.module.device
        sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        return GroupLoss(*self.index.shape, sum_dtype=sum_dtype).to(device)


class Estimate(Protocol):
    """Measures the cells' losses. Pass an object of your own as `FairBatch(estimate=...)`."""

    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells as of now."""
        ...


class ExactEstimate:
    """Evaluates the model on every training sample, as the paper does. The processes share the work.

    The user's own `training_step` is run up to the point where the logits are there, so that whatever it does to a
    batch before the forward pass is done here as well. Modes, gradients, random numbers, logs and metrics are as
    before afterwards.
    """

    def __init__(self) -> None:
        self._loader: DataLoader[Any] | None = None
        self._source: DataLoader[Any] | None = None

    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells over the whole training set."""
        metric = run.new_metric()
        samples = range(run.rank, len(run.index), run.num_replicas)
        with preserved_rng(), evaluating(run.module, keep_metrics=run.whole_step), torch.no_grad():
            start, limit = 0, _num_batches(run.trainer)
            for number, batch in enumerate(self._batches(run, samples)):
                chosen = samples[start : start + run.loader.batch_size]
                rows, columns = run.index.labels_and_groups(slice(chosen.start, chosen.stop, chosen.step))
                logits = logits_of(run, run.loader.wrap(batch), number, len(chosen))
                losses = run.sample_loss(logits, rows)
                metric.update(losses.to(metric.device), rows.to(metric.device), columns.to(metric.device))
                start += len(chosen)
                if number + 1 >= limit:
                    break
        return metric

    def _batches(self, run: TrainingRun, samples: range) -> DataLoader[Any]:
        """Return the user's loader with all samples in order; kept, so that persistent workers persist."""
        if self._loader is None or self._source is not run.loader.loader:
            batches = BatchSampler(samples, run.loader.batch_size, drop_last=False)
            self._loader = with_batches(run.loader.loader, batches, generator=torch.Generator())
            self._source = run.loader.loader
        return self._loader


def logits_of(run: TrainingRun, batch: Any, number: int, batch_size: int) -> Tensor:
    """Return the logits that the module's `training_step` computes for a batch from the loader."""
    trainer = run.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    batch = run.module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    step = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number)
    run.capture.arm(batch_size, stop=True)
    output = None
    try:
        with trainer.precision_plugin.train_step_context():
            output = run.module.training_step(*step.values())
    except ForwardDone:
        pass
    finally:
        logits = run.capture.take()
    logits = find_logits(output) if logits is None else logits
    if logits is None or len(logits) != batch_size:
        raise RuntimeError(no_logits(batch_size))
    return logits


def no_logits(batch_size: int) -> str:
    """Return what to tell the user when the logits of a batch are not to be found."""
    return (
        f"FairBatch found no logits for a batch of {batch_size} samples: `training_step` did not call `self(x)`, or the"
        " output of that is not a tensor, mapping or object with `logits` of that many rows. Either name the submodule"
        ' that computes them, FairBatch(logits="net"), or return {"loss": loss, "logits": logits} from `training_step`.'
    )


@contextmanager
def evaluating(module: LightningModule, *, keep_metrics: bool) -> Iterator[None]:
    """Put a module into evaluation mode for a while, with its logging off, and leave no trace."""
    modes = [(part, part.training) for part in module.modules()]
    metrics = [part for part in module.modules() if isinstance(part, Metric) and keep_metrics]
    states = [(metric, _state(metric)) for metric in metrics]
    module.eval()
    try:
        with shadowed(module, log=_ignore, log_dict=_ignore):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for metric, state in states:
            vars(metric).update(state)


def _num_batches(trainer: Trainer) -> float:
    """Return after how many batches to stop: only a `fast_dev_run` does not want to see all of them."""
    return trainer.num_training_batches if trainer.fast_dev_run else float("inf")  # type: ignore[attr-defined]


def _state(metric: Metric) -> dict[str, Any]:
    """Return what `Metric.update` changes, as a copy."""
    kept = {"_update_count": metric._update_count, "_computed": metric._computed}
    states = metric._copy_state_dict()
    return {**states, **kept}


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of `log`."""
