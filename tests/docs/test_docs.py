"""Every block of Python, YAML and shell in the README and the documentation runs, page by page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from faces import write_faces
from helpers import ToyModule, needed
from lightning.pytorch.cli import LightningCLI
from torchvision import models

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README_COMMANDS = "python3 -m venv"  # .ci/run runs them


def blocks(page):
    """Return the language and code of every block, in order."""
    found = re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL)
    return [(language, code) for language, code in found if not code.startswith(README_COMMANDS)]


def run_shell(code):
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env={**os.environ, "PATH": beside_python},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def run_yaml(code):
    """Let LightningCLI make the callbacks that a file names."""
    Path("config.yaml").write_text(code)
    made = LightningCLI(ToyModule, args=["--config", "config.yaml"], run=False, seed_everything_default=False)
    wanted = {callback["class_path"].rsplit(".", 1)[-1] for callback in yaml.safe_load(code)["trainer"]["callbacks"]}
    assert wanted <= {type(callback).__name__ for callback in made.trainer.callbacks}


def provide_utkface(folder, monkeypatch):
    """Put a folder of images where the documentation has UTKFace, and weights where torch keeps downloaded ones."""
    write_faces(folder / "UTKFace", number=600, seed=1)
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    weights = folder / "torch" / "hub" / "checkpoints"
    weights.mkdir(parents=True)
    torch.save(models.resnet18().state_dict(), weights / Path(models.ResNet18_Weights.DEFAULT.url).name)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    """All but those for Hugging Face's models, which have a test of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI looks at it
    if "UTKFace(" in page.read_text() or '"UTKFace"' in page.read_text():
        provide_utkface(tmp_path, monkeypatch)
    namespace = {"__name__": "snippet"}
    exec(
        "from lightning import Trainer\nfrom fairbatch_lightning import FairBatch", namespace
    )  # the one line needs them
    for number, (language, code) in enumerate(blocks(page)):
        if "transformers" in code:
            continue
        if language == "python":
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
        elif language == "bash":
            run_shell(code)
        elif language == "yaml":
            run_yaml(code)
        else:
            pytest.fail(f"{page.name}: nobody runs a block of {language or 'no language'}: {code[:100]}")


@pytest.mark.slow
def test_blocks_with_hugging_faces_models_run(tmp_path, monkeypatch):
    needed("transformers")
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / "docs" / "recipes.md")
    (block,) = (code for _, code in found if "transformers" in code)
    namespace = {"__name__": "snippet"}
    for code in (found[0][1], block):
        exec(compile(code, "recipes.md", "exec"), namespace)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]+)?\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor[1:] in anchors, f"{page.name} links to {target}{anchor}"


def test_readme_has_the_two_commands():
    commands = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    assert commands[0].endswith("fairbatch demo")
    assert commands[1].endswith("pytest -n auto")
