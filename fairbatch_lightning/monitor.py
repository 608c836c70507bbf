"""One line that shows how fair a model is on validation and test data, however it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning._warnings import warn
from fairbatch_lightning.audit import CRITERIA, Audit
from fairbatch_lightning.capture import LogitsCapture
from fairbatch_lightning.columns import Source
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.held_out import check_held_out, held_out_loaders
from fairbatch_lightning.logs import log_at_once, log_figure, log_name
from fairbatch_lightning.plots import confusion_figure, fairness_figure
from fairbatch_lightning.predictions import CountedPredictions

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

STAGES = {"validate": "val", "test": "test"}


@dataclass(frozen=True)
class FairnessRecord:
    """What was measured in one validation or test.

    Args:
        stage: "val" or "test", with "/dataloader_idx_<number>" if there are several DataLoaders.
        epoch: The epoch in which it happened.
        step: The Trainer's `global_step` at that time.
        values: Accuracies and disparities by name.
        group_accuracies: The accuracy of every group, by the group's name.
    """

    stage: str
    epoch: int
    step: int
    values: dict[str, float]
    group_accuracies: dict[str, float]


class FairnessMonitor(AnyCallback):
    """Logs accuracy and fairness on validation and test data, of any training, with or without FairBatch.

        Trainer(callbacks=[FairnessMonitor(groups="race")])

    Logged after every validation, and under `fairness/test/` after a test: `fairness/val/accuracy`,
    `fairness/val/worst_group_accuracy`, `fairness/val/accuracy/<group>`, the disparities
    `fairness/val/equal_opportunity`, `fairness/val/equalized_odds` and `fairness/val/demographic_parity`, and each of
    those as a ratio, `fairness/val/equalized_odds_ratio`. The names never change, so that ModelCheckpoint and
    EarlyStopping can monitor them. With several DataLoaders they end in `/dataloader_idx_0` and so on. A CSVLogger also
    gets the counts of predictions, from which `fairbatch report` draws confusion matrices.

    At the end of `trainer.test` a table shows every cell with its confidence interval; small cells are flagged.

    Args:
        groups: The sensitive attribute in the validation and test sets: the name of an attribute or column, the
            position in the sample, or a function of the dataset. Several names in a list make groups of their
            combinations. None finds `groups` and other usual names.
        labels: The same for the labels; None finds `targets` and other usual names.
        stages: Where to look: "validate", "test", or both.
        positive_label: The label that equal opportunity and the ratios are about, as the data has it. None takes the
            second of two labels, and of more than two each in turn, of which the worst counts.
        logits: The name of the submodule that computes the logits, such as "net". None takes `{"logits": ...}` if
            `validation_step` returns that, else the module's own output, `self(x)`.
    """

    def __init__(
        self,
        groups: Source = None,
        *,
        labels: Source = None,
        stages: Sequence[str] = tuple(STAGES),
        positive_label: int | str | None = None,
        logits: str | None = None,
    ) -> None:
        stages = (stages,) if isinstance(stages, str) else tuple(stages)
        if not stages or not set(stages) <= set(STAGES):
            raise ValueError(f"Expected argument `stages` to be some of {list(STAGES)} but got {list(stages)}.")
        if logits is not None and not isinstance(logits, str):
            raise ValueError(f"Expected argument `logits` to be the name of a submodule but got {logits!r}.")
        self._groups, self._labels, self._stages = groups, labels, stages
        self._positive_label, self._logits = positive_label, logits
        self._capture: LogitsCapture | None = None
        self._watched: list[CountedPredictions] = []
        self._current: CountedPredictions | None = None
        self._warned: set[str] = set()
        self.history: list[FairnessRecord] = []
        """One record for every validation and test."""
        self.audits: dict[str, Audit] = {}
        """The last counts of every stage."""
        self.log_dict: Any = None  # the Trainer puts the module's `log_dict` here

    def plot(self, stage: str | None = None) -> Figure:
        """Draw accuracies and disparities over the epochs.

        Args:
            stage: "val" or "test", as in `history`; None takes the one with the most records.
        """
        stages = [record.stage for record in self.history]
        stage = max(stages, key=stages.count, default=None) if stage is None else stage
        records = [record for record in self.history if record.stage == stage]
        if not records:
            raise ValueError(f"Expected a stage that was monitored, one of {sorted(set(stages))}, but got {stage!r}.")
        epochs = [record.epoch for record in records]
        several = len(set(epochs)) < len(epochs)
        return fairness_figure(
            [record.step for record in records] if several else epochs,
            {
                name: [record.values[name] for record in records]
                for name in ("accuracy", "worst_group_accuracy", *CRITERIA)
            },
            {
                group: [record.group_accuracies.get(group, float("nan")) for record in records]
                for group in records[-1].group_accuracies
            },
            xlabel="step" if several else "epoch",
        )

    def plot_confusion(self, stage: str | None = None) -> Figure:
        """Draw the confusion matrix of every group in the last validation or test.

        Args:
            stage: "val" or "test", as in `audits`; None takes the last one.
        """
        stage = next(reversed(self.audits), None) if stage is None else stage
        if stage not in self.audits:
            raise ValueError(f"Expected a stage that was monitored, one of {list(self.audits)}, but got {stage!r}.")
        audit = self.audits[stage]
        return confusion_figure(audit.confusion, audit.label_names, audit.group_names)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch for the logits; a submodule may be built only later."""
        self._watch_logits(pl_module)
        if stage == "fit" and not trainer.current_epoch:
            self.history.clear()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out which samples the batches will hold."""
        self._begin(trainer, pl_module, "validate")

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out which samples the batches will hold."""
        self._begin(trainer, pl_module, "test")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch for the logits."""
        self._before_batch(dataloader_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch for the logits."""
        self._before_batch(dataloader_idx)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *batch: Any) -> None:
        """Count the predictions."""
        self._after_batch(outputs, "validation_step")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *batch: Any) -> None:
        """Count the predictions."""
        self._after_batch(outputs, "test_step")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was measured."""
        self._end(trainer, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was measured."""
        self._end(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the tables, and show the pictures in TensorBoard."""
        for stage, audit in self.audits.items():
            if stage.startswith("test"):
                if trainer.is_global_zero and trainer.test_loop.verbose:
                    audit.show(f"Fairness on {stage} data")
                log_figure(trainer, f"fairness/{stage}/confusion", partial(self.plot_confusion, stage))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the pictures in TensorBoard."""
        for stage in self.audits:
            if stage.startswith("val"):
                log_figure(trainer, f"fairness/{stage}", partial(self.plot, stage))
                log_figure(trainer, f"fairness/{stage}/confusion", partial(self.plot_confusion, stage))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no trace in the user's objects: Lightning calls no teardown when something fails."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far, for checkpoints."""
        return {"history": [asdict(record) for record in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was measured."""
        self.history = [FairnessRecord(**record) for record in state_dict["history"]]

    def _watch_logits(self, pl_module: LightningModule) -> LogitsCapture | None:
        modules = dict(pl_module.named_modules())
        if self._capture is None and (self._logits or "") in modules:
            self._capture = LogitsCapture(modules[self._logits or ""])
        return self._capture

    def _begin(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        earlier, self._watched = self._watched, []
        if stage not in self._stages or trainer.sanity_checking:
            return
        if self._watch_logits(pl_module) is None:
            raise ValueError(
                f"Expected argument `logits` to name a submodule of {type(pl_module).__name__} but got"
                f" {self._logits!r}. It has {[name for name, _ in pl_module.named_modules() if name]}."
            )
        loaders = held_out_loaders(trainer)
        check_held_out(trainer, loaders, "FairnessMonitor")
        known = {id(watched.loader.dataset): watched.index for watched in earlier}
        for loader in loaders:
            index = known.get(id(loader.dataset))
            if index is None:
                index = GroupIndex.from_dataset(loader.dataset, self._labels, self._groups)
            self._watched.append(CountedPredictions(loader, index, pl_module.device))

    def _before_batch(self, number: int) -> None:
        self._current = self._watched[number] if self._watched else None
        if self._current is not None and self._capture is not None:
            self._capture.arm(len(self._current.next_batch()))

    def _after_batch(self, outputs: Any, step: str) -> None:
        if self._current is None or self._capture is None:
            return
        size, captured = len(self._current.samples), self._capture.take()
        logits = returned_logits(outputs, size) if self._logits is None else None
        logits = captured if logits is None else logits
        if logits is None:
            raise RuntimeError(no_logits(size, step, "FairnessMonitor"))
        self._current.add(logits)

    def _end(self, trainer: Trainer, stage: str) -> None:
        for number, watched in enumerate(self._watched):
            suffix = f"/dataloader_idx_{number}" if len(self._watched) > 1 else ""
            audit = watched.audit(self._positive_label, int(trainer.world_size))
            if audit is None:
                continue
            self._log(trainer, stage, suffix, audit)

    def _log(self, trainer: Trainer, stage: str, suffix: str, audit: Audit) -> None:
        place = stage + suffix
        values, accuracies = audit.values(), audit.group_accuracies()
        self._warn_once(place, audit)
        self.audits[place] = audit
        self.history.append(FairnessRecord(place, trainer.current_epoch, trainer.global_step, values, accuracies))
        named = {f"fairness/{stage}/{name}{suffix}": value for name, value in values.items()}
        for group, value in accuracies.items():
            named[log_name("fairness", stage, "accuracy", group) + suffix] = value
        self.log_dict(named, batch_size=1, sync_dist=True, add_dataloader_idx=False)
        counts = {
            log_name("fairness", stage, "count", group, label, prediction) + suffix: int(audit.confusion[z, y, p])
            for z, group in enumerate(audit.group_names)
            for y, label in enumerate(audit.label_names)
            for p, prediction in enumerate(audit.label_names)
        }
        for y, label in enumerate(audit.label_names):
            counts[log_name("fairness", stage, "positive", label) + suffix] = int(audit.positive in (None, y))
        log_at_once(trainer, {"epoch": trainer.current_epoch, **counts}, only_csv=True)

    def _warn_once(self, place: str, audit: Audit) -> None:
        problem = ""
        if len(audit.group_names) == 1:
            problem = f"all {place} samples are of the group {audit.group_names[0]}: disparities are NaN"
        elif empty := audit.empty_cells():
            problem = (
                f"there are no {place} samples of the cells {empty}. Their rates are undefined and left out; where"
                " fewer than two groups are left, a disparity is NaN"
            )
        if problem and problem not in self._warned:
            self._warned.add(problem)
            warn(f"FairnessMonitor: {problem}. Evaluate on data that has all of them.")

    def _detach(self) -> None:
        if self._capture is not None:
            self._capture.remove()
        self._capture, self._current, self._watched = None, None, []
