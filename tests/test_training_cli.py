"""`fairbatch fit` and `fairbatch test`, as a user starts them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faces import write_faces

from fairbatch_lightning.cli import main
from fairbatch_lightning.csv_logs import find_logs, read_run

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--data.image_size=32", "--model.weights=null", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("utkface")
    write_faces(folder, number=400)
    return folder


def fairbatch(folder, *arguments):
    """Run the command; return what it printed."""
    command = [sys.executable, "-m", "fairbatch_lightning", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done


def disparity(printed):
    return re.search(r"equalized odds\s*│\s*([\d.]+)", printed)[1]


@pytest.fixture(scope="module")
def fitted(root, tmp_path_factory):
    """Fine-tune a GoogLeNet on age; return the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("fit")
    options = ["--model.backbone=googlenet", "--data.label=age", *SMALL]
    done = fairbatch(folder, "fit", "--data.root", root, *options)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
class TestFit:
    def test_ends_with_the_table_of_the_best_checkpoint(self, fitted):
        _, done = fitted
        assert "Fairness on test data: 80 samples" in done.stdout
        for text in ("│ >60   │ White", "worst group accuracy", "fairness/test/accuracy/Asian"):
            assert text in done.stdout
        assert "FairBatchWarning" not in done.stderr

    def test_leaves_logs_and_checkpoints(self, fitted):
        folder, _ = fitted
        (log,) = find_logs([folder]).values()
        run = read_run("fit", log)
        assert set(run.audits["test"].label_names) == {"<21", "21-40", "41-60", ">60"}
        names = {path.name for path in folder.rglob("*") if path.is_file()}
        assert {"metrics.csv", "config.yaml", "last.ckpt"} <= names
        assert [name for name in names if name.startswith("events.out.tfevents")]

    def test_checkpoint_is_audited_without_any_setting(self, fitted):
        folder, done = fitted
        (best,) = (path for path in folder.rglob("*.ckpt") if path.name != "last.ckpt")
        tested = fairbatch(folder, "test", "--ckpt_path", best)
        assert tested.returncode == 0, tested.stderr
        assert disparity(tested.stdout) == disparity(done.stdout)
        assert "Downloading" not in tested.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cutting", "plain"])
def test_other_methods(method, root, tmp_path):
    done = fairbatch(tmp_path, "fit", "--data.root", root, "--method", method, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "Fairness on test data" in done.stdout
    assert "gap_max" not in done.stdout + done.stderr


@pytest.mark.slow
def test_example_configuration(root, tmp_path):
    """The file in `examples` fine-tunes either model on either label."""
    example = EXAMPLES / "utkface.yaml"
    done = fairbatch(tmp_path, "fit", "--config", example, "--data.root", root, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "fairbatch/gap_max" in done.stdout + done.stderr


def test_settings_are_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, message in [
        (
            ["fit", "--data.root", "nowhere", "--model.weights=null"],
            "There is no nowhere. UTKFace is at https://susanqq",
        ),
        (["test", "--data.root", "nowhere"], "Expected --ckpt_path with a checkpoint"),
        (["test", "--ckpt_path", "no.ckpt"], "There is no checkpoint no.ckpt"),
        (["fit", "--data.root", ".", "--model.backbone=resnet19", "--model.weights=null"], "but got 'resnet19'"),
    ]:
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_foreign_checkpoint(tmp_path, capsys):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        main(["test", f"--ckpt_path={tmp_path / 'other.ckpt'}"])
    assert "Expected a checkpoint that `fairbatch fit` has made" in capsys.readouterr().err
