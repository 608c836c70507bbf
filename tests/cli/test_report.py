"""`fairbatch report`."""

import re
from pathlib import Path

import pytest
from evaluated import fit_with_log

from fairbatch_lightning import FairnessMonitor
from fairbatch_lightning.cli.main import main


def test_report_of_something_else_is_refused(tmp_path, capsys):
    place = fit_with_log(tmp_path, "run", test=False)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(place), "--output", str(tmp_path / "report")])
    assert stopped.value.code == 2
    assert "neither `fairbatch/...` nor `fairness/...` columns" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nowhere")])
    assert "found no metrics.csv" in capsys.readouterr().err


COUNTS = "fairness/val/count/a/0/0", "fairness/val/count/a/0/1"


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is no table of numbers"),
        (b"epoch,step\n\x00,1\n\xff", "is no table of numbers"),
        (f"{','.join(COUNTS)}\n3,-5\n".encode(), f"{COUNTS[1]} to be a count of samples but got -5"),
        (f"{','.join(COUNTS)}\n0.5,5\n".encode(), f"{COUNTS[0]} to be a count of samples but got 0.5"),
        (f"{','.join(COUNTS)}\n1e300,nan\n".encode(), f"{COUNTS[0]} to be a count of samples but got 1e\\+300"),
        (f"{','.join(COUNTS)},fairness/val/nan\n1,2,inf\n".encode(), "val/nan to be a count of samples but got inf"),
    ],
)
def test_logs_that_are_none_end_in_one_line(log, message, tmp_path, capsys):
    (tmp_path / "metrics.csv").write_bytes(log)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path), "--output", str(tmp_path / "report")])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^fairbatch report: .*{message}", line)


def test_report_says_where_the_page_is(tmp_path, capsys):
    place = fit_with_log(tmp_path, "run", FairnessMonitor(groups="group"), max_epochs=1)
    main(["report", str(place), "--output", str(tmp_path / "report")])
    assert "Confusion matrix of every group on test data" in Path(capsys.readouterr().out.strip()).read_text()
