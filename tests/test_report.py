"""`fairbatch report` and `fairbatch tradeoff`: from CSV logs of real runs to pictures that a real browser shows."""

import csv
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import GROUPS, Toy, ToyModule, loader, trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch.utils.data import DataLoader

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor
from fairbatch_lightning.cli import main
from fairbatch_lightning.csv_logs import find_logs, read_run
from fairbatch_lightning.logs import log_name, parts_of
from fairbatch_lightning.plots import SharesOverTime, TradeOffPoint, pareto_front, shares_figure, tradeoff_figure
from fairbatch_lightning.report import write_report
from fairbatch_lightning.tradeoff import sweep, training_command, write_tradeoff


class Evaluated(ToyModule):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    test_step = validation_step


def fit(folder, name, *callbacks, test=True, validation=None, **options):
    """Train with a CSV log, and return where it is."""
    run = trainer(*callbacks, logger=CSVLogger(folder, name="", version=name), log_every_n_steps=1, **options)
    model = Evaluated()
    run.fit(model, loader(), validation or DataLoader(Toy(seed=1), batch_size=33))
    if test:
        run.test(model, DataLoader(Toy(seed=2), batch_size=33), verbose=False)
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, and the callbacks of the second."""
    folder = tmp_path_factory.mktemp("runs")
    fit(folder, "plain", FairnessMonitor(groups="group"))
    callbacks = FairBatch(groups="group", alpha=0.05), FairnessMonitor(groups="group")
    fit(folder, "fair", *callbacks)
    return folder, *callbacks


def test_log_is_read_back_as_it_was(runs):
    folder, fairbatch, monitor = runs
    run = read_run("fair", folder / "fair" / "metrics.csv")
    assert list(run.shares.label_names) == ["0", "1"]
    assert list(run.shares.group_names) == list(GROUPS)
    history = fairbatch.history
    shares = torch.stack([history[0].shares_before, *(record.shares_after for record in history)])
    torch.testing.assert_close(run.shares.shares, shares.float())
    torch.testing.assert_close(run.shares.losses, torch.stack([record.losses for record in history]).float())
    torch.testing.assert_close(run.shares.gaps, torch.stack([record.gaps for record in history]).float())
    for stage in ("val", "test"):
        assert torch.equal(run.audits[stage].confusion, monitor.audits[stage].confusion)
        assert run.audits[stage].values() == monitor.audits[stage].values()
    curve = run.curves["val"]
    measured = [record for record in monitor.history if record.stage == "val"]
    assert curve.times == [0, 1, 2]
    assert curve.values["equalized_odds"] == pytest.approx([r.values["equalized_odds"] for r in measured])
    assert curve.by_group["b"] == pytest.approx([r.group_accuracies["b"] for r in measured])
    assert list(run.finals()) == ["test"]


def test_what_was_not_logged_is_missing(runs, tmp_path):
    folder, *_ = runs
    assert read_run("plain", folder / "plain" / "metrics.csv").shares is None
    only = fit(tmp_path, "only", FairBatch(groups="group"), test=False)
    run = read_run("only", only / "metrics.csv")
    assert run.shares.shares.shape == (4, 2, 3)
    assert not run.audits
    assert not run.finals()
    assert write_report([run], tmp_path / "report").exists()


def test_names_with_slashes_and_numbers_and_a_positive_label_of_ones_own(tmp_path):
    name = log_name("fairness", "val", "count", "Asian/Pacific", "0", "1")
    assert parts_of(name) == ("fairness", "val", "count", "Asian/Pacific", "0", "1")
    assert parts_of(log_name("%2F", "50%", "a/b")) == ("%2F", "50%", "a/b")
    data = Toy(seed=1)
    data.region = [["10", "9", "Asian/Pacific"][z] for z in data.group_ids]
    monitor = FairnessMonitor(groups="region", positive_label=0)
    place = fit(tmp_path, "run", monitor, test=False, validation=DataLoader(data, batch_size=50))
    audit = read_run("run", place / "metrics.csv").audits["val"]
    assert audit.group_names == ("9", "10", "Asian/Pacific")
    assert audit.positive == 0
    expected = monitor.audits["val"]
    order = [expected.group_names.index(name) for name in audit.group_names]
    assert torch.equal(audit.confusion, expected.confusion[order])
    assert audit.values() == expected.values()


def test_several_validation_loaders_and_validations(tmp_path):
    monitor = FairnessMonitor(groups="group")
    validation = [DataLoader(Toy(seed=seed), batch_size=33) for seed in (1, 2)]
    place = fit(tmp_path, "run", monitor, test=False, validation=validation, val_check_interval=6)
    run = read_run("run", place / "metrics.csv")
    assert list(run.audits) == ["val_0", "val_1"]
    for stage in run.audits:
        assert torch.equal(run.audits[stage].confusion, monitor.audits[stage].confusion)
    assert run.curves["val_1"].times == [5, 11, 17, 23, 29, 35]
    assert run.curves["val_1"].xlabel == "step"
    write_report([run], tmp_path / "report")
    assert (tmp_path / "report" / "run0_val_1_confusion.png").exists()


def test_logs_are_found_and_told_apart(runs, tmp_path, monkeypatch):
    folder, *_ = runs
    assert list(find_logs([folder])) == ["fair", "plain"]
    assert list(find_logs([folder / "plain", folder / "fair"])) == ["plain", "fair"]
    assert list(find_logs([folder / "plain", folder / "plain"])) == ["plain"]
    monkeypatch.chdir(folder / "plain")
    assert list(find_logs([Path(".")])) == ["plain"]
    with pytest.raises(FileNotFoundError, match=r"found no metrics.csv there. Train with Trainer\(logger=CSVLogger"):
        find_logs([tmp_path])


def test_a_diverged_model_is_not_fair_in_the_report_either(tmp_path):
    class Diverged(Evaluated):
        def forward(self, x):
            return super().forward(x) * (1 if self.training else math.nan)

    run = trainer(FairnessMonitor(groups="group"), logger=CSVLogger(tmp_path, name="", version="run"))
    with pytest.warns(FairBatchWarning, match="240 val samples are NaN"):
        run.validate(Diverged(), DataLoader(Toy(seed=1), batch_size=33), verbose=False)
    audit = read_run("run", tmp_path / "run" / "metrics.csv").audits["val"]
    assert audit.num_broken == 240
    assert math.isnan(audit.values()["equalized_odds"])
    write_report([read_run("run", tmp_path / "run" / "metrics.csv")], tmp_path / "report")
    assert "undefined" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.slow
def test_columns_of_others_do_no_harm(tmp_path):
    class Chatty(Evaluated):
        def on_validation_epoch_end(self):
            for name in ("fairness", "fairness/gap", "fairness/val", "fairbatch", "fairness_x/y/z"):
                self.log(name, 1.0)

    monitors = FairnessMonitor(groups="group"), FairnessMonitor(groups="group", name="again")
    logger = CSVLogger(tmp_path, name="", version="run", prefix="exp-1")
    run = trainer(FairBatch(groups="group"), *monitors, logger=logger)
    run.fit(Chatty(), loader(), DataLoader(Toy(seed=1), batch_size=33))
    path = tmp_path / "run" / "metrics.csv"
    rows = list(csv.DictReader(path.open()))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "comment", "exp-1-fairness/val/note"])
        writer.writeheader()
        writer.writerows({**row, "comment": "True", "exp-1-fairness/val/note": "words"} for row in rows)
    read = read_run("run", path)
    assert list(read.audits) == ["again/val", "val"]
    assert torch.equal(read.audits["again/val"].confusion, monitors[1].audits["val"].confusion)
    assert read.shares.shares.shape == (4, 2, 3)
    assert len(read.curves["val"].times) == 3
    write_report([read], tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert "again/val, 240" in text


def test_report_of_something_else_is_refused(tmp_path, capsys):
    place = fit(tmp_path, "run", test=False)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(place), "--output", str(tmp_path / "report")])
    assert stopped.value.code == 1
    assert "neither `fairbatch/...` nor `fairness/...` columns" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nowhere")])
    assert "found no metrics.csv" in capsys.readouterr().err


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
def test_page_needs_no_other_file_and_a_browser_shows_it(runs, tmp_path, capsys):
    folder, *_ = runs
    main(["report", str(folder), "--output", str(tmp_path / "report")])
    page = Path(capsys.readouterr().out.strip())
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


def test_lines_can_be_told_apart_without_colour():
    """28 groups: no two lines have the same colour and style, nor the same marker and style."""
    many = [f"group {number}" for number in range(28)]
    figure = shares_figure(
        SharesOverTime(["0", "1"], many, torch.rand(3, 2, 28), torch.rand(2, 2, 28), torch.rand(2, 2))
    )
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 28
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 28


def test_pictures_of_many_labels_fit_on_a_page():
    labels = [str(number) for number in range(10)]
    drawn = SharesOverTime(labels, ["a", "b"], torch.rand(3, 10, 2), torch.rand(2, 10, 2), torch.rand(2, 10))
    figure = shares_figure(drawn)
    assert figure.get_size_inches()[0] <= 16
    hundred = SharesOverTime(range(100), ["a", "b"], torch.rand(3, 100, 2), torch.rand(2, 100, 2), torch.rand(2, 100))
    assert len(shares_figure(hundred).axes) == 12 + 12 + 12
    titles = [axes.get_title() for axes in figure.axes]
    assert all(f"shares of label {label}" in titles and f"losses of label {label}" in titles for label in labels)


def test_pareto_front_against_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(50):
        numbers = rng.integers(5, size=(8, 2)) / 5
        points = [TradeOffPoint(str(i), accuracy, disparity) for i, (accuracy, disparity) in enumerate(numbers)]
        best = {
            (p.accuracy, p.disparity)
            for p in points
            if not any(
                (q.accuracy >= p.accuracy and q.disparity < p.disparity)
                or (q.accuracy > p.accuracy and q.disparity <= p.disparity)
                for q in points
            )
        }
        assert {(p.accuracy, p.disparity) for p in pareto_front(points)} == best


def test_undefined_points_are_left_out_of_the_curve():
    figure = tradeoff_figure([TradeOffPoint("a", 0.9, 0.1), TradeOffPoint("b", 0.8, math.nan)], "equalized odds")
    assert [text.get_text() for text in figure.axes[0].texts] == ["a"]
    assert [p.name for p in pareto_front([TradeOffPoint("b", 0.8, math.nan), TradeOffPoint("a", 0.9, 0.1)])] == ["a"]


# ---- fairbatch tradeoff ---------------------------------------------------------------------------------------------


def train(threshold, seed, log):
    callbacks = FairBatch(groups="group", alpha=0.1, threshold=threshold, seed=seed), FairnessMonitor(groups="group")
    fit(log.parent, log.name, *callbacks)


def test_sweep_trains_each_once_and_goes_on_where_it_stopped(tmp_path, capsys):
    trained = []

    def counting(threshold, seed, log):
        trained.append((threshold, seed))
        if len(trained) == 3:
            log.mkdir(parents=True)
            raise KeyboardInterrupt
        train(threshold, seed, log)

    with pytest.raises(KeyboardInterrupt):
        sweep(counting, "ours", [0.0, math.inf], 2, "equalized_odds", tmp_path)
    points = sweep(counting, "ours", [0.0, math.inf], 2, "equalized_odds", tmp_path)
    assert trained == [(0.0, 0), (0.0, 1), (math.inf, 0), (math.inf, 0), (math.inf, 1)]
    assert [point.name for point in points] == ["0", "inf"]
    values = [
        read_run("x", next((tmp_path / "threshold_0" / f"seed_{seed}").rglob("metrics.csv"))).finals()["test"].values()
        for seed in range(2)
    ]
    assert points[0].accuracy == pytest.approx(np.mean([v["accuracy"] for v in values]))
    assert points[0].disparity == pytest.approx(np.mean([v["equalized_odds"] for v in values]))
    assert points[0].disparity_interval == pytest.approx(tuple(sorted(v["equalized_odds"] for v in values)))
    table = write_tradeoff(points, "equalized_odds", tmp_path / "out").splitlines()
    assert [line.split()[0] for line in table] == ["threshold", "0", "inf"]
    rows = list(csv.DictReader((tmp_path / "out" / "tradeoff.csv").open()))
    assert float(rows[1]["accuracy"]) == points[1].accuracy
    assert Image.open(tmp_path / "out" / "tradeoff.png").width > 500


def test_an_infinite_threshold_is_plain_training(tmp_path):
    train(math.inf, 0, tmp_path / "run")
    shares = read_run("run", tmp_path / "run" / "metrics.csv").shares.shares
    assert torch.equal(shares[0], shares[-1])


def test_training_commands_that_cannot_work_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"to have \{threshold\} and \{log\} in it"):
        training_command("python train.py")
    with pytest.raises(ValueError, match=r"to have \{seed\} in it"):
        training_command("python train.py {threshold} {log}", seeds=2)
    fails = training_command(f"{sys.executable} -c 'raise SystemExit(3)' {{threshold}} {{log}}")
    with pytest.raises(RuntimeError, match="failed with exit code 3"):
        fails(0.0, 0, tmp_path)

    def silent(threshold, seed, log):
        fit(log.parent, log.name, test=False)

    with pytest.raises(ValueError, match=r"but found 0. Use Trainer\(callbacks=\[FairnessMonitor"):
        sweep(silent, "ours", [0.0], 1, "equalized_odds", tmp_path / "silent")
    sweep(train, "ours", [0.0], 1, "equalized_odds", tmp_path / "silent")  # is trained again
    with pytest.raises(ValueError, match="runs of the same training but it has those of 'ours', not of 'theirs'"):
        sweep(train, "theirs", [0.0], 1, "equalized_odds", tmp_path / "silent")
    with pytest.raises(ValueError, match="at least one seed but got 0"):
        sweep(train, "ours", [0.0], 0, "equalized_odds", tmp_path / "silent")


def test_braces_in_a_command_are_left_alone(tmp_path):
    out = tmp_path / "out.txt"
    code = f"import sys; open({str(out)!r}, 'w').write(' '.join(sys.argv[1:]))"
    training_command(f'python -c "{code}" {{"a": 1}} {{threshold}} {{}} {{log}}')(0.5, 0, Path("x"))
    assert out.read_text() == "{a: 1} 0.5 {} x"


def test_a_killed_run_is_trained_anew_in_a_clean_place(tmp_path):
    """Also with a logger that makes a new directory each time."""

    def versioned(threshold, seed, log):
        run = trainer(FairnessMonitor(groups="group"), logger=CSVLogger(log), log_every_n_steps=1, max_epochs=1)
        run.test(Evaluated(), DataLoader(Toy(seed=2), batch_size=33), verbose=False)
        if len(list(log.rglob("metrics.csv"))) == 1 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(versioned, "ours", [0.0], 1, "equalized_odds", tmp_path / "out")
    assert len(sweep(versioned, "ours", [0.0], 1, "equalized_odds", tmp_path / "out")) == 1


@pytest.mark.slow
def test_tradeoff_of_the_demo(tmp_path, capsys):
    options = ["--thresholds", "inf", "--epochs", "1", "--faces", "100", "--output", str(tmp_path)]
    main(["tradeoff", *options])
    assert "inf" in capsys.readouterr().out
    assert (tmp_path / "tradeoff.png").exists()


def test_command_line_says_what_it_can(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "report", "tradeoff"))
