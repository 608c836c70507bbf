"""Labels and groups in every form that people have them in become integers or strings."""

from decimal import Decimal

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
        lambda v: [[i] for i in v],
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


def test_numbers_that_are_equal_are_one_category_among_strings():
    assert categorical([1, 1.0, "b", np.int64(1), Decimal(1)], "groups")[0].tolist() == ["1", "1", "b", "1", "1"]


def test_bytes_are_text():
    names = ["né", "oui"]
    for given in ([name.encode() for name in names], np.array([name.encode() for name in names])):
        assert categorical(given, "groups")[0].tolist() == names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
def test_tensors_of_any_precision(dtype):
    values = torch.tensor(GENDERS, dtype=dtype)
    for given in (values, list(values), values.to_sparse()):
        assert categorical(given, "groups")[0].tolist() == GENDERS


def test_masked_arrays():
    whole = np.ma.masked_array(LABELS, mask=[False] * 8)
    assert categorical(whole, "labels")[0].tolist() == LABELS


@pytest.mark.parametrize(
    "nothing",
    [None, np.float32("nan"), np.float16("nan"), Decimal("NaN"), Decimal("sNaN"), pd.NA, pd.NaT, np.ma.masked],
)
@pytest.mark.parametrize("other", ["a", 1, b"a", True])
def test_every_kind_of_nothing_is_missing(nothing, other):
    given = np.empty(3, object)
    given[:] = [other, other, nothing]
    for values in (given, list(given)):
        with pytest.raises(ValueError, match=r"1 of 3 are missing \(the first at index 2: .*\). Drop those samples"):
            categorical(values, "groups")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1, "0", "1"], r"by their names, but 0 \(at index 0\) and '0' \(at index 2\) are both"),
        ([b"a", "b", "a"], r"b'a' \(at index 0\) and 'a' \(at index 2\) are both written 'a'. Give"),
        ([1.0, 1e300], r"whole numbers of up to 16 digits but got 1e\+300 \(at index 1\). Give them as strings"),
        (torch.tensor([1.0, -1e30]), r"got -1e\+30 \(at index 1\)"),
        ([1, 10**30], r"whole numbers of up to 18 digits but got 10{30} \(at index 1\). Give them as strings"),
        (np.array([1, 2**63], np.uint64), r"up to 18 digits but got 9223372036854775808 \(at index 1\)"),
        ([b"a", b"\xff"], r"to be text in UTF-8 but got b'\\xff' \(at index 1\). Decode"),
        (np.array([b"a", b"\xff"]), r"to be text in UTF-8 but got b'\\xff' \(at index 1\)"),
        (np.ma.masked_array(LABELS, mask=[False, True] * 4), r"4 of 8 are missing \(the first at index 1: masked\)"),
        ([0.0, 0.5], r"numbers such as 0.5 \(at index 1\)"),
        ([torch.zeros(40)] * 3, r"one value per sample but got a tensor of shape \(40,\) \(at index 0\). Pass"),
        ([[1, 2], [3]], r"one value per sample but got \[1, 2\] \(at index 0\). Pass one"),
        ([{"race": 1}] * 2, r"one value per sample but got \{'race': 1\} \(at index 0\)"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        categorical(values, "groups")


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
