"""Arguments are refused in the same words everywhere."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fairbatch_lightning._support.checks import check_at_least, check_number, check_range, chosen


@pytest.mark.parametrize("value", [1, 5, np.int64(1), np.uint8(200)])
def test_integers_are_taken(value):
    check_at_least("x", value, 1)


@pytest.mark.parametrize("value", [0, -3, 1.0, 2.5, "1", None, True, np.float32(1), math.inf, np.int64(0)])
def test_what_is_no_integer_of_at_least_1_is_refused(value):
    with pytest.raises(ValueError, match="argument `x` to be an integer of at least 1 but got") as error:
        check_at_least("x", value, 1)
    assert str(error.value).endswith(f"but got {value!r}.")


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float32(0.25), np.int64(1), Fraction(1, 3)])
def test_numbers_in_a_range_are_taken(value):
    check_number("x", value, 0, 1)


@pytest.mark.parametrize(
    ("value", "settings", "expected"),
    [
        (-0.1, {}, "a number of at least 0 but got -0.1."),
        (math.nan, {}, "a number of at least 0 but got nan."),
        (math.inf, {}, "a number of at least 0 but got inf."),
        ("1", {}, "a number of at least 0 but got '1'."),
        (None, {}, "a number of at least 0 but got None."),
        (True, {}, "a number of at least 0 but got True."),
        (1.1, {"most": 1}, "a number from 0 to 1 but got 1.1."),
        (math.nan, {"most": 1}, "a number from 0 to 1 but got nan."),
        (0, {"above": True}, "a number above 0 but got 0."),
        (0.0, {"above": True, "origin": " from there"}, "a number above 0 but got 0.0 from there."),
    ],
)
def test_other_numbers_are_refused(value, settings, expected):
    with pytest.raises(ValueError, match="argument `x` to be a number") as error:
        check_number("x", value, 0, **settings)
    assert str(error.value) == f"Expected argument `x` to be {expected}"


def test_values_that_would_be_counted_as_others_are_refused():
    check_range("labels", torch.tensor([0, 2, 1]), 3)
    check_range("labels", torch.tensor([], dtype=torch.long), 3)
    for values in ([0, 3], [-1, 2]):
        with pytest.raises(ValueError, match=f"`labels` to be numbers from 0 to 2 but got some from {values[0]} to"):
            check_range("labels", torch.tensor(values), 3)


NAMES = {"list": list, "dict": dict}


class TestChosen:
    def test_a_name_makes_a_new_object(self):
        one, other = (chosen("x", "list", NAMES, list) for _ in range(2))
        assert one == other == []
        assert one is not other

    def test_an_object_is_itself(self):
        own = [1]
        assert chosen("x", own, NAMES, list) is own

    @pytest.mark.parametrize("value", ["tuple", 3, None, ("list",), list])
    def test_anything_else_is_refused(self, value):
        with pytest.raises(ValueError, match="argument `x` to be one of") as error:
            chosen("x", value, NAMES, list)
        expected = f"to be one of ['list', 'dict'] or an object of list but got {value!r}."
        assert str(error.value).endswith(expected)
