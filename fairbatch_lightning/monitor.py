"""One line that shows how fair a model is on validation and test data, however it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from fairbatch_lightning._lightning import AnyCallback
from fairbatch_lightning._warnings import warn
from fairbatch_lightning.audit import ACCURACIES, CRITERIA, Audit, FairnessRecord
from fairbatch_lightning.capture import LogitsCapture, not_a_submodule, watch
from fairbatch_lightning.columns import Source, check_findable
from fairbatch_lightning.evaluation import no_logits, returned_logits
from fairbatch_lightning.groups import GroupIndex
from fairbatch_lightning.held_out import check_held_out, held_out_loaders
from fairbatch_lightning.logs import log_at_once, log_figure, log_name
from fairbatch_lightning.plots import confusion_figure, fairness_figure, times_of
from fairbatch_lightning.predictions import ClassNumbers, CountedPredictions
from fairbatch_lightning.tables import show
from fairbatch_lightning.values import check_at_least

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

STAGES = {"validate": "val", "test": "test"}
MOST_COUNTS = 5000
"""How many counts of predictions go to a CSV log at most."""


class FairnessMonitor(AnyCallback):
    """Logs accuracy and fairness on validation and test data, of any training, with or without FairBatch.

        Trainer(callbacks=[FairnessMonitor(groups="race")])

    Logged after every validation, and under `fairness/test/` after a test: `fairness/val/accuracy`,
    `fairness/val/accuracy/<group>`, `fairness/val/worst_group_accuracy`, `fairness/val/worst_cell_accuracy`, the
    disparities `fairness/val/equal_opportunity`, `fairness/val/equalized_odds` and `fairness/val/demographic_parity`,
    and each of those as a ratio, `fairness/val/equalized_odds_ratio`. But for the groups' names these never change, so
    that ModelCheckpoint and EarlyStopping can monitor them. Several DataLoaders have `fairness/val_0/`,
    `fairness/val_1/` and so on. A CSVLogger also gets the counts of predictions (up to 5,000 of them), from which
    `fairbatch report` draws confusion matrices.

    At the end of `trainer.test` a table shows every cell with its confidence interval; small cells are flagged.

    Args:
        groups: The sensitive attribute in the validation and test sets: the name of an attribute or column, the
            position in the sample, or a function of the dataset. Several names in a list make groups of their
            combinations. None finds `groups` and other usual names.
        labels: The same for the labels; None finds `targets` and other usual names.
        stages: Where to look: "validate", "test", or both.
        positive_label: The label that disparities are about, as the data has it: equal opportunity compares how often
            it is recognised, the others how often it is predicted. None takes the second of two labels, and of more
            than two each in turn, of which the worst counts.
        logits: The name of the submodule that computes the logits, such as "net". None takes `{"logits": ...}` if
            `validation_step` returns that, else the module's own output, `self(x)`.
        threshold: Where a single output per sample is cut: 0 for logits, 0.5 for probabilities.
        min_samples: Rates of fewer samples than this are left out of the disparities.
        name: For a second monitor, of another attribute: `name="gender"` logs under `fairness_gender/`.
    """

    def __init__(
        self,
        groups: Source = None,
        *,
        labels: Source = None,
        stages: Sequence[str] = tuple(STAGES),
        positive_label: int | str | None = None,
        logits: str | None = None,
        threshold: float = 0.0,
        min_samples: int = 1,
        name: str | None = None,
    ) -> None:
        stages = (stages,) if isinstance(stages, str) else tuple(stages)
        if not stages or not set(stages) <= set(STAGES):
            raise ValueError(f"Expected argument `stages` to be some of {list(STAGES)} but got {list(stages)}.")
        if logits is not None and not isinstance(logits, str):
            raise ValueError(f"Expected argument `logits` to be the name of a submodule but got {logits!r}.")
        check_at_least("min_samples", min_samples, 1)
        check_findable("groups", groups)
        check_findable("labels", labels)
        self._groups, self._labels, self._stages = groups, labels, stages
        self._positive_label, self._logits, self._threshold = positive_label, logits, threshold
        self._min_samples, self._name = min_samples, name
        self._prefix = "fairness" if name is None else f"fairness_{name}"
        self._capture: LogitsCapture | None = None
        self._watched: list[CountedPredictions] = []
        self._current: CountedPredictions | None = None
        self._classes = ClassNumbers()
        self._warned: set[str] = set()
        self._fitting = False
        self._trainer: Trainer | None = None
        self.history: list[FairnessRecord] = []
        """One record for every validation and test."""
        self.audits: dict[str, Audit] = {}
        """The last counts of every stage."""
        self.log_dict: Any = None  # the Trainer puts the module's `log_dict` here

    @property
    def state_key(self) -> str:
        """The name in checkpoints, of which each monitor needs its own."""
        return self._generate_state_key(name=self._name)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what was measured, not the Trainer, module and data."""
        return {**vars(self), "_trainer": None, "_capture": None, "_watched": [], "_current": None, "log_dict": None}

    def plot(self, stage: str | None = None) -> Figure:
        """Draw accuracies and disparities over the epochs.

        Args:
            stage: "val" or "test", as in `history`; None takes the one with the most records.
        """
        stages = [record.stage for record in self.history]
        stage = max(stages, key=stages.count, default=None) if stage is None else stage
        records = [record for record in self.history if record.stage == stage]
        if not records:
            raise ValueError(_nothing_to_draw(stage, sorted(set(stages))))
        times, unit = times_of([record.epoch for record in records], [record.step for record in records])
        return fairness_figure(
            times,
            {name: [record.values[name] for record in records] for name in (*ACCURACIES, *CRITERIA)},
            {
                group: [record.group_accuracies.get(group, float("nan")) for record in records]
                for group in records[-1].group_accuracies
            },
            xlabel=unit,
        )

    def plot_confusion(self, stage: str | None = None) -> Figure:
        """Draw the confusion matrix of every group in the last validation or test.

        Args:
            stage: "val" or "test", as in `audits`; None takes the last one.
        """
        stage = next(reversed(self.audits), None) if stage is None else stage
        if stage not in self.audits:
            raise ValueError(_nothing_to_draw(stage, list(self.audits)))
        audit = self.audits[stage]
        return confusion_figure(audit.confusion, audit.label_names, audit.group_names)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch for the logits; a submodule may be built only later. Another Trainer's fit starts afresh."""
        self._capture = watch(self._capture, pl_module, self._logits)
        self._fitting = stage == "fit"
        if self._fitting and self._trainer not in (None, trainer):
            self.history, self.audits, self._classes = [], {}, ClassNumbers()
        self._trainer = trainer

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
        for stage in self._measured("test"):
            if trainer.is_global_zero and trainer.test_loop.verbose:
                for table in self.audits[stage].tables(f"Fairness on {stage} data"):
                    show(table)
            log_figure(trainer, f"{self._prefix}/{stage}/confusion", partial(self.plot_confusion, stage))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the pictures in TensorBoard."""
        for stage in self._measured("val"):
            log_figure(trainer, f"{self._prefix}/{stage}", partial(self.plot, stage))
            log_figure(trainer, f"{self._prefix}/{stage}/confusion", partial(self.plot_confusion, stage))

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
        """Go on from what was measured; a checkpoint that is tested does not undo what was measured since."""
        if not self._fitting:
            return
        self.history = [FairnessRecord(**record) for record in state_dict["history"]]

    def _measured(self, stage: str) -> list[str]:
        return [place for place in self.audits if place.split("_")[0] == stage]

    def _begin(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        earlier, self._watched = self._watched, []
        if stage not in self._stages:
            return
        for place in self._measured(STAGES[stage]):
            del self.audits[place]
        self._capture = watch(self._capture, pl_module, self._logits)
        if self._capture is None:
            raise ValueError(not_a_submodule(pl_module, self._logits))
        loaders = held_out_loaders(trainer)
        check_held_out(trainer, loaders, "FairnessMonitor")
        known = {id(watched.loader.dataset): watched.index for watched in earlier}
        for loader in loaders:
            index = known.get(id(loader.dataset))
            if index is None:
                index = GroupIndex.from_dataset(loader.dataset, self._labels, self._groups)
            settings = self._classes, self._positive_label, self._threshold, self._min_samples
            self._watched.append(CountedPredictions(loader, index, pl_module.device, *settings))

    def _before_batch(self, number: int) -> None:
        self._current = self._watched[number] if self._watched else None
        if self._current is not None and self._capture is not None:
            self._capture.arm(len(self._current.next_batch()), alone=True)

    def _after_batch(self, outputs: Any, step: str) -> None:
        if self._current is None or self._capture is None:
            return
        size, captured = len(self._current.samples), self._capture.take()
        logits = returned_logits(outputs, size) if self._logits is None else None
        if logits is None and self._capture.has_others:
            raise RuntimeError(
                f"FairnessMonitor cannot tell which output is the prediction: `{step}` computes several for a batch, as"
                f' for test-time augmentation. Return {{"logits": logits}} from `{step}`.'
            )
        logits = captured if logits is None else logits
        if logits is None:
            raise RuntimeError(no_logits(size, step, "FairnessMonitor"))
        self._current.add(logits)

    def _end(self, trainer: Trainer, stage: str) -> None:
        """Log what was counted; a sanity check was only to see that it can be."""
        for number, watched in enumerate(self._watched if not trainer.sanity_checking else []):
            place = f"{stage}_{number}" if len(self._watched) > 1 else stage
            if (audit := watched.audit()) is not None:
                problems = watched.problems(place, audit)
                for problem in (problem for problem in problems if problem not in self._warned):
                    warn(f"FairnessMonitor: {problem}")
                self._warned.update(problems)
                self._log(trainer, place, audit)

    def _log(self, trainer: Trainer, place: str, audit: Audit) -> None:
        values, accuracies = audit.values(), audit.group_accuracies()
        self.audits[place] = audit
        self.history.append(FairnessRecord(place, trainer.current_epoch, trainer.global_step, values, accuracies))
        named = {log_name(self._prefix, place, name): value for name, value in values.items()}
        for group, value in accuracies.items():
            named[log_name(self._prefix, place, "accuracy", group)] = value
        self.log_dict(named, batch_size=1, sync_dist=True)
        if audit.confusion.numel() <= MOST_COUNTS:
            counts = {log_name(self._prefix, place, *key): number for key, number in audit.named_counts().items()}
            log_at_once(trainer, {"epoch": trainer.current_epoch, **counts}, only_csv=True)

    def _detach(self) -> None:
        if self._capture is not None:
            self._capture.remove()
        self._capture, self._current, self._watched = None, None, []


def _nothing_to_draw(stage: str | None, stages: list[str]) -> str:
    if not stages:
        return "Nothing has been monitored yet: fit, validate or test with the monitor among the Trainer's callbacks."
    return f"Expected a stage that was monitored, one of {stages}, but got {stage!r}."
