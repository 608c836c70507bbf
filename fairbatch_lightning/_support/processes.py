"""Several processes: the one place that asks whether there are any."""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
from itertools import pairwise
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor


def has_group() -> bool:
    """Return whether a process group is there to talk to."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if has_group() else 1


def rank() -> int:
    """Return this process's number."""
    return dist.get_rank() if has_group() else 0


def world_sum(values: Tensor) -> Tensor:
    """Return a sum over all processes, of values without a gradient."""
    if has_group():
        values = values.clone()
        dist.all_reduce(values)
    return values


def leave_group_at_exit() -> None:
    """Let a process that `multiprocessing` has started leave its process group when it ends; others are left alone."""
    if multiprocessing.parent_process() is not None:
        atexit.register(_leave_group)


def _leave_group() -> None:
    """End gloo's threads while Python is still there.

    A thread that is the last to hold a tensor asks for Python's lock to free it. Once the interpreter is being taken
    down it does not get that, and takes the process down: "terminate called without an active exception". NCCL has no
    such threads, and Lightning looks after it.
    """
    if has_group() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def called_by_signal() -> bool:
    """Return whether a signal's handler has called this: the other processes may be anywhere then.

    Python gives a handler the signal's number and the frame that it interrupts, which is also the one it returns to.
    """
    frame = inspect.currentframe()
    while frame is not None:
        arguments = _arguments(frame)
        if any(isinstance(number, int) and place is frame.f_back for number, place in pairwise(arguments)):
            return True
        frame = frame.f_back
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """Return a function's positional arguments, those of `*args` in their place."""
    names, others, _, values = inspect.getargvalues(frame)
    more = values.get(others, ()) if others else ()
    return [*(values.get(name) for name in names), *(more if isinstance(more, tuple) else ())]


def gathered(own: Any) -> list[Any]:
    """Return an object of every process."""
    if world_size() == 1:
        return [own]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, own)
    return found


def share_first(tensors: list[Tensor]) -> None:
    """Give all processes the first one's values."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
