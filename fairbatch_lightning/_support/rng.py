"""Leave the global random number generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserved_rng(seed: int | None = None) -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's generators (CPU and accelerator) on exit.

    With a `seed` what happens inside is repeatable, on the CPU and on the current CUDA or MPS device.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with preserved_rng():
    ...     inside = torch.rand(2)
    >>> torch.equal(inside, torch.rand(2))
    True
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(**(accelerator := _accelerator())):
            if seed is not None:
                random.seed(seed := int(seed))  # torch refuses NumPy's integers
                np.random.seed(seed % 2**32)  # noqa: NPY002
                torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would prepare for devices to come
                if accelerator["devices"]:
                    getattr(torch, accelerator["device_type"]).manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _accelerator() -> dict[str, Any]:
    """Return the arguments that make `fork_rng` cover the accelerator's current device, if there is one."""
    if torch.cuda.is_available():
        return {"devices": [torch.cuda.current_device()], "device_type": "cuda"}
    if torch.backends.mps.is_available():
        return {"devices": [0], "device_type": "mps"}
    return {"devices": []}
