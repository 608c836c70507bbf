"""Ctrl-C at a moment that suits us: not between changing something and being able to change it back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """What becomes of an interrupt: it waits, but for a stretch in which it is let through."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler, self._held = handler, True
        self._waiting: list[tuple[Any, ...]] = []

    def receive(self, *interrupt: Any) -> None:
        """Handle a signal."""
        if self._held:
            self._waiting.append(interrupt)
            return
        self._held = True  # what follows is the way out, and another one must not cut that short
        self._handler(*interrupt)
        self._held = False

    def deliver(self) -> None:
        """Let those through that wait."""
        while self._waiting:
            self._handler(*self._waiting.pop())

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let interrupts come at once for a while."""
        self._held = False
        try:
            self.deliver()
            yield
        finally:
            self._held = True


@contextmanager
def interrupts_held() -> Iterator[Interrupts]:
    """Let Ctrl-C wait until the end, so that what is changed inside is changed back whenever it comes.

    >>> with interrupts_held() as interrupts:
    ...     changed = True  # an interrupt waits
    ...     with interrupts.let_through():
    ...         work = sum(range(1000))  # an interrupt comes at once
    """
    handler = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(handler if callable(handler) else signal.default_int_handler)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield interrupts  # none comes here
        return
    signal.signal(signal.SIGINT, interrupts.receive)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupts.deliver()
