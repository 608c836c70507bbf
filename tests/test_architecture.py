"""The rooms: imports go from later to earlier ones, Lightning's private parts are touched in one file only."""

import ast
import re
import subprocess
import sys
import textwrap

import draw_architecture
import pytest
from draw_architecture import PACKAGE, ROOMS, draw, imported, room_of

import fairbatch_lightning

WITHOUT_LIGHTNING = ["_support", "cells", "batches", "measure", "rules", "fairness", "reports"]
FILES = sorted(PACKAGE.rglob("*.py"))
IN_ROOMS = [file for file in FILES if file.parent != PACKAGE]
OF_OTHERS = {
    "loader._iterator": "torch: to end worker processes at once",
    "iterator._shutdown_workers": "torch: the same",
    "loading._shutdown_workers": "torch: the same",
    "loading._persistent_workers": "torch: the same",
    "weights._metadata": "torch: part of every state_dict",
    "metric._update_count": "torchmetrics: what `update` changes",
    "metric._computed": "torchmetrics: the same",
    "metric._copy_state_dict": "torchmetrics: the same",
    "self._replace": "Python: of every NamedTuple",
    "self._plot": "torchmetrics: how every metric is drawn",
    "self._generate_state_key": "Lightning: documented, for callbacks of which there can be several",
}


def name_of(file):
    return file.relative_to(PACKAGE).with_suffix("").as_posix()


def wrong_imports(file):
    room = file.relative_to(draw_architecture.PACKAGE).parts[0]
    allowed = ROOMS[: ROOMS.index(room) + 1]
    return [name for name in imported(file) if room_of(name) is not None and room_of(name) not in allowed]


def test_every_file_is_in_a_room():
    assert {file.relative_to(PACKAGE).parts[0] for file in IN_ROOMS} == set(ROOMS)
    assert {file.name for file in set(FILES) - set(IN_ROOMS)} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("file", IN_ROOMS, ids=name_of)
def test_imports_go_one_way(file):
    assert wrong_imports(file) == []


@pytest.mark.parametrize(
    "line",
    [
        "from fairbatch_lightning.rules.base import UpdateRule",
        "import fairbatch_lightning.callbacks.fairbatch",
        "from fairbatch_lightning import FairBatch",
        "from fairbatch_lightning import reports",
        "from ..rules import criteria",
        "from .. import callbacks",
        "def late():\n    from fairbatch_lightning import SignedSteps",
    ],
)
def test_a_wrong_import_would_be_seen(line, tmp_path, monkeypatch):
    """In whichever way it is written."""
    package = tmp_path / "fairbatch_lightning"
    file = package / "batches" / "new.py"
    file.parent.mkdir(parents=True)
    file.write_text(line)
    monkeypatch.setattr(draw_architecture, "PACKAGE", package)
    assert len(wrong_imports(file)) == 1


def private_names(tree):
    """Return the private names that a file defines: functions, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


TREES = {file: ast.parse(file.read_text()) for file in FILES}
OURS = {name for tree in TREES.values() for name in private_names(tree)}


@pytest.mark.parametrize("file", [file for file in FILES if name_of(file) != "_support/lightning"], ids=name_of)
def test_private_parts_of_lightning_are_touched_in_one_file(file):
    """A private attribute is our own: of the object itself, or of another of a class in the same file."""
    in_file = set(private_names(TREES[file]))
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            known = OURS if owner in ("self", "cls", "super()") else in_file
            assert node.attr in known or f"{owner}.{node.attr}" in OF_OTHERS, f"line {node.lineno}"


def test_the_drawing_is_of_these_imports():
    """If not: python examples/draw_architecture.py docs/images/architecture.svg."""
    assert (PACKAGE.parent / "docs" / "images" / "architecture.svg").read_text() == draw()


def test_every_room_says_what_it_is():
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
        assert text, room
        assert len(text.splitlines()) <= 6, room


def test_rooms_stay_small():
    for folder in {file.parent for file in IN_ROOMS}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= 8, folder


def test_public_names_are_those_for_type_checkers():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    static = {alias.asname: node.module for node in block.body for alias in node.names}
    assert static == fairbatch_lightning._MODULE_OF
    for name in fairbatch_lightning.__all__:
        assert getattr(fairbatch_lightning, name).__name__ == name
    assert set(fairbatch_lightning.__all__) <= set(dir(fairbatch_lightning))
    with pytest.raises(AttributeError, match="Fairbatch"):
        fairbatch_lightning.Fairbatch  # noqa: B018


@pytest.mark.slow
def test_all_but_the_callbacks_works_without_lightning():
    """In a process where Lightning cannot be imported: draw fair batches, measure, update, and judge predictions."""
    modules = [
        ".".join(["fairbatch_lightning", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for file in IN_ROOMS
        if file.relative_to(PACKAGE).parts[0] in WITHOUT_LIGHTNING
    ]
    script = f"""
        import importlib, sys

        class NoLightning:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("lightning", "pytorch_lightning"):
                    raise ImportError(f"{{name}} is not installed")

        sys.meta_path.insert(0, NoLightning())
        for module in {modules!r}:
            importlib.import_module(module)

        import torch
        from fairbatch_lightning import EqualizedOdds, FairSampler, GroupLoss, Measurement, SignedSteps
        from fairbatch_lightning.fairness import EqualizedOddsDisparity

        labels, groups = torch.arange(40) % 2, torch.arange(40) // 2 % 2
        sampler, rule, metric = FairSampler(labels, groups, 8), SignedSteps(alpha=0.1), GroupLoss(2, 2)
        state = rule.start(sampler.index.counts)
        for batch in sampler.batches():
            metric.update(groups[batch].float(), labels[batch], groups[batch])
        measured = Measurement(metric.compute(), metric.counts, sampler.index, EqualizedOdds())
        state = rule.update(state, measured)
        sampler.shares = state.shares
        assert state.shares.tolist() != [[0.5, 0.5], [0.5, 0.5]]
        disparity = EqualizedOddsDisparity(2, 2)
        disparity.update(labels, labels, groups)
        assert disparity.compute() == 0
        try:
            from fairbatch_lightning import FairBatch
        except ImportError as error:
            assert "lightning" in str(error)
        else:
            raise AssertionError("Lightning was there")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_walks_name_things_that_are_there():
    """Every step of a walk in the documentation names a file, and something that is in it."""
    text = (PACKAGE.parent / "docs" / "contributing.md").read_text()
    steps = re.findall(r"^\d+\. (.*?)(?=^\d+\. |^$)", text, re.S | re.M)
    assert len(steps) == 19
    named = [(PACKAGE / file, names) for step in steps for file, names in _files_and_names(step)]
    assert len(named) >= 19
    for file, names in named:
        words = set(re.findall(r"\w+", file.read_text()))
        assert {part for name in names for part in name.split(".")} <= words, file


def _files_and_names(step):
    """Return the files that a step names, each with the names that follow it."""
    found = []
    for word in re.findall(r"`([\w./]+)`", step):
        if word.endswith(".py"):
            found.append((word, []))
        elif found and word != "validation_step":
            found[-1][1].append(word)
    return found
