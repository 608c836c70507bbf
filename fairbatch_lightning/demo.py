"""The demo: a ResNet18 learns to tell smiling faces, first plainly, then with the one line.

The faces are drawn by code. Their heads have three shapes; most round ones smile, most square ones do not, and mouths
are often hard to read. A plainly trained model leans on the shape of the head: it misses the smiles of square heads,
and sees smiles on round heads that do not. The test set is drawn in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fairbatch_lightning.callback import FairBatch
from fairbatch_lightning.disparities import equalized_odds_disparity, group_confusion

HEADS = {"round": (2, 0.75, 0.75), "long": (2, 0.55, 0.9), "square": (8, 0.7, 0.7)}  # order of the norm, half axes
SMILING = {"round": 0.85, "long": 0.5, "square": 0.15}
LABELS = ("neutral", "smiling")


class Faces(Dataset[tuple[Tensor, int]]):
    """Faces `(3, 32, 32)` that smile or not; `targets` and `head` are known without looking at them.

    Every look at a face draws it anew, at another place and in other colours: that is the augmentation.
    """

    classes = LABELS

    def __init__(self, num_faces: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.head: list[str] = random.choice(list(HEADS), num_faces).tolist()
        smiling = random.random(num_faces) < np.array([SMILING[head] for head in self.head])
        self.targets: list[int] = smiling.astype(int).tolist()
        self._curvature = np.where(smiling, 1.0, -1.0) + random.normal(0, 1.0, num_faces)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
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

    def configure_optimizers(self) -> Any:
        """Return AdamW with one cycle of the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass(frozen=True)
class Audit:
    """How a model does on the test set."""

    accuracy: float
    disparity: float
    errors: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Classifier, faces: Faces) -> Audit:
        """Measure accuracy, equalized odds disparity, and the error rate of every cell `(Y, Z)`."""
        model.eval()
        predictions = torch.cat(
            [model(images).argmax(1) for images in torch.split(faces.draw(slice(None), seed=0), 256)]
        )
        labels = torch.tensor(faces.targets)
        groups = torch.tensor([list(HEADS).index(head) for head in faces.head])
        confusion = group_confusion(predictions, labels, groups, len(LABELS), len(HEADS))
        right = confusion.diagonal(dim1=1, dim2=2).T / confusion.sum(2).T
        accuracy = (predictions == labels).double().mean()
        return cls(float(accuracy), float(equalized_odds_disparity(confusion)), 1 - right)


def train(faces: Faces, callbacks: list[pl.Callback], epochs: int, seed: int) -> Classifier:
    """Train one model; the callbacks are all that differs."""
    pl.seed_everything(seed, verbose=False)
    model = Classifier()
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    trainer.fit(model, DataLoader(faces, batch_size=100, shuffle=True))
    return model


def report(plain: Audit, fair: Audit) -> str:
    """Return the before/after table."""
    rows = [("accuracy", plain.accuracy, fair.accuracy), ("equalized odds disparity", plain.disparity, fair.disparity)]
    for y, label in enumerate(LABELS):
        for z, head in enumerate(HEADS):
            rows.append((f"error of {label}, {head} heads", float(plain.errors[y, z]), float(fair.errors[y, z])))
    lines = [f"{'on the test set':<32}{'plain':>8}{'FairBatch':>12}"]
    lines += [f"{name:<32}{before:>8.3f}{after:>12.3f}" for name, before, after in rows]
    return "\n".join(lines)


def run(epochs: int, num_faces: int, alpha: float, seed: int, output: Path) -> tuple[Audit, Audit]:
    """Train without and with FairBatch, print the table, and save the picture."""
    from fairbatch_lightning.plots import plot_history

    train_faces, test_faces = Faces(num_faces, seed), Faces(3000, seed + 1)
    print(f"1/2 Plain training on {num_faces} drawn faces")
    plain = Audit.of(train(train_faces, [], epochs, seed), test_faces)
    print('2/2 The same with FairBatch("equalized_odds", groups="head")')
    fairbatch = FairBatch("equalized_odds", groups="head", alpha=alpha, seed=seed)
    fair = Audit.of(train(train_faces, [fairbatch], epochs, seed), test_faces)
    print("\n" + report(plain, fair))
    plot_history(fairbatch, output)
    print(f"\nShares, losses and gaps over the epochs: {output}")
    return plain, fair
