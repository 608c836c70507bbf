"""The loss of every sample when it was last trained on."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.measure.per_sample import cross_entropy
from fairbatch_lightning.measure.sample_losses import LossOfEverySample

LABELS = torch.tensor([0, 1, 1, 0, 1, 0])


def watching():
    return LossOfEverySample(GroupIndex.from_values(LABELS, ["a", "b", "a", "b", "a", "a"]), cross_entropy)


def logits(samples, seed=0):
    return torch.randn(len(samples), 2, generator=torch.Generator().manual_seed(seed))


def expected(samples, seed=0):
    return functional.cross_entropy(logits(samples, seed), LABELS[samples], reduction="none").numpy()


def test_nothing_is_known_at_first():
    assert np.isnan(watching().known()).all()


def test_samples_have_the_loss_of_their_own_label():
    watched = watching()
    watched.observe(logits([4, 0]), [4, 0])
    watched.observe(logits([1], seed=1), [1])
    known = watched.known()
    assert known[[4, 0]] == pytest.approx(expected([4, 0]))
    assert known[1] == pytest.approx(expected([1], seed=1)[0])
    assert np.isnan(known[[2, 3, 5]]).all()


def test_a_loss_is_known_until_there_is_a_newer_one():
    watched = watching()
    watched.observe(logits([4, 0]), [4, 0])
    watched.known()
    watched.observe(logits([0, 2], seed=1), [0, 2])
    known = watched.known()
    assert known[[0, 2]] == pytest.approx(expected([0, 2], seed=1))
    assert known[4] == pytest.approx(expected([4, 0])[0])


def test_of_a_sample_that_was_met_twice_the_mean_is_known():
    watched = watching()
    watched.observe(logits([3, 3]), [3, 3])
    assert watched.known()[3] == pytest.approx(expected([3, 3]).mean())


def test_what_is_known_is_a_copy():
    watched = watching()
    watched.observe(logits([4]), [4])
    watched.known()[:] = 0
    assert watched.known()[4] == pytest.approx(expected([4])[0])


@pytest.mark.parametrize("alone", [True, False])
def test_goes_on_from_a_saved_state(alone):
    """Both from what was asked for already and from what was only seen."""
    watched, resumed = watching(), watching()
    watched.observe(logits([4, 0]), [4, 0])
    watched.known()
    watched.observe(logits([0, 2], seed=1), [0, 2])
    state = watched.state_dict(alone=alone)
    resumed.load_state_dict(state, rank=0)
    resumed.observe(logits([5], seed=2), [5])
    watched.observe(logits([5], seed=2), [5])
    np.testing.assert_array_equal(resumed.known(), watched.known())


def test_only_the_first_process_goes_on_from_what_was_seen():
    """Or it would be added up once for every process."""
    watched, other = watching(), watching()
    watched.observe(logits([4, 0]), [4, 0])
    watched.known()
    watched.observe(logits([2], seed=1), [2])
    other.load_state_dict(watched.state_dict(alone=True), rank=1)
    known = other.known()
    assert known[[4, 0]] == pytest.approx(expected([4, 0]))
    assert np.isnan(known[2])


def test_a_saved_state_does_not_change_any_more():
    watched = watching()
    watched.observe(logits([4]), [4])
    state = watched.state_dict(alone=True)
    before = {name: value.clone() for name, value in state.items()}
    watched.observe(logits([0, 1], seed=1), [0, 1])
    watched.known()
    assert all(torch.equal(state[name].nan_to_num(-1), value.nan_to_num(-1)) for name, value in before.items())
