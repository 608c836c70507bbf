"""`fairbatch report`."""

from pathlib import Path

import pytest
from evaluated import fit_with_log

from fairbatch_lightning import FairnessMonitor
from fairbatch_lightning.cli.main import main


def test_report_of_something_else_is_refused(tmp_path, capsys):
    place = fit_with_log(tmp_path, "run", test=False)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(place), "--output", str(tmp_path / "report")])
    assert stopped.value.code == 1
    assert "neither `fairbatch/...` nor `fairness/...` columns" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nowhere")])
    assert "found no metrics.csv" in capsys.readouterr().err


def test_report_says_where_the_page_is(tmp_path, capsys):
    place = fit_with_log(tmp_path, "run", FairnessMonitor(groups="group"), max_epochs=1)
    main(["report", str(place), "--output", str(tmp_path / "report")])
    assert "Confusion matrix of every group on test data" in Path(capsys.readouterr().out.strip()).read_text()
