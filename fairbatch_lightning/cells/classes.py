"""Which of the model's classes a label is, and what class logits speak for: one mapping for everybody."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def is_binary(logits: Tensor) -> bool:
    """Return whether there is a single logit per sample."""
    return logits.ndim == 1 or logits.shape[1] == 1


def num_classes(logits: Tensor) -> int:
    """Return how many classes logits of shape `(B,)`, `(B, 1)` or `(B, C)` tell apart."""
    if logits.ndim not in (1, 2):
        raise ValueError(
            "Expected the model to give one prediction per sample, as logits of shape (B,), (B, 1) or (B, C), but"
            f" got {tuple(logits.shape)}. Name the submodule that does, logits=..., or return {{'logits': ...}}."
        )
    return 2 if is_binary(logits) else logits.shape[1]


def predicted(logits: Tensor, threshold: float = 0.0) -> Tensor:
    """Return the class that the logits speak for, `(B,)`; a single one per sample is cut at the threshold."""
    return (logits.flatten() > threshold).long() if is_binary(logits) else logits.argmax(1)


def classes_of_labels(values: Sequence[int | str], number: int) -> list[int]:
    """Return which of the model's classes each label is: the label itself where all of them can be, else its rank.

    Ranks are known only if there is a label for every class.

    >>> classes_of_labels([0, 2], 3), classes_of_labels(["cat", "dog"], 2), classes_of_labels([-1, 1], 2)
    ([0, 2], [0, 1], [0, 1])
    """
    if len(values) > number:
        raise ValueError(
            f"Expected the model to have an output for each of the {len(values)} labels {list(values)} but its logits"
            f" have {number}. Give its last layer as many outputs, or check the argument `labels`."
        )
    numbers = [value for value in values if isinstance(value, int) and 0 <= value < number]
    if len(numbers) == len(values):
        return numbers
    if len(values) < number:
        raise _unclear(values, number)
    return list(range(number))


class ClassNumbers:
    """Which of the model's classes each label is, in all data that it is evaluated on.

    A label must not mean another class because some data lacks one.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int | str, int]] = {}

    def find(self, values: Sequence[int | str], number: int) -> dict[int | str, int]:
        """Return the class of every label, of `number` classes."""
        known = self._known.setdefault(number, {})
        if set(values) <= set(known):
            return known
        found = dict(zip(values, classes_of_labels(values, number), strict=True))
        if any(known.get(label, value) != value for label, value in found.items()):
            raise _unclear(values, number, f" (elsewhere it has {known})")
        known.update(found)
        return known


def _unclear(values: Sequence[int | str], number: int, elsewhere: str = "") -> ValueError:
    return ValueError(
        f"The model tells {number} classes apart, but the data has the labels {list(values)}, of which it is not known"
        f" which class each is{elsewhere}. Give the labels as numbers of classes, from 0 to {number - 1}: labels=..."
    )
