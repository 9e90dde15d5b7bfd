"""The process-wide state of a child: its logging, and everything that user code may change in it.

Signal handlers, timers, the working directory, the file mode mask and the limits of the process are again
as the start hooks left them when the next task comes, and the child again dies with its parent; where a
limit cannot be raised again, the child ends. A child writes log records to
the standard error it inherited; every record of a running task names the task. A record that cannot be
written is lost without effect on the task.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from horsies.errors import TaskStopped
from horsies.logs import (
    LogFormat,
    TaskFilter,
    detach_handler,
    make_handler,
)
from horsies.worker import os_process

# The public module wraps these functions' results in enum members, which would cost every task 12 µs.
_plain_signal: Any = importlib.import_module("_signal")

_TIMERS = (int(signal.ITIMER_REAL), int(signal.ITIMER_VIRTUAL), int(signal.ITIMER_PROF))
_COMMON_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in ("ALRM", "CHLD", "HUP", "PIPE", "USR1", "USR2")
)
# Those that make the next task fail. Reading each takes some 0.2 µs.
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}") for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE")
)

# Global, as the timers are; empty until the process serves as a child.
_cleared_timers: tuple[int, ...] = ()


def clear_timers() -> None:
    """Stop the timers that a task left running: they must not ring in the library's code."""
    for timer in _cleared_timers:
        _plain_signal.setitimer(timer, 0.0)


def disregard(_signal_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing; unlike an ignored one, programs that tasks start receive it."""


class ProcessState:
    """Remembers the state that user code may change, to restore it after each task."""

    __slots__ = (
        "_directory",
        "_guards",
        "_handlers",
        "_limits",
        "_parent_pid",
        "_set_death_signal",
        "_umask",
    )

    def __init__(self, stop: Callable[[int, FrameType | None], None], parent_pid: int) -> None:
        self._parent_pid = parent_pid
        self._set_death_signal = os_process.death_signal_setter()
        self._guards: tuple[tuple[int, Any], ...] = (
            (int(signal.SIGTERM), stop),
            (int(signal.SIGINT), disregard),
            # Sent when something arrives on a descriptor for which a task asked for it.
            (int(signal.SIGIO), disregard),
        )
        self.adopt()
        self.restore()

    def adopt(self) -> None:
        """Take the present state as the one to restore."""
        global _cleared_timers
        known = [(number, _plain_signal.getsignal(number)) for number in _COMMON_SIGNALS]
        # None stands for a handler that is not Python's: it cannot be restored.
        self._handlers = (*self._guards, *(pair for pair in known if pair[1] is not None))
        # A timer that repeats was started to stay, as those of sampling profilers are.
        _cleared_timers = tuple(
            timer for timer in _TIMERS if _plain_signal.getitimer(timer)[1] == 0.0
        )
        self._limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        self._directory = _working_directory()
        self._umask = os.umask(0o022)
        os.umask(self._umask)

    def restore(self) -> bool:
        """Undo the changes of a task; False when that is not possible, so that no other may follow."""
        # The kernel forgets the death signal when a task or a hook changes its effective user or group.
        # Setting it and looking for the parent take about 1 µs.
        self._set_death_signal()
        if os.getppid() != self._parent_pid:
            os._exit(0)
        clear_timers()
        for number, handler in self._handlers:
            if _plain_signal.getsignal(number) != handler:
                _plain_signal.signal(number, handler)
        _plain_signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(self._umask)
        with suppress(OSError):
            os.chdir(self._directory)
        return self.restore_limits()

    def restore_limits(self) -> bool:
        """Undo changes of the limits. Return False if a limit cannot be raised to its old value."""
        for limit, before in self._limits:
            if resource.getrlimit(limit) != before:
                try:
                    resource.setrlimit(limit, before)
                except (OSError, ValueError):  # only root may raise a hard limit
                    return False
        return True


def _working_directory() -> str:
    """The working directory, or "." when it has been removed, as that of an old release may be."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "."


def configure_logging(log_level: str, log_format: str) -> None:
    """Send records of `log_level` and above to standard error, unless the app set up logging.

    A forked process starts with the handler of the worker's command line, which shows the library's
    loggers only.
    """
    detach_handler()
    root, own = logging.getLogger(), logging.getLogger("horsies")
    own.setLevel(log_level.upper())
    if not root.handlers and not own.handlers:
        root.addHandler(make_handler(LogFormat(log_format)))
        root.setLevel(log_level.upper())


def label_handlers() -> None:
    """Have the records of all handlers that the app attached carry the running task."""
    for handler in (*logging.getLogger().handlers, *logging.getLogger("horsies").handlers):
        if not any(isinstance(known, TaskFilter) for known in handler.filters):
            handler.addFilter(TaskFilter())


def log_safely(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: object,
    error: BaseException | None = None,
) -> None:
    """Log, with the traceback of `error`; an exception of a handler must not cost a task its outcome."""
    try:
        logger.log(level, message, *args, exc_info=error, stacklevel=2)
    except TaskStopped:
        raise
    except BaseException:
        return
