"""Where a pass over an epoch stands, and by what its batches are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairbatch_lightning.draws import Array


class Plan(NamedTuple):
    """What batches are drawn by, from the first of them on: shares `(Y, Z)`, and weights `(N,)` or None."""

    first: int
    shares: Tensor
    weights: Array | None = None


@dataclass
class Pass:
    """One pass over an epoch: the plans that it follows; batches before `next_batch` are drawn."""

    epoch: int
    plans: list[Plan]
    next_batch: int = 0
    started: bool = False
    finished: bool = False

    def plan(self, batch: int) -> Plan:
        """Return the plan that a batch follows."""
        return next(plan for plan in reversed(self.plans) if plan.first <= batch)

    def follow(self, shares: Tensor, weights: Array | None) -> None:
        """Draw all batches from the next one on by these."""
        earlier = [plan for plan in self.plans if plan.first < self.next_batch]
        self.plans = [*earlier, Plan(self.next_batch, shares, weights)]

    def state_dict(self, next_batch: int | None) -> dict[str, Any]:
        """Return what is needed to go on at this batch, or where the pass is if that is earlier.

        Of batches before it only the shares matter: from them follows how far each cell's walk has got.
        """
        first = self.next_batch if next_batch is None else min(next_batch, self.next_batch)
        current = self.plan(first).first
        needed = [plan.weights if plan.first >= current else None for plan in self.plans]
        return {
            "epoch": self.epoch,
            "next_batch": first,
            "schedule": [(plan.first, plan.shares.clone()) for plan in self.plans],
            "weights": [None if weights is None else torch.from_numpy(weights.copy()) for weights in needed],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Pass:
        """Return a pass that goes on where a state was taken."""
        saved = state.get("weights", [None] * len(state["schedule"]))  # older versions had none
        weights = [None if one is None else one.numpy().copy() for one in saved]
        entries = zip(state["schedule"], weights, strict=True)
        plans = [Plan(int(first), shares.clone(), weight) for (first, shares), weight in entries]
        return cls(state["epoch"], plans, state["next_batch"])
