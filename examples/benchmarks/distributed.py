"""What FairBatch costs in distributed training: an epoch with the callback against one without, ddp, two processes.

    python examples/benchmarks/distributed.py --out benchmarks

The script starts its second process itself. Both sides train in turn in the same two processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from timing import Images, Vectors, interleaved, quiet, report, train
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from training import mlp

from fairbatch_lightning import FairBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=["mlp", "resnet18"], default=["resnet18", "mlp"])
    parser.add_argument("--estimates", nargs="+", default=["online"])
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--vectors", type=int, default=64_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for JSON")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    rows = []
    for network in args.networks:
        small = network == "mlp"
        data = Vectors(args.vectors, 64, 5) if small else Images(args.images, 64, 5)
        for estimate in args.estimates:

            def side(fair: bool, data=data, small=small, estimate=estimate) -> float:
                torch.manual_seed(0)
                callback = FairBatch(groups="groups", estimate=estimate, verbose=False) if fair else None
                loader = DataLoader(data, 128 if small else 32, shuffle=True)
                return train(
                    mlp() if small else resnet18(num_classes=2), loader, callback, 1, strategy="ddp", devices=2
                )

            result = interleaved(lambda: side(True), lambda: side(False), args.rounds)
            must = 1.03 if estimate == "online" and not small else ""
            rows.append({"what": f"ddp, 2 processes, {network}, {estimate}", **result, "must reach": must})
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        report("distributed", rows, args.out)


if __name__ == "__main__":
    main()
