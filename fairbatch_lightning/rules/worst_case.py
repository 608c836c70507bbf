"""Train for the worst mixture of groups: FairDRO (Jung et al., 2023) as a rule for the shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning.rules.base import Measurement, RuleState, UpdateRule
from fairbatch_lightning.rules.signed_steps import Alpha


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


@dataclass(frozen=True)
class WorstCase(UpdateRule):
    r"""Minimises, for every label, the largest mean loss over mixtures of groups (FairDRO, Jung et al., 2023).

        FairBatch("equalized_odds", "race", rule=WorstCase(alpha=lambda update: max(0, 1 - update / epochs)))

    For each label the shares of the groups are equal at the start, and move in every update by `alpha` towards those
    within the chi-squared `radius` of equal ones for which the label's loss is largest. It is for equalized odds.

    That paper weighs losses, and labels equally; here samples are drawn by the shares, and labels keep their frequency.

    Args:
        radius: How far the shares may be from equal ones: the paper's rho, from 0 up to (Z - 1) / 2.
        alpha: How far the shares move in an update, from 0 to 1: a number, or a function of the update's number. That
            paper lets it fall from 1 to 0, as above.
    """

    radius: float = 0.5
    alpha: Alpha = 0.1

    def __post_init__(self) -> None:
        check_number("radius", self.radius, 0, above=True)
        if not callable(self.alpha):
            check_number("alpha", self.alpha, 0, 1)

    def start(self, counts: Tensor) -> RuleState:
        """Return equal shares of all groups that a label has."""
        present = (counts > 0).double()
        return RuleState(present / present.sum(1, keepdim=True))

    def update(self, state: RuleState, measured: Measurement) -> RuleState:
        """Move all rows."""
        step = self.alpha(state.updates) if callable(self.alpha) else self.alpha
        check_number("alpha", step, 0, 1, origin=f" from the function for update {state.updates}")
        shares = state.shares.clone()
        for row, values in enumerate(measured.signal):
            known = ~values.isnan()
            if known.any():
                total = shares[row, known].sum()
                shares[row, known] += step * (total * worst_shares(values[known], self.radius) - shares[row, known])
        return state.after(shares)
