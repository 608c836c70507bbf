"""Labels and groups in every form that people have them in become integers or strings."""

import numpy as np
import pandas as pd
import pytest
import torch

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.cells.values import categorical

LABELS = [0, 1, 1, 0, 1, 0, 1, 1]
GENDERS = [0, 1, 0, 1, 0, 1, 0, 1]
RACES = ["b", "a", "b", "b", "a", "c", "c", "a"]


@pytest.mark.parametrize(
    "values",
    [
        np.array(RACES),
        np.array(RACES, dtype=object),
        np.array(RACES, dtype="S1"),
        RACES,
        tuple(RACES),
        [race.encode() for race in RACES],
        pd.Series(RACES, index=range(100, 108)),
        pd.Series(RACES, dtype="category"),
    ],
    ids=["numpy", "objects", "bytes", "list", "tuple", "list of bytes", "pandas", "categorical"],
)
def test_strings(values):
    array, names = categorical(values, "groups")
    assert array.dtype.kind == "U"
    assert array.tolist() == RACES
    assert names is None


@pytest.mark.parametrize(
    "convert",
    [
        list,
        np.array,
        torch.tensor,
        pd.Series,
        lambda v: torch.tensor(v).float(),
        lambda v: torch.tensor(v).unsqueeze(1),
        lambda v: [torch.tensor(i) for i in v],
        lambda v: np.array(v, dtype=np.uint8),
        lambda v: np.array(v, dtype=object),
    ],
)
def test_arrays_of_integers(convert):
    index = GroupIndex.from_values(convert(LABELS), convert(GENDERS))
    assert index.counts.tolist() == [[1, 2], [3, 2]]
    assert index.label_values == (0, 1)
    assert index.group_names == ("0", "1")


@pytest.mark.parametrize("values", [[-1, 1, 1, -1], [7, 10**12, 10**12, 7]])
def test_any_integers_are_labels(values):
    index = GroupIndex.from_values(values, [0, 0, 1, 1])
    assert index.label_values == (min(values), max(values))
    assert index.counts.tolist() == [[1, 1], [1, 1]]


def test_booleans_have_names():
    index = GroupIndex.from_values([0, 1], np.array([True, False]))
    assert index.group_names == ("False", "True")


def test_values_of_several_types_are_strings():
    assert categorical([1, "b", 2.5], "groups")[0].tolist() == ["1", "b", "2.5"]


def test_a_tensor_with_a_gradient():
    assert categorical(torch.ones(2, requires_grad=True), "labels")[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.1] * 8, "`groups` to be categories .* numbers such as 0.1.*torch.bucketize"),
        (torch.zeros(8, 2), r"`groups` to hold one value per sample but got an array of shape \(8, 2\)"),
        (["a", float("nan")] * 4, "`groups` to have a value for every sample but 4 of 8 are missing .the first at in"),
        (pd.Series(["a", None] * 4, dtype="string"), "4 of 8 are missing .the first at index 1"),
        (pd.Series(pd.to_datetime(["2020", None] * 4)).astype(object), "4 of 8 are missing .the first at index 1"),
        ([1.0, float("inf")] * 4, "numbers such as inf"),
        (["a", None] * 4, "4 of 8 are missing .the first at index 1"),
        (pd.Series(["a", None] * 4), "4 of 8 are missing .the first at index 1"),
        ([1.0, float("nan")] * 4, "4 of 8 are missing .the first at index 1"),
        (np.array([1j] * 8), "`groups` to hold integers or strings but got values of type complex"),
    ],
)
def test_what_is_no_category_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        categorical(values, "groups")
