"""What happened in one update of the shares."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from fairbatch_lightning.groups import GroupIndex


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
        known = self.gaps[~self.gaps.isnan()]
        return float(known.max()) if len(known) else float("nan")

    def log_values(self, index: GroupIndex) -> dict[str, float]:
        """Return losses and new shares by stable names, for loggers."""
        values = {}
        for label, group in (index.counts > 0).nonzero().tolist():
            cell = f"{index.label_names[label]}/{index.group_names[group]}"
            values[f"fairbatch/loss/{cell}"] = float(self.losses[label, group])
            values[f"fairbatch/share/{cell}"] = float(self.shares_after[label, group])
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain numbers and tensors, for checkpoints."""
        return asdict(self)
