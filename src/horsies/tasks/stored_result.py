"""From a stored row to the TaskResult that a handle returns."""

from __future__ import annotations

from typing import Any

from horsies.codec.results import ResultCodec, decode_untyped
from horsies.db.statements.tasks import OutcomeRow
from horsies.error_codes import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
)
from horsies.result import Err, Ok
from horsies.states import TaskStatus
from horsies.task_result import TaskError, TaskResult


def result_of(row: OutcomeRow, results: ResultCodec | None) -> TaskResult[Any, TaskError]:
    """Turn a task's row into the result its reader sees."""
    match TaskStatus(row.status):
        case TaskStatus.COMPLETED | TaskStatus.FAILED | TaskStatus.EXPIRED:
            return _stored_result(row, results)
        case TaskStatus.CANCELLED:
            return _error(OutcomeCode.TASK_CANCELLED, f"Task {row.id} was cancelled.")
        case TaskStatus.PENDING | TaskStatus.CLAIMED | TaskStatus.RUNNING:
            return _error(
                RetrievalCode.RESULT_NOT_READY,
                f"Task {row.id} is {row.status}; there is no result yet.",
                {"task_id": row.id, "status": row.status},
            )


def _stored_result(row: OutcomeRow, results: ResultCodec | None) -> TaskResult[Any, TaskError]:
    if row.result is None:
        return _without_result(row)
    return read_result(row.result, results, f"task {row.id}")


def read_result(text: str, results: ResultCodec | None, owner: str) -> TaskResult[Any, TaskError]:
    """Return a stored result; one that cannot be read is an error result that says so."""
    decoded = results.decode(text) if results else decode_untyped(text)
    match decoded:
        case Ok(result):
            return result
        case Err(problem):
            # A path leads into a value that was read but no longer fits; without one nothing was.
            return _error(
                ContractCode.PYDANTIC_HYDRATION_ERROR
                if problem.path
                else OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
                f"The stored result of {owner} cannot be read: {problem.message}",
                {"path": problem.path},
            )


def _without_result(row: OutcomeRow) -> TaskResult[Any, TaskError]:
    if row.status == TaskStatus.FAILED:
        reason = row.failed_reason or "The process running the task vanished."
        return _error(OperationalErrorCode.WORKER_CRASHED, reason)
    if row.status == TaskStatus.EXPIRED:
        return _error(OutcomeCode.TASK_EXPIRED, f"Task {row.id} expired before it started.")
    return _error(
        RetrievalCode.RESULT_NOT_AVAILABLE, f"Task {row.id} finished without a stored result."
    )


def _error(
    code: BuiltInTaskCode,
    message: str,
    data: dict[str, Any] | None = None,
) -> TaskResult[Any, TaskError]:
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))
