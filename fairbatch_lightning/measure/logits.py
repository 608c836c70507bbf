"""Read the logits that a LightningModule computes, without a change to its code.

Everybody who needs logits has a `LogitsReader`, so that where they come from is decided, and explained, in one place:
what a step returns as `{"logits": ...}` comes before the output of the module, and the output of a submodule that the
user named before both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairbatch_lightning.measure.outputs import (
    AllOutputs,
    Output,
    find_logits,
    returned_logits,
    uncopied,
    watch_forward,
)


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
        self.who, self.name, self._only_one = who, name, only_one
        self._hook: _OutputHook | None = None
        self._watched = name or ""
        self.training_step_returns = False
        """Whether the logits are what `training_step` returns, so that it must run to its end for them."""

    def attach(self, module: nn.Module, *, required: bool = True) -> None:
        """Watch a module, or its submodule of that name, which may be built only later."""
        modules = dict(module.named_modules()) if self._hook is None else {}
        if (self.name or "") in modules:
            self._hook = _OutputHook(modules[self.name or ""])
        if self._hook is None and required:
            raise ValueError(
                f"Expected argument `logits` to name a submodule of {type(module).__name__} but got {self.name!r}. It"
                f" has {[known for known in modules if known]}."
            )

    def watch(self, module: nn.Module, output: Output, passes: int) -> None:
        """From now on take this output of a step, of as many as the module gives for a batch."""
        if self._hook is None or not self._hook.watches(module, output):
            self.detach()
            part = module.get_submodule(output.name)
            self._hook, self._watched = _OutputHook(part, direct=output.direct), output.name
        self._hook.number, self._hook.passes = output.number, passes

    @property
    def watched(self) -> list[Any] | None:
        """What `watch` was told, as plain values for checkpoints; None if it was not."""
        hook = self._hook
        return None if hook is None or not hook.passes else [self._watched, hook.direct, hook.number, hook.passes]

    def watch_again(self, module: nn.Module, output: Output, passes: int) -> None:
        """Watch what a checkpoint says was watched, if the module has that."""
        if output.name in dict(module.named_modules()):
            self.watch(module, output, passes)

    def detach(self) -> None:
        """Leave no trace in the module."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @property
    def is_compiled(self) -> bool:
        """Whether the watched module was compiled in place, `module.compile()`, and the hook with it."""
        return self._hook is not None and self._hook.is_compiled

    @property
    def sees_other_passes(self) -> bool:
        """Whether the last step called the watched module more or less often than before."""
        return self._hook is not None and self._hook.sees_other_passes

    def expect(
        self, batch_size: int, *, stop: bool = False, keep_graph: bool = False, training_step: bool = True
    ) -> None:
        """Keep the output with `batch_size` rows of the step that comes next: the first, or the one to `watch`.

        With `stop` the forward pass is left there, by `ForwardDone`; with `keep_graph` it can be differentiated. Steps
        other than `training_step` may call the model another number of times, but must leave no doubt.
        """
        if self._hook is not None:
            alone = self._only_one or (self._hook.passes > 1 and not training_step)
            counts = training_step and self._hook.passes > 0
            self._hook.arm(batch_size, stop=stop, keep_graph=keep_graph, alone=alone, counts=counts)

    def forward_ends(self) -> None:
        """Count no more outputs: what follows is the backward pass, which may compute some again."""
        if self._hook is not None:
            self._hook.counts = False

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
        if returned is not None and (captured is None or (returned_first and self.name is None)):
            return returned
        if self._hook is not None and self._hook.has_others:
            raise RuntimeError(
                f"{self.who} cannot tell which output is the prediction: `{step}` computes several for a batch, as"
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

    def missing(self, batch_size: int, step: str = "training_step", outputs: AllOutputs | None = None) -> RuntimeError:
        """Return what to tell the user when the logits of a batch are not to be found, given all that there was."""
        own = f"the submodule {self.name!r}" if self.name else "`self(x)`"
        seen = "" if outputs is None else f" There was: {outputs.described()}.{_hint(outputs, self.name, batch_size)}"
        if self.sees_other_passes and self._hook is not None:
            seen += f" It gave other than the {self._hook.passes} outputs that it gives for a training batch."
        return RuntimeError(
            f"{self.who} found no logits for a batch of {batch_size} samples: `{step}` did not call {own}, or the"
            f" output of that is not a tensor, mapping or object with `logits` of that many rows.{seen} Either name the"
            f' submodule that computes them, {self.who}(logits="net"), or return'
            f' {{"loss": loss, "logits": logits}} from `{step}`.'
        )


def _hint(outputs: AllOutputs, name: str | None, batch_size: int) -> str:
    """Return what is probably the matter with what the module gave."""
    own = outputs.own(name or "")
    rows = next((output.rows for output in own if output.rows is not None), None)
    if rows is not None and rows > batch_size and rows % batch_size == 0:
        return f" It has {rows // batch_size} rows for every sample: return the logits that belong to the samples."
    if rows is not None and rows < batch_size:
        return " Samples seem to be dropped on the way: keep them, and leave them out of the loss."
    if own and rows is None:
        return f" Its output is {own[0].looks}, in which no entry is called `logits`: name it so, or return them."
    return ""


class _OutputHook:
    """A forward hook that keeps the logits of one step while it is armed, and otherwise does nothing.

    Args:
        module: Whose outputs to watch.
        direct: Whether somebody calls its `forward`, of which hooks know nothing.
    """

    def __init__(self, module: nn.Module, *, direct: bool = False) -> None:
        self._expected: int | None = None
        self._stop = self._alone = self._keep_graph = False
        self._logits: Tensor | None = None
        self._first: Tensor | None = None
        self.has_others = False
        """Whether the last step had several outputs that could be the logits."""
        self.number = 0
        """Which of the outputs with the right number of rows to keep."""
        self.passes = 0
        """How many of them a step has; 0 if that is not known."""
        self.counts, self._seen = False, 0
        self._module, self.direct = module, direct
        if direct:
            self.remove = watch_forward(module, lambda output: self._keep(module, (), output))
        else:
            self.remove = module.register_forward_hook(uncopied(self._keep)).remove

    @property
    def is_compiled(self) -> bool:
        return getattr(self._module, "_compiled_call_impl", None) is not None

    @property
    def sees_other_passes(self) -> bool:
        return self.passes > 0 and self._seen not in (0, self.passes)  # a step may leave a batch out

    def watches(self, module: nn.Module, output: Output) -> bool:
        return self._module is module.get_submodule(output.name) and self.direct == output.direct

    def arm(self, batch_size: int, *, stop: bool, alone: bool, keep_graph: bool, counts: bool) -> None:
        self._expected, self._stop, self._logits, self._keep_graph = batch_size, stop, None, keep_graph
        self._alone, self._first, self.has_others = alone, None, False
        self._seen, self.counts = 0, counts

    def take(self) -> Tensor | None:
        logits, self._logits, self._expected, self._first = self._logits, None, None, None
        return logits

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._expected is None or (self._logits is not None and not self._alone and not self.counts):
            return
        logits = find_logits(output)
        if logits is None or logits.ndim == 0 or logits.shape[0] != self._expected:  # `len` takes far longer
            return
        if self.counts:  # not where it would have something compiled again and again
            self._seen += 1
            if self._seen != self.number + 1:
                return
        if self._logits is not None:  # what the step returns comes by as well if there are several processes
            self.has_others |= logits is not self._first and logits.shape == self._logits.shape
        else:
            self._logits, self._first = logits if self._keep_graph else logits.detach(), logits
            if self._stop:
                raise ForwardDone
