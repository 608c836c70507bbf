"""Differences between devices."""

from types import SimpleNamespace

import pytest
import torch

from fairbatch_lightning._support.devices import most_precise, to_device


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_the_most_precise_numbers(device, dtype):
    assert most_precise(torch.device(device)) == dtype


def test_a_copy_to_the_same_device_is_none():
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_a_copy_to_another_device():
    moved = to_device(torch.arange(3), torch.device("meta"))
    assert moved.device.type == "meta"
    assert moved.shape == (3,)


def test_a_copy_to_a_gpu_does_not_wait_for_it():
    """From pinned memory, or it would all the same."""
    calls = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: calls.append((device, non_blocking)))
    to_device(SimpleNamespace(pin_memory=lambda: pinned), torch.device("cuda"))
    assert calls == [(torch.device("cuda"), True)]
