"""Ctrl-C waits where something has to be changed back, and comes at once where it is let through."""

import signal
import threading

import pytest

from fairbatch_lightning._support.interrupts import interrupts_held


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def held(*, through=False, seen):
    with interrupts_held() as interrupts:
        if through:
            with interrupts.let_through():
                interrupt()
                seen.append("not reached")
        interrupt()
        seen.append("held")


def test_an_interrupt_waits_until_the_end(handler):
    seen = []
    with pytest.raises(KeyboardInterrupt):
        held(seen=seen)
    assert seen == ["held"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_that_is_let_through_comes_at_once(handler):
    seen = []
    with pytest.raises(KeyboardInterrupt):
        held(through=True, seen=seen)
    assert seen == []
    assert signal.getsignal(signal.SIGINT) is handler


def test_one_that_waits_comes_when_it_is_let_through():
    seen = []

    def work():
        with interrupts_held() as interrupts:
            interrupt()
            seen.append("held")
            with interrupts.let_through():
                seen.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["held"]


def test_a_second_one_does_not_cut_the_way_out_short():
    seen = []

    def work():
        with interrupts_held() as interrupts:
            try:
                with interrupts.let_through():
                    interrupt()
            finally:
                interrupt()
                seen.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["cleaned up"]


def test_a_handler_that_raises_nothing_is_called_every_time():
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append("called"))
    with interrupts_held() as interrupts, interrupts.let_through():
        interrupt()
        interrupt()
        assert len(calls) == 2


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_ways_to_handle_it_are_left_alone(ignored):
    signal.signal(signal.SIGINT, ignored)
    with interrupts_held() as interrupts, interrupts.let_through():
        assert signal.getsignal(signal.SIGINT) is ignored


def test_in_other_threads_there_is_nothing_to_do(handler):
    seen = []

    def work():
        with interrupts_held() as interrupts, interrupts.let_through():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
