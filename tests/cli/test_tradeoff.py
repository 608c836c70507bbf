"""`fairbatch tradeoff`."""

import csv
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluated import Evaluated, fit_with_log, held_out
from helpers import Toy, trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from fairbatch_lightning import FairBatch, FairnessMonitor, SignedSteps
from fairbatch_lightning.cli.main import main
from fairbatch_lightning.cli.tradeoff import sweep, training_command, write_tradeoff
from fairbatch_lightning.reports.log_format import read_run


def train(tolerance, seed, log):
    callbacks = (
        FairBatch(groups="group", rule=SignedSteps(alpha=0.1, tolerance=tolerance), seed=seed),
        FairnessMonitor(groups="group"),
    )
    fit_with_log(log.parent, log.name, *callbacks)


def test_sweep_trains_each_once_and_goes_on_where_it_stopped(tmp_path, capsys):
    trained = []

    def counting(tolerance, seed, log):
        trained.append((tolerance, seed))
        if len(trained) == 3:
            log.mkdir(parents=True)
            raise KeyboardInterrupt
        train(tolerance, seed, log)

    with pytest.raises(KeyboardInterrupt):
        sweep(counting, "ours", [0.0, math.inf], 2, "equalized_odds", tmp_path)
    points = sweep(counting, "ours", [0.0, math.inf], 2, "equalized_odds", tmp_path)
    assert trained == [(0.0, 0), (0.0, 1), (math.inf, 0), (math.inf, 0), (math.inf, 1)]
    assert [point.name for point in points] == ["0", "inf"]
    values = [
        read_run("x", next((tmp_path / "tolerance_0" / f"seed_{seed}").rglob("metrics.csv"))).finals()["test"].values()
        for seed in range(2)
    ]
    assert points[0].accuracy == pytest.approx(np.mean([v["accuracy"] for v in values]))
    assert points[0].disparity == pytest.approx(np.mean([v["equalized_odds"] for v in values]))
    assert points[0].disparity_interval == pytest.approx(tuple(sorted(v["equalized_odds"] for v in values)))
    table = write_tradeoff(points, "equalized_odds", tmp_path / "out")
    assert [row[0] for row in (table.header, *table.rows)] == ["tolerance", "0", "inf"]
    rows = list(csv.DictReader((tmp_path / "out" / "tradeoff.csv").open()))
    assert float(rows[1]["accuracy"]) == points[1].accuracy
    assert Image.open(tmp_path / "out" / "tradeoff.png").width > 500


def test_an_infinite_tolerance_is_plain_training(tmp_path):
    train(math.inf, 0, tmp_path / "run")
    shares = read_run("run", tmp_path / "run" / "metrics.csv").shares.shares
    assert torch.equal(shares[0], shares[-1])


def test_training_commands_that_cannot_work_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"to have \{tolerance\} and \{log\} in it"):
        training_command("python train.py")
    with pytest.raises(ValueError, match=r"to have \{seed\} in it"):
        training_command("python train.py {tolerance} {log}", seeds=2)
    fails = training_command(f"{sys.executable} -c 'raise SystemExit(3)' {{tolerance}} {{log}}")
    with pytest.raises(RuntimeError, match="failed with exit code 3"):
        fails(0.0, 0, tmp_path)

    def silent(tolerance, seed, log):
        fit_with_log(log.parent, log.name, test=False)

    with pytest.raises(ValueError, match=r"but found 0. Use Trainer\(callbacks=\[FairnessMonitor"):
        sweep(silent, "ours", [0.0], 1, "equalized_odds", tmp_path / "silent")
    sweep(train, "ours", [0.0], 1, "equalized_odds", tmp_path / "silent")  # is trained again
    with pytest.raises(ValueError, match="runs of the same training but it has those of 'ours', not of 'theirs'"):
        sweep(train, "theirs", [0.0], 1, "equalized_odds", tmp_path / "silent")
    with pytest.raises(ValueError, match="at least one seed but got 0"):
        sweep(train, "ours", [0.0], 0, "equalized_odds", tmp_path / "silent")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program {tolerance} {log}", "could not be started: .*no-such-program"),
        ("/tmp {tolerance} {log}", "could not be started: .*Permission denied"),
        ("python -c 'open {tolerance} {log}", "No closing quotation"),
        ("python train.py", "to have {tolerance} and {log} in it"),
    ],
)
def test_commands_that_cannot_be_run_end_in_one_line(command, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tradeoff", command, "--output", str(tmp_path)])
    assert stopped.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(f"^fairbatch tradeoff: .*{message}", line)


def test_braces_in_a_command_are_left_alone(tmp_path):
    out = tmp_path / "out.txt"
    code = f"import sys; open({str(out)!r}, 'w').write(' '.join(sys.argv[1:]))"
    training_command(f'python -c "{code}" {{"a": 1}} {{tolerance}} {{}} {{log}}')(0.5, 0, Path("x"))
    assert out.read_text() == "{a: 1} 0.5 {} x"


def test_a_killed_run_is_trained_anew_in_a_clean_place(tmp_path):
    """Also with a logger that makes a new directory each time."""

    def versioned(tolerance, seed, log):
        run = trainer(FairnessMonitor(groups="group"), logger=CSVLogger(log), log_every_n_steps=1, max_epochs=1)
        run.test(Evaluated(), held_out(Toy(seed=2)), verbose=False)
        if len(list(log.rglob("metrics.csv"))) == 1 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(versioned, "ours", [0.0], 1, "equalized_odds", tmp_path / "out")
    assert len(sweep(versioned, "ours", [0.0], 1, "equalized_odds", tmp_path / "out")) == 1


@pytest.mark.slow
def test_tradeoff_of_the_demo(tmp_path, capsys):
    options = ["--tolerances", "inf", "--epochs", "1", "--faces", "100", "--output", str(tmp_path)]
    main(["tradeoff", *options])
    assert "inf" in capsys.readouterr().out
    assert (tmp_path / "tradeoff.png").exists()
