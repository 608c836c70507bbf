"""Fairness constraints: penalise that the decision goes together with the group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning.callbacks.base import LoadedData
from fairbatch_lightning.callbacks.baselines.base import ForCriterion
from fairbatch_lightning.callbacks.baselines.loss_changing import LossChanging
from fairbatch_lightning.cells.classes import is_binary
from fairbatch_lightning.measure.per_sample import SampleLoss
from fairbatch_lightning.rules.criteria import Criterion, DemographicParity


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the log-odds of a class for every sample `(B,)`: above 0 it is more likely than all others together.

    >>> log_odds(torch.tensor([2.0, 2.0]), torch.tensor([1, 0]))
    tensor([ 2., -2.])
    """
    if is_binary(logits):
        return logits.flatten() * (2 * classes - 1)
    own = logits.gather(1, classes.unsqueeze(1)).squeeze(1)
    others = logits.masked_fill(torch.nn.functional.one_hot(classes, logits.shape[1]).bool(), -torch.inf)
    return own - others.logsumexp(1)


def covariances(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the covariance `(Z,)` of the values `(B,)` with belonging to each of the groups.

    >>> covariances(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]), 2)
    tensor([ 0.2500, -0.2500])
    """
    member = torch.nn.functional.one_hot(groups, num_groups).to(values)
    return ((member - member.mean(0)) * values.unsqueeze(1)).mean(0)


class FairnessConstraints(ForCriterion, LossChanging):
    r"""Adds a penalty for decisions that go together with the group (Zafar et al., 2017).

        Trainer(callbacks=[FairnessConstraints("demographic_parity", groups="race", weight=1.0)])

    With `d` the log-odds that the model gives a label, and Cov the covariance in the batch with belonging to group z,
    the loss grows by `weight` times the sum over z of:

    - "demographic_parity": `|Cov(z, d)|`, d of the positive label (that paper's AISTATS version)
    - "equal_opportunity": `|Cov(z, min(0, d))|` among samples of the positive label, d of that label (the WWW version,
      disparate mistreatment: by how much samples are on the wrong side)
    - "equalized_odds": the same for every label, added up

    Zafar et al. solve a convex problem under constraints on these covariances over all the data; this is its penalised
    form for stochastic gradients. Batches should hold several samples of each cell.

    Args:
        criterion: Which of these.
        weight: How much the penalty counts.
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loss, logits, loader, seed.
    """

    def __init__(self, criterion: str | Criterion = "equalized_odds", *, weight: float = 1.0, **arguments: Any) -> None:
        check_number("weight", weight, 0)
        super().__init__(criterion, **arguments)
        self._weight = weight

    def start(self, data: LoadedData) -> None:
        """Know what the decisions are about: the positive label, or each sample's own."""
        super().start(data)
        index, one = data.index, self.only_row(data.index)
        self._decision = SampleLoss(index, self._loss, self.criterion.target(index), self._classes)
        self._compared = range(index.shape[0]) if one is None else [one]
        self._num_groups = index.shape[1]

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return the penalty."""
        rows, groups = cells // self._num_groups, cells % self._num_groups
        values = log_odds(logits, self._decision.classes(logits, cells))
        if isinstance(self.criterion, DemographicParity):
            return self._weight * covariances(values, groups, self._num_groups).abs().sum()
        penalty = losses.new_zeros(())
        for row in self._compared:
            among = rows == row
            if among.any():
                wrong = values[among].clamp(max=0)
                penalty = penalty + covariances(wrong, groups[among], self._num_groups).abs().sum()
        return self._weight * penalty
