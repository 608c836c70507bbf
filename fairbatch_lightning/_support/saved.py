"""Read what a checkpoint holds: it may be damaged, altered or of another version, and is checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**53
"""Whole numbers are counts of batches, samples and epochs, and some of them become floats."""


class Saved:
    """An entry of a checkpoint, with its name for messages.

    >>> state = Saved({"epoch": 3, "places": [1, 20]})
    >>> state["epoch"].integer(), [place.integer(most=20) for place in state["places"]]
    (3, [1, 20])
    >>> state["epoch"].flag()
    Traceback (most recent call last):
    ValueError: Expected `epoch` in the checkpoint to be True or False but got 3. It is damaged, altered, ...
    """

    def __init__(self, value: Any, name: str = "") -> None:
        self.value, self._name = value, name

    @classmethod
    def of(cls, value: Any, name: str = "") -> Saved:
        """Return an entry with this name, unless it has one."""
        return value if isinstance(value, Saved) else cls(value, name)

    def __getitem__(self, key: str | int) -> Saved:
        """Return an entry by its name."""
        if not isinstance(self.value, Mapping):
            raise self.wrong("a dict")
        name = f"{self._name}.{key}".lstrip(".")
        if key not in self.value:
            raise ValueError(f"Expected `{name}` in the checkpoint but there is none. {_ADVICE}")
        return Saved(self.value[key], name)

    def __iter__(self) -> Iterator[Saved]:
        """Yield the entries of a list."""
        if not isinstance(self.value, Sequence) or isinstance(self.value, str | bytes):
            raise self.wrong("a list")
        return (Saved(value, f"{self._name}[{place}]") for place, value in enumerate(self.value))

    def __contains__(self, key: str | int) -> bool:
        return isinstance(self.value, Mapping) and key in self.value

    def entries(self) -> dict[str, Saved]:
        """Return all entries of a dict, by their names."""
        if not isinstance(self.value, Mapping) or not all(isinstance(key, str) for key in self.value):
            raise self.wrong("a dict")
        return {key: self[key] for key in self.value}

    def whole(self) -> dict[str, Any]:
        """Return a dict as it is."""
        return {key: saved.value for key, saved in self.entries().items()}

    def several(self, number: int) -> list[Saved]:
        """Return the entries of a list of known length."""
        if len(found := list(self)) != number:
            raise self.wrong(f"a list of {number}")
        return found

    def integer(self, least: int = 0, most: int = LARGEST) -> int:
        """Return a whole number."""
        number = int(self.value) if isinstance(self.value, Integral) and not isinstance(self.value, bool) else None
        if number is None or not least <= number <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return number

    def number(self, least: float = -math.inf) -> float:
        """Return a number; it may be infinite, and NaN if there is no least."""
        value = self.value
        real = isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST)
        if not real or isinstance(value, bool) or not (least == -math.inf or value >= least):
            raise self.wrong(f"a number of at least {least}" if least > -math.inf else "a number")
        return float(value)

    def flag(self) -> bool:
        """Return whether something is so."""
        if not isinstance(self.value, bool):
            raise self.wrong("True or False")
        return self.value

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def tensor(self, *shape: int | None, finite: bool = False, whole: bool = False, least: float = -math.inf) -> Tensor:
        """Return a copy of a tensor of numbers.

        Args:
            shape: Its shape; None for any size.
            finite: Whether no entry may be NaN or infinite.
            whole: Whether it holds whole numbers.
            least: The smallest number that is allowed; NaN is, unless it has to be finite.
        """
        value = self.value
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        kind = "whole numbers" if whole else "finite numbers" if finite else "numbers"
        expected = f"a tensor of {kind} of shape ({sizes})" + (f", at least {least}" if least > -math.inf else "")
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or value.is_nested:
            raise self.wrong(expected)
        if value.dtype not in (_WHOLE if whole else _NUMBERS) or not _fits(value.shape, shape):
            raise self.wrong(expected)
        value = value.detach().cpu()
        if (finite and not value.isfinite().all()) or (least > -math.inf and (value < least).any()):
            raise self.wrong(expected)
        return value.clone()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Say that it is the checkpoint if what a check of ours refuses is this entry."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"`{self._name}` in the checkpoint cannot be right: {error} {_ADVICE}") from error

    def wrong(self, expected: str) -> ValueError:
        """Return what to tell the user if this is not what is expected."""
        return ValueError(
            f"Expected `{self._name}` in the checkpoint to be {expected} but got {_described(self.value)}. {_ADVICE}"
        )


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NUMBERS = (*_WHOLE, torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ADVICE = (
    "It is damaged, altered, or of another version of fairbatch_lightning. Use a checkpoint that is not, or start"
    " without one."
)


def _fits(found: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(found) == len(expected) and all(size in (None, here) for here, size in zip(found, expected, strict=True))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} of {value.dtype}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
