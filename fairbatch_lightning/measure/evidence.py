"""What a step and its batch say of labels: whether they are those of the cells, and which classes they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairbatch_lightning._support.lightning import has_compiled_parts
from fairbatch_lightning.cells.classes import ClassNumbers, num_classes
from fairbatch_lightning.cells.in_batch import LabelCheck, WrongLabelsError, check_groups, entry_at, one_per_sample
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import Source
from fairbatch_lightning.cells.values import Array
from fairbatch_lightning.measure.loss_calls import LossCall, LossCalls
from fairbatch_lightning.measure.outputs import AllOutputs

FIRST_BATCHES = 3
"""How many batches are looked at closely: in a single one all labels may be alike."""
SELDOM = 8
"""After so many looks at the last batch before an update, only one of so many is taken: it costs as much as a step of
the smallest models."""


class WatchedStep:
    """A step while it runs: all outputs of the module and its parts, and the losses that are computed of them."""

    def __init__(self, module: nn.Module, batch_size: int) -> None:
        self.outputs, self.losses, self._entered = AllOutputs(module), LossCalls(batch_size), True
        self.losses.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop taking note."""
        if self._entered:
            self._entered = False
            self.losses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.outputs.close()


@dataclass(frozen=True, eq=False)
class Judged:
    """A loss, and what its target is: the labels of the cells (then the classes of labels), others, or none at all."""

    call: LossCall
    classes: dict[int | str, int] | None = None
    problem: WrongLabelsError | None = None

    @property
    def agrees(self) -> bool:
        """Whether outputs are compared with the labels of the cells."""
        return self.classes is not None

    @property
    def is_soft(self) -> bool:
        """Whether outputs are compared with probabilities of the classes."""
        target = self.call.target
        if not target.is_floating_point() or target.shape != self.call.outputs[0].shape:
            return False
        sums = target.sum(1) if target.ndim == 2 and target.shape[1] > 1 else torch.ones(1)
        return bool((target >= 0).all() and (target <= 1).all() and ((sums - 1).abs() < 1e-2).all())


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

    def watch(self, module: nn.Module, batch_size: int) -> WatchedStep | None:
        """Watch the step with one of the first batches; not where hooks would have something compiled anew."""
        return WatchedStep(module, batch_size) if self._left and not has_compiled_parts(module) else None

    @contextmanager
    def watching(self, module: nn.Module, batch_size: int) -> Iterator[WatchedStep | None]:
        """Watch what happens inside, likewise."""
        step = self.watch(module, batch_size)
        try:
            yield step
        finally:
            if step is not None:
                step.leave()

    def check_step(self, step: WatchedStep | None, logits: Tensor, batch: Any, cells: Array) -> None:
        """Check a batch whose logits are known, if it is one of the first."""
        self.note(batch, cells)
        if self._left:
            self._left -= 1
            judged = [one for one in self.judge(step, cells) if one.call.is_of(logits)]
            problems = [one.problem for one in judged if one.problem is not None]
            if problems and not any(one.agrees for one in judged):
                raise problems[0]
            self.check(logits, judged, batch, cells)

    def judge(self, step: WatchedStep | None, cells: Array) -> list[Judged]:
        """Return the losses of a step with as many targets as the batch has samples, and what those are."""
        rows, judged = self._labels.rows(cells), []
        for call in step.losses.calls if step is not None else []:
            values = one_per_sample(call.target, len(rows))
            if values is None or call.outputs[0].ndim > 2:
                judged.append(Judged(call))
                continue
            try:
                found = self._labels.compare(values, rows, num_classes(call.outputs[0]))
                judged.append(Judged(call, found))
            except WrongLabelsError as error:
                judged.append(Judged(call, problem=error))
        return [one for one in judged if one.agrees or not one.call.is_pick]

    def check(self, logits: Tensor, judged: list[Judged], batch: Any, cells: Array) -> None:
        """Compare the labels in a batch with those of the cells, and learn which classes they are.

        Args:
            logits: The model's outputs.
            judged: The losses that were computed of them.
            batch: What the model was given.
            cells: What is believed of its samples.
        """
        self._number = num_classes(logits)
        agreeing = next((one for one in judged if one.agrees), None)
        if agreeing is not None:
            self._classes.learn(agreeing.classes or {})
        said = self._labels.find(batch, self._labels.rows(cells), self._number, doubtful=agreeing is not None)
        self._classes.learn(said or {})
        group = check_groups(self._who, self._index, self._groups, batch, cells)
        self.found = f"those that `{agreeing.call.function}` gets" if agreeing is not None else ""
        if agreeing is None and said is not None:
            self.found = "those in the batch"
        if self.found and group:
            self.found += f", and with its {group!r}"
        self._labels.complete(self._number)

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
