"""The page: from CSV logs of real runs to pictures that a real browser shows."""

import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from evaluated import Evaluated, fit_with_log, held_out
from helpers import trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor, SignedSteps
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.reports.page import write_report


def test_a_diverged_model_is_not_fair_in_the_report_either(tmp_path):
    class Diverged(Evaluated):
        def forward(self, x):
            return super().forward(x) * (1 if self.training else math.nan)

    run = trainer(FairnessMonitor(groups="group"), logger=CSVLogger(tmp_path, name="", version="run"))
    with pytest.warns(FairBatchWarning, match="240 val samples are NaN"):
        run.validate(Diverged(), held_out(), verbose=False)
    audit = read_run("run", tmp_path / "run" / "metrics.csv").audits["val"]
    assert audit.num_broken == 240
    assert math.isnan(audit.values()["equalized_odds"])
    write_report([read_run("run", tmp_path / "run" / "metrics.csv")], tmp_path / "report")
    assert "undefined" in (tmp_path / "report" / "report.html").read_text()


def browser():
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None and os.environ.get("FAIRBATCH_SKIP_NOTHING"):
        pytest.fail("no browser: install chromium")
    return found or pytest.skip("no browser: install chromium to see the page rendered")


def open_in_browser(page, folder, *options):
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]
    return subprocess.run([*command, *options, page.as_uri()], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_page_needs_no_other_file_and_a_browser_shows_it(tmp_path):
    fairbatch = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    fit_with_log(tmp_path / "runs", "plain", FairnessMonitor(groups="group"))
    fit_with_log(tmp_path / "runs", "fair", fairbatch, FairnessMonitor(groups="group"))
    runs = [read_run(name, path) for name, path in find_logs([tmp_path / "runs"]).items()]
    page = write_report(runs, tmp_path / "report")
    alone = tmp_path / "alone" / "page.html"
    alone.parent.mkdir()
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    # a script that counts the pictures which the browser could decode, and how wide the page became
    count = (
        "<script>onload=()=>{const all=[...document.images];document.title=[all.length,"
        "all.filter(i=>i.naturalWidth>300).length,document.documentElement.scrollWidth].join(' ')}</script>"
    )
    alone.write_text(text.replace("</body>", count + "</body>"))
    seen = open_in_browser(alone, tmp_path, "--dump-dom", "--window-size=1200,900").stdout
    pictures, decoded, width = map(int, re.search(r"<title>(\d+) (\d+) (\d+)</title>", seen).groups())
    expected = 3 + 1 + 3 + 4  # trade-offs; all runs over time; plain: validation, two confusions; fair: and the shares
    assert pictures == decoded == expected
    assert width <= 1200
    assert len(list(page.parent.glob("*.png"))) == pictures
    shot = tmp_path / "shot.png"
    open_in_browser(page, tmp_path, f"--screenshot={shot}", "--window-size=1200,3000")
    pixels = np.asarray(Image.open(shot).convert("L"))
    assert (pixels < 128).mean() > 0.005  # text and lines
    assert (pixels > 250).mean() > 0.5  # on white
