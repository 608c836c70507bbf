"""Everything of Lightning's that is private, and what it does unasked: whoever updates Lightning reads this file.

Nothing here imports Lightning: the objects come from the user's Trainer, of whichever of its namespaces.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def replace_train_loader(trainer: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let a Trainer train on what `change` makes of the DataLoaders it is given; return how to undo that."""
    source = trainer.fit_loop._data_source
    request = source.dataloader

    def changed() -> Any:
        try:
            return change(request())
        except BaseException:
            _unpatch_loaders()
            raise

    source.dataloader = changed
    return lambda: vars(source).pop("dataloader", None)


def _unpatch_loaders() -> None:
    """Take back what Lightning patches while it asks for loaders, and leaves there if that fails.

    With every failure it would be one layer more, until Python's stack is too small for them.
    """
    for base in (DataLoader, BatchSampler):
        for cls in (base, *_subclasses(base)):
            for name in ("__setattr__", "__delattr__", "__init__"):
                if (before := vars(cls).get(f"__old{name}")) is not None:
                    setattr(cls, name, before)
                    delattr(cls, f"__old{name}")


def _subclasses(base: type) -> set[type]:
    direct: list[type] = type.__subclasses__(base)
    return {found for one in direct for found in (one, *_subclasses(one))}


def processes_of(trainer: Any) -> dict[str, int]:
    """Return how many processes share the training samples, and this one's number among them."""
    return trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}


def is_spawned(trainer: Any) -> bool:
    """Return whether Lightning starts the processes that train, and they are Pythons of their own (`ddp_spawn`).

    They end as every Python does; those of `ddp_fork` skip that, and those of `ddp` are the user's script.
    """
    return getattr(trainer.strategy.launcher, "_start_method", None) == "spawn"


def is_combined(given: Any) -> bool:
    """Return whether this is Lightning's CombinedLoader; of either namespace, so its class does not tell."""
    return hasattr(given, "iterables") and hasattr(given, "flattened")


def combined_mode(given: Any) -> str:
    """Return how a CombinedLoader goes through its loaders."""
    return str(given._mode)


def fetches_itself(trainer: Any) -> bool:
    """Return whether `training_step` takes `dataloader_iter`, and with it as many batches as it likes."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def batches_trained_on(trainer: Any) -> int:
    """Return how many batches of the epoch were trained on; worker processes have fetched more."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def batches_ever_trained_on(trainer: Any) -> int:
    """Return how many batches there were in all epochs, before a resumed run too; none that failed on the way."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def validation_is_due(trainer: Any) -> bool:
    """Return whether a validation follows the last batch that was trained on, or is going on."""
    loop = trainer.fit_loop.epoch_loop
    batches, timed = loop.batch_progress.current, getattr(trainer, "_val_check_time_interval", None) is not None
    if batches.processed < batches.ready or (trainer.val_check_batch is None and not timed):
        return False  # within the next batch, or before the first
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def held_out_loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    """Return the DataLoaders of the validation or test that is going on."""
    combined = trainer._evaluation_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def held_out_mode(trainer: Trainer) -> str:
    """Return how the validation or test that is going on goes through its DataLoaders: usually "sequential"."""
    combined = trainer._evaluation_loop._combined_loader
    return "sequential" if combined is None else combined_mode(combined)


def step_to_log_at(trainer: Trainer) -> int:
    """Return the step at which Lightning would log now."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_compiled(module: LightningModule) -> bool:
    """Return whether the module is what `torch.compile` made of a LightningModule."""
    return getattr(module, "_compiler_ctx", None) is not None


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether a module or a part of it was compiled by `torch.compile` or `module.compile()`."""
    parts = module.modules()
    return getattr(module, "_compiler_ctx", None) is not None or any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in parts
    )


def training_step_of(trainer: Any, module: Any, batch: Any, number: int) -> tuple[Callable[..., Any], Iterable[Any]]:
    """Return the module's `training_step` and its arguments for a batch of the loader, as Lightning would call it."""
    step: Callable[..., Any] = module.training_step
    if is_compiled(module):  # torch.compile has put a compiled one in front of it
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


def shards_weights(trainer: Any) -> bool:
    """Return whether no process has all weights, so that a forward pass must not be left half-way."""
    return type(trainer.strategy).__name__ in ("ModelParallelStrategy", "FSDPStrategy", "DeepSpeedStrategy")


@contextmanager
def toggled_parameters_kept(module: Any) -> Iterator[None]:
    """Restore what `toggle_optimizer` notes down."""
    toggled = dict(module._param_requires_grad_state)
    try:
        yield
    finally:
        module._param_requires_grad_state = toggled


@contextmanager
def shadowed(instance: object, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes for a while, behind the back of its class."""
    before = {name: vars(instance)[name] for name in attributes if name in vars(instance)}
    vars(instance).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(instance)[name]
        vars(instance).update(before)


def say_less() -> None:
    """Leave out what Lightning says about every training."""
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{namespace}.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*Experiment logs directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")  # from inside Lightning
