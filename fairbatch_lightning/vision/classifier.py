"""Fine-tune any image classifier of torchvision."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from fairbatch_lightning.vision.backbones import build_backbone


class VisionClassifier(pl.LightningModule):
    """A torchvision model with a new head for your classes, trained with cross-entropy and AdamW.

    Nothing in it knows about fairness: add `FairBatch` to the Trainer. Logged are `train_loss`, `val_loss`,
    `val_accuracy`, `test_loss` and `test_accuracy`.

    Args:
        num_classes: How many classes to tell apart.
        backbone: The name of any classification model of torchvision, such as "resnet18" or "googlenet".
        weights: Where to start: "DEFAULT" or another name of torchvision's weights, which are downloaded; a file of
            weights, or a checkpoint of this class; None for a random start. Checkpoints need it no more.
        lr: The largest learning rate. It grows at first and falls to 0 at the end.
        weight_decay: AdamW's weight decay.
        freeze: Train nothing but the new head.
    """

    def __init__(
        self,
        num_classes: int,
        backbone: str = "resnet18",
        *,
        weights: str | None = "DEFAULT",
        lr: float = 5e-4,
        weight_decay: float = 0.05,
        freeze: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # A checkpoint has the weights in it; and LightningCLI tells only newer versions of Lightning how many classes.
        self.hparams.update(weights=None, num_classes=num_classes)
        self.model, self._head = build_backbone(backbone, weights, num_classes)
        if freeze:
            self.model.requires_grad_(False)
            self.model.get_submodule(self._head).requires_grad_(True)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = self.val_accuracy.clone()
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(B, num_classes)`."""
        logits: Tensor = self.model(images)
        return logits

    def train(self, mode: bool = True) -> VisionClassifier:
        """Switch to training, in which a frozen backbone takes no part: batch norm would go on learning."""
        super().train(mode)
        if self.hparams["freeze"]:
            self.model.eval()
            self.model.get_submodule(self._head).train(mode)
        return self

    def on_train_start(self) -> None:
        """Refuse to go on from a checkpoint of a training of another length."""
        planned, steps = getattr(self.lr_schedulers(), "total_steps", None), self.trainer.estimated_stepping_batches
        if planned is not None and planned != steps:
            raise ValueError(
                f"The learning rate of the checkpoint falls to 0 in {planned} steps, but this training has {steps}. Go"
                " on with as many epochs as it was planned for, or start anew from its weights:"
                " VisionClassifier(weights=<the checkpoint>)."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate("val", self.val_accuracy, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate("test", self.test_accuracy, batch)

    def configure_optimizers(self) -> Any:
        """Return AdamW with one cycle of the learning rate."""
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        lr: float = self.hparams["lr"]
        optimizer = torch.optim.AdamW(weights, lr, weight_decay=self.hparams["weight_decay"])
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ValueError(
                "Expected Trainer(max_epochs=...) or Trainer(max_steps=...): the learning rate falls to 0 at the end,"
                " which must be known."
            )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, stage: str, accuracy: Metric, batch: Any) -> None:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        self.log(f"{stage}_loss", functional.cross_entropy(logits, labels), sync_dist=True)
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True)
