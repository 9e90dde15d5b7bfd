"""Follows a task: yields its state after every change to its status or progress, until it has ended.

A notification announces the end, as for ``get``. Earlier changes send no notification, so the state is read
twice a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import wait
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from horsies.db.statements.tasks import TaskProgress
from horsies.errors import TaskWatchFailed
from horsies.ids import stored_form
from horsies.result import Err
from horsies.states import TASK_TERMINAL_STATES, TaskStatus
from horsies.tasks.broker import BrokerResult, PostgresBroker
from horsies.tasks.waiters import timeout_problem

READ_SECONDS = 0.5
UNCONNECTED = "This handle is not connected to a broker."


class State(Protocol):
    """The fields whose changes are yielded."""

    @property
    def status(self) -> TaskStatus: ...
    @property
    def retry_count(self) -> int: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def progress(self) -> TaskProgress | None: ...


Info = TypeVar("Info", bound=State)


def watch(
    read: Callable[[], BrokerResult[Info | None]],
    broker: PostgresBroker | None,
    task_id: str,
    timeout_ms: int | None,
) -> Iterator[Info]:
    """Yield the states of a task; see ``TaskHandle.watch``."""
    changes = _Changes[Info](task_id, timeout_ms)
    if broker is None or (stored := stored_form(task_id)) is None:
        changes.refuse(broker is None)
        return
    ended = broker.waiters.watch(stored)
    try:
        while True:
            if (info := changes.take(read())) is not None:
                yield info
            if changes.has_ended:
                return
            seconds = changes.seconds_to_wait()
            if ended.done():  # the wait failed, so only reads can find out that the task has ended
                time.sleep(seconds)
            else:
                wait([ended], seconds)
    finally:
        broker.waiters.forget(stored, ended)


async def watch_async(
    read: Callable[[], Awaitable[BrokerResult[Info | None]]],
    broker: PostgresBroker | None,
    task_id: str,
    timeout_ms: int | None,
) -> AsyncIterator[Info]:
    """Like ``watch``, but without blocking the event loop."""
    changes = _Changes[Info](task_id, timeout_ms)
    if broker is None or (stored := stored_form(task_id)) is None:
        changes.refuse(broker is None)
        return
    ended = broker.waiters.watch(stored)
    try:
        while True:
            if (info := changes.take(await read())) is not None:
                yield info
            if changes.has_ended:
                return
            seconds = changes.seconds_to_wait()
            if ended.done():
                await asyncio.sleep(seconds)
            else:
                await asyncio.wait([asyncio.wrap_future(ended)], timeout=seconds)
    finally:
        broker.waiters.forget(stored, ended)


class _Changes(Generic[Info]):
    """Decides which of the states that were read are yielded, and how long to wait for the next read."""

    def __init__(self, task_id: str, timeout_ms: int | None) -> None:
        if problem := timeout_problem(timeout_ms):
            raise TaskWatchFailed(problem)
        self._task_id = task_id
        self._timeout_ms = timeout_ms
        self._ends_at = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        self._last: tuple[object, ...] | None = None
        self.has_ended = False

    def refuse(self, is_unconnected: bool) -> None:
        raise TaskWatchFailed(UNCONNECTED if is_unconnected else self._missing())

    def _missing(self) -> str:
        return f"There is no task {self._task_id}."

    def take(self, read: BrokerResult[Info | None]) -> Info | None:
        """Return the state if it has changed; None otherwise, and after a transient failure."""
        if isinstance(read, Err):
            if read.value.retryable:
                return None
            raise TaskWatchFailed(read.value.message)
        info = read.value
        if info is None:
            raise TaskWatchFailed(self._missing())
        self.has_ended = info.status in TASK_TERMINAL_STATES
        state = (info.status, info.retry_count, info.started_at, info.progress)
        is_news, self._last = state != self._last, state
        return info if is_news else None

    def seconds_to_wait(self) -> float:
        if self._ends_at is None:
            return READ_SECONDS
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"Task {self._task_id} did not end within {self._timeout_ms} ms; "
                f"see `horsies show {self._task_id}`."
            )
        return min(READ_SECONDS, left)
