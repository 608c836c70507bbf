"""One line that shows how fair a model is on validation and test data, however it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fairbatch_lightning._support.checks import check_at_least
from fairbatch_lightning._support.lightning import held_out_loaders, is_spawned
from fairbatch_lightning._support.processes import leave_group_at_exit
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.batches.held_out import check_held_out
from fairbatch_lightning.callbacks.any_callback import AnyCallback
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source, check_findable
from fairbatch_lightning.fairness.audit import Audit, FairnessRecord
from fairbatch_lightning.fairness.counts import HeldOutPass, Reading
from fairbatch_lightning.measure.evidence import Evidence, WatchedStep
from fairbatch_lightning.measure.logits import LogitsReader
from fairbatch_lightning.measure.outputs import returned_logits
from fairbatch_lightning.reports.curves import curves_of_history
from fairbatch_lightning.reports.figures import confusion_figure, fairness_figure
from fairbatch_lightning.reports.log_format import count_values, log_name, monitor_prefix, record_values
from fairbatch_lightning.reports.loggers import log_at_once, log_figure
from fairbatch_lightning.reports.tables import MANY, as_text, cell_table, measure_table

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from matplotlib.figure import Figure

WHO = "FairnessMonitor"
STAGES = {"validate": "val", "test": "test"}
MOST_COUNTS = 5000
"""How many counts of predictions go to a CSV log at most."""


class _CheckedPass(NamedTuple):
    """A pass over held-out data, and what its batches say of the labels."""

    counted: HeldOutPass
    evidence: Evidence


class FairnessMonitor(AnyCallback):
    """Logs accuracy and fairness on validation and test data, of any training, with or without FairBatch.

        Trainer(callbacks=[FairnessMonitor(groups="race")])

    Logged after every validation, and under `fairness/test/` after a test: `fairness/val/accuracy`,
    `fairness/val/group_accuracy/<group>`, `fairness/val/worst_group_accuracy`, `fairness/val/worst_cell_accuracy`, the
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
        self._reader = LogitsReader(WHO, logits, only_one=True)
        check_at_least("min_samples", min_samples, 1)
        check_findable("groups", groups, WHO)
        check_findable("labels", labels, WHO)
        self._groups, self._labels, self._stages, self._logits = groups, labels, stages, logits
        self._reading = Reading(positive_label, threshold, min_samples)
        self._name, self._prefix = name, monitor_prefix(name)
        self._passes: list[_CheckedPass] = []
        self._current: tuple[_CheckedPass, np.ndarray[Any, Any]] | None = None
        self._classes = ClassNumbers()
        self._step: WatchedStep | None = None
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
        return {
            **vars(self),
            "_trainer": None,
            "_passes": [],
            "_current": None,
            "_step": None,
            "log_dict": None,
        }

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
        return fairness_figure(curves_of_history(records))

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
        self._reader.attach(pl_module, required=False)
        self._fitting = stage == "fit"
        if self._fitting and self._trainer not in (None, trainer):
            self.history, self.audits, self._classes = [], {}, ClassNumbers()
        self._trainer = trainer

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out which samples the batches will hold."""
        earlier, self._passes = self._passes, []
        stage = "test" if trainer.testing else "validate"
        if stage not in self._stages:
            return
        for place in self._measured(STAGES[stage]):
            del self.audits[place]
        self._reader.attach(pl_module)
        loaders = held_out_loaders(trainer)
        check_held_out(trainer, loaders, WHO)
        known = {id(done.counted.loader.dataset): done for done in earlier}
        for loader in loaders:
            if (before := known.get(id(loader.dataset))) is not None:
                index, evidence = before.counted.data.index, before.evidence
            else:
                index = GroupIndex.from_dataset(loader.dataset, self._labels, self._groups)
                evidence = Evidence(WHO, index, self._labels, self._groups, self._classes, loader)
            counted = HeldOutPass(loader, index, pl_module.device, self._classes, self._reading)
            self._passes.append(_CheckedPass(counted, evidence))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch for the logits."""
        self._current = None
        if self._passes:
            counted, evidence = going_on = self._passes[dataloader_idx]
            samples = counted.next_batch()
            self._current = going_on, samples
            self._reader.expect(len(samples))
            self._step = evidence.watch(pl_module, len(samples), "test_step" if trainer.testing else "validation_step")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the predictions."""
        if self._current is not None:
            ((counted, evidence), samples), step = self._current, self._step
            self._stop_watching()
            name = "test_step" if trainer.testing else "validation_step"
            logits = self._reader.require(outputs, len(samples), name)
            if (samples >= 0).all():
                told = returned_logits(outputs, len(samples)) is logits
                evidence.check_step(
                    step,
                    logits,
                    batch,
                    counted.data.index.cells[samples],
                    told=told,
                    sure=True,
                )
            counted.add(samples, logits)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was counted; a sanity check was only to see that it can be."""
        stage = "test" if trainer.testing else "val"
        for number, (done, evidence) in enumerate(self._passes if not trainer.sanity_checking else []):
            if (problem := evidence.check_last()) is not None:
                raise problem
            if done.counts is None:  # there was no batch
                continue
            place, audit = f"{stage}_{number}" if len(self._passes) > 1 else stage, done.counts.audit()
            problems = audit.problems(place)
            for found in (found for found in problems if found not in self._warned):
                warn(f"{WHO}: {found}")
            self._warned.update(problems)
            self._log(trainer, place, audit)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the tables, and show the pictures in TensorBoard."""
        for stage in self._measured("test"):
            if trainer.is_global_zero and trainer.test_loop.verbose:
                audit = self.audits[stage]
                for table in (cell_table(audit, f"Fairness on {stage} data", most=MANY), measure_table(audit)):
                    print(as_text(table), end="\n\n")
            log_figure(trainer, log_name(self._prefix, stage, "confusion"), partial(self.plot_confusion, stage))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the pictures in TensorBoard."""
        for stage in self._measured("val"):
            log_figure(trainer, log_name(self._prefix, stage, "curves"), partial(self.plot, stage))
            log_figure(trainer, log_name(self._prefix, stage, "confusion"), partial(self.plot_confusion, stage))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no trace in the user's objects."""
        self._detach()
        if is_spawned(trainer):  # after a failure nobody comes here, and the other processes may be anywhere
            leave_group_at_exit()

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
        self.history = [FairnessRecord.load(record) for record in Saved(state_dict, WHO)["history"]]

    def _measured(self, stage: str) -> list[str]:
        return [place for place in self.audits if place.split("_")[0] == stage]

    def _log(self, trainer: Trainer, place: str, audit: Audit) -> None:
        now = trainer.current_epoch, trainer.global_step
        record = FairnessRecord(place, *now, audit.values(), audit.group_accuracies())
        self.audits[place] = audit
        self.history.append(record)
        self.log_dict(record_values(record, self._prefix), batch_size=1, sync_dist=True)
        if audit.confusion.numel() <= MOST_COUNTS:
            log_at_once(trainer, count_values(audit, record, self._prefix), only_csv=True)

    def _stop_watching(self) -> None:
        if self._step is not None:
            self._step.leave()
        self._step = None

    def _detach(self) -> None:
        self._reader.detach()
        self._stop_watching()
        self._current, self._passes = None, []


def _nothing_to_draw(stage: str | None, stages: list[str]) -> str:
    if not stages:
        return "Nothing has been monitored yet: fit, validate or test with the monitor among the Trainer's callbacks."
    return f"Expected a stage that was monitored, one of {stages}, but got {stage!r}."
