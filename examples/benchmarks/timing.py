"""What the benchmarks share: both sides in turn in one process, medians, a table with ratios, and JSON."""

from __future__ import annotations

import json
import logging
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.nn import functional
from torch.utils.data import Dataset

COLUMNS = ("what", "ours", "theirs", "ratio", "from", "to", "must reach")


def interleaved(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> dict[str, float]:
    """Time both sides in turn; the ratio is the median of the rounds' ratios, which a slow phase hits on both sides."""
    pairs = []
    for number in range(rounds + 1):
        pair = (ours(), theirs()) if number % 2 else (theirs(), ours())[::-1]
        pairs.append(pair)
    pairs = pairs[1:]  # the first round warms up
    ratios = [a / b for a, b in pairs]
    return {
        "ours": median(a for a, _ in pairs),
        "theirs": median(b for _, b in pairs),
        "ratio": median(ratios),
        "from": min(ratios),
        "to": max(ratios),
    }


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(name: str, rows: list[dict[str, Any]], folder: Path | None) -> None:
    """Print a Markdown table, and write the same as JSON."""
    print(f"\n{name}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in COLUMNS) + " |")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        (folder / f"{name}.json").write_text(json.dumps({"rows": rows, **machine}, indent=1))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Images(Dataset):
    """Random images in memory, with a label and a group each."""

    def __init__(self, number: int, size: int, groups: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (number, 3, size, size), dtype=torch.uint8, generator=generator)
        self.targets = torch.randint(2, (number,), generator=generator)
        self.groups = torch.randint(groups, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index].float() / 255, self.targets[index]


class Vectors(Dataset):
    """Random vectors, with a label and a group each."""

    def __init__(self, number: int, features: int, groups: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(number, features, generator=generator)
        self.targets = torch.randint(2, (number,), generator=generator)
        self.groups = torch.randint(groups, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.targets[index]


class Classifier(L.LightningModule):
    """Any network, trained with SGD."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Stopwatch(L.Callback):
    """Measures training from its start to its end, without what comes before and after."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.started


def train(network: torch.nn.Module, loader: Any, callback: L.Callback | None, epochs: int, **options: Any) -> float:
    """Return the seconds that an epoch takes, with everything that happens at its end."""
    watch = Stopwatch()
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[watch, *([callback] if callback else [])],
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )
    trainer.fit(Classifier(network), loader)
    return watch.seconds / epochs


def quiet() -> None:
    """Keep Lightning from telling about every fit."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
