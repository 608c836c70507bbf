"""The fair sampler: from the shares of the cells to the batches of an epoch.

Algorithm 1 of the paper's section 2: minibatches are drawn by a distribution over cells that changes between epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from fairbatch_lightning._support import processes
from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.batches.draws import EpochDraws
from fairbatch_lightning.batches.epoch import Pass, Plan, check_shares, check_weights, saved_shares
from fairbatch_lightning.cells.index import GroupIndex, natural_shares
from fairbatch_lightning.cells.values import Array

_DRAWS_AT_ONCE = 2**16


class Drawn(NamedTuple):
    """A batch: its samples (indices into the dataset), their cells `(B,)`, its number, and the pass that it is of."""

    samples: list[int]
    cells: Array
    number: int = 0
    of: Pass | None = None

    def was_trained_on(self) -> None:
        """Keep nothing more of it, or of batches before it."""
        if self.of is not None:
            self.of.trained = self.number + 1


class FairSampler(DistributedSampler[int]):
    """Draws samples so that every run of `batch_size` of them is one fair batch.

    A sample of cell (y, z) is drawn with probability `row_count[y] / N * shares[y, z]`, and uniformly within the cell
    (unless there are weights): one random permutation of it after the other. Every batch holds each cell's expected
    number rounded up or down, and so does the whole epoch. The stream depends only on seed, epoch, shares and weights.

    Use it as `DataLoader(dataset, batch_size=B, sampler=FairSampler(labels, groups, B), drop_last=True)`. Each pass
    over the loader is a new epoch; call `set_epoch` to choose which. All batches are full: where a loader with
    `drop_last=False` would end on a short batch, this ends on a full one.

    It is a `DistributedSampler`, as far as Lightning is concerned: under DDP it is left in place.

    Args:
        labels: Label of every sample: a tensor, array or list of integers or strings.
        groups: Group of every sample, likewise.
        batch_size: The loader's batch size, on each process.
        shares: The `(Y, Z)` shares, every row summing to 1. Default: each row's share in the data, which is ordinary
            uniform sampling. Can be set at any time; batches drawn from then on follow it.
        weights: How often a sample is drawn, compared with others of its cell, `(N,)`; default: all alike. As `shares`.
        num_replicas: Number of processes; default: that of `torch.distributed` if it is initialised, else 1.
        rank: This process's number; the processes split every batch of `batch_size * num_replicas` samples.
        seed: Decides the stream; must be the same on all processes.
        drop_last: Whether the samples left over at the end of an epoch are dropped or fill one more batch.

    >>> sampler = FairSampler([0, 0, 0, 1, 1, 1], ["a", "a", "b", "a", "b", "b"], batch_size=2)
    >>> sampler.shares = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    >>> len(list(sampler))
    6
    """

    def __init__(
        self,
        labels: Any,
        groups: Any,
        batch_size: int,
        *,
        shares: Tensor | None = None,
        weights: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self._setup(
            GroupIndex.from_values(labels, groups),
            batch_size,
            shares=shares,
            weights=weights,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            drop_last=drop_last,
        )

    @classmethod
    def from_index(
        cls, index: GroupIndex, batch_size: int, *, epoch_size: int | None = None, **settings: Any
    ) -> FairSampler:
        """Build a sampler from an index that exists already; `epoch_size` draws make an epoch (default: all)."""
        sampler = cls.__new__(cls)
        sampler._setup(index, batch_size, epoch_size=epoch_size, **settings)
        return sampler

    def _setup(
        self,
        index: GroupIndex,
        batch_size: int,
        *,
        shares: Tensor | None = None,
        weights: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = True,
        epoch_size: int | None = None,
    ) -> None:
        """Initialise in place of DistributedSampler's `__init__`, which would ask for a dataset and a process group."""
        self.index, self.batch_size, self.seed, self.drop_last = index, batch_size, seed, drop_last
        self.num_replicas = processes.world_size() if num_replicas is None else num_replicas
        self.rank = processes.rank() if rank is None else rank
        _check_sizes(batch_size, seed, self.num_replicas, self.rank)
        epoch_size = len(index) if epoch_size is None else epoch_size
        self.num_batches = _num_batches(epoch_size, batch_size, self.num_replicas, drop_last)
        self._row_mass = index.counts.double().sum(1, keepdim=True) / len(index)
        self._shares = natural_shares(index.counts)
        self._weights: Array | None = None
        self._pass = self._new_pass(0)
        self.weights = weights
        if shares is not None:
            self.shares = shares

    def _new_pass(self, epoch: int) -> Pass:
        return Pass(epoch, [Plan(0, self._shares, self._weights)])

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that is being drawn, or will be next."""
        return self._pass.epoch

    @property
    def shares(self) -> Tensor:
        """The `(Y, Z)` shares, every row summing to 1; a copy: set the property to change them."""
        return self._shares.clone()

    @shares.setter
    def shares(self, shares: Tensor) -> None:
        shares = torch.as_tensor(shares, dtype=torch.float64, device="cpu").clone()
        check_shares(shares, self.index)
        self._shares = shares
        self._pass.follow(shares, self._weights)

    @property
    def weights(self) -> Array | None:
        """How often a sample is drawn, compared with others of its cell, `(N,)`; None for all equally often."""
        return None if self._weights is None else self._weights.copy()

    @weights.setter
    def weights(self, weights: Any) -> None:
        if weights is not None:
            weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu").numpy().copy()
        check_weights(weights, self.index)
        if weights is not None and (weights == weights[0]).all():
            weights = None
        self._weights = weights
        self._pass.follow(self._shares, weights)

    @property
    def weighted(self) -> bool:
        """Whether some samples of a cell are drawn more often than others."""
        return self._weights is not None

    @property
    def started(self) -> bool:
        """Whether any batch of the current pass has been asked for."""
        return self._pass.started

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass draw this epoch's batches. A pass over it that is under way or restored goes on."""
        done = self._pass.finished or (self._pass.started and self._pass.next_batch == self.num_batches)
        if epoch != self._pass.epoch or done:
            self._pass = self._new_pass(epoch)

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[int]]:
        """Yield this process's batches of one epoch, each a list of indices into the dataset."""
        return (drawn.samples for drawn in self.batches_with_cells())

    def batches_with_cells(self) -> Iterator[Drawn]:
        """Yield the same batches, with the cells of their samples."""
        if self._pass.started:
            self._pass = self._new_pass(self._pass.epoch + 1)
        current = self._pass
        current.started = True
        draws = EpochDraws(
            self.index.order,
            self.index.edges,
            self.num_batches,
            self.batch_size * self.num_replicas,
            self.seed,
            current.epoch,
        )
        drawn = self._drawn_before(current, draws)
        part, stretch = slice(self.rank, None, self.num_replicas), self._longest_stretch
        try:
            while (first := current.next_batch) < self.num_batches:
                cells = self._cells(current, draws, first, stretch)
                weights, plans = current.plan(first).weights, current.plans
                batches: list[list[int]] = draws.samples(cells, drawn, weights)[:, part].tolist()
                mine = cells[:, part].copy()  # so that no one spoils the count below
                for number, batch in enumerate(zip(batches, mine, strict=True), first + 1):
                    current.next_batch = number
                    yield Drawn(*batch, number - 1, current)
                    if current.plans is not plans:
                        stretch = number - first  # what was drawn in advance is void: draw less from now on
                        break
                stretch = min(2 * stretch, self._longest_stretch)
                drawn += self._count(cells[: current.next_batch - first])
        finally:
            current.finished = True

    @property
    def _longest_stretch(self) -> int:
        return max(1, _DRAWS_AT_ONCE // (self.batch_size * self.num_replicas))

    def _cells(self, current: Pass, draws: EpochDraws, first: int, stretch: int) -> Array:
        """Return the cells of some batches to draw in one go, by the same plan; how many changes nothing."""
        changes = (plan.first for plan in current.plans if plan.first > first)
        probabilities = (self._row_mass * current.plan(first).shares).flatten().numpy()
        return draws.cells(probabilities, first, min(first + stretch, self.num_batches, *changes))

    def _count(self, cells: Array) -> Array:
        return np.bincount(cells.ravel(), minlength=self.index.counts.numel())

    def _drawn_before(self, current: Pass, draws: EpochDraws) -> Array:
        """Return how many samples of each cell the batches drawn so far hold, `(C,)`."""
        drawn, first = np.zeros(self.index.counts.numel(), np.int64), 0
        while first < current.next_batch:
            cells = self._cells(current, draws, first, self._longest_stretch)[: current.next_batch - first]
            drawn += self._count(cells)
            first += len(cells)
        return drawn

    def state_dict(self, next_batch: int | None = None) -> dict[str, Any]:
        """Return what a new sampler needs to continue.

        Args:
            next_batch: The first batch of the epoch that has not been trained on; default: that has not been drawn.
                It may be an earlier one, when worker processes fetch ahead.
        """
        return self._state(self._pass.state_dict(next_batch))

    def state_to_repeat(self) -> dict[str, Any]:
        """Return what a new sampler needs to draw the whole epoch anew, by the shares as of now."""
        return self._state(self._new_pass(self.epoch).state_dict(None))

    def _state(self, place: dict[str, Any]) -> dict[str, Any]:
        size = self.batch_size * self.num_replicas
        return {**place, "num_batches": self.num_batches, "batch_size": size, "shares": self.shares}

    def fits(self, state: dict[str, Any]) -> bool:
        """Return whether a state is of batches like these, so that its place in the epoch means the same here."""
        size = self.batch_size * self.num_replicas
        return bool(state["num_batches"] == self.num_batches and state["batch_size"] == size)

    def load_state_dict(self, state: dict[str, Any] | Saved) -> None:
        """Continue where `state_dict` was taken. With batches of another size, continue at the next epoch."""
        saved = Saved.of(state)
        current, shares = Pass.from_state(saved, self.index), saved_shares(saved["shares"], self.index)
        saved["batch_size"].integer(1)
        self._shares, self._weights = shares, current.plans[-1].weights
        self._pass = current if self.fits(saved.value) else self._new_pass(current.epoch + 1)


def _check_sizes(batch_size: int, seed: int, num_replicas: int, rank: int) -> None:
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise ValueError(f"Expected argument `batch_size` to be a positive integer but got {batch_size!r}.")
    check_at_least("seed", seed, 0)
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"Expected argument `rank` to be between 0 and num_replicas - 1 = {num_replicas - 1} but got {rank}."
        )


def _num_batches(epoch_size: int, batch_size: int, num_replicas: int, drop_last: bool) -> int:
    """Return the length of an epoch, as a loader with torch's DistributedSampler would have it."""
    per_process = -(-epoch_size // num_replicas)
    num_batches = per_process // batch_size if drop_last else -(-per_process // batch_size)
    if num_batches == 0:
        raise ValueError(
            f"Expected at least one batch per epoch, but {epoch_size} samples on {num_replicas} process(es) do not fill"
            f" a batch of {batch_size}. Use a smaller batch size or drop_last=False."
        )
    return num_batches
