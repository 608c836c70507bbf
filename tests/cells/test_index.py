"""The cell of every sample, and the names and sizes of the cells."""

import numpy as np
import pytest
import torch
from helpers import named_cells
from torch.utils.data import Dataset, Subset

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.cells.index import check_same_cells, natural_shares

LABELS = [0, 1, 1, 0, 1, 0, 1, 1]
RACES = ["b", "a", "b", "b", "a", "c", "c", "a"]
GENDERS = [0, 1, 0, 1, 0, 1, 0, 1]


class Faces(Dataset):
    """Attributes, and samples that must not be read."""

    targets, race, gender = LABELS, RACES, GENDERS

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


def test_groups_are_never_relabelled_by_what_is_present():
    """Group ids follow the values' order, and unlike ids names stay with their values in a subset."""
    part = GroupIndex.from_dataset(Subset(Faces(), [0, 2, 5]), groups="race")
    assert part.group_names == ("b", "c")


def test_several_attributes_combine_and_only_pairs_that_occur_count():
    index = GroupIndex.from_dataset(Faces(), groups=["race", "gender"])
    assert index.group_names == (
        "race=a, gender=0",
        "race=a, gender=1",
        "race=b, gender=0",
        "race=b, gender=1",
        "race=c, gender=0",
        "race=c, gender=1",
    )
    names = [f"race={r}, gender={g}" for r, g in zip(RACES, GENDERS, strict=True)]
    assert [group for _, group in named_cells(index)] == names
    by_dict = GroupIndex.from_dataset(Faces(), groups={"race": RACES, "gender": "gender"})
    assert named_cells(by_dict) == named_cells(index)


def test_pairs_that_do_not_occur_make_no_group():
    index = GroupIndex.from_dataset(Faces(), groups={"race": RACES, "again": RACES, "gender": GENDERS})
    assert len(index.group_names) == 6


def test_a_list_of_arrays_is_several_attributes():
    index = GroupIndex.from_dataset(Faces(), groups=[RACES, GENDERS])
    assert index.group_names[0] == "attribute 0=a, attribute 1=0"
    assert len(index.group_names) == 6


def test_no_attribute_is_refused():
    with pytest.raises(ValueError, match="`groups` to name at least one attribute but got none"):
        GroupIndex.from_dataset(Faces(), groups={})


def test_label_by_value_or_name():
    index = GroupIndex.from_values(["no", "yes"], [0, 1])
    assert index.row_of("yes") == 1
    index = GroupIndex.from_values([-1, 1], [0, 1])
    assert (index.row_of(1), index.row_of("-1")) == (1, 0)
    with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[-1, 1\] but got 2"):
        index.row_of(2)


@pytest.mark.parametrize(
    ("labels", "wanted", "row"),
    [
        ([0, 1], None, 1),
        (["no", "yes"], None, 1),
        ([0, 1, 2], None, None),
        ([5], None, None),
        ([0, 1], 0, 0),
        ([0, 1, 2], "2", 2),
    ],
)
def test_the_positive_label_is_the_second_of_two_unless_named(labels, wanted, row):
    assert GroupIndex.from_values(labels, [0] * len(labels)).positive_row(wanted) == row


def test_some_of_the_samples_have_the_same_labels_and_groups():
    index = GroupIndex.from_values(LABELS, RACES)
    part = index.part([6, 0])
    assert part.names == index.names
    assert named_cells(part) == [("1", "c"), ("0", "b")]
    assert part.counts.tolist() == [[0, 1, 0], [0, 0, 1]]
    assert index.part(np.array([1, 1])).counts.tolist() == [[0, 0, 0], [2, 0, 0]]


def test_cells_of_other_data_are_found_by_their_names():
    train, other = GroupIndex.from_values(LABELS, RACES), GroupIndex.from_values([1, 0, 2, 1], ["c", "b", "a", "d"])
    assert train.cells_of(other).tolist() == [5, 1, -1, -1]
    assert np.array_equal(train.cells_of(train), train.cells)


def test_names_of_cells_in_messages():
    index = GroupIndex.from_values(["no", "yes"], ["a", "b"])
    assert index.cell_names(index.counts == 0) == "(label no, group b), (label yes, group a)"


def test_natural_shares_of_a_row_without_samples_are_0():
    assert natural_shares(torch.tensor([[1, 3], [0, 0]])).tolist() == [[0.25, 0.75], [0, 0]]


class TestReloadedData:
    def test_other_numbers_of_samples_are_fine(self):
        before = GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "b"])
        check_same_cells(before, GroupIndex.from_values([0, 0, 0, 1, 1], ["a", "b", "b", "a", "b"]))

    @pytest.mark.parametrize(
        ("labels", "groups"),
        [
            ([0, 0, 1, 1], ["a", "c", "a", "c"]),
            ([0, 0, 2, 2], ["a", "b", "a", "b"]),
            ([0, 0, 1, 1], ["a", "b", "a", "a"]),
        ],
        ids=["another group", "another label", "a cell is empty"],
    )
    def test_other_cells_are_refused(self, labels, groups):
        before = GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "b"])
        with pytest.raises(ValueError, match=r"samples in the cells that it had before: .*start a new fit"):
            check_same_cells(before, GroupIndex.from_values(labels, groups))


@pytest.mark.parametrize(("num_labels", "num_groups", "offset"), [(2, 2, 0), (30, 20, -7), (300, 3, 60_000)])
def test_millions_of_samples(num_labels, num_groups, offset):
    """Worked off in parts; NumPy's own sort does it in one."""
    random = np.random.default_rng(0)
    labels, groups = random.integers(num_labels, size=2_500_000), random.integers(num_groups, size=2_500_000)
    index = GroupIndex.from_values(labels + offset, groups)
    expected = labels * num_groups + groups
    assert np.array_equal(index.cells, expected)
    assert np.array_equal(index.order, np.argsort(expected, kind="stable"))
    assert np.array_equal(index.counts.flatten(), np.bincount(expected))
    assert np.array_equal(index.edges, np.concatenate([[0], np.cumsum(np.bincount(expected))]))


@pytest.mark.parametrize(("labels", "label", "row"), [(["0", "1"], 1, 1), ([0, 1], "1", 1), ([-1, 1], "-1", 0)])
def test_a_label_is_found_as_a_file_or_a_command_line_has_it(labels, label, row):
    """Where "1" may have become 1, or the other way round."""
    assert GroupIndex.from_values(labels, ["a", "b"]).row_of(label) == row
