"""`fairbatch fit` and `fairbatch test`, as a user starts them."""

import csv
import re
from pathlib import Path
from urllib.error import URLError

import processes
import pytest
import torch
import yaml
from faces import write_faces

from fairbatch_lightning import EqualOpportunity, FairBatch, SignedSteps
from fairbatch_lightning.cli.fit import FairCLI
from fairbatch_lightning.cli.main import main
from fairbatch_lightning.reports.log_format import read_run
from fairbatch_lightning.vision import VisionClassifier

EXAMPLES = Path(__file__).parents[2] / "examples"


SMALL = ["--data.image_size=32", "--model.weights=null", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("utkface")
    write_faces(folder, number=400)
    return folder


def fairbatch(folder, *arguments):
    """Run the command as a user does; return what it printed."""
    done = processes.run_script("fairbatch_lightning", *arguments, output=folder / "printed", folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def counts(folder):
    """Return the counts of predictions in the last test of a folder's newest log."""
    path = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    return read_run("run", path).audits["test"].confusion


@pytest.fixture(scope="module")
def fitted(root, tmp_path_factory):
    """Fine-tune a GoogLeNet on gender; return the folder, what was printed, and how it did in the test."""
    folder = tmp_path_factory.mktemp("fit")
    options = ["--model.backbone=googlenet", "--data.seed=3", "--data.batch_size=8", "--model.lr=0.002"]
    options += ["--trainer.val_check_interval=0.25"]  # the best checkpoint is not the last then
    printed = fairbatch(folder, "fit", "--data.root", root, *SMALL, *options, "--trainer.max_epochs=2")
    return folder, printed, counts(folder)


def best_of(folder):
    return next(path for path in folder.rglob("*.ckpt") if path.name != "last.ckpt")


@pytest.mark.slow
class TestFit:
    def test_ends_with_the_table_of_the_best_checkpoint(self, fitted):
        _, printed, _ = fitted
        assert "Fairness on test data: 80 samples" in printed
        for text in (r"female +White +\d", "worst group accuracy", "accuracy of Asian"):
            assert re.search(text, printed)

    def test_leaves_logs_and_checkpoints(self, fitted):
        folder, _, confusion = fitted
        assert confusion.sum((0, 1)).min() > 0, "a constant model would not tell right from wrong below"
        names = {path.name for path in folder.rglob("*") if path.is_file()}
        assert {"metrics.csv", "config.yaml", "last.ckpt"} <= names
        assert [name for name in names if name.startswith("events.out.tfevents")]

    def test_checkpoint_is_audited_without_any_setting(self, fitted, tmp_path):
        folder, _, confusion = fitted
        printed = fairbatch(tmp_path, "test", "--ckpt_path", best_of(folder))
        assert torch.equal(counts(tmp_path), confusion)
        assert "Downloading" not in printed

    def test_validation_faces_can_be_looked_at_as_well(self, fitted, tmp_path):
        folder, _, _ = fitted
        options = ["--ckpt_path", best_of(folder), "--trainer.default_root_dir", tmp_path / "elsewhere"]
        printed = fairbatch(tmp_path, "validate", *options)
        assert "val_accuracy" in printed
        assert (tmp_path / "elsewhere" / "csv" / "version_0" / "metrics.csv").is_file()
        assert not (tmp_path / "fairbatch_logs").exists()

    def test_options_and_files_overrule_the_checkpoint(self, fitted, tmp_path):
        folder, _, confusion = fitted
        (tmp_path / "my.yaml").write_text("data:\n  group: age\n")
        printed = fairbatch(tmp_path, "test", "--config", "my.yaml", "--ckpt_path", best_of(folder))
        assert "accuracy of >60" in printed
        assert torch.equal(counts(tmp_path).sum(0), confusion.sum(0))  # the same faces and predictions

    def test_saved_configuration_can_be_used_again(self, fitted, tmp_path):
        folder, _, _ = fitted
        saved = next(folder.rglob("config.yaml"))
        options = ["--trainer.max_epochs=1", "--fairbatch.update_every=2", "--fairbatch.rule=Adaptive"]
        options += ["--fairbatch.rule.init_args.tolerance=0.03"]
        fairbatch(tmp_path, "fit", "--config", saved, *options)
        assert "fairbatch/gap_max" in next(tmp_path.rglob("metrics.csv")).read_text()
        first, again = (yaml.safe_load(next(place.rglob("config.yaml")).read_text()) for place in (folder, tmp_path))
        assert first["fairbatch"]["rule"] == "adaptive"
        assert again["fairbatch"]["rule"]["init_args"] == {"tolerance": 0.03}
        assert {**again["fairbatch"], "rule": 0, "update_every": 0} == {
            **first["fairbatch"],
            "rule": 0,
            "update_every": 0,
        }
        assert again["model"] == first["model"]

    def test_checkpoint_in_python(self, fitted, root):
        folder, _, _ = fitted
        model = VisionClassifier.load_from_checkpoint(best_of(folder), map_location="cpu")
        assert model.hparams["backbone"] == "googlenet"
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 2)

    def test_resumes(self, fitted, tmp_path):
        folder, _, _ = fitted
        step = torch.load(best_of(folder), weights_only=True)["global_step"]
        assert step < 2 * 35, "there is nothing left to train"
        fairbatch(tmp_path, "fit", "--ckpt_path", best_of(folder), "--trainer.max_epochs=2")
        with next(tmp_path.rglob("metrics.csv")).open() as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        assert step - 1 <= min(steps)  # Lightning logs the first batch after a validation at the step of the last one
        assert max(steps) >= 2 * 35 - 1  # counted from 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cutting", "plain"])
def test_other_methods(method, root, tmp_path):
    printed = fairbatch(tmp_path, "fit", "--data.root", root, "--method", method, *SMALL)
    assert "Fairness on test data" in printed
    assert "gap_max" not in next(tmp_path.rglob("metrics.csv")).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--model.backbone=googlenet", "--data.label=age", "--data.age_cuts=[30]"]])
def test_example_configuration(options, root, tmp_path):
    """The file in `examples` fine-tunes either model on either label."""
    example = EXAMPLES / "utkface.yaml"
    few = ["--fairbatch.update_every=2"]  # so few faces are 4 batches
    printed = fairbatch(tmp_path, "fit", "--config", example, "--data.root", root, *SMALL, *few, *options)
    assert "fairbatch/gap_max" in next(tmp_path.rglob("metrics.csv")).read_text()
    assert "Fairness on test data" in printed


def test_a_quick_try_leaves_the_folder_as_it_is(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model:\n  weights: null\n")
    options = ["--trainer.fast_dev_run=true", "--trainer.logger=false", "--fairbatch.estimate=online"]
    options += ["--config", "config.yaml", "--data.root", str(root), "--fairbatch.update_every=1"]
    main(["fit", *options, *SMALL])
    assert (tmp_path / "config.yaml").read_text() == "model:\n  weights: null\n"
    assert "Fairness on test data" in capsys.readouterr().out


def settings_of(capsys, *options):
    """Return FairBatch's settings as the command understands them."""
    with pytest.raises(SystemExit):
        main(["fit", "--data.root=x", *options, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)["fairbatch"]


class TestSettings:
    def test_nothing_is_set_that_a_user_of_the_callback_would_not_get(self, capsys):
        found = settings_of(capsys)
        assert (found["criterion"], found["rule"], found["update_every"]) == ("equalized_odds", "adaptive", "auto")
        assert found["estimate"] is None

    def test_parts_of_a_rule_or_criterion_can_be_set(self, capsys):
        options = ["--fairbatch.rule=Adaptive", "--fairbatch.rule.init_args.tolerance=0.1"]
        options += ["--fairbatch.criterion=EqualizedOdds", "--fairbatch.criterion.init_args.min_samples=5"]
        found = settings_of(capsys, *options)
        assert found["rule"] == {"class_path": "fairbatch_lightning.Adaptive", "init_args": {"tolerance": 0.1}}
        assert found["criterion"]["init_args"] == {"min_samples": 5}

    def test_others_can_be_chosen_by_name_or_class(self, capsys):
        options = ["--fairbatch.criterion", "equal_opportunity", "--fairbatch.rule", "paper"]
        found = settings_of(capsys, *options)
        assert (found["criterion"], found["rule"]) == ("equal_opportunity", "paper")
        options = ["--fairbatch.criterion=EqualOpportunity", "--fairbatch.criterion.init_args.positive_label=female"]
        options += ["--fairbatch.rule=fairbatch_lightning.WorstCase", "--fairbatch.rule.init_args.radius=0.2"]
        found = settings_of(capsys, *options, "--fairbatch.update_every=epoch")
        assert found["criterion"]["init_args"] == {"positive_label": "female", "min_samples": 1}
        assert found["rule"]["class_path"] == "fairbatch_lightning.WorstCase"
        assert found["rule"]["init_args"]["radius"] == 0.2
        assert found["update_every"] == "epoch"

    def test_files_and_options_after_them(self, capsys, tmp_path):
        file = tmp_path / "my.yaml"
        file.write_text(
            "fairbatch:\n  criterion: demographic_parity\n  rule:\n    class_path: SignedSteps\n"
            "    init_args: {alpha: 0.7, pull: 0.1}\n"
        )
        found = settings_of(capsys, "--config", str(file), "--fairbatch.rule.init_args.pull=0.2")
        assert found["criterion"] == "demographic_parity"
        assert (found["rule"]["init_args"]["alpha"], found["rule"]["init_args"]["pull"]) == (0.7, 0.2)

    def test_they_reach_the_callbacks(self, root, tmp_path, monkeypatch):
        """Also those of a configuration that was printed, and of callbacks of the user's own."""
        seen = []
        monkeypatch.setattr(FairCLI, "after_fit", lambda cli: seen.append(cli.trainer.callbacks))
        options = [*SMALL, "--trainer.fast_dev_run=true", "--trainer.logger=false", f"--data.root={root}"]
        options += ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
        chosen = ["--fairbatch.rule=SignedSteps", "--fairbatch.rule.init_args.alpha=0.3"]
        main(["fit", *options, *chosen, "--fairbatch.criterion=equal_opportunity"])
        kinds = [type(callback).__name__ for callback in seen[0]]
        assert kinds.index("EarlyStopping") < kinds.index("FairBatch") < kinds.index("FairnessMonitor")
        assert "Cutting" not in kinds
        (fairbatch,) = (callback for callback in seen[0] if isinstance(callback, FairBatch))
        assert fairbatch._rule == SignedSteps(alpha=0.3)
        assert type(fairbatch._criterion) is EqualOpportunity
        main(["fit", *options, "--method=cutting"])
        assert "Cutting" in [type(callback).__name__ for callback in seen[1]]
        assert not [callback for callback in seen[1] if isinstance(callback, FairBatch)]


def test_a_file_that_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("a: 1")
    with pytest.raises(SystemExit):
        main(["test", "--ckpt_path", str(tmp_path / "my.yaml")])
    assert "Expected a checkpoint that `fairbatch fit` has made but got" in capsys.readouterr().err


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Return the addresses from which weights were to be downloaded, on a machine that has none and is offline."""
    asked = []

    def download(url, *_, **__):
        asked.append(url)
        raise URLError("offline")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return asked


class TestOrder:
    @pytest.mark.parametrize(
        ("file", "message"),
        [
            (None, r"There is no /.*data\. UTKFace is at"),
            ("notes.txt", "Found no images in"),
            ("me.jpg", "Found 1 images but none"),
        ],
    )
    def test_a_folder_without_faces_is_refused_before_weights_are_downloaded(
        self, file, message, tmp_path, capsys, downloads
    ):
        if file is not None:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / file).write_text("")
        with pytest.raises(SystemExit) as stopped:
            main(["fit", f"--data.root={tmp_path / 'data'}"])
        said = capsys.readouterr().err
        assert stopped.value.code == 2
        assert downloads == []
        assert re.search(f"^fairbatch fit: {message}.*$", said.splitlines()[-1])
        assert len([line for line in said.splitlines() if not line.startswith("Seed set")]) == 1

    def test_then_weights_are_downloaded(self, root, capsys, downloads):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", f"--data.root={root}"])
        assert stopped.value.code == 1
        assert len(downloads) == 1
        assert "Could not download the weights" in capsys.readouterr().err


def test_settings_are_checked(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, message in [
        (
            ["fit", "--data.root", "nowhere", "--model.weights=null"],
            "nowhere. UTKFace is at https://susanqq",
        ),
        (["test", "--data.root", "nowhere"], "Expected --ckpt_path with a checkpoint"),
        (["test", "--ckpt_path", "no.ckpt"], "There is no checkpoint no.ckpt"),
        (["fit", "--data.root", str(root), "--model.backbone=resnet19", "--model.weights=null"], "but got 'resnet19'"),
    ]:
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_foreign_checkpoint(tmp_path, capsys):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        main(["test", f"--ckpt_path={tmp_path / 'other.ckpt'}"])
    assert "Expected a checkpoint that `fairbatch fit` has made" in capsys.readouterr().err
