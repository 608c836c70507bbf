"""The one category under which this package warns, so that users can filter it."""

from __future__ import annotations

import warnings

from fairbatch_lightning._support.processes import rank


class FairBatchWarning(UserWarning):
    """Something about the data or the run that FairBatch handles, but that you should know."""


def warn(message: str) -> None:
    """Emit a [`FairBatchWarning`][fairbatch_lightning.FairBatchWarning], on the first of several processes."""
    if rank() > 0:
        return
    warnings.warn(message, FairBatchWarning, stacklevel=3)
