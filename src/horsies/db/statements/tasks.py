"""Catalogue of the producer's statements on tasks.

The worker's statements are in ``turn.py``; docs/internals/state-machine.md lists all transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.modules import Deferred
from horsies.states import SILENT_AFTER_SECONDS, TaskAttemptOutcome, TaskStatus

if TYPE_CHECKING:
    from horsies import task_result
else:
    task_result = Deferred("horsies.task_result")

TASKS = StatementFile("tasks.sql")


class InsertTask(NamedTuple):
    """The row that a send inserts."""

    id: str
    task_name: str
    queue_name: str
    priority: int
    args: str
    kwargs: str
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
    # The run of a durable function that starts this task.
    wakes_task_id: str | None = None
    lane_key: str | None = None
    lane: int | None = None


class DebounceTask(NamedTuple):
    """The row that a debounced send inserts, or whose values replace those of the waiting task."""

    id: str
    task_name: str
    queue_name: str
    priority: int
    args: str
    kwargs: str
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
    """The waiting task; None if another kind of send holds its key."""

    id: str | None


class InsertTasks(NamedTuple):
    """Many rows of one task: values that all rows share are given once, the others as columns, texts
    with one value per line.
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
    ids: str
    args: str
    kwargs: str
    enqueue_shas: str
    # The keys as JSON, and their lanes; both are empty if no task has a key.
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
    result: str | None
    failed_reason: str | None
    error_code: str | None


class TaskService(NamedTuple):
    """A waiting task, and the code of the obstacle between it and live workers, if there is one."""

    id: str
    task_name: str
    queue_name: str
    obstacle: str | None


@dataclass(frozen=True, slots=True)
class TaskColumns:
    """The columns that ``TaskInfo`` shows as stored."""

    task_id: str
    task_name: str
    status: TaskStatus
    queue_name: str
    priority: int
    retry_count: int
    max_retries: int | None
    next_retry_at: datetime | None
    sent_at: datetime | None
    enqueued_at: datetime
    claimed_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    worker_hostname: str | None
    worker_pid: int | None
    worker_process_name: str | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class TaskRow(TaskColumns):
    """A row from ``read_task``, its result still encoded."""

    result: str | None
    failed_reason: str | None


@dataclass(frozen=True, slots=True)
class TaskAttemptInfo:
    """One finished execution of a task."""

    task_id: str
    attempt: int
    outcome: TaskAttemptOutcome
    will_retry: bool
    started_at: datetime | None
    finished_at: datetime
    error_code: str | None
    error_message: str | None
    failed_reason: str | None
    worker_id: str | None
    worker_hostname: str | None
    worker_pid: int | None
    worker_process_name: str | None
    retry_reason: str | None = None
    """The rule that decided whether the task is retried: "retried by code GATEWAY_DOWN"."""

    def to_dict(self) -> dict[str, Any]:
        """Return the attempt as plain JSON values."""
        return task_result.json_object(self)


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The latest progress that the task reported in its current attempt."""

    attempt: int
    done: float
    total: float | None
    note: str | None
    reported_at: datetime

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as plain JSON values."""
        return task_result.json_object(self)

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {_plain(self.total)}"
        return f"{_plain(self.done)}{total}" + (f", {self.note}" if self.note else "")


def _plain(number: float) -> str:
    return f"{number:.0f}" if number.is_integer() else f"{number:g}"


class CancelledTask(NamedTuple):
    """The row that a cancellation found, and whether it was changed."""

    id: str
    was_status: str
    applied: bool
    notified: bool


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
def read_service(
    ids: Sequence[str], silent_seconds: float = SILENT_AFTER_SECONDS
) -> TaskService: ...
@TASKS.statement
def read_task(id: str, include_result: bool, include_failed_reason: bool) -> TaskRow: ...
@TASKS.statement
def read_attempts(id: str) -> TaskAttemptInfo: ...
@TASKS.statement
def read_progress(id: str) -> TaskProgress: ...
@TASKS.statement
def cancel_tasks(ids: Sequence[str], running: bool) -> CancelledTask: ...


TASKS.complete()
