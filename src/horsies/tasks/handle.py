"""TaskHandle: waits for a task's result, reads the task's state, cancels the task.

Only ``result`` raises; ``get`` reports a missing result with a retrieval code. ``info`` and ``cancel``
work for any task id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from horsies.codec.results import ResultCodec, decode_untyped
from horsies.db.errors import describe
from horsies.db.statement import Script, field_names, one_or_none
from horsies.db.statements.tasks import (
    CancelledTask,
    OutcomeRow,
    TaskAttemptInfo,
    TaskColumns,
    TaskProgress,
    TaskRow,
    cancel_tasks,
    read_attempts,
    read_progress,
    read_task,
)
from horsies.encryption import masked, missing_key, store_of
from horsies.error_codes import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
    docs_command,
)
from horsies.errors import (
    UNLIMITED_RETRIES,
    ResultTimeout,
    ResultUnavailable,
    TaskFailed,
    TaskWatchFailed,
)
from horsies.ids import stored_form
from horsies.modules import Deferred
from horsies.result import Err, Ok, Result
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, TaskResult, json_object
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    presentable,
)
from horsies.tasks.waiters import (
    OBSTACLE_SECONDS,
    is_loop_running,
    seconds_to_wait,
    timeout_problem,
    wait_for,
    warn_of_nested_wait,
)
from horsies.tasks.watching import UNCONNECTED, watch, watch_async

if TYPE_CHECKING:
    from horsies.tasks import recording
    from horsies.tasks.recording import Action
else:
    recording = Deferred("horsies.tasks.recording")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskInfo(TaskColumns):
    """The stored state of a task; ``max_retries`` is None for a policy without a limit."""

    result: TaskResult[Any, TaskError] | None = None
    """The outcome of the task, if ``include_result`` was passed and the task has ended."""
    failed_reason: str | None = None
    """The reason why an attempt was lost, such as the exit code of its process, if
    ``include_failed_reason`` was passed.
    """
    attempts: list[TaskAttemptInfo] | None = None
    """The finished attempts of the task, newest first, if ``include_attempts`` was passed."""
    progress: TaskProgress | None = None
    """The latest progress that the task reported."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return json_object(self)


class TaskActionErrorCode(StrEnum):
    """The reasons for which an action on a task is rejected."""

    TASK_NOT_FOUND = "TASK_NOT_FOUND"
    """No task has this id."""
    TASK_NOT_CANCELLABLE = "TASK_NOT_CANCELLABLE"
    """The task has already ended, or it is running and ``include_running`` is false."""
    TASK_NOT_RETRYABLE = "TASK_NOT_RETRYABLE"
    """``app.retry_task`` was called for a task that has not ended."""
    SEND_SUPPRESSED = "SEND_SUPPRESSED"
    """``app.retry_task`` was called while sends are suppressed."""
    TASK_IS_WORKFLOW_TASK = "TASK_IS_WORKFLOW_TASK"
    """``app.retry_task`` was called for a task of a workflow; retry its node through the workflow."""
    TASK_NOT_DURABLE = "TASK_NOT_DURABLE"
    """``signal`` was called for a task that is not a durable function."""
    TASK_NOT_HELD = "TASK_NOT_HELD"
    """``resume`` was called for a run that is not held."""
    TASK_RUNNING = "TASK_RUNNING"
    """``reset`` was called for a run that a process executes, or that is being cancelled."""
    TASK_ENDED = "TASK_ENDED"
    """``signal``, ``resume`` or ``reset`` was called for a run that has ended."""
    SIGNAL_NOT_FOUND = "SIGNAL_NOT_FOUND"
    """The durable function does not declare a signal with this name."""
    STEP_NOT_FOUND = "STEP_NOT_FOUND"
    """``reset`` was called with a step that is not recorded."""
    VALIDATION_FAILED = "VALIDATION_FAILED"
    """The value of a signal does not fit its declared type, or cannot be checked or encrypted without the
    application; or a record cannot be read without its key.
    """
    DB_OPERATION_FAILED = "DB_OPERATION_FAILED"
    """The database did not respond; ``error.retryable`` shows whether to try again."""


@dataclass(frozen=True, slots=True)
class TaskActionError:
    """A rejected action on a task, with the status that prevented the action."""

    code: TaskActionErrorCode
    """Why the action was rejected."""
    message: str
    """A sentence with the reason and the fix."""
    task_id: str
    """The id of the task that the action was for."""
    current_status: TaskStatus | None = None
    """The task's status at that time, if the task exists."""
    retryable: bool = False
    """Whether the same call can succeed later."""


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """A cancellation that took effect.

    ``was_status`` is the status before the cancellation. A RUNNING task was requested to stop: its outcome
    becomes TASK_CANCELLED when its worker has stopped it.
    """

    task_id: str
    """The id of the cancelled task."""
    was_status: TaskStatus
    """The task's status before the cancellation; a RUNNING task is stopped by its worker."""


def info_script(
    task_id: str,
    results: ResultCodec | None,
    include_result: bool,
    include_failed_reason: bool,
    include_attempts: bool,
) -> Script[TaskInfo | None]:
    """Read one task's state; None if no task has this id."""
    if (stored := stored_form(task_id)) is None:
        return None
    read = read_task(stored, include_result, include_failed_reason)
    progress: TaskProgress | None = None
    for _ in range(2):  # between the two statements, the next attempt may start and report progress
        rows: list[TaskRow] = yield read
        if not rows:
            return None
        (row,) = rows
        if row.started_at is not None:
            progress = yield from progress_script(stored)
        is_waiting = row.status in (TaskStatus.PENDING, TaskStatus.CLAIMED)
        if progress is None or progress.attempt <= row.retry_count + (not is_waiting):
            break
    info = replace(_info(row, results), progress=progress)
    return (
        replace(info, attempts=(yield from attempts_script(stored))) if include_attempts else info
    )


def progress_script(task_id: str) -> Script[TaskProgress | None]:
    """Read the latest progress that a task reported."""
    return one_or_none((yield read_progress(task_id)))


def attempts_script(task_id: str) -> Script[list[TaskAttemptInfo]]:
    """Read a task's finished attempts, newest first."""
    rows: list[TaskAttemptInfo] = yield read_attempts(task_id)
    return [replace(row, outcome=TaskAttemptOutcome(row.outcome)) for row in rows]


def _info(row: TaskRow, results: ResultCodec | None) -> TaskInfo:
    result = None
    if row.result is not None:
        result = read_result(row.result, results, f"task {row.task_id}")
    stored = {name: getattr(row, name) for name in field_names(TaskRow)}
    if row.max_retries is not None and row.max_retries >= UNLIMITED_RETRIES:
        stored["max_retries"] = None
    return TaskInfo(**stored | {"status": TaskStatus(row.status), "result": result})


def result_of(row: OutcomeRow, results: ResultCodec | None) -> TaskResult[Any, TaskError]:
    """Return a task's result from its row; for an unfinished task, return an error result."""
    match TaskStatus(row.status):
        case TaskStatus.CANCELLED:
            message = f"Task {row.id} was cancelled."
            return error_result(OutcomeCode.TASK_CANCELLED, message, {"task_id": row.id})
        case TaskStatus.EXPIRED:
            message = f"Task {row.id} did not start before its good_until."
            return error_result(OutcomeCode.TASK_EXPIRED, message, {"task_id": row.id})
        case TaskStatus.PENDING | TaskStatus.CLAIMED | TaskStatus.RUNNING:
            return error_result(
                RetrievalCode.RESULT_NOT_READY,
                f"Task {row.id} is {row.status}; there is no result yet.",
                {"task_id": row.id, "status": row.status},
            )
        case _ if row.result is not None:
            return read_result(row.result, results, f"task {row.id}")
        case TaskStatus.FAILED:
            reason = row.failed_reason or "The process running the task vanished."
            return error_result(OperationalErrorCode.WORKER_CRASHED, reason)
        case TaskStatus.COMPLETED:
            message = f"Task {row.id} finished without a stored result."
            return error_result(RetrievalCode.RESULT_NOT_AVAILABLE, message, {"task_id": row.id})


def _unread(key_id: str) -> str:
    if (store_id := store_of(key_id)) is not None:
        return (
            f"kept in the store {store_id!r}, which this program does not have or which has lost it; give "
            "its PostgresConfig the store that kept it"
        )
    return (
        f"encrypted with key {key_id}, which this program does not have or which does not decrypt it; give "
        "the codec of its PostgresConfig the key that encrypted it"
    )


def read_result(text: str, results: ResultCodec | None, owner: str) -> TaskResult[Any, TaskError]:
    """Decode a stored result; an unreadable result becomes an error result."""
    if (key_id := missing_key(text)) is not None:
        if text.startswith('{"err":'):
            return decode_untyped(masked(text)).unwrap()  # the code of the error is readable
        return error_result(
            OperationalErrorCode.PAYLOAD_UNREADABLE,
            f"The result of {owner} is {_unread(key_id)}.",
            {"key_id": key_id},
        )
    match results.decode(text) if results else decode_untyped(text):
        case Ok(result):
            return result
        case Err(problem):
            # If the error has a path, the value was read but no longer fits its type; without a path, the
            # value could not be read.
            return error_result(
                ContractCode.PYDANTIC_HYDRATION_ERROR
                if problem.path
                else OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
                f"The stored result of {owner} cannot be read: {problem.message}",
                {"path": problem.path},
            )


def error_result(
    code: BuiltInTaskCode, message: str, data: Mapping[str, Any] | None = None
) -> TaskResult[Any, TaskError]:
    """Return an error result created by the library."""
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))


_UNFINISHED = (RetrievalCode.WAIT_TIMEOUT, RetrievalCode.RESULT_NOT_READY)
_UNREADABLE = (
    OperationalErrorCode.BROKER_ERROR,
    OperationalErrorCode.PAYLOAD_UNREADABLE,
    OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
    ContractCode.PYDANTIC_HYDRATION_ERROR,
)


def value_or_raise(task_id: str, result: TaskResult[T, TaskError]) -> T:
    """Return a task's value, or raise TaskFailed, ResultTimeout or ResultUnavailable."""
    if result.is_ok():
        return result.ok_value
    error = result.err_value
    failure = _failure(task_id, error)
    if command := docs_command(error.error_code):
        failure.add_note(f"See: {command}")
    raise failure from error.exception if isinstance(error.exception, BaseException) else None


def _failure(task_id: str, error: TaskError) -> TaskFailed | ResultUnavailable:
    code, message, data = error.error_code, error.message, error.data
    if code == RetrievalCode.EVENT_LOOP_RUNNING:
        message = _would_block("result")
    if code in _UNFINISHED:
        return ResultTimeout(str(code), message, data)
    if isinstance(code, RetrievalCode) or code in _UNREADABLE:
        return ResultUnavailable(str(code), message, data)
    stored = error.exception if isinstance(error.exception, dict) else {}
    return TaskFailed(code, message, data=data, traceback=stored.get("traceback"), task_id=task_id)


_NO_BROKER = BrokerOperationError(BrokerErrorCode.NO_BROKER, UNCONNECTED)


class TaskHandle(Generic[T]):
    """A sent task.

    Example:
        handle = add.enqueue(1, 2)
        print(handle.result(timeout_ms=5_000))
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
        """Wait for the result and return it; 0 reads once without waiting, None waits forever.

        Never raises. If there is no result, it returns an error result: WAIT_TIMEOUT, RESULT_NOT_READY
        (with 0), TASK_NOT_FOUND, TASK_CANCELLED, TASK_EXPIRED, BROKER_ERROR, EVENT_LOOP_RUNNING.
        """
        if self._cached is not None:
            return self._cached
        if self._broker is None:
            return error_result(RetrievalCode.RESULT_NOT_AVAILABLE, UNCONNECTED)
        if timeout_ms != 0 and is_loop_running():
            return error_result(RetrievalCode.EVENT_LOOP_RUNNING, _would_block("get"))
        if (task_id := stored_form(self.task_id)) is None:
            return _not_found(self.task_id)
        if problem := timeout_problem(timeout_ms):
            return error_result(OperationalErrorCode.BROKER_ERROR, problem)
        if timeout_ms != 0:
            warn_of_nested_wait(task_id)
        future = self._broker.waiters.watch(task_id, once=timeout_ms == 0)
        try:
            # Only a signal handler can raise an exception here, and that exception is meant for the caller.
            wait_for(future, seconds_to_wait(timeout_ms))
        finally:
            unread = self._broker.waiters.forget(task_id, future)
        if not future.done():
            if unread:
                return _broker_error(unread)
            asked = self._broker.waiters.ask_obstacle(task_id)
            wait_for(asked, OBSTACLE_SECONDS)
            obstacle = self._broker.waiters.obstacle(task_id, asked)
            return _timed_out(task_id, timeout_ms, obstacle)
        if error := future.exception():
            return _broker_error(error)
        return self._read(future.result())

    def result(self, timeout_ms: int | None = None) -> T:
        """Wait like ``get`` and return the task's value, or raise.

        TaskFailed: the task failed, expired or was cancelled. ResultTimeout, a TimeoutError: the task has
        not ended in time. ResultUnavailable: the task's result could not be read.
        """
        return value_or_raise(self.task_id, self.get(timeout_ms))

    async def result_async(self, timeout_ms: int | None = None) -> T:
        """Like ``result``, but without blocking the event loop."""
        return value_or_raise(self.task_id, await self.get_async(timeout_ms))

    async def get_async(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """Like ``get``, but without blocking the event loop."""
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
            if unread := self._broker.waiters.forget(task_id, future):
                return _broker_error(unread)
            asked = self._broker.waiters.ask_obstacle(task_id)
            await asyncio.wait([asyncio.wrap_future(asked)], timeout=OBSTACLE_SECONDS)
            obstacle = self._broker.waiters.obstacle(task_id, asked)
            return _timed_out(task_id, timeout_ms, obstacle)
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
        """Return the task's stored state; Ok(None) if the task does not exist."""
        if self._broker is None:
            return Err(_NO_BROKER)
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
        """Like ``info``, but without blocking the event loop."""
        if self._broker is None:
            return Err(_NO_BROKER)
        flags = (include_result, include_failed_reason, include_attempts)
        script = info_script(self.task_id, self._results, *flags)
        return await self._broker.perform_async(BrokerErrorCode.TASK_INFO_QUERY_FAILED, script)

    def watch(self, timeout_ms: int | None = None) -> Iterator[TaskInfo]:
        """Yield the task's state now and after every change to its status, attempt or progress; the
        last state is terminal.

        Reconnects after a lost connection. Raises TaskWatchFailed if the task does not exist, and
        TimeoutError if the task has not ended after ``timeout_ms``.

        Example:
            for state in handle.watch():
                print(state.status, state.progress)
        """
        if is_loop_running():
            raise TaskWatchFailed(
                "watch() would block the running event loop; "
                "write `async for state in handle.watch_async()`."
            )
        return watch(self.info, self._broker, self.task_id, timeout_ms)

    def watch_async(self, timeout_ms: int | None = None) -> AsyncIterator[TaskInfo]:
        """Like ``watch``, but without blocking the event loop."""
        return watch_async(self.info_async, self._broker, self.task_id, timeout_ms)

    def cancel(
        self, *, include_running: bool = True, reason: str | None = None
    ) -> Result[TaskCancelled, TaskActionError]:
        """Cancel a waiting task immediately; request the worker of a running task to stop it.

        The reason and the author are recorded; see ``horsies.monitoring.acting_as``.
        """
        if self._broker is None:
            return Err(_action_failed(self.task_id, _NO_BROKER))
        action, script = self._cancel(include_running, reason)
        code = BrokerErrorCode.CLEANUP_FAILED
        done = recording.perform_action(self._broker, code, action, script)
        return action_result(self.task_id, done)

    async def cancel_async(
        self, *, include_running: bool = True, reason: str | None = None
    ) -> Result[TaskCancelled, TaskActionError]:
        """Like ``cancel``, but without blocking the event loop."""
        if self._broker is None:
            return Err(_action_failed(self.task_id, _NO_BROKER))
        action, script = self._cancel(include_running, reason)
        code = BrokerErrorCode.CLEANUP_FAILED
        done = await recording.perform_action_async(self._broker, code, action, script)
        return action_result(self.task_id, done)

    def _cancel(
        self, include_running: bool, reason: str | None
    ) -> tuple[Action, Script[Result[TaskCancelled, TaskActionError]]]:
        script = _cancel_script(self.task_id, include_running)
        return task_action("cancel_task", self.task_id, reason), script

    def _read(self, row: OutcomeRow | None) -> TaskResult[T, TaskError]:
        result = _not_found(self.task_id) if row is None else result_of(row, self._results)
        # A missing task may be committed later, and an unreadable result may be readable at the next attempt.
        code = result.err.error_code if result.err is not None else None
        if not isinstance(code, RetrievalCode) and code != OperationalErrorCode.BROKER_ERROR:
            self._cached = result
        return result


def _cancel_script(
    task_id: str, include_running: bool
) -> Script[Result[TaskCancelled, TaskActionError]]:
    found: CancelledTask | None = None
    if (stored := stored_form(task_id)) is not None:
        found = one_or_none((yield cancel_tasks([stored], include_running)))
    if found is None:
        return Err(no_such_task(task_id))
    status = TaskStatus(found.was_status)
    if found.applied:
        return Ok(TaskCancelled(task_id, status))
    message = f"Task {task_id} is {status.value} and can no longer be cancelled."
    return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_CANCELLABLE, message, task_id, status))


def action_result(
    task_id: str, done: BrokerResult[Result[T, TaskActionError]]
) -> Result[T, TaskActionError]:
    """Return the result of an action's script, or the failure of the broker that ran the script."""
    return Err(_action_failed(task_id, done.value)) if isinstance(done, Err) else done.value


def task_action(verb: str, task_id: str, reason: str | None = None) -> Action:
    """Return the record of a change to one task; its subject is the task's id as the database formats it."""
    return recording.Action(verb, f"task {stored_form(task_id) or task_id}", reason)


def no_such_task(task_id: str) -> TaskActionError:
    message = f"There is no task {task_id}."
    return TaskActionError(TaskActionErrorCode.TASK_NOT_FOUND, message, task_id)


def _action_failed(task_id: str, error: BrokerOperationError) -> TaskActionError:
    return TaskActionError(
        TaskActionErrorCode.DB_OPERATION_FAILED, error.message, task_id, retryable=error.retryable
    )


def _would_block(method: str) -> str:
    return f"{method}() would block the running event loop; write `await handle.{method}_async()`."


def _not_found(task_id: str) -> TaskResult[Any, TaskError]:
    return error_result(
        RetrievalCode.TASK_NOT_FOUND, f"There is no task {task_id}.", {"task_id": task_id}
    )


def _timed_out(task_id: str, timeout_ms: int | None, obstacle: str) -> TaskResult[Any, TaskError]:
    return error_result(
        RetrievalCode.WAIT_TIMEOUT,
        f"Task {task_id} did not finish within {timeout_ms} ms{obstacle}; see `horsies explain "
        f"{task_id}`.",
        {"task_id": task_id, "timeout_ms": timeout_ms},
    )


def _broker_error(error: BaseException) -> TaskResult[Any, TaskError]:
    code = OperationalErrorCode.BROKER_ERROR
    message = f"The result could not be read: {describe(error)}"
    unread = TaskError(error_code=code, message=message, exception=presentable(error))
    return TaskResult(err=unread)
