"""Import and run the examples as their users do."""

import importlib
import sys
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples():
    """Return the folder."""
    return EXAMPLES


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of the examples, to be forgotten afterwards: their names are common."""
    for folder in (EXAMPLES, EXAMPLES / "paper"):
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def run_script(tmp_path_factory):
    """Return a function that runs an example, and returns what it prints; it fails if the example does."""

    def run(script, *arguments):
        done = processes.run_script(
            EXAMPLES / script, *arguments, output=tmp_path_factory.mktemp("printed") / "example"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
