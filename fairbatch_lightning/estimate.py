"""Estimates: measure the mean loss of every cell with the current model."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import Metric

from fairbatch_lightning._random import preserved_rng
from fairbatch_lightning.capture import ForwardDone, LogitsCapture, shadowed
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.loaders import TrainLoader, stop_workers, with_batches
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
    """Whether `training_step` has to run to its end: because it returns the logits, or see `needs_whole_step`."""
    logits_returned: bool = False
    """Whether the logits are what `training_step` returns, as `{"logits": ...}`."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """What an estimate wants done at the end of the fit."""

    @property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` has the hook inside of what it compiles."""
        return getattr(self.module, "_compiler_ctx", None) is not None or self.capture.is_compiled

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
        batches = OrderedBatches(len(run.index), run.loader.batch_size, run.rank, run.num_replicas)
        seed = run.trainer.global_step
        with preserved_rng(seed), evaluating(run.module, keep_metrics=run.whole_step), torch.no_grad():
            numbered = enumerate(self._loader_of(run, batches, seed))
            for number, batch in itertools.islice(numbered, _num_batches(run.trainer)):
                samples = batches.samples(number)
                logits = logits_of(run, batch, number, len(samples))
                samples = samples[samples >= 0]
                rows, columns = run.index.labels_and_groups(samples)
                losses = run.sample_loss(logits[: len(samples)], rows)
                metric.update(losses.to(metric.device), rows.to(metric.device), columns.to(metric.device))
        return metric

    def _loader_of(self, run: TrainingRun, batches: OrderedBatches, seed: int) -> DataLoader[Any]:
        """Return the user's loader with these batches; kept, so that persistent workers persist."""
        if self._loader is None:
            run.cleanup.callback(self._stop_workers)
        if self._loader is None or self._source is not run.loader.loader:
            self._stop_workers()
            self._loader = with_batches(run.loader.loader, batches, generator=torch.Generator())
            self._source = run.loader.loader
        self._loader.generator.manual_seed(seed)
        return self._loader

    def _stop_workers(self) -> None:
        if self._loader is not None:
            stop_workers(self._loader)


class OrderedBatches(Sampler[list[int]]):
    """Every sample once, in order, split over the processes, which all get the same number of full batches.

    >>> list(OrderedBatches(5, batch_size=2, rank=0, num_replicas=2))
    [[0, 2], [4, 0]]
    """

    drop_last = False

    def __init__(self, num_samples: int, batch_size: int, rank: int, num_replicas: int) -> None:
        self.batch_size = batch_size
        self._num_samples, self._rank, self._num_replicas = num_samples, rank, num_replicas
        per_process = -(-num_samples // num_replicas)
        self._num_batches = -(-per_process // batch_size)
        self.sampler = range(self._num_batches * batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield np.maximum(self.samples(number), 0).tolist()

    def samples(self, number: int) -> np.ndarray[Any, Any]:
        """Return the samples of a batch; -1 for those that only fill it up, and must not be counted."""
        places = np.asarray(self.sampler[number * self.batch_size : (number + 1) * self.batch_size])
        samples = places * self._num_replicas + self._rank
        return np.where(samples < self._num_samples, samples, -1)


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
    if "dataloader_iter" in inspect.signature(type(module).training_step).parameters:
        return step, [iter([(batch, number, 0)])]
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    return step, trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number).values()


def no_logits(batch_size: int) -> str:
    """Return what to tell the user when the logits of a batch are not to be found."""
    return (
        f"FairBatch found no logits for a batch of {batch_size} samples: `training_step` did not call `self(x)`, or the"
        " output of that is not a tensor, mapping or object with `logits` of that many rows. Either name the submodule"
        ' that computes them, FairBatch(logits="net"), or return {"loss": loss, "logits": logits} from `training_step`.'
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
