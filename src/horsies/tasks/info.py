"""A stored task as its handle shows it: its result, its state and attempts, and actions on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from horsies.codec.results import ResultCodec, decode_untyped
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.tasks import (
    OutcomeRow,
    ReadTask,
    TaskAttemptInfo,
    TaskId,
    TaskRow,
    read_attempts,
    read_task,
)
from horsies.error_codes import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
)
from horsies.ids import stored_form
from horsies.result import Err, Ok
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, TaskResult


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The stored state of a task."""

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
    """A refused action, with the status that prevented it."""

    code: TaskActionErrorCode
    message: str
    task_id: str
    current_status: TaskStatus | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """A cancel that took effect.

    ``was_status`` is the status before the cancel. A RUNNING task has been asked to stop: its
    outcome becomes TASK_CANCELLED when its worker has stopped it.
    """

    task_id: str
    was_status: TaskStatus


def info_script(
    task_id: str,
    results: ResultCodec | None,
    include_result: bool,
    include_failed_reason: bool,
    include_attempts: bool,
) -> Script[TaskInfo | None]:
    """Read the state of one task; None when there is no such task."""
    if (stored := stored_form(task_id)) is None:
        return None
    row = one_or_none((yield read_task, ReadTask(stored, include_result, include_failed_reason)))
    if row is None:
        return None
    info = _info(row, results)
    return (
        replace(info, attempts=(yield from attempts_script(stored))) if include_attempts else info
    )


def attempts_script(task_id: str) -> Script[list[TaskAttemptInfo]]:
    """Read the finished attempts of a task, newest first."""
    rows: list[TaskAttemptInfo] = yield read_attempts, TaskId(task_id)
    return [replace(row, outcome=TaskAttemptOutcome(row.outcome)) for row in rows]


def _info(row: TaskRow, results: ResultCodec | None) -> TaskInfo:
    result = None
    if row.result is not None:
        result = read_result(row.result, results, f"task {row.task_id}")
    return TaskInfo(**row._asdict() | {"status": TaskStatus(row.status), "result": result})


def result_of(row: OutcomeRow, results: ResultCodec | None) -> TaskResult[Any, TaskError]:
    """Return the result of a task from its row; an unfinished task is an error result."""
    status = TaskStatus(row.status)
    match status:
        case TaskStatus.CANCELLED:
            return error_result(OutcomeCode.TASK_CANCELLED, f"Task {row.id} was cancelled.")
        case TaskStatus.PENDING | TaskStatus.CLAIMED | TaskStatus.RUNNING:
            return error_result(
                RetrievalCode.RESULT_NOT_READY,
                f"Task {row.id} is {row.status}; there is no result yet.",
                {"task_id": row.id, "status": row.status},
            )
        case TaskStatus.COMPLETED | TaskStatus.FAILED | TaskStatus.EXPIRED:
            if row.result is not None:
                return read_result(row.result, results, f"task {row.id}")
    if status is TaskStatus.FAILED:
        reason = row.failed_reason or "The process running the task vanished."
        return error_result(OperationalErrorCode.WORKER_CRASHED, reason)
    if status is TaskStatus.EXPIRED:
        return error_result(OutcomeCode.TASK_EXPIRED, f"Task {row.id} expired before it started.")
    message = f"Task {row.id} finished without a stored result."
    return error_result(RetrievalCode.RESULT_NOT_AVAILABLE, message)


def read_result(text: str, results: ResultCodec | None, owner: str) -> TaskResult[Any, TaskError]:
    """Decode a stored result; an unreadable one becomes an error result."""
    match results.decode(text) if results else decode_untyped(text):
        case Ok(result):
            return result
        case Err(problem):
            # With a path, the value was read but no longer fits its type; without, it was not read.
            return error_result(
                ContractCode.PYDANTIC_HYDRATION_ERROR
                if problem.path
                else OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
                f"The stored result of {owner} cannot be read: {problem.message}",
                {"path": problem.path},
            )


def error_result(
    code: BuiltInTaskCode, message: str, data: dict[str, Any] | None = None
) -> TaskResult[Any, TaskError]:
    """Return an error result that the library made."""
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))
