"""Fine-tune pretrained image classifiers fairly, on UTKFace, on drawn faces, or on data of your own."""

from fairbatch_lightning.vision.classifier import VisionClassifier
from fairbatch_lightning.vision.datamodule import UTKFaceDataModule
from fairbatch_lightning.vision.faces import Faces
from fairbatch_lightning.vision.utkface import UTKFace

__all__ = ["Faces", "UTKFace", "UTKFaceDataModule", "VisionClassifier"]
