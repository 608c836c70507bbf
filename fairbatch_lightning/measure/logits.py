"""Read the logits that a LightningModule computes, without a change to its code.

Everybody who needs logits has a `LogitsReader`, so that where they come from is decided, and explained, in one place:
what a step returns as `{"logits": ...}` comes before the output of the module, and the output of a submodule that the
user named before both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class ForwardDone(BaseException):
    """Raised out of a forward pass whose logits are all that is wanted; not an error, so no `except Exception`."""


class LogitsReader:
    """Reads the logits of a batch from a step of the user's module.

    Args:
        who: The callback that needs them, for messages.
        name: The submodule that computes them, if the user named one; then its output comes first.
        only_one: Refuse a step that computes several outputs of the same shape, instead of taking the first.
    """

    def __init__(self, who: str, name: str | None = None, *, only_one: bool = False) -> None:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"Expected argument `logits` to be the name of a submodule but got {name!r}.")
        self._who, self._name, self._only_one = who, name, only_one
        self._hook: _OutputHook | None = None
        self.training_step_returns = False
        """Whether the logits are what `training_step` returns, so that it must run to its end for them."""

    def attach(self, module: nn.Module, *, required: bool = True) -> None:
        """Watch a module, or its submodule of that name, which may be built only later."""
        modules = dict(module.named_modules()) if self._hook is None else {}
        if (self._name or "") in modules:
            self._hook = _OutputHook(modules[self._name or ""])
        if self._hook is None and required:
            raise ValueError(
                f"Expected argument `logits` to name a submodule of {type(module).__name__} but got {self._name!r}. It"
                f" has {[known for known in modules if known]}."
            )

    def detach(self) -> None:
        """Leave no trace in the module."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @property
    def is_compiled(self) -> bool:
        """Whether the watched module was compiled in place, `module.compile()`, and the hook with it."""
        return self._hook is not None and self._hook.is_compiled

    def expect(self, batch_size: int, *, stop: bool = False, keep_graph: bool = False) -> None:
        """Keep the first output with `batch_size` rows of the step that comes next.

        With `stop` the forward pass is left there, by `ForwardDone`; with `keep_graph` it can be differentiated.
        """
        if self._hook is not None:
            self._hook.arm(batch_size, stop=stop, keep_graph=keep_graph, alone=self._only_one)

    def read(
        self, output: Any, batch_size: int, step: str = "training_step", *, returned_first: bool = True
    ) -> Tensor | None:
        """Return the logits of a batch, if there are any.

        Args:
            output: What the step returned.
            batch_size: How many rows they have.
            step: The name of the step.
            returned_first: Whether what it returned comes before what was kept, if no submodule was named.
        """
        captured = self._hook.take() if self._hook is not None else None
        returned = returned_logits(output, batch_size)
        if returned is not None and (captured is None or (returned_first and self._name is None)):
            return returned
        if self._hook is not None and self._hook.has_others:
            raise RuntimeError(
                f"{self._who} cannot tell which output is the prediction: `{step}` computes several for a batch, as"
                f' for test-time augmentation. Return {{"logits": logits}} from `{step}`.'
            )
        return captured

    def drop(self) -> None:
        """Keep nothing any more: the step has failed, or nobody wants its logits."""
        if self._hook is not None:
            self._hook.take()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the module."""
        return {**vars(self), "_hook": None}

    def require(self, output: Any, batch_size: int, step: str = "training_step") -> Tensor:
        """Return the logits of a batch; an error says what to do where there are none."""
        logits = self.read(output, batch_size, step)
        if logits is None:
            raise self.missing(batch_size, step)
        return logits

    def missing(self, batch_size: int, step: str = "training_step") -> RuntimeError:
        """Return what to tell the user when the logits of a batch are not to be found."""
        return RuntimeError(
            f"{self._who} found no logits for a batch of {batch_size} samples: `{step}` did not call `self(x)`, or the"
            " output of that is not a tensor, mapping or object with `logits` of that many rows. Either name the"
            f' submodule that computes them, {self._who}(logits="net"), or return {{"loss": loss, "logits": logits}}'
            f" from `{step}`."
        )


class _OutputHook:
    """A forward hook that keeps the logits of one step while it is armed, and otherwise does nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._expected: int | None = None
        self._stop = self._alone = self._keep_graph = False
        self._logits: Tensor | None = None
        self._first: Tensor | None = None
        self.has_others = False
        """Whether the last step had several outputs that could be the logits."""
        self._module = module
        self._handle = module.register_forward_hook(self._keep)

    @property
    def is_compiled(self) -> bool:
        return getattr(self._module, "_compiled_call_impl", None) is not None

    def arm(self, batch_size: int, *, stop: bool, alone: bool, keep_graph: bool) -> None:
        self._expected, self._stop, self._logits, self._keep_graph = batch_size, stop, None, keep_graph
        self._alone, self._first, self.has_others = alone, None, False

    def take(self) -> Tensor | None:
        logits, self._logits, self._expected, self._first = self._logits, None, None, None
        return logits

    def remove(self) -> None:
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


def find_logits(output: Any) -> Tensor | None:
    """Return the logits in a model's output, or None: a tensor, or `logits` in a mapping or an object.

    The objects include torchvision's GoogLeNet and Inception outputs and Hugging Face's model outputs.

    >>> import torch
    >>> find_logits({"logits": torch.zeros(1), "hidden": None})
    tensor([0.])
    """
    if not isinstance(output, Tensor):
        output = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None


def returned_logits(output: Any, batch_size: int) -> Tensor | None:
    """Return the logits in what a step returned, if it did: a loss alone is not."""
    logits = None if isinstance(output, Tensor) else find_logits(output)
    return logits if logits is not None and logits.ndim > 0 and len(logits) == batch_size else None
