"""The default rule for the shares: no settings, for any data and any length of training.

The paper's update is dual ascent on "least loss such that the groups' losses are equal". This one is, too, but looks at
what is reported, the groups' rates of errors (a proxy-Lagrangian: Cotter et al., 2019), moves the shares of all labels
at once, in log-odds instead of shares, and is a proportional-integral controller (nuPI: Sohrabi et al., 2024), whose
speed follows from the length of the training. Rates and log-odds have no unit: one set of constants serves all data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairbatch_lightning.cells.index import natural_shares
from fairbatch_lightning.measure.per_sample import error
from fairbatch_lightning.rules.base import Measurement, RuleState, UpdateRule, check_tolerance

GAIN = 4.0
"""By how much a difference of rates of 1 shifts a log-odds. A log-odds of 1 moves rates by .1 to .6 on all data looked
at, so the loop answers a difference by about its own size; one of .05 makes a group a fifth more frequent at once."""
SETTLING = 0.15
"""In which part of the training a lasting difference shifts as much again: several times before the end, but slowly
enough for the model to follow."""
WINDOW = 0.05
"""Over which part of the training errors are averaged: shorter than the settling, longer than the noise."""
UPDATES = 200
"""How many updates there are at least: ten in a window."""
DOUBT = 1.0
"""How many standard errors of a rate count as noise: a difference within them is left alone, like a tolerance."""
LIMIT = math.log(8)
"""How far log-odds go. As rows are scaled to sum to 1, no cell is drawn less than 1/64 as often as in the data: none is
starved, so that training itself always tells how it fares."""
DAMPING = 0.2
"""How much every turn of direction slows a row: after five of them it moves at half its speed (Kesten's rule)."""
COMMON = 2.0
"""How often in a training what the labels have in common is forgotten. To draw a group more often for all labels alike
moves no threshold for it, and does not settle: it would drift to the limit."""
LONGEST_STEP = 0.5
"""Of the settling: what counts as passed at most between two updates, for trainings with few of them."""
ENOUGH_UPDATES, MOST_TOLD = 20, 5
"""How many updates it takes to say something about the result, and about how many cells."""
BY_HEART = 0.01
"""Rates of errors up to this say nothing any more: the model has learnt the training set by heart."""


def beyond(differences: Tensor, tolerance: float | Tensor) -> Tensor:
    """Return by how much differences exceed the tolerance; 0 for those within it and for unknown ones.

    >>> beyond(torch.tensor([0.08, -0.02, -0.1, torch.nan]), 0.05)
    tensor([ 0.0300, -0.0000, -0.0500,  0.0000])
    """
    return (differences.sign() * (differences.abs() - tolerance).clamp(min=0)).nan_to_num(0)


def tilted(shares: Tensor, log_odds: Tensor) -> Tensor:
    """Return shares `(Y, Z)` whose log-odds are shifted, every row summing to 1.

    >>> tilted(torch.tensor([[0.5, 0.5]]), torch.tensor([[math.log(3), 0.0]]))
    tensor([[0.7500, 0.2500]])
    """
    weights = shares * log_odds.exp()
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def common_part(log_odds: Tensor, counts: Tensor) -> Tensor:
    """Return what the log-odds `(Y, Z)` of a group have in common over its labels; 0 if those of a label never moved.

    That is one which the criterion does not compare, as the other label for equal opportunity: it stays as it is, and
    the rest moves against it.

    >>> common_part(torch.tensor([[3.0, -1.0], [1.0, -2.0]]), torch.tensor([[5, 5], [5, 5]]))
    tensor([[ 2.0000, -1.5000],
            [ 2.0000, -1.5000]])
    """
    if not log_odds.any(1).all():
        return torch.zeros_like(log_odds)
    present = counts > 0
    return (log_odds * present).sum(0) / present.sum(0).clamp(min=1) * present


@dataclass(frozen=True)
class Adaptive(UpdateRule):
    """The default rule: controls the log-odds of the shares by the cells' error rates. Nothing has to be set.

    Args:
        tolerance: By how much the rates of groups may differ from those of all, in the unit that is reported: 0.05 lets
            a group's rate be five points above or below. The more, the less accuracy fairness costs.

    >>> from fairbatch_lightning import EqualizedOdds, GroupIndex, Measurement
    >>> index = GroupIndex.from_values([0] * 400 + [1] * 200, ["a"] * 300 + ["b"] * 200 + ["a"] * 100)
    >>> errors, rule = torch.tensor([[0.1, 0.3], [0.2, 0.2]]), Adaptive()
    >>> seen = Measurement(errors, index.counts, index, EqualizedOdds(), passed=0.005)
    >>> rule.update(rule.start(index.counts), seen).shares
    tensor([[0.6305, 0.3695],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    tolerance: float = 0.0

    loss = staticmethod(error)
    window = WINDOW
    updates = UPDATES
    starves_cells = False

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    def start(self, counts: Tensor) -> RuleState:
        """Return the data's own shares."""
        zeros = torch.zeros(counts.shape, dtype=torch.float64)
        return RuleState(natural_shares(counts), memory=_memory(zeros, zeros, zeros[:, 0]))

    def update(self, state: RuleState, measured: Measurement) -> RuleState:
        """Move all rows by their differences, as far as these are beyond the noise and the tolerance."""
        integral, direction, turns = (state.memory[name] for name in ("integral", "direction", "turns"))
        differences = beyond(measured.differences, self.tolerance + DOUBT * measured.noise)
        turns = turns + ((differences * direction).sum(1) < 0)
        slowed = differences / (1 + DAMPING * turns).unsqueeze(1)
        integral = integral + GAIN * min(measured.passed / SETTLING, LONGEST_STEP) * slowed
        integral = integral - min(1.0, COMMON * measured.passed) * common_part(integral, measured.counts)
        integral = integral.clamp(-LIMIT, LIMIT)
        log_odds = (integral + GAIN * slowed).clamp(-LIMIT, LIMIT)
        shares = tilted(natural_shares(measured.counts), log_odds)
        return state.after(shares, **_memory(integral, differences, turns))

    def gaps(self, measured: Measurement) -> Tensor:
        """Return the disparity of every label, `(Y,)`: how far a group's rate is at most from that of all."""
        differences = measured.differences.abs()
        largest = differences.nan_to_num(-1).amax(1)
        return largest.where((~differences.isnan()).sum(1) > 1, torch.nan)

    def remark(self, state: RuleState, measured: Measurement) -> str | None:
        """Say so if the training set is learnt by heart, or if what is left of a gap cannot be had by shares."""
        known = ~measured.differences.isnan()
        if state.updates < ENOUGH_UPDATES or not known.any():
            return None
        if _errors(measured)[known].max() <= BY_HEART:
            return (
                "The model makes next to no errors on its training set any more, so that training does not tell which"
                ' groups are worse off: the shares have stayed as they were. FairBatch(estimate="validation") takes the'
                " errors of the validation set instead."
            )
        left = beyond(measured.differences, self.tolerance + 2 * _noise_of_all(measured))
        at_limit = (left != 0) & (left.sign() * state.memory["integral"] >= 0.99 * LIMIT)
        rows = known.sum(0)
        opposed = (left != 0) & (rows > 1) & (left.sign().sum(0).abs() == rows)  # worse off, or better, with each label
        return _unreachable(left, at_limit, opposed, measured) if (at_limit | opposed).any() else None


def _errors(measured: Measurement) -> Tensor:
    """Return the rates of wrong predictions, `(Y, Z)`, also where losses are measured against one label for all."""
    target = measured.criterion.target(measured.index)
    if target is None:
        return measured.losses
    own = torch.arange(len(measured.losses)).unsqueeze(1) == target
    return torch.where(own, measured.losses, 1 - measured.losses)


def _noise_of_all(measured: Measurement) -> Tensor:
    """Return the standard errors of the differences as if no sample had been seen twice, `(Y, Z)`."""
    seen = measured.samples.double().minimum(measured.counts.double())
    return measured.criterion.noise(measured.losses.double(), seen, measured.index)


def _unreachable(left: Tensor, at_limit: Tensor, opposed: Tensor, measured: Measurement) -> str:
    """Return which cells are not treated like others, by how much, why, and what would help."""
    index, worst = measured.index, left.abs().flatten().argsort(descending=True, stable=True)
    told = [divmod(int(cell), left.shape[1]) for cell in worst if (at_limit | opposed).flatten()[cell]][:MOST_TOLD]
    cells = ", ".join(
        f"{measured.differences[y, z]:+.3f} for label {index.label_names[y]}, group {index.group_names[z]}"
        for y, z in told
    )
    worse_off = index.group_names[int(left.amax(0).argmax())]
    why = ["The shares stand at their limit."] if at_limit.any() else []
    if opposed.any():
        why.append("Labels ask for opposite things: what helps a group with one label harms it with another.")
    return (
        "No composition of the batches makes the groups equal here. In training, rates differ from those of all groups"
        f" by {cells}. {' '.join(why)} More or better data of group {worse_off} would help; or"
        " accept a difference, FairBatch(rule=Adaptive(tolerance=...)), or ask for less by another criterion."
    )


def _memory(integral: Tensor, direction: Tensor, turns: Tensor) -> dict[str, Tensor]:
    return {"integral": integral, "direction": direction, "turns": turns}
