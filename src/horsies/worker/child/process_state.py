"""What user code may change in its process: remembered once, put back between tasks.

Part of a child, around every task it runs: signal handlers, timers, the working directory and the
file mode mask are again as the start hooks left them when the next task comes.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

# What the public module wraps in enum members; the wrapping would cost every task 12 µs.
_plain_signal: Any = importlib.import_module("_signal")

_TIMERS = (int(signal.ITIMER_REAL), int(signal.ITIMER_VIRTUAL), int(signal.ITIMER_PROF))
_COMMON_SIGNALS = tuple(
    map(
        int,
        (
            signal.SIGALRM,
            signal.SIGCHLD,
            signal.SIGHUP,
            signal.SIGPIPE,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ),
    )
)

# One value for the process, as the timers are; none are ours to clear before it serves as a child.
_cleared_timers: tuple[int, ...] = ()


def clear_timers() -> None:
    """Stop what would ring in code that is not the task's."""
    for timer in _cleared_timers:
        _plain_signal.setitimer(timer, 0.0)


def disregard(_signal_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing; unlike one that is ignored, programs we start get it."""


class ProcessState:
    """What user code may change in its process, remembered to put it back for the next task."""

    __slots__ = ("_directory", "_guards", "_handlers", "_umask")

    def __init__(self, stop: Callable[[int, FrameType | None], None]) -> None:
        self._guards: tuple[tuple[int, Any], ...] = (
            (int(signal.SIGTERM), stop),
            (int(signal.SIGINT), disregard),
        )
        self.adopt()
        self.restore()

    def adopt(self) -> None:
        """Remember how things are now, but for the signals that are ours."""
        global _cleared_timers
        known = [(number, _plain_signal.getsignal(number)) for number in _COMMON_SIGNALS]
        # None stands for a handler that is not Python's: it cannot be put back.
        self._handlers = (*self._guards, *(pair for pair in known if pair[1] is not None))
        # A timer that repeats was started to stay, as those of sampling profilers are.
        _cleared_timers = tuple(
            timer for timer in _TIMERS if _plain_signal.getitimer(timer)[1] == 0.0
        )
        self._directory = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)

    def restore(self) -> None:
        """Put signals, timers, working directory and file mode mask back."""
        clear_timers()
        for number, handler in self._handlers:
            if _plain_signal.getsignal(number) != handler:
                _plain_signal.signal(number, handler)
        _plain_signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(self._umask)
        with suppress(OSError):
            os.chdir(self._directory)
