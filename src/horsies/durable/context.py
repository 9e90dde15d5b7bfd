"""``ctx``, the context with which a durable function records its steps and waits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
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
    Effects,
    StepEngine,
    current_step,
    seconds_of,
    value_of,
)
from horsies.durable.steps import form_of
from horsies.errors import DurableMisuse
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.transaction import TaskTransaction

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

_OTHER_THREAD = (
    "ctx is used in another thread than its function; use ctx.gather for steps side by side."
)


class Durable:
    """The context of a durable function, its first parameter.

    Every finished step is recorded. After a crash, a wait or a deployment the function is called again
    from its beginning: recorded steps return their recorded values, and the run continues with the first
    unrecorded step. Code outside of steps must therefore behave identically in every call: no clock, no
    random numbers, no reads. Use ``now``, ``random`` and ``uuid``, which are recorded.

    Example:
        @app.durable("onboard")
        def onboard(ctx: Durable, user_id: int) -> str:
            account = ctx.step(create_account, user_id)
            ctx.sleep(timedelta(days=3))
            ctx.step(send_tips, account)
            return account
    """

    is_durable_context = True
    is_asynchronous = False
    no_argument = "a worker passes the context of a durable function; leave it out"

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._run = engine.run
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"Durable(task_id={self.task_id!r}, attempt={self._run.fence.attempt})"

    @property
    def task_id(self) -> str:
        """The id of the run, which is also the id of its task; ``app.signal`` takes it."""
        return self._run.fence.task_id

    # Steps

    @overload
    def step(
        self, function: Callable[P, TaskResult[T, TaskError]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function and record its value, or return the recorded value without a call.

        The value must be JSON that fits the return annotation, up to 1 MB. An exception or a TaskResult
        with an error is also recorded, and is raised as StepFailed. After a crash between a step's
        effect and its record, the step is repeated: pass ``ctx.step_key`` to other systems, or use
        ``tx_step`` for effects in this database.

        Example:
            charge_id = ctx.step(charge, order_id, amount=12)
        """
        return self._step(NO_STEP_OPTIONS, "step", function, args, kwargs)

    def tx_step(
        self,
        function: Callable[Concatenate[TaskTransaction, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a step whose rows and record commit together, so that its effects happen exactly once.

        The function takes a TaskTransaction as its first argument and writes through ``tx.connection``.
        After a conflict with another transaction, the function is called again.

        Example:
            def book(tx: TaskTransaction, order_id: int) -> None:
                tx.connection.execute("UPDATE orders SET paid = true WHERE id = %s", (order_id,))

            ctx.tx_step(book, order_id)
        """
        value: T = self._step(NO_STEP_OPTIONS, "tx", function, args, kwargs)
        return value

    def with_options(
        self,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        detached: bool = False,
        timeout_ms: int | None = None,
    ) -> DurableSteps:
        """Set the name, time limit or retry policy of a step; with ``detached``, a child continues when
        the run is cancelled. After ``timeout_ms``, TaskStopped is raised in the step's function, and
        this try fails with STEP_TIMEOUT. A wait of more than 5 seconds between two tries parks the run.

        Example:
            again = RetryPolicy.fixed([1, 60], auto_retry_for=[OSError, "STEP_TIMEOUT"])
            ctx.with_options(name="charge", retry=again, timeout_ms=10_000).step(pay, 7)
        """
        return DurableSteps(self, StepOptions(name, retry, detached, timeout_ms))

    @overload
    def call(
        self, function: Callable[P, TaskResult[T, TaskError]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    @overload
    def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> StepCall[Any]:
        """Bind the arguments of a step for ``gather``."""
        return StepCall(Call.of(NO_STEP_OPTIONS, function, args, kwargs))

    @overload
    def gather(self, first: StepCall[A], second: StepCall[B], /) -> tuple[A, B]: ...
    @overload
    def gather(
        self, first: StepCall[A], second: StepCall[B], third: StepCall[C], /
    ) -> tuple[A, B, C]: ...
    @overload
    def gather(self, /, *calls: StepCall[T]) -> tuple[T, ...]: ...
    def gather(self, /, *calls: StepCall[Any]) -> tuple[Any, ...]:
        """Run steps concurrently, in up to 16 threads, and return their values in order.

        The first failure is raised after all steps have ended. Names are assigned in the order of the
        arguments, not in the order in which the steps end.

        Example:
            mail, invoice = ctx.gather(ctx.call(send_mail, user), ctx.call(write_invoice, user))
        """
        self._check()
        if len(calls) > PARALLEL_MAX:
            raise DurableMisuse(f"gather takes at most {PARALLEL_MAX} steps; gather them in parts.")
        return self._engine.gather([one.call for one in calls])

    @property
    def step_key(self) -> str:
        """Return the idempotency key of the running step: the same key on every retry, a different key
        for every step.

        Example:
            gateway.charge(amount, idempotency_key=ctx.step_key)
        """
        step = current_step.get()
        if step is None:
            raise DurableMisuse("ctx.step_key is the key of a running step; read it inside one.")
        return f"{self.task_id}/{step}"

    # Values that a replay reads from the record

    def now(self) -> datetime:
        """Return the current time in UTC. It is recorded, and a replay returns the recorded time."""
        made = to_json(datetime.now(UTC).isoformat()).decode()
        return datetime.fromisoformat(from_json(self._perform(self._run.value("now", made))))

    def random(self) -> float:
        """Return a random number from 0 to 1. It is recorded, and a replay returns the recorded number."""
        made = to_json(random.random()).decode()
        return float(from_json(self._perform(self._run.value("random", made))))

    def uuid(self) -> UUID:
        """A random UUID, recorded."""
        made = to_json(str(uuid4())).decode()
        return UUID(from_json(self._perform(self._run.value("uuid", made))))

    def patched(self, change: str) -> bool:
        """Guard a code change: return True if the run reaches this place for the first time with the new
        code, and False if it passed this place with the old code.

        Example:
            if ctx.patched("second mail"):
                ctx.step(second_mail, user)
        """
        return self._perform(self._run.patched(change))

    # Waits

    def sleep(self, duration: timedelta | float) -> None:
        """Wait for a time. A wait of more than a second parks the run, and any worker continues it
        afterwards.

        Example:
            ctx.sleep(timedelta(days=3))
        """
        self._perform(self._run.sleep(seconds_of(duration, "ctx.sleep")))

    @overload
    def wait_signal(
        self, name: str, kind: type[T], timeout: timedelta | float | None = None
    ) -> T: ...
    @overload
    def wait_signal(
        self, name: str, kind: None = None, timeout: timedelta | float | None = None
    ) -> Any: ...
    def wait_signal(
        self, name: str, kind: Any = None, timeout: timedelta | float | None = None
    ) -> Any:
        """Wait for a value that ``app.signal(task_id, name, value)`` sends, and return it as a `kind`.

        Signals are stored until a step takes them, oldest first, and each is taken once. The run is
        parked during the wait. After `timeout`, StepFailed with the code SIGNAL_TIMEOUT is raised.

        Example:
            approval = ctx.wait_signal("approve", Approval, timeout=timedelta(days=30))
        """
        seconds = None if timeout is None else seconds_of(timeout, "timeout")
        form = form_of(Any if kind is None else kind, f"the type of signal {name!r}")
        return value_of(self._perform(self._run.wait_signal(name, seconds)), form)

    @overload
    def start(self, task: Startable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Child[T]: ...
    @overload
    def start(self, task: StartableFlow[T], /) -> Child[T]: ...
    def start(self, task: Any, /, *args: Any, **kwargs: Any) -> Child[Any]:
        """Send a task, or start a durable function or a workflow, exactly once: the child is stored in
        the same transaction as the step that starts it.

        An unfinished child is cancelled with its run; a child started by
        ``ctx.with_options(detached=True).start(...)`` continues.

        Example:
            child = ctx.start(render_report, account)
            report = ctx.result(child)
        """
        return self._start(NO_STEP_OPTIONS, task, args, kwargs)

    def on_cancel(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Register a clean-up step for a later cancellation of the run; the newest clean-up step runs
        first.

        Register it before the step that it undoes: a cancellation interrupts the running step, whose
        effect may or may not exist when the clean-up step runs. If a clean-up step fails, its failure is
        recorded and the next clean-up step runs.

        Example:
            ctx.on_cancel(release_stock, order_id)
            ctx.step(reserve_stock, order_id)
        """
        self._perform(self._run.on_cancel(Call.of(NO_STEP_OPTIONS, function, args, kwargs)))

    def result(self, child: Child[T]) -> T:
        """Wait until a child has ended and return its value. The run is parked during the wait. If the
        child failed, StepFailed with the child's error code is raised.
        """
        return child.read(self._perform(self._run.child_result(child)))

    @overload
    def wait_any(self, *events: Child[T], timeout: timedelta | float | None = None) -> Child[T]: ...
    @overload
    def wait_any(
        self, *events: Child[T] | str, timeout: timedelta | float | None = None
    ) -> Child[T] | str: ...
    def wait_any(
        self, *events: Child[Any] | str, timeout: timedelta | float | None = None
    ) -> Child[Any] | str:
        """Wait until one of several children has ended or one of several named signals has arrived, and
        return that child or name. ``result`` or ``wait_signal`` then returns without a wait. If several
        are ready, the first argument among them is returned. After `timeout`, StepFailed with the code
        WAIT_TIMEOUT is raised.

        Example:
            first = ctx.wait_any(ctx.start(fast, 7), ctx.start(slow, 7), "cancel", timeout=60)
            value = None if first == "cancel" else ctx.result(first)
        """
        seconds = None if timeout is None else seconds_of(timeout, "timeout")
        return self._perform(self._run.wait_any(events, seconds))

    def continue_as(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this call and continue the run immediately, with new arguments and an empty record. Use
        this for endless runs, because a record has at most 10,000 steps. The run keeps its id, its key
        and its stored signals. A later cancellation of the run does not cancel children of the old
        record.

        Example:
            ctx.sleep(timedelta(hours=1))
            ctx.continue_as(cursor + 1)
        """
        self._perform(self._run.continued(args, kwargs))

    @property
    def is_parking(self) -> bool:
        """Whether the function is unwinding because the run is being parked. ``finally`` blocks run at
        every parking.
        """
        return isinstance(self._run.left, Parked)

    # Execution

    def _check(self) -> None:
        if threading.get_ident() != self._thread:
            raise DurableMisuse(_OTHER_THREAD)
        self._run.check_use()

    def _perform(self, script: Effects[Answer]) -> Answer:
        self._check()
        return self._engine.perform(script)

    def _step(
        self,
        options: StepOptions,
        kind: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return self._perform(self._run.step(Call.of(options, function, args, kwargs), kind))

    def _start(
        self, options: StepOptions, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Child[Any]:
        child = child_of(task, self.task_id, args, kwargs)
        return self._perform(self._run.start(child, options))


class DurableSteps:
    """Steps with options, created by ``ctx.with_options(...)``."""

    def __init__(self, context: Durable, options: StepOptions) -> None:
        self._context = context
        self._options = options

    @overload
    def step(
        self, function: Callable[P, TaskResult[T, TaskError]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``Durable.step`` with these options."""
        return self._context._step(self._options, "step", function, args, kwargs)

    def tx_step(
        self,
        function: Callable[Concatenate[TaskTransaction, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``Durable.tx_step`` with these options."""
        value: T = self._context._step(self._options, "tx", function, args, kwargs)
        return value

    @overload
    def call(
        self, function: Callable[P, TaskResult[T, TaskError]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    @overload
    def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepCall[T]: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> StepCall[Any]:
        """Call ``Durable.call`` with these options."""
        return StepCall(Call.of(self._options, function, args, kwargs))

    @overload
    def start(self, task: Startable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Child[T]: ...
    @overload
    def start(self, task: StartableFlow[T], /) -> Child[T]: ...
    def start(self, task: Any, /, *args: Any, **kwargs: Any) -> Child[Any]:
        """Call ``Durable.start`` with these options."""
        return self._context._start(self._options, task, args, kwargs)

    def on_cancel(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call ``Durable.on_cancel`` with these options."""
        call = Call.of(self._options, function, args, kwargs)
        self._context._perform(self._context._run.on_cancel(call))
