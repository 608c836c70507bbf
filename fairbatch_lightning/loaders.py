"""Take a user's DataLoader apart and put it together again with other batches, leaving theirs as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fairbatch_lightning._warnings import warn


@dataclass(frozen=True)
class TrainLoader:
    """The one training DataLoader among what a user gave to Lightning.

    Args:
        loader: The DataLoader itself.
        given: What the user gave: the loader, or a list, dict or CombinedLoader that holds it.
        wrap: Puts something where the loader was, for example a batch.
    """

    loader: DataLoader[Any]
    given: Any
    wrap: Callable[[Any], Any]

    @classmethod
    def find(cls, given: Any) -> TrainLoader:
        """Find the loader, or refuse what cannot be made fair with the way out."""
        leaves, spec = tree_flatten(given.iterables if _is_combined(given) else given)
        if len(leaves) != 1:
            raise ValueError(
                f"FairBatch acts on one train DataLoader but got {len(leaves)}. Join the datasets with"
                " torch.utils.data.ConcatDataset and return a single DataLoader."
            )
        _check_loader(leaves[0])
        return cls(leaves[0], given, lambda inside: tree_unflatten([inside], spec))

    def put_back(self, loader: DataLoader[Any]) -> Any:
        """Return what the user gave with another loader in it."""
        if _is_combined(self.given):
            return type(self.given)(self.wrap(loader), self.given._mode)
        return self.wrap(loader)

    @property
    def batch_size(self) -> int:
        """The size of the loader's batches."""
        size = self.loader.batch_size
        return int(self.loader.batch_sampler.batch_size if size is None else size)  # type: ignore[union-attr]

    @property
    def drop_last(self) -> bool:
        """Whether the loader drops an incomplete last batch."""
        return bool(getattr(self.loader.batch_sampler, "drop_last", self.loader.drop_last))

    @property
    def epoch_size(self) -> int:
        """How many samples the loader draws in an epoch, over all processes."""
        sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.sampler)
        drawn: Any = self.loader.dataset if isinstance(sampler, DistributedSampler) else sampler
        return len(drawn)


def with_batches(loader: DataLoader[Any], batch_sampler: Any, **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader that draws the batches of `batch_sampler`, none of them before the first is needed.

    The copy has every attribute of the original, so that subclasses and all their arguments survive.
    """
    lazy = type(type(loader).__name__, (_LazyStart, type(loader)), {"__module__": type(loader).__module__})
    copy: DataLoader[Any] = object.__new__(lazy)
    vars(copy).update(vars(loader))
    vars(copy).update(
        batch_sampler=batch_sampler,
        sampler=batch_sampler.sampler,
        batch_size=batch_sampler.batch_size,
        drop_last=batch_sampler.drop_last,
        _iterator=None,
        **changes,
    )
    return copy


class _LazyStart:
    """Makes a DataLoader's worker processes wait for the first `next()`.

    Lightning calls `iter()` on a loader before it has said which epoch it is, and before a checkpoint is restored.
    """

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()  # type: ignore[misc]


def _is_combined(given: Any) -> bool:
    """Return whether this is Lightning's CombinedLoader; of either namespace, so its class does not tell."""
    return hasattr(given, "iterables") and hasattr(given, "flattened")


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"FairBatch needs a torch.utils.data.DataLoader for training but got {type(loader).__name__}: it chooses"
            " the samples of every batch."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"FairBatch cannot choose the samples of {type(loader.dataset).__name__}: an IterableDataset delivers them"
            " in its own order. Use a map-style dataset, with __getitem__ and __len__."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "FairBatch composes batches, but the train DataLoader has batch_size=None, so the dataset makes its own."
            " Let the dataset return single samples and give the DataLoader a batch_size."
        )
    if loader.batch_size is None and not isinstance(getattr(loader.batch_sampler, "batch_size", None), int):
        raise ValueError(
            f"FairBatch replaces the batch_sampler {type(loader.batch_sampler).__name__} but cannot tell its batch"
            " size. Give it an attribute `batch_size`, or use DataLoader(batch_size=...)."
        )
    _check_sampler(loader)


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Refuse samplers that leave samples out, and say when another way of sampling is replaced."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    ordinary = (RandomSampler, SequentialSampler, DistributedSampler)
    if isinstance(sampler, ordinary) and type(loader.batch_sampler) is BatchSampler:
        return
    if isinstance(getattr(sampler, "indices", None), Iterable):
        raise ValueError(
            f"FairBatch would draw from the whole dataset, but your {type(sampler).__name__} is restricted to some"
            " of it. Use torch.utils.data.Subset(dataset, indices) as the dataset instead."
        )
    replaced = sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    warn(f"FairBatch replaces your {type(replaced).__name__}: the shares of the cells decide what is drawn.")
