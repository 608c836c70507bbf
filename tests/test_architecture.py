"""Modules import only what comes before them, and the core needs no Lightning."""

import ast
from pathlib import Path

import pytest

import fairbatch_lightning

CORE = [
    "_warnings",
    "_random",
    "values",
    "columns",
    "groups",
    "criteria",
    "comparable",
    "controller",
    "draws",
    "sampler",
    "disparities",
    "intervals",
    "plots",
    "metrics",
    "fairness",
    "tables",
    "audit",
    "losses",
    "capture",
    "loaders",
    "held_out",
]
WITH_LIGHTNING = [
    "_lightning",
    "estimate",
    "evaluation",
    "evaluated",
    "online",
    "validation",
    "logs",
    "history",
    "settings",
    "training",
    "callback",
    "predictions",
    "monitor",
]
ON_TOP = ["csv_logs", "report", "tradeoff", "demo", "cli", "__main__"]
ORDER = CORE + WITH_LIGHTNING + ON_TOP

PACKAGE = Path(fairbatch_lightning.__file__).parent


def imports(module):
    """Return the modules that a file imports at run time, whether at its top or in a function."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    allowed = {f"fairbatch_lightning.{earlier}" for earlier in ORDER[: ORDER.index(module)]}
    ours = {name for name in imports(module) if name.startswith("fairbatch_lightning.")}
    modules = {name for name in ours if name.split(".")[1] in ORDER and name.count(".") == 1}
    assert modules <= allowed


@pytest.mark.parametrize("module", CORE)
def test_core_works_without_lightning(module):
    assert not [name for name in imports(module) if name.split(".")[0] in ("lightning", "pytorch_lightning")]


def test_files_stay_small():
    lengths = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")}
    assert max(lengths.values()) <= 300, lengths
