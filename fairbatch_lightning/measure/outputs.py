"""What a module and its parts give in a step: the candidates for the logits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


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


@dataclass(frozen=True, eq=False)
class Output:
    """Something that a module or submodule gave in a step.

    Args:
        name: The submodule; empty for the module itself.
        logits: What of it could be the logits.
        direct: Whether it was not called itself, but its `forward` was.
        number: How many others it had given before, of as many rows.
        looks: What it was, in words.
    """

    name: str
    logits: Tensor | None = None
    direct: bool = False
    number: int = 0
    looks: str = ""

    @property
    def place(self) -> str:
        """Where it came from, in words."""
        return f"`{self.name}`" if self.name else "`self.forward(x)`" if self.direct else "`self(x)`"

    @property
    def key(self) -> tuple[str, bool, int]:
        """What tells it from others of the step, and is the same in every step."""
        return self.name, self.direct, self.number

    @property
    def rows(self) -> int | None:
        """How many samples it seems to be of."""
        return None if self.logits is None or self.logits.ndim == 0 else self.logits.shape[0]


class AllOutputs:
    """What a module and its submodules gave while they were watched.

    Of submodules only what could be logits is kept, at most two-dimensional: large activations would take memory that
    a training does without. Copies of the module that are made meanwhile are not watched.
    """

    def __init__(self) -> None:
        self._found: list[Output] = []
        self._last: Any = None

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Watch a module for a while."""
        with ExitStack() as cleanup:
            for name, part in module.named_modules():
                if not isinstance(part, torch.jit.ScriptModule):  # they take no hooks
                    hook = part.register_forward_hook(_Uncopied(partial(self._keep, name)))
                    cleanup.callback(hook.remove)
            cleanup.callback(watch_forward(module, self._keep_direct))
            yield
        self._last = None

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not name and self._found and self._found[-1].direct and self._last is output:
            self._found.pop()  # it was called after all
        logits = find_logits(output)
        kept = logits if logits is not None and (not name or logits.ndim <= 2) else None
        self._found.append(Output(name, kept, looks=_shape(output)))

    def _keep_direct(self, output: Any) -> None:
        self._last = output
        self._found.append(Output("", find_logits(output), direct=True, looks=_shape(output)))

    def of_size(self, batch_size: int) -> list[Output]:
        """Return those that could be the logits of a batch, numbered, in the order in which they were computed."""
        numbers: Counter[tuple[str, bool]] = Counter()
        found = []
        for output in self._found:
            if output.rows == batch_size:
                found.append(replace(output, number=numbers[output.name, output.direct]))
                numbers[output.name, output.direct] += 1
        return found

    def own(self, name: str) -> list[Output]:
        """Return what the module itself, or a submodule, gave."""
        return [output for output in self._found if output.name == name]

    def described(self, most: int = 6) -> str:
        """Return what there was, for a message: the module's own outputs, then those of its parts, the last first."""
        parts = [output for output in reversed(self._found) if output.name]
        words = [f"{output.looks} of {output.place}" for output in [*self.own(""), *parts]]
        return "; ".join(list(dict.fromkeys(words))[:most]) or "no call of the module or any part of it"


def _shape(value: Any) -> str:
    """Return how a user would describe an output."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(f'{key}: {_shape(one)}' for key, one in list(value.items())[:4])}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(_shape, value[:4]))}"
    return f"an object {type(value).__name__}"


class _Uncopied:
    """A hook that copies of a module do not have: theirs do nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return _Uncopied()

    def __reduce__(self) -> Any:
        return _Uncopied, ()


def uncopied(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of which copies of the module have one that does nothing."""
    return _Uncopied(hook)


class _StandIn:
    """Stands in for a method of an object; copies of the object have the method itself."""

    def __init__(self, instance: Any, name: str, around: Callable[..., Any]) -> None:
        self._instance, self._name, self._around = instance, name, around
        self.before = vars(instance).get(name)
        method = getattr(instance, name)
        self._method = method
        self.__wrapped__ = getattr(method, "__wrapped__", method)  # Lightning looks behind one wrapper only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        instance = memo.get(id(self._instance), self._instance)
        return getattr(type(instance), self._name).__get__(instance)

    def __reduce__(self) -> Any:
        return getattr, (self._instance, self._name)


def stand_in(instance: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Let `around(method, *arguments)` be called in place of an object's method; return how to undo it."""
    new = _StandIn(instance, name, around)
    vars(instance)[name] = new

    def undo() -> None:
        if vars(instance).get(name) is new:
            vars(instance).pop(name)
            if new.before is not None:
                vars(instance)[name] = new.before

    return undo


def watch_forward(module: nn.Module, seen: Callable[[Any], None]) -> Callable[[], None]:
    """Call `seen` with every output of a module's `forward`, whoever calls that; return how to undo it."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen(output)
        return output

    return stand_in(module, "forward", around)
