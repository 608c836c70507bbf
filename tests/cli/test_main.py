"""The command line as such."""

import pytest

from fairbatch_lightning.cli import extras
from fairbatch_lightning.cli.main import main


def test_command_line_says_what_it_can(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "report", "tradeoff", "fit", "test"))


@pytest.mark.parametrize("command", ["demo", "report", "tradeoff"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: fairbatch {command}")
    assert "--output" in printed
    assert ("--tolerance" in printed) == (command != "report")


@pytest.mark.parametrize("arguments", [[], ["train"]], ids=["none", "unknown"])
def test_a_command_is_needed(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "command" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=r"This needs torchvision and jsonargparse: pip install .*\[vision\]"):
        main(["fit"])
    with pytest.raises(SystemExit, match=r"This needs matplotlib: pip install 'fairbatch-lightning\[demo\]'"):
        main(["report", "somewhere"])
