"""The global random number generators are left as they were."""

import random

import numpy as np
import pytest
import torch

from fairbatch_lightning._support.rng import preserved_rng


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def seeded():
    """Start all generators at a known place, and leave them alone."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize("seed", [None, 0, 7, 2**32 + 7])
def test_what_is_drawn_inside_does_not_show_outside(seed):
    with preserved_rng(seed):
        inside = drawn()
    outside = drawn()
    assert (inside == outside) == (seed is None)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert drawn() == outside


def test_also_after_an_error():
    def fail():
        with preserved_rng(5):
            drawn()
            raise KeyError("out of luck")

    expected = fresh()
    with pytest.raises(KeyError, match="out of luck"):
        fail()
    assert drawn() == expected


def fresh():
    """Return what would be drawn next, without drawing it."""
    with preserved_rng():
        return drawn()


def test_a_seed_makes_it_repeatable():
    with preserved_rng(5):
        first = drawn()
    drawn()
    with preserved_rng(5):
        assert drawn() == first
    with preserved_rng(6):
        assert not set(drawn()) & set(first)


def test_a_seed_of_numpy_is_a_seed():
    with preserved_rng(np.int64(5)):
        first = drawn()
    with preserved_rng(5):
        assert drawn() == first


def test_inside_of_each_other():
    expected = fresh()
    with preserved_rng(1):
        outer = fresh()
        with preserved_rng(2):
            drawn()
        assert drawn() == outer
    assert drawn() == expected
