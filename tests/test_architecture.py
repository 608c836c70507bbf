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
    "passes",
    "sampler",
    "disparities",
    "intervals",
    "plots",
    "metrics",
    "fairness",
    "tables",
    "audit",
    "losses",
    "importance",
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
    "baselines.base",
    "baselines.loss_changing",
    "baselines.resampling",
    "baselines.reweighing",
    "baselines.robust",
    "baselines.constraints",
    "baselines.adversarial",
    "baselines",
    "predictions",
    "monitor",
]
VISION = [
    "vision.images",
    "vision.utkface",
    "vision.datamodule",
    "vision.backbones",
    "vision.classifier",
    "vision",
]
ON_TOP = ["csv_logs", "report", "tradeoff", "demo", "training_cli", "cli", "__main__"]
ORDER = CORE + WITH_LIGHTNING + VISION + ON_TOP

PACKAGE = Path(fairbatch_lightning.__file__).parent


def file_of(module):
    path = PACKAGE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module):
    """Return the modules that a file imports at run time, whether at its top or in a function."""
    tree = ast.parse(file_of(module).read_text())
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
    assert {file_of(module) for module in ORDER} == set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"}


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    allowed = {f"fairbatch_lightning.{earlier}" for earlier in ORDER[: ORDER.index(module)]}
    ours = {name for name in imports(module) if name.startswith("fairbatch_lightning.")}
    modules = {name for name in ours if name.removeprefix("fairbatch_lightning.") in ORDER}
    assert modules <= allowed


@pytest.mark.parametrize("module", CORE)
def test_core_works_without_lightning(module):
    assert not [name for name in imports(module) if name.split(".")[0] in ("lightning", "pytorch_lightning")]


def test_files_stay_small():
    lengths = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lengths.values()) <= 300, lengths
