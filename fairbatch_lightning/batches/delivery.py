"""Put other batches into a user's DataLoader, leaving theirs as it was, and know which of them were delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fairbatch_lightning.batches.sampler import Drawn, FairSampler


class FairBatchSampler(Sampler[list[int]]):
    """The batches of a [`FairSampler`][fairbatch_lightning.FairSampler] as a loader's `batch_sampler`: faster.

    Remembers the batches that the loader has delivered, until they are taken.
    """

    def __init__(self, sampler: FairSampler) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, sampler.batch_size, sampler.drop_last
        self._drawn: deque[Drawn] = deque()
        self._delivered: deque[Drawn] = deque()
        self._training: object = None  # stands for the pass that is trained on
        self._loading: Iterator[Any] | None = None

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
            self._loading = start()
            for batch in self._loading:
                remember(first_drawn())
                yield batch
        finally:
            if self._training is this:
                self._training = self._loading = None

    def take(self) -> Drawn | None:
        """Return the batch that was delivered first of those not taken yet, if any: it has been trained on."""
        if not self._delivered:
            return None
        batch = self._delivered.popleft()
        batch.was_trained_on()
        return batch

    def delivered(self) -> Drawn | None:
        """Return the same without taking it."""
        return self._delivered[0] if self._delivered else None

    def end_pass(self) -> None:
        """Forget the pass that was trained on. Where it was left before its end, its worker processes are ended."""
        loading, self._loading = self._loading, None
        if isinstance(loading, _MultiProcessingDataLoaderIter) and not loading._persistent_workers:
            loading._shutdown_workers()  # garbage collection would wait seconds for each of them
        self.forget()

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


class _LazyStart:
    """Makes a DataLoader's worker processes wait for the first `next()`.

    Lightning calls `iter()` on a loader before it has said which epoch it is, and before a checkpoint is restored.
    """

    batch_sampler: Any

    def __iter__(self) -> Iterator[Any]:
        start = super().__iter__  # type: ignore[misc]
        fair = isinstance(self.batch_sampler, FairBatchSampler)
        yield from self.batch_sampler.deliver(start) if fair else start()


def stop_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a loader keeps; garbage collection would wait seconds for each of them."""
    iterator = loader._iterator
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()
    loader._iterator = None
