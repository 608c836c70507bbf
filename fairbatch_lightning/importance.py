"""Importance sampling within cells (the paper's section 4.3): which samples of a cell are drawn more often.

The quotas of the cells are FairBatch's; here it is only decided how often each sample of a cell is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isinf
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning.draws import Array
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.losses import PerSampleLoss, SampleLoss
from fairbatch_lightning.metrics import GroupLoss, to_device


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
        for name, value, least, most in (("pressure", pressure, 1, float("inf")), ("decay", decay, 0, 1)):
            if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= most or isinf(value):
                expected = f"a number of at least {least}" if isinf(most) else f"a number from {least} to {most}"
                raise ValueError(f"Expected argument `{name}` to be {expected} but got {value!r}.")
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


class ImportanceSampling:
    """Watches the losses of single samples in training, and weighs the samples by them.

    Args:
        importance: What decides about weights.
        index: The cell of every sample.
        loss: The per-sample loss.
    """

    def __init__(self, importance: Importance, index: GroupIndex, loss: PerSampleLoss) -> None:
        self._importance, self._index, self._loss = importance, index, SampleLoss(index, loss, None)
        self._known = torch.full((len(index),), torch.nan)
        self._recent = GroupLoss(1, len(index), sum_dtype=torch.float32)  # here every sample is a cell of its own

    def observe(self, logits: Tensor, samples: list[int]) -> None:
        """Add a batch that this process has trained on; waits for no device."""
        if self._recent.device != logits.device:
            self._recent = self._recent.to(logits.device)
        cells = to_device(torch.from_numpy(self._index.cells[samples].astype(np.int64)), logits.device)
        self._recent.add(self._loss(logits, cells), to_device(torch.tensor(samples), logits.device))

    def weights(self, update: int) -> Array:
        """Return the weights of all samples, from what all processes know by now."""
        with self._recent.sync_context():
            recent = (self._recent.sums / self._recent.counts).view(-1).cpu()
        self._known = torch.where(recent.isnan(), self._known, recent)
        self._recent.reset()
        return self._importance.weights(self._known.numpy().copy(), self._index, update)

    def state_dict(self, *, alone: bool) -> dict[str, Any]:
        """Return what is known; called on all processes, unless the others are gone and this one is `alone`."""
        with self._recent.sync_context(should_sync=not alone):
            recent = {name: getattr(self._recent, name).view(-1).cpu().clone() for name in ("sums", "counts")}
        return {"known": self._known.clone(), **recent}

    def load_state_dict(self, state: dict[str, Any], rank: int) -> None:
        """Go on from what was known; what the last weights did not take into account is left to the first process."""
        self._known = state["known"].clone()
        self._recent.reset()
        if rank == 0:
            for name in ("sums", "counts"):
                getattr(self._recent, name).view(-1).copy_(state[name])
