"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as the condition holds; fail the test when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {seconds} seconds"
        time.sleep(0.005)


@contextmanager
def interrupted_when(
    condition: Callable[[], object], raised: type[BaseException]
) -> Iterator[None]:
    """Have a signal handler raise this in the block as soon as the condition holds."""

    def interrupt(*_: object) -> None:
        raise raised

    me = threading.get_ident()

    def send_signal() -> None:
        wait_until(condition)
        signal.pthread_kill(me, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send_signal)
    try:
        sender.start()
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
