"""The records of updates."""

import math

import pytest
import torch

from fairbatch_lightning.rules.history import UpdateRecord


def record(gaps):
    return UpdateRecord(3, 40, torch.rand(2, 2), torch.tensor(gaps), torch.rand(2, 2), torch.rand(2, 2))


def test_the_largest_gap_is_one_that_is_known():
    assert record([math.nan, 0.25]).gap_max == 0.25
    assert record([0.5, 0.25]).gap_max == 0.5
    assert math.isnan(record([math.nan, math.nan]).gap_max)


def test_survives_a_checkpoint(tmp_path):
    one = record([0.5, 0.25])
    torch.save(one.state_dict(), tmp_path / "record.pt")
    other = UpdateRecord.load(torch.load(tmp_path / "record.pt", weights_only=True), tuple(one.losses.shape))
    assert (other.epoch, other.step) == (3, 40)
    for name in ("losses", "gaps", "shares_before", "shares_after"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_cannot_be_changed():
    with pytest.raises(AttributeError):
        record([0.5]).epoch = 4
