"""Fixtures for all tests."""

import socket

import pytest


@pytest.fixture
def free_port():
    """Return a port on this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
