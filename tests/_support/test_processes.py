"""Alone, everything is one's own; several processes agree."""

import atexit
import inspect
import signal
from functools import partial

import pytest
import torch
from processes import start
from talking_job import talk

from fairbatch_lightning._support import processes


class TestAlone:
    def test_one_process_of_one(self):
        assert not processes.has_group()
        assert (processes.world_size(), processes.rank()) == (1, 0)

    def test_values_are_those_of_this_process(self):
        values, other = torch.tensor([1.0, 2.0]), {"a": 1}
        assert processes.world_sum(values) is values
        assert processes.gathered(other) == [other]
        processes.share_first([values])
        assert values.tolist() == [1, 2]

    def test_nothing_happens_at_the_end_of_a_process_that_nobody_spawned(self, monkeypatch):
        monkeypatch.setattr(atexit, "register", lambda *_: pytest.fail("something was left to do"))
        processes.leave_group_at_exit()


def through_layers(function):
    """Call a function through one that gets a number and a frame, but not that of its caller, as a handler does."""

    def inner(number, frame):
        return function()

    return inner(signal.SIGUSR1, inspect.currentframe().f_back)


class Handler:
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, signum, frame):
        self.seen.append(through_layers(processes.called_by_signal))


@pytest.mark.parametrize(
    "handler",
    [
        Handler,
        lambda seen: lambda *arguments: Handler(seen)(*arguments),
        lambda seen: lambda signum, frame, more=None: seen.append(processes.called_by_signal()),
        lambda seen: partial(Handler.__call__, Handler(seen)),
    ],
    ids=["object", "any arguments", "more arguments", "partial"],
)
def test_a_signals_handler_is_known(handler):
    seen, before = [], signal.getsignal(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, handler(seen))
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [True]
    assert not processes.called_by_signal()
    assert not through_layers(processes.called_by_signal)


@pytest.mark.slow
def test_two_processes_agree(tmp_path, free_port):
    workers = [start(talk, tmp_path, free_port, rank, 2, output=tmp_path / f"rank{rank}") for rank in range(2)]
    for worker in workers:
        worker.join()
    errors = "".join((tmp_path / f"rank{rank}.err").read_text() for rank in range(2))
    assert [worker.exitcode for worker in workers] == [0, 0], errors
    found = [torch.load(tmp_path / f"talk{rank}.pt", weights_only=True) for rank in range(2)]
    for rank, one in enumerate(found):
        assert one["before"] == (1, 0, False)
        assert one["now"] == (2, rank, True)
        assert one["sum"].tolist() == [3, 30]
        assert one["own"].tolist() == [rank + 1, 10 * (rank + 1)]  # not changed by adding up
        assert one["gathered"] == [{"rank": 0, "name": "a"}, {"rank": 1, "name": "b"}]
        assert [tensor.tolist() for tensor in one["shared"]] == [[0, 0], 5]
        assert one["warnings"] == (1 if rank == 0 else 0)
