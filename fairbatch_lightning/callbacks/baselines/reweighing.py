"""Weigh the cells so that labels and groups are independent of each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning.callbacks.base import ChangesBatches, LoadedData
from fairbatch_lightning.callbacks.baselines.loss_changing import LossChanging
from fairbatch_lightning.cells.index import GroupIndex


def independence_weights(counts: Tensor) -> Tensor:
    """Return `P(y) P(z) / P(y, z)` for every cell `(Y, Z)` of a table of counts; 0 for cells without samples.

    >>> independence_weights(torch.tensor([[6, 2], [2, 6]]))
    tensor([[0.6667, 2.0000],
            [2.0000, 0.6667]], dtype=torch.float64)
    """
    share = counts.double() / counts.sum()
    return torch.where(counts > 0, share.sum(1, keepdim=True) * share.sum(0, keepdim=True) / share, 0)


class Reweighing(LossChanging):
    r"""Gives each cell the weight it would need for label and group to be independent (Kamiran and Calders, 2011).

        Trainer(callbacks=[Reweighing(groups="race")])

    The loss of a sample of cell (y, z) counts `w[y, z] = P(y) P(z) / P(y, z)` times, with the frequencies of the
    training set. The weights stay as they are during the training, and do not depend on a criterion.

    Args:
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loss, logits, loader, seed.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.weights: Tensor | None = None
        """The weights of the cells `(Y, Z)`; None before the training data is known."""

    def start(self, data: LoadedData) -> None:
        """Compute the weights."""
        super().start(data)
        self.weights = independence_weights(data.index.counts)

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return what makes the mean of the losses a weighted one."""
        weights = self.weights.to(losses).flatten()[cells]  # type: ignore[union-attr]
        return ((weights - 1) * losses).mean()


class Resampling(ChangesBatches):
    """Draws samples as often as [`Reweighing`][fairbatch_lightning.callbacks.baselines.Reweighing] weighs them.

        Trainer(callbacks=[Resampling(groups="race")])

    Kamiran and Calders (2011) propose it for learners that know no weights; here it spares an access to the loss. Where
    cells are empty label and group stay dependent, as labels keep their frequency.
    """

    def shares_of(self, index: GroupIndex) -> Tensor:
        """Return shares by which groups are as frequent among the samples of each label as among all."""
        wanted = index.counts.double() * independence_weights(index.counts)
        return wanted / wanted.sum(1, keepdim=True)
