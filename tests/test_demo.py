"""The demo, the command line and the picture."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ToyModule, loader, trainer
from PIL import Image

from fairbatch_lightning import FairBatch
from fairbatch_lightning.demo import HEADS, Audit, Faces
from fairbatch_lightning.plots import plot_history


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


def test_audit_counts_right():
    class Constant(torch.nn.Module):
        def forward(self, images):
            return torch.tensor([0.0, 1.0]).repeat(len(images), 1)

    faces = Faces(500, seed=0)
    audit = Audit.of(Constant(), faces)
    assert audit.accuracy == pytest.approx(np.mean(faces.targets))
    assert audit.disparity == 0
    assert audit.errors.tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.slow
def test_demo_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "fairbatch_lightning", "demo", "--epochs", "2", "--faces", "300"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "equalized odds disparity" in run.stdout
    assert "error of smiling, square heads" in run.stdout
    assert "fairbatch/gap_max" in run.stdout + run.stderr
    picture = Image.open(tmp_path / "fairbatch_demo.png")
    assert picture.width > 1000


def test_picture_shows_something(tmp_path):
    callback = FairBatch(groups="group", alpha=0.05)
    with pytest.raises(ValueError, match="trained for at least one update"):
        plot_history(callback, tmp_path / "empty.png")
    trainer(callback).fit(ToyModule(), loader())
    plot_history(callback, tmp_path / "shares.png")
    pixels = np.asarray(Image.open(tmp_path / "shares.png").convert("RGB"))
    for colour in ((0, 114, 178), (213, 94, 0), (0, 158, 115)):  # one line per group
        assert (np.abs(pixels.astype(int) - colour).sum(2) < 10).sum() > 200


def test_command_line_says_what_it_can():
    run = subprocess.run([sys.executable, "-m", "fairbatch_lightning", "--help"], capture_output=True, text=True)
    assert "demo" in run.stdout
