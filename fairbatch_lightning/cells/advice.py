"""What a dataset has that could be meant, for the messages to those who asked for something else."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, TensorDataset

_MOST = 60
_NO_DATASETS = (str, bytes, list, tuple, range, set, Mapping, np.ndarray, torch.Tensor)


def wrapped_by(dataset: Any) -> Any | None:
    """Return the dataset that another is a part of, or that it wraps sample by sample, if it does."""
    for name in ("dataset", "subset"):
        inner = getattr(dataset, name, None)
        if not isinstance(inner, Sized) or isinstance(inner, _NO_DATASETS):
            continue
        if getattr(dataset, "indices", None) is not None or _length(inner) == _length(dataset):
            return inner
    return None


def innermost(dataset: Any) -> Any:
    """Return the dataset inside of all wrappers; of several that are concatenated, the first."""
    while True:
        inner = dataset.datasets[0] if isinstance(dataset, ConcatDataset) else wrapped_by(dataset)
        if inner is None:
            return dataset
        dataset = inner


def names_in(dataset: Any) -> list[str]:
    """Return the names of what a dataset has with one value per sample."""
    found = [str(name) for name in getattr(dataset, "attr_names", None) or () if name]
    others = {str(name) for name in getattr(dataset, "column_names", None) or ()}
    for name, values in _own_attributes(dataset):
        if hasattr(values, "columns"):
            others.update(map(str, values.columns))
        elif _one_value_each(values):
            others.add(name)
    return list(dict.fromkeys([*found, *sorted(others)]))


def what_there_is(dataset: Any, wanted: object, argument: str) -> str:
    """Return what to tell those who look for a name that a dataset does not have."""
    names = names_in(innermost(dataset))
    close = difflib.get_close_matches(wanted, names, n=3) if isinstance(wanted, str) else []
    guess = f" Did you mean {argument}={close[0]!r}?" if close else ""
    return guess + (f" It has {_listed([*close, *(name for name in names if name not in close)])}." if names else "")


def one_column_of(dataset: Any, argument: str) -> str:
    """Return what to tell those who mean one of several values per sample."""
    inner = innermost(dataset)
    table = next((name for name, values in _own_attributes(inner) if getattr(values, "ndim", 0) == 2), None)
    if isinstance(inner, TensorDataset):
        table = next((f"tensors[{n}]" for n, values in enumerate(inner.tensors) if n and values.ndim == 2), None)
    picks = f"data.{table}[:, 0]" if table else "[...] with one value per sample"
    how = f"say which one with a function, {argument}=lambda data: {picks}"
    if names := names_in(inner):
        return f"{type(inner).__name__} has {_listed(names)}: {argument}={names[0]!r}, for example; or {how}."
    return f"{how[0].upper()}{how[1:]}."


def _own_attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a dataset keeps of every sample."""
    for name, values in getattr(dataset, "__dict__", {}).items():
        is_data = isinstance(values, Sized) and not isinstance(values, str | bytes | Mapping)
        if is_data and not name.startswith("_") and _length(values) == _length(dataset):
            yield name, values


def _one_value_each(values: Any) -> bool:
    if hasattr(values, "ndim"):
        return bool(values.ndim == 1)
    first = values[0] if isinstance(values, Sequence) and len(values) else None
    return isinstance(first, str | bytes | int | float | np.generic) or getattr(first, "ndim", None) == 0


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # of data that comes in a stream
        return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(map(repr, names[:_MOST])) + more
