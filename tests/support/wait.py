"""Waits for a condition instead of for a fixed time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

T = TypeVar("T")

# The interval between probes: a probe is often a query or reads a file or the process table, and
# frequent probes in four test processes would slow down the workers.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.05


def wait_until(
    probe: Callable[[], T], seconds: float = 60.0, what: Callable[[], object] | str = "it"
) -> T:
    """Return the value of `probe` once it is true; fail the test after the timeout."""
    started = time.monotonic()
    while not (value := probe()):
        waited = time.monotonic() - started
        if waited > seconds:
            shown = what if isinstance(what, str) else what()
            raise AssertionError(f"did not happen within {seconds} s: {shown}")
        # Sleep for a twentieth of the elapsed time, so that a long wait becomes at most that much
        # longer.
        time.sleep(min(max(waited / 20, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS))
    return value


def in_seconds(seconds: float) -> datetime:
    """Return the time in this many seconds."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


@contextmanager
def interrupted_when(
    condition: Callable[[], object], raised: type[BaseException]
) -> Iterator[None]:
    """Raise this exception in the block from a signal handler, as soon as the condition is true."""

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
