"""Waiting for results: one thread and one LISTEN connection per process, however many wait.

Between the notification a finished task sends and the handle that asked for it. The thread routes
each id to the futures waiting for that id, and reads all rows it needs in one statement.
Notifications only shorten the wait: a poll over everything watched covers the lost ones, and a
reconnect looks at everything again.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from horsies.db.listen import Listener
from horsies.db.tasks import OutcomeRow, TaskIds, read_outcomes
from horsies.states import TaskStatus

DONE_CHANNEL = "task_done"
POLL_SECONDS = 1.0


@dataclass(slots=True)
class _Watch:
    """Everyone waiting for one task; ``patient`` ones stay after a look that found it unfinished."""

    patient: list[Future[OutcomeRow | None]] = field(default_factory=list)
    hasty: list[Future[OutcomeRow | None]] = field(default_factory=list)
    seen: bool = False


class Waiters:
    """Turns task ids into futures that complete when the task does."""

    def __init__(
        self, connect: Callable[[], Connection[Any]], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._connect = connect
        self._poll_seconds = poll_seconds
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watches: dict[str, _Watch] = {}
        self._fresh: set[str] = set()
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None

    def watch(self, task_id: str, *, once: bool = False) -> Future[OutcomeRow | None]:
        """Return a future for the task's row: when it is terminal, or after one look with ``once``.

        The future holds None when there is no such task, and raises what kept us from looking.
        """
        if self._pid != os.getpid():
            self._reset()  # the thread stayed in the parent process
        future: Future[OutcomeRow | None] = Future()
        with self._lock:
            watch = self._watches.setdefault(task_id, _Watch())
            (watch.hasty if once else watch.patient).append(future)
            self._fresh.add(task_id)
            self._ensure_thread()
            self._wake()
        return future

    def forget(self, task_id: str, future: Future[OutcomeRow | None]) -> None:
        """Stop waiting: the caller ran out of time."""
        with self._lock:
            watch = self._watches.get(task_id)
            if watch is None:
                return
            for group in (watch.patient, watch.hasty):
                if future in group:
                    group.remove(future)
            if not watch.patient and not watch.hasty:
                del self._watches[task_id]

    def close(self) -> None:
        """End the thread and its connection; whoever still waits gets an error."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._wake()
        if thread is not None and self._pid == os.getpid():
            thread.join()

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._waker, wakened = socket.socketpair()
            self._waker.setblocking(False)
            wakened.setblocking(False)
            self._thread = threading.Thread(
                target=self._run, args=(self._waker, wakened), name="horsies-waiters", daemon=True
            )
            self._thread.start()

    def _wake(self) -> None:
        if self._waker is not None:
            with suppress(OSError):  # a full buffer wakes just as well, an ended thread needs none
                self._waker.send(b"!")

    def _run(self, waker: socket.socket, wakened: socket.socket) -> None:
        listener = Listener(self._connect, (DONE_CHANNEL,))
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(wakened, selectors.EVENT_READ)
                self._serve(listener, selector, wakened)
        finally:
            listener.close()
            waker.close()
            wakened.close()
            self._fail_everyone(RuntimeError("The broker was closed while waiting for a result."))

    def _serve(
        self, listener: Listener, selector: selectors.BaseSelector, wakened: socket.socket
    ) -> None:
        me = threading.current_thread()
        next_poll = 0.0
        while self._thread is me:
            heard = listener.receive()
            if listener.seconds_until_retry() == 0.0:  # just cut: try once before anyone is told
                heard = listener.receive()
            now = time.monotonic()
            everything = heard.gap or now >= next_poll
            if everything:
                next_poll = now + self._poll_seconds
            self._look(listener, self._wanted(_named(heard.notifications), everything))
            self._sleep(listener, selector, wakened, next_poll)

    def _sleep(
        self,
        listener: Listener,
        selector: selectors.BaseSelector,
        wakened: socket.socket,
        next_poll: float,
    ) -> None:
        socket_number = listener.fileno()
        if socket_number >= 0:
            selector.register(socket_number, selectors.EVENT_READ)
        ready = selector.select(self._seconds_to_sleep(listener, next_poll))
        if socket_number >= 0:
            selector.unregister(socket_number)
        if any(key.fileobj is wakened for key, _ in ready):
            wakened.recv(65536)

    def _seconds_to_sleep(self, listener: Listener, next_poll: float) -> float | None:
        if listener.has_heard():
            return 0.0
        retry_seconds = listener.seconds_until_retry()
        if retry_seconds is not None:
            return retry_seconds
        return max(0.0, next_poll - time.monotonic()) if self._watches else None

    def _wanted(self, named: set[str], everything: bool) -> list[str]:
        with self._lock:
            fresh, self._fresh = self._fresh, set()
            if everything:
                return list(self._watches)
            return [task_id for task_id in fresh | named if task_id in self._watches]

    def _look(self, listener: Listener, wanted: list[str]) -> None:
        if not wanted:
            return
        if listener.connection is None:
            self._fail_unseen(wanted, listener.failure or ConnectionError("no connection"))
            return
        try:
            rows = read_outcomes.run(listener.connection, TaskIds(wanted))
        except psycopg.Error as error:
            self._fail_unseen(wanted, error)
            return
        found = {row.id: row for row in rows}
        for task_id in wanted:
            self._deliver(task_id, found.get(task_id))

    def _deliver(self, task_id: str, row: OutcomeRow | None) -> None:
        finished = row is None or TaskStatus(row.status).is_terminal
        with self._lock:
            watch = self._watches.get(task_id)
            if watch is None:
                return
            watch.seen = True
            ready, watch.hasty = watch.hasty, []
            if finished:
                ready += watch.patient
            if finished or not watch.patient:
                del self._watches[task_id]
        for future in ready:
            _complete(future, row)

    def _fail_unseen(self, task_ids: Iterable[str], error: Exception) -> None:
        """Tell those whose first or only look failed; those already waiting outlast the outage."""
        failed: list[Future[OutcomeRow | None]] = []
        with self._lock:
            for task_id in task_ids:
                watch = self._watches.get(task_id, _Watch())
                failed += watch.hasty if watch.seen else watch.hasty + watch.patient
                watch.hasty = []
                if not watch.seen:
                    self._watches.pop(task_id, None)
        for future in failed:
            _fail(future, error)

    def _fail_everyone(self, error: Exception) -> None:
        with self._lock:
            watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            for future in watch.patient + watch.hasty:
                _fail(future, error)


def _named(notifications: Iterable[tuple[str, str]]) -> set[str]:
    return {task_id for _, payload in notifications for task_id in payload.split(",")}


def _complete(future: Future[OutcomeRow | None], row: OutcomeRow | None) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(row)


def _fail(future: Future[OutcomeRow | None], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
