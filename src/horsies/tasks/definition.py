"""Task definitions: the immutable results of decorating functions. ``@app.task`` builds a definition after
all checks at definition time. Producers use it to send the task, children to call the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import Parameter
from types import FunctionType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from horsies.codec.calls import CallSignature, transaction_class
from horsies.codec.results import ResultCodec
from horsies.codec.shape import OLD_TYPED_DICT, bare
from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode, Rate
from horsies.error_codes import validate_error_code_name, validate_exception_mapper
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    RegistryError,
    SourceLocation,
    TaskDefinitionError,
)
from horsies.modules import shared_name
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult, storable_text
from horsies.tasks.batch import SIZES, Batch, BatchForm, BatchTraits
from horsies.tasks.keys import LANE_KEY_LENGTH_MAX, TaskKey, key_of_task

NAME_LENGTH_MAX = 255
# The column is a 32-bit integer.
TIMEOUTS_MS = range(100, 2**31)
LONGEST_RUN = timedelta(days=3650)
TIMEOUT_PROBLEM = "timeout_ms must be a whole number of milliseconds from 100 to 2,147,483,647"
MEMORY_LIMITS_MB = range(1, 2**24)
RESERVED_PREFIX = "horsies."
# The prefix of the names of tasks that deliver the events of webhooks; the rest is the webhook's name.
WEBHOOK_PREFIX = f"{RESERVED_PREFIX}webhook."
FINDINGS_TASK = f"{RESERVED_PREFIX}findings"

OnStop: TypeAlias = Literal["finish", "requeue", "fail"]
# The source of a key: the name of a parameter, or a function of a call's arguments.
KeySource: TypeAlias = str | Callable[..., str]


@dataclass(frozen=True, slots=True)
class DurableTraits:
    """The additional properties of a durable function: the types of its signals, if declared, and the
    time that a run may take from its first start to its end.
    """

    signals: Mapping[str, Any] | None = None
    deadline: timedelta | float | None = None

    @property
    def deadline_seconds(self) -> float | None:
        """The deadline in seconds."""
        given = self.deadline
        return given.total_seconds() if isinstance(given, timedelta) else given


@dataclass(frozen=True, slots=True)
class TaskDefinition:
    """All properties of a task that are known before a send."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    is_plain: bool
    queue_name: str
    priority: int
    retry_policy: RetryPolicy | None
    exception_mapper: Mapping[type[BaseException], str]
    default_unhandled_error_code: str | None
    timeout_ms: int | None
    signature: CallSignature
    results: ResultCodec
    location: SourceLocation | None
    on_stop: OnStop = "finish"
    burst: bool = False
    durable: DurableTraits | None = None
    key: TaskKey | None = None
    memory_limit_mb: int | None = None
    rate: Rate | None = None
    batch: BatchTraits | None = None

    @property
    def may_share_process(self) -> bool:
        """Whether async children may run the task.

        They do not run tasks with a memory limit, because killing the process would end its other tasks too,
        and they do not run batched tasks, because async children do not collect batches.
        """
        return self.is_async and self.memory_limit_mb is None and self.batch is None


@dataclass(frozen=True, slots=True)
class DecoratorOptions:
    """The arguments of ``@app.task(...)`` or ``@app.durable(...)``, apart from the name, before they are
    checked.
    """

    queue_name: str | None
    retry_policy: RetryPolicy | None
    exception_mapper: Mapping[type[BaseException], str] | None
    default_unhandled_error_code: str | None
    timeout_ms: int | None
    unknown: Mapping[str, Any]
    on_stop: OnStop = "finish"
    burst: bool = False
    durable: DurableTraits | None = None
    key: KeySource | None = None
    memory_limit_mb: int | None = None
    rate: Rate | None = None
    batch: Batch | None = None


def define(
    config: AppConfig, function: Any, task_name: str | None, options: DecoratorOptions
) -> TaskDefinition:
    """Check a function and its options, and return the task that they define."""
    location = SourceLocation.from_function(function) if callable(function) else None
    _raise_first(_function_problems(function, options.unknown), location)
    name = _default_name(function, location) if task_name is None else task_name
    _raise_first(_name_problems(name), location)
    return _defined(config, function, name, options, location)


def define_builtin(
    config: AppConfig, function: Callable[..., Any], name: str, options: DecoratorOptions
) -> TaskDefinition:
    """Return a task of the library itself, which has a reserved name."""
    return _defined(config, function, name, options, SourceLocation.from_function(function))


def _defined(
    config: AppConfig,
    function: Any,
    name: str,
    options: DecoratorOptions,
    location: SourceLocation | None,
) -> TaskDefinition:
    queue = choose_queue(config, options.queue_name, location)
    _raise_first(_option_problems(options), location)
    _raise_first(_rate_problems(options), location)
    batch = None
    if options.batch is not None:
        _raise_first(_batch_problems(options, queue), location)
        batch = _read_batch(function, options.batch, location)
        function = batch.for_one()
    _raise_first(_fixed_key_problems(name, options), location)
    if options.durable is not None:
        _raise_first(_durable_problems(function, options), location)
    signature = _read_signature(function, location, 0 if options.durable is None else 1)
    _raise_first(_transaction_problems(function, options, signature), location)
    is_plain, results = _read_results(function, location)
    return TaskDefinition(
        name=name,
        function=function,
        is_async=inspect.iscoroutinefunction(function),
        is_plain=is_plain,
        queue_name=queue.name,
        priority=queue.priority,
        retry_policy=options.retry_policy,
        exception_mapper=dict(options.exception_mapper or {}),
        default_unhandled_error_code=options.default_unhandled_error_code,
        timeout_ms=options.timeout_ms,
        signature=signature,
        results=results,
        location=location,
        on_stop=options.on_stop,
        burst=options.burst,
        durable=options.durable,
        key=_read_key(function, options.key, signature, location) or _fixed_key(name, options),
        rate=options.rate,
        batch=batch,
        memory_limit_mb=options.memory_limit_mb,
    )


def durable_policy(policy: RetryPolicy | None) -> RetryPolicy:
    """The default retry policy of a durable function, with which a crash or a stop of its process does not
    end a run.
    """
    return policy or RetryPolicy.exponential(
        1, max_retries=100, max_delay_seconds=60, auto_retry_for=[_LOST_RUN, "WORKER_STOPPED"]
    )


def versioned_name(function: Any, name: object, version: object) -> Any:
    """Return the stored name of a durable function, which includes its version."""
    if version is None or not isinstance(name, str):
        return name
    if type(version) is not int or version < 1:
        raise TaskDefinitionError(
            "version must be a whole number from 1.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=SourceLocation.from_function(function) if callable(function) else None,
        )
    return f"{name}@{version}"


def is_decorated(given: object) -> bool:
    """Return whether this value is an object that was decorated without parentheses, rather than the
    decorator's first argument.

    A classmethod or property cannot be called, but it can be bound to an object.
    """
    return callable(given) or hasattr(given, "__get__")


class _Problem(NamedTuple):
    message: str
    help_text: str | None = None
    code: ErrorCode = ErrorCode.TASK_INVALID_OPTIONS
    notes: Sequence[str] = ()


def _raise_first(problems: Iterator[_Problem], location: SourceLocation | None) -> None:
    for message, help_text, code, notes in problems:
        raise TaskDefinitionError(
            message, code=code, location=location, notes=notes, help_text=help_text
        )


def _function_problems(function: Any, unknown: Mapping[str, Any]) -> Iterator[_Problem]:
    if "name" in unknown:
        yield _Problem(
            "@app.task takes the name of the task as its first argument, not as name=.",
            'write @app.task("send_invoice")',
        )
    if unknown:
        yield _Problem(
            f"@app.task has no option {', '.join(map(_with_hint, unknown))}.",
            "options are queue_name, retry_policy, exception_mapper, default_unhandled_error_code, "
            "timeout_ms, memory_limit_mb, on_stop, burst, key, rate and batch; good_until belongs to "
            "with_options(...), auto_retry_for to the retry_policy",
        )
    if isinstance(function, type):
        yield _Problem(
            f"A class cannot be a task: {function.__qualname__!r}.",
            "decorate a function of the module, and make the object inside it",
            ErrorCode.TASK_PREDECORATED_NOT_SUPPORTED,
        )
    if getattr(function, "__name__", None) == "<lambda>":
        yield _Problem(
            "A lambda cannot be a task: it has neither a name nor annotations.",
            "write a function with def",
        )
    if not isinstance(function, FunctionType) or _wraps_another(function):
        yield _Problem(
            "@app.task must be the innermost decorator: it takes the plain function, not a wrapped one.",
            "move @app.task directly above `def`, or call the other wrapper inside the function",
            ErrorCode.TASK_PREDECORATED_NOT_SUPPORTED,
        )
    if is_method(function):
        yield _Problem(
            f"A method cannot be a task: {function.__qualname__!r} takes an object.",
            "make it a function of the module that takes the values it needs",
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        yield _Problem(
            f"Task function {function.__name__!r} is a generator; a task returns one value.",
            "collect the values and return a list",
            ErrorCode.TASK_INVALID_RETURN_TYPE,
        )


# The names that other task queues use for the options of `@app.task`.
_OTHER_WORDS = {
    **dict.fromkeys(("timeout", "time_limit", "soft_time_limit", "job_timeout"), "timeout_ms"),
    **dict.fromkeys(("retries", "retry", "max_retries", "max_tries"), "retry_policy"),
    **dict.fromkeys(("queue", "queues"), "queue_name"),
    **dict.fromkeys(("memory", "memory_limit", "memory_mb", "max_memory"), "memory_limit_mb"),
    **dict.fromkeys(("rate_limit", "throttle"), "rate"),
}


def _with_hint(option: str) -> str:
    word = _OTHER_WORDS.get(option)
    return f"{option!r} (write {word}=)" if word else repr(option)


def _default_name(function: FunctionType, location: SourceLocation | None) -> str:
    """Return `module.function`, using the name under which workers import the module."""
    try:
        return f"{shared_name(function.__module__)}.{function.__name__}"
    except ValueError as problem:
        raise TaskDefinitionError(
            f"Task function {function.__name__!r} needs a name, because {problem}.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            notes=[
                "without a name it is module.function, which must be the same for producers and workers"
            ],
            help_text=f'write @app.task("{function.__name__}")',
        ) from problem


def _name_problems(name: object) -> Iterator[_Problem]:
    if not isinstance(name, str) or not is_storable_name(name):
        yield _Problem(
            f"A task name is a text of 1 to {NAME_LENGTH_MAX} characters.",
            'name the task: @app.task("send_invoice")',
        )
    elif name.startswith(RESERVED_PREFIX):
        yield _Problem(
            f"The task name {name!r} is reserved: names that begin with {RESERVED_PREFIX!r} belong "
            "to horsies itself.",
            "choose another name",
        )


def is_timeout(timeout_ms: object) -> bool:
    return type(timeout_ms) is int and timeout_ms in TIMEOUTS_MS


def is_storable_name(name: str) -> bool:
    """Check that the name is not blank or too long, and that PostgreSQL can store it."""
    return 0 < len(name) <= NAME_LENGTH_MAX and not name.isspace() and storable_text(name) == name


def _wraps_another(function: FunctionType) -> bool:
    """Return whether a function is a decorator's wrapper that passes on all its arguments, even without
    functools.wraps.
    """
    if hasattr(function, "__wrapped__"):
        return True
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds != [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return False
    return any(
        isinstance(value, FunctionType)
        for value in inspect.getclosurevars(function).nonlocals.values()
    )


def is_method(function: FunctionType) -> bool:
    """Return whether a function was defined in a class body and takes the object or the class as its
    first parameter.
    """
    *_, owner, _name = ("<locals>", *function.__qualname__.split("."))
    first = next(iter(inspect.signature(function).parameters), None)
    return owner != "<locals>" and first in ("self", "cls")


def _option_problems(options: DecoratorOptions) -> Iterator[_Problem]:
    policy, mapper = options.retry_policy, options.exception_mapper
    code, timeout_ms = options.default_unhandled_error_code, options.timeout_ms
    if not isinstance(policy, RetryPolicy | None):
        yield _Problem(
            f"retry_policy must be a RetryPolicy, not {type(policy).__name__}.",
            'RetryPolicy.fixed([1, 5, 30], auto_retry_for=["GATEWAY_DOWN"])',
        )
    bad_mapper = ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER
    if mapper is not None and (problems := validate_exception_mapper(mapper)):
        yield _Problem(problems[0], code=bad_mapper, notes=problems[1:])
    where = "default_unhandled_error_code"
    if code is not None and (problems := validate_error_code_name(code, where=where)):
        yield _Problem(problems[0], code=bad_mapper, notes=problems[1:])
    if timeout_ms is not None and not is_timeout(timeout_ms):
        yield _Problem(f"{TIMEOUT_PROBLEM}.")
    if (limit_mb := options.memory_limit_mb) is not None and (
        type(limit_mb) is not int or limit_mb not in MEMORY_LIMITS_MB
    ):
        yield _Problem("memory_limit_mb must be a whole number of megabytes from 1 to 16,777,215.")
    if options.on_stop not in get_args(OnStop):
        yield _Problem(f"on_stop must be one of {', '.join(map(repr, get_args(OnStop)))}.")
    if type(options.burst) is not bool:
        yield _Problem("burst must be True or False.")


_LOST_RUN = "WORKER_CRASHED"


def _durable_problems(function: FunctionType, options: DecoratorOptions) -> Iterator[_Problem]:
    name, policy = function.__name__, options.retry_policy
    is_async = inspect.iscoroutinefunction(function)
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        hints = get_type_hints(function)
    except Exception:  # the signature reports the problem
        hints = {}
    context = hints.get(parameters[0].name) if parameters and parameters[0].kind in kinds else None
    right = (
        f"async def {name}(ctx: AsyncDurable, ...)"
        if is_async
        else f"def {name}(ctx: Durable, ...)"
    )
    if hints and getattr(context, "is_durable_context", False) is not True:
        yield _Problem(
            f"The first parameter of durable function {name!r} must be its context.", right
        )
    elif hints and getattr(context, "is_asynchronous", None) is not is_async:
        yield _Problem(f"The context of durable function {name!r} is of the wrong kind.", right)
    if policy is not None and _LOST_RUN not in policy.auto_retry_for:
        yield _Problem(
            f"The retry_policy of durable function {name!r} does not list {_LOST_RUN}, so a crash would end "
            "its runs.",
            f'add "{_LOST_RUN}" to auto_retry_for, or leave retry_policy out',
        )
    if not _is_deadline(options.durable):
        yield _Problem(
            f"The deadline of durable function {name!r} must be a timedelta or a number of seconds, above 0 "
            f"and up to {LONGEST_RUN.days:,} days.",
            "write deadline=timedelta(days=30), for example",
        )


def _is_deadline(traits: DurableTraits | None) -> bool:
    """Return whether a durable function has no deadline, or a deadline that can be stored."""
    seconds: object = None if traits is None else traits.deadline_seconds
    if seconds is None:
        return True
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return is_number and 0 < float(str(seconds)) <= LONGEST_RUN.total_seconds()


def _transaction_problems(
    function: FunctionType, options: DecoratorOptions, signature: CallSignature
) -> Iterator[_Problem]:
    if signature.transaction is None:
        return
    where = f"Task function {function.__name__!r} takes a transaction ({signature.transaction})"
    if options.durable is not None:
        yield _Problem(
            f"{where}, but its runs last longer than a transaction.",
            "write in ctx.tx_step(...), whose function takes a transaction",
        )
    if options.burst:
        yield _Problem(
            f"{where}, so it cannot be a burst=True task: a child that holds several tasks would have to "
            "keep their transactions apart.",
            "leave burst=True or the transaction out",
        )
    is_async = inspect.iscoroutinefunction(function)
    kind = transaction_class(signature.annotations[signature.transaction])
    if kind.is_asynchronous is not is_async:
        definer, right = (
            ("async def", "AsyncTaskTransaction") if is_async else ("def", "TaskTransaction")
        )
        yield _Problem(
            f"{where} of the wrong kind: {kind.__name__} in a function with `{definer}`.",
            f"annotate it {right}",
        )


def _rate_problems(options: DecoratorOptions) -> Iterator[_Problem]:
    if options.rate is None:
        return
    if not isinstance(options.rate, Rate):
        kind = type(options.rate).__name__
        yield _Problem(
            f"rate must be a Rate, not {kind}.", "write rate=Rate(count=100, per_seconds=60)"
        )
    if options.key is not None:
        yield _Problem(
            "rate= and key= exclude each other: a task has one key, and its rate needs it.",
            "leave out rate=, and give the queue per_key=PerKey(rate=...)",
        )


def _batch_problems(options: DecoratorOptions, queue: CustomQueueConfig) -> Iterator[_Problem]:
    batch = options.batch
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        yield _Problem(f"batch must be a Batch, not {kind}.", "write batch=Batch(size=100)")
    elif type(batch.size) is not int or batch.size not in SIZES:
        yield _Problem(f"size of batch must be a whole number from 1 to {SIZES[-1]:,}.")
    if options.burst:
        yield _Problem(
            "batch= and burst=True exclude each other: a call takes all the tasks that its child holds.",
            "leave burst=True out",
        )
    if queue.per_key is not None and queue.per_key.order == "fifo":
        yield _Problem(
            f"Queue {queue.name!r} starts the tasks of a key one after another (order='fifo'), so no batch "
            "in it would ever have two.",
            "send the task to another queue, or leave batch= out",
        )


def _read_batch(
    function: FunctionType, batch: Batch, location: SourceLocation | None
) -> BatchTraits:
    try:
        return BatchTraits(function, batch.size, BatchForm.of(function))
    except ValueError as problem:
        name = function.__name__
        raise TaskDefinitionError(
            f"Function {name!r} cannot take a batch: {problem}.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text=f"def {name}(items: list[int]) -> list[TaskResult[str, TaskError]]:",
        ) from problem


def _fixed_key_problems(name: str, options: DecoratorOptions) -> Iterator[_Problem]:
    if _fixed_key(name, options) is not None and len(key_of_task(name)) > LANE_KEY_LENGTH_MAX:
        longest = LANE_KEY_LENGTH_MAX - len(key_of_task(""))
        kind = "rate" if options.rate is not None else "batch and without a key"
        yield _Problem(
            f"The name of a task with a {kind} has at most {longest} characters, not {len(name)}.",
            "give it a shorter name",
        )


def _fixed_key(name: str, options: DecoratorOptions) -> TaskKey | None:
    """Return the key that all calls of a task share, because a rate applies to one key and a batch contains
    tasks of one key only.
    """
    if options.key is not None or (options.rate is None and options.batch is None):
        return None
    return TaskKey(fixed=key_of_task(name))


def _read_key(
    function: FunctionType,
    key: object,
    signature: CallSignature,
    location: SourceLocation | None,
) -> TaskKey | None:
    if key is None:
        return None
    if isinstance(key, str):
        found = TaskKey.of_parameter(key, function, signature)
    else:
        found = TaskKey(function=key) if callable(key) else None
    if found is None:
        what = f"{key!r} names none" if isinstance(key, str) else f"it is {type(key).__name__}"
        raise TaskDefinitionError(
            f"The key of task function {function.__name__!r} must be one of its parameters or a function "
            f"of its arguments; {what}.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text=f"the parameters are {signature.names.shown}",
        )
    return found


def _read_signature(
    function: FunctionType, location: SourceLocation | None, first: int
) -> CallSignature:
    try:
        return CallSignature.of(function, first=first)
    except ValueError as error:
        raise TaskDefinitionError(
            f"The parameters of task function {function.__name__!r} cannot be sent: {error}",
            code=ErrorCode.TASK_INVALID_OPTIONS,
            location=location,
            help_text=_types_help(
                error,
                "annotate parameters with types that pydantic can write to JSON and read back",
            ),
        ) from error


def _read_results(
    function: FunctionType, location: SourceLocation | None
) -> tuple[bool, ResultCodec]:
    """Read ``-> T`` (a plain function) or ``-> TaskResult[T, TaskError]``, and return the codec that
    validates, encodes and decodes the result.
    """
    help_text = f"def {function.__name__}(...) -> int: or -> TaskResult[int, TaskError]:"

    def unusable(problem: str, help_text: str = help_text) -> TaskDefinitionError:
        return TaskDefinitionError(
            f"The return annotation of task function {function.__name__!r} cannot be used: {problem}.",
            code=ErrorCode.TASK_INVALID_RETURN_TYPE,
            location=location,
            help_text=help_text,
        )

    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise unusable(f"an annotation cannot be resolved ({error})") from error
    if "return" not in hints:
        raise TaskDefinitionError(
            f"Task function {function.__name__!r} has no return annotation.",
            code=ErrorCode.TASK_NO_RETURN_TYPE,
            location=location,
            help_text=help_text,
        )
    declared = bare(hints["return"])
    is_plain = not _mentions_result(declared)
    if is_plain:
        ok_type, err_type = hints["return"], TaskError
    elif get_origin(declared) is TaskResult and len(get_args(declared)) == 2:
        ok_type, err_type = get_args(declared)
    else:
        raise unusable(
            "it must be TaskResult[T, TaskError] with exactly two types, or a plain type"
        )
    if not (isinstance(err_type, type) and issubclass(err_type, TaskError)):
        raise unusable("the second type must be TaskError or a subclass of it")
    try:
        return is_plain, ResultCodec.of(ok_type, err_type)
    except ValueError as error:
        problem = str(error).replace(
            "In the result type, 'ok' is annotated with", "the value is of type"
        )
        raise unusable(problem, _types_help(error, help_text)) from error


def _types_help(error: ValueError, usual: str) -> str:
    """Return the remedy for a type that cannot be stored."""
    is_old = OLD_TYPED_DICT in str(error)
    return "write `from typing_extensions import TypedDict`" if is_old else usual


def _mentions_result(declared: Any) -> bool:
    """Return whether TaskResult occurs, even with wrong parameters or as a member of a union."""
    choices = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    return any((get_origin(bare(one)) or bare(one)) is TaskResult for one in choices)


def choose_queue(
    config: AppConfig, queue_name: str | None, location: SourceLocation | None
) -> CustomQueueConfig:
    """Return the queue for a task with this ``queue_name``."""
    queues = {queue.name: queue for queue in config.queues()}
    code, help_text = ErrorCode.CONFIG_INVALID_QUEUE_MODE, f"choose one of: {', '.join(queues)}"
    if config.queue_mode is QueueMode.DEFAULT:
        if queue_name is None:
            return next(iter(queues.values()))
        problem = (
            f"Queue {queue_name!r} needs queue_mode CUSTOM; in DEFAULT there is one queue for all."
        )
        help_text = "leave queue_name out, or configure queue_mode=QueueMode.CUSTOM"
    elif queue_name is None:
        problem = "A task needs a queue_name in CUSTOM queue mode."
    elif queue_name not in queues:
        problem, code = f"There is no queue {queue_name!r}.", ErrorCode.TASK_INVALID_QUEUE
    else:
        return queues[queue_name]
    raise ConfigurationError(problem, code=code, location=location, help_text=help_text)


def name_used_twice(definition: TaskDefinition, first: SourceLocation | None) -> RegistryError:
    """Return the error for a second task with the same name."""
    return RegistryError(
        f"The task name {definition.name!r} is used twice.",
        code=ErrorCode.TASK_DUPLICATE_NAME,
        location=definition.location,
        notes=[f"first defined at {first or 'an unknown place'}"],
        help_text="give one of the two tasks another name",
    )
