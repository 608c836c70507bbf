"""The demo: a ResNet18 learns to tell smiling faces, first plainly, then with the one line.

The faces are drawn by code. Their heads have three shapes; most round ones smile, most square ones do not, and mouths
are often hard to read. A plainly trained model leans on the shape of the head: it misses the smiles of square heads,
and sees smiles on round heads that do not. Validation and test sets are drawn in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fairbatch_lightning.fairness.audit import Audit
from fairbatch_lightning.callbacks.fairbatch import FairBatch
from fairbatch_lightning.reports.log_format import find_logs, read_run
from fairbatch_lightning.fairness.rates import equal_opportunity_rates
from fairbatch_lightning.callbacks.monitor import FairnessMonitor
from fairbatch_lightning.reports.page import write_report
from fairbatch_lightning.reports.tables import Table, as_text

HEADS = {"round": (2, 0.75, 0.75), "long": (2, 0.55, 0.9), "square": (8, 0.7, 0.7)}  # order of the norm, half axes
SMILING = {"round": 0.85, "long": 0.5, "square": 0.15}
LABELS = ("neutral", "smiling")


class Faces(Dataset[tuple[Tensor, int]]):
    """Faces `(3, 32, 32)` that smile or not; `targets` and `head` are known without looking at them.

    Args:
        num_faces: How many.
        seed: Decides what they look like.
        still: Draw every face once. Otherwise every look at a face draws it anew, at another place and in other
            colours: that is the augmentation.
    """

    classes = LABELS

    def __init__(self, num_faces: int, seed: int, *, still: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.head: list[str] = random.choice(list(HEADS), num_faces).tolist()
        smiling = random.random(num_faces) < np.array([SMILING[head] for head in self.head])
        self.targets: list[int] = smiling.astype(int).tolist()
        self._curvature = np.where(smiling, 1.0, -1.0) + random.normal(0, 1.0, num_faces)
        self._images = self.draw(slice(None), seed) if still else None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._images is not None:
            return self._images[index], self.targets[index]
        seed = int(torch.randint(2**31, ()))
        return self.draw(slice(index, index + 1), seed)[0], self.targets[index]

    def draw(self, part: slice, seed: int) -> Tensor:
        """Return some of the faces as images `(N, 3, 32, 32)`."""
        return draw_faces(self._curvature[part], self.head[part], np.random.default_rng(seed))


def draw_faces(curvature: Any, heads: Sequence[str], random: np.random.Generator, size: int = 32) -> Tensor:
    """Return one face per curvature of the mouth, `(N, 3, size, size)`: up for a smile, down for none."""
    n = len(heads)
    shift = random.uniform(-0.15, 0.15, (2, n, 1, 1))
    axis = np.linspace(-1, 1, size)
    x, y = axis[None, None, :] - shift[0], axis[None, :, None] - shift[1]
    order, width, height = np.array([HEADS[head] for head in heads]).T[:, :, None, None]
    face = _soft(1 - (np.abs(x / width) ** order + np.abs(y / height) ** order) ** (1 / order), size)
    eyes = sum(_soft(0.1 - np.hypot(x - side, y + 0.25), size) for side in (-0.25, 0.25))
    bend = np.asarray(curvature)[:, None, None] * 0.25
    mouth = _soft(0.07 - np.abs(y - 0.35 + bend * ((x / 0.35) ** 2 - 0.5)), size) * _soft(0.35 - np.abs(x), size)
    skin, background = random.uniform(0.5, 1.0, (n, 3, 1, 1)), random.uniform(0.0, 0.5, (n, 3, 1, 1))
    image = background * (1 - face[:, None]) + skin * face[:, None]
    image = image * (1 - 0.9 * np.maximum(eyes, mouth)[:, None]) + random.normal(0, 0.05, (n, 3, size, size))
    return torch.tensor(image.clip(0, 1), dtype=torch.float32)


def _soft(distance: Any, size: int) -> Any:
    """Return 1 inside a shape and 0 outside, with a soft edge; `distance` is positive inside."""
    return np.clip(distance * size / 2 + 0.5, 0, 1)


class Classifier(pl.LightningModule):
    """Any torchvision ResNet18 user's module: nothing in it knows about fairness."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.model: nn.Module = resnet18(num_classes=len(LABELS))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(B, 2)`."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Return AdamW with one cycle of the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(log: Path, callbacks: list[pl.Callback], epochs: int, num_faces: int, seed: int) -> Audit:
    """Train and test one model, with a log; the callbacks are all that differs."""
    faces = Faces(num_faces, seed)
    held_out = [DataLoader(Faces(n, seed + 1 + k, still=True), batch_size=250) for k, n in enumerate((3000, 500))]
    pl.seed_everything(seed, verbose=False)
    model, monitor = Classifier(), FairnessMonitor(groups="head")
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, monitor],
        logger=CSVLogger(log.parent, name="", version=log.name),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(faces, batch_size=100, shuffle=True), held_out[1])
    trainer.test(model, held_out[0], verbose=False)
    return monitor.audits["test"]


def train_fairly(
    log: Path,
    epochs: int,
    num_faces: int,
    alpha: float,
    threshold: float,
    seed: int,
    criterion: str = "equalized_odds",
) -> Audit:
    """Train and test one model with the one line."""
    fairbatch = FairBatch(criterion, groups="head", alpha=alpha, threshold=threshold, seed=seed)
    return train(log, [fairbatch], epochs, num_faces, seed)


def comparison(plain: Audit, fair: Audit) -> str:
    """Return the before/after table."""
    before, after = plain.values(), fair.values()
    rows = [(name.replace("_", " "), before[name], after[name]) for name in ("accuracy", "worst_cell_accuracy")]
    rows.append(("equalized odds disparity", before["equalized_odds"], after["equalized_odds"]))
    wrong = [1 - equal_opportunity_rates(audit.confusion, None).by_group for audit in (plain, fair)]
    for y, label in enumerate(LABELS):
        for z, head in enumerate(plain.group_names):
            rows.append((f"error of {label}, {head} heads", float(wrong[0][z, y]), float(wrong[1][z, y])))
    texts = [[name, f"{first:.3f}", f"{second:.3f}"] for name, first, second in rows]
    return as_text(Table("", ["on the test set", "plain", "FairBatch"], texts))


def run(epochs: int, num_faces: int, alpha: float, threshold: float, seed: int, output: Path) -> tuple[Audit, Audit]:
    """Train without and with FairBatch, print the table, and write the report."""
    print(f"1/2 Plain training on {num_faces} drawn faces")
    plain = train(output / "plain", [], epochs, num_faces, seed)
    print(f'2/2 The same with FairBatch("equalized_odds", groups="head", alpha={alpha:g})')
    fair = train_fairly(output / "fairbatch", epochs, num_faces, alpha, threshold, seed)
    print("\n" + comparison(plain, fair))
    logs = find_logs([output / "plain", output / "fairbatch"])
    page = write_report([read_run(name, path) for name, path in logs.items()], output)
    print(f"\nPictures of both runs: {page}")
    return plain, fair
