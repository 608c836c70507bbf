"""Drawn faces that smile or not: a small unfair data set, made by code.

Heads have three shapes; most round ones smile, most square ones do not, and mouths are often hard to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

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
