"""Differences between devices."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def most_precise(device: torch.device) -> torch.dtype:
    """Return the most precise type of numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64
