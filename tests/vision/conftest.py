"""Fixtures for the tests of vision."""

import pytest
from faces import write_faces


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return a folder with 60 generated faces."""
    folder = tmp_path_factory.mktemp("utkface") / "UTKFace"
    write_faces(folder)
    return folder
