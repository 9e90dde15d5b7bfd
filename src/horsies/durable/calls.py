"""The calls in a durable function: step functions with their arguments, and children."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from horsies.codec.results import ResultCodec
from horsies.db.statement import Script
from horsies.db.statements.durable import RecordedStep, RecordStep
from horsies.durable.steps import Failure, StepFunction, base_name, step_function
from horsies.durable.time_limit import within, within_async
from horsies.errors import DurableMisuse, StepFailed
from horsies.result import Err
from horsies.retry import RetryPolicy
from horsies.tasks.definition import TIMEOUT_PROBLEM, is_timeout
from horsies.tasks.handle import TaskHandle
from horsies.tasks.request import TaskSendResult

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of a single step, created by ``ctx.with_options(...)``."""

    name: str | None = None
    retry: RetryPolicy | None = None
    detached: bool = False
    timeout_ms: int | None = None

    def __post_init__(self) -> None:
        if self.timeout_ms is not None and not is_timeout(self.timeout_ms):
            raise DurableMisuse(f"In ctx.with_options, {TIMEOUT_PROBLEM}.")


NO_STEP_OPTIONS = StepOptions()


class Call(NamedTuple):
    """A step's function with its arguments, its name without the occurrence number, and its options."""

    function: Callable[..., Any]
    described: StepFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    base: str
    options: StepOptions = NO_STEP_OPTIONS

    @classmethod
    def of(
        cls, options: StepOptions, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        called, described = step_function(function)
        return cls(called, described, args, kwargs, base_name(options.name, described), options)

    def invoke(self, *given: Any) -> Any:
        """Call the function within its time limit; ``given`` are passed before its own arguments."""
        if (timeout_ms := self.options.timeout_ms) is None:
            return self.function(*given, *self.args, **self.kwargs)
        return within(timeout_ms, partial(self.function, *given, *self.args, **self.kwargs))

    async def invoke_async(self, *given: Any) -> Any:
        """Await the function within its time limit; a plain function is called directly and blocks the
        event loop.
        """
        timeout_ms = self.options.timeout_ms
        if timeout_ms is None or not self.described.is_async:
            value = self.invoke(*given)
        else:
            value = self.function(*given, *self.args, **self.kwargs)
        if not inspect.isawaitable(value):
            return value
        return await (value if timeout_ms is None else within_async(timeout_ms, value))

    def read(self, step: RecordedStep) -> Any:
        """Return the value of the recorded step, or raise StepFailed for its failure."""
        if step.error is not None:
            raise Failure.from_json(step.error).raised(step.name)
        return self.described.decode(step.name, step.result or "null")


class Called(NamedTuple):
    """The outcome of a step's function: its value or exception, and its duration. ``recorded`` is the
    step that committed with its effects, or False if another attempt recorded the step first.
    """

    value: Any = None
    error: Exception | None = None
    run_us: int = 0
    recorded: RecordStep | bool | None = None


class Unstorable(Exception):
    """The value of a tx_step cannot be recorded; its transaction is rolled back."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class StepCall(Generic[T]):
    """A step for ``ctx.gather``, created by ``ctx.call``."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __repr__(self) -> str:
        return f"StepCall({self.call.base!r})"


class Startable(Protocol[P, T]):
    """A task or durable function, with or without send options."""

    def send(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskSendResult[TaskHandle[T]]: ...


class Launch(NamedTuple):
    """A child to start: ``script`` stores it and returns its id, ``end`` runs after the commit."""

    script: Callable[[], Script[str]]
    end: Callable[[], None]


# The JSON text of a finished child's value, or its failure.
Outcome: TypeAlias = tuple[str | None, Failure | None]


class NewChild(NamedTuple, Generic[T_co]):
    """The functions that start a child and read its result; ``outcome`` is set for workflows only."""

    name: str
    results: ResultCodec
    launch: Callable[[], Launch]
    outcome: Callable[[str], Script[Outcome | None]] | None = None


class StartableFlow(Protocol[T_co]):
    """A workflow with an output."""

    def as_child(self, run_id: str) -> NewChild[T_co]: ...


class Child(Generic[T]):
    """A task or workflow that a run has started; ``ctx.result(child)`` waits until it has ended."""

    def __init__(self, task_id: str, step: str, kind: NewChild[T]) -> None:
        self.task_id = task_id
        self.step = step
        self.kind = kind

    def __repr__(self) -> str:
        return f"Child({self.step!r}, task_id={self.task_id!r})"

    def read(self, step: RecordedStep) -> T:
        """Return the value of the recorded result, or raise StepFailed if the child failed."""
        if step.error is not None:
            raise Failure.from_json(step.error).raised(step.name)
        decoded = self.kind.results.decode(f'{{"ok":{step.result}}}')
        if isinstance(decoded, Err):
            message = f"Its recorded value cannot be read: {decoded.value.message}"
            raise StepFailed(step.name, "RESULT_DESERIALIZATION_ERROR", message)
        value: T = decoded.value.ok_value
        return value
