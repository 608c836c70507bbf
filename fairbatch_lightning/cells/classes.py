"""Which of the model's classes a label is, and what class logits speak for: one mapping for everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def classes_of_numbers(values: Sequence[int | str], number: int) -> list[int] | None:
    """Return which of the model's classes each label is: the label itself where all of them can be, else its rank.

    Ranks are known only if there is a label for every class. None for names: the alphabet does not number classes.

    >>> classes_of_numbers([0, 2], 3), classes_of_numbers([-1, 1], 2), classes_of_numbers(["cat", "dog"], 2)
    ([0, 2], [0, 1], None)
    """
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) == len(values) and all(0 <= value < number for value in numbers):
        return numbers
    return list(range(number)) if len(numbers) == len(values) == number else None


class ClassNumbers:
    """Which of the model's classes each label is, in all data that it is trained or evaluated on.

    It follows from labels that are numbers, or is learnt from batches. A label must not mean another class because some
    data lacks one.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int | str, int]] = {}
        self.learnt: dict[int | str, int] = {}
        """What was learnt from batches."""

    def learn(self, found: Mapping[int | str, int]) -> None:
        """Take note of what a batch says."""
        for label, value in found.items():
            if self.learnt.setdefault(label, value) != value:
                raise ValueError(
                    f"Label {label!r} of the data is class {self.learnt[label]} in some batches and class {value} in"
                    " others. If a transform or a step changes the labels now and then, pass labels=... as the model"
                    " gets them."
                )

    def known(self, values: Sequence[int | str], number: int) -> dict[int | str, int] | None:
        """Return the class of every label, of `number` classes, if that is known."""
        if set(values) <= set(self.learnt):
            return dict(self.learnt)
        known = self._known.setdefault(number, {})
        if set(values) <= set(known):
            return known
        numbers = classes_of_numbers(values, number)
        return None if numbers is None else self._counted_alike(dict(zip(values, numbers, strict=True)), number)

    def _counted_alike(self, classes: dict[int | str, int], number: int) -> dict[int | str, int] | None:
        """Return what follows for all labels if those that were learnt are counted from another start."""
        if all(self.learnt.get(label, value) == value for label, value in classes.items()):
            return classes
        shifts = {self.learnt[label] - int(label) for label in classes if label in self.learnt}
        shifted = {label: int(label) + shift for label in classes for shift in shifts}
        return shifted if len(shifts) == 1 and all(0 <= value < number for value in shifted.values()) else None

    def find(self, values: Sequence[int | str], number: int) -> dict[int | str, int]:
        """Return the same, or say what to do if it is not known."""
        if len(values) > number:
            raise ValueError(
                f"Expected the model to have an output for each of the {len(values)} labels {list(values)} but its"
                f" logits have {number}. Give its last layer as many outputs, or check the argument `labels`."
            )
        found, known = self.known(values, number), self._known.setdefault(number, {})
        if found is None:
            raise _unclear(values, number)
        if any(known.get(label, value) != value for label, value in found.items()):
            raise _unclear(values, number, f" (elsewhere it has {known})")
        known.update(found)
        return found


def _unclear(values: Sequence[int | str], number: int, elsewhere: str = "") -> ValueError:
    return ValueError(
        f"The model tells {number} classes apart, but the data has the labels {list(values)}, of which it is not known"
        f" which class each is{elsewhere}. Give the labels as numbers of classes, from 0 to {number - 1}: labels=..."
    )
