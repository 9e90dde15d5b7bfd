"""TaskHandle: wait for the result of a task, read its state, cancel it.

Nothing here raises: ``get`` reports a missing result with a retrieval code. ``info`` and ``cancel``
work for any task id.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from typing import Any, Generic, TypeVar

from horsies.codec.results import ResultCodec
from horsies.db.errors import describe
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.tasks import CancelledTask, CancelTask, OutcomeRow, cancel_task
from horsies.error_codes import OperationalErrorCode, RetrievalCode
from horsies.ids import stored_form
from horsies.result import Err, Ok, Result
from horsies.states import TaskStatus
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    presentable,
)
from horsies.tasks.info import (
    TaskActionError,
    TaskActionErrorCode,
    TaskCancelled,
    TaskInfo,
    error_result,
    info_script,
    result_of,
)
from horsies.tasks.waiters import seconds_to_wait, timeout_problem

T = TypeVar("T")


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
        """Wait for the result and return it; 0 reads once without waiting, None waits for ever.

        Never raises. Without a result it returns an error result: WAIT_TIMEOUT, RESULT_NOT_READY
        (with 0), TASK_NOT_FOUND, TASK_CANCELLED, TASK_EXPIRED, BROKER_ERROR.
        """
        if self._cached is not None:
            return self._cached
        if self._broker is None:
            return error_result(RetrievalCode.RESULT_NOT_AVAILABLE, _no_broker().message)
        if timeout_ms != 0 and is_loop_running():
            return error_result(
                OperationalErrorCode.BROKER_ERROR,
                "get() would block the running event loop; write `await handle.get_async()`.",
            )
        if (task_id := stored_form(self.task_id)) is None:
            return _not_found(self.task_id)
        if problem := timeout_problem(timeout_ms):
            return error_result(OperationalErrorCode.BROKER_ERROR, problem)
        future = self._broker.waiters.watch(task_id, once=timeout_ms == 0)
        try:
            # Only a signal handler can raise here, and its exception is the caller's own.
            wait([future], seconds_to_wait(timeout_ms))
        finally:
            self._broker.waiters.forget(task_id, future)
        if not future.done():
            return _timed_out(task_id, timeout_ms)
        if error := future.exception():
            return _broker_error(error)
        return self._read(future.result())

    async def get_async(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """``get`` without blocking the event loop."""
        if self._cached is not None:
            return self._cached
        task_id = stored_form(self.task_id)
        if self._broker is None or task_id is None:
            return self.get(timeout_ms=0)
        if problem := timeout_problem(timeout_ms):
            return error_result(OperationalErrorCode.BROKER_ERROR, problem)
        future = self._broker.waiters.watch(task_id, once=timeout_ms == 0)
        try:
            waiting = asyncio.wrap_future(future)
            row = await asyncio.wait_for(waiting, seconds_to_wait(timeout_ms))
        except TimeoutError:
            return _timed_out(task_id, timeout_ms)
        except Exception as error:
            return _broker_error(error)
        finally:
            self._broker.waiters.forget(task_id, future)
        return self._read(row)

    def info(
        self,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """Return the stored state of the task; Ok(None) when there is no such task."""
        if self._broker is None:
            return Err(_no_broker())
        flags = (include_result, include_failed_reason, include_attempts)
        script = info_script(self.task_id, self._results, *flags)
        return self._broker.perform(BrokerErrorCode.TASK_INFO_QUERY_FAILED, script)

    async def info_async(
        self,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """``info`` without blocking the event loop."""
        if self._broker is None:
            return Err(_no_broker())
        flags = (include_result, include_failed_reason, include_attempts)
        script = info_script(self.task_id, self._results, *flags)
        return await self._broker.perform_async(BrokerErrorCode.TASK_INFO_QUERY_FAILED, script)

    def cancel(self, *, include_running: bool = True) -> Result[TaskCancelled, TaskActionError]:
        """Cancel a waiting task at once; ask the worker of a running one to stop it."""
        if self._broker is None:
            return Err(_action_failed(self.task_id, _no_broker()))
        script = _cancel_script(self.task_id, include_running)
        done = self._broker.perform(BrokerErrorCode.CLEANUP_FAILED, script)
        return _cancel_outcome(self.task_id, done)

    async def cancel_async(
        self, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """``cancel`` without blocking the event loop."""
        if self._broker is None:
            return Err(_action_failed(self.task_id, _no_broker()))
        script = _cancel_script(self.task_id, include_running)
        done = await self._broker.perform_async(BrokerErrorCode.CLEANUP_FAILED, script)
        return _cancel_outcome(self.task_id, done)

    def _read(self, row: OutcomeRow | None) -> TaskResult[T, TaskError]:
        result = _not_found(self.task_id) if row is None else result_of(row, self._results)
        # A missing task may still be committed, and an unreadable result may be readable next time.
        code = result.err.error_code if result.err is not None else None
        if not isinstance(code, RetrievalCode) and code != OperationalErrorCode.BROKER_ERROR:
            self._cached = result
        return result


def _cancel_script(task_id: str, include_running: bool) -> Script[CancelledTask | None]:
    if (stored := stored_form(task_id)) is None:
        return None
    return one_or_none((yield cancel_task, CancelTask(stored, include_running)))


def _cancel_outcome(
    task_id: str, done: BrokerResult[CancelledTask | None]
) -> Result[TaskCancelled, TaskActionError]:
    if isinstance(done, Err):
        return Err(_action_failed(task_id, done.value))
    found = done.value
    if found is None:
        message = f"There is no task {task_id}."
        return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_FOUND, message, task_id))
    status = TaskStatus(found.was_status)
    if found.applied:
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
    return error_result(
        RetrievalCode.TASK_NOT_FOUND, f"There is no task {task_id}.", {"task_id": task_id}
    )


def _timed_out(task_id: str, timeout_ms: int | None) -> TaskResult[Any, TaskError]:
    return error_result(
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


def is_loop_running() -> bool:
    """Check for a running event loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
