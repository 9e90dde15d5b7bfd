"""Turns the worker's stop signal into an exception inside user code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from horsies.errors import TaskStopped
from horsies.tasks.invoke import stop_coroutine
from horsies.worker.child.parent_socket import ParentSocket


class StopSwitch:
    """Turns SIGTERM into ``TaskStopped`` inside user code, and only there.

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
        """Let stops interrupt user code again, if it is still running. A stop that arrived in the
        meantime takes effect.
        """
        if self._is_suspended:
            self._is_armed, self._is_suspended = True, False
            if self._came_early:
                self._came_early = False
                signal.raise_signal(signal.SIGTERM)  # handled in the main thread


# The switch that was armed last; a child has only one.
_armed: StopSwitch | None = None


def disarm_stops() -> None:
    """Note that user code has ended: a stop must not interrupt the statements that record its outcome."""
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
