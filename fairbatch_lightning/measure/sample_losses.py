"""The loss of every single sample when it was last trained on: what importance sampling weighs by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.devices import to_device
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.group_loss import GroupLoss
from fairbatch_lightning.measure.per_sample import PerSampleLoss, SampleLoss


class LossOfEverySample:
    """Watches the losses of single samples in training.

    Args:
        index: The cell of every sample.
        loss: The per-sample loss.
        classes: Which of the model's classes labels are.
    """

    def __init__(self, index: GroupIndex, loss: PerSampleLoss, classes: ClassNumbers | None = None) -> None:
        self._index, self._loss = index, SampleLoss(index, loss, None, classes)
        self._known = torch.full((len(index),), torch.nan)
        self._recent = GroupLoss(1, len(index), sum_dtype=torch.float32)  # here every sample is a cell of its own

    def observe(self, logits: Tensor, samples: list[int]) -> None:
        """Add a batch that this process has trained on; waits for no device."""
        if self._recent.device != logits.device:
            self._recent = self._recent.to(logits.device)
        cells = to_device(torch.from_numpy(self._index.cells[samples].astype(np.int64)), logits.device)
        self._recent.add(self._loss(logits, cells), to_device(torch.tensor(samples), logits.device))

    def known(self) -> Array:
        """Return the losses `(N,)` that all processes together know by now; NaN where there is none yet."""
        with self._recent.sync_context():
            recent = (self._recent.sums / self._recent.counts).view(-1).cpu()
        self._known = torch.where(recent.isnan(), self._known, recent)
        self._recent.reset()
        return np.asarray(self._known.numpy().copy())

    def state_dict(self, *, alone: bool) -> dict[str, Any]:
        """Return what was seen; called on all processes, unless the others are gone and this one is `alone`."""
        with self._recent.sync_context(should_sync=not alone):
            recent = {name: getattr(self._recent, name).view(-1).cpu().clone() for name in ("sums", "counts")}
        return {"known": self._known.clone(), **recent}

    def load_state_dict(self, state: dict[str, Any] | Saved, rank: int) -> None:
        """Go on from what was seen; what nobody has asked for yet is left to the first process."""
        saved, number = Saved.of(state, "importance"), len(self._index)
        recent = {"sums": saved["sums"].tensor(number), "counts": saved["counts"].tensor(number, whole=True, least=0)}
        self._known = saved["known"].tensor(number).float()
        self._recent.reset()
        if rank == 0:
            for name, values in recent.items():
                getattr(self._recent, name).view(-1).copy_(values)
