"""How an epoch's batches are put together: quotas per cell, and walks through the cells' samples.

Everything here is a pure function of numbers: the same seed, epoch and shares give the same batches in every
process, and any batch can be computed without the ones before it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from fairbatch_lightning.cells.values import Array

_OFFSET, _SHUFFLE, _WALK, _START = range(4)  # separate streams of random numbers within an epoch


def generator(seed: int, epoch: int, stream: int, *key: int) -> np.random.Generator:
    """Return the random generator of one stream of an epoch."""
    return np.random.default_rng([seed, epoch, stream, *key])


def permutation(length: int, *key: int) -> Array:
    """Return a random order of the numbers below `length`; torch draws it several times faster than NumPy."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    dtype = torch.int32 if length < 2**31 else torch.int64
    order = torch.randperm(length, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return np.asarray(order.numpy())


def rounding_offsets(num_batches: int, seed: int, epoch: int) -> Array:
    """Return one number in [0, 1) per batch, by which `fill_batches` rounds: `(num_batches,)`.

    Over the epoch they are evenly spaced, which makes every cell's total exact to within one. Their order is that of
    a golden-ratio sequence, which keeps the totals close to that after any number of batches. Where it starts goes
    round with the epochs, by another irrational number: so that they stay close over many epochs of which only the
    first batches are trained on.
    """
    stride = max(1, round(num_batches * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, num_batches) > 1:
        stride += 1
    start = int((generator(seed, 0, _START).random() + epoch * math.sqrt(2)) % 1 * num_batches)
    steps = (start + np.arange(num_batches, dtype=np.int64) * stride) % num_batches
    return np.asarray((steps + generator(seed, epoch, _OFFSET).random()) / num_batches)


def fill_batches(probabilities: Array, batch_size: int, offsets: Array) -> Array:
    """Return the cells that each batch is made of, `(len(offsets), batch_size)`.

    A cell's expected number in a batch, `p * batch_size`, is rarely whole. Its whole part goes into every batch.
    The fractional parts of all cells are laid end to end on a line; a batch adds one sample of every cell whose piece
    contains `offset + k` for a whole number k (systematic sampling). So every batch has each cell's expected number
    rounded up or down, and evenly spread offsets make each cell's total the expected total rounded up or down.

    >>> fill_batches(np.array([0.25, 0.4, 0.35]), 10, np.array([0.2, 0.7]))
    array([[0, 0, 1, 1, 1, 1, 2, 2, 2, 0],
           [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]], dtype=uint8)
    """
    expected = probabilities * batch_size
    whole = np.floor(expected).astype(np.int64)
    missing = batch_size - int(whole.sum())
    ends = np.cumsum(expected - whole)
    ends = np.where(ends < ends[-1], np.minimum(ends, missing), missing)
    batches = np.empty((len(offsets), batch_size), np.min_scalar_type(len(probabilities) - 1))
    batches[:, : batch_size - missing] = np.repeat(np.arange(len(whole)), whole)
    order = np.argsort(offsets)
    points = (np.arange(missing)[:, None] + offsets[order]).ravel()  # in rising order
    first = np.searchsorted(points, ends[:-1])  # of each cell but the first
    chosen = np.repeat(np.arange(len(ends), dtype=batches.dtype), np.diff(first, prepend=0, append=len(points)))
    batches[order, batch_size - missing :] = chosen.reshape(missing, len(order)).T
    return batches


def shuffles(batch_size: int, num_batches: int, seed: int, epoch: int) -> tuple[Array, Array]:
    """Return random orders of a batch `(P, batch_size)`, and which of them each batch uses `(num_batches,)`."""
    pool = max(1, min(num_batches, 256, 2**20 // batch_size))
    random = generator(seed, epoch, _SHUFFLE)
    orders = random.permuted(np.tile(np.arange(batch_size), (pool, 1)), axis=1)
    return orders, random.integers(pool, size=num_batches)


class CellWalks:
    """For every cell an endless walk through its samples: one random permutation after the other.

    With weights a sample is met as often as its weight says, rounded up or down, in every stretch of the walk.

    Args:
        order: The samples, sorted by cell.
        edges: Where each cell starts in `order`, and the end: `(C + 1,)`.
        seed: Together with `epoch` and the cell decides the permutations.
        epoch: Every epoch walks differently.
        weights: The weight of every sample among those of its cell, `(N,)`; None for equal ones.
    """

    _SHORTEST = 1024  # permutations of small cells are drawn this many samples at a time

    def __init__(self, order: Array, edges: Array, seed: int, epoch: int, weights: Array | None = None) -> None:
        self._order, self._edges, self._key = order, edges, (seed, epoch, _WALK)
        self._weights = weights
        self._pieces: dict[int, tuple[int, Array]] = {}

    def take(self, cell: int, start: int, count: int) -> Array:
        """Return steps `start` to `start + count` of the cell's walk."""
        length = self._piece_length(cell)
        first, last = start // length, (start + count - 1) // length
        walk = [self._piece(cell, number) for number in range(first, last + 1)]
        steps = walk[0] if len(walk) == 1 else np.concatenate(walk)
        return steps[start - first * length :][:count]

    def _piece_length(self, cell: int) -> int:
        size = int(self._edges[cell + 1] - self._edges[cell])
        return size * math.ceil(self._SHORTEST / size)

    def _piece(self, cell: int, number: int) -> Array:
        """Return one stretch of the walk: a whole number of permutations of the cell."""
        cached, piece = self._pieces.get(cell, (-1, self._order))
        if cached != number:
            samples = self._order[self._edges[cell] : self._edges[cell + 1]]
            laps = self._piece_length(cell) // len(samples)
            if self._weights is not None:
                random = generator(*self._key, cell, number)
                met = systematic(self._weights[samples], laps * len(samples), random)
                every_lap = met.reshape(-1, laps).T[random.permutation(laps)]  # by its weight, rounded up or down
                piece = samples[random.permuted(every_lap, axis=1).ravel()]
            elif laps == 1:
                piece = samples[permutation(len(samples), *self._key, cell, number)]
            else:
                random = generator(*self._key, cell, number)
                piece = random.permuted(np.tile(samples, (laps, 1)), axis=1).ravel()
            self._pieces[cell] = number, piece
        return piece


def systematic(weights: Array, count: int, random: np.random.Generator) -> Array:
    """Return `count` draws of places in `weights`, sorted: each its expected number, rounded up or down.

    >>> systematic(np.array([1.0, 3.0, 0.0]), 8, np.random.default_rng(0))
    array([0, 0, 1, 1, 1, 1, 1, 1])
    """
    ends = np.cumsum(weights)
    points = (np.arange(count) + random.random()) * (ends[-1] / count)
    last = weights.nonzero()[0][-1]  # rounding may put a point at the very end
    return np.asarray(np.minimum(np.searchsorted(ends, points, side="right"), last))


class EpochDraws:
    """All that is random in one epoch.

    Args:
        order: The samples, sorted by cell.
        edges: Where each cell starts in `order`, and the end: `(C + 1,)`.
        num_batches: How many batches the epoch has.
        batch_size: How many samples a batch has, over all processes.
        seed: Together with `epoch` decides everything.
        epoch: The epoch's number.
    """

    def __init__(self, order: Array, edges: Array, num_batches: int, batch_size: int, seed: int, epoch: int) -> None:
        self._batch_size = batch_size
        self._new_walks = functools.partial(CellWalks, order, edges, seed, epoch)
        self._walks = self._new_walks()
        self._weights: Array | None = None
        self._offsets = rounding_offsets(num_batches, seed, epoch)
        self._orders, self._choice = shuffles(batch_size, num_batches, seed, epoch)

    def cells(self, probabilities: Array, first: int, end: int) -> Array:
        """Return the cells that batches `first` to `end` are made of, in random order: `(end - first, batch_size)`."""
        cells = fill_batches(probabilities, self._batch_size, self._offsets[first:end])
        return np.take_along_axis(cells, self._orders[self._choice[first:end]], axis=1)

    def samples(self, cells: Array, drawn: Array, weights: Array | None = None) -> Array:
        """Return a sample for each of the `cells` of consecutive batches, in the same shape.

        `drawn` `(C,)` says how far each cell's walk has got before the first of them; `weights` `(N,)` how often each
        sample of a cell is met, None for equally often.
        """
        if weights is not self._weights:
            self._walks, self._weights = self._new_walks(weights), weights
        totals = np.bincount(cells.ravel(), minlength=len(drawn))
        taken = totals.nonzero()[0]
        walked = np.concatenate([self._walks.take(int(c), int(drawn[c]), int(totals[c])) for c in taken])
        samples = np.empty_like(walked)
        places = np.argsort(cells, axis=None, kind="stable")  # of each cell, in order of the batches
        samples[places] = walked
        return samples.reshape(cells.shape)
