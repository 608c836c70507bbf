"""See to it that logits, labels and cells belong together: nothing is trusted that can be checked.

The sampler knows which samples it has drawn, and so which cells a batch is made of. Whether the logits of a step are in
that order, and the labels those of the cells, is seen on the first training batches: from the labels in the batch, and
from what the step's own loss compares its outputs with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairbatch_lightning._support.lightning import shards_weights
from fairbatch_lightning._support.processes import gathered, world_sum
from fairbatch_lightning.batches.sampler import Drawn
from fairbatch_lightning.measure.estimates.base import TrainingRun
from fairbatch_lightning.measure.evidence import FIRST_BATCHES, Evidence, Judged, WatchedStep
from fairbatch_lightning.measure.outputs import Output, returned_logits

ENOUGH_SAMPLES = 64
"""Of how many samples labels have to agree by chance for an output to be taken for another."""
MOST_SURPRISES = 3
"""How often the model may be called another number of times than before until every batch is looked at closely."""


class Pairing:
    """Finds the logits of training batches, and checks that they and the labels are those of the cells.

    Args:
        run: The Trainer, the module and the data.
        measures_training: Whether errors in training count, so that its batches must be of single samples.
    """

    def __init__(self, run: TrainingRun, *, measures_training: bool) -> None:
        self._measures_training = measures_training
        self._step: WatchedStep | None = None
        self._surprises = 0
        self.source = ""
        """Where the logits come from, in words; empty until that is known."""
        self.are_returned = False
        """Whether that is what `training_step` returns."""
        self.reload(run)

    def reload(self, run: TrainingRun) -> None:
        """Look closely at data that was loaded anew."""
        self._run, self._left, self._again = run, FIRST_BATCHES, False
        self._candidates: set[tuple[str, bool, int]] = set()
        self._chosen: tuple[str, bool, int] | None = None
        self._samples = 0
        who, loader = run.reader.who, run.loader.loader
        self._evidence = Evidence(who, run.index, run.labels, run.groups, run.classes, loader)

    @property
    def is_open(self) -> bool:
        """Whether the next batch is looked at closely."""
        return self._left > 0 or self._again or not self.source

    @property
    def found(self) -> str:
        """What the labels were compared with, in words; empty where there was nothing."""
        return self._evidence.found

    @property
    def classes(self) -> Mapping[int | str, int] | None:
        """Which of the model's classes labels are; None before that is known."""
        return self._evidence.class_numbers

    def look_again(self) -> None:
        """Look closely at the next batch: the step has come to do something else."""
        self._again, self._surprises = True, self._surprises + 1

    def begin(self) -> None:
        """Watch the step that comes; not where a hook would have something compiled anew."""
        run = self._run
        run.reader.expect(run.loader.batch_size)
        if not run.has_compiled_parts and not shards_weights(run.trainer):
            self._step = WatchedStep(run.module, run.loader.batch_size, "training_step")

    def forward_ends(self) -> None:
        """Count no outputs that the backward pass computes again; in manual optimization it is a part of the step."""
        if self._run.module.automatic_optimization:
            self._run.reader.forward_ends()

    def leave(self) -> None:
        """Leave no trace in the module."""
        step, self._step = self._step, None
        if step is not None:
            step.leave()

    def finish(self, outputs: Any, batch: Any, drawn: Drawn) -> Tensor | None:
        """Return the logits of the step that was watched, after a check of all that is paired; None if it had none.

        The first batches are looked at by all processes: what one of them finds wrong ends them all.
        """
        step, problem, logits = self._step, None, None
        self.leave()
        try:
            judged = self._evidence.judge(step, drawn.cells)
            logits = self._find(outputs, step, judged, drawn)
            if logits is not None:
                self._check(logits, judged, step, batch, drawn)
        except Exception as error:  # whatever it is, the other processes have to hear of it
            problem = error
        messages = gathered(None if problem is None else str(problem)) if self._left > 0 else []
        if problem is not None:
            raise problem
        if any(messages):
            raise RuntimeError(f"Another process says: {next(filter(None, messages))}")
        unsure = logits is None and bool(self._candidates)
        self._left, self._again = max(0, self._left - 1), unsure or self._surprises > MOST_SURPRISES
        self.note(batch, drawn)
        return None if logits is None else logits.detach()

    # Which output the logits are.

    def _check(self, logits: Tensor, judged: list[Judged], step: WatchedStep | None, batch: Any, drawn: Drawn) -> None:
        given, mixed = self._run.loader.unwrap(batch), not self._measures_training
        told, sure = self.are_returned, self._run.reader.name is not None
        self._evidence.check(logits, judged, step, given, drawn.cells, told=told, sure=sure, mixed=mixed)
        self._run.sample_loss(logits.detach(), torch.from_numpy(drawn.cells.astype("int64")))

    def _find(self, outputs: Any, step: WatchedStep | None, judged: list[Judged], drawn: Drawn) -> Tensor | None:
        reader, size = self._run.reader, len(drawn.samples)
        automatic = self._run.module.automatic_optimization
        returned_first = reader.training_step_returns or (automatic and not self.source)
        kept = reader.read(outputs, size, returned_first=returned_first)
        self.are_returned = kept is not None and kept is returned_logits(outputs, size)
        if self.are_returned:
            self.source = "returned by `training_step`"
            return kept
        if step is None:
            self.source = f"`{reader.name or 'self(x)'}`" if kept is not None else self.source
            if kept is None and not self._run.is_compiled and not (automatic and not outputs):
                raise reader.missing(size)
            return kept  # where the hook is compiled the first update will see
        found = self._choose(step, judged, size)
        if found is None and self._candidates:
            return None  # not sure yet
        if found is None:
            if self.source or (automatic and not outputs):
                return None  # the step has left this batch out
            raise reader.missing(size, outputs=step.outputs)
        self._chosen = found.key
        passes = sum((one.name, one.direct) == (found.name, found.direct) for one in step.outputs.of_size(size))
        reader.watch(self._run.module, found, passes)
        self.source = found.place + (f", pass {found.number + 1} of {passes}" if passes > 1 else "")
        return found.logits

    def _choose(self, step: WatchedStep, judged: list[Judged], size: int) -> Output | None:
        """Return the output whose loss is computed with the labels of the cells; else the only one there is, if any."""
        name = self._run.reader.name
        found = step.outputs.of_size(size)
        own = [output for output in found if output.name == (name or "")]
        if any(not output.direct for output in own):
            own = [output for output in own if not output.direct]
        trained = [output for output in found if any(one.agrees and one.call.is_of(output.logits) for one in judged)]
        if before := [output for output in trained if output.key == self._chosen]:
            return before[0]
        trained = self._ever_trained(trained, size)
        if both := [output for output in own if any(output is one for one in trained)]:
            return both[0]
        if trained and not name:
            return self._only(trained)
        if len({id(output.logits) for output in own}) > 1:
            raise RuntimeError(
                f"{self._run.reader.who} cannot tell which of {len(own)} outputs for a batch is the prediction for its"
                " samples: the step calls the model several times, and computes no loss of one of them with the batch's"
                ' labels. Return {"loss": loss, "logits": logits} from `training_step`.'
            )
        return own[0] if own else None

    def _ever_trained(self, trained: list[Output], size: int) -> list[Output]:
        """Return those whose loss has always been computed with the labels: in a small batch others may be alike."""
        if trained:
            keys = {output.key for output in trained}
            self._candidates = keys & self._candidates or keys
            self._samples += size
        return [output for output in trained if output.key in self._candidates]

    def _only(self, trained: list[Output]) -> Output | None:
        """Return the outermost part that gives the logits; None if several give different ones, and more may tell."""
        if len({id(output.logits) for output in trained}) == 1:
            self._candidates = set()
            return min(trained, key=lambda output: output.name.count("."))
        if self._samples < ENOUGH_SAMPLES:
            self._again = True
            return None
        names = sorted({output.place for output in trained})
        raise ValueError(
            f"{self._run.reader.who} cannot tell which output is the prediction: {' and '.join(names)} are all trained"
            f" with the labels. Name the one that counts, {self._run.reader.who}(logits={names[0].strip('`')!r})."
        )

    # Ever after.

    def note(self, batch: Any, drawn: Drawn) -> None:
        """Keep the labels of a batch until the next update, which waits for the device anyway."""
        if self._evidence.is_due:
            self._evidence.note(self._run.loader.unwrap(batch), drawn.cells)

    def check_last(self) -> None:
        """Compare the labels of the last batch once more, now and then. All processes have to come here."""
        is_due, problem = self._evidence.is_due, self._evidence.check_last()
        if not is_due:
            return
        self._left = max(1, self._left)  # the step may have come to do something else, too: look at the next one
        found = torch.tensor(int(problem is not None), device=self._run.module.device)
        if int(world_sum(found)):
            raise problem or RuntimeError("Another process has found labels that are not those of the cells.")
