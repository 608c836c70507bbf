"""What FairnessMonitor costs: a validation pass with it against one without it.

    python examples/benchmarks/monitoring.py --out benchmarks

ResNet18 on 64 px images in batches of 32, and a small network in batches of 128 that takes less than a millisecond.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from timing import Classifier, Images, Vectors, interleaved, quiet, report, seconds
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from training import mlp

from fairbatch_lightning import FairnessMonitor


class Validated(Classifier):
    """Logs its loss, as most do."""

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", functional.cross_entropy(self(batch[0]), batch[1]))


def compare(network: torch.nn.Module, loader: DataLoader, rounds: int) -> dict[str, float]:
    model = Validated(network)

    def side(monitored: bool) -> float:
        trainer = L.Trainer(
            callbacks=[FairnessMonitor(groups="groups")] if monitored else [],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        return seconds(lambda: trainer.validate(model, loader, verbose=False))

    return interleaved(lambda: side(True), lambda: side(False), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3200)
    parser.add_argument("--vectors", type=int, default=64_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for JSON")
    args = parser.parse_args()
    quiet()
    rows = []
    for name, network, data, size in (
        (f"MLP, {args.vectors} vectors", mlp(), Vectors(args.vectors, 64, 5), 128),
        (f"ResNet18, {args.images} images", resnet18(num_classes=2), Images(args.images, 64, 5), 32),
    ):
        rows.append({"what": name, **compare(network, DataLoader(data, size), args.rounds)})
        report("monitoring", rows, args.out)


if __name__ == "__main__":
    main()
