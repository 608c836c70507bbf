"""The estimate that costs nothing: the losses of the training batches themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning.estimate import Estimate, TrainingRun
from fairbatch_lightning.estimates import check_samples_per_cell, draw
from fairbatch_lightning.evaluation import Evaluation
from fairbatch_lightning.metrics import GroupLoss


class OnlineEstimate(Estimate):
    """Averages the losses of the batches that were trained on since the last update: no forward pass of its own.

    A cell whose share is small may hardly occur in these. Where a cell had fewer than half of `samples_per_cell`, or of
    all its samples, its row is evaluated instead on `samples_per_cell` of each of its cells. The whole row, because
    losses are compared within it, and those from training are of a slightly older model in training mode. No more
    samples are evaluated than were trained on, so that frequent updates stay cheap.

    Args:
        samples_per_cell: How many samples of a cell are enough to know its loss.
        batch_size: How many samples to evaluate at once if need be; default: four times as many as in training, where
            that does not run out of memory.
    """

    watches = "training"

    def __init__(self, samples_per_cell: int = 1024, batch_size: int | None = None) -> None:
        check_samples_per_cell(samples_per_cell)
        self._samples_per_cell = samples_per_cell
        self._evaluation = Evaluation(batch_size)

    def start(self, run: TrainingRun) -> None:
        """Forget the batches of an earlier fit."""
        self._seen = run.new_metric()

    def observe(self, run: TrainingRun, logits: Tensor, cells: np.ndarray[Any, Any]) -> None:
        """Add a training batch; waits for no device."""
        run.add_losses(self._seen, logits, cells)

    def measure(self, run: TrainingRun) -> GroupLoss:
        """Return the losses of the cells since the last update, and start anew."""
        seen, self._seen = self._seen, run.new_metric()
        with seen.sync_context():
            counts = seen.counts.cpu()
        enough = run.index.counts.clamp(max=self._samples_per_cell) / 2
        starved_rows = (counts < enough).any(1, keepdim=True) & run.compared.unsqueeze(1)
        if starved_rows.any():
            probe = self._probe(run, starved_rows.expand(run.index.shape), int(counts.sum()))
            where = starved_rows.to(seen.device)
            seen.sums = torch.where(where, probe.sums, seen.sums)
            seen.counts = torch.where(where, probe.counts, seen.counts)
        return seen

    def _probe(self, run: TrainingRun, cells: Tensor, num_trained: int) -> GroupLoss:
        """Evaluate samples of some cells (a `(Y, Z)` mask), but no more of them than were trained on."""
        numbers = cells.flatten().nonzero().flatten().numpy()
        per_cell = max(1, min(self._samples_per_cell, num_trained // len(numbers)))
        return self._evaluation.measure(run, draw(run.index, numbers, per_cell, run.seed, run.num_updates))

    def state_dict(self, run: TrainingRun) -> dict[str, Any]:
        """Return what each process has seen since the last update, `(processes, Y, Z)`."""
        gathered = run.trainer.strategy.all_gather
        shape = run.num_replicas, *run.index.shape
        return {name: gathered(getattr(self._seen, name)).cpu().view(shape) for name in ("sums", "counts")}

    def load_state_dict(self, run: TrainingRun, state: dict[str, Any]) -> None:
        """Go on from what each process had seen; with another number of processes the first goes on from all."""
        self.start(run)
        for name, values in state.items():
            if len(values) == run.num_replicas:
                getattr(self._seen, name).copy_(values[run.rank])
            elif run.rank == 0:
                getattr(self._seen, name).copy_(values.sum(0))
