"""Take a user's DataLoader apart and put it together again with other batches, leaving theirs as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.sampler import Drawn, FairSampler


@dataclass(frozen=True)
class TrainLoader:
    """The one training DataLoader among what a user gave to Lightning.

    Args:
        loader: The DataLoader itself.
        given: What the user gave: the loader, or a list, dict or CombinedLoader that holds it.
        position: Where the loader is among all that were given.
    """

    loader: DataLoader[Any]
    given: Any
    position: int

    @classmethod
    def find(cls, given: Any, name: str | int | None = None, who: str = "FairBatch") -> TrainLoader:
        """Find the loader, by its key or position if there are several, or refuse what cannot be made fair by `who`."""
        loaders = tree_leaves(_contents(given))
        position = 0 if name is None and len(loaders) == 1 else _position(_contents(given), name, who)
        _check_loader(loaders[position], who)
        return cls(loaders[position], given, position)

    def put_back(self, loader: DataLoader[Any]) -> Any:
        """Return what the user gave with another loader in the place of this one."""
        loaders, spec = tree_flatten(_contents(self.given))
        loaders[self.position] = loader
        replaced = tree_unflatten(loaders, spec)
        return type(self.given)(replaced, self.given._mode) if _is_combined(self.given) else replaced

    def wrap(self, batch: Any) -> Any:
        """Return a batch of this loader as `training_step` gets it: together with a batch of every other loader."""
        spec = tree_structure(_contents(self.given))
        batches = [*self._other_batches]
        batches[self.position] = batch
        return tree_unflatten(batches, spec)

    @cached_property
    def _other_batches(self) -> list[Any]:
        loaders = tree_leaves(_contents(self.given))
        return [None if position == self.position else _any_batch(one) for position, one in enumerate(loaders)]

    @property
    def has_others(self) -> bool:
        """Whether the user gave more than this loader."""
        return len(tree_leaves(_contents(self.given))) > 1

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
        sampler: Any = getattr(self.loader.batch_sampler, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return int(sampler.total_size)
        return len(sampler) if is_ordinary(self.loader.batch_sampler) else len(self.loader) * self.batch_size


def _any_batch(loader: Any) -> Any:
    """Return a batch of a loader without disturbing it: of its first samples, or from an iterator of its own."""
    if isinstance(loader, DataLoader) and isinstance(loader.batch_size, int) and hasattr(loader.dataset, "__len__"):
        number = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[i] for i in range(number)])
    return next(iter(loader))


class FairBatchSampler(Sampler[list[int]]):
    """The batches of a [`FairSampler`][fairbatch_lightning.FairSampler] as a loader's `batch_sampler`: faster.

    Remembers the batches that the loader has delivered, until they are taken.
    """

    def __init__(self, sampler: FairSampler) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, sampler.batch_size, sampler.drop_last
        self._drawn: deque[Drawn] = deque()
        self._delivered: deque[Drawn] = deque()
        self._training: object = None  # stands for the pass that is trained on

    def __len__(self) -> int:
        return self.sampler.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw(self._drawn)

    def _draw(self, drawn: deque[Drawn]) -> Iterator[list[int]]:
        remember = drawn.append
        for batch in self.sampler.batches_with_cells():
            remember(batch)
            yield batch.samples

    def deliver(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of a loader whose pass over these batches begins with `start`, keeping count of them."""
        drawn = self._drawn = deque()
        if self._training is not None:  # someone else looks at the loader while it is trained on
            yield from start()
            return
        this = self._training = object()
        first_drawn, remember = drawn.popleft, self._delivered.append
        try:
            for batch in start():
                remember(first_drawn())
                yield batch
        finally:
            if self._training is this:
                self._training = None

    def take(self) -> Drawn | None:
        """Return the batch that was delivered first of those not taken yet, if any."""
        return self._delivered.popleft() if self._delivered else None

    def delivered(self) -> Drawn | None:
        """Return the same without taking it."""
        return self._delivered[0] if self._delivered else None

    def forget(self) -> None:
        """Forget batches that were delivered but not taken. The next pass will be the one that is trained on."""
        self._delivered.clear()
        self._training = None


def with_batches(loader: DataLoader[Any], batch_sampler: Any, **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader that draws the batches of `batch_sampler`, none of them before the first is needed.

    The copy has every attribute of the original, so that subclasses and all their arguments survive.
    """
    lazy = type(type(loader).__name__, (_LazyStart, type(loader)), {"__module__": type(loader).__module__})
    if hasattr(loader, "load_state_dict"):  # such as torchdata's: it would skip batches that are skipped already
        lazy.load_state_dict = lambda self, state: None  # type: ignore[attr-defined]
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
    if hasattr(loader, "in_order"):
        vars(copy)["in_order"] = True  # which batch is which is known from their order
    return copy


def replace_train_loader(trainer: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let a Trainer train on what `change` makes of the DataLoaders it is given; return how to undo that."""
    source = trainer.fit_loop._data_source
    request = source.dataloader
    source.dataloader = lambda: change(request())
    return lambda: vars(source).pop("dataloader", None)


def fetches_itself(trainer: Any) -> bool:
    """Return whether `training_step` takes `dataloader_iter`, and with it as many batches as it likes."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def stop_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a loader keeps; garbage collection would wait seconds for each of them."""
    iterator = loader._iterator
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()
    loader._iterator = None


class _LazyStart:
    """Makes a DataLoader's worker processes wait for the first `next()`.

    Lightning calls `iter()` on a loader before it has said which epoch it is, and before a checkpoint is restored.
    """

    batch_sampler: Any

    def __iter__(self) -> Iterator[Any]:
        start = super().__iter__  # type: ignore[misc]
        fair = isinstance(self.batch_sampler, FairBatchSampler)
        yield from self.batch_sampler.deliver(start) if fair else start()


def _contents(given: Any) -> Any:
    """Return the loader or loaders that were given, without Lightning's wrapper around them."""
    return given.iterables if _is_combined(given) else given


def _position(contents: Any, name: str | int | None, who: str) -> int:
    """Return where the loader with this key or position is among the leaves."""
    keys = list(contents) if isinstance(contents, Mapping) else list(range(len(contents)))
    if len(keys) != len(tree_leaves(contents)):
        raise ValueError(
            "Expected the train DataLoaders in a list or a dict but got containers inside of it. Flatten them."
        )
    if name is None:
        raise ValueError(
            f"{who} acts on one train DataLoader but got {len(keys)}. Name it, {who}(loader={keys[0]!r}), or"
            " join the datasets with torch.utils.data.ConcatDataset and return a single DataLoader."
        )
    if name not in keys:
        raise ValueError(f"Expected argument `loader` to be one of {keys} but got {name!r}.")
    return keys.index(name)


def _is_combined(given: Any) -> bool:
    """Return whether this is Lightning's CombinedLoader; of either namespace, so its class does not tell."""
    return hasattr(given, "iterables") and hasattr(given, "flattened")


def _check_loader(loader: Any, who: str) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{who} needs a torch.utils.data.DataLoader for training but got {type(loader).__name__}: it chooses"
            " the samples of every batch."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"{who} cannot choose the samples of {type(loader.dataset).__name__}: an IterableDataset delivers them"
            " in its own order. Use a map-style dataset, with __getitem__ and __len__."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            f"{who} composes batches, but the train DataLoader has batch_size=None, so the dataset makes its own."
            " Let the dataset return single samples and give the DataLoader a batch_size."
        )
    if loader.batch_size is None and not isinstance(getattr(loader.batch_sampler, "batch_size", None), int):
        raise ValueError(
            f"{who} replaces the batch_sampler {type(loader.batch_sampler).__name__} but cannot tell its batch"
            " size. Give it an attribute `batch_size`, or use DataLoader(batch_size=...)."
        )
    _check_sampler(loader, who)


def is_ordinary(sampler: Any) -> bool:
    """Return whether a sampler is one that DataLoader makes by itself; torchdata has copies of torch's classes."""
    module, name = type(sampler).__module__.split(".")[0], type(sampler).__name__
    return module in ("torch", "torchdata") and name in ("RandomSampler", "SequentialSampler", "BatchSampler")


def _check_sampler(loader: DataLoader[Any], who: str) -> None:
    """Refuse samplers that leave samples out, and say when another way of sampling is replaced."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    own_batches = not is_ordinary(loader.batch_sampler)
    if not own_batches and (type(sampler) is DistributedSampler or is_ordinary(sampler)):
        return
    replaced: Any = loader.batch_sampler if own_batches else sampler
    draws = len(loader) * (loader.batch_size or replaced.batch_size)
    if not isinstance(sampler, WeightedRandomSampler | DistributedSampler) and draws < _fewest(loader):
        raise ValueError(
            f"{who} would draw from all {_num_samples(loader)} samples, but your {type(replaced).__name__} draws"
            f" {draws}. If it leaves some out, use torch.utils.data.Subset(dataset, indices) as the dataset instead; if"
            " it makes epochs shorter, use Trainer(limit_train_batches=...)."
        )
    warn(f"{who} replaces your {type(replaced).__name__}: it decides itself what is drawn.")


def _fewest(loader: DataLoader[Any]) -> int:
    """Return how many samples a loader draws at least if it leaves out none but an incomplete batch."""
    return _num_samples(loader) - (loader.batch_size or 1) + 1


def _num_samples(loader: DataLoader[Any]) -> int:
    dataset: Any = loader.dataset
    return len(dataset)
