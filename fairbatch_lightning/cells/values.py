"""Turn labels and groups as users have them into arrays of integers or strings."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
Role = Literal["labels", "groups"]


def categorical(values: Any, role: Role) -> tuple[Array, tuple[str, ...] | None]:
    """Return values as an array of integers or strings `(N,)`, with names for the integers if they have any."""
    array = _as_array(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(
            f"Expected `{role}` to hold one value per sample but got an array of shape {array.shape}. Pass one column."
        )
    if array.dtype.kind == "O":
        array = _from_objects(array, role)
    if array.dtype.kind == "b":
        return array.astype(np.int64), ("False", "True")
    if array.dtype.kind == "f":
        array = _from_floats(array, role)
    if array.dtype.kind == "S":
        array = array.astype("U")
    if array.dtype.kind not in "iuU":
        raise ValueError(f"Expected `{role}` to hold integers or strings but got values of type {array.dtype}.")
    return array, None


def _as_array(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if hasattr(values, "to_numpy"):  # pandas, polars, pyarrow
        return np.asarray(values.to_numpy())
    if isinstance(values, np.ndarray):
        return values
    items = [item.item() if isinstance(item, torch.Tensor) else item for item in values]
    array = np.asarray(items)
    return array if array.dtype.kind in "iufb" else np.asarray(items, dtype=object)  # strings swallow None and NaN


def _from_objects(array: Array, role: Role) -> Array:
    missing = np.array([_is_missing(item) for item in array], dtype=bool)
    if missing.any():
        raise ValueError(_missing(missing, role))
    kinds = {type(item) for item in array}
    if all(issubclass(kind, bool | np.bool_) for kind in kinds):
        return array.astype(bool)
    if all(issubclass(kind, int | float | np.number) for kind in kinds):
        return np.asarray(array.tolist())
    if all(issubclass(kind, bytes) for kind in kinds):
        return array.astype("S")
    return array.astype(str)


def _is_missing(item: Any) -> bool:
    """Return whether this is None, NaN, or pandas' NA or NaT (which is not imported for that)."""
    return item is None or type(item).__name__ in ("NAType", "NaTType") or (isinstance(item, float) and item != item)


def _from_floats(array: Array, role: Role) -> Array:
    if (missing := np.isnan(array)).any():
        raise ValueError(_missing(missing, role))
    broken = array[(array != np.round(array)) | np.isinf(array)]
    if len(broken):
        raise ValueError(
            f"Expected `{role}` to be categories (integers or strings) but got numbers such as {broken[0]:g}."
            " Sort the values into classes first, for example with torch.bucketize."
        )
    return array.astype(np.int64)


def _missing(missing: Array, role: Role) -> str:
    return (
        f"Expected `{role}` to have a value for every sample but {missing.sum()} of {len(missing)} are missing (the"
        f" first at index {missing.argmax()}). Drop those samples, or give them a name of their own."
    )
