"""What a rule is: a function from what it remembers and what was measured to new shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.cells.index import GroupIndex, natural_shares
from fairbatch_lightning.measure.per_sample import cross_entropy
from fairbatch_lightning.rules.criteria import Compare, Criterion, row_gaps


@dataclass(frozen=True)
class Measurement:
    """What an update is based on.

    Args:
        losses: The mean loss of every cell, `(Y, Z)`; NaN where it is not known.
        samples: How many samples each of them is the mean of, `(Y, Z)`.
        index: The cells of the training data.
        criterion: What must become equal.
        passed: The part of the whole training that has passed since the last update, from 0 to 1.
    """

    losses: Tensor
    samples: Tensor
    index: GroupIndex
    criterion: Criterion
    passed: float = 0.0

    @property
    def counts(self) -> Tensor:
        """How many training samples each cell has, `(Y, Z)`."""
        return self.index.counts

    @cached_property
    def signal(self) -> Tensor:
        """How much each cell needs more share, `(Y, Z)`; NaN for cells that take no part."""
        return self.criterion.compared(_precise(self.losses), self.index)

    @cached_property
    def differences(self) -> Tensor:
        """How far each cell is from all groups together, `(Y, Z)`: with errors for losses, the rates that are reported.

        Positive where the cell needs more share; NaN for cells that take no part.
        """
        return self.criterion.differences(_precise(self.losses), self.index)

    @cached_property
    def noise(self) -> Tensor:
        """The standard errors of the rates that `differences` are of, `(Y, Z)`; infinite where nothing is known."""
        return self.criterion.noise(_precise(self.losses), _precise(self.samples), self.index)


def _precise(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


@dataclass(frozen=True)
class RuleState:
    """What is known between two updates; checkpoints hold it.

    Args:
        shares: The `(Y, Z)` shares as of now, every row summing to 1.
        updates: How many updates there have been.
        memory: Whatever else a rule remembers, by name; what it begins with keeps its shape.
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

    def load(self, state: Mapping[str, Any] | Saved) -> RuleState:
        """Return the state that was saved, perhaps by another rule, if it is for the cells that this one is for."""
        saved = Saved.of(state)
        entries = saved["memory"].entries()
        if set(entries) & set(self.memory):  # of a rule like this one
            entries |= {name: saved["memory"][name] for name in self.memory}
        memory = {name: _remembered(one, self.memory.get(name)) for name, one in entries.items()}
        shares = saved["shares"].tensor(*self.shares.shape, finite=True, least=0)
        return RuleState(shares, saved["updates"].integer(), {**self.memory, **memory})


def _remembered(saved: Saved, at_first: Tensor | None) -> Tensor:
    """Return what a rule remembers: like what it began with, if it had that from the beginning."""
    if at_first is None:
        return saved.tensor(*getattr(saved.value, "shape", ()))
    return saved.tensor(*at_first.shape, finite=bool(at_first.isfinite().all()))


def check_tolerance(tolerance: object) -> None:
    """Refuse a tolerance that is not a number of at least 0; an infinite one is plain training."""
    if isinstance(tolerance, bool) or not (isinstance(tolerance, Real) and float(tolerance) >= 0):
        raise ValueError(f"Expected argument `tolerance` to be a number of at least 0 but got {tolerance!r}.")


class UpdateRule(ABC):
    """Shifts the shares after every measurement. Write a subclass and pass an object of it as `FairBatch(rule=...)`.

    A rule is a function and keeps nothing itself: what it has to remember goes into the state that it returns. Empty
    cells have share 0 for good, and every row sums to 1.

    >>> from fairbatch_lightning import EqualizedOdds
    >>> class HalfWay(UpdateRule):
    ...     '''Goes half of the way to shares that are proportional to the signal.'''
    ...     def update(self, state, measured):
    ...         wanted = measured.signal.nan_to_num(0)
    ...         wanted = wanted / wanted.sum(1, keepdim=True)
    ...         return state.after((state.shares + wanted) / 2)
    >>> index = GroupIndex.from_values([0, 0, 0, 0, 1, 1], ["a", "a", "a", "b", "a", "b"])
    >>> losses, samples = torch.tensor([[0.2, 0.6], [0.3, 0.3]]), index.counts
    >>> rule = HalfWay()
    >>> rule.update(rule.start(index.counts), Measurement(losses, samples, index, EqualizedOdds())).shares
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    compare: Compare = "row"
    """How groups are compared, for the gaps that are logged."""
    loss = staticmethod(cross_entropy)
    """What it wants to know of samples, unless FairBatch is told."""
    window = 0.0
    """Over which part of the training it wants losses averaged; 0: since the last update."""
    updates = 0
    """How many updates a training should have at least where measuring costs nothing; one follows each epoch anyway."""
    starves_cells = True
    """Whether a cell may be left with next to no share, so that training batches say nothing about it."""

    def start(self, counts: Tensor) -> RuleState:
        """Return where training begins, given the cells' samples `(Y, Z)`: at the data's own shares."""
        return RuleState(natural_shares(counts))

    def resumed(self, state: RuleState, counts: Tensor) -> RuleState:
        """Return where to go on from a state that was saved, perhaps with other settings; `counts` as for `start`."""
        return state

    @abstractmethod
    def update(self, state: RuleState, measured: Measurement) -> RuleState:
        """Return the state after an update.

        Args:
            state: What was returned last.
            measured: What is known of the cells.
        """

    def gaps(self, measured: Measurement) -> Tensor:
        """Return how unequal the groups of every label are, `(Y,)`; NaN where there is nothing to compare."""
        return row_gaps(measured.signal, self.compare)

    def remark(self, state: RuleState, measured: Measurement) -> str | None:
        """Return what a user should know at the end of training, if anything, given the last state and measurement."""
        return None
