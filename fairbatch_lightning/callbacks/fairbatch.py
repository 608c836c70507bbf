"""The one line: a Lightning callback that swaps fair batches into training and updates their shares."""

from __future__ import annotations

import copy
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fairbatch_lightning._support.checks import chosen
from fairbatch_lightning._support.lightning import batches_ever_trained_on, batches_trained_on, processes_of
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.sampler import FairSampler
from fairbatch_lightning.callbacks.base import ChangesBatches, LoadedData
from fairbatch_lightning.callbacks.fit import FairFit
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source
from fairbatch_lightning.measure.estimates.base import Estimate, TrainingRun
from fairbatch_lightning.measure.estimates.online import OnlineEstimate
from fairbatch_lightning.measure.estimates.training_set import ExactEstimate, SampledEstimate
from fairbatch_lightning.measure.estimates.validation import ValidationEstimate
from fairbatch_lightning.measure.logits import LogitsReader
from fairbatch_lightning.measure.per_sample import PerSampleLoss, SampleLoss, resolve_loss
from fairbatch_lightning.reports.curves import over_time
from fairbatch_lightning.reports.figures import shares_figure
from fairbatch_lightning.reports.log_format import share_values, update_values
from fairbatch_lightning.reports.loggers import log_at_once, log_figure, show
from fairbatch_lightning.rules.adaptive import Adaptive
from fairbatch_lightning.rules.base import UpdateRule
from fairbatch_lightning.rules.criteria import CRITERIA, Criterion, compared_rows
from fairbatch_lightning.rules.history import UpdateRecord
from fairbatch_lightning.rules.importance import Importance, LossRank
from fairbatch_lightning.rules.signed_steps import SignedSteps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

RULES: dict[str, type[UpdateRule]] = {"adaptive": Adaptive, "paper": SignedSteps}
ESTIMATES: dict[str, type[Estimate]] = {
    "online": OnlineEstimate,
    "sampled": SampledEstimate,
    "exact": ExactEstimate,
    "validation": ValidationEstimate,
}
IMPORTANCES: dict[str, type[Importance]] = {"loss": LossRank}


class FairBatch(ChangesBatches):
    """Makes training fair by choosing the batches: FairBatch (Roh et al., ICLR 2021) for any labels and groups.

    Add it to a Trainer, and nothing else changes:

        Trainer(callbacks=[FairBatch("equalized_odds", groups="race")])

    The train DataLoader draws ordinary batches at first. The error rate of each cell, that is each (label, group) pair,
    is known from them, and about 200 times in a training, and after every epoch, the cells' shares in the next batches
    shift towards the groups that are worse off, as the `rule` says.

    Logged: `fairbatch/gap_max`, the disparity in training (also on the progress bar), `fairbatch/gap/<label>`,
    `fairbatch/error/<label>/<group>` and `fairbatch/share/<label>/<group>`. In TensorBoard a picture of them appears at
    the end. If no composition of the batches is fair, a message at the end of training says so.

    Args:
        criterion: "equal_opportunity", "equalized_odds", "demographic_parity", or an object, such as
            `EqualOpportunity(positive_label="hired")`.
        groups: The sensitive attribute: the name of an attribute or column of the training set, an array with one value
            per sample, the position in the sample, or a function of the dataset. Several names in a list make groups
            of their combinations. None finds `groups` and other usual names.
        labels: The same for the labels; None finds `targets` and other usual names.
        rule: How errors become shares: "adaptive", which needs no settings; "paper", which compares losses and takes
            steps of a fixed size; or an object, such as `Adaptive(tolerance=0.05)` or `SignedSteps(alpha=0.05)`.
        estimate: How errors, or losses, are measured: "online" takes those of the training batches; "sampled" evaluates
            some of every cell's samples; "exact" all of them, as the paper does; "validation" takes those of the
            validation loop, and updates the shares after it. Or an object, such as `SampledEstimate(256)`. None is
            "exact" for `rule="paper"`, and "online" otherwise.
        update_every: "auto" for as often as the rule wants, "epoch", or a number of training batches. Batches that
            worker processes have fetched in advance are not affected by an update.
        importance: Which samples of a cell are drawn more often: None for none, "loss" for those with large losses, or
            an object, such as `LossRank(pressure=10, decay=0.98)`.
        loss: What is measured of every sample: a function `(logits, labels) -> values`, "error" for 1 where it is
            wrong, or None for what the rule compares: errors, or by the paper's cross-entropy.
        logits: The name of the submodule that computes the logits, such as "net". None takes the module's own output,
            `self(x)`, or `training_step`'s `{"logits": ...}`.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides which samples are drawn.
        verbose: Whether to say, after the first batch, which labels, groups and cells were found.
    """

    def __init__(
        self,
        criterion: str | Criterion = "equalized_odds",
        groups: Source = None,
        *,
        labels: Source = None,
        rule: str | UpdateRule = "adaptive",
        estimate: str | Estimate | None = None,
        update_every: int | str = "auto",
        importance: str | Importance | None = None,
        loss: Literal["error"] | PerSampleLoss | None = None,
        logits: str | None = None,
        loader: int | str | None = None,
        seed: int = 0,
        verbose: bool = True,
    ) -> None:
        super().__init__(groups, labels=labels, loader=loader, seed=seed)
        self._criterion = chosen("criterion", criterion, CRITERIA, Criterion)
        self._rule = chosen("rule", rule, RULES, UpdateRule)
        by_default = "exact" if rule == "paper" else "online"
        self._estimate = chosen("estimate", by_default if estimate is None else estimate, ESTIMATES, Estimate)
        self._importance = None if importance is None else chosen("importance", importance, IMPORTANCES, Importance)
        self._loss = resolve_loss(loss, self._rule.loss)
        self._importance_loss = resolve_loss(None if loss == "error" else loss)  # errors alone tell too little
        self._reader = LogitsReader("FairBatch", logits)
        self._logits, self._update_every, self._verbose = logits, update_every, verbose
        self._check_update_every()
        self._classes = ClassNumbers()
        self._fit: FairFit | None = None
        self._introduced = False

    def _check_update_every(self) -> None:
        if self._update_every in ("auto", "epoch"):
            return
        every: object = self._update_every
        if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
            raise ValueError(
                'Expected argument `update_every` to be "auto", "epoch" or a positive number of batches but got'
                f" {every!r}."
            )
        if self._estimate.watches_validation:
            raise ValueError(
                'Expected argument `update_every` to be "auto" with estimate="validation", which updates the shares'
                f" after every validation, but got {self._update_every!r}. Use Trainer(val_check_interval=...)."
            )

    @property
    def shares(self) -> Tensor | None:
        """The `(Y, Z)` shares as of now; None before the training data is known."""
        return None if self._fit is None else self._fit.state.shares.clone()

    @property
    def history(self) -> list[UpdateRecord]:
        """One record per update: epoch, step, the cells' errors or losses, gaps, shares before and after."""
        return [] if self._fit is None else list(self._fit.history)

    def plot(self) -> Figure:
        """Draw the cells' shares and errors and the gaps over the updates. `.savefig("fairbatch.png")` saves it."""
        if not self.history or self.index is None:
            raise ValueError("Expected FairBatch to have trained for at least one update, but there is none to draw.")
        return shares_figure(over_time(self.history, self.index))

    # What this callback decides, as `ChangesBatches` asks for it.

    def shares_of(self, index: GroupIndex) -> Tensor | None:
        """Return the shares as of now."""
        return self.shares

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Watch for the logits; a submodule may be built only later."""
        self._reader.attach(module, required=False)
        self._cleanup.callback(self._reader.detach)

    def start(self, data: LoadedData) -> None:
        """Put the parts together."""
        self._reader.attach(data.module)
        run = TrainingRun(
            data.trainer,
            data.module,
            data.loader,
            data.index,
            self._sample_loss(data.index),
            self._reader,
            seed=self._seed,
            labels=self._labels,
            groups=self._groups,
            compared=compared_rows(self._criterion, data.index),
            starves_cells=self._rule.starves_cells,
            classes=self._classes,
            **processes_of(data.trainer),
        )
        estimate = copy.deepcopy(self._estimate)
        self._fit = FairFit(run, self._criterion, self._rule, estimate, self._importance, self._importance_loss)
        self._cleanup.callback(self._fit.close)

    def reload(self, data: LoadedData) -> None:
        """Go on with data that Lightning has loaded anew."""
        if self._fit is not None:
            sample_loss = self._sample_loss(data.index)
            run = replace(self._fit.run, loader=data.loader, index=data.index, sample_loss=sample_loss)
            self._fit.reload(run, same_samples=data.same_samples)

    def learnt(self, *, alone: bool) -> dict[str, Any]:
        """Return what the fit needs to go on."""
        fit, sampler = self._live()
        return fit.state_dict(sampler.epoch, alone=alone)

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        fit, sampler = self._live()
        fit.load_state_dict(learnt)
        if not torch.equal(sampler.shares, fit.state.shares):
            sampler.shares = fit.state.shares

    # The hooks of a Callback.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for an update that the interrupted run did not get to."""
        if self._batches is None:
            return
        fit, sampler = self._live()
        if not fit.history:
            log_at_once(trainer, share_values(fit.state.shares, fit.run.index))
            fit.look_ahead(sampler)
        fit.estimate.check(fit.run)
        fit.has_seen()
        self._make_up(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch for the logits."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._batches is not None:
            self._live()[0].before_batch()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Watch no longer: the logits have been computed."""
        if self._batches is not None:
            self._live()[0].after_forward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse a module whose logits are out of reach at once; update the shares if it is time."""
        if self._batches is None:
            return
        self._live()[0].after_batch(self._batches.take(), outputs, batch)
        self._live()[0].has_seen()
        self._introduce(trainer)
        if self._is_due(trainer, batch_idx + 1) or self._is_last(trainer):
            self._update(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the shares; the next epoch's batches follow them."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._batches is not None and self._updates_after_epochs and self._live()[0].is_behind:
            self._update(trainer, epoch_ended=True)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the estimate that a validation begins."""
        if fit := self._validating(trainer):
            fit.estimate.before_validation(fit.run)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Tell the estimate that a batch comes."""
        if fit := self._validating(trainer):
            fit.estimate.before_validation_batch(fit.run, dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the estimate what came of the batch."""
        if fit := self._validating(trainer):
            fit.estimate.after_validation_batch(fit.run, outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the shares, if that is where losses come from; batches from now on follow them."""
        if (fit := self._validating(trainer)) and fit.estimate.watches_validation:
            self._update(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what should be known about the result, and show in TensorBoard what happened."""
        if self.history:
            if self._fit is not None and (remark := self._fit.remark()):
                warn(remark)
            log_figure(trainer, "fairbatch/curves", self.plot)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if an update could not be made up for, as there was nothing left to train."""
        if self._batches is None:
            return
        fit, _ = self._live()
        if (self._updates_after_epochs or fit.validation_was_due) and fit.left_epoch() is not None:
            warn(
                "The training was stopped before the last update of the shares, and there is nothing left to train:"
                " `.shares` and `.history` are as they were before that update. The model is not affected."
            )

    def _introduce(self, trainer: Trainer) -> None:
        """Say what was found, once, when the first batch has been trained on."""
        if self._verbose and not self._introduced and trainer.is_global_zero:
            if self._updates_within_epochs:
                updates = "auto"
            elif self._estimate.watches_validation:
                updates = "after every validation"
            else:
                number = self._update_every
                updates = "after every epoch" if isinstance(number, str) else f"every {number} batches"
            trainer.print(self._live()[0].introduction(updates))
        self._introduced = True

    def _forget(self) -> None:
        super()._forget()
        self._introduced = False
        self._fit, self._reader, self._classes = None, LogitsReader("FairBatch", self._logits), ClassNumbers()

    def _sample_loss(self, index: GroupIndex) -> SampleLoss:
        return SampleLoss(index, self._loss, self._criterion.target(index), self._classes)

    def _live(self) -> tuple[FairFit, FairSampler]:
        """Return the fit that is going on, and what draws its batches."""
        if self._fit is None or self._batches is None:
            raise RuntimeError("Expected a fit to be going on, but there is none.")
        return self._fit, self._batches.sampler

    @property
    def _updates_after_epochs(self) -> bool:
        return self._update_every in ("auto", "epoch") and not self._estimate.watches_validation

    @property
    def _updates_within_epochs(self) -> bool:
        """Whether there may be updates before an epoch's end: where they are worth it, and cost no evaluation."""
        costs_nothing = self._estimate.watches_training and self._importance is None
        return self._update_every == "auto" and costs_nothing and self._rule.updates > 0

    def _is_due(self, trainer: Trainer, batches: int) -> bool:
        """Return whether there is an update after so many batches of an epoch, before its end."""
        if isinstance(self._update_every, str):
            left = trainer.num_training_batches - batches
            return self._updates_within_epochs and self._live()[0].is_due(left)
        return batches_ever_trained_on(trainer) % self._update_every == 0

    def _is_last(self, trainer: Trainer) -> bool:
        """Return whether training ends with this batch: a checkpoint of the step is to hold the update that follows."""
        return self._updates_after_epochs and 0 <= trainer.max_steps <= trainer.global_step

    def _make_up(self, trainer: Trainer) -> None:
        """Make up for an update that the interrupted run did not get to, or failed in."""
        fit, sampler = self._live()
        if (epoch := fit.left_epoch()) is None:
            return
        epoch_over = epoch < trainer.current_epoch
        if (epoch_over and self._updates_after_epochs) or self._is_due(trainer, batches_trained_on(trainer)):
            log_at_once(trainer, update_values(fit.update(sampler, epoch), fit.run.index))
        elif fit.validation_was_due and trainer.ckpt_path:  # in the same Trainer the whole epoch is repeated
            warn(
                f"The checkpoint was saved after a batch of epoch {epoch} but before the end of the validation that"
                " follows it, which Lightning does not repeat, or not in full: the update of the shares after it is"
                " left out, or follows less data. Save checkpoints after validations to resume exactly."
            )

    def _validating(self, trainer: Trainer) -> FairFit | None:
        """Return the fit whose validation is going on, if it is one."""
        during_fit = self._batches is not None and trainer.state.fn == "fit" and not trainer.sanity_checking
        return self._fit if during_fit else None

    def _update(self, trainer: Trainer, *, epoch_ended: bool = False) -> None:
        fit, sampler = self._live()
        values = update_values(fit.update(sampler), fit.run.index)
        show(trainer, values, in_bar=["fairbatch/gap_max"])
        log_at_once(trainer, {"epoch": trainer.current_epoch, **values}, epoch_ended=epoch_ended)
