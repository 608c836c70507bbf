"""Estimates that evaluate the model on training samples: all of them, or some of every cell."""

from __future__ import annotations

import numpy as np

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.estimates.base import CellLosses, Estimate, TrainingRun
from fairbatch_lightning.measure.estimates.silent_pass import SilentPass


class ExactEstimate(Estimate):
    """Evaluates the model on every training sample, as the paper does.

    Args:
        batch_size: How many samples to evaluate at once; default: four times as many as in training, where that does
            not run out of memory.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._pass = SilentPass(batch_size)

    def measure(self, run: TrainingRun, update: int, *, uniform: bool) -> CellLosses:
        """Return the losses of the cells over the whole training set."""
        return self._pass.measure(run, range(len(run.index)), seed=update)

    def close(self) -> None:
        """End worker processes."""
        self._pass.close()


class SampledEstimate(Estimate):
    """Evaluates the model on a fresh draw from every cell, so that an update costs the same however large the data is.

    Args:
        samples_per_cell: How many samples to draw, without replacement, from each cell; smaller cells are taken whole.
        batch_size: How many samples to evaluate at once; default: four times as many as in training, where that does
            not run out of memory.
    """

    def __init__(self, samples_per_cell: int = 256, batch_size: int | None = None) -> None:
        check_at_least("samples_per_cell", samples_per_cell, 1)
        self._samples_per_cell = samples_per_cell
        self._pass = SilentPass(batch_size)

    def measure(self, run: TrainingRun, update: int, *, uniform: bool) -> CellLosses:
        """Return the losses of the cells over the drawn samples."""
        cells = np.arange(run.index.counts.numel())
        samples = draw(run.index, cells, self._samples_per_cell, run.seed, update)
        return self._pass.measure(run, samples, seed=update)

    def close(self) -> None:
        """End worker processes."""
        self._pass.close()


def draw(index: GroupIndex, cells: Array, samples_per_cell: int, *key: int) -> Array:
    """Return up to `samples_per_cell` different samples of each of the `cells`; the `key` decides which.

    >>> index = GroupIndex.from_values([0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1])
    >>> draw(index, np.array([1, 3]), 2, 0).tolist()
    [2, 4, 5]
    """
    random = np.random.default_rng(key)
    chosen = []
    for cell in cells:
        first, end = index.edges[cell], index.edges[cell + 1]
        if end - first > samples_per_cell:
            chosen.append(first + random.choice(end - first, samples_per_cell, replace=False, shuffle=False))
        else:
            chosen.append(np.arange(first, end))
    return np.asarray(index.order[np.concatenate(chosen)])
