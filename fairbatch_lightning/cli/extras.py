"""Packages that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec


def need(*packages: str, extra: str = "demo") -> None:
    """End the program with what to install if a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f"This needs {' and '.join(missing)}: pip install 'fairbatch-lightning[{extra}]'")
