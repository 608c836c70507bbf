"""FairBatch during one `fit`, once the training data is known.

Measured losses go to the criterion, its signal to the controller, the shares to the sampler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairbatch_lightning._warnings import warn
from fairbatch_lightning.capture import LogitsCapture
from fairbatch_lightning.criteria import Criterion, row_gaps
from fairbatch_lightning.estimate import TrainingRun, needs_whole_step, no_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.history import UpdateRecord
from fairbatch_lightning.loaders import TrainLoader, with_batches
from fairbatch_lightning.losses import SampleLoss, find_logits
from fairbatch_lightning.metrics import GroupLoss
from fairbatch_lightning.sampler import FairBatchSampler, FairSampler
from fairbatch_lightning.settings import Settings

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
        self._warned = False
        loader = TrainLoader.find(given, settings.loader)
        self.index = GroupIndex.from_dataset(loader.loader.dataset, settings.labels, settings.groups)
        self._criterion = settings.new_criterion(self.index)
        _check_comparable(self._criterion, self.index)
        self.controller = settings.new_controller(self.index)
        self.history: list[UpdateRecord] = []
        self.logits_seen = False
        self._resumed = False
        sample_loss = SampleLoss(self.index, settings.per_sample_loss(), self._criterion.target)
        processes = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        self.run = TrainingRun(trainer, module, loader, self.index, sample_loss, capture, **processes)
        self.run.whole_step = needs_whole_step(self.run)
        self._sampler = self._new_sampler()

    def reload(self, given: Any) -> None:
        """Go on with a loader that Lightning asked for anew."""
        loader = TrainLoader.find(given, self._settings.loader)
        index = GroupIndex.from_dataset(loader.loader.dataset, self._settings.labels, self._settings.groups)
        if _names(index) != _names(self.index):
            raise ValueError(
                "Expected the reloaded train DataLoader to have the labels and groups that it had before,"
                f" {_names(self.index)}, but got {_names(index)}."
            )
        self.index = index
        sample_loss = SampleLoss(index, self._settings.per_sample_loss(), self._criterion.target)
        self.run = replace(self.run, loader=loader, index=index, sample_loss=sample_loss)
        self._sampler = self._new_sampler()

    def fair_loader(self) -> Any:
        """Return what Lightning was about to train on, with fair batches."""
        return self.run.loader.put_back(with_batches(self.run.loader.loader, FairBatchSampler(self._sampler)))

    def close(self) -> None:
        """Let go of what the fit needed."""
        self.run.cleanup.close()

    def expect_logits(self, batch: Any) -> None:
        """Before the first training batch: keep its logits, to see whether they can be had."""
        if not self.run.is_compiled:
            self.run.capture.arm(self.run.loader.batch_size)
        self.run.seen_batch = batch if self.run.loader.is_one_of_several else None

    def check_logits(self, outputs: Any) -> None:
        """After the first training batch: see that its logits were found, or that the step returned them."""
        batch_size = self.run.loader.batch_size
        logits = self.run.capture.take()
        if logits is None:
            returned = find_logits(outputs)
            if returned is None and self.run.is_compiled:
                self.logits_seen = True  # not looked for: that would compile the step twice; the evaluation will see
                return
            if returned is None or returned.ndim == 0 or len(returned) != batch_size:
                raise RuntimeError(no_logits(batch_size))
            if not self.run.module.automatic_optimization:
                raise RuntimeError(
                    "With manual optimization FairBatch cannot run `training_step` to its end for the logits that it"
                    ' returns. Call `self(x)` in it, or name the submodule that computes them: FairBatch(logits="net").'
                )
            self.run.whole_step = True
        self.logits_seen = True

    def update(self, epoch: int | None = None) -> UpdateRecord:
        """Measure the cells' losses, shift the shares, and write it down."""
        trainer = self.run.trainer
        losses = self._finite_losses(self._estimate.measure(self.run))
        before = self.controller.shares
        gaps = self.controller.update(self._criterion.signal(losses, self.index.counts))
        self._sampler.shares = self.controller.shares
        epoch = trainer.current_epoch if epoch is None else epoch
        record = UpdateRecord(epoch, trainer.global_step, losses, gaps, before, self.controller.shares)
        self.history.append(record)
        return record

    def missed_epoch(self) -> int | None:
        """Return the epoch whose update was not made, if any, when a run is resumed.

        Lightning resumes from a checkpoint of an epoch's last batch at the next epoch, without the end of this one.
        """
        epoch = self._sampler.epoch
        trained = any(record.epoch == epoch for record in self.history)
        return epoch if self._resumed and epoch < self.run.trainer.current_epoch and not trained else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the shares, the place in the epoch, and the history."""
        progress: Any = self.run.trainer.fit_loop.epoch_loop.batch_progress.current
        sampler = self._sampler.state_dict()
        sampler["next_batch"] = min(sampler["next_batch"], progress.processed)  # worker processes have fetched more
        return {
            "counts": self.index.counts,
            "controller": self.controller.state_dict(),
            "sampler": sampler,
            "whole_step": self.run.whole_step,
            "history": [record.state_dict() for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on the same training data."""
        if not torch.equal(state["counts"], self.index.counts):
            raise ValueError(
                "Expected to resume on the training data that the checkpoint was made with. Its cells had the counts"
                f" {state['counts'].tolist()}, now they have {self.index.counts.tolist()} (labels"
                f" {list(self.index.label_names)}, groups {list(self.index.group_names)})."
            )
        self.controller.load_state_dict(state["controller"])
        self._check_place(state["sampler"])
        self._sampler.load_state_dict(state["sampler"])
        self.run.whole_step |= state["whole_step"]
        self._resumed = True
        self.history = [UpdateRecord(**record) for record in state["history"]]

    def _check_place(self, state: dict[str, Any]) -> None:
        before, now = state["num_batches"], self._sampler.num_batches
        if before != now and 0 < state["next_batch"] < before:
            warn(
                f"The checkpoint is from the middle of epoch {state['epoch']}, which had {before} batches on each"
                f" process and now has {now}: the number of processes or the batch size is another one. The rest of"
                " this epoch is drawn anew from the same shares; from the next epoch on all is as it would have been."
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
        broken = (counts > 0) & ~losses.isfinite()
        if broken.any() and not self._warned:
            self._warned = True
            warn(
                f"The loss is NaN or infinite in the cells {self.index.cell_names(broken)}. They take no part in an"
                " update until it is finite again. Look for bad samples there, or for diverging training."
            )
        return losses


def _check_comparable(criterion: Criterion, index: GroupIndex) -> None:
    """Refuse data without groups to compare, and say which cells are empty."""
    if row_gaps(criterion.signal(torch.zeros(index.shape), index.counts)).isnan().all():
        raise ValueError(
            "Expected a label with samples of at least two groups to compare, but the labels"
            f" {list(index.label_names)} and groups {list(index.group_names)} have the counts {index.counts.tolist()}."
            " Check the arguments `groups`, `labels` and `positive_label`."
        )
    if (empty := index.counts == 0).any():
        warn(
            f"The training set has no samples in the cells {index.cell_names(empty)}. They take no part; the other"
            " groups of these labels are balanced among themselves."
        )


def _names(index: GroupIndex) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return index.label_names, index.group_names
