"""UTKFace, ready to train on: split, scaled, augmented, in batches."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import v2

from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.vision.images import ImageFile
from fairbatch_lightning.vision.utkface import AGE_CUTS, Attribute, UTKFace, classes_of, square

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class UTKFaceDataModule(pl.LightningDataModule):
    """UTKFace for training, validation and test.

    A fifth of the faces is for the test, and of the rest some for validation. Images that are byte-identical, as many
    hundred of UTKFace are, are on the same side. Faces for training are mirrored and shifted at random.

    The split depends on the seed and on all images: with one image more or less it is another one. Checkpoints know
    theirs, and a warning appears where one is tested on another.

    Args:
        root: The folder with UTKFace's images, or a .tar or .zip archive of it.
        label: What is to be learnt: "gender", "age" (in classes) or "race".
        group: The sensitive attribute; FairBatch and FairnessMonitor find it without being told its name.
        image_size: Faces are scaled to squares of so many pixels.
        batch_size: The number of faces in a batch.
        num_workers: How many processes decode images.
        test_fraction: How much of all faces is for the test.
        val_fraction: How much of all faces is for validation.
        age_cuts: The ages at which classes of age begin, but for the first.
        augment: Mirror and shift the faces for training at random.
        normalize: Shift and scale colours as torchvision's pretrained weights want it. Without, they are from 0 to 1.
        keep: Keep all faces in memory, decoded and scaled: for sizes up to 64 pixels.
        seed: Decides the split.
    """

    def __init__(
        self,
        root: str | Path,
        label: Attribute = "gender",
        group: Attribute = "race",
        *,
        image_size: int = 224,
        batch_size: int = 32,
        num_workers: int = 0,
        test_fraction: float = 0.2,
        val_fraction: float = 0.1,
        age_cuts: Sequence[int] = AGE_CUTS,
        augment: bool = True,
        normalize: bool = True,
        keep: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.classes = classes_of(label, age_cuts)
        classes_of(group, age_cuts)
        if label == group:
            raise ValueError(f"Expected `label` and `group` to be two different attributes but got {label!r} for both.")
        if not (test_fraction > 0 and val_fraction > 0 and test_fraction + val_fraction < 1):
            raise ValueError(
                "Expected arguments `test_fraction` and `val_fraction` to be above 0, and less than 1 together, but got"
                f" {test_fraction} and {val_fraction}."
            )
        root = str(root)  # checkpoints hold it, and plain data only
        self.save_hyperparameters()
        self._parts: dict[str, Subset[Any]] = {}
        self._split: dict[str, Any] = {}

    @property
    def num_classes(self) -> int:
        """How many classes there are to tell apart."""
        return len(self.classes)

    @property
    def batch_size(self) -> int:
        """The number of faces in a batch; Lightning's `Tuner.scale_batch_size` may change it."""
        return int(self.hparams["batch_size"])

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.hparams["batch_size"] = size

    def setup(self, stage: str | None = None) -> None:
        """Find the faces and split them, once."""
        if self._parts:
            return
        settings = self.hparams
        faces = UTKFace(
            settings["root"],
            settings["label"],
            age_cuts=settings["age_cuts"],
            keep=settings["image_size"] if settings["keep"] else None,
        )
        faces.groups = faces.values_of(settings["group"])
        split = split_faces(faces, settings["test_fraction"], settings["val_fraction"], settings["seed"])
        for name, indices in split.items():
            part = copy.copy(faces)
            part.transform = self._transform(train=name == "train")
            self._parts[name] = Subset(part, indices)
        held_out = "/".join(sorted(faces.files[index].name for part in ("val", "test") for index in split[part]))
        digest = hashlib.blake2b(held_out.encode(), digest_size=8).hexdigest()
        self._split = {"held_out": digest, "faces": len(split["val"]) + len(split["test"])}

    def state_dict(self) -> dict[str, Any]:
        """Return what tells the split from others, for checkpoints."""
        return dict(self._split)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warn if the checkpoint was made with another split."""
        if state != self._split:
            warn(
                f"The checkpoint was trained with another split of the faces ({state['faces']} were held out, now"
                f" {self._split['faces']} are): it may have seen those that are held out now. Use the same images"
                " and the same seed, `test_fraction` and `val_fraction`."
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the faces for training, in another order every epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches of the faces for validation."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return batches of the faces for the test."""
        return self._loader("test")

    def _loader(self, name: str) -> DataLoader[Any]:
        part, workers = self._parts[name], int(self.hparams["num_workers"])
        return DataLoader(
            part,
            self.batch_size if name == "train" else 4 * self.batch_size,
            shuffle=name == "train",
            drop_last=name == "train" and len(part) > self.batch_size,  # batch norm cannot learn from a single face
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _transform(self, *, train: bool) -> Callable[[Any], Tensor]:
        size: int = self.hparams["image_size"]
        steps: list[Any] = [square(size)]
        if train and self.hparams["augment"]:
            shifted = v2.RandomCrop(size, padding=max(1, size // 16), padding_mode="edge")
            steps += [v2.RandomHorizontalFlip(), shifted]
        steps.append(v2.ToDtype(torch.float32, scale=True))
        if self.hparams["normalize"]:
            steps.append(v2.Normalize(IMAGENET_MEAN, IMAGENET_STD))
        transform: Callable[[Any], Tensor] = v2.Compose(steps)
        return transform


def split_faces(faces: UTKFace, test_fraction: float, val_fraction: float, seed: int) -> dict[str, list[int]]:
    """Return which faces are for "train", "val" and "test"; images that are the same, byte by byte, stay together."""
    contents: dict[bytes, int] = {}
    which = np.array([contents.setdefault(_digest(file), len(contents)) for file in faces.files])
    place = np.random.default_rng(seed).permutation(len(contents))[which]
    num_test, num_val = (round(fraction * len(contents)) for fraction in (test_fraction, val_fraction))
    kinds = np.digitize(place, [num_test, num_test + num_val])
    split = {name: np.flatnonzero(kinds == kind).tolist() for kind, name in enumerate(("test", "val", "train"))}
    if empty := [name for name, indices in split.items() if not indices]:
        raise ValueError(f"{len(faces)} faces are too few to split: none is left for {' and '.join(empty)}. Give more.")
    return split


def _digest(file: ImageFile) -> bytes:
    return hashlib.blake2b(file.read(), digest_size=16).digest()
