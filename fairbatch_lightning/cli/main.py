"""The command line, `fairbatch` or `python -m fairbatch_lightning`."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairbatch_lightning.fairness.audit import CRITERIA

TRAINING_COMMANDS = {
    "fit": "fine-tune a torchvision model on UTKFace with FairBatch, and test it",
    "validate": "measure a checkpoint of `fit` on validation data",
    "test": "measure a checkpoint of `fit` on test data",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="fairbatch", description="Fair training with PyTorch Lightning.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_report(commands)
    _add_tradeoff(commands)
    for name, does in TRAINING_COMMANDS.items():
        commands.add_parser(name, help=does)
    try:
        if arguments and arguments[0] in TRAINING_COMMANDS:
            _train(arguments)
        else:
            args = parser.parse_args(arguments)
            args.run(args)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        if not _is_ours(error):
            raise
        parser.exit(1, f"fairbatch {arguments[0]}: {error}\n")


def _is_ours(error: Exception) -> bool:
    """Return whether an error was raised here, with a message for users; others need their traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("fairbatch_lightning")


def _train(arguments: Sequence[str]) -> None:
    _need("torchvision", "jsonargparse", extra="vision")
    _quiet()
    from fairbatch_lightning.cli.fit import run

    run(arguments)


def _add_demo(commands: Any) -> None:
    demo = _command(commands, "demo", "train a ResNet18 on drawn faces, plainly and with FairBatch, and compare", _demo)
    _add_training(demo)
    demo.add_argument("--threshold", type=float, default=0.0, help="gaps up to this size are left alone")
    demo.add_argument("--seed", type=int, default=0, help="decides data, weights and batches")
    demo.add_argument("--output", type=Path, default=Path("fairbatch_demo"), help="directory for logs and report")


def _add_report(commands: Any) -> None:
    report = _command(commands, "report", "draw what happened in training runs, from their CSV logs", _report)
    report.add_argument("log", type=Path, nargs="+", help="directory with one or more logs of Lightning's CSVLogger")
    report.add_argument("--output", type=Path, default=Path("fairbatch_report"), help="directory for page and pictures")


def _add_tradeoff(commands: Any) -> None:
    tradeoff = _command(commands, "tradeoff", "train with several thresholds and draw the Pareto front", _tradeoff)
    tradeoff.add_argument(
        "training",
        nargs="?",
        help="your training command with {threshold}, {seed} and {log} in it, where {log} is a directory for a CSV log"
        " with FairnessMonitor's values; without it, the demo is trained",
    )
    thresholds = [0.0, 0.1, 0.2, 0.4, float("inf")]
    tradeoff.add_argument("--thresholds", type=float, nargs="+", default=thresholds, help="inf is plain training")
    tradeoff.add_argument("--seeds", type=int, default=1, help="how many seeds to average over")
    tradeoff.add_argument(
        "--criterion", choices=list(CRITERIA), default="equalized_odds", help="whose disparity to draw"
    )
    tradeoff.add_argument(
        "--output",
        type=Path,
        default=Path("fairbatch_tradeoff"),
        help="directory for logs and curve; runs there are kept",
    )
    _add_training(tradeoff.add_argument_group("the demo's training"))


def _add_training(parser: Any) -> None:
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each training")
    parser.add_argument("--faces", type=int, default=2000, help="number of training images")
    parser.add_argument("--alpha", type=float, default=0.1, help="step of the shares")


def _command(commands: Any, name: str, does: str, run: Any) -> Any:
    parser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _demo(args: argparse.Namespace) -> None:
    _need("matplotlib", "torchvision")
    _quiet()
    from fairbatch_lightning import demo

    demo.run(args.epochs, args.faces, args.alpha, args.threshold, args.seed, args.output)


def _report(args: argparse.Namespace) -> None:
    _need("matplotlib")
    from fairbatch_lightning.reports.log_format import find_logs, read_run
    from fairbatch_lightning.reports.page import write_report

    runs = [read_run(name, path) for name, path in find_logs(args.log).items()]
    print(write_report(runs, args.output))


def _tradeoff(args: argparse.Namespace) -> None:
    from fairbatch_lightning.cli.tradeoff import sweep, training_command, write_tradeoff

    if args.training is not None:
        _need("matplotlib")
        train, what = training_command(args.training, args.seeds), args.training
    else:
        _need("matplotlib", "torchvision")
        _quiet()
        train = partial(_train_demo, args)
        what = f"the demo, {args.criterion}, epochs={args.epochs}, faces={args.faces}, alpha={args.alpha}"
    points = sweep(train, what, args.thresholds, args.seeds, args.criterion, args.output)
    print("\n" + write_tradeoff(points, args.criterion, args.output))
    print(f"\nThe curve: {args.output / 'tradeoff.png'}")


def _train_demo(args: argparse.Namespace, threshold: float, seed: int, log: Path) -> None:
    from fairbatch_lightning import demo

    demo.train_fairly(log, args.epochs, args.faces, args.alpha, threshold, seed, args.criterion)


def _need(*packages: str, extra: str = "demo") -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f"This needs {' and '.join(missing)}: pip install 'fairbatch-lightning[{extra}]'")


def _quiet() -> None:
    """Leave out what Lightning says about every training."""
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{namespace}.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*Experiment logs directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")  # from inside Lightning
