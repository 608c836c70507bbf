"""Train once with one tolerance, and log it: what `fairbatch tradeoff` needs of a training script.

    fairbatch tradeoff "python examples/train_with_tolerance.py {tolerance} {seed} {log}" --criterion equal_opportunity

Logistic regression on the synthetic data, as in synthetic.py. With --data the authors' own data is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from synthetic import EPOCHS, LogisticRegression, generate, load, quiet
from torch.utils.data import DataLoader

from fairbatch_lightning import Adaptive, FairBatch, FairnessMonitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tolerance", type=float, help="by how much rates of groups may differ; inf is plain training")
    parser.add_argument("seed", type=int)
    parser.add_argument("log", type=Path, help="directory for the CSV log")
    parser.add_argument("--criterion", choices=list(EPOCHS)[1:], default="equal_opportunity")
    parser.add_argument("--data", type=Path, help="the authors' data as an .npz file; default: generate data")
    parser.add_argument("--epochs", type=int, help="default: the authors'")
    args = parser.parse_args()
    quiet()
    train_set, test_set = load(args.data) if args.data else (generate(2000, seed=0), generate(1000, seed=1))
    L.seed_everything(args.seed, verbose=False)
    model = LogisticRegression(train_set.tensors[0].shape[1])
    fairbatch = FairBatch(args.criterion, groups=2, rule=Adaptive(args.tolerance), seed=args.seed, verbose=False)
    trainer = L.Trainer(
        max_epochs=args.epochs or EPOCHS[args.criterion],
        callbacks=[fairbatch, FairnessMonitor(groups=2)],
        logger=CSVLogger(args.log, name="", version=""),
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train_set, batch_size=100, shuffle=True))
    trainer.test(model, DataLoader(test_set, batch_size=1000), verbose=False)


if __name__ == "__main__":
    main()
