"""A child's process-wide state: its logging, its stop signal, and all settings that user code may change.

Before the next task, the child restores signal handlers, timers, the working directory, the file mode mask,
the process limits and the parent death signal to their state after the start hooks. If a lowered limit cannot
be raised again, the child exits.

A child writes log records to the standard error it inherited; every record from a running task names the
task. A record that cannot be written is lost, but the task continues.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from horsies.errors import TaskStopped
from horsies.logs import (
    LogFormat,
    TaskFilter,
    detach_handler,
    make_handler,
)
from horsies.tasks.invoke import stop_coroutine
from horsies.worker import os_process
from horsies.worker.child.parent_socket import ParentSocket

# The public ``signal`` module wraps the results of these functions in enum members, which would cost
# every task 12 µs.
_plain_signal: Any = importlib.import_module("_signal")

_SET_MASK = int(signal.SIG_SETMASK)
_TIMERS = (int(signal.ITIMER_REAL), int(signal.ITIMER_VIRTUAL), int(signal.ITIMER_PROF))
_COMMON_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in ("ALRM", "CHLD", "HUP", "PIPE", "USR1", "USR2")
)
# One call clears all timers, and one comparison of lists covers all signals and limits: Python loops took
# a sixth of the time that the child's own code needs for a task.
_ZEROS = (0.0,) * len(_TIMERS)
# The limits that could make the next task fail if a task has lowered them. Reading a limit takes about 0.2
# µs.
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}") for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE")
)

# Global, because timers belong to the whole process; empty until the process serves as a child.
_cleared_timers: tuple[int, ...] = ()


def clear_timers() -> None:
    """Stop the timers that a task left running, because they must not fire in the library's code."""
    list(map(_plain_signal.setitimer, _cleared_timers, _ZEROS))


def disregard(_signal_number: int, _frame: FrameType | None) -> None:
    """A signal handler that does nothing. Unlike SIG_IGN, it is not inherited by programs that tasks
    start.
    """


class ProcessState:
    """Remembers the state that user code may change, and restores it after each task."""

    __slots__ = (
        "_directory",
        "_guards",
        "_handlers",
        "_limits",
        "_parent_pid",
        "_set_death_signal",
        "_signals",
        "_umask",
    )

    def __init__(self, stop: Callable[[int, FrameType | None], None], parent_pid: int) -> None:
        self._parent_pid = parent_pid
        self._set_death_signal = os_process.death_signal_setter()
        self._guards: tuple[tuple[int, Any], ...] = (
            (int(signal.SIGTERM), stop),
            (int(signal.SIGINT), disregard),
            # The kernel sends this signal when data arrives on a descriptor for which a task requested
            # it.
            (int(signal.SIGIO), disregard),
        )
        self.adopt()
        self.restore()

    def adopt(self) -> None:
        """Remember the current state as the one to restore."""
        global _cleared_timers
        known = [(number, _plain_signal.getsignal(number)) for number in _COMMON_SIGNALS]
        # None means that the handler was not set by Python and cannot be restored.
        handlers = dict([*self._guards, *(pair for pair in known if pair[1] is not None)])
        self._signals, self._handlers = tuple(handlers), list(handlers.values())
        # A repeating timer is meant to keep running, like the timer of a sampling profiler.
        _cleared_timers = tuple(
            timer for timer in _TIMERS if _plain_signal.getitimer(timer)[1] == 0.0
        )
        self._limits = list(map(resource.getrlimit, _LIMITS))
        self._directory = _working_directory()
        self._umask = os.umask(0o022)
        os.umask(self._umask)

    def restore(self) -> bool:
        """Undo a task's changes; return False if this is impossible and no other task may run in this
        process.
        """
        # The kernel clears the parent death signal when a task or a hook changes its effective user or
        # group. Setting the signal again and checking for the parent takes about 1 µs.
        self._set_death_signal()
        if os.getppid() != self._parent_pid:
            os._exit(0)
        clear_timers()
        if list(map(_plain_signal.getsignal, self._signals)) != self._handlers:
            self._restore_handlers()
        _plain_signal.pthread_sigmask(_SET_MASK, ())
        os.umask(self._umask)
        with suppress(OSError):
            os.chdir(self._directory)
        return self.restore_limits()

    def _restore_handlers(self) -> None:
        for number, handler in zip(self._signals, self._handlers, strict=True):
            if _plain_signal.getsignal(number) != handler:
                _plain_signal.signal(number, handler)

    def restore_limits(self) -> bool:
        """Undo changes to the limits. Return False if a limit cannot be raised to its old value."""
        if list(map(resource.getrlimit, _LIMITS)) == self._limits:
            return True
        for limit, before in zip(_LIMITS, self._limits, strict=True):
            if resource.getrlimit(limit) != before:
                try:
                    resource.setrlimit(limit, before)
                except (OSError, ValueError):  # only root may raise a hard limit
                    return False
        return True


def _working_directory() -> str:
    """Return the working directory, or "." if the directory was removed, for example with an old release."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "."


def configure_logging(log_level: str, log_format: str) -> None:
    """Send records of `log_level` and above to standard error, unless the application has set up logging.

    A forked process starts with the worker's command-line handler, which shows only the library's
    loggers.
    """
    detach_handler()
    root, own = logging.getLogger(), logging.getLogger("horsies")
    own.setLevel(log_level.upper())
    if not root.handlers and not own.handlers:
        root.addHandler(make_handler(LogFormat(log_format)))
        root.setLevel(log_level.upper())


def label_handlers() -> None:
    """Add the running task to the records of all handlers attached by the app."""
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
    """Log a message with the traceback of `error`. An exception in a log handler must not cause the loss
    of a task's outcome.
    """
    try:
        logger.log(level, message, *args, exc_info=error, stacklevel=2)
    except TaskStopped:
        raise
    except BaseException:
        return


class StopSwitch:
    """Turns SIGTERM into ``TaskStopped``, but only inside user code.

    The parent sends a stop frame before the signal. A SIGTERM without a frame comes from a service
    manager that signals the whole process group. The parent has received that signal as well, and decides
    about the running tasks.
    """

    __slots__ = ("_came_early", "_is_armed", "_is_suspended", "_parent", "has_stopped")

    def __init__(self, parent: ParentSocket) -> None:
        self._parent = parent
        self._is_armed = False
        self._is_suspended = False
        self._came_early = False
        self.has_stopped = False

    def handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        if not self._is_armed:
            self._came_early = True
        elif self._parent.has_stop_request():
            self._is_armed = False
            self.has_stopped = True
            stop_coroutine()
            raise TaskStopped

    def arm(self) -> None:
        """Note that user code starts now. A signal that arrived before the assignment was read takes
        effect immediately.
        """
        global _armed
        _armed = self
        self._is_armed, self._is_suspended = True, False
        if self._came_early:
            self._came_early = False
            self.handle(signal.SIGTERM, None)

    def disarm(self) -> None:
        self._is_armed = self._is_suspended = False

    def suspend(self) -> None:
        """Note that stops must not interrupt the user code that follows, until ``resume`` is called."""
        if self._is_armed:
            self._is_armed, self._is_suspended = False, True

    def resume(self) -> None:
        """Let stops interrupt user code again, if it is still running. A stop that arrived while stops were
        deferred takes effect.
        """
        if self._is_suspended:
            self._is_armed, self._is_suspended = True, False
            if self._came_early:
                self._came_early = False
                signal.raise_signal(signal.SIGTERM)  # the signal is handled in the main thread


# The switch that was armed last; a child has only one switch.
_armed: StopSwitch | None = None


def disarm_stops() -> None:
    """Note that user code has ended, so that a stop does not interrupt the statements that record its
    outcome.
    """
    if _armed is not None:
        _armed.disarm()


@contextmanager
def stops_deferred(task: Any = None) -> Iterator[None]:
    """Defer stops during the block, which records an outcome, and during the user code after it, which
    commits that outcome. If the block raises, stops take effect again.

    ``task`` is the asyncio task that runs an assignment's coroutine; in an async child, that task defers
    its own stops.
    """
    switch, is_shared = _armed, hasattr(task, "resume_stops")
    if switch is not None:
        switch.suspend()
    if is_shared:
        task.suspend_stops()
    try:
        yield
    except BaseException:
        if is_shared:
            task.resume_stops()
        if switch is not None:
            switch.resume()
        raise
