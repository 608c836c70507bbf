"""What a step computes its loss of: the surest sign of which output are the logits, and whose labels they go with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

LOSSES = {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
}
"""Functions of torch that compare outputs with what they should be."""
_PICKS = {"gather": (2, "index"), "take_along_dim": (1, "indices"), "__getitem__": (1, "")}
"""Functions by which losses written by hand pick the label's logit: where the labels are among their arguments. They
may pick something else as well."""
_NORMALISE = {"log_softmax", "logsumexp", "softmax"}
"""Functions that make probabilities of classes."""
_KEEP = {
    *("bfloat16", "clamp", "clone", "contiguous", "detach", "double", "flatten", "float", "half", "log", "masked_fill"),
    *("log_softmax", "logsigmoid", "neg", "reshape", "reshape_as", "sigmoid", "softmax", "squeeze", "to", "type"),
    *("unsqueeze", "view", "view_as"),
}
"""Functions whose result speaks of the same samples and classes, if it has as many entries."""
_COMBINE = {
    *("add", "sub", "mul", "div", "true_divide", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__"),
    "__truediv__",
}
"""Functions of which that is so if what is added or multiplied is no output as well."""
IGNORED = -100
"""The label that torch leaves out by default."""


@dataclass(frozen=True, eq=False)
class LossCall:
    """Outputs were compared with something.

    Args:
        function: The name of the function.
        outputs: What it was given, and what that was made of, back to what a module returned.
        target: What they were compared with.
        ignored: The label that is left out.
    """

    function: str
    outputs: list[Tensor]
    target: Tensor
    ignored: int = IGNORED

    @property
    def is_pick(self) -> bool:
        """Whether values were only picked, perhaps for a loss."""
        return self.function in _PICKS

    def is_of(self, tensor: Tensor | None) -> bool:
        """Return whether these outputs were compared."""
        return tensor is not None and any(_same(one, tensor) for one in self.outputs)


class LossCalls(TorchFunctionMode):
    """Takes note of the losses that are computed while it is entered. All functions of torch take longer meanwhile.

    Args:
        batch_size: Of how many samples they are.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.calls: list[LossCall] = []
        self._batch_size = batch_size
        self._made_of: dict[int, tuple[Tensor, Tensor]] = {}  # by id, which the tensors held here keep theirs
        self._normalised: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and note it down if it is a loss, or leaves a tensor what it was."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (name in _KEEP or name in _COMBINE or name in LOSSES or name in _PICKS) and "out" not in kwargs:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, Tensor) and given.ndim and given.shape[0] == self._batch_size:
                self._note(name, given, args, kwargs, result)
        return result

    def _note(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._keeps(name, given, args, result):
            self._made_of[id(result)] = result, given
        if name in _NORMALISE:
            self._normalised.extend(self.history(given))
        target = _target(name, args, kwargs)
        if isinstance(target, Tensor) and target.ndim and target.shape[0] == self._batch_size:
            self.calls.append(LossCall(name, self.history(given), target, kwargs.get("ignore_index", IGNORED)))

    def _keeps(self, name: str, given: Tensor, args: tuple[Any, ...], result: Any) -> bool:
        """Return whether a result is of the same samples and classes, in the same order."""
        if not isinstance(result, Tensor) or result is given or result.ndim > 2:  # large ones are not kept alive
            return False
        if result.shape[:1] != given.shape[:1] or result.numel() != given.numel():
            return False
        if name in _COMBINE:
            return not any(isinstance(one, Tensor) and self._is_of_samples(one, given) for one in args[1:])
        return name in _KEEP or (name == "__getitem__" and _is_basic(args[1]))

    def _is_of_samples(self, one: Tensor, given: Tensor) -> bool:
        return one.ndim >= given.ndim and one.shape[0] == self._batch_size

    def history(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor, what it was made of, what that was made of, and so on."""
        if id(tensor) not in self._made_of:  # perhaps it is one of them, but detached
            alike = (made for made, _ in self._made_of.values() if _same(made, tensor))
            tensor = next(alike, tensor)
        found, known = [tensor], {id(tensor)}
        while (made := self._made_of.get(id(found[-1]))) is not None and id(made[1]) not in known:
            found.append(made[1])
            known.add(id(made[1]))
        return found

    def normalises(self, tensor: Tensor) -> bool:
        """Return whether probabilities of classes were made of it."""
        return any(_same(one, tensor) for one in self._normalised)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors share their values in memory; what a step returns is detached by Lightning."""
    if one is other:
        return True
    try:
        return one.shape == other.shape and one.data_ptr() == other.data_ptr() != 0
    except RuntimeError:  # it has no memory of its own, as inside of torch.func
        return False


def _is_basic(index: Any) -> bool:
    """Return whether an index leaves the samples as they are: slices of all, new axes, the only column."""
    parts = index if isinstance(index, tuple) else (index,)
    first = next((part for part in parts if part is not None), slice(None))
    basic = all(isinstance(part, int | slice | type(None) | type(...)) for part in parts)
    return basic and (first is ... or first == slice(None))


def _target(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what outputs are compared with by a call, if they are."""
    if name == "__getitem__":  # scores[range, labels] picks the label's, too
        places = args[1] if isinstance(args[1], tuple) else ()
        return places[1] if len(places) == 2 and all(isinstance(one, Tensor) for one in places) else None
    if name not in LOSSES and name not in _PICKS:
        return None
    place, word = _PICKS.get(name, (1, "target"))
    return args[place] if len(args) > place else kwargs.get(word)
