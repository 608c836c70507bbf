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
_NORMALISE = {"log_softmax", "logsigmoid", "logsumexp", "sigmoid", "softmax"}
"""Functions that make probabilities of logits."""
_KEEP = {
    *_NORMALISE,
    *("bfloat16", "clamp", "clone", "contiguous", "detach", "double", "flatten", "float", "half", "log", "masked_fill"),
    *("neg", "reshape", "reshape_as", "squeeze", "to", "type", "unsqueeze", "view", "view_as", "where"),
    *("add", "sub", "mul", "div", "true_divide", "__add__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
    "__getitem__",
}
"""Functions whose result still speaks of the same samples and classes."""


@dataclass(frozen=True, eq=False)
class LossCall:
    """Outputs were compared with something.

    Args:
        function: The name of the function.
        outputs: What it was given, and what that was made of, back to what a module returned.
        target: What they were compared with.
    """

    function: str
    outputs: list[Tensor]
    target: Tensor

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
        if name in _KEEP or name in LOSSES or name in _PICKS:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, Tensor) and given.ndim and given.shape[0] == self._batch_size:
                self._note(name, given, args, kwargs, result)
        return result

    def _note(self, name: str, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        small = isinstance(result, Tensor) and result.ndim <= 2  # large activations are not kept alive
        if name in _KEEP and small and result is not given and result.shape[:1] == given.shape[:1]:
            self._made_of[id(result)] = result, given
        if name in _NORMALISE:
            self._normalised.extend(self._history(given))
        target = _target(name, args, kwargs)
        if isinstance(target, Tensor) and target.ndim and target.shape[0] == self._batch_size:
            self.calls.append(LossCall(name, self._history(given), target))

    def _history(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor, what it was made of, what that was made of, and so on."""
        found = [tensor]
        while (made := self._made_of.get(id(found[-1]))) is not None:
            found.append(made[1])
        return found

    def normalises(self, tensor: Tensor) -> bool:
        """Return whether probabilities were made of it."""
        return any(_same(one, tensor) for one in self._normalised)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are the same values in memory; what a step returns is detached by Lightning."""
    return one is other or (one.shape == other.shape and one.numel() > 0 and one.data_ptr() == other.data_ptr())


def _target(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what outputs are compared with by a call, if they are."""
    if name == "__getitem__":  # scores[range, labels] picks the label's, too
        places = args[1] if isinstance(args[1], tuple) else ()
        return places[1] if len(places) == 2 and all(isinstance(one, Tensor) for one in places) else None
    if name not in LOSSES and name not in _PICKS:
        return None
    place, word = _PICKS.get(name, (1, "target"))
    return args[place] if len(args) > place else kwargs.get(word)
