"""The application inside a child: loads it, and turns one assignment into one report.

Between the child's socket and the task function: find the task, decode the call by its signature,
invoke it, encode what it returned. Whatever goes wrong on the way is part of the report.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from horsies.app import SUPPRESSION_VARIABLES, Horsies, set_current_app
from horsies.codec.calls import BoundCall, CallSignature, payload_bytes
from horsies.codec.results import ResultCodec, encode_task_error
from horsies.config.app import PayloadConfig
from horsies.error_codes import ContractCode, OperationalErrorCode, error_code_text
from horsies.errors import TaskStopped
from horsies.locate import load_app
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult, exception_text
from horsies.tasks.definition import RESERVED_PREFIX, TaskDefinition
from horsies.tasks.invoke import invoke
from horsies.worker.child.builtin_tasks import is_internal, run_internal
from horsies.worker.child.logs import log_or_not
from horsies.worker.child.node_arguments import deliver
from horsies.worker.child.process_state import clear_timers
from horsies.worker.protocol import Assignment, ChildBoot, ChildReport

_MESSAGE_CHARACTERS_MAX = 2_000

logger = logging.getLogger("horsies.child")


def _nothing() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


_REHEARSAL = TaskDefinition(
    name=f"{RESERVED_PREFIX}rehearsal",
    function=_nothing,
    is_async=False,
    queue_name="",
    priority=0,
    retry_policy=None,
    exception_mapper={},
    default_unhandled_error_code=None,
    timeout_ms=None,
    signature=CallSignature.of(_nothing),
    results=ResultCodec.of(None, TaskError),
    location=None,
)


class AppProgram:
    """An application that can execute assignments."""

    def __init__(self, app: Horsies) -> None:
        self._app = app

    def start_hooks(self) -> Sequence[Callable[[], object]]:
        """The application's start hooks, in the order they were registered."""
        return self._app.get_child_process_start_hooks()

    def execute(self, assignment: Assignment) -> ChildReport:
        """Run one assignment."""
        return execute(self._app, assignment)

    def rehearse(self, assignment: Assignment) -> ChildReport:
        """Run a task that does nothing and that nobody sent, the way of all others."""
        return _execute(self._app, _REHEARSAL, assignment)

    def close(self) -> None:
        """Close what task code may have opened by sending."""
        closed = self._app.close()
        if isinstance(closed, Err):
            message = "Closing the child's connections failed: %s"
            log_or_not(logger, logging.DEBUG, message, closed.value.message)


def load_program(boot: ChildBoot) -> AppProgram:
    """Load the application as the current one, with its task modules; nothing is sent meanwhile."""
    with _sends_suppressed():
        app = load_app(boot.app_locator)
        app.role = "child"
        set_current_app(app)
        app.import_task_modules(boot.modules or None)
    return AppProgram(app)


@contextmanager
def _sends_suppressed() -> Iterator[None]:
    """Suppress sends by the environment: the application that will read it does not exist yet."""
    name = SUPPRESSION_VARIABLES[0]
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def execute(app: Horsies, assignment: Assignment) -> ChildReport:
    """Run one assignment of `app` and say what came of it; never raises but for TaskStopped."""
    try:
        task = app.get_task(assignment.task_name)
        if task is None:
            return _execute_internal(app, assignment)
        return _execute(app, task.definition, assignment)
    except TaskStopped:
        raise
    except BaseException as error:  # user code also reads arguments and writes results
        return _failure(assignment, _failed_around(assignment, error))


def _execute(app: Horsies, definition: TaskDefinition, assignment: Assignment) -> ChildReport:
    signature = definition.signature
    if assignment.node is None:
        call = signature.decode_call(assignment.args_json, assignment.kwargs_json)
    else:
        call = deliver(app, assignment, signature, assignment.kwargs_json)
    if isinstance(call, Err):
        problem = f"The stored arguments do not fit task {definition.name!r}: {call.value.message}"
        return _failure(assignment, _serialization_error(problem))
    result = _invoke(app, definition, call.value)
    encoded = definition.results.encode(result)
    if isinstance(encoded, Err):
        problem = (
            f"What task {definition.name!r} returned cannot be stored: {encoded.value.message}"
        )
        return _failure(assignment, _serialization_error(problem))
    too_large = _size_problem(definition, encoded.value, app.config.payload)
    if too_large is not None:
        return _failure(assignment, _without_payload(result, too_large))
    if result.is_ok():
        return ChildReport(
            assignment.task_id, assignment.generation, True, encoded.value, None, None
        )
    return _error_report(assignment, encoded.value, result.err_value)


def _execute_internal(app: Horsies, assignment: Assignment) -> ChildReport:
    """Run a task that no user registered; only the library's own are not a mistake."""
    if not is_internal(assignment):
        return _failure(assignment, _unknown_task(assignment))
    done = run_internal(app, assignment)
    if isinstance(done, Err):
        return _failure(assignment, done.value)
    result_json = f'{{"ok":{done.value}}}'
    return ChildReport(assignment.task_id, assignment.generation, True, result_json, None, None)


def _invoke(app: Horsies, definition: TaskDefinition, call: BoundCall) -> TaskResult[Any, Any]:
    try:
        return invoke(app.config, definition, call.args, call.kwargs, clear_timers)
    except KeyboardInterrupt:
        # Children disregard Ctrl-C: the task itself raised this.
        return TaskResult(
            err=TaskError(
                error_code=OperationalErrorCode.UNHANDLED_EXCEPTION,
                message=f"Task {definition.name!r} raised KeyboardInterrupt.",
            )
        )


def _failure(assignment: Assignment, error: TaskError) -> ChildReport:
    return _error_report(assignment, encode_task_error(error), error)


def _error_report(assignment: Assignment, result_json: str, error: TaskError) -> ChildReport:
    _log(error)
    return ChildReport(
        task_id=assignment.task_id,
        generation=assignment.generation,
        ok=False,
        result_json=result_json,
        error_code=error_code_text(error.error_code),
        error_message=error.message,
    )


def _log(error: TaskError) -> None:
    """Show what was raised, and what the library found wrong; an error returned is no news."""
    if isinstance(error.exception, BaseException):
        log_or_not(logger, logging.ERROR, "%s", error.message, error=error.exception)
    elif isinstance(error.error_code, OperationalErrorCode | ContractCode):
        log_or_not(logger, logging.ERROR, "%s", error.message)


def _unknown_task(assignment: Assignment) -> TaskError:
    return TaskError(
        error_code=OperationalErrorCode.WORKER_RESOLUTION_ERROR,
        message=f"This worker knows no task {assignment.task_name!r}; "
        "add its module to discover_tasks, or route it to a queue of workers that know it.",
    )


def _failed_around(assignment: Assignment, error: BaseException) -> TaskError:
    return TaskError(
        error_code=OperationalErrorCode.TASK_EXCEPTION,
        message=f"Reading the arguments of task {assignment.task_name!r} or storing its result "
        f"raised {type(error).__name__}: {exception_text(error)}",
        exception=error,
    )


def _serialization_error(message: str) -> TaskError:
    return TaskError(error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR, message=message)


def _without_payload(result: TaskResult[Any, TaskError], too_large: str) -> TaskError:
    """The error that takes the place of a result too large to store: its own error, if it was one."""
    if result.is_ok():
        return TaskError(error_code=OperationalErrorCode.PAYLOAD_TOO_LARGE, message=too_large)
    error = result.err_value
    message = (error.message or "")[:_MESSAGE_CHARACTERS_MAX]
    return TaskError(error_code=error.error_code, message=message, data={"left_out": too_large})


def _size_problem(
    definition: TaskDefinition, result_json: str, payload: PayloadConfig
) -> str | None:
    size = payload_bytes(result_json)
    if payload.reject_bytes is not None and size > payload.reject_bytes:
        return (
            f"The result of task {definition.name!r} has {size} bytes of JSON, more than "
            f"payload.reject_bytes={payload.reject_bytes}; return a reference to the data instead."
        )
    if size > payload.warn_bytes:
        log_or_not(
            logger,
            logging.WARNING,
            "The result of task %r has %d bytes of JSON, more than payload.warn_bytes=%d.",
            definition.name,
            size,
            payload.warn_bytes,
        )
    return None
