"""Which cell, that is which (label, group) pair, every training sample belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fairbatch_lightning.cells.lookup import Column, Source, attributes_of, find_columns
from fairbatch_lightning.cells.values import Array, categorical


@dataclass(frozen=True, eq=False)
class GroupIndex:
    """The cell of every sample, and the names and sizes of the cells.

    Args:
        cells: Cell of every sample, `(N,)`: `label * Z + group`.
        label_values: The labels as the data has them (integers or strings), one per row, in rising order.
        label_names: The labels as people read them.
        group_names: The groups as people read them, one per column.

    >>> index = GroupIndex.from_values(labels=[-1, 1, 1, -1], groups=["b", "a", "b", "b"])
    >>> index.counts
    tensor([[0, 2],
            [1, 1]])
    >>> index.label_names, index.group_names
    (('-1', '1'), ('a', 'b'))
    """

    cells: Array
    label_values: tuple[int | str, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]

    @classmethod
    def from_values(cls, labels: Any, groups: Any) -> GroupIndex:
        """Build the index from one label and one group per sample (tensors, arrays, lists; integers or strings)."""
        return cls._from_columns(
            Column(*categorical(labels, "labels")), {"groups": Column(*categorical(groups, "groups"))}
        )

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], labels: Source = None, groups: Source = None) -> GroupIndex:
        """Find the labels and groups of a dataset's samples.

        Args:
            dataset: The training set.
            labels: An array, the name of an attribute or column, the position in the sample, or a function of the
                dataset. None looks for the usual names, `targets` first.
            groups: The same for the groups. A list of names, or a dict from names to any of these, gives groups
                that combine several attributes, such as "race=Black, gender=Female".
        """
        several = attributes_of(groups, dataset)
        sources = [("labels", labels), *(("groups", source) for source in several.values())]
        found = find_columns(dataset, sources)  # type: ignore[arg-type]
        return cls._from_columns(found[0], dict(zip(several, found[1:], strict=True)))

    @classmethod
    def _from_columns(cls, labels: Column, groups: Mapping[str, Column]) -> GroupIndex:
        rows, label_values = _factorize(labels.values)
        columns, group_names = _combine(groups)
        if len(rows) != len(columns):
            raise ValueError(
                f"Expected one label and one group per sample but got {len(rows)} labels and {len(columns)} groups."
            )
        if not len(rows):
            raise ValueError("Expected at least one sample but got none: the dataset is empty.")
        cells = np.empty(len(rows), np.min_scalar_type(len(label_values) * len(group_names)))
        for part in _parts(len(rows)):
            cells[part] = rows[part].astype(np.int64) * len(group_names) + columns[part]
        return cls(cells, label_values, _names(label_values, labels.names), group_names)

    def __len__(self) -> int:
        return len(self.cells)

    def part(self, samples: Any) -> GroupIndex:
        """Return the index of some of the samples, with the same labels and groups."""
        return replace(self, cells=self.cells[samples])

    @property
    def shape(self) -> tuple[int, int]:
        """The number of labels and of groups, `(Y, Z)`."""
        return len(self.label_values), len(self.group_names)

    @cached_property
    def counts(self) -> Tensor:
        """How many samples each cell has, `(Y, Z)`."""
        flat = np.zeros(self.shape[0] * self.shape[1], np.int64)
        for part in _parts(len(self)):
            flat += np.bincount(self.cells[part], minlength=len(flat))
        return torch.from_numpy(flat).view(self.shape)

    @cached_property
    def order(self) -> Array:
        """All samples, sorted by cell."""
        order = np.empty(len(self), np.int32 if len(self) < 2**31 else np.int64)
        filled = self.edges[:-1].copy()
        for part in _parts(len(self)):
            cells = self.cells[part]
            counts = np.bincount(cells, minlength=len(filled))
            shift = filled - np.cumsum(counts) + counts  # from the place in the sorted part to the place in `order`
            places = np.arange(len(cells)) + np.repeat(shift, counts)
            order[places] = np.argsort(cells, kind="stable") + part.start
            filled += counts
        return order

    @cached_property
    def edges(self) -> Array:
        """Where each cell starts in `order`, and the end: `(Y * Z + 1,)`."""
        return np.concatenate([[0], np.cumsum(self.counts.flatten().numpy())])

    def labels_and_groups(self, samples: Any) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of the cells of the `samples` (indices into the dataset)."""
        cells = torch.from_numpy(self.cells[samples].astype(np.int64))
        return cells // self.shape[1], cells % self.shape[1]

    def cells_of(self, other: GroupIndex) -> Array:
        """Return the cells of another dataset's samples by the numbers they have here; -1 for cells unknown here.

        >>> train = GroupIndex.from_values([0, 1], ["a", "b"])
        >>> train.cells_of(GroupIndex.from_values([1, 1, 0], ["b", "c", "a"]))
        array([ 3, -1,  0])
        """
        rows = _positions(other.label_names, self.label_names)
        columns = _positions(other.group_names, self.group_names)
        known = (rows[:, None] >= 0) & (columns >= 0)
        table = np.where(known, rows[:, None] * self.shape[1] + columns, -1)
        return np.asarray(table.ravel()[other.cells])

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the labels and of the groups."""
        return self.label_names, self.group_names

    def row_of(self, label: int | str) -> int:
        """Return the row of a label, given by its value or its name."""
        for known in (self.label_values, self.label_names, tuple(map(str, self.label_values))):
            if label in known:
                return known.index(label)
        if str(label) in self.label_names:  # a file or command line can turn "1" into 1
            return self.label_names.index(str(label))
        raise ValueError(
            f"Expected argument `positive_label` to be one of the data's labels {list(self.label_values)} but got"
            f" {label!r}."
        )

    def positive_row(self, label: int | str | None) -> int | None:
        """Return the row of the positive label; by default that is the second of two, and of more there is none."""
        if label is None:
            return 1 if len(self.label_values) == 2 else None
        return self.row_of(label)

    def cell_name(self, label: int, group: int) -> str:
        """Return how people read a cell, for messages."""
        return f"(label {self.label_names[label]}, group {self.group_names[group]})"

    def cell_names(self, mask: Tensor) -> str:
        """Return the names of the cells where the `(Y, Z)` `mask` is true, for messages."""
        return ", ".join(self.cell_name(label, group) for label, group in mask.nonzero().tolist())


def natural_shares(counts: Tensor) -> Tensor:
    """Return the `(Y, Z)` shares of ordinary uniform sampling: every row's counts, scaled to sum to 1.

    >>> natural_shares(torch.tensor([[1, 3], [5, 0]]))
    tensor([[0.2500, 0.7500],
            [1.0000, 0.0000]], dtype=torch.float64)
    """
    counts = counts.double()
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def check_same_cells(before: GroupIndex, now: GroupIndex) -> None:
    """Refuse a reloaded training set whose cells are not those that the shares are for."""
    if before.names != now.names or not torch.equal(before.counts > 0, now.counts > 0):
        raise ValueError(
            "Expected the reloaded training set to have samples in the cells that it had before: labels and groups"
            f" {before.names} with the counts {before.counts.tolist()}, but got {now.names} with"
            f" {now.counts.tolist()}. Shares cannot go on from one to the other; start a new fit."
        )


def _positions(names: Sequence[str], among: Sequence[str]) -> Array:
    """Return where each name is among others, -1 for nowhere."""
    return np.array([among.index(name) if name in among else -1 for name in names])


def _combine(columns: Mapping[str, Column]) -> tuple[Array, tuple[str, ...]]:
    """Return the group of every sample, and the groups' names: of several columns, the pairs that occur."""
    if not columns:
        raise ValueError("Expected argument `groups` to name at least one attribute but got none.")
    if len(columns) == 1:
        column = next(iter(columns.values()))
        ids, values = _factorize(column.values)
        return ids, _names(values, column.names)
    combined, names = np.zeros(1, np.int64), [""]
    for attribute, column in columns.items():
        ids, values = _factorize(column.values)
        parts = _names(values, column.names)
        combined = combined * len(parts) + ids.astype(np.int64)
        names = [f"{name}, {attribute}={part}".lstrip(", ") for name in names for part in parts]
        combined, seen = _factorize(combined)
        names = [names[int(number)] for number in seen]
    return combined, tuple(names)


def _parts(length: int) -> Iterator[slice]:
    """Yield slices that cover `length` samples a million at a time, so that what is computed from them stays small."""
    for start in range(0, length, 2**20):
        yield slice(start, min(start + 2**20, length))


def _factorize(values: Array) -> tuple[Array, tuple[Any, ...]]:
    """Return each value's rank among the distinct values, and those in rising order."""
    if values.dtype.kind in "iu" and len(values):
        low, high = int(values.min()), int(values.max())
        if high - low < 2**16:  # a table look-up, many times faster than the sort below
            present = np.zeros(high - low + 1, bool)
            for part in _parts(len(values)):
                present[values[part].astype(np.int64) - low] = True
            ranks = (present.cumsum() - 1).astype(np.min_scalar_type(high - low))
            ids = np.empty(len(values), ranks.dtype)
            for part in _parts(len(values)):
                ids[part] = ranks[values[part].astype(np.int64) - low]
            return ids, tuple((present.nonzero()[0] + low).tolist())
    distinct, ids = np.unique(values, return_inverse=True)
    return ids, tuple(distinct.tolist())


def _names(values: Sequence[int | str], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the values: looked up where every value has one, else the values themselves."""
    if names is not None and all(isinstance(value, int) and 0 <= value < len(names) for value in values):
        return tuple(names[int(value)] for value in values)
    return tuple(map(str, values))
