"""Ways to give values and pictures to the Trainer's loggers that `self.log` does not have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from fairbatch_lightning._support.lightning import step_to_log_at
from fairbatch_lightning._support.warn import warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def log_at_once(
    trainer: Trainer, values: Mapping[str, float], *, only_csv: bool = False, epoch_ended: bool = False
) -> None:
    """Give values to the loggers, at the step that Lightning is at.

    `self.log` keeps them until the end of an epoch, and takes half a millisecond and a sum over the processes for each.

    Args:
        trainer: The Trainer.
        values: Numbers by name, the same in all processes.
        only_csv: Leave out all loggers but Lightning's CSVLogger: for details that are of no use in curves.
        epoch_ended: Whether they are of an epoch that has just ended: Lightning logs those at the epoch's last step.
    """
    step = step_to_log_at(trainer) - (1 if epoch_ended else 0)
    for logger in trainer.loggers:
        if not only_csv or _is_a(logger, "CSVLogger"):
            logger.log_metrics(dict(values), step=step)
            logger.save()


def show(trainer: Trainer, values: Mapping[str, float], *, in_bar: Collection[str] = ()) -> None:
    """Let values be monitored, as by ModelCheckpoint, and shown in the progress bar, as if `self.log` had got them."""
    tensors = dict(zip(values, torch.tensor(list(values.values())).unbind(), strict=True))
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update((name, values[name]) for name in in_bar)


def log_figure(trainer: Trainer, name: str, draw: Callable[[], Any]) -> None:
    """Show a picture in TensorBoard, if that is where this run is logged and matplotlib is installed."""
    boards: list[Any] = [logger for logger in trainer.loggers if _is_a(logger, "TensorBoardLogger")]
    if boards and trainer.is_global_zero and find_spec("matplotlib") is not None:
        try:
            figure = draw()
            for board in boards:
                board.experiment.add_figure(name, figure, step_to_log_at(trainer))
        except Exception as error:
            warn(f"The picture {name!r} for TensorBoard could not be drawn, and is left out: {error!r}")


def _is_a(logger: object, name: str) -> bool:
    """Return whether a logger is of a class of Lightning's, of whichever of its namespaces."""
    return any(kind.__name__ == name for kind in type(logger).__mro__)
