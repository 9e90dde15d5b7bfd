"""Calling user code: arguments in, a checked TaskResult out, whatever the code does.

Used by the child for every task and by a direct call ``task(...)``; between the decoded call and
the report on the line. Exceptions become error results through the exception mappers; only a stop
request and Ctrl-C pass.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from horsies.codec import CodecError
from horsies.config import AppConfig
from horsies.definition import TaskDefinition
from horsies.errors import WorkflowContextMissingIdError
from horsies.outcome import (
    ContractCode,
    OperationalErrorCode,
    TaskError,
    TaskResult,
)
from horsies.raised import exception_text
from horsies.result import Err
from horsies.retry import resolve_exception_code
from horsies.stop import TaskStopped

# One loop per process, kept between tasks so that clients cached by async tasks stay usable.
_runners: dict[int, asyncio.Runner] = {}


def _do_nothing() -> None:
    return None


def invoke(
    config: AppConfig,
    definition: TaskDefinition,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    clean_up: Callable[[], None] = _do_nothing,
) -> TaskResult[Any, TaskError]:
    """Call the task function, then `clean_up`, and return the outcome of the task; never raises but
    for TaskStopped and KeyboardInterrupt.
    """
    try:
        value = definition.function(*args, **kwargs)
        if definition.is_async:
            value = _run(value)
    except (KeyboardInterrupt, TaskStopped):
        raise
    except BaseException as error:  # sys.exit() in a task is that task's failure, not the process's
        return TaskResult(err=_exception_error(config, definition, error))
    finally:
        clean_up()
    return _checked(definition, value)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # A loop serves one thread; only the main one runs tasks often enough to keep its own.
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    try:
        return _runner().run(coroutine)
    except TaskStopped:
        # The signal met the loop rather than the coroutine, which is cancelled now to clean up.
        _runners.pop(os.getpid()).close()
        raise


def _runner() -> asyncio.Runner:
    pid = os.getpid()
    if pid not in _runners:
        _runners.clear()
        _runners[pid] = asyncio.Runner()
    return _runners[pid]


def _checked(definition: TaskDefinition, value: object) -> TaskResult[Any, TaskError]:
    if not isinstance(value, TaskResult):
        return TaskResult(err=_not_a_result(definition, value))
    match definition.results.validate(value):
        case Err(problem):
            return TaskResult(err=_mismatch(definition, value, problem))
        case _:
            return value


def _mismatch(
    definition: TaskDefinition, value: TaskResult[Any, Any], problem: CodecError
) -> TaskError:
    results = definition.results
    return TaskError(
        error_code=ContractCode.RETURN_TYPE_MISMATCH,
        message=f"Task {definition.name!r} returned a value that does not fit its annotation: "
        f"{problem.message}",
        data={
            "variant": "ok" if value.is_ok() else "err",
            "expected_type": results.ok_text if value.is_ok() else results.err_text,
            "path": problem.path,
        },
    )


def _not_a_result(definition: TaskDefinition, value: object) -> TaskError:
    return TaskError(
        error_code=OperationalErrorCode.TASK_EXCEPTION,
        message=f"Task {definition.name!r} returned {type(value).__name__} instead of a TaskResult; "
        "return TaskResult(ok=...) or TaskResult(err=...).",
    )


def _exception_error(
    config: AppConfig, definition: TaskDefinition, error: BaseException
) -> TaskError:
    if isinstance(error, WorkflowContextMissingIdError):
        return TaskError(error_code=ContractCode.WORKFLOW_CTX_MISSING_ID, message=str(error))
    code = resolve_exception_code(
        error,
        definition.exception_mapper,
        config.exception_mapper,
        definition.default_unhandled_error_code,
        config.default_unhandled_error_code,
    )
    kind = type(error).__name__
    return TaskError(
        error_code=code,
        message=f"Task {definition.name!r} raised {kind}: {exception_text(error)}",
        data={"exception_type": kind},
        exception=error,
    )
