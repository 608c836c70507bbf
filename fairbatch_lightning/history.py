"""What happened in the updates of the shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.logs import log_name
from fairbatch_lightning.plots import SharesOverTime


@dataclass(frozen=True)
class UpdateRecord:
    """One update of the shares.

    Args:
        epoch: The epoch in which it happened.
        step: The Trainer's `global_step` at that time.
        losses: Mean loss of every cell, `(Y, Z)`; NaN where there is no sample.
        gaps: How unequal each label's groups are, `(Y,)`; NaN for labels that the criterion does not compare.
        shares_before: The `(Y, Z)` shares that the losses were reached with.
        shares_after: The `(Y, Z)` shares from then on.
    """

    epoch: int
    step: int
    losses: Tensor
    gaps: Tensor
    shares_before: Tensor
    shares_after: Tensor

    @property
    def gap_max(self) -> float:
        """The largest gap, NaN if there is none."""
        return max((gap for gap in self.gaps.tolist() if not math.isnan(gap)), default=math.nan)

    def log_values(self, index: GroupIndex) -> dict[str, float]:
        """Return losses, new shares and gaps by stable names, for loggers."""
        values = {"fairbatch/gap_max": self.gap_max, **shares_by_name(self.shares_after, index)}
        losses = self.losses.tolist()
        for label, group in (index.counts > 0).nonzero().tolist():
            name = log_name("fairbatch", "loss", index.label_names[label], index.group_names[group])
            values[name] = losses[label][group]
        for label, gap in zip(index.label_names, self.gaps.tolist(), strict=True):
            if not math.isnan(gap):
                values[log_name("fairbatch", "gap", label)] = gap
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain numbers and tensors, for checkpoints."""
        return asdict(self)


def shares_by_name(shares: Tensor, index: GroupIndex) -> dict[str, float]:
    """Return the `(Y, Z)` shares of the cells that have samples, by stable names, for loggers."""
    values = shares.tolist()
    return {
        log_name("fairbatch", "share", index.label_names[label], index.group_names[group]): values[label][group]
        for label, group in (index.counts > 0).nonzero().tolist()
    }


def over_time(history: Sequence[UpdateRecord], index: GroupIndex) -> SharesOverTime:
    """Return a history as pictures need it."""
    return SharesOverTime(
        index.label_names,
        index.group_names,
        shares=torch.stack([history[0].shares_before, *(record.shares_after for record in history)]),
        losses=torch.stack([record.losses for record in history]),
        gaps=torch.stack([record.gaps for record in history]),
    )
