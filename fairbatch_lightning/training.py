"""FairBatch during one `fit`, once the training data is known.

Measured losses go to the criterion, its signal to the controller, the shares to the sampler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.capture import LogitsCapture
from fairbatch_lightning.comparable import check_same_cells, compared_rows, names_of, signal_of
from fairbatch_lightning.estimate import TrainingRun
from fairbatch_lightning.evaluation import needs_whole_step, no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.history import UpdateRecord
from fairbatch_lightning.loaders import FairBatchSampler, TrainLoader, fetches_itself, with_batches
from fairbatch_lightning.losses import SampleLoss
from fairbatch_lightning.metrics import GroupLoss
from fairbatch_lightning.sampler import Drawn, FairSampler
from fairbatch_lightning.settings import Settings
from fairbatch_lightning.validation import Validating, ValidationEstimate

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class FairTraining:
    """The parts of FairBatch for one fit.

    Args:
        settings: The user's settings.
        given: What Lightning was about to train on: a DataLoader, alone or in a container.
        trainer: The Trainer of this fit.
        module: The module that it trains.
        capture: Watches the module for logits.
    """

    def __init__(
        self,
        settings: Settings,
        given: Any,
        trainer: Trainer,
        module: LightningModule,
        capture: LogitsCapture,
    ) -> None:
        self._settings = settings
        self._estimate = settings.new_estimate()
        self._warned: set[str] = set()
        loader = TrainLoader.find(given, settings.loader)
        self.index = GroupIndex.from_dataset(loader.loader.dataset, settings.labels, settings.groups)
        self._criterion = settings.new_criterion(self.index)
        compared = compared_rows(self._criterion, self.index, settings.min_samples)
        self.controller = settings.new_controller(self.index)
        self.history: list[UpdateRecord] = []
        self._importance = settings.new_importance(self.index)
        self.logits_seen = False
        self._resumed_epoch: int | None = None
        sample_loss = SampleLoss(self.index, settings.per_sample_loss(), self._criterion.target)
        processes = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        self.run = TrainingRun(
            trainer,
            module,
            loader,
            self.index,
            sample_loss,
            capture,
            seed=settings.seed,
            labels=settings.labels,
            groups=settings.groups,
            compared=compared,
            **processes,
        )
        self.run.whole_step = needs_whole_step(self.run)
        self._estimate.start(self.run)
        self._sampler = self._new_sampler()
        self._batches = FairBatchSampler(self._sampler)

    def reload(self, given: Any) -> None:
        """Go on with a loader that Lightning asked for anew."""
        loader = TrainLoader.find(given, self._settings.loader)
        index = self.index
        if loader.loader.dataset is not self.run.loader.loader.dataset:
            index = GroupIndex.from_dataset(loader.loader.dataset, self._settings.labels, self._settings.groups)
            check_same_cells(self.index, index)
        same_samples = np.array_equal(index.cells, self.index.cells)  # the dataset may be the same, but made anew
        if not same_samples:
            self._importance = self._settings.new_importance(index)
        self.index = index
        sample_loss = SampleLoss(index, self._settings.per_sample_loss(), self._criterion.target)
        self.run = replace(self.run, loader=loader, index=index, sample_loss=sample_loss)
        before, self._sampler = self._sampler, self._new_sampler()
        self._batches = FairBatchSampler(self._sampler)
        if not before.started:  # a place in the epoch that was restored, but not yet gone on from
            self._sampler.load_state_dict({**before.state_dict(), **({} if same_samples else {"weights": None})})
        elif same_samples:
            self._sampler.weights = before.weights

    def fair_loader(self) -> Any:
        """Return what Lightning was about to train on, with fair batches."""
        return self.run.loader.put_back(with_batches(self.run.loader.loader, self._batches))

    def close(self) -> None:
        """Let go of what the fit needed."""
        self.run.cleanup.close()

    @property
    def is_live(self) -> bool:
        """Whether the Trainer, module and data are at hand; not in a copy that was pickled."""
        return hasattr(self, "run")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what there is to know about the fit, not the Trainer, module and data it was made with."""
        live = "run", "_estimate", "_sampler", "_batches", "_importance"
        return {name: value for name, value in vars(self).items() if name not in live}

    def before_batch(self) -> None:
        """Keep the logits of a training batch if the estimate wants them, and those of the first for a check."""
        if fetches_itself(self.run.trainer):  # at the last batch it may have fetched more than it trained on
            self._batches.forget()
        first = not self.logits_seen and not self.run.is_compiled  # there it would have everything compiled twice
        if first or self._watches_training:
            self.run.capture.arm(self.run.loader.batch_size)

    def after_batch(self, outputs: Any) -> None:
        """Show the batch to the estimate."""
        batch, logits = self._batches.take(), self.run.capture.take()
        if batch is None:  # a fair loader that is shorter than the others is through
            return
        if not self.logits_seen:
            self._check_logits(outputs, logits, batch)
        if self._watches_training and (self.run.logits_returned or logits is None):
            returned = returned_logits(outputs, len(batch.samples))
            logits = None if returned is None else returned.detach()
        if logits is None:
            return
        if self._estimate.watches_training:
            self._estimate.observe(self.run, logits, batch.cells)
        if self._importance is not None:
            self._importance.observe(logits, batch.samples)

    @property
    def _watches_training(self) -> bool:
        return self._estimate.watches_training or self._importance is not None

    def end_epoch(self) -> None:
        """Forget a batch that Lightning has fetched in vain, next to a loader without a length."""
        self._batches.forget()

    def _check_logits(self, outputs: Any, logits: Tensor | None, batch: Drawn) -> None:
        """After the first training batch: see that its logits were found, or that the step returned them."""
        automatic = self.run.module.automatic_optimization
        if logits is None and automatic and not outputs:
            return  # the step has left this batch out
        captured = logits is not None or self.run.is_compiled  # see `before_batch`; the evaluation will see
        returned = returned_logits(outputs, len(batch.samples)) if self._settings.logits is None else None
        if not captured and returned is None:
            raise RuntimeError(no_logits(len(batch.samples)))
        if returned is not None and not automatic and not captured:
            raise RuntimeError(
                "With manual optimization FairBatch cannot run `training_step` to its end for the logits that it"
                ' returns. Call `self(x)` in it, or name the submodule that computes them: FairBatch(logits="net").'
            )
        if returned is not None and automatic:
            self.run.logits_returned = self.run.whole_step = True
            logits = returned
        if logits is not None:  # see that losses can be had of them
            self.run.add_losses(self.run.new_metric(), logits.detach(), batch.cells)
        self.logits_seen = True

    @property
    def updates_after_epochs(self) -> bool:
        """Whether the end of an epoch is the time for an update."""
        return self._settings.update_every == "epoch" and not isinstance(self._estimate, ValidationEstimate)

    @property
    def validating(self) -> Validating | None:
        """Whom to tell about validation, if the estimate watches it."""
        return Validating(self._estimate, self.run) if isinstance(self._estimate, ValidationEstimate) else None

    def check_validation(self) -> None:
        """Refuse to take losses from a validation that does not take place; say so if one was missed."""
        trainer, estimate = self.run.trainer, self._estimate
        if not trainer.enable_validation:
            raise ValueError(
                'FairBatch(estimate="validation") needs a validation loop: a validation DataLoader, a `validation_step`'
                " and limit_val_batches above 0."
            )
        if isinstance(estimate, ValidationEstimate):
            estimate.check(self.run)
        epoch = self.missed_epoch()
        if epoch is not None and (epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0:
            warn(
                f"The checkpoint was saved after the last batch of epoch {epoch} but before the validation that"
                " follows it, which Lightning does not make up for: the update of the shares after it is left out."
                " Save checkpoints after the validation to resume exactly."
            )

    @torch.inference_mode(False)
    def update(self, epoch: int | None = None) -> UpdateRecord:
        """Measure the cells' losses, shift the shares, and write it down."""
        trainer, self.run.num_updates = self.run.trainer, len(self.history)
        self.run.uniform = not self._sampler.weighted
        losses = self._finite_losses(self._estimate.measure(self.run))
        before = self.controller.shares
        signal = signal_of(self._criterion, losses, self.index, self._settings.min_samples)
        gaps = self.controller.update(signal)
        self._sampler.shares = self.controller.shares
        if self._importance is not None:
            self._sampler.weights = self._importance.weights(self.run.num_updates)
        epoch = trainer.current_epoch if epoch is None else epoch
        record = UpdateRecord(epoch, trainer.global_step, losses, gaps, before, self.controller.shares)
        self.history.append(record)
        return record

    def missed_epoch(self) -> int | None:
        """Return the epoch whose update was not made, if any, when a run is resumed.

        Lightning resumes from a checkpoint of an epoch's last batch at the next epoch, without the end of this one.
        """
        epoch = self._resumed_epoch
        if epoch is None or epoch >= self.run.trainer.current_epoch:
            return None
        return None if any(record.epoch == epoch for record in self.history) else epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the shares, the place in the epoch, and the history."""
        progress: Any = self.run.trainer.fit_loop.epoch_loop.batch_progress.current
        return {
            "counts": self.index.counts,
            "names": [list(names) for names in names_of(self.index)],
            "controller": self.controller.state_dict(),
            "sampler": self._sampler.state_dict(progress.processed),  # worker processes have fetched more
            "logits_returned": self.run.logits_returned,
            "estimate": self._estimate.state_dict(self.run),
            "importance": None if self._importance is None else self._importance.state_dict(alone=self.run.failed),
            "history": [record.state_dict() for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on the same training data."""
        names = [list(names) for names in names_of(self.index)]
        if state["names"] != names or not torch.equal(state["counts"], self.index.counts):
            raise ValueError(
                "Expected to resume on the training data that the checkpoint was made with. Its labels and groups"
                f" {state['names']} had the counts {state['counts'].tolist()}, now {names} have"
                f" {self.index.counts.tolist()}. To train on other data, start a new fit without the checkpoint."
            )
        self.controller.load_state_dict(state["controller"])
        self._check_place(state["sampler"])
        self._sampler.load_state_dict(state["sampler"])
        if state["logits_returned"]:
            self.run.logits_returned = self.run.whole_step = True
        self._resumed_epoch = state["sampler"]["epoch"]
        self._estimate.load_state_dict(self.run, state.get("estimate", {}))
        if self._importance is not None and state.get("importance"):
            self._importance.load_state_dict(state["importance"], self.run.rank)
        self.history = [UpdateRecord(**record) for record in state["history"]]

    def _check_place(self, state: dict[str, Any]) -> None:
        if not self._sampler.fits(state) and 0 < state["next_batch"] < state["num_batches"]:
            now = self._sampler.state_dict()
            warn(
                f"The checkpoint is from the middle of epoch {state['epoch']}, which had {state['num_batches']} batches"
                f" of {state['batch_size']} samples and now has {now['num_batches']} of {now['batch_size']}. The rest"
                " of this epoch is drawn anew from the same shares; the next epoch is as it would have been."
            )

    def _new_sampler(self) -> FairSampler:
        run = self.run
        return FairSampler.from_index(
            self.index,
            run.loader.batch_size,
            shares=self.controller.shares,
            num_replicas=run.num_replicas,
            rank=run.rank,
            seed=self._settings.seed,
            drop_last=run.loader.drop_last,
            epoch_size=run.loader.epoch_size,
        )

    def _finite_losses(self, metric: GroupLoss) -> Tensor:
        """Return the measured losses `(Y, Z)` on the CPU; say once if some are not finite."""
        with metric.sync_context():
            counts = metric.counts.cpu()
            losses = metric.sums.cpu().double() / counts
        broken = self.index.cell_names((counts > 0) & ~losses.isfinite())
        if broken and broken not in self._warned:
            self._warned.add(broken)
            warn(
                f"The loss is NaN or infinite in the cells {broken}. They take no part in an"
                " update until it is finite again. Look for bad samples there, or for diverging training."
            )
        return losses
