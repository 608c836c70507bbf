"""Where a pass over an epoch stands, and by what its batches are drawn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.values import Array


class Plan(NamedTuple):
    """What batches are drawn by, from the first of them on: shares `(Y, Z)`, and weights `(N,)` or None."""

    first: int
    shares: Tensor
    weights: Array | None = None


@dataclass
class Pass:
    """One pass over an epoch: the plans that it follows; batches before `next_batch` are drawn.

    A pass that goes on where another was left had `drawn_before` batches drawn there, perhaps some ahead of training.
    Those before `trained` are trained on as well. Nobody goes on from an earlier one, so their weights are forgotten.
    """

    epoch: int
    plans: list[Plan]
    next_batch: int = 0
    started: bool = False
    finished: bool = False
    drawn_before: int = 0
    trained: int = 0

    def plan(self, batch: int) -> Plan:
        """Return the plan that a batch follows."""
        return next(plan for plan in reversed(self.plans) if plan.first <= batch)

    def follow(self, shares: Tensor, weights: Array | None) -> None:
        """Draw all batches from the next one on by these."""
        first = max(self.next_batch, self.drawn_before)
        plans = [*(plan for plan in self.plans if plan.first < first), Plan(first, shares, weights)]
        self.plans = [
            Plan(plan.first, plan.shares) if after.first <= self.trained else plan
            for plan, after in itertools.pairwise(plans)
        ] + plans[-1:]

    def state_dict(self, next_batch: int | None) -> dict[str, Any]:
        """Return what is needed to go on at this batch, or where the pass is if that is earlier.

        Of batches before it only the shares matter: from them follows how far each cell's walk has got.
        """
        first = self.next_batch if next_batch is None else max(self.trained, min(next_batch, self.next_batch))
        current = self.plan(first).first
        needed = [plan.weights if plan.first >= current else None for plan in self.plans]
        return {
            "epoch": self.epoch,
            "next_batch": first,
            "drawn": max(self.next_batch, self.drawn_before),
            "schedule": [(plan.first, plan.shares.clone()) for plan in self.plans],
            "weights": [None if weights is None else torch.from_numpy(weights.copy()) for weights in needed],
        }

    @classmethod
    def from_state(cls, state: Saved, index: GroupIndex) -> Pass:
        """Return a pass over these cells that goes on where a state was taken."""
        num_batches = state["num_batches"].integer(1)
        schedule = [entry.several(2) for entry in state["schedule"]]
        firsts = [first.integer(0, num_batches) for first, _ in schedule]
        if firsts[:1] != [0] or any(after <= before for before, after in itertools.pairwise(firsts)):
            raise state["schedule"].wrong("a list of numbers of batches that rise from 0, with shares")
        shares = [saved_shares(saved, index) for _, saved in schedule]
        has_weights = "weights" in state and state["weights"].value is not None
        weights = [_saved_weights(one, index) for one in state["weights"].several(len(firsts))] if has_weights else []
        plans = list(map(Plan, firsts, shares, weights or [None] * len(firsts)))
        drawn = state["drawn"].integer(0, num_batches)
        return cls(state["epoch"].integer(), plans, state["next_batch"].integer(0, num_batches), drawn_before=drawn)


def saved_shares(saved: Saved, index: GroupIndex) -> Tensor:
    """Return shares from a checkpoint, or refuse them if they cannot be right."""
    shares = saved.tensor(*index.shape).double()
    with saved.checked():
        check_shares(shares, index)
    return shares


def _saved_weights(saved: Saved, index: GroupIndex) -> Array | None:
    if saved.value is None:
        return None
    weights: Array = saved.tensor(None).double().numpy()
    with saved.checked():
        check_weights(weights, index)
    return weights


def check_weights(weights: Array | None, index: GroupIndex) -> None:
    """Refuse weights by which no sample of some cell could be drawn."""
    if weights is None:
        return
    if weights.shape != (len(index),):
        raise ValueError(f"Expected `weights` of shape ({len(index)},), one per sample, but got {weights.shape}.")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("Expected `weights` to be numbers of at least 0 but got some below 0, infinite or NaN.")
    totals = np.bincount(index.cells, weights, index.counts.numel()).reshape(index.shape)
    if (without := (torch.from_numpy(totals) == 0) & (index.counts > 0)).any():
        raise ValueError(
            f"Expected some of the `weights` to be above 0 in every cell but got none in {index.cell_names(without)}."
        )


def check_shares(shares: Tensor, index: GroupIndex) -> None:
    """Refuse shares that are none, or that are above 0 for cells without samples."""
    if tuple(shares.shape) != index.shape:
        raise ValueError(f"Expected `shares` of shape {index.shape} (labels, groups) but got {tuple(shares.shape)}.")
    if (
        not torch.isfinite(shares).all()
        or (shares < 0).any()
        or not torch.allclose(shares.sum(1), torch.ones(len(shares), dtype=shares.dtype), atol=1e-6)
    ):
        raise ValueError(f"Expected every row of `shares` to hold numbers from 0 to 1 that sum to 1 but got {shares}.")
    if (shares[index.counts == 0] > 0).any():
        empty = index.cell_names((index.counts == 0) & (shares > 0))
        raise ValueError(f"Expected share 0 for cells without samples but got more for {empty}.")
