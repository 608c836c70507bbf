"""Torchvision's models with other heads and weights."""

import hashlib
import os
import re
from dataclasses import replace

import pytest
import torch
from torchvision import models

from fairbatch_lightning.vision.backbones import build_backbone, classification_models

# Of the RegNets, which are all alike, only small ones are built: they cannot be without memory.
BUILT = [name for name in classification_models() if "regnet" not in name or name.endswith("_400mf")]


def classifier(num_classes, backbone="resnet18", weights="DEFAULT"):
    return build_backbone(backbone, weights, num_classes)[0]


class Evil:
    def __reduce__(self):
        return os.system, ("echo",)


def test_models_are_known():
    assert {"resnet18", "googlenet", "vit_b_16", "regnet_y_400mf", "squeezenet1_1"} <= set(BUILT)
    assert len(BUILT) > 50


@pytest.mark.parametrize(("backbone", "head"), [("resnet18", "fc"), ("squeezenet1_1", "classifier.1")])
def test_the_new_head_is_named(backbone, head):
    model, name = build_backbone(backbone, None, 7)
    assert name == head
    assert model.get_submodule(name).weight.shape[0] == 7


@pytest.mark.parametrize("backbone", BUILT)
def test_every_model_gets_a_new_head(backbone):
    with torch.device("cpu" if "regnet" in backbone else "meta"):
        model = classifier(7, backbone, weights=None)
    shapes = [tuple(weight.shape) for weight in model.parameters()]
    assert sum(shape[0] == 7 for shape in shapes) in (1, 2)  # with or without bias
    assert not any(shape[0] == 1000 for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["googlenet", "inception_v3", "squeezenet1_1", "vit_b_16", "shufflenet_v2_x0_5"])
def test_logits(backbone):
    model = classifier(3, backbone, weights=None)
    size = {"inception_v3": 96, "vit_b_16": 224}.get(backbone, 64)
    assert model.train()(torch.randn(2, 3, size, size)).shape == (2, 3)


def test_googlenet_has_no_auxiliary_heads():
    model = classifier(3, "googlenet", weights=None).train()
    assert isinstance(model(torch.randn(2, 3, 32, 32)), torch.Tensor)
    assert not [name for name, _ in model.named_parameters() if "aux" in name]


def test_unknown_backbone():
    with pytest.raises(ValueError, match=r"such as resnet18.* but got 'resnet_18'"):
        classifier(2, "resnet_18")


def test_weights_from_a_file(tmp_path):
    published = models.resnet18()
    torch.save(published.state_dict(), tmp_path / "resnet18.pth")
    model = classifier(3, weights=str(tmp_path / "resnet18.pth"))
    own = model.state_dict()
    assert own["fc.weight"].shape == (3, 512)
    assert all(torch.equal(own[key], value) for key, value in published.state_dict().items() if "fc." not in key)


def test_weights_of_googlenet_with_auxiliary_heads(tmp_path):
    published = models.googlenet(init_weights=True)
    torch.save(published.state_dict(), tmp_path / "googlenet.pth")
    own = classifier(3, "googlenet", weights=str(tmp_path / "googlenet.pth")).state_dict()
    assert torch.equal(own["conv1.conv.weight"], published.state_dict()["conv1.conv.weight"])


def test_weights_without_a_head(tmp_path):
    state = {key: value for key, value in models.resnet18().state_dict().items() if "fc." not in key}
    torch.save(state, tmp_path / "backbone.pth")
    own = classifier(3, weights=str(tmp_path / "backbone.pth")).state_dict()
    assert torch.equal(own["conv1.weight"], state["conv1.weight"])


def test_weights_of_another_model(tmp_path):
    torch.save(models.resnet34().state_dict(), tmp_path / "resnet34.pth")
    with pytest.raises(ValueError, match=r"weights of a resnet18 but got some with the unknown layer1\.2\.bn1"):
        classifier(3, weights=str(tmp_path / "resnet34.pth"))


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {}])
def test_file_without_weights(tmp_path, content):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth to hold a dict of tensors"):
        classifier(3, weights=str(tmp_path / "other.pth"))


def test_file_that_would_run_code(tmp_path):
    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth to hold weights and nothing else"):
        classifier(3, weights=str(tmp_path / "evil.pth"))


def test_no_such_file():
    with pytest.raises(ValueError, match=r"one of \['IMAGENET1K_V1', 'DEFAULT'\] or a file.* no such file"):
        classifier(3, weights="here.pth")


def test_offline(tmp_path, monkeypatch):
    """The real download, of an address that leads nowhere."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = models.ResNet18_Weights.DEFAULT
    monkeypatch.setattr(weights, "_value_", replace(weights.value, url="http://localhost:1/resnet18-0.pth"))
    with pytest.raises(RuntimeError, match=r"Could not download.*weights='resnet18-0\.pth', or put it into .*check"):
        classifier(3)


@pytest.mark.parametrize("backbone", ["resnet18", "googlenet", "mnasnet0_5"])
def test_downloaded(backbone, tmp_path, monkeypatch):
    """The real download, of a file on this machine; then the same file without a download."""
    published = models.get_model(backbone, **({"init_weights": True} if backbone == "googlenet" else {})).state_dict()
    torch.save(published, tmp_path / "file.pth")
    digest = hashlib.sha256((tmp_path / "file.pth").read_bytes()).hexdigest()[:8]
    path = (tmp_path / "file.pth").rename(tmp_path / f"{backbone}-{digest}.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    weights = models.get_model_weights(backbone).DEFAULT
    monkeypatch.setattr(weights, "_value_", replace(weights.value, url=path.as_uri()))
    downloaded, from_file = classifier(3, backbone), classifier(3, backbone, weights=str(path))
    first = next(key for key in published if key.endswith("weight"))
    assert torch.equal(downloaded.state_dict()[first], published[first])
    from_file.load_state_dict(downloaded.state_dict())  # the same but for the new heads
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(downloaded.eval()(images), from_file.eval()(images))


def test_old_files_of_weights(tmp_path):
    """They lack counters that torch had not invented, and have old names in DenseNets."""
    published = models.densenet121().state_dict()
    old = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
        for key, value in published.items()
        if "num_batches_tracked" not in key
    }
    assert set(old) - set(published)
    torch.save(old, tmp_path / "old.pth")
    own = classifier(3, "densenet121", weights=str(tmp_path / "old.pth")).state_dict()
    assert all(torch.equal(own[key], value) for key, value in published.items() if "classifier" not in key)


def test_weights_for_larger_images():
    with pytest.raises(ValueError, match=r"images of \(224, 224\) pixels.*IMAGENET1K_SWAG_E2E_V1 are for \(384, 384\)"):
        classifier(3, "vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")
