"""The demo."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import torch

from fairbatch_lightning import Audit
from fairbatch_lightning.csv_logs import find_logs, read_run
from fairbatch_lightning.demo import HEADS, LABELS, Faces, comparison


def test_faces_are_biased_and_repeatable():
    faces = Faces(3000, seed=0)
    assert faces.targets == Faces(3000, seed=0).targets
    rates = {head: np.mean([y for y, h in zip(faces.targets, faces.head, strict=True) if h == head]) for head in HEADS}
    assert rates["round"] > 0.8
    assert rates["square"] < 0.2
    images = faces.draw(slice(0, 50), seed=1)
    assert images.shape == (50, 3, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(images, faces.draw(slice(0, 50), seed=1))


def test_mouths_tell_smiles():
    """Below the middle the mouth's corners of a smile are higher: the drawing shows the label."""
    faces = Faces(2000, seed=0)
    images, labels = faces.draw(slice(None), seed=0).mean(1), torch.tensor(faces.targets)
    difference = images[labels == 1].mean(0) - images[labels == 0].mean(0)
    corner, middle = difference[18:21, 11:13].mean(), difference[18:21, 15:17].mean()
    assert corner < middle


def test_still_faces_do_not_move():
    still, moving = Faces(5, seed=0, still=True), Faces(5, seed=0)
    assert torch.equal(still[3][0], still[3][0])
    assert not torch.equal(moving[3][0], moving[3][0])
    assert still.targets == moving.targets


def test_comparison_shows_every_cell():
    counts = torch.tensor([[[8, 2], [1, 9]], [[5, 5], [0, 10]], [[10, 0], [4, 6]]])
    heads = tuple(sorted(HEADS))
    lines = comparison(Audit(counts, LABELS, heads), Audit(counts.flip(0), LABELS, heads)).splitlines()
    assert lines[1].split() == ["accuracy", "0.800", "0.800"]
    assert lines[3].split() == ["equalized", "odds", "disparity", "0.267", "0.267"]
    assert f"error of smiling, {heads[2]} heads" in lines[-1]
    assert lines[-1].split()[-2:] == ["0.400", "0.100"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run a short demo; return its output and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "fairbatch_lightning", "demo", "--epochs", "2", "--faces", "200"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return folder / "fairbatch_demo", run


@pytest.mark.slow
def test_demo_runs_as_a_module(demo):
    output, run = demo
    assert "equalized odds disparity" in run.stdout
    assert "error of smiling, square heads" in run.stdout
    assert "fairbatch/gap_max" in run.stdout + run.stderr
    assert "Warning" not in run.stderr
    assert (output / "report.html").exists()
    names = [read_run(name, path).name for name, path in find_logs([output]).items()]
    assert names == ["fairbatch", "plain"]


@pytest.mark.slow
def test_pictures_of_the_documentation_are_drawn_from_it(demo, tmp_path):
    output, _ = demo
    root = Path(__file__).parent.parent
    script, pictures = root / "examples" / "draw_pictures.py", tmp_path / "pictures"
    done = processes.run_script(script, output, pictures, output=tmp_path / "printed")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in pictures.iterdir()} <= {path.name for path in (root / "docs" / "images").iterdir()}
