"""Find one value per training sample (its label, its group) without loading the samples.

Looks through `Subset`, `random_split`, `ConcatDataset` and wrappers; knows `TensorDataset`, torchvision's and
Hugging Face's datasets. Reading the samples themselves is the last resort.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, TensorDataset
from tqdm.auto import tqdm

from fairbatch_lightning._support.rng import preserved_rng
from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.cells.advice import innermost, one_column_of, what_there_is, wrapped_by
from fairbatch_lightning.cells.values import Array, Role, SeveralValuesError, categorical

if TYPE_CHECKING:
    Source: TypeAlias = Any  # None, a name, a position, a function of the dataset, or an array
else:  # LightningCLI tries these in turn: texts first, so that a file can have names that look like numbers
    Source = str | int | list[str | int] | dict[str, str | int] | Any

USUAL_NAMES: dict[Role, tuple[str, ...]] = {
    "labels": ("targets", "labels", "label", "y"),
    "groups": ("groups", "group", "z"),
}
USUAL_POSITION: dict[Role, int] = {"labels": 1, "groups": 2}


@dataclass(frozen=True)
class Column:
    """One categorical value per sample: integers or strings `(N,)`, and names for the integers 0, 1, ... if known."""

    values: Array
    names: tuple[str, ...] | None = None

    def __getitem__(self, indices: Any) -> Column:
        return Column(self.values[indices], self.names)


def find_columns(dataset: Dataset[Any], sources: Sequence[tuple[Role, Source]]) -> list[Column]:
    """Return the labels or groups of every sample of `dataset`, for each of the sources.

    Args:
        dataset: The training set.
        sources: What is looked for ("labels" or "groups": decides the usual names and the words of the errors), and
            where: an array of values, the name of an attribute or column, the position in the sample (an int), a
            function of the dataset, or None for the usual names.
    """
    found = [_look_up_one(dataset, source, role) for role, source in sources]
    missing = [where for where, column in zip(sources, found, strict=True) if column is None]
    scanned = iter(_scan(dataset, missing) if missing else [])
    columns = [next(scanned) if column is None else column for column in found]
    for (role, _), column in zip(sources, columns, strict=True):
        if len(column.values) != _length(dataset):
            raise ValueError(_wrong_length(dataset, len(column.values), role))
    return columns


def attributes_of(groups: Source, dataset: Any) -> dict[str, Source]:
    """Return the attributes that make up the groups, by name; a lone attribute needs none."""
    if isinstance(groups, Mapping):
        return dict(groups)
    if are_names(groups) and not _fits(groups, dataset):
        return {source: source for source in groups}
    if isinstance(groups, list | tuple) and groups and all(map(is_array, groups)) and not _fits(groups, dataset):
        return {f"attribute {number}": source for number, source in enumerate(groups)}
    return {"groups": groups}


def are_values_of(source: Source, dataset: Any) -> bool:
    """Return whether a source is the values of this dataset, or of one that it wraps, not where to find them."""
    return is_array(source) and _fits(source, dataset)


def check_findable(name: str, source: Source, who: str) -> None:
    """Refuse values where there are several datasets: they do not say of which of them they are."""
    if is_array(source) and not are_names(source):
        raise ValueError(
            f"Expected argument `{name}` of {who} to be the name of an attribute or column, a position in the"
            " sample or a function of the dataset, to be found in every validation and test set, but got values:"
            f" {type(source).__name__} of {len(source)}. Give the datasets an attribute with them."
        )


def is_array(source: object) -> bool:
    """Return whether `source` is a collection rather than a name, position or function."""
    return not isinstance(source, str | int | Mapping) and not callable(source) and isinstance(source, Sized)


def are_names(source: object) -> bool:
    """Return whether `source` is a list of different strings: names of attributes, unless it fits the dataset."""
    names = {item for item in source if isinstance(item, str)} if isinstance(source, list | tuple) else set()
    return 0 < len(names) == len(source)  # type: ignore[arg-type]


def _fits(source: Any, dataset: Any) -> bool:
    """Return whether `source` has a value for every sample of the dataset, or of a dataset that it wraps."""
    while isinstance(dataset, Sized):
        if len(source) == len(dataset):
            return True
        dataset = wrapped_by(dataset)
    return False


def _look_up_one(dataset: Any, source: Source, role: Role) -> Column | None:
    try:
        found = _look_up(dataset, source, role)
        if found is None and _is_position(source):
            found = _look_up(dataset, int(source), role)
        return found
    except SeveralValuesError as error:
        raise ValueError(f"{error} {one_column_of(dataset, role)}") from error


def _look_up(dataset: Any, source: Source, role: Role) -> Column | None:
    """Return the column, or None if it is not to be had without reading samples."""
    if is_array(source) and len(source) == _length(dataset):
        _check_order(dataset, role)
        return Column(*categorical(source, role))
    if callable(source):
        return _called(dataset, source, role)
    if (own := _own_column(dataset, source, role)) is not None:
        return own
    if isinstance(dataset, ConcatDataset):
        return _concatenated(dataset, source, role)
    if (inner := wrapped_by(dataset)) is not None:
        return _through_wrapper(dataset, inner, source, role)
    if is_array(source):
        raise ValueError(_wrong_length(dataset, len(source), role))
    return None


def _check_order(dataset: Any, role: Role) -> None:
    """Refuse an array for a part that is all of a dataset in another order: it may be in either order."""
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if indices is None or not isinstance(inner, Sized) or len(inner) != _length(dataset):
        return
    if not np.array_equal(np.asarray(indices), np.arange(len(inner))):
        raise ValueError(
            f"Expected argument `{role}` to leave no doubt, but the array fits the part of the dataset that is trained"
            f" on as well as the whole, of which that is all in another order ({type(dataset).__name__}). Pass a"
            f" function that returns them in the order of the part, {role}=lambda part: values[part.indices], or the"
            " name of an attribute of the whole dataset."
        )


def _called(dataset: Any, source: Callable[[Any], Any], role: Role) -> Column | None:
    """Return a function's values for the dataset, or for those inside of it if only they have what it uses."""
    try:
        return Column(*categorical(source(dataset), role))
    except AttributeError:
        if isinstance(dataset, ConcatDataset):
            return _concatenated(dataset, source, role)
        if (inner := wrapped_by(dataset)) is None:
            raise
        return _through_wrapper(dataset, inner, source, role)


def _through_wrapper(dataset: Any, inner: Any, source: Source, role: Role) -> Column | None:
    indices = getattr(dataset, "indices", None)
    if (found := _look_up(inner, source, role)) is None:
        return None
    return found if indices is None else found[np.asarray(indices)]


def _concatenated(dataset: ConcatDataset[Any], source: Source, role: Role) -> Column | None:
    if is_array(source):
        raise ValueError(_wrong_length(dataset, len(source), role))
    parts = [_look_up(part, source, role) for part in dataset.datasets]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if len({part.names for part in found}) > 1:
        raise ValueError(
            f"Expected the parts of the ConcatDataset to name their {role} alike but got"
            f" {[part.names for part in found]}. Pass `{role}` as one array of names for all samples."
        )
    return Column(np.concatenate([part.values for part in found]), found[0].names)


def _own_column(dataset: Any, source: Source, role: Role) -> Column | None:
    """Return a column that `dataset` itself holds under one of the names, or at the position."""
    if isinstance(dataset, TensorDataset):
        position = USUAL_POSITION[role] if source is None else source
        if isinstance(position, int) and position < len(dataset.tensors):
            return Column(*categorical(dataset.tensors[position], role))
    names = USUAL_NAMES[role] if source is None else (source, f"{source}s") if isinstance(source, str) else ()
    for name in names:  # a dataset may call them "races"
        if (values := _named(dataset, name)) is not None:
            array, value_names = categorical(values, role)
            return Column(array, value_names or _class_names(dataset, name, role))
    return None


def _named(dataset: Any, name: str) -> Any | None:
    """Return what `dataset` has under `name`: a Hugging Face column, an attribute, or a data frame's column."""
    if name in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "with_format"):
        return dataset.with_format("numpy")[name][:]
    values = getattr(dataset, name, None)
    if isinstance(values, Sized) and not isinstance(values, str) and len(values) == _length(dataset):
        return values
    if name in (attributes := list(getattr(dataset, "attr_names", None) or ())):  # torchvision's CelebA
        return dataset.attr[:, attributes.index(name)]
    for frame in vars(dataset).values() if hasattr(dataset, "__dict__") else ():
        if name in getattr(frame, "columns", ()) and len(frame) == _length(dataset):
            return frame[name]
    return None


def _class_names(dataset: Any, name: str, role: Role) -> tuple[str, ...] | None:
    feature = (getattr(dataset, "features", None) or {}) if hasattr(dataset, "column_names") else {}
    if (names := getattr(feature.get(name), "names", None)) is not None:  # Hugging Face's ClassLabel
        return tuple(map(str, names))
    classes = getattr(dataset, "classes", None)  # torchvision's folders
    return tuple(map(str, classes)) if role == "labels" and isinstance(classes, list | tuple) else None


def _scan(dataset: Any, sources: Sequence[tuple[Role, Source]]) -> list[Column]:
    """Read every sample once: the last resort."""
    with preserved_rng():
        first = dataset[0]
    for role, source in sources:
        try:
            categorical([_pick(first, source, role)], role)  # before all others are read, which may take minutes
        except SeveralValuesError as error:
            raise ValueError(f"{error} {one_column_of(dataset, role)}") from error
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(_not_found(dataset, source, role)) from error
    wanted = " and ".join(sorted({role for role, _ in sources}))
    warn(
        f"Reading all {_length(dataset)} samples of {type(dataset).__name__} once to learn their {wanted}. To start at"
        " once, pass arrays with one value per sample, or give the dataset attributes with them."
    )
    with preserved_rng():
        samples = (dataset[i] for i in range(_length(dataset)))
        progress = tqdm(samples, f"Reading {wanted}", _length(dataset), file=sys.stderr)
        rows = [[_pick(sample, source, role) for role, source in sources] for sample in progress]
    return [
        Column(*categorical(values, role)) for (role, _), values in zip(sources, zip(*rows, strict=True), strict=True)
    ]


def _pick(sample: Any, source: Source, role: Role) -> Any:
    """Return the label or group in one sample: of a tuple, a mapping or an object."""
    if isinstance(source, int) or (isinstance(sample, Sequence) and (source is None or _is_position(source))):
        return sample[USUAL_POSITION[role] if source is None else int(source)]
    for name in USUAL_NAMES[role] if source is None else (source,):
        if isinstance(sample, Mapping) and name in sample:
            return sample[name]
        if not isinstance(sample, Mapping) and hasattr(sample, name):
            return getattr(sample, name)
    raise KeyError(source)


def _is_position(source: Source) -> bool:
    """Return whether a text is a position, as from a command line, where there are only texts."""
    return isinstance(source, str) and source.isdecimal()


def _length(dataset: Any) -> int:
    return len(dataset)


def _wrong_length(dataset: Any, length: int, role: Role) -> str:
    return (
        f"Expected `{role}` to have one value for each of the {_length(dataset)} samples of {type(dataset).__name__}"
        f" but got {length} values."
    )


def _not_found(dataset: Any, source: Source, role: Role) -> str:
    wanted = f"{source!r}" if source is not None else "any of " + ", ".join(map(repr, USUAL_NAMES[role]))
    return (
        f"Found no {role} in {type(innermost(dataset)).__name__}: it has no attribute, column or sample entry {wanted}."
        f"{what_there_is(dataset, source, role)} Pass `{role}` as the name of an attribute or column, as the position"
        " in the sample, as a function of the dataset, or as an array with one value per sample."
    )
