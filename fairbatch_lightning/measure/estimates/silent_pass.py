"""Evaluate the model on samples of the training set, leaving no trace in the training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import Metric

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.interrupts import interrupts_held
from fairbatch_lightning._support.lightning import (
    shadowed,
    shards_weights,
    toggled_parameters_kept,
    training_step_of,
)
from fairbatch_lightning._support.processes import share_first
from fairbatch_lightning._support.rng import preserved_rng
from fairbatch_lightning.batches.delivery import stop_workers, with_batches
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.estimates.base import CellLosses, TrainingRun
from fairbatch_lightning.measure.group_loss import GroupLoss
from fairbatch_lightning.measure.logits import ForwardDone

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Samples = range | Array


class SilentPass:
    """Evaluates the model on training samples of one's choice. The processes share the work.

    The user's own `training_step` is run up to the point where the logits are there, so that whatever it does to a
    batch before the forward pass is done here as well. Modes, gradients, random numbers, logs and metrics are as
    before afterwards.

    Args:
        batch_size: How many samples to evaluate at once; default: four times as many as in training, where that does
            not run out of memory, as there is nothing to keep for a backward pass.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        if batch_size is not None:
            check_at_least("batch_size", batch_size, 1)
        self._batch_size = batch_size
        self._batches = EvaluationBatches()
        self._loader: DataLoader[Any] | None = None
        self._source: DataLoader[Any] | None = None
        self._metric: GroupLoss | None = None

    def measure(self, run: TrainingRun, samples: Samples, seed: int) -> CellLosses:
        """Return the losses of the cells over these samples (indices into the dataset)."""
        with (
            interrupts_held() as interrupts,
            preserved_rng(seed),
            evaluating(run.module, keep_metrics=needs_whole_step(run)),
            torch.no_grad(),
            interrupts.let_through(),
        ):
            try:
                metric = self._measure(run, samples, seed)
            except RuntimeError as error:
                if self._batches.batch_size <= run.loader.batch_size or not _out_of_memory(error):
                    raise
                metric = None
            if metric is None:  # out here the error, and what it holds, is gone
                self._batch_size = run.loader.batch_size
                self.close()
                metric = self._measure(run, samples, seed)
            return CellLosses.of(metric)

    def close(self) -> None:
        """End worker processes."""
        if self._loader is not None:
            stop_workers(self._loader)

    def _measure(self, run: TrainingRun, samples: Samples, seed: int) -> GroupLoss:
        self._batches.choose(samples, *self._sizes(run), run.rank, run.num_replicas)
        metric = self._empty_metric(run)
        numbered = enumerate(self._loader_of(run, seed))
        for number, batch in itertools.islice(numbered, _num_batches(run.trainer)):
            chosen = self._batches.samples(number)
            logits = logits_of(run, batch, number, len(chosen))
            chosen = chosen[chosen >= 0]
            run.add_losses(metric, logits[: len(chosen)], run.index.cells[chosen])
        return metric

    def _empty_metric(self, run: TrainingRun) -> GroupLoss:
        """Return the same metric every time: to make one takes as long as to evaluate a small batch."""
        if self._metric is None or self._metric.device != run.module.device:
            self._metric = run.new_metric()
        self._metric.reset()
        return self._metric

    def _sizes(self, run: TrainingRun) -> tuple[int, int]:
        """Return the smallest and the largest size of batches."""
        size = run.loader.batch_size
        if needs_whole_step(run) or run.loader.has_others or run.has_compiled_parts:
            return size, size  # something may depend on it
        largest = self._batch_size or (size if size == 1 else 4 * size)
        return min(2, largest), largest  # a single sample may be a special case

    def _loader_of(self, run: TrainingRun, seed: int) -> DataLoader[Any]:
        """Return the user's loader with the chosen batches; kept, so that persistent workers persist."""
        if self._loader is None or self._source is not run.loader.loader:
            self.close()
            self._loader = with_batches(run.loader.loader, self._batches, generator=torch.Generator())
            self._source = run.loader.loader
        self._loader.generator.manual_seed(seed)
        return self._loader


class EvaluationBatches(Sampler[list[int]]):
    """Some samples in order, split over the processes, which all get the same number of equally large batches.

    >>> batches = EvaluationBatches()
    >>> batches.choose(range(5), smallest=1, largest=2, rank=0, num_replicas=2)
    >>> list(batches)
    [[0, 2], [4, 0]]
    """

    drop_last = False
    batch_size = 1
    sampler = range(0)

    def choose(self, samples: Samples, smallest: int, largest: int, rank: int, num_replicas: int) -> None:
        """Make batches of these samples (indices into the dataset), of `smallest` to `largest` each."""
        self._samples, self._rank, self._num_replicas = samples, rank, num_replicas
        per_process = -(-len(samples) // num_replicas)
        self._num_batches = -(-per_process // largest)
        self.batch_size = max(-(-per_process // self._num_batches), smallest)
        self.sampler = range(self._num_batches * self.batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            samples = self.samples(number)
            yield np.where(samples < 0, self._samples[0], samples).tolist()

    def samples(self, number: int) -> Array:
        """Return the samples of a batch; -1 for those that only fill it up, and must not be counted."""
        places = np.arange(number * self.batch_size, (number + 1) * self.batch_size) * self._num_replicas + self._rank
        chosen = np.asarray(self._samples[places[0] : places[-1] + 1 : self._num_replicas], np.int64)
        return np.append(chosen, np.full(len(places) - len(chosen), -1)) if len(chosen) < len(places) else chosen


def logits_of(run: TrainingRun, batch: Any, number: int, batch_size: int) -> Tensor:
    """Return the logits that the module's `training_step` computes for a batch from the loader."""
    step, arguments = training_step_of(run.trainer, run.module, run.loader.wrap(batch), number)
    run.reader.expect(batch_size, stop=not needs_whole_step(run))
    output = None
    try:
        with run.trainer.precision_plugin.train_step_context():
            output = step(*arguments)
    except ForwardDone:
        pass
    except BaseException:
        run.reader.drop()
        raise
    return run.reader.require(output, batch_size)


def needs_whole_step(run: TrainingRun) -> bool:
    """Return whether `training_step` has to run to its end: it returns the logits, or must not be left half-way.

    That is so where weights are sharded, or the hook for the logits is compiled.
    """
    compiled = run.reader.is_compiled and run.module.automatic_optimization
    return run.reader.training_step_returns or compiled or shards_weights(run.trainer)


def check_can_evaluate(run: TrainingRun) -> None:
    """Refuse a step that would have to run to its end but must not."""
    if shards_weights(run.trainer) and not run.module.automatic_optimization:
        raise RuntimeError(
            f"With {type(run.trainer.strategy).__name__} FairBatch has to run `training_step` to its end, which would"
            " train the model under manual optimization. Use automatic optimization, or the strategy ddp."
        )


@contextmanager
def evaluating(module: LightningModule, *, keep_metrics: bool) -> Iterator[None]:
    """Put a module into evaluation mode for a while, with its logging off.

    Modes, buffers, gradients and what `toggle_optimizer` changes are restored; also if an error comes, but an interrupt
    has to be held until that is done.
    """
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    metrics = [part for part in module.modules() if isinstance(part, Metric) and keep_metrics]
    states = [(metric, _state(metric)) for metric in metrics]
    try:
        share_first([buffer for buffer, _ in buffers])  # BatchNorm's statistics differ between processes
        for parameter, _, _ in parameters:
            parameter.grad = None
        module.eval()
        with shadowed(module, log=_ignore, log_dict=_ignore), toggled_parameters_kept(module):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for metric, state in states:
            vars(metric).update(state)
        for buffer, value in buffers:
            buffer.copy_(value)
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad).grad = grad


def _out_of_memory(error: RuntimeError) -> bool:
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def _num_batches(trainer: Trainer) -> int | None:
    """Return after how many batches to stop: only a `fast_dev_run` does not want to see all of them."""
    return int(trainer.num_training_batches) if trainer.fast_dev_run else None  # type: ignore[attr-defined]


def _state(metric: Metric) -> dict[str, Any]:
    """Return what `Metric.update` changes, as a copy."""
    kept = {"_update_count": metric._update_count, "_computed": metric._computed}
    states = metric._copy_state_dict()
    return {**states, **kept}


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of `log`."""
