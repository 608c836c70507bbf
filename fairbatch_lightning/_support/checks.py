"""Refuse arguments that no data could make right, in the same words everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def check_at_least(name: str, value: object, least: int) -> None:
    """Refuse an argument that is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"Expected argument `{name}` to be an integer of at least {least} but got {value!r}.")


def check_number(
    name: str, value: object, least: float, most: float = math.inf, *, above: bool = False, origin: str = ""
) -> None:
    """Refuse an argument that is not a finite number from `least` (or above it) to `most`."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if least <= number <= most and not math.isinf(number) and not (above and number == least):
        return
    expected = f"above {least}" if above else f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
    raise ValueError(f"Expected argument `{name}` to be a number {expected} but got {value!r}{origin}.")


def check_range(name: str, values: Tensor, number: int) -> None:
    """Refuse values that are not from 0 to `number - 1`: they would be counted as something else."""
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < number:
        raise ValueError(
            f"Expected `{name}` to be numbers from 0 to {number - 1} but got some from {int(values.min())} to"
            f" {int(values.max())}. Are the numbers of labels and groups right?"
        )


def chosen(name: str, value: str | T, names: Mapping[str, type[T]], kind: type[Any]) -> T:
    """Return the object that a user means: one of that kind, or a new one by its name."""
    if isinstance(value, str) and value in names:
        return names[value]()
    if isinstance(value, kind):
        return value  # type: ignore[no-any-return]
    raise ValueError(
        f"Expected argument `{name}` to be one of {list(names)} or an object of {kind.__name__} but got {value!r}."
    )
