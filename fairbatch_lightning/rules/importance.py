"""Importance sampling within cells (the paper's section 4.3): which samples of a cell are drawn more often.

The quotas of the cells are FairBatch's; here it is only decided how often each sample of a cell is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.values import Array


class Importance(ABC):
    """Weighs the samples of a cell. Write a subclass and pass an object of it as `FairBatch(importance=...)`."""

    @abstractmethod
    def weights(self, losses: Array, index: GroupIndex, update: int) -> Array:
        """Return how often each sample is to be drawn, compared with others of its cell: `(N,)`, at least 0.

        Args:
            losses: The loss of every sample when it was last trained on, `(N,)`; NaN where it has not been yet.
            index: The cell of every sample.
            update: The number of the update of shares that this comes with, from 0.
        """


class LossRank(Importance):
    r"""Draws samples with large losses more often, by their rank (Loshchilov and Hutter, 2016).

    Of the n samples of a cell, the one with the i-th largest loss (from 0) gets the weight `pressure ** (-i / n)`.
    Those that have not been trained on yet count as the largest. Where much pressure is left in the end, the model fits
    the hard samples and is less fair.

    Args:
        pressure: How much more often the sample with the largest loss is drawn than that with the smallest, at first.
        decay: What the pressure is multiplied by in every update, until it is 1 and all samples are drawn equally
            often: with the defaults after 549 updates. 1 leaves it as it is.

    >>> index = GroupIndex.from_values([0, 0, 0, 1], ["a", "a", "a", "a"])
    >>> LossRank(pressure=8).weights(np.array([0.1, 0.5, 0.2, 0.3]), index, update=0).tolist()
    [0.25, 1.0, 0.5, 1.0]
    """

    def __init__(self, pressure: float = 3.0, decay: float = 0.998) -> None:
        check_number("pressure", pressure, 1)
        check_number("decay", decay, 0, 1)
        self._pressure, self._decay = pressure, decay

    def __repr__(self) -> str:
        return f"LossRank(pressure={self._pressure:g}, decay={self._decay:g})"

    def weights(self, losses: Array, index: GroupIndex, update: int) -> Array:
        """Return the weights of the samples by the ranks of their losses."""
        pressure = max(1.0, self._pressure * self._decay**update)
        known = np.where(np.isnan(losses), np.inf, losses)
        order = np.lexsort((-known, index.cells))  # cell by cell, largest loss first
        cells = index.cells[order]
        rank = np.arange(len(order)) - index.edges[cells]
        weights = np.empty(len(order))
        weights[order] = pressure ** (-rank / np.diff(index.edges)[cells])
        return weights
