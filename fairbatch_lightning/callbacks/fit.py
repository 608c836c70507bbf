"""FairBatch during one `fit`, once the training data is known.

Here the loop closes: measured losses go to the criterion, its signal to the rule, the shares to the sampler.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairbatch_lightning._support.lightning import batches_ever_trained_on, validation_is_due
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.epoch import check_shares
from fairbatch_lightning.batches.sampler import Drawn, FairSampler
from fairbatch_lightning.callbacks.introduction import introduction
from fairbatch_lightning.callbacks.length import expected_batches
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.estimates.base import CellLosses, Estimate, TrainingRun
from fairbatch_lightning.measure.estimates.silent_pass import check_can_evaluate
from fairbatch_lightning.measure.outputs import Output
from fairbatch_lightning.measure.pairing import Pairing
from fairbatch_lightning.measure.per_sample import PerSampleLoss
from fairbatch_lightning.measure.sample_losses import LossOfEverySample
from fairbatch_lightning.rules.base import Measurement, UpdateRule
from fairbatch_lightning.rules.criteria import Criterion, check_positive
from fairbatch_lightning.rules.history import UpdateRecord
from fairbatch_lightning.rules.importance import Importance


class _Measured(NamedTuple):
    """What an update knows: of the cells, of which what is kept for the next one; and the length of the training."""

    measurement: Measurement
    recent: CellLosses | None
    length: float


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
        self.pairing = Pairing(run, measures_training=self._watches_training)
        self._resumed_epoch: int | None = None
        self._seen_until = math.inf  # in batches
        self.validation_was_due = False  # when the state was saved that this fit goes on from
        self._warned: set[str] = set()
        estimate.start(run)

    def _start_importance(self) -> None:
        """Know nothing of the samples yet."""
        self._importance = copy.deepcopy(self._given_importance)
        self._sample_losses: LossOfEverySample | None = None
        if self._importance is not None:
            self._sample_losses = LossOfEverySample(self.run.index, self._importance_loss, self.run.classes)

    def reload(self, run: TrainingRun, *, same_samples: bool) -> None:
        """Go on with data that was loaded anew."""
        self.run = run
        self.pairing.reload(run)
        if not same_samples:
            self._start_importance()

    def close(self) -> None:
        """Let go of what the fit needed."""
        self.pairing.leave()
        self.estimate.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what happened in the fit, not the Trainer, module and data it was made with."""
        return {"state": self.state, "history": self.history}

    @property
    def _watches_training(self) -> bool:
        return self.estimate.watches_training or self._importance is not None

    def before_batch(self) -> None:
        """Look closely at the first training batches, and keep the logits of others if they are wanted."""
        if self.pairing.is_open and not self._waits_for_update:
            self.pairing.begin()
        elif self._watches_training:
            self.run.reader.expect(self.run.loader.batch_size)

    @property
    def _waits_for_update(self) -> bool:
        """Whether logits are not looked for before an update wants them: that would have everything compiled twice."""
        return self.run.is_compiled and not self._watches_training

    def after_forward(self) -> None:
        """Watch no longer: what follows is the backward pass."""
        self.pairing.forward_ends()

    def after_batch(self, drawn: Drawn | None, outputs: Any, batch: Any) -> None:
        """Show a training batch to whom it concerns; there is none if a loader that is shorter than others is through.

        Args:
            drawn: The samples of the batch.
            outputs: What `training_step` returned.
            batch: What it was given.
        """
        if drawn is None:
            self.pairing.leave()
            self.run.reader.drop()
        elif self.pairing.is_open and not self._waits_for_update:
            self._observe(self._checked_logits(outputs, batch, drawn), drawn)
        else:
            self.pairing.note(batch, drawn)
            if self._watches_training:
                self._observe(self._known_logits(outputs, len(drawn.samples)), drawn)

    def _observe(self, logits: Tensor | None, drawn: Drawn) -> None:
        if logits is None:
            return
        if self.estimate.watches_training:
            self.estimate.observe(self.run, logits.detach(), drawn.cells)
        if self._sample_losses is not None:
            self._sample_losses.observe(logits.detach(), drawn.samples)

    def _checked_logits(self, outputs: Any, batch: Any, drawn: Drawn) -> Tensor | None:
        """Return the logits of one of the first batches, once it is sure whose they are."""
        automatic = self.run.module.automatic_optimization
        logits = self.pairing.finish(outputs, batch, drawn)
        if (classes := self.pairing.classes) is not None:
            check_positive(self._criterion, self.run.index, classes)
        if self.pairing.are_returned:
            self.run.reader.training_step_returns = automatic
            if not automatic and not self.run.is_compiled:
                raise RuntimeError(
                    "With manual optimization FairBatch cannot run `training_step` to its end for the logits that"
                    " it returns. Call `self(x)` in it, or name the submodule that computes them:"
                    ' FairBatch(logits="net").'
                )
        return logits

    def _known_logits(self, outputs: Any, size: int) -> Tensor | None:
        """Return the logits of a batch from where they came in the first ones."""
        reader = self.run.reader
        logits = reader.read(outputs, size, returned_first=reader.training_step_returns)
        if reader.sees_other_passes:  # which output is which now?
            self.pairing.look_again()
            return None
        return logits

    def introduction(self, updates: str) -> str:
        """Return what is to be said of the fit once the first batch has been seen.

        Args:
            updates: When the shares are updated; "auto" for as often as the rule wants.
        """
        if updates == "auto":
            between = self._batches_between_updates
            batches = "every batch" if between == 1 else f"about every {between} batches"
            updates = f"{batches}, {round(self._length / between)} times in all"
        pairing = self.pairing
        logits = pairing.source or "looked for at the first update, as the model is compiled"
        return introduction(
            self._criterion, self.run.index, pairing.classes, checked=pairing.found, logits=logits, updates=updates
        )

    def has_seen(self) -> None:
        """Note that all batches until now were shown to whom they concern: checkpoints of signals may be of before."""
        self._seen_until = batches_ever_trained_on(self.run.trainer)

    def is_due(self, batches_left: float) -> bool:
        """Return whether it is time for one of the updates that the rule wants to have within epochs.

        Args:
            batches_left: How many batches of the epoch there still are; there is an update after the last in any case.
        """
        between = self._batches_between_updates
        return batches_left >= between / 2 and batches_ever_trained_on(self.run.trainer) - self._updated_at >= between

    @property
    def _batches_between_updates(self) -> int:
        return max(1, round(self._length / self._rule.updates))

    def look_ahead(self, sampler: FairSampler) -> None:
        """Find out how long the whole training is."""
        self._length = expected_batches(self.run.trainer, self.run.module, sampler.num_batches)

    @torch.inference_mode(False)
    def update(self, sampler: FairSampler, epoch: int | None = None) -> UpdateRecord:
        """Measure the cells' losses, shift the shares, draw by them, and write it down.

        Args:
            sampler: Draws the batches.
            epoch: The epoch that the update is of; default: the current one.
        """
        trainer, before = self.run.trainer, self.state
        self.pairing.check_last()
        now, done = self._measure(sampler), batches_ever_trained_on(trainer)
        after = replace(self._rule.update(before, now.measurement), updates=before.updates + 1)
        weights = self._weights(before.updates)
        gaps, unit = self._rule.gaps(now.measurement), "error" if self.run.sample_loss.is_error else "loss"
        epoch, losses = trainer.current_epoch if epoch is None else epoch, now.measurement.losses
        record = UpdateRecord(epoch, trainer.global_step, losses, gaps, before.shares, after.shares, unit)
        # All that may fail, or take long enough to be interrupted, is done: the update is made, or is made on resuming.
        self.state, sampler.shares = after, after.shares
        if self._importance is not None:
            sampler.weights = weights
        self._length, self._recent, self._measured, self._updated_at = now.length, now.recent, now.measurement, done
        self.history.append(record)
        return record

    def _weights(self, update: int) -> Array | None:
        """Return how often samples are drawn from now on, compared with others of their cell; None for all alike."""
        if self._importance is None or self._sample_losses is None:
            return None
        return self._importance.weights(self._sample_losses.known(), self.run.index, update)

    def _measure(self, sampler: FairSampler) -> _Measured:
        """Return what is known of the cells now."""
        trainer = self.run.trainer
        length = expected_batches(trainer, self.run.module, sampler.num_batches)
        passed = max(0, batches_ever_trained_on(trainer) - self._updated_at) / length
        now = self.estimate.measure(self.run, self.state.updates, uniform=not sampler.weighted)
        self._say_what_is_broken(now)
        recent = None
        if self._rule.window:
            if self._recent is not None:
                now = now.together_with(self._recent, kept=math.exp(-passed / self._rule.window))
            recent = now
        return _Measured(Measurement(now.means, now.counts, self.run.index, self._criterion, passed), recent, length)

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

    @property
    def is_behind(self) -> bool:
        """Whether batches were trained on since the last update."""
        return self._updated_at < batches_ever_trained_on(self.run.trainer)

    def left_epoch(self) -> int | None:
        """Return the epoch that a resumed run was left in, with batches since the last update; None if there are none.

        It is told once: the run goes on from there. Lightning resumes from a checkpoint of an epoch's last batch at the
        next epoch, without the end of this one.
        """
        epoch, self._resumed_epoch = self._resumed_epoch, None
        return epoch if self.is_behind else None

    def state_dict(self, epoch: int, *, alone: bool) -> dict[str, Any]:
        """Return what a resumed run needs, besides the place in this epoch."""
        losses, trainer = self._sample_losses, self.run.trainer
        unseen = self._seen_until < batches_ever_trained_on(trainer)
        return {
            "epoch": epoch,
            "rule": self.state.state_dict(),
            "recent": None if self._recent is None else list(self._recent),
            "updated_at": self._updated_at,
            "length": self._length,
            "validation_is_due": self.estimate.watches_validation and self.is_behind and validation_is_due(trainer),
            "is_part": self._watches_training and self.is_behind and (unseen or (alone and self.run.num_replicas > 1)),
            "step_returns_logits": self.run.reader.training_step_returns,
            "logits_from": self.run.reader.watched,
            "classes": [list(self.run.classes.learnt), list(self.run.classes.learnt.values())],
            "estimate": self.estimate.state_dict(self.run, alone=alone),
            "importance": None if losses is None else losses.state_dict(alone=alone),
            "history": [record.state_dict() for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on the same training data."""
        saved, index = Saved.of(state, "learnt"), self.run.index
        state_of_rule = self.state.load(saved["rule"])
        with saved["rule"]["shares"].checked():
            check_shares(state_of_rule.shares, index)
        self.state = self._rule.resumed(state_of_rule, index.counts)
        if saved["is_part"].flag():
            warn(
                "Not all that was seen since the last update of the shares is in the checkpoint: it was saved by one"
                " process alone, on a signal or after a failure, or before FairBatch saw the last batch, as by a"
                " callback in front of it. The next update goes by the rest: this is not bit for bit the run that"
                " was stopped."
            )
        self._recent = None if saved["recent"].value is None else CellLosses.load(saved["recent"], index.shape)
        self._updated_at, self._length = saved["updated_at"].integer(), saved["length"].number(1)
        self._load_what_logits_are(saved)
        self.estimate.load_state_dict(self.run, saved["estimate"].whole())
        importance = saved["importance"]
        if self._sample_losses is not None and importance.value is not None:
            self._sample_losses.load_state_dict(importance, self.run.rank)
        self.history = [UpdateRecord.load(record, index.shape) for record in saved["history"]]
        self._resumed_epoch = saved["epoch"].integer()
        self.validation_was_due = saved["validation_is_due"].flag()

    def _load_what_logits_are(self, saved: Saved) -> None:
        """Take the logits from where the stopped run had them, and labels for the classes that it learnt."""
        self.run.reader.training_step_returns |= saved["step_returns_logits"].flag()
        if saved["logits_from"].value is not None and not self.run.has_compiled_parts:
            name, direct, number, passes = saved["logits_from"].several(4)
            watched = Output(name.text(), direct=direct.flag(), number=number.integer())
            self.run.reader.watch_again(self.run.module, watched, passes.integer(1))
        labels, numbers = saved["classes"].several(2)
        known = [one.value if isinstance(one.value, int) else one.text() for one in labels]
        with saved["classes"].checked():
            self.run.classes.learn(dict(zip(known, (one.integer() for one in numbers), strict=True)))
