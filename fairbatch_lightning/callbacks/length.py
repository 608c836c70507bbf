"""How long a training is, in batches, as far as its Trainer says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fairbatch_lightning._support.lightning import batches_ever_trained_on

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

EPOCHS_AT_LEAST = 10
"""How many epochs a training is taken to have if its end is not known."""


def expected_batches(trainer: Trainer, module: LightningModule, batches_per_epoch: int) -> float:
    """Return how many batches the training will have had at its end, the same on all processes.

    The first of Trainer(max_epochs=..., max_steps=..., max_time=...) counts. With EarlyStopping, or without an end, the
    training is taken to be half over: in the first epochs to take ten of them.

    Args:
        trainer: The Trainer.
        module: What it trains.
        batches_per_epoch: How many batches it has in an epoch, where the Trainer does not say.
    """
    done = batches_ever_trained_on(trainer)
    in_epoch = float(trainer.num_training_batches)
    in_epoch = in_epoch if math.isfinite(in_epoch) and in_epoch else float(batches_per_epoch)
    end = min(_by_epochs(trainer, in_epoch), _by_steps(trainer, module, in_epoch, done), _by_time(trainer, done))
    if math.isinf(end) or _may_stop_early(trainer):
        end = min(end, max(EPOCHS_AT_LEAST * in_epoch, 2.0 * done))
    return max(end, done, 1.0)


def _by_epochs(trainer: Trainer, in_epoch: float) -> float:
    limit = trainer.max_epochs
    return math.inf if limit is None or limit < 0 else limit * in_epoch


def _by_steps(trainer: Trainer, module: LightningModule, in_epoch: float, done: int) -> float:
    """Return how many batches it takes until `max_steps`; how many a step takes may have changed before this epoch."""
    if trainer.max_steps < 0:
        return math.inf
    if not module.automatic_optimization:
        batches_per_step = done / trainer.global_step if trainer.global_step else 1.0
        return done + max(0, trainer.max_steps - trainer.global_step) * batches_per_step
    per_step, this_epoch = trainer.accumulate_grad_batches, done % in_epoch
    steps_before = trainer.global_step - this_epoch // per_step
    epochs, steps = divmod(max(0, trainer.max_steps - steps_before), math.ceil(in_epoch / per_step))
    return done - this_epoch + epochs * in_epoch + min(in_epoch, steps * per_step)


def _by_time(trainer: Trainer, done: int) -> float:
    """Return how many batches there will be until `max_time`, if the rest takes as long as those so far."""
    timer: Any = next((one for one in _callbacks(trainer) if _is_a(one, "Timer")), None)
    remaining = None if timer is None else timer.time_remaining()
    if remaining is None:
        return math.inf
    elapsed = timer.time_elapsed()
    batches = done * (elapsed + max(0.0, remaining)) / elapsed if done and elapsed > 0 else math.inf
    return float(trainer.strategy.broadcast(batches))


def _may_stop_early(trainer: Trainer) -> bool:
    return any(_is_a(one, "EarlyStopping") for one in _callbacks(trainer))


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)


def _is_a(callback: object, name: str) -> bool:
    """Return whether it is Lightning's callback of this name, of either of its namespaces, or derives from it."""
    return any(
        base.__name__ == name and base.__module__.startswith(("lightning.", "pytorch_lightning."))
        for base in type(callback).__mro__
    )
