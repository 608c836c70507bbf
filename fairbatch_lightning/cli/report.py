"""`fairbatch report`: what happened in training runs, from their CSV logs to pictures and one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairbatch_lightning.cli.extras import need
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.reports.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("log", type=Path, nargs="+", help="directory with one or more logs of Lightning's CSVLogger")
    parser.add_argument("--output", type=Path, default=Path("fairbatch_report"), help="directory for page and pictures")


def run(args: argparse.Namespace) -> None:
    """Write the page, and print where it is."""
    need("matplotlib")
    runs = [read_run(name, path) for name, path in find_logs(args.log).items()]
    print(write_report(runs, args.output))
