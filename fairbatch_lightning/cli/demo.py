"""`fairbatch demo`: a ResNet18 learns to tell smiling faces, first plainly, then with the one line.

A plainly trained model leans on the shape of the head: it misses the smiles of square heads, and sees smiles on round
heads that do not. Validation and test sets are drawn in the same way as the training set.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from fairbatch_lightning._support.lightning import say_less
from fairbatch_lightning.callbacks.fairbatch import FairBatch
from fairbatch_lightning.callbacks.monitor import FairnessMonitor
from fairbatch_lightning.cli.extras import need
from fairbatch_lightning.fairness.audit import Audit
from fairbatch_lightning.fairness.disparities import equal_opportunity_rates
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.reports.page import write_report
from fairbatch_lightning.reports.tables import Table, as_text, number_texts
from fairbatch_lightning.rules.adaptive import Adaptive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_training_arguments(parser)
    parser.add_argument("--tolerance", type=float, default=0.0, help="by how much rates of groups may differ")
    parser.add_argument("--seed", type=int, default=0, help="decides data, weights and batches")
    parser.add_argument("--output", type=Path, default=Path("fairbatch_demo"), help="directory for logs and report")


def add_training_arguments(parser: Any) -> None:
    """Declare what decides about every training; `parser` may be a group of arguments."""
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each training")
    parser.add_argument("--faces", type=int, default=2000, help="number of training images")


def run(args: argparse.Namespace) -> None:
    """Train without and with FairBatch, print the table, and write the report."""
    need("matplotlib", "torchvision")
    say_less()
    print(f"1/2 Plain training on {args.faces} drawn faces")
    plain = train(args.output / "plain", [], args.epochs, args.faces, args.seed)
    rule = f", rule=Adaptive(tolerance={args.tolerance:g})" if args.tolerance else ""
    print(f'2/2 The same with FairBatch("equalized_odds", groups="head"{rule})')
    fairbatch = the_one_line("equalized_odds", args.tolerance, args.seed)
    fair = train(args.output / "fairbatch", [fairbatch], args.epochs, args.faces, args.seed)
    print("\n" + as_text(comparison(plain, fair)))
    logs = find_logs([args.output / "plain", args.output / "fairbatch"])
    page = write_report([read_run(name, path) for name, path in logs.items()], args.output)
    print(f"\nPictures of both runs: {page}")


def the_one_line(criterion: str, tolerance: float, seed: int) -> FairBatch:
    """Return what is added to the plain training."""
    return FairBatch(criterion, groups="head", rule=Adaptive(tolerance), seed=seed)


def train(log: Path, callbacks: list[pl.Callback], epochs: int, num_faces: int, seed: int) -> Audit:
    """Train and test one model, with a log; the callbacks are all that differs."""
    from fairbatch_lightning.vision import Faces, VisionClassifier  # torchvision: who sweeps another training has none

    held_out = [DataLoader(Faces(n, seed + 1 + k, still=True), batch_size=250) for k, n in enumerate((3000, 500))]
    pl.seed_everything(seed, verbose=False)
    model, monitor = VisionClassifier(2, weights=None, lr=1e-3), FairnessMonitor(groups="head")
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, monitor],
        logger=CSVLogger(log.parent, name="", version=log.name),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Faces(num_faces, seed), batch_size=100, shuffle=True), held_out[1])
    trainer.test(model, held_out[0], verbose=False)
    return monitor.audits["test"]


def comparison(plain: Audit, fair: Audit) -> Table:
    """Return the before/after table."""
    before, after = plain.values(), fair.values()
    rows = [(name.replace("_", " "), before[name], after[name]) for name in ("accuracy", "worst_cell_accuracy")]
    rows.append(("equalized odds disparity", before["equalized_odds"], after["equalized_odds"]))
    wrong = [1 - equal_opportunity_rates(audit.confusion, None).by_group for audit in (plain, fair)]
    for y, label in enumerate(plain.label_names):
        for z, head in enumerate(plain.group_names):
            rows.append((f"error of {label}, {head} heads", float(wrong[0][z, y]), float(wrong[1][z, y])))
    texts = [[name, number_texts(first)[0], number_texts(second)[0]] for name, first, second in rows]
    return Table("", ["on the test set", "plain", "FairBatch"], texts)
