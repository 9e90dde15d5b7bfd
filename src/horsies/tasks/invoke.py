"""Calls a task's function, in a child process or directly through ``task(...)``.

Exception mappers turn exceptions into errors; only a stop request and Ctrl-C propagate. Coroutines run on an
event loop that is kept between tasks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError

from horsies.codec.form import CodecError, TypeMismatch
from horsies.config.app import AppConfig
from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    ContractCode,
    OperationalErrorCode,
    resolve_exception_code,
    validate_error_code_name,
)
from horsies.errors import (
    DurableMisuse,
    RetryLater,
    TaskFailed,
    TaskStopped,
    WorkflowContextMissingIdError,
)
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult, describe_exception, exception_text
from horsies.tasks.batch import BatchResultMismatch
from horsies.tasks.definition import TaskDefinition

logger = logging.getLogger("horsies.task")

_SHOWN_CODE_CHARACTERS = 200


def _do_nothing() -> None:
    return None


def invoke(
    config: AppConfig, definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TaskResult[Any, TaskError]:
    """Check the arguments against the annotations, call the task function, and check and return its
    result.

    The only exceptions it raises are TaskStopped and KeyboardInterrupt.
    """
    if problem := call_problem(definition, args, kwargs):
        return _uncalled(problem)
    return _direct_result(definition, call_function(config, definition, args, kwargs))


async def invoke_async(
    config: AppConfig, definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TaskResult[Any, TaskError]:
    """Like ``invoke``, but on the caller's event loop; cancellation of the caller also propagates."""
    if problem := call_problem(definition, args, kwargs):
        return _uncalled(problem)
    returned = await await_function(config, definition, args, kwargs)
    if isinstance(returned, TaskError):
        raised = returned.exception
        if isinstance(raised, asyncio.CancelledError | KeyboardInterrupt | TaskStopped):
            raise raised
    return _direct_result(definition, returned)


def _uncalled(problem: str) -> TaskResult[Any, TaskError]:
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    return TaskResult(err=TaskError(error_code=code, message=problem))


def _direct_result(
    definition: TaskDefinition, returned: TaskResult[Any, TaskError] | TaskError
) -> TaskResult[Any, TaskError]:
    """Check the result of a direct call against the annotation, as a worker does."""
    if isinstance(returned, TaskError):
        return TaskResult(err=returned)
    encoded = definition.results.encode(returned)
    if isinstance(encoded, Err) and isinstance(encoded.value, TypeMismatch):
        return TaskResult(err=mismatch_error(definition, returned, encoded.value))
    return returned


def call_plain(definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Check a plain function's arguments, then call it like an ordinary function."""
    if problem := call_problem(definition, args, kwargs):
        raise TypeError(problem)
    return definition.function(*args, **kwargs)


def call_problem(
    definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Return the reason why a send would reject these arguments, or None. Arguments that a workflow passes
    are ignored, because they are not sent.
    """
    if definition.durable is not None:
        raise DurableMisuse(
            f"Durable function {definition.name!r} needs a record of its steps, so it cannot be called "
            "directly; send it, or call its `function` with your own context."
        )
    injected = definition.signature.injected
    if injected:
        names = list(inspect.signature(definition.function).parameters)[: len(args)]
        split = next((place for place, name in enumerate(names) if name in injected), len(args))
        # Parameters behind an injected parameter are sent by name.
        kwargs = {**dict(zip(names[split:], args[split:], strict=False)), **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name not in injected}
        args = args[:split]
    checked = definition.signature.encode_call(args, kwargs)
    if isinstance(checked, Err):
        return f"The arguments do not fit task {definition.name!r}: {checked.value.message}"
    return None


def call_function(
    config: AppConfig,
    definition: TaskDefinition,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    clean_up: Callable[[], None] = _do_nothing,
) -> TaskResult[Any, TaskError] | TaskError:
    """Call the task function, then `clean_up`. Return the function's unchecked result, or an error if it
    raised or should have returned a TaskResult. Raises only TaskStopped and KeyboardInterrupt.
    """
    try:
        value = definition.function(*args, **kwargs)
        if definition.is_async:
            value = run_coroutine(value)
    except (KeyboardInterrupt, TaskStopped):
        raise
    except BaseException as error:  # sys.exit() in a task must fail only the task
        return _raised_error(config, definition, error)
    finally:
        clean_up()
    return checked_value(definition, value)


async def await_function(
    config: AppConfig, definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TaskResult[Any, TaskError] | TaskError:
    """Like ``call_function``, but on the caller's event loop; a cancellation of the coroutine becomes an
    error.
    """
    try:
        value = definition.function(*args, **kwargs)
        if definition.is_async:
            value = await value
    except BaseException as error:
        return _raised_error(config, definition, error)
    return checked_value(definition, value)


def _raised_error(config: AppConfig, definition: TaskDefinition, error: BaseException) -> TaskError:
    if isinstance(error, TaskFailed):
        return _failure_error(config, definition, error)
    return _exception_error(config, definition, error)


def checked_value(definition: TaskDefinition, value: Any) -> TaskResult[Any, TaskError] | TaskError:
    """Wrap the value in a TaskResult, or return an error if the function should have returned one."""
    if definition.is_plain:
        return TaskResult(ok=value)
    if isinstance(value, TaskResult):
        if isinstance(value.err, TaskError) and type(value.err.error_code) is str:
            _warn_about_code(definition.name, value.err.error_code)
        return value
    return TaskError(
        error_code=OperationalErrorCode.TASK_EXCEPTION,
        message=f"Task {definition.name!r} returned {type(value).__name__} instead of a TaskResult; "
        "return TaskResult(ok=...) or TaskResult(err=...).",
    )


@functools.lru_cache(maxsize=256)  # logs once per task and code; tasks may invent many codes
def _warn_about_code(task_name: str, code: str) -> None:
    for problem in validate_error_code_name(code[:_SHOWN_CODE_CHARACTERS]):
        logger.warning("no retry policy can list an error of task %r: %s", task_name, problem)


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion; in the main thread, on the event loop that is kept between tasks."""
    # An event loop serves only one thread, and only the main thread runs enough tasks to make keeping a
    # loop worthwhile.
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    return _kept_loop().run(coroutine)


def kept_event_loop() -> asyncio.AbstractEventLoop:
    """Return the main thread's event loop, on which the application's coroutines and hooks run."""
    return _kept_loop().event_loop()


def _kept_loop() -> _KeptLoop:
    pid = os.getpid()
    if pid not in _kept_loops:
        _kept_loops.clear()
        _kept_loops[pid] = _KeptLoop()
    return _kept_loops[pid]


def stop_coroutine() -> None:
    """Cancel the running task's coroutine, if it has one; for use in a signal handler."""
    for loop in _kept_loops.values():
        loop.stop_coroutine()


class _KeptLoop:
    """An event loop that runs one coroutine at a time; it is closed if a coroutine does not end."""

    __slots__ = ("_is_stopped", "_main", "_runner")

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._main: asyncio.Task[Any] | None = None
        self._is_stopped = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the coroutine's value; raise its exception, or TaskStopped."""
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
                # The remaining asyncio tasks of this loop are cancelled, so that they clean up; no other loop
                # will continue them.
                _kept_loops.clear()
                self._runner.close()

    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self._runner.get_loop()

    async def _as_main(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._main = asyncio.current_task()
        return await coroutine

    def stop_coroutine(self) -> None:
        """Cancel the coroutine, unless the signal has interrupted that coroutine itself.

        If the handler raised an exception inside another asyncio task or a callback, the exception would
        not propagate.
        """
        main = self._main
        if main is None:
            return
        self._is_stopped = True
        if asyncio.current_task(main.get_loop()) is not main:
            main.cancel()


# The process keeps one loop between tasks, so that clients cached by async tasks stay usable.
_kept_loops: dict[int, _KeptLoop] = {}


def mismatch_error(
    definition: TaskDefinition, value: TaskResult[Any, Any], problem: CodecError
) -> TaskError:
    """Return the error for a result that does not fit its task function's annotation."""
    results = definition.results
    if definition.is_plain:
        fault = _plain_fault(value.ok, results.ok_text, problem)
    else:
        fault = f"returned a value that does not fit its annotation: {problem.message}"
    return TaskError(
        error_code=ContractCode.RETURN_TYPE_MISMATCH,
        message=f"Task {definition.name!r} {fault}",
        data={
            "variant": "ok" if value.is_ok() else "err",
            "expected_type": results.ok_text if value.is_ok() else results.err_text,
            "path": problem.path,
        },
    )


def _plain_fault(value: object, expected: str, problem: CodecError) -> str:
    """Describe a value of the wrong type returned by a plain function.

    The message does not mention `ok`, because a plain function returns no TaskResult.
    """
    if not problem.message.startswith("ok must be "):
        clause = problem.message.removeprefix("ok").replace(", the type of ok (", " (")
        return f"returned a value that does not fit its annotation: value{clause}"
    kind = "None" if value is None else f"a value of type {type(value).__name__}"
    if isinstance(value, TaskResult | TaskError):
        fix = "annotate TaskResult[T, TaskError], or return the value and raise TaskFailed"
        return f"returned {kind}, but is annotated {expected}; {fix}."
    reason = problem.message.removeprefix(f"ok must be {expected}")
    return f"returned {kind}, but is annotated {expected}{reason if reason[1:2] == '(' else '.'}"


def _failure_error(config: AppConfig, definition: TaskDefinition, failure: TaskFailed) -> TaskError:
    if failure.task_id is not None and isinstance(failure.code, Enum):
        # A built-in code describes a different task, whose `result()` raised the exception.
        return _exception_error(config, definition, failure)
    if failure.code in BUILTIN_CODE_REGISTRY:
        problem = ValueError(
            f"TaskFailed does not take the built-in code {failure.code}; "
            "raise your own code, such as CARD_REFUSED"
        ).with_traceback(failure.__traceback__)
        return _exception_error(config, definition, problem)
    # The cause is passed as a description, because an exception object would be logged and would decide about
    # a retry by its class.
    cause = None if failure.__cause__ is None else describe_exception(failure.__cause__)
    try:
        error = TaskError(
            error_code=failure.code, message=failure.message, data=failure.data, exception=cause
        )
    except ValidationError as refused:  # the code is reserved or not a text
        reason = refused.errors()[0]["msg"].removeprefix("Value error, ")
        mistake = ValueError(f"the TaskFailed cannot be stored: {reason}")
        mistake.__cause__ = failure
        return _exception_error(config, definition, mistake)
    if type(error.error_code) is str:
        _warn_about_code(definition.name, error.error_code)
    return error


def _exception_error(
    config: AppConfig, definition: TaskDefinition, error: BaseException
) -> TaskError:
    if isinstance(error, WorkflowContextMissingIdError):
        return TaskError(error_code=ContractCode.WORKFLOW_CTX_MISSING_ID, message=str(error))
    if isinstance(error, BatchResultMismatch):
        return TaskError(error_code=ContractCode.BATCH_RESULT_MISMATCH, message=str(error))
    is_retry = isinstance(error, RetryLater)
    code = resolve_exception_code(
        error,
        definition.exception_mapper,
        config.exception_mapper,
        OperationalErrorCode.RETRY_LATER if is_retry else definition.default_unhandled_error_code,
        config.default_unhandled_error_code,
    )
    kind = type(error).__name__
    return TaskError(
        error_code=code,
        message=f"Task {definition.name!r} raised {kind}: {exception_text(error)}",
        data={"exception_type": kind},
        exception=error,
    )
