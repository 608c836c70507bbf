"""The command line, `fairbatch` or `python -m fairbatch_lightning`."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="fairbatch", description="Fair training with PyTorch Lightning.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a ResNet18 on drawn faces, plainly and with FairBatch, and compare",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--epochs", type=int, default=10, help="epochs of each training")
    demo.add_argument("--faces", type=int, default=2000, help="number of training images")
    demo.add_argument("--alpha", type=float, default=0.1, help="step of the shares")
    demo.add_argument("--seed", type=int, default=0, help="decides data, weights and batches")
    demo.add_argument("--output", type=Path, default=Path("fairbatch_demo.png"), help="where to save the picture")
    args = parser.parse_args(arguments)
    _demo(args)


def _demo(args: argparse.Namespace) -> None:
    try:
        import matplotlib  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"The demo needs {error.name}: pip install 'fairbatch-lightning[demo]'") from error
    from fairbatch_lightning import demo

    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{namespace}.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")  # from inside Lightning
    demo.run(args.epochs, args.faces, args.alpha, args.seed, args.output)
