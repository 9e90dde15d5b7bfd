"""TaskHandle: the producer's end of the line, where a result is waited for and decoded.

``get`` never raises; what it cannot tell it says with a retrieval code. Also here: ``info`` and
``cancel``, which work for any task id.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from horsies.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    presentable,
)
from horsies.codec import ResultCodec, decode_untyped
from horsies.db.connect import describe
from horsies.db.query import Script, one_or_none
from horsies.db.tasks import (
    AttemptRow,
    CancelledTask,
    CancelTask,
    OutcomeRow,
    ReadTask,
    TaskId,
    TaskRow,
    cancel_task,
    read_attempts,
    read_task,
)
from horsies.ids import stored_form
from horsies.outcome import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
    TaskError,
    TaskResult,
)
from horsies.result import Err, Ok, Result
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.waiters import seconds_to_wait, timeout_problem

T = TypeVar("T")


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


class TaskHandle(Generic[T]):
    """A sent task.

    Example:
        handle = add.send(1, 2).unwrap()
        result = handle.get(timeout_ms=5_000)
        if result.is_ok():
            print(result.ok_value)
    """

    __slots__ = ("_broker", "_cached", "_results", "task_id")

    def __init__(
        self, task_id: str, broker: PostgresBroker | None, results: ResultCodec | None = None
    ) -> None:
        self.task_id = task_id
        self._broker = broker
        self._results = results
        self._cached: TaskResult[T, TaskError] | None = None

    def __repr__(self) -> str:
        return f"TaskHandle({self.task_id!r})"

    def get(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """Wait for the result and return it; 0 looks once without waiting, None waits for ever.

        Never raises. What stands in the way of a result is an error result: WAIT_TIMEOUT,
        RESULT_NOT_READY (after a look with 0), TASK_NOT_FOUND, TASK_CANCELLED, TASK_EXPIRED,
        BROKER_ERROR.
        """
        if self._cached is not None:
            return self._cached
        if self._broker is None:
            return _error(RetrievalCode.RESULT_NOT_AVAILABLE, _no_broker().message)
        if _loop_is_running() and timeout_ms != 0:
            return _error(
                OperationalErrorCode.BROKER_ERROR,
                "get() would block the running event loop; write `await handle.get_async()`.",
            )
        if (task_id := stored_form(self.task_id)) is None:
            return _not_found(self.task_id)
        if problem := timeout_problem(timeout_ms):
            return _error(OperationalErrorCode.BROKER_ERROR, problem)
        future = self._broker.watch(task_id, once=timeout_ms == 0)
        try:
            # It raises nothing but what a signal handler does, and that is the caller's own.
            wait([future], seconds_to_wait(timeout_ms))
        finally:
            self._broker.waiters.forget(task_id, future)
        if not future.done():
            return _timed_out(task_id, timeout_ms)
        if error := future.exception():
            return _broker_error(error)
        return self._keep(self._read(future.result()))

    async def get_async(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """The same without blocking the event loop."""
        if self._cached is not None:
            return self._cached
        task_id = stored_form(self.task_id)
        if self._broker is None or task_id is None:
            return self.get(timeout_ms=0)
        if problem := timeout_problem(timeout_ms):
            return _error(OperationalErrorCode.BROKER_ERROR, problem)
        future = self._broker.watch(task_id, once=timeout_ms == 0)
        try:
            waiting = asyncio.wrap_future(future)
            row = await asyncio.wait_for(waiting, seconds_to_wait(timeout_ms))
        except TimeoutError:
            return _timed_out(task_id, timeout_ms)
        except Exception as error:
            return _broker_error(error)
        finally:
            self._broker.waiters.forget(task_id, future)
        return self._keep(self._read(row))

    def info(
        self,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """Return what the database knows about the task; Ok(None) when there is no such task."""
        if self._broker is None:
            return Err(_no_broker())
        script = self._info_script(include_result, include_failed_reason, include_attempts)
        return self._broker.perform(BrokerErrorCode.TASK_INFO_QUERY_FAILED, script)

    async def info_async(
        self,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """The same without blocking the event loop."""
        if self._broker is None:
            return Err(_no_broker())
        script = self._info_script(include_result, include_failed_reason, include_attempts)
        return await self._broker.perform_async(BrokerErrorCode.TASK_INFO_QUERY_FAILED, script)

    def cancel(self, *, include_running: bool = True) -> Result[TaskCancelled, TaskActionError]:
        """Cancel the task: at once while it waits, by asking its worker to stop it while it runs."""
        if self._broker is None:
            return Err(_action_failed(self.task_id, _no_broker()))
        script = _cancel_script(self.task_id, include_running)
        done = self._broker.perform(BrokerErrorCode.CLEANUP_FAILED, script)
        return _cancel_outcome(self.task_id, done)

    async def cancel_async(
        self, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """The same without blocking the event loop."""
        if self._broker is None:
            return Err(_action_failed(self.task_id, _no_broker()))
        script = _cancel_script(self.task_id, include_running)
        done = await self._broker.perform_async(BrokerErrorCode.CLEANUP_FAILED, script)
        return _cancel_outcome(self.task_id, done)

    def _read(self, row: OutcomeRow | None) -> TaskResult[T, TaskError]:
        return _not_found(self.task_id) if row is None else result_of(row, self._results)

    def _keep(self, result: TaskResult[T, TaskError]) -> TaskResult[T, TaskError]:
        # What was not found may still be committed, and what could not be read may be readable next
        # time.
        code = result.err.error_code if result.err is not None else None
        if not isinstance(code, RetrievalCode) and code != OperationalErrorCode.BROKER_ERROR:
            self._cached = result
        return result

    def _info_script(
        self, include_result: bool, include_failed_reason: bool, include_attempts: bool
    ) -> Script[TaskInfo | None]:
        if (task_id := stored_form(self.task_id)) is None:
            return None
        row = one_or_none(
            (yield read_task, ReadTask(task_id, include_result, include_failed_reason))
        )
        if row is None:
            return None
        info = _info(row, self._results)
        if not include_attempts:
            return info
        attempts = yield read_attempts, TaskId(task_id)
        return replace(info, attempts=[_attempt_info(attempt) for attempt in attempts])


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


def _cancel_script(task_id: str, include_running: bool) -> Script[CancelledTask | None]:
    if (stored := stored_form(task_id)) is None:
        return None
    return one_or_none((yield cancel_task, CancelTask(stored, include_running)))


def _cancel_outcome(
    task_id: str, done: BrokerResult[CancelledTask | None]
) -> Result[TaskCancelled, TaskActionError]:
    if isinstance(done, Err):
        return Err(_action_failed(task_id, done.value))
    met = done.value
    if met is None:
        message = f"There is no task {task_id}."
        return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_FOUND, message, task_id))
    status = TaskStatus(met.was_status)
    if met.applied:
        return Ok(TaskCancelled(task_id, status))
    message = f"Task {task_id} is {status.value} and can no longer be cancelled."
    return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_CANCELLABLE, message, task_id, status))


def _action_failed(task_id: str, error: BrokerOperationError) -> TaskActionError:
    return TaskActionError(
        TaskActionErrorCode.DB_OPERATION_FAILED, error.message, task_id, retryable=error.retryable
    )


def _no_broker() -> BrokerOperationError:
    return BrokerOperationError(
        BrokerErrorCode.NO_BROKER, "This handle is not connected to a broker."
    )


def _not_found(task_id: str) -> TaskResult[Any, TaskError]:
    return _error(
        RetrievalCode.TASK_NOT_FOUND, f"There is no task {task_id}.", {"task_id": task_id}
    )


def _timed_out(task_id: str, timeout_ms: int | None) -> TaskResult[Any, TaskError]:
    return _error(
        RetrievalCode.WAIT_TIMEOUT,
        f"Task {task_id} did not finish within {timeout_ms} ms.",
        {"task_id": task_id, "timeout_ms": timeout_ms},
    )


def _broker_error(error: BaseException) -> TaskResult[Any, TaskError]:
    message = f"The result could not be read: {describe(error)}"
    return TaskResult(
        err=TaskError(
            error_code=OperationalErrorCode.BROKER_ERROR,
            message=message,
            exception=presentable(error),
        )
    )


def _error(
    code: BuiltInTaskCode,
    message: str,
    data: dict[str, Any] | None = None,
) -> TaskResult[Any, TaskError]:
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
