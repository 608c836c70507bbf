"""Weigh the cells so that labels and groups are independent of each other."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fairbatch_lightning.baselines.base import Baseline
from fairbatch_lightning.groups import GroupIndex

By = Literal["weights", "sampling"]


def independence_weights(counts: Tensor) -> Tensor:
    """Return `P(y) P(z) / P(y, z)` for every cell `(Y, Z)` of a table of counts; 0 for cells without samples.

    >>> independence_weights(torch.tensor([[6, 2], [2, 6]]))
    tensor([[0.6667, 2.0000],
            [2.0000, 0.6667]], dtype=torch.float64)
    """
    share = counts.double() / counts.sum()
    return torch.where(counts > 0, share.sum(1, keepdim=True) * share.sum(0, keepdim=True) / share, 0)


class Reweighing(Baseline):
    r"""Gives each cell the weight it would need for label and group to be independent (Kamiran and Calders, 2011).

        Trainer(callbacks=[Reweighing(groups="race")])

    The loss of a sample of cell (y, z) counts `w[y, z] = P(y) P(z) / P(y, z)` times, with the frequencies of the
    training set. The weights stay as they are during the training, and are the same for all criteria.

    Args:
        by: "weights" weighs the losses. "sampling" draws samples that much more often instead, which that paper
            proposes where a learner knows no weights. As labels keep their frequency, it is exact only where all cells
            have samples.
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loss, logits, loader, seed.
    """

    def __init__(self, *, by: By = "weights", **arguments: Any) -> None:
        if by not in get_args(By):
            raise ValueError(f"Expected argument `by` to be one of {get_args(By)} but got {by!r}.")
        super().__init__(**arguments)
        self._by = by
        self.weights: Tensor | None = None
        """The weights of the cells `(Y, Z)`; None before the training data is known."""

    @property
    def changes_loss(self) -> bool:  # type: ignore[override]
        """Whether losses are weighed."""
        return self._by == "weights"

    def start(self, index: GroupIndex) -> None:
        """Compute the weights."""
        self.weights = independence_weights(index.counts)

    def shares(self, index: GroupIndex) -> Tensor | None:
        """Return shares by which groups are as frequent among the samples of each label as among all."""
        if self._by == "weights":
            return None
        wanted = index.counts.double() * independence_weights(index.counts)
        return wanted / wanted.sum(1, keepdim=True)

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what makes the mean of the losses a weighted one."""
        weights = self.weights.to(losses).flatten()[cells]  # type: ignore[union-attr]
        return ((weights - 1) * losses).mean()
