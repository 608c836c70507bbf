"""The command line, `fairbatch` or `python -m fairbatch_lightning`: which command it is, and what becomes of errors."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from fairbatch_lightning.cli.extras import need

COMMANDS = {
    "demo": "train a ResNet18 on drawn faces, plainly and with FairBatch, and compare",
    "report": "draw what happened in training runs, from their CSV logs",
    "tradeoff": "train with several tolerances and draw the Pareto front",
}
TRAINING_COMMANDS = {
    "fit": "fine-tune a torchvision model on UTKFace with FairBatch, and test it",
    "validate": "measure a checkpoint of `fit` on validation data",
    "test": "measure a checkpoint of `fit` on test data",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in TRAINING_COMMANDS:
            need("torchvision", "jsonargparse", extra="vision")
            import_module("fairbatch_lightning.cli.fit").run(arguments)
        else:
            args = _parser(arguments).parse_args(arguments)
            args.run(args)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        if not _is_ours(error):
            raise
        print(f"fairbatch {arguments[0]}: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from error


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows all commands by name, and the arguments of the one that is meant."""
    parser = argparse.ArgumentParser(prog="fairbatch", description="Fair training with PyTorch Lightning.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in {**COMMANDS, **TRAINING_COMMANDS}.items():
        command = commands.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if name in COMMANDS and name in arguments[:1]:  # what the others import takes seconds
            module = import_module(f"fairbatch_lightning.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _is_ours(error: Exception) -> bool:
    """Return whether an error was raised here, with a message for users; others need their traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("fairbatch_lightning")
