"""``ctx`` of an ``async def`` durable function: the methods of ``Durable`` as coroutines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, overload
from uuid import UUID, uuid4

from pydantic_core import from_json, to_json

from horsies.durable.calls import (
    NO_STEP_OPTIONS,
    Call,
    Child,
    Startable,
    StartableFlow,
    StepCall,
    StepOptions,
)
from horsies.durable.engine import child_of
from horsies.durable.leaving import Parked
from horsies.durable.run import (
    PARALLEL_MAX,
    Answer,
    AsyncStepEngine,
    Effects,
    current_step,
    seconds_of,
    value_of,
)
from horsies.durable.steps import form_of
from horsies.errors import DurableMisuse
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.transaction import AsyncTaskTransaction

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

_OTHER_TASK = (
    "ctx is used in another asyncio task than its function; use ctx.gather for steps side by side."
)


class AsyncDurable:
    """The context of an ``async def`` durable function; see ``Durable``.

    The function of a step may be a coroutine function or a plain function; a plain function blocks the
    event loop.

    Example:
        @app.durable("onboard")
        async def onboard(ctx: AsyncDurable, user_id: int) -> str:
            account = await ctx.step(create_account, user_id)
            await ctx.sleep(timedelta(days=3))
            return await ctx.step(send_tips, account)
    """

    is_durable_context = True
    is_asynchronous = True
    no_argument = "a worker passes the context of a durable function; leave it out"

    def __init__(self, engine: AsyncStepEngine) -> None:
        self._engine = engine
        self._run = engine.run
        self._task = asyncio.current_task()

    def __repr__(self) -> str:
        return f"AsyncDurable(task_id={self.task_id!r}, attempt={self._run.fence.attempt})"

    @property
    def task_id(self) -> str:
        """The id of the run, which is the id of its task."""
        return self._run.fence.task_id

    @overload
    async def step(
        self,
        function: Callable[P, Awaitable[TaskResult[T, TaskError]]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    async def step(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function and record its value, or return the recorded value."""
        return await self._step(NO_STEP_OPTIONS, "step", function, args, kwargs)

    async def tx_step(
        self,
        function: Callable[Concatenate[AsyncTaskTransaction, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a step whose rows and record commit together; see ``Durable.tx_step``."""
        value: T = await self._step(NO_STEP_OPTIONS, "tx", function, args, kwargs)
        return value

    def with_options(
        self,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        detached: bool = False,
        timeout_ms: int | None = None,
    ) -> AsyncDurableSteps:
        """Set options of a step or a child; see ``Durable.with_options``."""
        return AsyncDurableSteps(self, StepOptions(name, retry, detached, timeout_ms))

    @overload
    def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    @overload
    def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> StepCall[Any]:
        """Bind the arguments of a step for ``gather``."""
        return StepCall(Call.of(NO_STEP_OPTIONS, function, args, kwargs))

    @overload
    async def gather(self, first: StepCall[A], second: StepCall[B], /) -> tuple[A, B]: ...
    @overload
    async def gather(
        self, first: StepCall[A], second: StepCall[B], third: StepCall[C], /
    ) -> tuple[A, B, C]: ...
    @overload
    async def gather(self, /, *calls: StepCall[T]) -> tuple[T, ...]: ...
    async def gather(self, /, *calls: StepCall[Any]) -> tuple[Any, ...]:
        """Run steps concurrently on the event loop and return their values in order."""
        self._check()
        if len(calls) > PARALLEL_MAX:
            raise DurableMisuse(f"gather takes at most {PARALLEL_MAX} steps; gather them in parts.")
        return await self._engine.gather([one.call for one in calls])

    @property
    def step_key(self) -> str:
        """The idempotency key of the running step; see ``Durable.step_key``."""
        step = current_step.get()
        if step is None:
            raise DurableMisuse("ctx.step_key is the key of a running step; read it inside one.")
        return f"{self.task_id}/{step}"

    async def now(self) -> datetime:
        """Return the current time in UTC, as recorded in the run."""
        made = to_json(datetime.now(UTC).isoformat()).decode()
        return datetime.fromisoformat(from_json(await self._perform(self._run.value("now", made))))

    async def random(self) -> float:
        """Return a random number from 0 to 1, as recorded in the run."""
        made = to_json(random.random()).decode()
        return float(from_json(await self._perform(self._run.value("random", made))))

    async def uuid(self) -> UUID:
        """A random UUID, recorded."""
        made = to_json(str(uuid4())).decode()
        return UUID(from_json(await self._perform(self._run.value("uuid", made))))

    async def patched(self, change: str) -> bool:
        """Guard a code change; see ``Durable.patched``."""
        return await self._perform(self._run.patched(change))

    async def sleep(self, duration: timedelta | float) -> None:
        """Wait for a time; a wait of more than a second parks the run."""
        await self._perform(self._run.sleep(seconds_of(duration, "ctx.sleep")))

    @overload
    async def wait_signal(
        self,
        name: str,
        kind: type[T],
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> T: ...
    @overload
    async def wait_signal(
        self,
        name: str,
        kind: None = None,
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> Any: ...
    async def wait_signal(
        self,
        name: str,
        kind: Any = None,
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Wait for a value that ``app.signal`` sends; see ``Durable.wait_signal``."""
        seconds = None if timeout is None else seconds_of(timeout, "timeout")
        form = form_of(Any if kind is None else kind, f"the type of signal {name!r}")
        return value_of(await self._perform(self._run.wait_signal(name, seconds)), form)

    @overload
    async def start(
        self, task: Startable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Child[T]: ...
    @overload
    async def start(self, task: StartableFlow[T], /) -> Child[T]: ...
    async def start(self, task: Any, /, *args: Any, **kwargs: Any) -> Child[Any]:
        """Send a task, or start a durable function or a workflow, exactly once; see ``Durable.start``."""
        return await self._start(NO_STEP_OPTIONS, task, args, kwargs)

    async def on_cancel(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Register a clean-up step; see ``Durable.on_cancel``."""
        await self._perform(self._run.on_cancel(Call.of(NO_STEP_OPTIONS, function, args, kwargs)))

    async def result(self, child: Child[T]) -> T:
        """Wait until a child has ended and return its value."""
        return child.read(await self._perform(self._run.child_result(child)))

    @overload
    async def wait_any(
        self,
        *events: Child[T],
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> Child[T]: ...
    @overload
    async def wait_any(
        self,
        *events: Child[T] | str,
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> Child[T] | str: ...
    async def wait_any(
        self,
        *events: Child[Any] | str,
        timeout: timedelta | float | None = None,  # noqa: ASYNC109
    ) -> Child[Any] | str:
        """Wait for one of several children or signals; see ``Durable.wait_any``."""
        seconds = None if timeout is None else seconds_of(timeout, "timeout")
        return await self._perform(self._run.wait_any(events, seconds))

    async def continue_as(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Continue the run with new arguments and an empty record; see ``Durable.continue_as``."""
        await self._perform(self._run.continued(args, kwargs))

    @property
    def is_parking(self) -> bool:
        """Whether the function is unwinding because the run is being parked."""
        return isinstance(self._run.left, Parked)

    def _check(self) -> None:
        self._run.check_use()
        if asyncio.current_task() is not self._task:
            raise DurableMisuse(_OTHER_TASK)

    async def _perform(self, script: Effects[Answer]) -> Answer:
        self._check()
        return await self._engine.perform(script)

    async def _step(
        self,
        options: StepOptions,
        kind: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return await self._perform(self._run.step(Call.of(options, function, args, kwargs), kind))

    async def _start(
        self, options: StepOptions, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Child[Any]:
        child = child_of(task, self.task_id, args, kwargs)
        return await self._perform(self._run.start(child, options))


class AsyncDurableSteps:
    """Steps with options, created by ``ctx.with_options(...)``."""

    def __init__(self, context: AsyncDurable, options: StepOptions) -> None:
        self._context = context
        self._options = options

    @overload
    async def step(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``AsyncDurable.step`` with these options."""
        return await self._context._step(self._options, "step", function, args, kwargs)

    async def tx_step(
        self,
        function: Callable[Concatenate[AsyncTaskTransaction, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``AsyncDurable.tx_step`` with these options."""
        value: T = await self._context._step(self._options, "tx", function, args, kwargs)
        return value

    @overload
    def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    @overload
    def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> StepCall[Any]:
        """Call ``AsyncDurable.call`` with these options."""
        return StepCall(Call.of(self._options, function, args, kwargs))

    @overload
    async def start(
        self, task: Startable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Child[T]: ...
    @overload
    async def start(self, task: StartableFlow[T], /) -> Child[T]: ...
    async def start(self, task: Any, /, *args: Any, **kwargs: Any) -> Child[Any]:
        """Call ``AsyncDurable.start`` with these options."""
        return await self._context._start(self._options, task, args, kwargs)

    async def on_cancel(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call ``AsyncDurable.on_cancel`` with these options."""
        call = Call.of(self._options, function, args, kwargs)
        await self._context._perform(self._context._run.on_cancel(call))
