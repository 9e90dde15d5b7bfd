"""The ``timeout_ms`` of a step: TaskStopped is raised in its function, as in a task that exceeds its
time limit. In the main thread, a process timer also interrupts system calls. In other threads, such as
the threads of ``ctx.gather``, the exception is raised when the system call returns. A function that
catches TaskStopped fails anyway.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Protocol, TypeVar

from horsies.errors import TaskStopped

T = TypeVar("T")


class StepTimeout(TimeoutError):
    """The function of a step exceeded its time limit."""

    def __init__(self, timeout_ms: int) -> None:
        super().__init__(f"The step ran longer than its timeout_ms={timeout_ms}.")


def within(timeout_ms: int, function: Callable[[], T]) -> T:
    """Call a function; raise StepTimeout if it exceeds its time limit."""
    is_main = threading.current_thread() is threading.main_thread()
    limit: _Limit = (_TimerOfProcess if is_main else _TimerOfThread)(timeout_ms / 1000)
    error: BaseException | None = None
    try:
        try:
            limit.begin()
            value = function()
        finally:
            limit.end()
    except BaseException as raised:
        limit.end()  # TaskStopped may have interrupted the first call.
        if not limit.is_over:
            raise
        error = raised
    if limit.is_over:
        raise StepTimeout(timeout_ms) from error
    return value


async def within_async(timeout_ms: int, awaitable: Awaitable[T]) -> T:
    """Await a coroutine and cancel it at its time limit; the version of ``within`` for coroutines."""
    limit = asyncio.timeout(timeout_ms / 1000)
    try:
        async with limit:
            value = await awaitable
    except Exception as error:
        if not limit.expired():
            raise
        raise StepTimeout(timeout_ms) from error
    if limit.expired():
        raise StepTimeout(timeout_ms)
    return value


class _Limit(Protocol):
    """Raises TaskStopped in this thread at the time limit, even while ``begin`` is still running.
    ``end`` may be called twice, even after TaskStopped has interrupted ``begin``.
    """

    is_over: bool

    def begin(self) -> None: ...

    def end(self) -> None: ...


class _TimerOfProcess:
    """The time limit in the main thread. A timer that was already set continues afterwards."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_armed = True
        self.is_over = False
        self._handler: Any = signal.getsignal(signal.SIGALRM)
        self._began_at = time.monotonic()
        self._other, self._interval = signal.getitimer(signal.ITIMER_REAL)

    def begin(self) -> None:
        signal.signal(signal.SIGALRM, self._stop)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _stop(self, _signal_number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.is_over = True
            raise TaskStopped

    def end(self) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler or signal.SIG_DFL)
        if self._other:
            left = self._other - (time.monotonic() - self._began_at)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), self._interval)


class _TimerOfThread:
    """The time limit in any other thread: Python raises the exception between two instructions of the
    thread.
    """

    def __init__(self, seconds: float) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_armed = True
        self.is_over = False
        self._timer = threading.Timer(seconds, self._stop)
        self._timer.daemon = True

    def begin(self) -> None:
        self._timer.start()

    def _stop(self) -> None:
        with self._lock:
            if self._is_armed:
                self.is_over = True
                self._pend(ctypes.py_object(TaskStopped))

    def end(self) -> None:
        with self._lock:
            if self._is_armed and self.is_over:
                self._pend(None)  # Withdraw an exception that has not been raised yet.
            self._is_armed = False
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()

    def _pend(self, exception: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), exception)
