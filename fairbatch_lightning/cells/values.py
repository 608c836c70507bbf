"""Turn labels and groups as users have them into arrays of integers or strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
Role = Literal["labels", "groups"]


_EXACT_FLOATS = 2.0**53
"""Floats above this do not tell whole numbers apart."""


class SeveralValuesError(ValueError):
    """There is more than one value for each sample."""


def categorical(values: Any, role: Role) -> tuple[Array, tuple[str, ...] | None]:
    """Return values as an array of integers or strings `(N,)`, with names for the integers if they have any."""
    array = _as_array(values, role)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise SeveralValuesError(
            f"Expected `{role}` to hold one value per sample but got an array of shape {array.shape}. Pass one column."
        )
    if array.dtype.kind == "O":
        array = _from_objects(array, role)
    if array.dtype.kind == "b":
        return array.astype(np.int64), ("False", "True")
    if array.dtype.kind == "f":
        array = _from_floats(array, role)
    if array.dtype.kind == "S":
        array = np.array([_text(item, place, role) for place, item in enumerate(array.tolist())])
    if array.dtype.kind not in "iuU":
        raise ValueError(f"Expected `{role}` to hold integers or strings but got values of type {array.dtype}.")
    if array.dtype == np.uint64 and len(array) and array.max() >= 2**63:
        raise _too_large(array.tolist(), int(array.argmax()), 18, role)
    return array, None


def _as_array(values: Any, role: Role) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().to_dense()
        return np.asarray((values.float() if values.dtype is torch.bfloat16 else values).numpy())
    if hasattr(values, "to_numpy"):  # pandas, polars, pyarrow
        return np.asarray(values.to_numpy())
    if isinstance(values, np.ma.MaskedArray):
        if (masked := np.ma.getmaskarray(values)).any():
            raise ValueError(_missing(masked.ravel(), "masked", role))
        return np.asarray(values.data)
    if isinstance(values, np.ndarray):
        return values
    items = list(values)
    if not {type(item) for item in items} <= {bool, int, float, str}:
        items = [_scalar(item, place, role) for place, item in enumerate(items)]
    if all(isinstance(item, _NUMBERS) for item in items):
        return np.asarray(items)
    array = np.empty(len(items), object)  # strings would swallow None and NaN
    array[:] = items
    return array


_NUMBERS = bool | int | float | np.number | np.bool_


def _scalar(item: Any, place: int, role: Role) -> Any:
    """Return one sample's value, out of the tensor that it may be in."""
    if isinstance(item, list | tuple) and len(item) == 1:
        return _scalar(item[0], place, role)
    if isinstance(item, torch.Tensor | np.ndarray) and item is not np.ma.masked:
        if int(np.prod(item.shape)) == 1:
            return item.item()
        got = f"{'a tensor' if isinstance(item, torch.Tensor) else 'an array'} of shape {tuple(item.shape)}"
    elif isinstance(item, list | tuple | dict | set):
        got = f"{item!r:.80}"
    else:
        return item
    raise SeveralValuesError(
        f"Expected `{role}` to hold one value per sample but got {got} (at index {place}). Pass one column of them."
    )


def _from_objects(array: Array, role: Role) -> Array:
    missing = np.array([_is_missing(item) for item in array], dtype=bool)
    if missing.any():
        raise ValueError(_missing(missing, array[missing.argmax()], role))
    kinds = {type(item) for item in array}
    if all(issubclass(kind, bool | np.bool_) for kind in kinds):
        return array.astype(bool)
    if all(issubclass(kind, int | float | np.number) for kind in kinds):
        numbers = np.asarray(array.tolist())
        if numbers.dtype.kind == "O":
            raise _too_large(array.tolist(), int(np.argmax(np.abs(array))), 18, role)
        return numbers
    return _from_mixture(array, role)


def _from_mixture(array: Array, role: Role) -> Array:
    """Return values of any type as text; those that are not equal must not become the same."""
    texts = [_text(item, place, role) for place, item in enumerate(array.tolist())]
    first: dict[str, int] = {}
    for place, text in enumerate(texts):
        other = array[first.setdefault(text, place)]
        if other is not array[place] and other != array[place]:
            raise ValueError(
                f"Expected the values of `{role}` to be told apart by their names, but {other!r} (at index"
                f" {first[text]}) and {array[place]!r} (at index {place}) are both written {text!r}. Give all of them"
                " as strings, or all as numbers."
            )
    return np.array(texts)


def _text(item: Any, place: int, role: Role) -> str:
    """Return a value as people write it."""
    if isinstance(item, bytes):
        try:
            return item.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Expected the bytes in `{role}` to be text in UTF-8 but got {item!r} (at index {place}). Decode them"
                " before."
            ) from error
    if isinstance(item, float | np.floating) and float(item).is_integer() and abs(float(item)) <= _EXACT_FLOATS:
        return str(int(item))
    return str(item)


def _is_missing(item: Any) -> bool:
    """Return whether this is None, masked, pandas' NA or NaT (which is not imported for that), or NaN of any type."""
    if item is None or item is np.ma.masked or type(item).__name__ in ("NAType", "NaTType"):
        return True
    is_nan = getattr(item, "is_nan", None)  # of Decimal, of which some cannot be compared
    return bool(is_nan() if callable(is_nan) else isinstance(item, float | np.floating) and item != item)


def _from_floats(array: Array, role: Role) -> Array:
    array = array.astype(np.float64)
    if (missing := np.isnan(array)).any():
        raise ValueError(_missing(missing, array[missing.argmax()], role))
    broken = (array != np.round(array)) | np.isinf(array)
    if broken.any():
        raise ValueError(
            f"Expected `{role}` to be categories (integers or strings) but got numbers such as"
            f" {array[broken.argmax()]:g} (at index {broken.argmax()})."
            " Sort the values into classes first, for example with torch.bucketize."
        )
    if (large := np.abs(array) > _EXACT_FLOATS).any():
        raise _too_large(array.tolist(), int(large.argmax()), 16, role)
    return array.astype(np.int64)


def _too_large(values: Sequence[Any], place: int, digits: int, role: Role) -> ValueError:
    value = values[place]
    return ValueError(
        f"Expected `{role}` to be strings, or whole numbers of up to {digits} digits but got"
        f" {f'{value:g}' if isinstance(value, float) else value} (at index {place}). Give them as strings."
    )


def _missing(missing: Array, first: Any, role: Role) -> str:
    return (
        f"Expected `{role}` to have a value for every sample but {missing.sum()} of {len(missing)} are missing (the"
        f" first at index {missing.argmax()}: {first}). Drop those samples, or give them a name of their own."
    )
