"""What FairBatch costs in training: an epoch with the callback against one without it.

    python examples/benchmarks/training.py --out benchmarks

ResNet18 on 64 px images in batches of 32, and a small network whose step takes about a millisecond in batches of 128.
Both sides train the same network on the same data, in turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import Images, Vectors, interleaved, quiet, report, train
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

from fairbatch_lightning import FairBatch

MUST_REACH = {
    ("resnet18", "online"): 1.02,
    ("resnet18", "sampled"): 1.05,
    ("resnet18", "exact"): 1.36,
    ("mlp", "online"): 1.10,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


def compare(network, data: Dataset, batch_size: int, estimate: str, epochs: int, rounds: int) -> dict[str, float]:
    def side(fair: bool) -> float:
        torch.manual_seed(0)
        callback = FairBatch(groups="groups", estimate=estimate, verbose=False) if fair else None
        return train(network(), DataLoader(data, batch_size, shuffle=True), callback, epochs)

    return interleaved(lambda: side(True), lambda: side(False), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=["mlp", "resnet18"], default=["mlp", "resnet18"])
    parser.add_argument("--estimates", nargs="+", default=["online", "sampled", "exact"])
    parser.add_argument("--images", type=int, default=3200, help="training images")
    parser.add_argument("--images-sampled", type=int, default=20_000, help="the same for the sampled estimate")
    parser.add_argument("--vectors", type=int, default=64_000, help="training vectors")
    parser.add_argument("--groups", type=int, default=5, help="sensitive groups; there are two labels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for JSON")
    args = parser.parse_args()
    quiet()
    rows = []
    for network in args.networks:
        for estimate in args.estimates:
            if network == "mlp":
                data, size, name = Vectors(args.vectors, 64, args.groups), 128, f"MLP, {args.vectors} vectors"
                result = compare(mlp, data, size, estimate, 1, args.rounds)
            else:
                number = args.images_sampled if estimate == "sampled" else args.images
                data, size, name = Images(number, 64, args.groups), 32, f"ResNet18, {number} images"
                result = compare(lambda: resnet18(num_classes=2), data, size, estimate, 1, args.rounds)
            must = MUST_REACH.get((network, estimate), "")
            steps = {"ms per step, without": 1000 * result["theirs"] / (len(data) // size)}
            rows.append({"what": f"{name}, {estimate}", **result, "must reach": must, **steps})
            report("training", rows, args.out)


if __name__ == "__main__":
    main()
