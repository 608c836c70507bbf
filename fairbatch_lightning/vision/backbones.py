"""Torchvision's classification models with other heads and weights than they come with."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torchvision import models

NUM_IMAGENET_CLASSES = 1000
AUXILIARY_HEADS = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}
"""What some models have for training on ImageNet, next to their head: left out here."""


def classification_models() -> list[str]:
    """Return the names of torchvision's classification models."""
    return list(models.list_models(module=models))


def build_backbone(name: str, weights: str | None, num_classes: int) -> tuple[nn.Module, str]:
    """Return a model for `num_classes` classes that starts from the weights, and the name of its new head.

    Args:
        name: Of a torchvision classification model.
        weights: "DEFAULT" or another name of torchvision's weights, a file of weights, or None.
        num_classes: How many classes the new head tells apart.
    """
    if name not in classification_models():
        similar = get_close_matches(name, classification_models()) or ["resnet18", "googlenet"]
        raise ValueError(
            f"Expected argument `backbone` to be a classification model of torchvision, such as {', '.join(similar)},"
            f" but got {name!r}."
        )
    published = models.get_model_weights(name).__members__
    if weights in published:
        model = _downloaded(name, published[weights])
    elif weights is None or Path(weights).is_file():
        model = models.get_model(name, weights=None, **({"init_weights": True} if name in AUXILIARY_HEADS else {}))
    else:
        raise ValueError(
            f"Expected argument `weights` to be None, one of {list(published)} or a file of weights, but got"
            f" {weights!r} and there is no such file."
        )
    if name in AUXILIARY_HEADS:
        _simplify(model, name)
    head = _replace_head(model, num_classes)
    if weights is not None and weights not in published:
        _load_file(model, name, Path(weights), head)
    return model, head


def _downloaded(name: str, weights: models.WeightsEnum) -> nn.Module:
    """Return a model with published weights; its shapes must be the usual ones, so that checkpoints can be loaded."""
    usual = models.get_model_weights(name).DEFAULT.meta.get("min_size")
    if weights.meta.get("min_size") != usual:
        raise ValueError(
            f"Expected weights of {name} for images of {usual} pixels, as its DEFAULT, but {weights.name} are for"
            f" {weights.meta.get('min_size')}. Use others."
        )
    try:
        model: nn.Module = models.get_model(name, weights=weights)
    except (URLError, OSError) as error:
        folder, file = Path(torch.hub.get_dir()) / "checkpoints", weights.url.rsplit("/", 1)[-1]
        raise RuntimeError(
            f"Could not download the weights {weights.name} of {name} ({error}). Get {weights.url} on a machine with"
            f" internet, and give the file, weights={file!r}, or put it into {folder}. weights=None starts at random."
        ) from error
    return model


def _simplify(model: Any, name: str) -> None:
    """Leave out auxiliary heads; take the same input whatever the weights were."""
    model.aux_logits, model.transform_input = False, True
    for head in AUXILIARY_HEADS[name]:
        setattr(model, head, None)


def _replace_head(model: nn.Module, num_classes: int) -> str:
    """Put a new last layer into a model; return its name."""
    *_, (name, layer) = (named for named in model.named_modules() if _outputs(named[1]) == NUM_IMAGENET_CLASSES)
    new: nn.Module
    if isinstance(layer, nn.Linear):
        new = nn.Linear(layer.in_features, num_classes, bias=layer.bias is not None)
    else:  # SqueezeNet's
        new = nn.Conv2d(layer.in_channels, num_classes, kernel_size=1)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)
    return str(name)


def _outputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels if isinstance(layer, nn.Conv2d) else None


def _load_file(model: nn.Module, name: str, file: Path, head: str) -> None:
    """Load weights from a file: all of them but those of a head for other classes."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"Expected {file} to hold weights and nothing else, but it holds objects, which could run any code when"
            " they are loaded. Save the weights alone: torch.save(model.state_dict(), file)."
        ) from error
    state, own = _weights_in(content, file), model.state_dict()
    auxiliary = tuple(f"{auxiliary}." for auxiliary in AUXILIARY_HEADS.get(name, ()))
    in_head = {key for key in own if key.startswith(f"{head}.")}
    for key in list(state):
        if key.startswith(auxiliary) or (key in in_head and state[key].shape != own[key].shape):
            del state[key]
    counters = {key for key in own if key.endswith("num_batches_tracked")}  # old files lack them
    missing, unexpected = sorted(set(own) - set(state) - in_head - counters), sorted(set(state) - set(own))
    misfits = sorted(key for key in set(own) & set(state) if own[key].shape != state[key].shape)
    problems = {"without": missing, "with the unknown": unexpected, "with other shapes of": misfits}
    if found := [f"{word} {', '.join(keys[:3])} ({len(keys)} in all)" for word, keys in problems.items() if keys]:
        raise ValueError(
            f"Expected {file} to hold the weights of a {name} but got some {'; '.join(found)}. Is `backbone` right?"
        )
    model.load_state_dict(state, strict=False)


def _weights_in(content: Any, file: Path) -> OrderedDict[str, Tensor]:
    """Return the weights in a loaded file; of a Lightning checkpoint those of the module's `model`."""
    versions = getattr(content, "_metadata", None)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        inside = content["state_dict"].items()
        content = {key.removeprefix("model."): value for key, value in inside if key.startswith("model.")}
    if not (isinstance(content, Mapping) and content and all(isinstance(value, Tensor) for value in content.values())):
        raise ValueError(
            f"Expected {file} to hold a dict of tensors, a model's state_dict, but it holds something else. Use"
            " torch.save(model.state_dict(), file)."
        )
    old_densenet = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    weights = OrderedDict((old_densenet.sub(r"\1\2", key), value) for key, value in content.items())
    if versions is not None:
        weights._metadata = versions  # type: ignore[attr-defined]  # as `state_dict` has it, for MNASNet
    return weights
