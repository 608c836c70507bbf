"""A Callback for Trainers of both of Lightning's namespaces, `lightning.pytorch` and `pytorch_lightning`.

The two hold separate copies of every class, and a Trainer asks whether a callback is an instance of its own copy.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback as AnyCallback
else:
    from lightning.pytorch import Callback

    if find_spec("pytorch_lightning") is None:
        AnyCallback = Callback
    else:
        from pytorch_lightning import Callback as OtherCallback

        class AnyCallback(Callback, OtherCallback):
            """Base of callbacks that any Trainer takes."""


__all__ = ["AnyCallback"]
