"""`fairbatch demo`."""

import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch

from fairbatch_lightning.cli.demo import comparison
from fairbatch_lightning.fairness import Audit
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.reports.tables import as_text
from fairbatch_lightning.vision.faces import HEADS, LABELS


def test_comparison_shows_every_cell():
    counts = torch.tensor([[[8, 2], [1, 9]], [[5, 5], [0, 10]], [[10, 0], [4, 6]]])
    heads = tuple(sorted(HEADS))
    table = comparison(Audit(counts, LABELS, heads), Audit(counts.flip(0), LABELS, heads))
    lines = as_text(table).splitlines()
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
    assert "fairbatch/gap_max" in (output / "fairbatch" / "metrics.csv").read_text()
    assert "Warning" not in run.stderr
    assert (output / "report.html").exists()
    names = [read_run(name, path).name for name, path in find_logs([output]).items()]
    assert names == ["fairbatch", "plain"]


@pytest.mark.slow
def test_pictures_of_the_documentation_are_drawn_from_it(demo, tmp_path):
    output, _ = demo
    root = Path(__file__).parents[2]
    script, pictures = root / "examples" / "draw_pictures.py", tmp_path / "pictures"
    done = processes.run_script(script, output, pictures, output=tmp_path / "printed")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in pictures.iterdir()} <= {path.name for path in (root / "docs" / "images").iterdir()}
