"""Waiting for results: one thread and one LISTEN connection per process, for any number of waiters.

A finished task or workflow run sends a notification with its id. The thread routes each id to the futures
that wait for it, and reads all the rows that it needs with one statement per kind. Notifications only
shorten the wait: a poll of all watched ids makes up for lost notifications, and after a reconnect all ids
are read again. When idle, the thread ends and closes its connection; the next waiter starts another
thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg import Connection

from horsies.current_task import running_task
from horsies.db.errors import is_of_data, is_transient
from horsies.db.listen import Listener, Received
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Script, Statement, Step, drive
from horsies.db.statements.tasks import OutcomeRow, read_outcomes
from horsies.modules import Deferred
from horsies.states import TASK_TERMINAL_STATES, WorkflowStatus
from horsies.words import first_sentence

if TYPE_CHECKING:
    from horsies.db.statements import blocked, workflows
    from horsies.db.statements.workflows import RunOutcome
    from horsies.findings import Finding
else:
    blocked = Deferred("horsies.db.statements.blocked")
    workflows = Deferred("horsies.db.statements.workflows")

logger = logging.getLogger("horsies.wait")

POLL_SECONDS = 1.0
# How long the thread and its connection are kept after the last wait has ended.
SPARE_SECONDS = 60.0
# The size above which the results of runs are not read by the thread; a caller that needs such a result reads
# it separately.
SMALL_RESULT_BYTES = 1_048_576
# The time by which a wait may exceed its timeout to find out why the task has not ended.
OBSTACLE_SECONDS = 0.5
_OBSTACLE_LOCK_MS = 100
# Each statement is planned once: otherwise the server would plan each read with an array parameter again,
# which takes longer than the read itself. A plan made while the table was almost empty would keep scanning
# the whole table, so only index scans are allowed.
_STABLE_PLANS = b"SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
# The longest timeout that threading accepts.
_LONGEST_WAIT_MS = int(threading.TIMEOUT_MAX) * 1000
# The tasks whose waits for other tasks have been logged.
_reported: set[str] = set()


class Subject(StrEnum):
    """The kinds of rows to wait for; the value is the channel on which their end is announced.

    ``OBSTACLE``, the reason why a task has not ended, is read once and has no channel.
    """

    TASK = "task_done"
    RUN = "workflow_done"
    OBSTACLE = ""


# Finds the first obstacle of a task.
FindObstacle: TypeAlias = "Callable[[str], Script[Finding | None]]"
# The key contains the kind, because an id alone is not unique: a run may have been started with a task's
# id.
_Key: TypeAlias = tuple[Subject, str]


@dataclass(frozen=True, slots=True)
class _Waiter:
    """One future, completed by the first row with a status in ``until``, or by any row if ``once`` is
    set.

    ``added_in_round`` is the round in which the waiter was added. The rows of that round were read too
    early for it.
    """

    future: Future[Any]
    until: frozenset[str]
    once: bool
    added_in_round: int


@dataclass(slots=True)
class _Watch:
    """All waiters for one task or run.

    ``was_read`` is set by the first successful read. Until then, ``failure`` is the error of the last
    read.
    """

    waiters: list[_Waiter] = field(default_factory=list)
    was_read: bool = False
    failure: Exception | None = None

    def take(self, is_due: Callable[[_Waiter], bool]) -> list[_Waiter]:
        """Remove and return the waiters for which ``is_due`` returns True."""
        due, kept = list[_Waiter](), list[_Waiter]()
        for waiter in self.waiters:
            (due if is_due(waiter) else kept).append(waiter)
        self.waiters = kept
        return due


class Waiters:
    """Returns futures for task and run ids and completes them when the tasks and runs end."""

    def __init__(
        self,
        connect: Callable[[], Connection[Any]],
        poll_seconds: float = POLL_SECONDS,
        spare_seconds: float = SPARE_SECONDS,
        find_obstacle: FindObstacle | None = None,
    ) -> None:
        self._connect = connect
        self._find_obstacle = find_obstacle
        self._poll_seconds = poll_seconds
        self._spare_seconds = spare_seconds
        # Whether the database has been reached yet. Until then, a failure to connect is more likely a mistake
        # than an outage.
        self.was_reached = False
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[_Key, _Watch] = {}
        self._fresh: set[_Key] = set()
        self._round = 0
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None
        # Runs statements on the listener's connection.
        self._pipeline: Pipeline | None = None

    def watch(self, task_id: str, *, once: bool = False) -> Future[OutcomeRow | None]:
        """Return a future for the task's row when the task has ended, or for its current row with ``once``.

        The future's value is None for an unknown task; a failed read sets its exception.
        """
        return self._watch((Subject.TASK, task_id), TASK_TERMINAL_STATES, once)

    def watch_run(
        self, workflow_id: str, until: frozenset[WorkflowStatus], *, once: bool = False
    ) -> Future[RunOutcome | None]:
        """Return a future for the run's row when its status is one of these, or for its current row with
        ``once``.

        As for tasks, the value is None for an unknown run, and a failed read sets the exception.
        """
        return self._watch((Subject.RUN, workflow_id), until, once)

    def ask_obstacle(self, task_id: str) -> Future[Finding | None]:
        """Return a future with the first obstacle that `horsies explain` finds for a task; None if there is
        none.
        """
        return self._watch((Subject.OBSTACLE, task_id), frozenset(), once=True)

    def obstacle(self, task_id: str, asked: Future[Finding | None]) -> str:
        """Return the obstacle that ``ask_obstacle`` found, as the end of a sentence; empty if no obstacle is
        known.
        """
        self.forget(task_id, asked)
        has_answer = asked.done() and not asked.cancelled() and asked.exception() is None
        found = asked.result() if has_answer else None
        if found is None:
            return ""
        text = first_sentence(found.sentence)
        return f": {text[:1].lower()}{text[1:]} ({found.code})"

    def _watch(self, key: _Key, until: frozenset[str], once: bool) -> Future[Any]:
        with self._lock:
            waiter = _Waiter(Future(), until, once, self._round)
            self._watches.setdefault(key, _Watch()).waiters.append(waiter)
            self._fresh.add(key)
            self._ensure_thread()
            self._wake()
        return waiter.future

    def forget(self, watched_id: str, future: Future[Any]) -> Exception | None:
        """Drop a future for which its caller no longer waits; return the error if its row could never be
        read.
        """
        failure: Exception | None = None
        if future.done() and not future.cancelled():
            return failure
        with self._lock:
            for key in ((subject, watched_id) for subject in Subject):
                watch = self._watches.get(key, _Watch())
                if watch.take(lambda waiter: waiter.future is future):
                    failure = watch.failure
                if not watch.waiters:
                    self._watches.pop(key, None)
        return failure

    def close(self) -> None:
        """End the thread and close its connection; the remaining futures get an error."""
        with self._lock:
            thread, self._thread = self._thread, None
            watches, self._watches = self._watches, {}
            self._wake()
        if thread is not None:
            thread.join()
        _fail_all(watches, RuntimeError("The broker was closed while waiting for a result."))

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
            with suppress(
                OSError
            ):  # a full buffer wakes the thread as well, and a thread that has ended need not be woken
                self._waker.send(b"!")

    def _run(self, waker: socket.socket, wakened: socket.socket) -> None:
        listener = Listener(self._open, (Subject.TASK, Subject.RUN))
        try:
            self._serve(listener, wakened)
        finally:
            listener.close()
            waker.close()
            wakened.close()
            self._fail_if_thread_died()

    def _open(self) -> Connection[Any]:
        """Connect, and read through a ``Pipeline``, because each read with a psycopg cursor takes 0.15 ms
        longer.
        """
        connection = self._connect()
        try:
            connection.execute(_STABLE_PLANS)
        except BaseException:
            connection.close()
            raise
        # prepare_threshold is None if prepared statements are switched off, for example behind a pooler.
        is_prepared = connection.prepare_threshold is not None
        self._pipeline = Pipeline(connection, prepared=is_prepared)
        return connection

    def _fail_if_thread_died(self) -> None:
        """Fail all futures if the thread died; if it ended for another reason, another thread serves them."""
        with self._lock:
            if self._thread is not threading.current_thread():
                return
            self._thread = None
            watches, self._watches = self._watches, {}
        _fail_all(watches, RuntimeError("The thread that waits for results died."))

    def _serve(self, listener: Listener, wakened: socket.socket) -> None:
        me = threading.current_thread()
        next_poll = 0.0
        spare_at = time.monotonic() + self._spare_seconds
        while self._thread is me and not self._has_ended_idle(spare_at):
            fresh = self._begin_round()
            received = _receive(listener, at_once=bool(fresh))
            now = time.monotonic()
            everything = received.gap or now >= next_poll
            if everything:
                next_poll = now + self._poll_seconds
            wanted = self._wanted(fresh | _named(received.notifications), everything)
            self._read_rows(listener, wanted)
            if wanted or self._watches:
                spare_at = time.monotonic() + self._spare_seconds
            _sleep(listener, wakened, next_poll if self._watches else spare_at)

    def _has_ended_idle(self, spare_at: float) -> bool:
        """Decide, under the lock, whether the thread ends, so that a new waiter finds this thread or none."""
        with self._lock:
            if self._watches or time.monotonic() < spare_at:
                return False
            # Another thread may be set, if the listener was closed and replaced.
            if self._thread is threading.current_thread():
                self._thread = None
            return True

    def _begin_round(self) -> set[_Key]:
        """Return the ids that were added since the last round, and begin the next round."""
        with self._lock:
            self._round += 1
            fresh, self._fresh = self._fresh, set()
            return fresh

    def _wanted(self, named: set[_Key], everything: bool) -> list[_Key]:
        with self._lock:
            if everything:
                return list(self._watches)
            return [key for key in named if key in self._watches]

    def _read_rows(self, listener: Listener, wanted: list[_Key]) -> None:
        if not wanted:
            return
        if listener.connection is None or self._pipeline is None:
            self._fail_unread(wanted, listener.failure or ConnectionError("no connection"))
            return
        self.was_reached = True
        by_subject: dict[Subject, list[_Key]] = {}
        for key in wanted:
            by_subject.setdefault(key[0], []).append(key)
        obstacles = by_subject.pop(Subject.OBSTACLE, None)
        for subject, keys in by_subject.items():
            self._read_keys(self._pipeline, subject, keys)
        if obstacles:
            self._read_obstacle(self._pipeline, obstacles)

    def _read_keys(self, pipeline: Pipeline, subject: Subject, keys: Sequence[_Key]) -> None:
        """Read all rows in one statement, or one by one after a data error, so that an unreadable result
        fails only its own waiters, immediately.
        """
        try:
            found = _read(pipeline, subject, [watched_id for _, watched_id in keys])
        except psycopg.Error as error:
            if not is_of_data(error):
                self._fail_unread(keys, error)
            elif len(keys) == 1:
                self._fail(keys, error, lambda _, waiter: self._is_current(waiter))
            else:
                for key in keys:
                    self._read_keys(pipeline, subject, [key])
            return
        for key in keys:
            self._deliver(key, found.get(key[1]))

    def _read_obstacle(self, pipeline: Pipeline, keys: Sequence[_Key]) -> None:
        """Find the obstacle of one task, and leave the obstacles of other tasks to later rounds, because an
        explanation takes several statements and results have precedence.
        """
        key, *later = keys
        if later:
            with self._lock:
                self._fresh.update(later)
                self._wake()
        find = self._find_obstacle
        try:
            found = None if find is None else _explain(pipeline, find(key[1]))
        except Exception as error:  # callers still wait for the results of other tasks
            if pipeline.is_midway:  # the next read would receive the late response as its own
                pipeline.connection.close()
            self._fail([key], error, lambda _, waiter: self._is_current(waiter))
        else:
            self._deliver(key, found)

    def _deliver(self, key: _Key, row: Any) -> None:
        with self._lock:
            watch = self._watches.get(key)
            if watch is None:
                return
            watch.was_read, watch.failure = True, None
            ready = watch.take(
                lambda waiter: (
                    self._is_current(waiter)
                    and (row is None or waiter.once or row.status in waiter.until)
                )
            )
            if not watch.waiters:
                del self._watches[key]
        for waiter in ready:
            if waiter.future.set_running_or_notify_cancel():
                waiter.future.set_result(row)

    def _is_current(self, waiter: _Waiter) -> bool:
        """Return whether this round's read started after the waiter's call, so that the read saw the
        current state.
        """
        return waiter.added_in_round < self._round

    def _fail_unread(self, keys: Iterable[_Key], error: Exception) -> None:
        """Fail the one-time reads and, unless the error is an outage, the waiters whose rows were never
        read.
        """
        is_outage = self.was_reached and is_transient(error)

        def is_affected(watch: _Watch, waiter: _Waiter) -> bool:
            is_first = not (watch.was_read or is_outage)
            return self._is_current(waiter) and (waiter.once or is_first)

        self._fail(keys, error, is_affected)

    def _fail(
        self,
        keys: Iterable[_Key],
        error: Exception,
        is_affected: Callable[[_Watch, _Waiter], bool],
    ) -> None:
        failed: list[_Waiter] = []
        with self._lock:
            for key in keys:
                watch = self._watches.get(key, _Watch())
                failed += watch.take(partial(is_affected, watch))
                watch.failure = None if watch.was_read else error
                if not watch.waiters:
                    self._watches.pop(key, None)
        for waiter in failed:
            _fail(waiter.future, error)


# Weak references, so that an instance can be deleted together with its broker.
_instances: weakref.WeakSet[Waiters] = weakref.WeakSet()


def _reset_all() -> None:
    """Reset the waiters after a fork: the forked process lacks their thread, and a thread of the parent may
    have held the lock.
    """
    for waiters in _instances:
        waiters._reset()


# This is called before the child has a second thread, so no two threads can reset the waiters.
os.register_at_fork(after_in_child=_reset_all)


def is_loop_running() -> bool:
    """Return whether an event loop is running in this thread, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def warn_of_nested_wait(task_id: str) -> None:
    """Log, once per waiting task, that its child process cannot run other tasks while it waits."""
    running = running_task()
    if running is not None and running.name not in _reported:
        _reported.add(running.name)
        logger.warning(
            "task %r waits for task %s and occupies its child process meanwhile; when all children wait, "
            "none is left to run it: use a workflow, or send the second task at the end of the first",
            *(running.name, task_id),
        )


def timeout_problem(timeout_ms: object) -> str | None:
    """Describe an invalid timeout in one sentence, or return None."""
    if timeout_ms is not None and (isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int)):
        return f"timeout_ms must be a whole number of milliseconds or None, not {timeout_ms!r}."
    if timeout_ms is not None and timeout_ms < 0:
        return f"timeout_ms must not be negative; it is {timeout_ms}, and None sets no limit."
    return None


def seconds_to_wait(timeout_ms: int | None) -> float | None:
    """Return how long to wait for a future. With a timeout of 0, the wait lasts until the read has ended."""
    return min(timeout_ms, _LONGEST_WAIT_MS) / 1000 if timeout_ms else None


def wait_for(future: Future[Any], seconds: float | None) -> None:
    """Wait for a future, at most this long; afterwards ``done()`` shows whether the future has its row.

    A bare lock is used, because ``concurrent.futures.wait`` takes 40 µs longer to return.
    """
    ended = threading.Lock()
    ended.acquire()
    future.add_done_callback(lambda _: ended.release())
    ended.acquire(timeout=-1 if seconds is None else seconds)


def _read_runs(ids: Sequence[str]) -> Step:
    return workflows.read_runs(ids, SMALL_RESULT_BYTES)


_STEPS: dict[Subject, Callable[[list[str]], Step]] = {
    Subject.TASK: read_outcomes,
    Subject.RUN: _read_runs,
}


def _read(pipeline: Pipeline, subject: Subject, ids: list[str]) -> dict[str, Any]:
    (rows,) = pipeline.run([_STEPS[subject](ids)])
    return {row.id: row for row in rows}


def _explain(pipeline: Pipeline, script: Script[Finding | None]) -> Finding | None:
    """Run the explanation of a task, with short limits on its duration and its waits for locks, because the
    results of other tasks wait during the explanation.
    """
    ends_at = time.monotonic() + OBSTACLE_SECONDS
    lock_wait = blocked.limit_lock_wait(_OBSTACLE_LOCK_MS)

    def execute(statement: Statement[Any, Any], params: Any) -> list[Any]:
        if (seconds := ends_at - time.monotonic()) <= 0:
            raise TimeoutError("the explanation of a task takes too long")
        return pipeline.run([lock_wait, (statement, params)], seconds)[-1]

    return drive(execute, script)


def _sleep(listener: Listener, wakened: socket.socket, wake_at: float) -> None:
    """Sleep until a notification arrives, a waiter is added, or a read or a reconnect is due."""
    timeout_seconds = listener.seconds_until_retry()
    if listener.has_notifications():
        timeout_seconds = 0.0
    elif timeout_seconds is None:
        timeout_seconds = max(0.0, wake_at - time.monotonic())
    poller = select.poll()
    poller.register(wakened, select.POLLIN)
    if (socket_number := listener.fileno()) >= 0:
        poller.register(socket_number, select.POLLIN)
    ready = poller.poll(timeout_seconds * 1000)
    if any(number != socket_number for number, _ in ready):
        wakened.recv(65536)


def _receive(listener: Listener, *, at_once: bool) -> Received:
    """Receive notifications. Reconnect immediately (``at_once``) for new waiters, and after a lost connection
    before any waiter fails.
    """
    was_connected = listener.connection is not None
    received = listener.receive(at_once=at_once)
    if was_connected and listener.connection is None:
        received = listener.receive(at_once=at_once)
    return received


def _named(notifications: Iterable[tuple[str, str]]) -> set[_Key]:
    return {
        (Subject(channel), watched_id)
        for channel, payload in notifications
        for watched_id in payload.split(",")
    }


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _fail_all(watches: dict[_Key, _Watch], error: Exception) -> None:
    for watch in watches.values():
        for waiter in watch.waiters:
            _fail(waiter.future, error)
