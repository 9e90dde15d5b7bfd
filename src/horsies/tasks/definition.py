"""What a task is: the frozen result of decorating a function.

Built once by ``@app.task`` after all definition-time checks, read by the producer (send) and by the
child (invoke).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from types import FunctionType
from typing import Any, get_args, get_origin, get_type_hints

from horsies.codec.calls import CallSignature
from horsies.codec.results import ResultCodec
from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    RegistryError,
    SourceLocation,
    TaskDefinitionError,
)
from horsies.retry import RetryPolicy, validate_error_code_name, validate_exception_mapper
from horsies.task_result import TaskError, TaskResult

NAME_LENGTH_MAX = 255
TIMEOUT_MS_MIN = 100
RESERVED_PREFIX = "horsies."


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
    if not isinstance(name, str) or not is_storable_name(name):
        raise TaskDefinitionError(
            f"A task name is a text of 1 to {NAME_LENGTH_MAX} characters.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text='name the task: @app.task("send_invoice")',
        )
    if name.startswith(RESERVED_PREFIX):
        raise TaskDefinitionError(
            f"The task name {name!r} is reserved: names that begin with {RESERVED_PREFIX!r} belong "
            "to horsies itself.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text="choose another name",
        )
    return name


def is_storable_name(name: str) -> bool:
    """Tell whether a text can be a name: not blank, not too long, nothing UTF-8 cannot hold."""
    if not name.strip() or len(name) > NAME_LENGTH_MAX or "\0" in name:
        return False
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


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


@dataclass(frozen=True, slots=True)
class DecoratorOptions:
    """What was written into ``@app.task(...)`` beside the name, not yet checked."""

    queue_name: str | None
    retry_policy: RetryPolicy | None
    exception_mapper: Mapping[type[BaseException], str] | None
    default_unhandled_error_code: str | None
    timeout_ms: int | None
    unknown: Mapping[str, Any]


def define(
    config: AppConfig, function: Any, task_name: str, options: DecoratorOptions
) -> TaskDefinition:
    """Check a function and its options, and return the task they make."""
    location = SourceLocation.from_function(function) if callable(function) else None
    refuse_unknown_options(options.unknown, location)
    plain = read_function(function, location)
    name = read_name(task_name, location)
    queue = choose_queue(config, options.queue_name, location)
    return TaskDefinition(
        name=name,
        function=plain,
        is_async=inspect.iscoroutinefunction(plain),
        queue_name=queue.name,
        priority=queue.priority,
        retry_policy=read_retry_policy(options.retry_policy, location),
        exception_mapper=read_mapper(options.exception_mapper, location),
        default_unhandled_error_code=read_code(options.default_unhandled_error_code, location),
        timeout_ms=read_timeout(options.timeout_ms, location),
        signature=read_signature(plain, location),
        results=read_results(plain, location),
        location=location,
    )


def read_function(function: object, location: SourceLocation | None) -> FunctionType:
    """Accept a plain function, synchronous or ``async def``; refuse what is wrapped or generates."""
    if not isinstance(function, FunctionType) or _wraps_another(function):
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


def _wraps_another(function: FunctionType) -> bool:
    """Tell a decorator's wrapper, even one without functools.wraps: it passes anything on."""
    if hasattr(function, "__wrapped__"):
        return True
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds != [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return False
    return any(
        isinstance(value, FunctionType)
        for value in inspect.getclosurevars(function).nonlocals.values()
    )


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


def choose_queue(
    config: AppConfig, queue_name: str | None, location: SourceLocation | None
) -> CustomQueueConfig:
    """Return the queue a task with this ``queue_name`` goes to."""
    queues = {queue.name: queue for queue in config.queues()}
    if config.queue_mode is QueueMode.DEFAULT:
        if queue_name is None:
            return next(iter(queues.values()))
        raise _queue_error(
            f"Queue {queue_name!r} was named, but queue_mode is DEFAULT and has one nameless queue.",
            ErrorCode.CONFIG_INVALID_QUEUE_MODE,
            location,
            "leave queue_name out, or configure queue_mode=QueueMode.CUSTOM",
        )
    if queue_name is None:
        raise _queue_error(
            "A task needs a queue_name in CUSTOM queue mode.",
            ErrorCode.CONFIG_INVALID_QUEUE_MODE,
            location,
            f"choose one of: {', '.join(queues)}",
        )
    if queue_name not in queues:
        raise _queue_error(
            f"There is no queue {queue_name!r}.",
            ErrorCode.TASK_INVALID_QUEUE,
            location,
            f"choose one of: {', '.join(queues)}",
        )
    return queues[queue_name]


def refuse_unknown_options(unknown: Mapping[str, Any], location: SourceLocation | None) -> None:
    """Refuse keywords that ``@app.task`` does not have."""
    if not unknown:
        return
    raise TaskDefinitionError(
        f"@app.task does not know {', '.join(repr(name) for name in unknown)}.",
        code=ErrorCode.TASK_INVALID_OPTIONS,
        location=location,
        help_text="options are queue_name, retry_policy, exception_mapper, default_unhandled_error_code and "
        "timeout_ms; good_until belongs to with_options(...), auto_retry_for into the retry_policy",
    )


def name_used_twice(definition: TaskDefinition, first: SourceLocation | None) -> RegistryError:
    """Return the error for a second task of the same name."""
    return RegistryError(
        f"The task name {definition.name!r} is used twice.",
        code=ErrorCode.TASK_DUPLICATE_NAME,
        location=definition.location,
        notes=[f"first defined at {first or 'an unknown place'}"],
        help_text="give one of the two tasks another name",
    )


def refuse_bad_hook(hook: object) -> None:
    """Refuse a child process hook that cannot simply be called."""
    if not callable(hook) or _is_async(hook):
        raise ConfigurationError(
            "A child process hook must be a plain function without parameters.",
            code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
            help_text="hooks run before any event loop exists: use `def`, not `async def`",
        )


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - asked for its kind, not called
    )


def read_retry_policy(policy: object, location: SourceLocation | None) -> RetryPolicy | None:
    """Accept no retries, or a RetryPolicy."""
    if policy is None or isinstance(policy, RetryPolicy):
        return policy
    raise TaskDefinitionError(
        f"retry_policy must be a RetryPolicy, not {type(policy).__name__}.",
        code=ErrorCode.TASK_INVALID_OPTIONS,
        location=location,
        help_text='RetryPolicy.fixed([1, 5, 30], auto_retry_for=["GATEWAY_DOWN"])',
    )


def read_mapper(
    mapper: Mapping[type[BaseException], str] | None, location: SourceLocation | None
) -> Mapping[type[BaseException], str]:
    """Accept exception classes mapped to error codes."""
    if mapper is None:
        return {}
    problems = validate_exception_mapper(mapper)
    if problems:
        raise TaskDefinitionError(
            problems[0],
            code=ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER,
            location=location,
            notes=problems[1:],
        )
    return dict(mapper)


def read_code(code: str | None, location: SourceLocation | None) -> str | None:
    """Accept an error code for exceptions that no mapper knows."""
    problems = (
        [] if code is None else validate_error_code_name(code, where="default_unhandled_error_code")
    )
    if problems:
        raise TaskDefinitionError(
            problems[0],
            code=ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER,
            location=location,
            notes=problems[1:],
        )
    return code


def _queue_error(
    message: str, code: ErrorCode, location: SourceLocation | None, help_text: str
) -> ConfigurationError:
    return ConfigurationError(message, code=code, location=location, help_text=help_text)
