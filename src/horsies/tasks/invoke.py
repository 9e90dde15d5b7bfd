"""Calling user code: arguments in, a checked TaskResult out, whatever the code does.

Used by the child for every task and by a direct call ``task(...)``; between the decoded call and
the report on the line. Exceptions become error results through the exception mappers; only a stop
request and Ctrl-C pass. Coroutines run on an event loop that is kept between tasks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from horsies.codec.form import CodecError
from horsies.config.app import AppConfig
from horsies.error_codes import ContractCode, OperationalErrorCode
from horsies.errors import TaskStopped, WorkflowContextMissingIdError
from horsies.result import Err
from horsies.retry import resolve_exception_code
from horsies.task_result import TaskError, TaskResult, exception_text
from horsies.tasks.definition import TaskDefinition


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
    return _kept_loop().run(coroutine)


def stop_coroutine() -> None:
    """Cancel the coroutine of the running task, if it has one; for the handler of a signal."""
    for loop in _kept_loops.values():
        loop.stop_coroutine()


def _kept_loop() -> _KeptLoop:
    pid = os.getpid()
    if pid not in _kept_loops:
        _kept_loops.clear()
        _kept_loops[pid] = _KeptLoop()
    return _kept_loops[pid]


class _KeptLoop:
    """An event loop for one coroutine after the other, and the end of it when one does not end."""

    __slots__ = ("_is_stopped", "_main", "_runner")

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._main: asyncio.Task[Any] | None = None
        self._is_stopped = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what the coroutine returns; raise what it raises, or TaskStopped."""
        try:
            return self._runner.run(self._as_main(coroutine))
        except TaskStopped:
            self._is_stopped = True
            raise
        except (asyncio.CancelledError, BaseExceptionGroup) as error:
            if not self._is_stopped:
                raise
            raise TaskStopped from error
        finally:
            main, self._main = self._main, None
            if self._is_stopped or main is None or not main.done():
                # What still waits on this loop is cancelled now to clean up, and goes on in no other.
                _kept_loops.clear()
                self._runner.close()

    async def _as_main(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._main = asyncio.current_task()
        return await coroutine

    def stop_coroutine(self) -> None:
        """Cancel the coroutine, unless it is the one that the signal interrupts.

        What a handler raises in another task or in a callback stays there.
        """
        main = self._main
        if main is None:
            return
        self._is_stopped = True
        if asyncio.current_task(main.get_loop()) is not main:
            main.cancel()


# One per process, kept between tasks so that clients cached by async tasks stay usable.
_kept_loops: dict[int, _KeptLoop] = {}


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
