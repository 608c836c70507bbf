"""Fixtures for all tests, which have both cores of a small machine to themselves at best."""

import os
import socket

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # here and in processes that tests start: for small models threads only wait

import torch

torch.set_num_threads(1)


@pytest.fixture
def free_port():
    """Return a port on this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
