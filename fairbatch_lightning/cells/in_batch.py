"""The labels in a batch as a model gets it, compared with those of the cells that were paired with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairbatch_lightning._support.rng import preserved_rng
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.cells.lookup import USUAL_NAMES, USUAL_POSITION, Source, are_names
from fairbatch_lightning.cells.values import Array

Path = tuple[Any, ...]
"""The keys, positions and attributes that lead to an entry of a batch."""
DEEPEST, MOST_PARTS = 3, 64
"""How far a batch is searched: containers in containers, and entries of each."""


class WrongLabelsError(ValueError):
    """The labels that a model is given are not those of the cells."""


def one_per_sample(entry: Any, size: int) -> Array | None:
    """Return the whole numbers or strings `(size,)` that an entry holds, if it is one for each sample.

    One-hot rows count as the number of their column, also if they are smoothed: a column stands out, all rows alike.
    So do smoothed answers yes and no.

    >>> one_per_sample(torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.05, 0.9]]), 2)
    array([0, 2])
    >>> one_per_sample(torch.tensor([0.05, 0.95]), 2)
    array([0, 1])
    >>> one_per_sample(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), 2)  # mixed
    """
    if isinstance(entry, Tensor):
        tensor = entry.detach().cpu()
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    elif isinstance(entry, np.ndarray):
        array = entry
    elif isinstance(entry, list | tuple) and len(entry) == size and all(isinstance(one, str | int) for one in entry):
        array = np.asarray(entry)
    else:
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 2 and len(array) == size and array.shape[1] > 1:
        return _one_hot(array)
    if array.shape != (size,) or array.dtype.kind not in "iubfU":
        return None
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.round(array)).all()):
        return _smoothed(array)
    return array if array.dtype.kind == "U" else array.astype(np.int64)


def _smoothed(array: Array) -> Array | None:
    """Return answers yes and no that are all as far from 1 and 0."""
    doubt = np.minimum(array, 1 - array)
    alike = np.isfinite(array).all() and np.ptp(doubt) < 1e-3 and 0 <= doubt.min() <= doubt.max() < 0.4
    return (array > 0.5).astype(np.int64) if alike else None


def _one_hot(array: Array) -> Array | None:
    if array.dtype.kind not in "iubf":
        return None
    array = array.astype(np.float64)
    columns = array.argmax(1)
    high = array[np.arange(len(array)), columns]
    low = np.delete(array.ravel(), np.arange(len(array)) * array.shape[1] + columns)
    alike = high.size > 0 and np.ptp(high) < 1e-3 and np.ptp(low) < 1e-3 and np.isfinite(array).all()
    return columns if alike and high.min() > 0.5 > low.max() >= 0 else None


def _could_be(entry: Any, size: int) -> bool:
    """Return whether an entry may hold one value per sample, without a look at the values."""
    shape = getattr(entry, "shape", None)
    if shape is not None:
        return tuple(shape) in ((size,), (size, 1))
    return isinstance(entry, list | tuple) and len(entry) == size and all(isinstance(one, str | int) for one in entry)


def entries(batch: Any, size: int, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what a batch holds that has one value for each of its samples, and where that is.

    >>> batch = {"x": torch.zeros(2, 4), "more": [torch.tensor([1, 0]), ["a", "b"]]}
    >>> [path for path, _ in entries(batch, 2)]
    [('more', 0), ('more', 1)]
    """
    if _could_be(batch, size):
        yield path, batch
    elif len(path) < DEEPEST:
        for key, part in _parts(batch):
            yield from entries(part, size, (*path, key))


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        parts: Iterable[tuple[Any, Any]] = list(batch.items())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = list(enumerate(batch))
    else:
        parts = [] if isinstance(batch, Tensor) or not hasattr(batch, "__dict__") else list(vars(batch).items())
    return list(parts)[:MOST_PARTS]


def entry_at(batch: Any, path: Path) -> Any:
    """Return an entry of a batch by its path; None if there is none."""
    for key in path:
        try:
            batch = getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return batch


class LabelCheck:
    """Compares the labels in batches with those of the cells, and learns from them which classes they are.

    Args:
        who: The callback that asks, for messages.
        index: The cells that batches are paired with.
        source: Where the user says the labels are.
        classes: What is known of the labels' classes, and learnt here.
        batch_of: Makes a batch of samples, given by their numbers.
    """

    def __init__(
        self, who: str, index: GroupIndex, source: Source, classes: ClassNumbers, batch_of: Callable[[list[int]], Any]
    ) -> None:
        self._who, self._index, self._source, self._classes = who, index, source, classes
        self._batch_of = batch_of
        self.path: Path | None = None
        """Where in a batch the labels were found."""

    def rows(self, cells: Array) -> Array:
        """Return the rows of cells, `(B,)`."""
        return np.asarray(cells, np.int64) // self._index.shape[1]

    def find(self, batch: Any, rows: Array, number: int, *, doubtful: bool = False) -> dict[int | str, int] | None:
        """Look for the labels in a batch; return the classes that they say labels are, None if there are none.

        What is said to be labels, by the user or by custom, must be those of the cells. Anything else may be them.

        Args:
            batch: What the model was given.
            rows: The rows of its samples, by their cells.
            number: How many classes the model tells apart.
            doubtful: Whether custom does not count, because the loss has told better.
        """
        self.path, problem = None, None
        for path, entry in sorted(entries(batch, len(rows)), key=lambda one: not self._is_said(one[0], batch)):
            if (values := one_per_sample(entry, len(rows))) is None:
                continue
            try:
                found = self.compare(values, rows, number)
            except WrongLabelsError as error:
                plausible = values.dtype.kind == "U" or (values.min() >= 0 and values.max() < number)
                problem = problem or (error if self._is_said(path, batch) and plausible and not doubtful else None)
            else:
                self.path = path
                return found
        if problem is not None:
            raise problem
        return None

    def _is_said(self, path: Path, batch: Any) -> bool:
        names = (self._source, f"{self._source}s") if isinstance(self._source, str) else USUAL_NAMES["labels"]
        position = self._source if isinstance(self._source, int) else USUAL_POSITION["labels"]
        return path[-1:] in [(name,) for name in names] or (isinstance(batch, Sequence) and path == (position,))

    def complete(self, number: int) -> None:
        """Learn the classes of names that no batch held so far, from one sample of each; or by what is left."""
        index, classes = self._index, self._classes
        if classes.known(index.label_values, number) is None:
            missing = [row for row, label in enumerate(index.label_values) if label not in classes.learnt]
            values = self._of_one_sample_each(missing) if self.path is not None else None
            if values is not None and values.dtype.kind != "U":
                names = [index.label_values[row] for row in missing]
                classes.learn(dict(zip(names, values.tolist(), strict=True)))
            left = sorted(set(range(number)) - set(classes.learnt.values()))
            missing = [row for row in missing if index.label_values[row] not in classes.learnt]
            if len(missing) == len(left) == 1:
                classes.learn({index.label_values[missing[0]]: left[0]})
        classes.find(index.label_values, number)  # says what to do if it is still not known

    def _of_one_sample_each(self, rows: list[int]) -> Array | None:
        """Return the labels that samples of these rows have in a batch."""
        index = self._index
        samples = [int(index.order[index.edges[row * index.shape[1]]]) for row in rows]
        with preserved_rng():
            batch = self._batch_of(samples)
        return one_per_sample(entry_at(batch, self.path or ()), len(samples))

    def again(self, labels: Any, rows: Array, number: int) -> WrongLabelsError | None:
        """Return what is wrong with the labels of a later batch, from where they were found before."""
        values = one_per_sample(labels, len(rows))
        try:
            if values is not None:
                self.compare(values, rows, number)
        except WrongLabelsError as error:
            return error
        return None

    def compare(self, values: Array, rows: Array, number: int) -> dict[int | str, int]:
        """Return which class each label is, of those that occur, by the labels that a batch has or a loss was given.

        Empty if they say nothing new, because they are as the data has them. Names mean whatever classes they go with;
        numbers may be counted from another start, but must not change places.
        """
        index, known = self._index, self._classes.known(self._index.label_values, number)
        found: dict[int, Any] = dict(zip(rows.tolist(), values.tolist(), strict=True))
        if not np.array_equal(values, np.array([found[row] for row in rows.tolist()], values.dtype)):
            raise WrongLabelsError(self._wrong(_shuffled(rows, values, index)))
        if all(value in (index.label_values[row], index.label_names[row]) for row, value in found.items()):
            return {}
        by_label = {index.label_values[row]: value for row, value in sorted(found.items())}
        if known is not None and all(value == known[label] for label, value in by_label.items()):
            return by_label
        named = any(isinstance(label, str) for label in index.label_values) and not self._classes.learnt
        counted = 0 not in index.label_values and list(by_label.values()) == sorted(by_label.values())
        are_classes = len(set(by_label.values()) & set(range(number))) == len(by_label)
        if not are_classes or not (named or counted):
            pairs = ", ".join(f"{label!r} is {value!r}" for label, value in list(by_label.items())[:5])
            raise WrongLabelsError(self._wrong(f"of the labels in the data {pairs} there."))
        return by_label

    def _wrong(self, found: str) -> str:
        return (
            f"{self._who} has paired a batch with the wrong labels: {found} What the model is trained or tested on must"
            " be what the cells are made of. The usual causes: (1) a `collate_fn` or a step puts the samples in another"
            " order, such as longest first: keep the order, or return logits in the batch's order,"
            ' {"loss": loss, "logits": logits}; (2) a `target_transform`, a wrapper or a step changes the labels: pass'
            f" {self._who}(labels=...) as the model gets them; (3) an array passed as `labels` or `groups` is in"
            " another order than the DataLoader's dataset, such as a random_split: index it as the dataset is."
        )


def _shuffled(rows: Array, values: Array, index: GroupIndex) -> str:
    """Return what to say of samples of one label that a batch gives several."""
    row = next(row for row in rows.tolist() if len(set(values[rows == row].tolist())) > 1)
    said = sorted(set(values[rows == row].tolist()))[:5]
    same = sorted(np.unique(rows, return_counts=True)[1]) == sorted(np.unique(values, return_counts=True)[1])
    order = " They may be the same labels in another order." if same else ""
    return (
        f"the {int((rows == row).sum())} samples with the label {index.label_names[row]} in the data have the labels"
        f" {said} there.{order}"
    )


def check_groups(who: str, index: GroupIndex, source: Source, batch: Any, cells: Array) -> str:
    """Refuse a batch whose entry of the group's name says something else than the cells; return that name, if any.

    Whatever values it holds, as ages that are groups by decades: samples with the same value must be of one group.
    """
    if are_names(source) and len(source) > 1:
        return ""  # of several attributes each alone does not tell the group
    named = [one for one in (source if isinstance(source, list | tuple) else [source]) if isinstance(one, str)]
    names = named or USUAL_NAMES["groups"]
    columns = np.asarray(cells, np.int64) % index.shape[1]
    for path, entry in entries(batch, len(columns)):
        values = one_per_sample(entry, len(columns)) if path[-1:] and path[-1] in names else None
        if values is None or (not named and len(np.unique(values)) > index.shape[1]):
            continue
        first = dict(zip(values.tolist(), columns.tolist(), strict=True))
        wrong = [place for place, value in enumerate(values.tolist()) if first[value] != columns[place]]
        if wrong:
            group = index.group_names[columns[wrong[0]]]
            value = values[wrong[0]].item()
            others = index.group_names[first[value]]
            raise WrongLabelsError(
                f"{who} has paired a batch with the wrong groups: samples with {path[-1]!r} = {value!r} there are of"
                f" the groups {group} and {others} in the data. The usual causes: (1) an array passed as"
                " `groups` is in another order than the DataLoader's dataset, such as a random_split: index it as the"
                " dataset is; (2) a `collate_fn` puts the samples in another order: keep it; (3) a transform changes"
                f" {path[-1]!r}: pass {who}(groups=...) as it should count."
            )
        return str(path[-1])
    return ""
