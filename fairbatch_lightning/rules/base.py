"""What a rule is: a function from counts, what it remembers, and a signal to new shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning.cells.index import natural_shares
from fairbatch_lightning.rules.criteria import Compare, row_gaps


@dataclass(frozen=True)
class RuleState:
    """What is known between two updates; checkpoints hold it.

    Args:
        shares: The `(Y, Z)` shares as of now, every row summing to 1.
        updates: How many updates there have been.
        memory: Whatever else a rule remembers, by name.
    """

    shares: Tensor
    updates: int = 0
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    def after(self, shares: Tensor, **memory: Tensor) -> RuleState:
        """Return the state after an update."""
        return RuleState(shares, self.updates + 1, memory)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers and tensors, for checkpoints."""
        return {"shares": self.shares.clone(), "updates": self.updates, "memory": dict(self.memory)}

    def load(self, state: Mapping[str, Any]) -> RuleState:
        """Return the state that was saved, if it is for the cells that this one is for."""
        if state["shares"].shape != self.shares.shape:
            raise ValueError(
                f"Expected saved shares of shape {tuple(self.shares.shape)} (labels, groups) but got"
                f" {tuple(state['shares'].shape)}: the training data has other labels or groups than when it was saved."
            )
        return RuleState(state["shares"].clone(), int(state["updates"]), dict(state["memory"]))


class UpdateRule(ABC):
    """Shifts the shares after every measurement. Write a subclass and pass an object of it as `FairBatch(rule=...)`.

    A rule is a function and keeps nothing itself: what it has to remember goes into the state that it returns. Empty
    cells have share 0 for good, and every row sums to 1.

    >>> class HalfWay(UpdateRule):
    ...     '''Goes half of the way to shares that are proportional to the signal.'''
    ...     def update(self, counts, state, signal):
    ...         wanted = signal.nan_to_num(0)
    ...         wanted = wanted / wanted.sum(1, keepdim=True)
    ...         return state.after((state.shares + wanted) / 2)
    >>> rule, counts = HalfWay(), torch.tensor([[30, 10], [20, 20]])
    >>> rule.update(counts, rule.start(counts), torch.tensor([[0.2, 0.6], [0.3, 0.3]])).shares
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    compare: Compare = "row"
    """How groups are compared, for the gaps that are logged."""

    def start(self, counts: Tensor) -> RuleState:
        """Return where training begins, given the cells' samples `(Y, Z)`: at the data's own shares."""
        return RuleState(natural_shares(counts))

    @abstractmethod
    def update(self, counts: Tensor, state: RuleState, signal: Tensor) -> RuleState:
        """Return the state after an update.

        Args:
            counts: How many training samples each cell has, `(Y, Z)`.
            state: What was returned last.
            signal: How much each cell needs more share, `(Y, Z)`; NaN for cells that take no part.
        """

    def gaps(self, signal: Tensor) -> Tensor:
        """Return how unequal the groups of every label are, `(Y,)`; NaN where there is nothing to compare."""
        return row_gaps(signal.detach().to("cpu", torch.float64), self.compare)
