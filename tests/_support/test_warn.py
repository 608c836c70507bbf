"""Warnings have a category of their own, and point at the caller of whoever warns."""

import warnings

import pytest

from fairbatch_lightning import FairBatchWarning
from fairbatch_lightning._support.warn import warn


def somebody_warns():
    warn("look here")


def test_category_and_place():
    with pytest.warns(FairBatchWarning, match="look here") as caught:
        somebody_warns()
    assert caught[0].filename == __file__
    assert issubclass(FairBatchWarning, UserWarning)


def test_can_be_silenced_without_others():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", FairBatchWarning)
        somebody_warns()
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another"]
