"""The estimate that costs nothing: the losses of the training batches themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.devices import to_device
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.estimates.base import CellLosses, Estimate, TrainingRun, on_modules_device
from fairbatch_lightning.measure.estimates.silent_pass import SilentPass
from fairbatch_lightning.measure.estimates.training_set import draw


class OnlineEstimate(Estimate):
    """Averages the losses of the batches that were trained on since the last update: no forward pass of its own.

    With a rule that may take a cell's whole share, such as the paper's, a cell may hardly occur in these. Where one had
    fewer than half of `samples_per_cell`, or of all its samples, its row is evaluated instead on `samples_per_cell` of
    each of its cells. The whole row, because losses are compared within it, and those from training are of a slightly
    older model in training mode. No more samples are evaluated than were trained on (but one of each cell), so that
    frequent updates stay cheap. With `FairBatch(importance=...)` all rows are evaluated as long as the batches hold
    some samples of a cell more often.

    Args:
        samples_per_cell: How many samples of a cell are enough to know its loss.
        batch_size: How many samples to evaluate at once if need be; default: four times as many as in training, where
            that does not run out of memory.
    """

    watches_training = True

    def __init__(self, samples_per_cell: int = 1024, batch_size: int | None = None) -> None:
        check_at_least("samples_per_cell", samples_per_cell, 1)
        self._samples_per_cell = samples_per_cell
        self._pass = SilentPass(batch_size)

    def start(self, run: TrainingRun) -> None:
        """Forget the batches of an earlier fit."""
        self._seen, self._batches = run.new_metric(), RecentBatches()

    def observe(self, run: TrainingRun, logits: Tensor, cells: Array) -> None:
        """Add a training batch; waits for no device."""
        if not self._batches.fit(logits):
            self._add_batches(run)
            self._batches = RecentBatches(logits, self._batches.number)
        self._batches.append(logits, cells)
        if self._batches.full:
            self._add_batches(run)

    def _add_batches(self, run: TrainingRun) -> None:
        self._seen = on_modules_device(self._seen, run)
        if self._batches.waiting:
            logits, cells = self._batches.all()
            numbers = to_device(cells, self._seen.device)
            losses = run.sample_loss(logits, numbers).to(self._seen.device)
            new = self._batches.take()  # only now: meanwhile a signal's handler may have added them, for a checkpoint
            self._seen.add(losses[new], numbers[new])

    def measure(self, run: TrainingRun, update: int, *, uniform: bool) -> CellLosses:
        """Return the losses of the cells since the last update, and start anew."""
        self._add_batches(run)
        means, counts = CellLosses.of(self._seen)
        trained = counts // run.copies
        starved = trained < run.index.counts.clamp(max=self._samples_per_cell) / 2
        starved_rows = (starved & run.starves_cells).any(1, keepdim=True)
        if not uniform:
            starved_rows.fill_(True)
        if run.compared is not None:
            starved_rows &= run.compared.unsqueeze(1)
        if starved_rows.any():
            probe = self._probe(run, starved_rows.expand(run.index.shape), int(trained.sum()), update)
            means, counts = (
                torch.where(starved_rows, new, old) for new, old in zip(probe, (means, counts), strict=True)
            )
        self._batches.restart()  # only now: had the evaluation failed, a checkpoint would hold what was seen
        self._seen.sums.zero_()
        self._seen.counts.zero_()
        return CellLosses(means, counts)

    def _probe(self, run: TrainingRun, cells: Tensor, num_trained: int, update: int) -> CellLosses:
        """Evaluate samples of some cells (a `(Y, Z)` mask), but no more of them than were trained on, if any were."""
        numbers = cells.flatten().nonzero().flatten().numpy()
        per_cell = self._samples_per_cell
        if num_trained:
            per_cell = min(per_cell, affordable(run.index.counts[cells].numpy(), num_trained))
        return self._pass.measure(run, draw(run.index, numbers, per_cell, run.seed, update), seed=update)

    def state_dict(self, run: TrainingRun, *, alone: bool) -> dict[str, Any]:
        """Return what each process has seen since the last update, `(processes, Y, Z)`; `alone`, only this one."""
        self._add_batches(run)
        gather = (lambda values: values) if alone else run.trainer.strategy.all_gather
        seen = {name: gather(getattr(self._seen, name)).cpu() for name in ("sums", "counts")}
        parts = {name: values.view(-1, *run.index.shape)[:: run.copies].clone() for name, values in seen.items()}
        return {**parts, "num_batches": self._batches.number}

    def load_state_dict(self, run: TrainingRun, state: dict[str, Any]) -> None:
        """Go on from what each process had seen; with another number of processes the first goes on from all."""
        self.start(run)
        if not {"num_batches", "sums", "counts"} & set(state):  # of another estimate
            return
        saved = Saved(state, "estimate")
        self._batches.restart(saved["num_batches"].integer())
        counts = saved["counts"].tensor(None, *run.index.shape, whole=True, least=0)
        seen = {"counts": counts, "sums": saved["sums"].tensor(*counts.shape)}
        for name, values in seen.items():
            if len(values) == run.num_replicas:
                getattr(self._seen, name).copy_(values[run.rank])
            elif run.rank == 0:
                getattr(self._seen, name).copy_(values.sum(0))

    def close(self) -> None:
        """End worker processes."""
        self._pass.close()


def affordable(sizes: Array, total: int) -> int:
    """Return how many samples can be drawn from each of the cells of these sizes, if `total` is the most of all.

    Cells with fewer samples leave more for the others. At least one.

    >>> affordable(np.array([2, 100, 100]), 52), affordable(np.array([2, 9, 7]), 52)
    (25, 52)
    """
    left = total
    for number, size in enumerate(np.sort(sizes)):
        cells = len(sizes) - number
        if size * cells > left:
            return max(1, left // cells)
        left -= int(size)
    return max(1, total)


class RecentBatches:
    """Keeps the last few batches, so that their losses can be computed all at once, which takes far less time.

    A batch's place depends on its number alone, and losses are always computed over all places. So they are the same to
    the last bit whenever that happens, for instance because a checkpoint is saved.

    Args:
        logits: The logits of a batch; others must be like it.
        number: How many batches there have been.
    """

    _MOST_BATCHES, _MOST_LOGITS = 32, 2**18

    def __init__(self, logits: Tensor | None = None, number: int = 0) -> None:
        self.number = self._taken = number
        self._logits = torch.empty(0) if logits is None else self._room_for(logits)
        self._places = self._logits.unbind()
        self._kind = self._logits.shape[1:], self._logits.dtype, self._logits.device
        self._cells = np.zeros(self._logits.shape[:2], np.int64)

    def _room_for(self, logits: Tensor) -> Tensor:
        size = max(1, min(self._MOST_BATCHES, self._MOST_LOGITS // logits.numel()))
        return logits.new_zeros(size, *logits.shape)

    def fit(self, logits: Tensor) -> bool:
        """Return whether there are places for logits like these."""
        return self._kind == (logits.shape, logits.dtype, logits.device)

    @property
    def full(self) -> bool:
        """Whether the next batch would take the place of an earlier one."""
        return self.number % len(self._places) == 0

    def append(self, logits: Tensor, cells: Array) -> None:
        """Keep a batch."""
        place = self.number % len(self._places)
        self._places[place].copy_(logits)
        self._cells[place] = cells
        self.number += 1

    @property
    def waiting(self) -> bool:
        """Whether there are batches that were not taken yet."""
        return self.number > self._taken

    def all(self) -> tuple[Tensor, Tensor]:
        """Return the logits and cells of all places."""
        return self._logits.flatten(0, 1), torch.from_numpy(self._cells.copy()).flatten()

    def take(self) -> slice:
        """Return which of these samples were not taken yet."""
        first, batch_size = self._taken % len(self._places), self._cells.shape[1]
        end = first + self.number - self._taken
        self._taken = self.number
        return slice(first * batch_size, end * batch_size)

    def restart(self, number: int = 0) -> None:
        """Count from a new number on."""
        self.number = self._taken = number
