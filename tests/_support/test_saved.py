"""Entries of a checkpoint are checked before they are used; messages name them."""

import math

import pytest
import torch

from fairbatch_lightning._support.saved import Saved

STATE = Saved({"epoch": 3, "parts": [{"shares": torch.ones(2, 3)}], "on": True, "length": math.inf, "unit": "loss"})


def test_what_is_right_is_returned():
    assert STATE["epoch"].integer(0, 3) == 3
    assert STATE["on"].flag() is True
    assert STATE["length"].number(1) == math.inf
    assert STATE["unit"].text() == "loss"
    (part,) = STATE["parts"].several(1)
    assert part["shares"].tensor(2, None, finite=True, least=1).shape == (2, 3)
    assert set(STATE.whole()) == set(STATE.entries())


def test_a_tensor_is_a_copy():
    state = {"shares": torch.ones(2)}
    Saved(state)["shares"].tensor(2).zero_()
    assert state["shares"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda state: state["step"],
            "Expected `step` in the checkpoint but there is none. It is damaged, altered, or of",
        ),
        (lambda state: state["epoch"]["more"], "`epoch` in the checkpoint to be a dict but got 3"),
        (
            lambda state: state["epoch"].integer(4),
            "`epoch` in the checkpoint to be a whole number from 4 to 9007199254740992",
        ),
        (lambda state: state["on"].integer(), "`on` in the checkpoint to be a whole number .* but got True"),
        (lambda state: state["unit"].number(), "`unit` in the checkpoint to be a number but got 'loss'"),
        (lambda state: state["unit"].several(4), "`unit` in the checkpoint to be a list but got 'loss'"),
        (lambda state: state["parts"].several(2), "`parts` in the checkpoint to be a list of 2 but got"),
        (
            lambda state: next(iter(state["parts"]))["shares"].tensor(2, 4),
            r"`parts\[0\].shares` .* a tensor of numbers of shape \(2, 4\) but got a tensor of shape \(2, 3\)",
        ),
        (lambda state: Saved(10**5000, "epoch").integer(), "`epoch` .* but got an object of int"),
        (lambda state: Saved("x" * 1000, "epoch").flag(), r"got 'x{99}\.\.\.\. It is"),
    ],
)
def test_what_is_not_right_is_refused(read, message):
    with pytest.raises(ValueError, match=message):
        read(STATE)


def test_what_a_check_of_ours_refuses_is_the_checkpoints_fault():
    with (
        pytest.raises(ValueError, match="`epoch` in the checkpoint cannot be right: too late It is"),
        STATE["epoch"].checked(),
    ):
        raise ValueError("too late")
