"""What a handle returns about a task besides its result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from horsies.codec.results import ResultCodec
from horsies.db.statements.tasks import AttemptRow, OutcomeRow, TaskRow
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.stored_result import _stored_result


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


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What the database knows about a task."""

    task_id: str
    task_name: str
    status: TaskStatus
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
    result: TaskResult[Any, TaskError] | None = None
    failed_reason: str | None = None
    attempts: list[TaskAttemptInfo] | None = None


class TaskActionErrorCode(StrEnum):
    """Why an action on a task was refused."""

    TASK_NOT_FOUND = "TASK_NOT_FOUND"
    TASK_NOT_CANCELLABLE = "TASK_NOT_CANCELLABLE"
    TASK_NOT_RETRYABLE = "TASK_NOT_RETRYABLE"
    SEND_SUPPRESSED = "SEND_SUPPRESSED"
    TASK_IS_WORKFLOW_TASK = "TASK_IS_WORKFLOW_TASK"
    DB_OPERATION_FAILED = "DB_OPERATION_FAILED"


@dataclass(frozen=True, slots=True)
class TaskActionError:
    """A refused action, with the status that stood in its way."""

    code: TaskActionErrorCode
    message: str
    task_id: str
    current_status: TaskStatus | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """A cancel that took effect.

    ``was_status`` is what the task was before. A RUNNING task has been asked to stop: its outcome
    becomes TASK_CANCELLED when its worker has stopped it.
    """

    task_id: str
    was_status: TaskStatus


def _info(row: TaskRow, results: ResultCodec | None) -> TaskInfo:
    outcome = OutcomeRow(
        row.id, row.task_name, row.status, row.result, row.failed_reason, row.error_code
    )
    return TaskInfo(
        task_id=row.id,
        task_name=row.task_name,
        status=TaskStatus(row.status),
        queue_name=row.queue_name,
        priority=row.priority,
        retry_count=row.retry_count,
        max_retries=row.max_retries,
        next_retry_at=row.next_retry_at,
        sent_at=row.sent_at,
        enqueued_at=row.enqueued_at,
        claimed_at=row.claimed_at,
        started_at=row.started_at,
        completed_at=row.completed_at,
        failed_at=row.failed_at,
        worker_hostname=row.worker_hostname,
        worker_pid=row.worker_pid,
        worker_process_name=row.worker_process_name,
        error_code=row.error_code,
        result=None if row.result is None else _stored_result(outcome, results),
        failed_reason=row.failed_reason,
    )


def _attempt_info(row: AttemptRow) -> TaskAttemptInfo:
    return TaskAttemptInfo(
        row.task_id,
        row.attempt,
        TaskAttemptOutcome(row.outcome),
        row.will_retry,
        row.started_at,
        row.finished_at,
        row.error_code,
        row.error_message,
        row.failed_reason,
        row.worker_id,
        row.worker_hostname,
        row.worker_pid,
        row.worker_process_name,
    )
