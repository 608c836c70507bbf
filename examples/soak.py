"""Run FairBatch for thousands of updates and watch the memory of all processes.

    python examples/soak.py                      # one process, two workers
    python examples/soak.py --devices 2          # the same under ddp

Prints the memory (resident set, all processes together) while it runs, and at the end its slope after the warm-up, the
number of worker processes that are left and of hooks that are left in the module.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fairbatch_lightning import FairBatch

PAGE = resource.getpagesize()


class Module(L.LightningModule):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Memory(L.Callback):
    """Notes the memory of this process and its children after every epoch."""

    def __init__(self, every: int) -> None:
        self.every, self.megabytes = every, []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.megabytes.append(memory_of_family(os.getpid()) / 2**20)
        if trainer.is_global_zero and len(self.megabytes) % self.every == 0:
            print(f"{len(self.megabytes):>6} epochs  {self.megabytes[-1]:8.1f} MB", flush=True)


def memory_of_family(pid: int) -> int:
    """Return the resident memory of a process and all processes below it, in bytes."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:  # it has ended in the meantime
        return 0
    return own + sum(memory_of_family(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(400, 8, generator=generator), torch.randint(3, (400,), generator=generator)
    data = TensorDataset(x, (x[:, 0] + z > 1).long(), z)
    loader = DataLoader(data, batch_size=50, num_workers=args.workers, persistent_workers=args.workers > 0)
    module, memory = Module(), Memory(max(1, args.updates // 20))
    fairbatch = FairBatch(groups=2, update_every="epoch", verbose=False)
    trainer = L.Trainer(
        max_epochs=args.updates,
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        callbacks=[fairbatch, memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        warm = np.array(memory.megabytes[len(memory.megabytes) // 4 :])
        slope = np.polyfit(np.arange(len(warm)), warm, 1)[0] * 1000
        print(f"{len(fairbatch.history)} updates; memory grows by {slope:+.2f} MB per 1,000 updates after the warm-up")
        hooks = sum(len(part._forward_hooks) for part in module.modules())
        print(f"left over: {len(multiprocessing.active_children())} worker processes, {hooks} hooks")


if __name__ == "__main__":
    main()
