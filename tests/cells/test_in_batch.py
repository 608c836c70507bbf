"""Labels in batches, compared with those of the cells; references are computed by hand."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.cells.in_batch import (
    LabelCheck,
    WrongLabelsError,
    check_groups,
    entries,
    entry_at,
    one_per_sample,
)


class TestOnePerSample:
    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            (torch.tensor([1, 0, 2]), [1, 0, 2]),
            (torch.tensor([[1], [0], [2]]), [1, 0, 2]),
            (torch.tensor([1.0, 0.0, 2.0]), [1, 0, 2]),
            (torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16), [1, 0, 2]),
            (torch.tensor([True, False, True]), [1, 0, 1]),
            (np.array([-1, 1, -1]), [-1, 1, -1]),
            ([3, 4, 5], [3, 4, 5]),
            (("a", "b", "a"), ["a", "b", "a"]),
            (torch.tensor([[0, 1], [1, 0], [0, 1]]), [1, 0, 1]),
            (torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.1, 0.9]]), [1, 0, 1]),
            (torch.tensor([0.1, 0.9, 0.1]), [0, 1, 0]),
        ],
    )
    def test_is_what_the_entry_holds(self, entry, expected):
        assert one_per_sample(entry, 3).tolist() == expected

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            torch.tensor([1, 0]),
            torch.tensor([0.3, 0.25, 1.7]),
            torch.tensor([0.1, 0.7, 0.9]),  # mixed
            torch.tensor([torch.nan, 1.0, 0.0]),
            torch.rand(3, 4, generator=torch.Generator().manual_seed(0)),
            torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]),
            torch.tensor([[1, 1], [0, 1], [0, 1]]),
            torch.zeros(3, 2, 2),
            [1.5, 2, 3],
            ["a", "b"],
            "abc",
        ],
    )
    def test_is_none_for_anything_else(self, entry):
        assert one_per_sample(entry, 3) is None


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)


def test_entries_are_found_in_any_container_and_again_by_their_path():
    y = torch.tensor([1, 0])
    batch = {"x": torch.zeros(2, 3), "meta": [Holder(label=y, path=["a", "b"]), torch.zeros(5)], "n": 2}
    found = dict(entries(batch, 2))
    assert list(found) == [("meta", 0, "label"), ("meta", 0, "path")]
    assert all(entry_at(batch, path) is entry for path, entry in found.items())
    assert entry_at(batch, ("meta", 7)) is None
    assert entry_at([y], ("label",)) is None


def index_of(labels, groups=None):
    return GroupIndex.from_values(labels, ["ab"[i % 2] for i in range(len(labels))] if groups is None else groups)


def checker(labels, number=None, batches=None, source=None):
    """Return a check of these labels, and the rows of all samples."""
    index, classes = index_of(labels), ClassNumbers()
    check = LabelCheck("FairBatch", index, source, classes, batches or (lambda samples: None))
    return check, check.rows(index.cells), classes


class TestComparison:
    @pytest.mark.parametrize(
        ("labels", "values", "number", "says"),
        [
            ([0, 1, 1], [0, 1, 1], 2, {}),
            (["a", "b", "b"], ["a", "b", "b"], 2, {}),
            (["b", "a", "a"], [0, 1, 1], 2, {"b": 0, "a": 1}),
            (["cat", "horse", "cat"], [0, 2, 0], 3, {"cat": 0, "horse": 2}),
            ([1, 2, 2], [0, 1, 1], 3, {1: 0, 2: 1}),
            ([-1, 1, -1], [0, 1, 0], 2, {-1: 0, 1: 1}),
            ([10, 30, 30], [0, 2, 2], 5, {10: 0, 30: 2}),
        ],
    )
    def test_says_which_classes_labels_are(self, labels, values, number, says):
        check, rows, _ = checker(labels)
        assert check.compare(np.array(values), rows, number) == says

    @pytest.mark.parametrize(
        ("labels", "values", "number", "message"),
        [
            ([0, 1, 0, 1], [1, 0, 1, 0], 2, "of the labels in the data 0 is 1, 1 is 0 there"),
            (
                [0, 1, 0, 1],
                [0, 0, 1, 1],
                2,
                r"the 2 samples with the label 0 .* labels \[0, 1\] there. They may be the",
            ),
            ([0, 1, 0, 0], [0, 0, 1, 1], 2, r"the 3 samples with the label 0 in the data have the labels \[0, 1\]"),
            ([1, 2, 2], [1, 0, 0], 3, "1 is 1, 2 is 0"),  # counted backwards
            (["a", "b", "b"], [0, 0, 0], 2, "'a' is 0, 'b' is 0"),
            (["a", "b", "b"], [0, 5, 5], 2, "'b' is 5"),
        ],
    )
    def test_refuses_others(self, labels, values, number, message):
        check, rows, _ = checker(labels)
        with pytest.raises(WrongLabelsError, match=message):
            check.compare(np.array(values), rows, number)

    def test_what_is_known_of_names_must_stay(self):
        check, rows, classes = checker(["a", "b", "b"])
        classes.learn({"a": 0, "b": 1})
        with pytest.raises(WrongLabelsError):
            check.compare(np.array([1, 0, 0]), rows, 2)


class TestSearch:
    def test_takes_any_entry_that_agrees(self):
        check, rows, _ = checker([0, 1, 1, 0])
        group = torch.tensor([1, 1, 0, 0])  # by custom the second entry has the labels
        assert check.find([torch.zeros(4, 2), group, torch.tensor([0, 1, 1, 0])], rows, 2) == {}
        assert check.path == (2,)

    def test_refuses_what_is_said_to_be_the_labels(self):
        wrong, check_and_rows = torch.tensor([1, 0, 0, 1]), lambda source: checker([0, 1, 1, 0], source=source)[:2]
        for source, batch in ((None, [torch.zeros(4, 2), wrong]), ("race", {"race": wrong}), (0, (wrong,))):
            check, rows = check_and_rows(source)
            with pytest.raises(WrongLabelsError, match="0 is 1, 1 is 0 there"):
                check.find(batch, rows, 2)

    def test_leaves_alone_what_may_be_anything(self):
        check, rows, _ = checker([0, 1, 1, 0])
        other = {"gender": torch.tensor([1, 0, 0, 1]), "label": torch.tensor([7, 5, 2, 9])}
        assert check.find(other, rows, 2) is None
        assert check.path is None
        assert check.find([torch.zeros(4), torch.tensor([1, 0, 0, 1])], rows, 2, doubtful=True) is None

    def test_looks_again_where_it_found_them(self):
        check, rows, _ = checker([0, 1, 1, 0])
        check.find({"y": torch.tensor([0, 1, 1, 0])}, rows, 2)
        assert check.again(torch.tensor([0, 1, 1, 0]), rows, 2) is None
        assert isinstance(check.again(torch.tensor([0, 0, 1, 1]), rows, 2), WrongLabelsError)
        assert check.again(None, rows, 2) is None


class TestCompletion:
    def test_names_that_no_batch_held_are_looked_up_in_one_sample_each(self):
        labels, numbers = ["a", "b", "c", "d", "a"], [3, 1, 0, 2, 3]
        data = [(torch.zeros(2), number) for number in numbers]
        asked = []

        def batch_of(samples):
            asked.append(samples)
            return default_collate([data[sample] for sample in samples])

        check, rows, classes = checker(labels, batches=batch_of)
        said = check.find(default_collate([data[0], data[4]]), rows[[0, 4]], 4)
        classes.learn(said)
        check.complete(4)
        assert classes.find(["a", "b", "c", "d"], 4) == {"a": 3, "b": 1, "c": 0, "d": 2}
        assert asked == [[1, 2, 3]]

    def test_the_last_name_is_the_last_class(self):
        check, _, classes = checker(["a", "b", "b"])
        classes.learn({"a": 1})
        check.complete(2)
        assert classes.learnt == {"a": 1, "b": 0}

    def test_what_stays_unknown_is_refused(self):
        check, _, _ = checker(["a", "b", "b"])
        with pytest.raises(ValueError, match="of which it is not known which class each is"):
            check.complete(2)


class TestGroups:
    INDEX = index_of([0, 1, 0, 1, 0], ["x", "y", "x", "y", "y"])

    def test_one_value_for_every_group_is_right(self):
        batch = {"race": torch.tensor([4, 9, 4, 9, 9]), "y": torch.tensor([0, 1, 0, 1, 0])}
        assert check_groups("FairBatch", self.INDEX, "race", batch, self.INDEX.cells) == "race"

    def test_nothing_of_that_name_says_nothing(self):
        batch = {"gender": torch.tensor([0, 1, 1, 0, 0])}
        assert check_groups("FairBatch", self.INDEX, "race", batch, self.INDEX.cells) == ""

    @pytest.mark.parametrize("source", ["group", ["group"], None, np.zeros(5)])
    def test_one_value_for_several_groups_is_refused(self, source):
        batch = {"group": torch.tensor([0, 1, 1, 0, 1])}
        with pytest.raises(WrongLabelsError, match=r"samples with 'group' = 0 there are of the groups . and . in"):
            check_groups("FairBatch", self.INDEX, source, batch, self.INDEX.cells)

    def test_finer_values_and_single_attributes_of_several_say_nothing_wrong(self):
        ages = {"group": torch.tensor([31, 58, 37, 52, 59])}  # the groups are decades
        assert check_groups("FairBatch", self.INDEX, "group", ages, self.INDEX.cells) == "group"
        one = {"race": torch.tensor([0, 0, 1, 1, 0])}
        assert check_groups("FairBatch", self.INDEX, ["race", "gender"], one, self.INDEX.cells) == ""
