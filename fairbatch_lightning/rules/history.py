"""What happened in the updates of the shares."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from fairbatch_lightning._support.saved import Saved


@dataclass(frozen=True)
class UpdateRecord:
    """One update of the shares.

    Args:
        epoch: The epoch in which it happened.
        step: The Trainer's `global_step` at that time.
        losses: Mean loss of every cell that the rule saw, `(Y, Z)`; NaN where there is no sample.
        gaps: How unequal each label's groups are, `(Y,)`; NaN for labels that the criterion does not compare.
        shares_before: The `(Y, Z)` shares that the losses were reached with.
        shares_after: The `(Y, Z)` shares from then on.
        unit: What the losses are: "error" for rates of wrong predictions, otherwise "loss".
    """

    epoch: int
    step: int
    losses: Tensor
    gaps: Tensor
    shares_before: Tensor
    shares_after: Tensor
    unit: str = "loss"

    @property
    def gap_max(self) -> float:
        """The largest gap, NaN if there is none."""
        return max((gap for gap in self.gaps.tolist() if not math.isnan(gap)), default=math.nan)

    @classmethod
    def load(cls, state: dict[str, Any] | Saved, shape: tuple[int, int]) -> UpdateRecord:
        """Return the record of an update of `(Y, Z)` cells that was saved."""
        saved = Saved.of(state)
        of_cells = {name: saved[name].tensor(*shape) for name in ("losses", "shares_before", "shares_after")}
        gaps, unit = saved["gaps"].tensor(shape[0]), saved["unit"].text()
        if unit not in ("error", "loss"):
            raise saved["unit"].wrong('"error" or "loss"')
        return cls(saved["epoch"].integer(), saved["step"].integer(), gaps=gaps, unit=unit, **of_cells)

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain numbers and tensors, for checkpoints."""
        return asdict(self)
