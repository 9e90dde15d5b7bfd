"""Catalogue of the producer's statements on tasks.

The worker's statements are in ``turn.py``; docs/internals/state-machine.md lists all transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.encryption import Owner, OwnerLines, Payload, PayloadLines, ShownText
from horsies.modules import Deferred
from horsies.states import TaskAttemptOutcome, TaskStatus

if TYPE_CHECKING:
    from horsies import task_result
else:
    task_result = Deferred("horsies.task_result")

TASKS = StatementFile("tasks.sql")


class InsertTask(NamedTuple):
    """The row that a send inserts."""

    id: Owner
    task_name: str
    queue_name: str
    priority: int
    args: Payload
    kwargs: Payload
    sent_at: datetime
    enqueue_at: datetime | None
    delay_seconds: float
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    retention_seconds: float | None
    enqueue_sha: str
    idempotency_key: str | None
    idempotency_sha: str | None
    unique_key: str | None
    unique_while: str | None
    # The id of the run of a durable function that starts this task.
    wakes_task_id: str | None = None
    lane_key: str | None = None
    lane: int | None = None


class DebounceTask(NamedTuple):
    """The row that a debounced send inserts, or whose values replace those of the task that is already
    waiting.
    """

    id: str
    task_name: str
    queue_name: str
    priority: int
    args: Payload
    kwargs: Payload
    sent_at: datetime
    delay_seconds: float
    at_most_seconds: float
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    retention_seconds: float | None
    enqueue_sha: str
    unique_key: str | None
    idempotency_sha: str | None
    lane_key: str | None = None

    @classmethod
    def of(cls, row: InsertTask, at_most_seconds: float) -> DebounceTask:
        values = row._asdict() | {"at_most_seconds": at_most_seconds}
        return cls(**{name: values[name] for name in cls._fields})


class DebouncedTask(NamedTuple):
    """The id of the waiting task; None if a task that was not debounced holds the key."""

    id: str | None


class InsertTasks(NamedTuple):
    """Many rows of one task function. Values that all rows share are given once, all other values as columns;
    each column is a text with one value per line.
    """

    task_name: str
    queue_name: str
    priority: int
    sent_at: datetime
    enqueue_at: datetime | None
    delay_seconds: float
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    retention_seconds: float | None
    ids: OwnerLines
    args: PayloadLines
    kwargs: PayloadLines
    enqueue_shas: str
    # The keys as JSON, and the lanes of the keys; both are empty if no task has a key.
    lane_keys: str = ""
    lanes: str = ""


class InsertedTasks(NamedTuple):
    inserted: int


class TaskId(NamedTuple):
    id: str


class SentTask(NamedTuple):
    id: str
    enqueue_sha: str


class IdempotentTask(NamedTuple):
    id: str
    idempotency_sha: str | None


class OutcomeRow(NamedTuple):
    """The columns that waiters read."""

    id: str
    task_name: str
    status: str
    result: Payload | None
    failed_reason: str | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class TaskColumns:
    """The stored columns that ``TaskInfo`` shows."""

    task_id: str
    """The id of the task."""
    task_name: str
    """The name under which the task's function is registered."""
    status: TaskStatus
    """The status of the task at the time of the query."""
    queue_name: str
    """The queue that the task waits in or ran from."""
    priority: int
    """The task's priority within its queue, from 1 (first) to 100 (last)."""
    retry_count: int
    """How many retries have been used."""
    max_retries: int | None
    """How many retries the task may use, or None if there is no limit."""
    next_retry_at: datetime | None
    """When the next attempt becomes due, if the task is waiting for a retry."""
    sent_at: datetime | None
    """When the task was sent; for a task of a schedule, its slot."""
    enqueued_at: datetime
    """When the current attempt became due or will become due."""
    claimed_at: datetime | None
    """When a worker claimed the current attempt."""
    started_at: datetime | None
    """When the latest attempt started."""
    completed_at: datetime | None
    """When the task completed."""
    failed_at: datetime | None
    """When the task failed, was cancelled or expired."""
    worker_hostname: str | None
    """The host of the worker that has or last had the task."""
    worker_pid: int | None
    """The process id of the child that runs or last ran the task."""
    worker_process_name: str | None
    """The name of the child process that runs or last ran the task."""
    error_code: str | None
    """The code of the final error, or None if the task did not fail."""


@dataclass(frozen=True, slots=True)
class TaskRow(TaskColumns):
    """A row from ``read_task`` whose result is still encoded."""

    result: Payload | None
    failed_reason: str | None


@dataclass(frozen=True, slots=True)
class TaskAttemptInfo:
    """One finished execution of a task."""

    _shown_texts = ("error_message",)

    task_id: str
    """The id of the task."""
    attempt: int
    """The number of the attempt, from 1."""
    outcome: TaskAttemptOutcome
    """Whether the attempt returned a value, ended with an error, or was lost with its process."""
    will_retry: bool
    """Whether another attempt followed this attempt."""
    started_at: datetime | None
    """When the attempt started; None if its code never started."""
    finished_at: datetime
    """When the attempt ended."""
    error_code: str | None
    """The code of the attempt's error, or None after a success."""
    error_message: str | None
    """The message of the attempt's error."""
    failed_reason: str | None
    """Why the process was lost, such as its exit code or signal."""
    worker_id: str | None
    """The id of the worker that ran the attempt."""
    worker_hostname: str | None
    """The host of the worker that ran the attempt."""
    worker_pid: int | None
    """The process id of the child that ran the attempt."""
    worker_process_name: str | None
    """The name of the child process that ran the attempt."""
    retry_reason: str | None = None
    """The rule that decided whether the task is retried, for example "retried by code GATEWAY_DOWN"."""
    fingerprint: str | None = None
    """The fingerprint of the failure: failures of this task have the same fingerprint if their error code,
    exception class and place in the code are the same.
    """
    exception_type: str | None = None
    """The class of the exception, for example "shop.errors.GatewayDown"; None if the error code is more
    informative.
    """
    raised_in: str | None = None
    """The application's innermost function in the traceback, for example "shop/payments.py:charge"."""

    def to_dict(self) -> dict[str, Any]:
        """Return the attempt as plain JSON values."""
        return task_result.json_object(self)


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The latest progress that a task reported in its current attempt."""

    _shown_texts = ("note",)

    attempt: int
    """The number of the attempt that reported the progress."""
    done: float
    """How much work is done, in the unit that your code chose."""
    total: float | None
    """How much work there is in all, or None if this is unknown."""
    note: str | None
    """A short text, at most 200 characters."""
    reported_at: datetime
    """When the worker stored the progress report."""

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as plain JSON values."""
        return task_result.json_object(self)

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {_plain(self.total)}"
        return f"{_plain(self.done)}{total}" + (f", {self.note}" if self.note else "")


class StoredLog(NamedTuple):
    """The lines that an attempt has logged. ``dropped`` is the number of lines omitted after line
    ``cut_after`` of the body.
    """

    attempt: int
    body: ShownText
    dropped: int
    cut_after: int
    created_at: datetime


def _plain(number: float) -> str:
    return f"{number:.0f}" if number.is_integer() else f"{number:g}"


class CancelledTask(NamedTuple):
    """A task that a cancellation found, and whether the cancellation changed it."""

    id: str
    was_status: str
    applied: bool


insert_task = TASKS.declare("insert_task", InsertTask, TaskId)
debounce_task = TASKS.declare("debounce_task", DebounceTask, DebouncedTask)
insert_new_tasks = TASKS.declare("insert_new_tasks", InsertTasks, Nothing)
insert_tasks = TASKS.declare("insert_tasks", InsertTasks, InsertedTasks)


@TASKS.statement
def find_sent_tasks(ids: Sequence[str]) -> SentTask: ...
@TASKS.statement
def find_idempotent_task(task_name: str, idempotency_key: str) -> IdempotentTask: ...
@TASKS.statement
def find_unique_task(task_name: str, idempotency_key: str) -> IdempotentTask: ...
@TASKS.statement
def read_outcomes(ids: Sequence[str]) -> OutcomeRow: ...
@TASKS.statement
def read_task(id: str, include_result: bool, include_failed_reason: bool) -> TaskRow: ...
@TASKS.statement
def read_logs(id: str, attempt: int | None) -> StoredLog: ...
@TASKS.statement
def read_attempts(id: str) -> TaskAttemptInfo: ...
@TASKS.statement
def read_progress(id: str) -> TaskProgress: ...
@TASKS.statement
def cancel_tasks(ids: Sequence[str], running: bool) -> CancelledTask: ...


TASKS.complete()
