"""FairBatch during one `fit`, once the training data is known.

Here the loop closes: measured losses go to the criterion, its signal to the rule, the shares to the sampler.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.epoch import check_shares
from fairbatch_lightning.batches.sampler import Drawn, FairSampler
from fairbatch_lightning.callbacks.length import batches_done, expected_batches
from fairbatch_lightning.measure.estimates.base import CellLosses, Estimate, TrainingRun
from fairbatch_lightning.measure.estimates.silent_pass import check_can_evaluate
from fairbatch_lightning.measure.logits import returned_logits
from fairbatch_lightning.measure.per_sample import PerSampleLoss
from fairbatch_lightning.measure.sample_losses import LossOfEverySample
from fairbatch_lightning.rules.base import Measurement, UpdateRule
from fairbatch_lightning.rules.criteria import Criterion
from fairbatch_lightning.rules.history import UpdateRecord
from fairbatch_lightning.rules.importance import Importance


class FairFit:
    """The parts of FairBatch for one fit.

    Args:
        run: The Trainer, the module and the data.
        criterion: What must become equal.
        rule: What decides about the shares.
        estimate: What measures the losses; of this fit only.
        importance: What weighs the samples of a cell, if anything does.
        importance_loss: By which loss it weighs them.
    """

    def __init__(
        self,
        run: TrainingRun,
        criterion: Criterion,
        rule: UpdateRule,
        estimate: Estimate,
        importance: Importance | None,
        importance_loss: PerSampleLoss,
    ) -> None:
        check_can_evaluate(run)
        self.run, self._criterion, self._rule, self.estimate = run, criterion, rule, estimate
        self._given_importance, self._importance_loss = importance, importance_loss
        self._start_importance()
        self.state = rule.start(run.index.counts)
        self.history: list[UpdateRecord] = []
        self._recent: CellLosses | None = None
        self._measured: Measurement | None = None
        self._updated_at, self._length = 0, math.inf  # in batches
        self._logits_seen = False
        self._resumed_epoch: int | None = None
        self._warned: set[str] = set()
        estimate.start(run)

    def _start_importance(self) -> None:
        """Know nothing of the samples yet."""
        self._importance = copy.deepcopy(self._given_importance)
        self._sample_losses: LossOfEverySample | None = None
        if self._importance is not None:
            self._sample_losses = LossOfEverySample(self.run.index, self._importance_loss)

    def reload(self, run: TrainingRun, *, same_samples: bool) -> None:
        """Go on with data that was loaded anew."""
        self.run = run
        if not same_samples:
            self._start_importance()

    def close(self) -> None:
        """Let go of what the fit needed."""
        self.estimate.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what happened in the fit, not the Trainer, module and data it was made with."""
        return {"state": self.state, "history": self.history}

    @property
    def _watches_training(self) -> bool:
        return self.estimate.watches_training or self._importance is not None

    def before_batch(self) -> None:
        """Keep the logits of a training batch if they are wanted, and those of the first for a check."""
        first = not self._logits_seen and not self.run.is_compiled  # there it would have everything compiled twice
        if first or self._watches_training:
            self.run.reader.expect(self.run.loader.batch_size)

    def after_batch(self, batch: Drawn | None, outputs: Any) -> None:
        """Show a training batch to whom it concerns; there is none if a loader that is shorter than others is through.

        Args:
            batch: The samples of the batch.
            outputs: What `training_step` returned.
        """
        reader = self.run.reader
        if batch is None or (self._logits_seen and not self._watches_training):
            reader.drop()
            return
        automatic = self.run.module.automatic_optimization
        returned_first = reader.training_step_returns if self._logits_seen else automatic
        logits = reader.read(outputs, len(batch.samples), returned_first=returned_first)
        if not self._logits_seen:
            self._check_logits(outputs, logits, batch)
        if logits is None:
            return
        if self.estimate.watches_training:
            self.estimate.observe(self.run, logits.detach(), batch.cells)
        if self._sample_losses is not None:
            self._sample_losses.observe(logits.detach(), batch.samples)

    def _check_logits(self, outputs: Any, logits: Tensor | None, batch: Drawn) -> None:
        """After the first training batch: see that its logits were found, and that losses can be had of them."""
        automatic, reader = self.run.module.automatic_optimization, self.run.reader
        if logits is None and not self.run.is_compiled:  # see `before_batch`; there the first update will see
            if automatic and not outputs:
                return  # the step has left this batch out
            raise reader.missing(len(batch.samples))
        if logits is not None:
            if logits is returned_logits(outputs, len(batch.samples)):
                reader.training_step_returns = automatic
                if not automatic and not self.run.is_compiled:
                    raise RuntimeError(
                        "With manual optimization FairBatch cannot run `training_step` to its end for the logits that"
                        " it returns. Call `self(x)` in it, or name the submodule that computes them:"
                        ' FairBatch(logits="net").'
                    )
            self.run.add_losses(self.run.new_metric(), logits.detach(), batch.cells)
        self._logits_seen = True

    def is_due(self, batches_left: float) -> bool:
        """Return whether it is time for one of the updates that the rule wants to have within epochs.

        Args:
            batches_left: How many batches of the epoch there still are; there is an update after the last in any case.
        """
        between = max(1, round(self._length / self._rule.updates))
        return batches_left >= between / 2 and batches_done(self.run.trainer) - self._updated_at >= between

    def look_ahead(self, sampler: FairSampler) -> float:
        """Find out how long the whole training is; return which part of it has passed since the last update."""
        self._length = expected_batches(self.run.trainer, self.run.module, sampler.num_batches)
        return max(0, batches_done(self.run.trainer) - self._updated_at) / self._length

    @torch.inference_mode(False)
    def update(self, sampler: FairSampler, epoch: int | None = None) -> UpdateRecord:
        """Measure the cells' losses, shift the shares, draw by them, and write it down.

        Args:
            sampler: Draws the batches.
            epoch: The epoch that the update is of; default: the current one.
        """
        trainer, index, before = self.run.trainer, self.run.index, self.state
        measured = self._measured = self._measure(sampler)
        self.state = replace(self._rule.update(before, measured), updates=before.updates + 1)
        sampler.shares = self.state.shares
        if self._importance is not None and self._sample_losses is not None:
            sampler.weights = self._importance.weights(self._sample_losses.known(), index, before.updates)
        epoch = trainer.current_epoch if epoch is None else epoch
        gaps, unit = self._rule.gaps(measured), "error" if self.run.sample_loss.is_error else "loss"
        record = UpdateRecord(epoch, trainer.global_step, measured.losses, gaps, before.shares, self.state.shares, unit)
        self.history.append(record)
        return record

    def _measure(self, sampler: FairSampler) -> Measurement:
        """Return what is known of the cells now."""
        passed = self.look_ahead(sampler)
        self._updated_at = batches_done(self.run.trainer)
        now = self.estimate.measure(self.run, self.state.updates, uniform=not sampler.weighted)
        self._say_what_is_broken(now)
        if self._rule.window:
            if self._recent is not None:
                now = now.together_with(self._recent, kept=math.exp(-passed / self._rule.window))
            self._recent = now
        return Measurement(now.means, now.counts, self.run.index, self._criterion, passed)

    def remark(self) -> str | None:
        """Return what a user should know at the end of training, if anything."""
        return None if self._measured is None else self._rule.remark(self.state, self._measured)

    def _say_what_is_broken(self, measured: CellLosses) -> None:
        """Say once if some losses are not finite."""
        broken_cells = (measured.counts > 0) & ~measured.means.isfinite()
        if broken_cells.any() and (broken := self.run.index.cell_names(broken_cells)) not in self._warned:
            self._warned.add(broken)
            warn(
                f"The loss is NaN or infinite in the cells {broken}. They take no part in an"
                " update until it is finite again. Look for bad samples there, or for diverging training."
            )

    def missed_epoch(self, *, updates_within: bool) -> int | None:
        """Return the epoch whose update was not made, if any, when a run is resumed.

        Lightning resumes from a checkpoint of an epoch's last batch at the next epoch, without the end of this one.
        """
        epoch = self._resumed_epoch
        if epoch is None or epoch >= self.run.trainer.current_epoch:
            return None
        if updates_within:
            return epoch if self._updated_at < batches_done(self.run.trainer) else None
        return None if any(record.epoch == epoch for record in self.history) else epoch

    def state_dict(self, epoch: int, *, alone: bool) -> dict[str, Any]:
        """Return what a resumed run needs, besides the place in this epoch."""
        losses = self._sample_losses
        return {
            "epoch": epoch,
            "rule": self.state.state_dict(),
            "recent": None if self._recent is None else list(self._recent),
            "updated_at": self._updated_at,
            "length": self._length,
            "step_returns_logits": self.run.reader.training_step_returns,
            "estimate": self.estimate.state_dict(self.run, alone=alone),
            "importance": None if losses is None else losses.state_dict(alone=alone),
            "history": [record.state_dict() for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on the same training data."""
        saved, shape = Saved.of(state, "learnt"), self.run.index.shape
        self.state = self.state.load(saved["rule"])
        with saved["rule"]["shares"].checked():
            check_shares(self.state.shares, self.run.index)
        self._recent = None if saved["recent"].value is None else CellLosses.load(saved["recent"], shape)
        self._updated_at, self._length = saved["updated_at"].integer(), saved["length"].number(1)
        self.run.reader.training_step_returns |= saved["step_returns_logits"].flag()
        self.estimate.load_state_dict(self.run, saved["estimate"].whole())
        importance = saved["importance"]
        if self._sample_losses is not None and importance.value is not None:
            self._sample_losses.load_state_dict(importance, self.run.rank)
        self.history = [UpdateRecord.load(record, shape) for record in saved["history"]]
        self._resumed_epoch = saved["epoch"].integer()
