"""What a step and its batch say of labels: whether they are those of the cells, and which classes they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairbatch_lightning._support.lightning import has_compiled_parts
from fairbatch_lightning.cells.classes import ClassNumbers, num_classes, predicted
from fairbatch_lightning.cells.in_batch import LabelCheck, WrongLabelsError, check_groups, entry_at, one_per_sample
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.loss_calls import LossCall, LossCalls
from fairbatch_lightning.measure.outputs import AllOutputs, stand_in

FIRST_BATCHES = 3
"""How many batches are looked at closely: in a single one all labels may be alike."""
SELDOM = 8
"""After so many looks at the last batch before an update, only one of so many is taken: it costs as much as a step of
the smallest models."""


class WatchedStep:
    """A step while it runs: all outputs of the module and its parts, and the losses that are computed of them.

    Args:
        module: The module.
        batch_size: How many samples it gets.
        step: The name of the step that is watched when somebody calls it, until `leave`; None if `run` is called.
    """

    def __init__(self, module: nn.Module, batch_size: int, step: str | None) -> None:
        self.outputs, self.losses, self._runs = AllOutputs(), LossCalls(batch_size), 0
        self._module = module
        self._undo = None if step is None else stand_in(module, step, self.run)

    def leave(self) -> None:
        """Take note of nothing any more."""
        if self._undo is not None:
            self._undo()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step and take note of what happens in it."""
        self._runs += 1
        if self._runs > 1:  # LBFGS runs it several times
            return step(*args, **kwargs)
        with self.outputs.of(self._module), self.losses:
            return step(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Judged:
    """A loss, and what its target is: the labels of the cells (then the classes of labels), others, or none at all."""

    call: LossCall
    values: Array | None = None
    classes: dict[int | str, int] | None = None
    problem: WrongLabelsError | None = None

    @property
    def agrees(self) -> bool:
        """Whether outputs are compared with the labels of the cells."""
        return self.classes is not None

    @property
    def is_soft(self) -> bool:
        """Whether outputs are compared with probabilities of the classes, instead of one class for each sample."""
        target = self.call.target
        if self.values is not None or not target.is_floating_point() or target.shape != self.call.outputs[0].shape:
            return False
        sums = target.sum(1) if target.ndim == 2 and target.shape[1] > 1 else torch.ones(1)
        return bool((target >= 0).all() and (target <= 1).all() and ((sums - 1).abs() < 1e-2).all())

    def is_shuffled(self, other: Judged, logits: Tensor) -> bool:
        """Whether it has the same labels as another loss, in another order; not the model's own predictions."""
        mine, theirs = self.values, other.values
        if mine is None or theirs is None or np.array_equal(mine, predicted(logits).cpu().numpy()):
            return False
        return np.array_equal(np.sort(mine), np.sort(theirs))


class Evidence:
    """Compares labels in the batches of a DataLoader with those of the cells, and learns which classes they are.

    Args:
        who: The callback that asks, for messages.
        index: The cells of the dataset.
        labels: Where the user says the labels are.
        groups: Where the groups are.
        classes: What is known of the labels' classes, and learnt here.
        loader: The DataLoader.
    """

    def __init__(
        self,
        who: str,
        index: GroupIndex,
        labels: Source,
        groups: Source,
        classes: ClassNumbers,
        loader: DataLoader[Any],
    ) -> None:
        self._who, self._index, self._groups, self._classes = who, index, groups, classes
        self._labels = LabelCheck(
            who, index, labels, classes, lambda samples: loader.collate_fn([loader.dataset[one] for one in samples])
        )
        self._last: tuple[Any, Array] | None = None
        self._number, self._left, self._looks = 0, FIRST_BATCHES, 0
        self.found = ""
        """Where labels were found to compare with, in words; empty where there were none."""

    @property
    def class_numbers(self) -> Mapping[int | str, int] | None:
        """Which of the model's classes labels are; None before that is known."""
        return self._classes.known(self._index.label_values, self._number) if self._number else None

    def watch(self, module: nn.Module, batch_size: int, step: str | None) -> WatchedStep | None:
        """Watch the step with one of the first batches; not where hooks would have something compiled anew."""
        return WatchedStep(module, batch_size, step) if self._left and not has_compiled_parts(module) else None

    def check_step(
        self,
        step: WatchedStep | None,
        logits: Tensor,
        batch: Any,
        cells: Array,
        *,
        told: bool = False,
        sure: bool = False,
    ) -> None:
        """Check a batch whose logits are known, if it is one of the first.

        Args:
            step: What was seen of the step.
            logits: What is taken for the logits.
            batch: What the step was given.
            cells: What is believed of its samples.
            told: Whether the step has returned the logits as such.
            sure: Whether these are the model's predictions, whatever is computed of them.
        """
        self.note(batch, cells)
        if self._left:
            self._left -= 1
            self.check(logits, self.judge(step, cells), step, batch, cells, told=told, sure=sure)

    def judge(self, step: WatchedStep | None, cells: Array) -> list[Judged]:
        """Return the losses of a step with as many targets as the batch has samples, and what those are."""
        judged = [self._judged(call, self._labels.rows(cells)) for call in (step.losses.calls if step else [])]
        return [one for one in judged if one is not None and (one.agrees or not one.call.is_pick)]

    def _judged(self, call: LossCall, rows: Array) -> Judged | None:
        """Return what a target is; None if all of it is left out."""
        values = one_per_sample(call.target, len(rows))
        if values is None or call.outputs[0].ndim > 2:
            return Judged(call)
        number = num_classes(call.outputs[0])
        counted = values != call.ignored
        if not counted.any():
            return None
        if number == 2 and values.min() == -1 and -1 not in self._index.label_values and set(values) <= {-1, 1}:
            values = (values + 1) // 2  # as some losses want answers yes and no
        try:
            return Judged(call, values, self._labels.compare(values[counted], rows[counted], number))
        except WrongLabelsError as error:
            return Judged(call, values, problem=error)

    def check(
        self,
        logits: Tensor,
        judged: list[Judged],
        step: WatchedStep | None,
        batch: Any,
        cells: Array,
        *,
        told: bool,
        sure: bool,
        mixed: bool = False,
    ) -> None:
        """Compare the labels in a batch, and its losses, with those of the cells; learn which classes they are.

        Args:
            logits: The model's outputs.
            judged: The losses that were computed in the step.
            step: What was seen of it; None if it was not watched.
            batch: What the model was given.
            cells: What is believed of its samples.
            told: Whether the step has returned the logits as such.
            sure: Whether these are the model's predictions, whatever is computed of them.
            mixed: Whether samples may be mixed, as nobody measures them here.
        """
        self._number = num_classes(logits)
        related = [] if step is None else [one for one in judged if self._are_related(one, logits, step)]
        agreeing = next((one for one in related if one.agrees), None)
        self._check_losses(logits, related, agreeing, told=told, mixed=mixed)
        if agreeing is None and not told and any(one.agrees for one in judged):
            raise ValueError(
                f"{self._who} cannot tell whose outputs of shape {tuple(logits.shape)} it sees: the loss is computed"
                " with the labels, but of something that is made of them or of other outputs, such as a part, a sum or"
                ' another order. Return what the loss is computed of, {"loss": loss, "logits": logits}.'
            )
        if agreeing is not None:
            self._classes.learn(agreeing.classes or {})
        said = self._labels.find(batch, self._labels.rows(cells), self._number, doubtful=agreeing is not None)
        self._classes.learn(said or {})
        if agreeing is None and step is not None and not told and not sure:
            self._check_number(logits, related, step)
        group = check_groups(self._who, self._index, self._groups, batch, cells)
        self.found = f"those that `{agreeing.call.function}` gets" if agreeing is not None else ""
        if agreeing is None and said is not None:
            self.found = "those in the batch (the loss is none that can be looked at)"
        if self.found and group:
            self.found += f", and with its {group!r}"
        self._labels.complete(self._number)

    @staticmethod
    def _are_related(one: Judged, logits: Tensor, step: WatchedStep) -> bool:
        """Return whether a loss is of these logits, or of what they were made of."""
        return any(one.call.is_of(made) for made in step.losses.history(logits))

    def _check_losses(
        self, logits: Tensor, related: list[Judged], agreeing: Judged | None, *, told: bool, mixed: bool
    ) -> None:
        """Refuse outputs whose losses say that they are no logits of single samples of these cells."""
        problems = [one for one in related if one.problem is not None]
        is_mixed = any(agreeing is not None and one.is_shuffled(agreeing, logits) for one in problems)
        if agreeing is None and not told:
            is_mixed = is_mixed or (not problems and any(one.is_soft for one in related))
        if is_mixed and not mixed:
            raise ValueError(
                f"{self._who} cannot tell the errors of single samples from batches whose samples are mixed, as by"
                " mixup: the loss has several labels for a sample, or probabilities. Mix only `if self.training`, and"
                ' evaluate by FairBatch(estimate="sampled") or "exact"; if nothing is mixed, return'
                ' {"loss": loss, "logits": logits}.'
            )
        if agreeing is not None:
            return
        if problems and problems[0].problem is not None:
            raise problems[0].problem

    def _check_number(self, logits: Tensor, related: list[Judged], step: WatchedStep) -> None:
        """Refuse outputs of which nothing says that they are logits of the labels."""
        who, labels = self._who, self._index.label_values
        if step.losses.normalises(logits):
            return
        other = next((one.call for one in related if not one.is_soft), None)
        if other is not None:
            raise ValueError(
                f"{who} needs logits of one label per sample, but `{other.function}` compares the model's outputs"
                f" {tuple(logits.shape)} with {tuple(other.target.shape)} values that are no classes: several yes/no"
                f' answers, or something to reconstruct. Name the submodule that predicts the label, {who}(logits="head'
                '"), or return what does, {"loss": loss, "logits": logits[:, k]}, and pass labels=... for that.'
            )
        if not related and self._number > len(labels):
            raise ValueError(
                f"{who} cannot tell whether outputs of shape {tuple(logits.shape)} are logits of the {len(labels)}"
                f" labels {list(labels)}: the step computes no loss of them that it knows. Name the submodule that"
                f' predicts the label, {who}(logits="head"), or return {{"loss": loss, "logits": logits}}.'
            )

    def note(self, batch: Any, cells: Array) -> None:
        """Keep the labels of a batch until there is time for a look at them."""
        if self.is_due and self._labels.path is not None:
            self._last = entry_at(batch, self._labels.path), cells

    @property
    def is_due(self) -> bool:
        """Whether `check_last` is to look at a batch next time; the same on all processes."""
        return self._looks < SELDOM or self._looks % SELDOM == 0

    def check_last(self) -> WrongLabelsError | None:
        """Return what is wrong with the labels that were kept, if anything. Waits for the device."""
        last, self._last, self._looks = self._last, None, self._looks + 1
        return last and self._labels.again(last[0], self._labels.rows(last[1]), self._number)
