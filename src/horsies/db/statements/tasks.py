"""Catalogue of the producer's statements on tasks: parameters, rows, and one object per statement.

The worker's half of the same file is declared in ``db/turn.py``; the state machine they implement
is the table in ``states.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile

TASKS = StatementFile("tasks.sql")


class InsertTask(NamedTuple):
    """The row a send inserts: the first of the four values that cross a border."""

    id: str
    task_name: str
    queue_name: str
    priority: int
    args: str
    kwargs: str
    sent_at: datetime
    delay_seconds: float
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    enqueue_sha: str
    idempotency_key: str | None
    idempotency_sha: str | None


class InsertTasks(NamedTuple):
    """Many rows of one task: shared values once, the rest as columns with one value per line."""

    task_name: str
    queue_name: str
    priority: int
    sent_at: datetime
    delay_seconds: float
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    ids: str
    args: str
    kwargs: str
    enqueue_shas: str


class InsertedTasks(NamedTuple):
    """How many of the rows were not there yet."""

    inserted: int


class TaskId(NamedTuple):
    """A task by its id."""

    id: str


class TaskIds(NamedTuple):
    """Tasks by their ids."""

    ids: Sequence[str]


class SentTask(NamedTuple):
    """The fingerprint of a task that is already stored."""

    id: str
    enqueue_sha: str


class IdempotencyKey(NamedTuple):
    """A caller's key, unique per task name."""

    task_name: str
    idempotency_key: str


class IdempotentTask(NamedTuple):
    """The task that holds an idempotency key."""

    id: str
    idempotency_sha: str | None


class OutcomeRow(NamedTuple):
    """What a waiter needs to know of a task."""

    id: str
    task_name: str
    status: str
    result: str | None
    failed_reason: str | None
    error_code: str | None


class ReadTask(NamedTuple):
    """Which task to describe, and how much of it."""

    id: str
    include_result: bool
    include_failed_reason: bool


class TaskRow(NamedTuple):
    """One task as handle.info shows it."""

    id: str
    task_name: str
    status: str
    queue_name: str
    priority: int
    retry_count: int
    max_retries: int
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
    result: str | None
    failed_reason: str | None


class AttemptRow(NamedTuple):
    """One finished attempt."""

    task_id: str
    attempt: int
    outcome: str
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


class CancelTask(NamedTuple):
    """Which task to cancel; ``running`` also asks a RUNNING one to stop."""

    id: str
    running: bool


class CancelledTask(NamedTuple):
    """The row a cancel met, and whether it did anything to it."""

    id: str
    was_status: str
    applied: bool
    notified: bool


insert_task = TASKS.declare("insert_task", InsertTask, TaskId)
insert_tasks = TASKS.declare("insert_tasks", InsertTasks, InsertedTasks)
find_sent_tasks = TASKS.declare("find_sent_tasks", TaskIds, SentTask)
find_idempotent_task = TASKS.declare("find_idempotent_task", IdempotencyKey, IdempotentTask)
read_outcomes = TASKS.declare("read_outcomes", TaskIds, OutcomeRow)
read_task = TASKS.declare("read_task", ReadTask, TaskRow)
read_attempts = TASKS.declare("read_attempts", TaskId, AttemptRow)
cancel_task = TASKS.declare("cancel_task", CancelTask, CancelledTask)

TASKS.complete()
