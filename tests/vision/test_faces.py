"""Drawn faces."""

import numpy as np
import torch

from fairbatch_lightning.vision import Faces
from fairbatch_lightning.vision.faces import HEADS


def test_faces_are_biased_and_repeatable():
    faces = Faces(3000, seed=0)
    assert faces.targets == Faces(3000, seed=0).targets
    rates = {head: np.mean([y for y, h in zip(faces.targets, faces.head, strict=True) if h == head]) for head in HEADS}
    assert rates["round"] > 0.8
    assert rates["square"] < 0.2
    images = faces.draw(slice(0, 50), seed=1)
    assert images.shape == (50, 3, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(images, faces.draw(slice(0, 50), seed=1))


def test_mouths_tell_smiles():
    """Below the middle the mouth's corners of a smile are higher: the drawing shows the label."""
    faces = Faces(2000, seed=0)
    images, labels = faces.draw(slice(None), seed=0).mean(1), torch.tensor(faces.targets)
    difference = images[labels == 1].mean(0) - images[labels == 0].mean(0)
    corner, middle = difference[18:21, 11:13].mean(), difference[18:21, 15:17].mean()
    assert corner < middle


def test_still_faces_do_not_move():
    still, moving = Faces(5, seed=0, still=True), Faces(5, seed=0)
    assert torch.equal(still[3][0], still[3][0])
    assert not torch.equal(moving[3][0], moving[3][0])
    assert still.targets == moving.targets
