"""Train for the worst case: weights of cells that follow their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning.baselines.loss_changing import LossChanging, world_size, world_sum
from fairbatch_lightning.callback import FairBatch
from fairbatch_lightning.columns import Source
from fairbatch_lightning.controller import Alpha, ShareController
from fairbatch_lightning.criteria import row_gaps
from fairbatch_lightning.estimate import Estimate
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.losses import PerSampleLoss
from fairbatch_lightning.settings import Settings


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
        if not step_size > 0:
            raise ValueError(f"Expected argument `step_size` to be a number above 0 but got {step_size!r}.")
        super().__init__(**arguments)
        self._step_size = step_size
        self.weights: Tensor | None = None
        """The weights q of the cells `(Y, Z)`, which sum to 1; None before the training data is known."""

    def start(self, index: GroupIndex, batch_size: int) -> None:
        """Begin with equal weights."""
        present = (index.counts > 0).float()
        self.weights = present / present.sum()
        expected = index.counts.flatten() * batch_size / len(index)
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

    def learnt(self) -> dict[str, Any]:
        """Return the weights."""
        return {} if self.weights is None else {"weights": self.weights.cpu()}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from the weights of a checkpoint."""
        self.weights = learnt["weights"].clone()


def worst_shares(losses: Tensor, radius: float) -> Tensor:
    r"""Return the shares `(Z,)` near the uniform ones for which the mean of the losses `(Z,)` is largest.

    They maximise `sum of q[z] * losses[z]` over all q with `sum of (Z q[z] - 1)^2 / (2 Z) <= radius`.

    >>> worst_shares(torch.tensor([1.0, 2.0, 3.0]), radius=0.03)
    tensor([0.2333, 0.3333, 0.4333])
    """
    number = len(losses)
    order = losses.argsort(descending=True, stable=True)
    for size in range(number, 0, -1):  # all groups, then without those whose share would be negative
        top = losses[order[:size]]
        centred = top - top.mean()
        rest = 2 * radius / number - (1 / size - 1 / number)
        length = math.sqrt(max(0.0, rest)) / float(centred.norm().clamp(min=1e-12))
        shares = 1 / size + length * centred
        if size == 1 or shares.min() >= 0:
            break
    result = torch.zeros_like(losses)
    result[order[:size]] = shares
    return result


class RobustController(ShareController):
    """Moves the shares of every row towards those for which its loss is largest.

    Args:
        counts: How many training samples each cell has, `(Y, Z)`.
        alpha: How far the shares move, from 0 to 1; a function of the update's number for a schedule.
        radius: How far those shares may be from uniform ones.
    """

    def __init__(self, counts: Tensor, *, alpha: Alpha, radius: float) -> None:
        super().__init__(counts, alpha=alpha)
        self._radius = radius
        present = self._present.double()
        self.shares = present / present.sum(1, keepdim=True)

    def update(self, signal: Tensor) -> Tensor:
        """Move all rows; return their gaps `(Y,)`."""
        signal = signal.detach().to("cpu", torch.float64)
        step, shares = min(1.0, self._step_size()), self.shares.clone()
        for row, values in enumerate(signal):
            known = ~values.isnan()
            if known.any():
                total = shares[row, known].sum()
                shares[row, known] += step * (total * worst_shares(values[known], self._radius) - shares[row, known])
        self.shares = shares
        self.updates += 1
        return row_gaps(signal)


@dataclass(frozen=True)
class _RobustSettings(Settings):
    radius: float

    def new_controller(self, index: GroupIndex) -> RobustController:
        """Return a controller that starts at equal shares."""
        return RobustController(index.counts, alpha=self.alpha, radius=self.radius)


class FairDRO(FairBatch):
    r"""Minimises, for every label, the largest mean loss over mixtures of groups (Jung et al., 2023).

        Trainer(callbacks=[FairDRO(groups="race", alpha=lambda update: 1 - update / epochs)])

    For each label the shares of the groups are equal at the start, and move after every epoch by `alpha` towards those
    within the chi-squared `radius` of equal ones for which the label's loss is largest. It is for equalized odds.

    That paper weighs losses, and labels equally; here samples are drawn by the shares, and labels keep their frequency.
    All else, such as what is logged and the properties, is as in [`FairBatch`][fairbatch_lightning.FairBatch].

    Args:
        radius: How far the shares may be from equal ones: the paper's rho, from 0 up to (Z - 1) / 2.
        alpha: How far the shares move in an update, from 0 to 1: a number, or a function of the update's number. That
            paper lets it fall from 1 to 0, as above.
        groups: The sensitive attribute.
        labels: The labels.
        min_samples: Cells with fewer training samples than this keep their share.
        loss: As for FairBatch, and so are the others.
        logits: Where the logits are.
        estimate: How losses are measured.
        update_every: "epoch", or a number of training batches.
        loader: Which train DataLoader to act on if there are several.
        seed: Decides which samples are drawn.
    """

    def __init__(
        self,
        *,
        radius: float = 0.5,
        alpha: Alpha = 0.1,
        groups: Source = None,
        labels: Source = None,
        min_samples: int = 1,
        loss: PerSampleLoss | str | None = None,
        logits: str | None = None,
        estimate: str | Estimate = "online",
        update_every: int | str = "epoch",
        loader: int | str | None = None,
        seed: int = 0,
    ) -> None:
        if not radius > 0:
            raise ValueError(f"Expected argument `radius` to be a number above 0 but got {radius!r}.")
        super().__init__(
            "equalized_odds",
            groups=groups,
            labels=labels,
            alpha=alpha,
            min_samples=min_samples,
            loss=loss,
            logits=logits,
            estimate=estimate,
            update_every=update_every,
            loader=loader,
            seed=seed,
        )
        self._settings = _RobustSettings(**vars(self._settings), radius=radius)
