"""Train for the worst cell: weights of the losses that follow them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning._support.lightning import processes_of
from fairbatch_lightning._support.processes import world_size, world_sum
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.callbacks.base import LoadedData
from fairbatch_lightning.callbacks.baselines.loss_changing import LossChanging


class GroupDRO(LossChanging):
    r"""Minimises the loss of the worst cell (Sagawa et al., 2020).

        Trainer(callbacks=[GroupDRO(groups="race")])

    The loss of a batch becomes the sum of `q[y, z] * L[y, z] / P[y, z]` over its cells, with their mean losses L and
    the probability P that a batch has samples of the cell. Before that every q is multiplied by
    `exp(step_size * L / P)`, and all of them are scaled to sum to 1. They are equal at the start. In that paper's
    Algorithm 1 each step draws one cell, all of them equally often; dividing by P makes them count alike on average
    here as well.

    Args:
        step_size: How fast the weights follow the losses.
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loss, logits, loader, seed.
    """

    def __init__(self, *, step_size: float = 0.01, **arguments: Any) -> None:
        check_number("step_size", step_size, 0, above=True)
        super().__init__(**arguments)
        self._step_size = step_size
        self.weights: Tensor | None = None
        """The weights q of the cells `(Y, Z)`, which sum to 1; None before the training data is known."""

    def start(self, data: LoadedData) -> None:
        """Begin with equal weights."""
        super().start(data)
        counts, batch_size = data.index.counts, data.loader.batch_size * processes_of(data.trainer)["num_replicas"]
        present = (counts > 0).float()
        self.weights = present / present.sum()
        expected = counts.flatten() * batch_size / len(data.index)
        self._shape = data.index.shape
        self._probability = expected.clamp(min=1e-12, max=1)  # a batch has the expected number, rounded up or down

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what makes the mean of the losses the weighted sum of the cells' means."""
        weights = self.weights.to(losses.device)  # type: ignore[union-attr]
        empty = losses.new_zeros(weights.numel())
        sums = empty.index_add(0, cells, losses)
        counts = world_sum(empty.index_add(0, cells, torch.ones_like(losses))).clamp(min=1)
        scale = 1 / (counts * self._probability.to(losses))
        grown = weights.flatten() * torch.exp(self._step_size * world_sum(sums.detach()) * scale)
        self.weights = (grown / grown.sum()).view_as(weights)
        return world_size() * (self.weights.flatten() * sums * scale).sum() - losses.mean()

    def learnt(self, *, alone: bool) -> dict[str, Any]:
        """Return the weights."""
        return {} if self.weights is None else {"weights": self.weights.cpu()}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from the weights of a checkpoint."""
        saved = Saved(learnt, "learnt")["weights"]
        self.weights = saved.tensor(*self._shape, finite=True, least=0)
        if not self.weights.any():
            raise saved.wrong("weights that are not all 0")
