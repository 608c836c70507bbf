"""Torchvision's models as LightningModules."""

import copy

import pytest
import torch
from helpers import trainer
from torchvision import models

from fairbatch_lightning.vision import UTKFaceDataModule, VisionClassifier


def test_logs_loss_and_accuracy(root):
    model, run = VisionClassifier(2, weights=None), trainer(max_epochs=1)
    data = UTKFaceDataModule(root, image_size=16, batch_size=10)
    run.fit(model, data)
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(run.callback_metrics)
    (result,) = run.test(model, data, verbose=False)
    images, labels = next(iter(data.test_dataloader()))
    with torch.no_grad():
        expected = (model.eval()(images).argmax(1) == labels).float().mean()
    assert result["test_accuracy"] == pytest.approx(float(expected))


def test_the_learning_rate_grows_and_falls_to_0(root):
    model, run = VisionClassifier(2, weights=None, lr=0.01), trainer(max_epochs=2)
    rates = []
    model.on_train_batch_start = lambda *_: rates.append(model.optimizers().param_groups[0]["lr"])
    run.fit(model, UTKFaceDataModule(root, image_size=16, batch_size=10))
    assert len(rates) == 8
    assert max(rates) == pytest.approx(0.01, rel=0.2)
    assert rates[0] < 0.1 * max(rates)
    assert rates[-1] < 0.01 * max(rates)


def test_frozen_backbone_does_not_change(root):
    model = VisionClassifier(2, weights=None, freeze=True)
    before = copy.deepcopy(model.model.state_dict())
    trainer(max_epochs=2).fit(model, UTKFaceDataModule(root, image_size=16, batch_size=10))
    changed = {key for key, value in model.model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"fc.weight", "fc.bias"}


def test_checkpoint_needs_no_weights(root, tmp_path):
    torch.save(models.resnet18().state_dict(), tmp_path / "resnet18.pth")
    model, run = VisionClassifier(2, weights=str(tmp_path / "resnet18.pth")), trainer(max_epochs=1)
    run.fit(model, UTKFaceDataModule(root, image_size=16, batch_size=10))
    run.save_checkpoint(tmp_path / "model.ckpt")
    (tmp_path / "resnet18.pth").unlink()
    again = VisionClassifier.load_from_checkpoint(tmp_path / "model.ckpt")
    assert torch.equal(again.model.fc.weight, model.model.fc.weight)
    with pytest.raises(ValueError, match="falls to 0 in 4 steps, but this training has 8"):
        trainer(max_epochs=2).fit(
            again, UTKFaceDataModule(root, image_size=16, batch_size=10), ckpt_path=tmp_path / "model.ckpt"
        )
    onward = VisionClassifier(2, weights=str(tmp_path / "model.ckpt"))
    assert torch.equal(onward.model.fc.weight, model.model.fc.weight)


def test_end_of_training_must_be_known(root):
    with pytest.raises(ValueError, match=r"Expected Trainer\(max_epochs"):
        trainer(max_epochs=-1).fit(VisionClassifier(2, weights=None), UTKFaceDataModule(root, image_size=16))


def test_unknown_backbones_and_weights_are_refused():
    with pytest.raises(ValueError, match=r"such as resnet18.* but got 'resnet_18'"):
        VisionClassifier(2, "resnet_18")
    with pytest.raises(ValueError, match=r"or a file.* no such file"):
        VisionClassifier(2, weights="here.pth")
