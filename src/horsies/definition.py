"""What a task is: the frozen result of decorating a function.

Built once by ``@app.task`` after all definition-time checks, read by the producer (send) and by the
child (invoke).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, get_args, get_origin, get_type_hints

from horsies.codec import CallSignature, ResultCodec
from horsies.errors import ErrorCode, SourceLocation, TaskDefinitionError
from horsies.outcome import TaskError, TaskResult
from horsies.retry import RetryPolicy

NAME_LENGTH_MAX = 255
TIMEOUT_MS_MIN = 100


@dataclass(frozen=True, slots=True)
class TaskDefinition:
    """Everything known about a task before it is ever sent."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    queue_name: str
    priority: int
    retry_policy: RetryPolicy | None
    exception_mapper: Mapping[type[BaseException], str]
    default_unhandled_error_code: str | None
    timeout_ms: int | None
    signature: CallSignature
    results: ResultCodec
    location: SourceLocation | None


def read_name(name: object, location: SourceLocation | None) -> str:
    """Accept a task name of 1 to 255 characters."""
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_LENGTH_MAX or "\0" in name:
        raise TaskDefinitionError(
            f"A task name is a text of 1 to {NAME_LENGTH_MAX} characters.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text='name the task: @app.task("send_invoice")',
        )
    return name


def read_timeout(timeout_ms: object, location: SourceLocation | None) -> int | None:
    """Accept no time limit, or one of at least 100 ms."""
    if timeout_ms is None:
        return None
    if (
        isinstance(timeout_ms, bool)
        or not isinstance(timeout_ms, int)
        or timeout_ms < TIMEOUT_MS_MIN
    ):
        raise TaskDefinitionError(
            f"timeout_ms must be a whole number of at least {TIMEOUT_MS_MIN} milliseconds.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
        )
    return timeout_ms


def read_function(function: object, location: SourceLocation | None) -> FunctionType:
    """Accept a plain function, synchronous or ``async def``; refuse what is wrapped or generates."""
    if hasattr(function, "__wrapped__") or not isinstance(function, FunctionType):
        raise TaskDefinitionError(
            "@app.task must be the innermost decorator: it takes the plain function, not a wrapped one.",
            code=ErrorCode.TASK_PREDECORATED_NOT_SUPPORTED,
            location=location,
            help_text="move @app.task directly above `def`, or call the other wrapper inside the function",
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TaskDefinitionError(
            f"Task function {function.__name__!r} is a generator; a task returns one TaskResult.",
            code=ErrorCode.TASK_INVALID_RETURN_TYPE,
            location=location,
            help_text="collect the values and return TaskResult(ok=[...])",
        )
    return function


def read_results(function: FunctionType, location: SourceLocation | None) -> ResultCodec:
    """Read ``-> TaskResult[T, TaskError]`` and prepare to validate, encode and decode it."""
    annotation = _return_annotation(function, location)
    arguments = get_args(annotation)
    if get_origin(annotation) is not TaskResult or len(arguments) != 2:
        raise _bad_return(
            function, "it must be TaskResult[T, TaskError] with exactly two types", location
        )
    ok_type, err_type = arguments
    if not (isinstance(err_type, type) and issubclass(err_type, TaskError)):
        raise _bad_return(
            function, "the second type must be TaskError or a subclass of it", location
        )
    try:
        return ResultCodec.of(ok_type, err_type)
    except ValueError as error:
        raise _bad_return(function, str(error), location) from error


def read_signature(function: FunctionType, location: SourceLocation | None) -> CallSignature:
    """Read the parameters' annotations and prepare to encode and decode calls."""
    try:
        return CallSignature.of(function)
    except ValueError as error:
        raise TaskDefinitionError(
            f"The parameters of task function {function.__name__!r} cannot be sent: {error}",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text="annotate parameters with types that pydantic can write to JSON and read back",
        ) from error


def _return_annotation(function: FunctionType, location: SourceLocation | None) -> Any:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise _bad_return(
            function, f"an annotation cannot be resolved ({error})", location
        ) from error
    if "return" not in hints:
        raise TaskDefinitionError(
            f"Task function {function.__name__!r} has no return annotation.",
            code=ErrorCode.TASK_NO_RETURN_TYPE,
            location=location,
            help_text=f"def {function.__name__}(...) -> TaskResult[int, TaskError]:",
        )
    return hints["return"]


def _bad_return(
    function: FunctionType, problem: str, location: SourceLocation | None
) -> TaskDefinitionError:
    return TaskDefinitionError(
        f"The return annotation of task function {function.__name__!r} cannot be used: {problem}.",
        code=ErrorCode.TASK_INVALID_RETURN_TYPE,
        location=location,
        help_text=f"def {function.__name__}(...) -> TaskResult[int, TaskError]:",
    )
