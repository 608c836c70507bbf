"""Evaluate the model on samples of the training set, leaving no trace in the training."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import Metric

from fairbatch_lightning._random import preserved_rng
from fairbatch_lightning.capture import ForwardDone, shadowed
from fairbatch_lightning.estimate import TrainingRun
from fairbatch_lightning.loaders import stop_workers, with_batches
from fairbatch_lightning.losses import find_logits
from fairbatch_lightning.metrics import GroupLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Samples = range | np.ndarray[Any, Any]


class Evaluation:
    """Evaluates the model on training samples of one's choice. The processes share the work.

    The user's own `training_step` is run up to the point where the logits are there, so that whatever it does to a
    batch before the forward pass is done here as well. Modes, gradients, random numbers, logs and metrics are as
    before afterwards.

    Args:
        batch_size: How many samples to evaluate at once; default: four times as many as in training, where that does
            not run out of memory, as there is nothing to keep for a backward pass.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 1):
            raise ValueError(f"Expected argument `batch_size` to be a positive integer but got {batch_size!r}.")
        self._batch_size: int | None = batch_size
        self._batches = EvaluationBatches()
        self._loader: DataLoader[Any] | None = None
        self._source: DataLoader[Any] | None = None
        self._metric: GroupLoss | None = None

    def measure(self, run: TrainingRun, samples: Samples) -> GroupLoss:
        """Return the losses of the cells over these samples (indices into the dataset), until the next measurement."""
        seed = run.num_updates
        with preserved_rng(seed), evaluating(run.module, keep_metrics=run.whole_step), torch.no_grad():
            try:
                return self._measure(run, samples, seed)
            except RuntimeError as error:
                if self._batches.batch_size <= run.loader.batch_size or not _out_of_memory(error):
                    raise
            self._batch_size = run.loader.batch_size
            self._stop_workers()
            return self._measure(run, samples, seed)

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
        if run.whole_step or run.loader.has_others or _is_compiled(run):
            return size, size  # something may depend on it
        largest = self._batch_size or (size if size == 1 else 4 * size)
        return min(2, largest), largest  # a single sample may be a special case

    def _loader_of(self, run: TrainingRun, seed: int) -> DataLoader[Any]:
        """Return the user's loader with the chosen batches; kept, so that persistent workers persist."""
        if self._loader is None:
            run.cleanup.callback(self._stop_workers)
        if self._loader is None or self._source is not run.loader.loader:
            self._stop_workers()
            self._loader = with_batches(run.loader.loader, self._batches, generator=torch.Generator())
            self._source = run.loader.loader
        self._loader.generator.manual_seed(seed)
        return self._loader

    def _stop_workers(self) -> None:
        if self._loader is not None:
            stop_workers(self._loader)


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

    def samples(self, number: int) -> np.ndarray[Any, Any]:
        """Return the samples of a batch; -1 for those that only fill it up, and must not be counted."""
        places = np.arange(number * self.batch_size, (number + 1) * self.batch_size) * self._num_replicas + self._rank
        chosen = np.asarray(self._samples[places[0] : places[-1] + 1 : self._num_replicas], np.int64)
        return np.append(chosen, np.full(len(places) - len(chosen), -1)) if len(chosen) < len(places) else chosen


def logits_of(run: TrainingRun, batch: Any, number: int, batch_size: int) -> Tensor:
    """Return the logits that the module's `training_step` computes for a batch from the loader."""
    step, arguments = _training_step(run, run.loader.wrap(batch), number)
    if not run.logits_returned:
        run.capture.arm(batch_size, stop=not run.whole_step)
    output = None
    try:
        with run.trainer.precision_plugin.train_step_context():
            output = step(*arguments)
    except ForwardDone:
        pass
    finally:
        logits = run.capture.take()
    logits = returned_logits(output, batch_size) if logits is None else logits
    if logits is None:
        raise RuntimeError(no_logits(batch_size))
    return logits


def returned_logits(output: Any, batch_size: int) -> Tensor | None:
    """Return the logits in what a `training_step` returned, if it did: a loss alone is not."""
    logits = None if isinstance(output, Tensor) else find_logits(output)
    return logits if logits is not None and logits.ndim > 0 and len(logits) == batch_size else None


def _training_step(run: TrainingRun, batch: Any, number: int) -> tuple[Callable[..., Any], Iterable[Any]]:
    """Return the module's `training_step` and its arguments, as Lightning would call it."""
    trainer, module = run.trainer, run.module
    step: Callable[..., Any] = module.training_step
    if getattr(module, "_compiler_ctx", None) is not None:  # torch.compile has put a compiled one in front of it
        step = functools.partial(type(module).training_step, module)
    if _takes_iterator(type(module).training_step):
        return step, [iter([(batch, number, 0)])]
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    return step, trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number).values()


@functools.lru_cache(maxsize=16)
def _takes_iterator(training_step: Callable[..., Any]) -> bool:
    return "dataloader_iter" in inspect.signature(training_step).parameters


def no_logits(batch_size: int, step: str = "training_step", callback: str = "FairBatch") -> str:
    """Return what to tell the user when the logits of a batch are not to be found."""
    return (
        f"{callback} found no logits for a batch of {batch_size} samples: `{step}` did not call `self(x)`, or the"
        " output of that is not a tensor, mapping or object with `logits` of that many rows. Either name the submodule"
        f' that computes them, {callback}(logits="net"), or return {{"loss": loss, "logits": logits}} from `{step}`.'
    )


def needs_whole_step(run: TrainingRun) -> bool:
    """Return whether a forward pass must not be left half-way: its weights are sharded, or the hook is compiled."""
    sharded = type(run.trainer.strategy).__name__ in ("ModelParallelStrategy", "FSDPStrategy", "DeepSpeedStrategy")
    if sharded and not run.module.automatic_optimization:
        raise RuntimeError(
            f"With {type(run.trainer.strategy).__name__} FairBatch has to run `training_step` to its end, which would"
            " train the model under manual optimization. Use automatic optimization, or the strategy ddp."
        )
    return sharded or (run.capture.is_compiled and run.module.automatic_optimization)


@contextmanager
def evaluating(module: LightningModule, *, keep_metrics: bool) -> Iterator[None]:
    """Put a module into evaluation mode for a while, with its logging off.

    Modes, buffers, gradients and what `toggle_optimizer` changes are restored.
    """
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    toggled = dict(module._param_requires_grad_state)
    _share_buffers(buffers)
    for parameter, _, _ in parameters:
        parameter.grad = None
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
        for buffer, value in buffers:
            buffer.copy_(value)
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad).grad = grad
        module._param_requires_grad_state = toggled


def _share_buffers(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Give all processes the first one's buffers: BatchNorm's statistics differ between them."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        for buffer, _ in buffers:
            dist.broadcast(buffer, src=0)


def _is_compiled(run: TrainingRun) -> bool:
    """Return whether batches of another size would have something compiled anew."""
    return run.is_compiled or any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in run.module.modules()
    )


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
