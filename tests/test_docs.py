"""Every Python snippet in the README and the documentation runs, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    exec(
        "from lightning import Trainer\nfrom fairbatch_lightning import FairBatch", namespace
    )  # the one line needs them
    for number, code in enumerate(snippets(page)):
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), namespace)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_has_the_two_commands():
    commands = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    assert commands[0].endswith("fairbatch demo")
    assert commands[1].endswith("pytest")
