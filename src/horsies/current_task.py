"""The task that this process is running, for use in the task's own code. A child creates a
``CurrentTask`` for every attempt. Its fields are parsed from one text on first use, so they cost nothing
if a task does not use them.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import zlib
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from horsies.encryption import unmarked
from horsies.errors import UNLIMITED_RETRIES, NoCurrentTaskError

NOTE_CHARACTERS_MAX = 200
_NO_TOTAL = math.nan
_FIELD_COUNT = 12
_NO_HEADERS: Mapping[str, str] = {}


class _Attempt(Protocol):
    """The fields that a worker sends to start an attempt."""

    @property
    def task_id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def task_name(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def timeout_ms(self) -> int | None: ...
    @property
    def stored(self) -> str: ...


class _Page(Protocol):
    """The shared memory of a child and its worker."""

    @property
    def stop_requested(self) -> bool: ...

    def write_progress(self, token: int, done: float, total: float, note: bytes) -> None: ...


class CurrentTask:
    """The running attempt of a task: its identity, and its place in a queue, a workflow or a schedule.

    Times have a time zone. ``started_at`` and ``deadline`` are on the clock of the worker's host.
    """

    def __init__(self, attempt: _Attempt, started: float, page: _Page | None = None) -> None:
        self._attempt = attempt
        self._started = started
        self._page = page

    def __repr__(self) -> str:
        return f"CurrentTask(id={self.id!r}, name={self.name!r}, attempt={self.attempt})"

    @property
    def id(self) -> str:
        """The task's id, the same for all its attempts."""
        return self._attempt.task_id

    @property
    def name(self) -> str:
        """The name of the task function."""
        return self._attempt.task_name

    @property
    def attempt(self) -> int:
        """The number of this attempt, starting at 1."""
        return self._attempt.attempt

    @cached_property
    def _fields(self) -> list[str]:
        sent_by_worker, _, times_and_places = self._attempt.stored.rpartition("\0")
        fields = [*sent_by_worker.split("\0", 3), *times_and_places.split("\n", 7)]
        return fields if len(fields) == _FIELD_COUNT else [""] * _FIELD_COUNT

    @property
    def priority(self) -> int:
        """The task's priority in its queue; 1 comes first."""
        return int(self._fields[0] or 0)

    @property
    def max_attempts(self) -> int | None:
        """The maximum number of attempts, or None for a policy without a limit.

        Without a retry policy it is 1, or 4 after the task has raised RetryLater.
        """
        max_retries = int(self._fields[1] or 0)
        return None if max_retries >= UNLIMITED_RETRIES else max_retries + 1

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure of this attempt is final. Without a retry policy, the task may still raise
        RetryLater up to three times.
        """
        return self.max_attempts is not None and self.attempt >= self.max_attempts

    @property
    def queue(self) -> str:
        """The name of the queue that the task came from."""
        return self._fields[2]

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The options stored with the task: a JSON object."""
        try:
            options = json.loads(self._fields[3] or "{}")
        except (ValueError, RecursionError):
            options = None
        return MappingProxyType(options if isinstance(options, dict) else {})

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers with which the task was sent."""
        headers = self.options.get("headers")
        return MappingProxyType(headers if isinstance(headers, dict) else {})

    @property
    def sent_at(self) -> datetime | None:
        """When the producer sent the task, on the producer's clock."""
        return _time_of(self._fields[4])

    @property
    def enqueued_at(self) -> datetime | None:
        """When this attempt became due, after the delay of its send or retry."""
        return _time_of(self._fields[5])

    @property
    def good_until(self) -> datetime | None:
        """The latest time at which the task could start, or None without a deadline."""
        return _time_of(self._fields[6])

    @property
    def started_at(self) -> datetime:
        """The time at which this attempt started."""
        return datetime.fromtimestamp(self._started, UTC)

    @property
    def deadline(self) -> datetime | None:
        """The time at which the time limit (``timeout_ms``) stops this attempt, or None without a limit."""
        timeout_ms = self._attempt.timeout_ms
        return None if timeout_ms is None else self.started_at + timedelta(milliseconds=timeout_ms)

    @property
    def slot(self) -> datetime | None:
        """The slot for which the task's schedule sent it, or None for a manual run."""
        return _time_of(self._fields[7])

    @property
    def schedule_name(self) -> str | None:
        """The name of the schedule that sent the task, or None."""
        return self._fields[11] or None

    @property
    def item_index(self) -> int | None:
        """The position in a map node's list, starting at 0, or None."""
        return int(self._fields[8]) if self._fields[8] else None

    @property
    def workflow_id(self) -> str | None:
        """The id of the workflow run in which the task is a node, or None."""
        return self._fields[9] or None

    @property
    def node_id(self) -> str | None:
        """The id of the task's node in the workflow, or None."""
        return self._fields[10] or None

    @property
    def logger(self) -> logging.Logger:
        """The logger ``horsies.task.<name>``; its records carry the task's id."""
        return logging.getLogger(f"horsies.task.{self.name}")

    def should_stop(self) -> bool:
        """Whether the task should end now: it was cancelled, it has exceeded its time limit, or its
        worker is shutting down. The check takes about 0.1 µs, so a loop may make it in every iteration.
        """
        page = self._page
        return page is not None and page.stop_requested

    def progress(self, done: float, total: float | None = None, note: str | None = None) -> None:
        """Report progress. Calls are cheap: the worker stores only the latest report, about three times
        a second.

        `done` may exceed `total`; a note is shortened to 200 characters. Reports from an attempt that
        has ended are ignored.

        Example:
            for position, row in enumerate(rows):
                handle(row)
                current_task().progress(position + 1, len(rows))
        """
        page = self._page
        if page is None or running_task() is not self:
            return
        try:
            shown = "" if note is None else unmarked(note[:NOTE_CHARACTERS_MAX])
            text = shown.encode(errors="replace")
            # The number is infinite or not a number.
            if done - done or (total is not None and total - total):
                raise ValueError(f"progress() takes finite numbers, not {done!r} of {total!r}.")
            token = attempt_token(self._attempt.task_id, self._attempt.generation)
            page.write_progress(token, done, _NO_TOTAL if total is None else total, text)
        except (TypeError, AttributeError, struct.error, OverflowError) as error:
            raise TypeError(
                "progress() takes the number done, the total or None, and a text or None, not "
                f"({done!r}, {total!r}, {note!r})."
            ) from error


def run_of(stored: str) -> str | None:
    """Return the id of the workflow run in an assignment's field ``stored``, without reading the rest."""
    fields = stored.rpartition("\0")[2].split("\n", 6)
    return (fields[5] or None) if len(fields) > 5 else None


def attempt_token(task_id: str, generation: int) -> int:
    """Return the number that identifies the reports of an attempt for its worker."""
    return zlib.crc32(f"{task_id}/{generation}".encode())


def _time_of(text: str) -> datetime | None:
    """Parse a time written by PostgreSQL; return None without a time, or if Python cannot represent its
    year.
    """
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


# One value per process, because most children run one task at a time, and all its threads and event
# loops must find the task.
_running: CurrentTask | None = None
# The task of the running coroutine in an async child, which does not set the process-wide value.
_running_here: ContextVar[CurrentTask | None] = ContextVar("horsies_task", default=None)


def set_running_task(task: CurrentTask | None) -> None:
    """Set the task that the process is running; None means no task."""
    global _running
    _running = task


def set_running_task_here(task: CurrentTask) -> None:
    """Set the task for the current context: this coroutine and the coroutines that it starts."""
    _running_here.set(task)


def running_task() -> CurrentTask | None:
    """Return the task that this process or coroutine is running, or None outside tasks."""
    return _running if _running is not None else _running_here.get()


def current_task() -> CurrentTask:
    """Return the running task, even in its threads and coroutines; raise LookupError elsewhere.

    Example:
        @app.task
        def import_orders(path: str) -> None:
            task = current_task()
            task.logger.info("attempt %d, queue %s", task.attempt, task.queue)
    """
    task = running_task()
    if task is None:
        raise NoCurrentTaskError()
    return task


# The tasks of the batch that this process runs in one call; empty for a task outside a batch.
_batch: tuple[CurrentTask, ...] = ()


def set_running_batch(tasks: tuple[CurrentTask, ...]) -> None:
    """Set the tasks that the process runs in one call; the first one is the running task."""
    global _batch
    _batch = tasks
    set_running_task(tasks[0] if tasks else None)


def keep_in_batch(task_ids: Collection[str]) -> None:
    """Remove all other tasks from the running batch, because their items are not passed to the call."""
    if _batch:
        set_running_batch(tuple(task for task in _batch if task.id in task_ids))


def current_batch() -> tuple[CurrentTask, ...]:
    """Return the tasks of the running call, in the order of its items; raise LookupError outside tasks.

    Example:
        @app.task("insert_rows", batch=Batch(size=100))
        def insert_rows(rows: list[Row]) -> None:
            ids = [task.id for task in current_batch()]
    """
    return _batch or (current_task(),)


def inherited_headers() -> Mapping[str, str]:
    """Return the running task's headers for its sends to inherit, or an empty mapping outside tasks."""
    task = running_task()
    return _NO_HEADERS if task is None else task.headers
