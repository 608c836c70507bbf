"""Which samples the batches of a validation or test DataLoader hold, without a look into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fairbatch_lightning._support.lightning import held_out_loaders, held_out_mode
from fairbatch_lightning.batches.train_loader import is_ordinary
from fairbatch_lightning.cells.values import Array

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def samples_of_batches(loader: Any) -> Iterator[Array]:
    """Yield the samples of each batch of a loader, `(B,)`; -1 for those that another process has as well."""
    sampler: Any = loader.batch_sampler.sampler
    position = 0
    for batch in loader.batch_sampler:
        samples = np.asarray(batch, np.int64)
        if isinstance(sampler, DistributedSampler):  # repeats samples, so that all processes have the same number
            places = np.arange(position, position + len(batch)) * sampler.num_replicas + sampler.rank
            samples[places >= len(loader.dataset)] = -1
            position += len(batch)
        yield samples


def num_replicas(loader: Any) -> int:
    """Return how many processes share the loader's samples; more of them see the same."""
    return int(getattr(loader.batch_sampler.sampler, "num_replicas", 1))


def check_held_out(trainer: Trainer, loaders: list[DataLoader[Any]], who: str) -> None:
    """Refuse loaders whose batches cannot be told without them.

    Args:
        trainer: The Trainer.
        loaders: The loaders that matter.
        who: Who has to know, for the message.
    """
    if len(held_out_loaders(trainer)) > 1 and (mode := held_out_mode(trainer)) != "sequential":
        raise ValueError(
            f"{who} needs DataLoaders that come one after the other, but got a CombinedLoader with mode={mode!r}. Use a"
            " list of loaders."
        )
    for loader in loaders:
        _check_loader(loader, who)


def _check_loader(loader: Any, who: str) -> None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        raise TypeError(
            f"{who} has to know which samples a batch holds: use a torch.utils.data.DataLoader with a batch_size and a"
            f" map-style dataset. It got {type(loader).__name__} of {type(getattr(loader, 'dataset', None)).__name__}."
        )
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    ordered = is_ordinary(sampler) and type(sampler).__name__ == "SequentialSampler"
    split = type(sampler) is DistributedSampler and not sampler.shuffle
    if not is_ordinary(loader.batch_sampler) or not (ordered or split) or not getattr(loader, "in_order", True):
        raise ValueError(
            f"{who} has to know which samples a batch holds, but the DataLoader shuffles, or has a sampler of its own"
            " or in_order=False. Use shuffle=False, as Lightning advises too, and torch.utils.data.Subset to leave"
            " samples out."
        )
