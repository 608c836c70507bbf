"""FairnessMonitor without a Trainer; with one: tests/pipeline."""

import pickle

import pytest
import torch
from helpers import Toy

from fairbatch_lightning import FairnessMonitor


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"`stages` to be some of \['validate', 'test'\] but got \['val'\]"):
        FairnessMonitor(groups="group", stages="val")
    with pytest.raises(ValueError, match="`stages`"):
        FairnessMonitor(groups="group", stages=[])
    with pytest.raises(ValueError, match="`logits` to be the name of a submodule but got 3"):
        FairnessMonitor(groups="group", logits=3)
    for values in (Toy().group, torch.zeros(240), [0, 1, 2]):
        with pytest.raises(ValueError, match=r"`groups` of FairnessMonitor to be the name .* but got values"):
            FairnessMonitor(groups=values)


def test_impossible_number_of_samples():
    with pytest.raises(ValueError, match="`min_samples` to be an integer of at least 1 but got 0"):
        FairnessMonitor("group", min_samples=0)


def test_nothing_to_draw_is_said():
    monitor = FairnessMonitor(groups="group")
    with pytest.raises(ValueError, match="Nothing has been monitored yet: fit, validate or test"):
        monitor.plot()
    with pytest.raises(ValueError, match="Nothing has been monitored yet"):
        monitor.plot_confusion()


def test_its_name_is_in_checkpoints_and_logs():
    """Two monitors must not overwrite each other's state."""
    keys = {FairnessMonitor(groups="group", name=name).state_key for name in (None, "gender", "age")}
    assert len(keys) == 3


def test_is_pickled_before_it_was_used():
    monitor = pickle.loads(pickle.dumps(FairnessMonitor(groups="group", logits="net", name="x")))
    assert monitor.state_key == FairnessMonitor(groups="group", name="x").state_key
    assert monitor.history == []
