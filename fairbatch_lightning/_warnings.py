"""The one category under which this package warns, so that users can filter it."""

from __future__ import annotations

import warnings

import torch.distributed as dist


class FairBatchWarning(UserWarning):
    """Something about the data or the run that FairBatch handles, but that you should know."""


def warn(message: str) -> None:
    """Emit a [`FairBatchWarning`][fairbatch_lightning.FairBatchWarning], on the first of several processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
        return
    warnings.warn(message, FairBatchWarning, stacklevel=3)
