"""Get hold of the logits that a LightningModule computes, without a change to its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fairbatch_lightning.losses import find_logits


class ForwardDone(BaseException):
    """Raised out of a forward pass whose logits are all that is wanted; not an error, so no `except Exception`."""


class LogitsCapture:
    """A forward hook that keeps the logits of one step while it is armed, and otherwise does nothing.

    Args:
        module: The module whose output is, or holds, the logits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._expected: int | None = None
        self._stop = False
        self._alone = False
        self._keep_graph = False
        self._logits: Tensor | None = None
        self._first: Tensor | None = None
        self.has_others = False
        """Whether the last step had several outputs that could be the logits."""
        self._module = module
        self._handle = module.register_forward_hook(self._keep)

    @property
    def is_compiled(self) -> bool:
        """Whether the module was compiled in place, `module.compile()`, and the hook with it."""
        return getattr(self._module, "_compiled_call_impl", None) is not None

    def arm(self, batch_size: int, *, stop: bool = False, alone: bool = False, keep_graph: bool = False) -> None:
        """Keep the first output with `batch_size` rows.

        With `stop` raise `ForwardDone` as soon as it is there; with `alone` see whether there are others like it; with
        `keep_graph` it can be differentiated.
        """
        self._expected, self._stop, self._logits, self._keep_graph = batch_size, stop, None, keep_graph
        self._alone, self._first, self.has_others = alone, None, False

    def take(self) -> Tensor | None:
        """Return what was kept, if anything, and stop keeping."""
        logits, self._logits, self._expected, self._first = self._logits, None, None, None
        return logits

    def remove(self) -> None:
        """Take the hook out of the module."""
        self._handle.remove()

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._expected is None or (self._logits is not None and not self._alone):
            return
        logits = find_logits(output)
        if logits is None or logits.ndim == 0 or logits.shape[0] != self._expected:  # `len` takes far longer
            return
        if self._logits is not None:  # what the step returns comes by as well if there are several processes
            self.has_others |= logits is not self._first and logits.shape == self._logits.shape
        else:
            self._logits, self._first = logits if self._keep_graph else logits.detach(), logits
            if self._stop:
                raise ForwardDone


def watch(capture: LogitsCapture | None, module: nn.Module, name: str | None) -> LogitsCapture | None:
    """Return what watches a module, or its submodule of that name; None as long as that has not been built."""
    modules = dict(module.named_modules())
    return LogitsCapture(modules[name or ""]) if capture is None and (name or "") in modules else capture


def not_a_submodule(module: nn.Module, name: str | None) -> str:
    """Return what to tell the user about a name that no submodule has."""
    return (
        f"Expected argument `logits` to name a submodule of {type(module).__name__} but got {name!r}. It has"
        f" {[known for known, _ in module.named_modules() if known]}."
    )


@contextmanager
def shadowed(instance: object, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes for a while, behind the back of its class."""
    before = {name: vars(instance)[name] for name in attributes if name in vars(instance)}
    vars(instance).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(instance)[name]
        vars(instance).update(before)
