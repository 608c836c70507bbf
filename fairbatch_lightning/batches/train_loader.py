"""Find the train DataLoader in what a user gave to Lightning, and refuse those whose samples cannot be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from fairbatch_lightning._support.lightning import combined_mode, is_combined
from fairbatch_lightning._support.warn import warn


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
        return type(self.given)(replaced, combined_mode(self.given)) if is_combined(self.given) else replaced

    def wrap(self, batch: Any) -> Any:
        """Return a batch of this loader as `training_step` gets it: together with a batch of every other loader."""
        spec = tree_structure(_contents(self.given))
        batches = [*self._other_batches]
        batches[self.position] = batch
        return tree_unflatten(batches, spec)

    def unwrap(self, batch: Any) -> Any:
        """Return the batch of this loader in what `training_step` gets: together with those of others, if there are."""
        contents = _contents(self.given)
        in_turn = is_combined(self.given) and combined_mode(self.given) == "sequential"
        if isinstance(contents, DataLoader) or in_turn:
            return batch
        try:
            return batch[list(contents)[self.position] if isinstance(contents, Mapping) else self.position]
        except (KeyError, IndexError, TypeError):  # a hook of the user's has taken it out already
            return batch

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


def _contents(given: Any) -> Any:
    """Return the loader or loaders that were given, without Lightning's wrapper around them."""
    return given.iterables if is_combined(given) else given


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
    if name not in keys and str(name) in (texts := [str(key) for key in keys]):
        return texts.index(str(name))  # a file or command line can turn "1" into 1, or the other way round
    if name not in keys:
        raise ValueError(f"Expected argument `loader` to be one of {keys} but got {name!r}.")
    return keys.index(name)


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
