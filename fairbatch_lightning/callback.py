"""The one line: a Lightning callback that swaps fair batches into training and updates their shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning._warnings import warn
from fairbatch_lightning.capture import LogitsCapture, not_a_submodule, watch
from fairbatch_lightning.columns import Source
from fairbatch_lightning.controller import Alpha
from fairbatch_lightning.criteria import Compare, Criterion
from fairbatch_lightning.estimate import Estimate
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.history import UpdateRecord, over_time, shares_by_name
from fairbatch_lightning.importance import Importance
from fairbatch_lightning.loaders import replace_train_loader
from fairbatch_lightning.logs import log_at_once, log_figure, show
from fairbatch_lightning.losses import PerSampleLoss
from fairbatch_lightning.plots import shares_figure
from fairbatch_lightning.settings import Settings
from fairbatch_lightning.training import FairTraining
from fairbatch_lightning.validation import Validating

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure


class FairBatch(AnyCallback):
    """Makes training fair by choosing the batches: FairBatch (Roh et al., ICLR 2021) for any labels and groups.

    Add it to a Trainer, and nothing else changes:

        Trainer(callbacks=[FairBatch("equalized_odds", groups="race")])

    The train DataLoader draws ordinary batches at first. After every epoch the mean loss of each cell, that is each
    (label, group) pair, is known from its batches (see `estimate`), and the cells' shares in the next ones shift by
    `alpha` towards the groups that are worse off, for the label where the groups differ most.

    Logged: `fairbatch/gap_max` (also on the progress bar), `fairbatch/gap/<label>`, `fairbatch/loss/<label>/<group>`
    and `fairbatch/share/<label>/<group>`. In TensorBoard a picture of them appears at the end.

    Args:
        criterion: "equal_opportunity", "equalized_odds", "demographic_parity", or a criterion object.
        groups: The sensitive attribute: the name of an attribute or column of the training set, an array with one value
            per sample, the position in the sample, or a function of the dataset. Several names in a list make groups
            of their combinations. None finds `groups` and other usual names.
        labels: The same for the labels; None finds `targets` and other usual names.
        alpha: The step, in units of shares: a number, or a function of the update's number (0, 1, ...).
        threshold: Gaps up to this size are left alone: the trade-off between accuracy and fairness.
        min_share: No cell gets less of its label's draws than this.
        min_samples: Cells with fewer training samples than this are not compared, and keep their share: a handful of
            samples says little about a group, but may have the largest loss of all.
        compare: How groups are compared: "row" (with their mean), "neighbours" (as the paper implemented it) or "all"
            (every pair). With two groups all three are the same.
        pull: How strongly all shares are drawn back to the data's own: in every update by `pull * alpha` of the way. It
            keeps them from drifting where many are equally fair, and from going far; see "How it works".
        positive_label: The label that equal opportunity and demographic parity are about, as the data has it.
        loss: A function `(logits, labels) -> values` with one value per sample, "error" for the 0/1 loss, or None for
            cross-entropy (binary for logits of shape `(B,)` or `(B, 1)`).
        logits: The name of the submodule that computes the logits, such as "net". None takes the module's own output,
            `self(x)`, or `training_step`'s `{"logits": ...}`.
        estimate: How losses are measured: "online" takes those of the training batches; "sampled" evaluates some of
            every cell's samples; "exact" all of them, as the paper does; "validation" takes the losses of the
            validation loop, and updates the shares after it. Or an object, such as `SampledEstimate(256)`.
        update_every: "epoch", or a number of training batches. Batches that worker processes have fetched in advance
            are not affected by an update.
        importance: Which samples of a cell are drawn more often: None for none, "loss" for those with large losses, or
            an object, such as `LossRank(pressure=10, decay=0.98)`.
        loader: Which train DataLoader to act on if there are several: its key in the dict, or its position in the list.
        seed: Decides which samples are drawn.
    """

    def __init__(
        self,
        criterion: str | Criterion = "equalized_odds",
        *,
        groups: Source = None,
        labels: Source = None,
        alpha: Alpha = 0.005,
        threshold: float = 0.0,
        min_share: float = 0.0,
        min_samples: int = 1,
        compare: Compare = "row",
        pull: float = 0.0,
        positive_label: int | str = 1,
        loss: PerSampleLoss | str | None = None,
        logits: str | None = None,
        estimate: str | Estimate = "online",
        update_every: int | str = "epoch",
        importance: str | Importance | None = None,
        loader: int | str | None = None,
        seed: int = 0,
    ) -> None:
        self._settings = Settings(
            criterion=criterion,
            groups=groups,
            labels=labels,
            alpha=alpha,
            threshold=threshold,
            min_share=min_share,
            min_samples=min_samples,
            compare=compare,
            pull=pull,
            positive_label=positive_label,
            loss=loss,
            logits=logits,
            estimate=estimate,
            update_every=update_every,
            importance=importance,
            loader=loader,
            seed=seed,
        )
        self._training: FairTraining | None = None
        self._capture: LogitsCapture | None = None
        self._undo: Callable[[], None] | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def shares(self) -> Tensor | None:
        """The `(Y, Z)` shares as of now; None before the training data is known."""
        return None if self._training is None else self._training.controller.shares.clone()

    @property
    def counts(self) -> Tensor | None:
        """How many training samples each cell has, `(Y, Z)`; None before the training data is known."""
        return None if self._training is None else self._training.index.counts.clone()

    @property
    def history(self) -> list[UpdateRecord]:
        """One record per update: epoch, step, cell losses, gaps, shares before and after."""
        return [] if self._training is None else list(self._training.history)

    @property
    def index(self) -> GroupIndex | None:
        """The cell of every training sample and the names of the cells; None before the training data is known."""
        return None if self._training is None else self._training.index

    def plot(self) -> Figure:
        """Draw the cells' shares and losses and the gaps over the updates. `.savefig("fairbatch.png")` saves it."""
        if self._training is None or not self._training.history:
            raise ValueError("Expected FairBatch to have trained for at least one update, but there is none to draw.")
        return shares_figure(over_time(self._training.history, self._training.index))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch for the logits, and stand in the way of the train DataLoader: Lightning asks for it next."""
        if stage != "fit":
            return
        self._check_alone(trainer)
        self._restored = self._state_to_go_on_from(trainer)
        self._training = None
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            warn(
                "FairBatch stays inactive: Trainer(overfit_batches=...) trains on the same few batches again and again."
                " Leave that out to train fairly."
            )
            return
        self._capture = watch(self._capture, pl_module, self._settings.logits)  # a submodule may be built only later
        self._undo = replace_train_loader(trainer, lambda given: self._fair_loader(given, trainer, pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for an update that the interrupted run did not get to."""
        if self._training is None:
            return
        if not self._training.history:
            log_at_once(trainer, shares_by_name(self._training.controller.shares, self._training.index))
        if self._training.validating:
            self._training.check_validation()
        elif self._training.updates_after_epochs and (epoch := self._training.missed_epoch()) is not None:
            log_at_once(trainer, self._training.update(epoch).log_values(self._training.index))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch for the logits."""
        if self._training is not None:
            self._training.before_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse a module whose logits are out of reach at once; update the shares if it is time."""
        if self._training is not None:
            self._training.after_batch(outputs)
            every = self._settings.update_every
            if every != "epoch" and (trainer.fit_loop.total_batch_idx + 1) % int(every) == 0:
                self._update_and_log(trainer, self._training)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the shares; the next epoch's batches follow them."""
        if self._training is not None:
            self._training.end_epoch()
            if self._training.updates_after_epochs:
                self._update_and_log(trainer, self._training, epoch_ended=True)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Get ready to watch the validation, if that is where losses come from."""
        if validating := self._validating(trainer):
            validating.estimate.before_validation(validating.run)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch for the logits."""
        if validating := self._validating(trainer):
            validating.estimate.before_batch(validating.run, dataloader_idx)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *batch: Any) -> None:
        """Add the losses of the batch."""
        if validating := self._validating(trainer):
            validating.estimate.after_batch(validating.run, outputs)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the shares; batches from now on follow them."""
        if self._training is not None and self._validating(trainer):
            self._update_and_log(trainer, self._training)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show in TensorBoard what happened."""
        if self.history:
            log_figure(trainer, "fairbatch", self.plot)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no trace in the user's objects: Lightning calls no teardown when training fails."""
        if self._training is not None and self._training.is_live:
            self._training.run.failed = True  # checkpoint callbacks come next
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {} if self._training is None or not self._training.is_live else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training data is known."""
        self._restored = state_dict or None
        if self._training is not None and state_dict:
            self._training.load_state_dict(state_dict)

    def _validating(self, trainer: Trainer) -> Validating | None:
        """Return what to tell about the validation that is going on, if losses come from it."""
        if self._training is None or trainer.state.fn != "fit" or trainer.sanity_checking:
            return None
        return self._training.validating

    def _update_and_log(self, trainer: Trainer, training: FairTraining, *, epoch_ended: bool = False) -> None:
        values = training.update().log_values(training.index)
        show(trainer, values, in_bar=["fairbatch/gap_max"])
        log_at_once(trainer, {"epoch": trainer.current_epoch, **values}, epoch_ended=epoch_ended)

    def _fair_loader(self, given: Any, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Return what Lightning was about to train on, with fair batches."""
        self._capture = watch(self._capture, pl_module, self._settings.logits)
        if self._capture is None:
            raise ValueError(not_a_submodule(pl_module, self._settings.logits))
        if self._training is not None:
            self._training.reload(given)
        else:
            self._training = FairTraining(self._settings, given, trainer, pl_module, self._capture)
            if self._restored is not None:
                self._training.load_state_dict(self._restored)
        return self._training.fair_loader()

    def _check_alone(self, trainer: Trainer) -> None:
        if sum(isinstance(callback, FairBatch) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "Expected one FairBatch callback but got several: a batch can follow only one of them. For several"
                " attributes use FairBatch(groups=[...])."
            )

    def _state_to_go_on_from(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return where an earlier fit of the same Trainer ended, if this one goes on from there."""
        earlier = self._training
        if earlier is None or not earlier.is_live or earlier.run.trainer is not trainer or not trainer.current_epoch:
            return None
        return earlier.state_dict()

    def _detach(self) -> None:
        if self._capture is not None:
            self._capture.remove()
        if self._undo is not None:
            self._undo()
        if self._training is not None and self._training.is_live:
            self._training.close()
        self._capture = self._undo = None
