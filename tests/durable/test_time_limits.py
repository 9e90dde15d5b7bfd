"""``timeout_ms`` of steps: the function is stopped, its try has failed, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from horsies import (
    AsyncDurable,
    AsyncTaskTransaction,
    Durable,
    DurableMisuse,
    Horsies,
    RetryPolicy,
    StepFailed,
    TaskStopped,
    TaskTransaction,
)
from horsies.durable.time_limit import StepTimeout, within, within_async
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects

# Longer than any test may last: only an interruption ends it.
FOREVER = 600.0
# Long enough for the function to begin on a busy machine.
LIMIT_MS = 500
AGAIN = RetryPolicy.fixed([0.01], auto_retry_for=["STEP_TIMEOUT"], jitter=False)


def test_a_step_that_takes_too_long_is_stopped_and_its_failure_is_replayed(
    app: Horsies, effects: Effects
) -> None:
    def hang() -> None:
        effects.note("begun")
        try:
            time.sleep(FOREVER)
        finally:
            effects.note("cleaned up")

    codes = []

    @app.durable("patient")
    def patient(ctx: Durable) -> str:
        try:
            ctx.with_options(timeout_ms=LIMIT_MS).step(hang)
        except StepFailed as failed:
            codes.append((failed.code, failed.message))
        ctx.sleep(timedelta(days=1))
        return "went on"

    sent = patient.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    assert sent.result(timeout_ms=0) == "went on"
    assert codes == [("STEP_TIMEOUT", f"The step ran longer than its timeout_ms={LIMIT_MS}.")] * 2
    assert effects == {"begun": 1, "cleaned up": 1}


def test_a_try_that_took_too_long_is_repeated_by_the_policy(app: Horsies, effects: Effects) -> None:
    def hang_once() -> str:
        if effects.note("try") and effects["try"] == 1:
            time.sleep(FOREVER)
        return "done"

    @app.durable("patient")
    def patient(ctx: Durable) -> str:
        return ctx.with_options(timeout_ms=5_000 if effects else LIMIT_MS, retry=AGAIN).step(
            hang_once
        )

    sent = patient.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "done"
    assert effects == {"try": 2}


def test_a_function_that_catches_its_stop_has_failed_all_the_same(app: Horsies) -> None:
    def stubborn() -> str:
        try:
            time.sleep(FOREVER)
        except TaskStopped:
            return "late"
        return "never"

    @app.durable("patient")
    def patient(ctx: Durable) -> str:
        return ctx.with_options(timeout_ms=LIMIT_MS).step(stubborn)

    sent = patient.enqueue()
    run_pending(app)
    assert sent.get(timeout_ms=0).err_value.error_code == "STEP_TIMEOUT"


def test_only_the_late_one_of_several_steps_side_by_side_is_stopped(
    app: Horsies, effects: Effects
) -> None:
    def spin() -> None:
        while True:  # Python stops it between two instructions
            effects.note("round")

    def quick() -> str:
        return "quick"

    @app.durable("both")
    def both(ctx: Durable) -> str:
        with pytest.raises(StepFailed, match="STEP_TIMEOUT"):
            ctx.gather(ctx.with_options(timeout_ms=LIMIT_MS).call(spin), ctx.call(quick))
        return ctx.step(quick)

    sent = both.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "quick"
    steps = app.durable_handle(sent.task_id).info().unwrap().steps
    assert [one.name for one in steps if one.error is None] == ["quick", "quick#2"]


def test_a_transaction_that_takes_too_long_is_rolled_back(
    app: Horsies, connection: Database
) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS limited_effects (number integer)")

    def write(tx: TaskTransaction, number: int, seconds: float) -> int:
        tx.connection.execute("INSERT INTO limited_effects VALUES (%s)", (number,))
        tx.connection.execute("SELECT pg_sleep(%s)", (seconds,))
        return number

    async def write_async(tx: AsyncTaskTransaction, number: int, seconds: float) -> int:
        own = await tx.connection()
        await own.execute("INSERT INTO limited_effects VALUES (%s)", (number,))
        await own.execute("SELECT pg_sleep(%s)", (seconds,))
        return number

    @app.durable("books")
    def books(ctx: Durable) -> int:
        with pytest.raises(StepFailed, match="STEP_TIMEOUT"):
            ctx.with_options(timeout_ms=LIMIT_MS).tx_step(write, 1, FOREVER)
        return ctx.with_options(timeout_ms=20_000).tx_step(write, 2, 0.0)

    @app.durable("async_books")
    async def async_books(ctx: AsyncDurable) -> int:
        with pytest.raises(StepFailed, match="STEP_TIMEOUT"):
            await ctx.with_options(timeout_ms=LIMIT_MS).tx_step(write_async, 3, FOREVER)
        return await ctx.with_options(timeout_ms=20_000).tx_step(write_async, 4, 0.0)

    try:
        sent = [books.enqueue(), async_books.enqueue()]
        run_pending(app)
        assert [one.result(timeout_ms=0) for one in sent] == [2, 4]
        rows = connection.execute("SELECT number FROM limited_effects ORDER BY 1").fetchall()
        assert rows == [(2,), (4,)]
    finally:
        connection.execute("DROP TABLE limited_effects")


def test_coroutines_and_plain_functions_of_an_async_function_are_stopped(
    app: Horsies, effects: Effects
) -> None:
    async def hang() -> None:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            effects.note("cancelled")
            raise

    async def stubborn() -> str:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            return "late"
        return "never"

    def block() -> None:
        time.sleep(FOREVER)

    async def own_timeout() -> None:
        raise TimeoutError("of another system")

    @app.durable("patient")
    async def patient(ctx: AsyncDurable) -> list[str]:
        codes: list[str] = []
        functions: list[Callable[[], object]] = [hang, stubborn, block, own_timeout]
        for function in functions:
            try:
                await ctx.with_options(timeout_ms=LIMIT_MS).step(function)
            except StepFailed as failed:
                codes.append(failed.code)
        with pytest.raises(StepFailed):
            await ctx.gather(ctx.with_options(timeout_ms=LIMIT_MS).call(hang))
        return codes

    sent = patient.enqueue()
    run_pending(app)
    late = ["STEP_TIMEOUT"] * 3
    assert sent.result(timeout_ms=0) == [*late, "UNHANDLED_EXCEPTION"]
    assert effects == {"cancelled": 2}


def test_timers_of_the_process_continue_after_a_limited_step() -> None:
    rings: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rings.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, FOREVER)
    try:
        assert within(10_000, lambda: "in time") == "in time"
        with pytest.raises(StepTimeout, match=f"timeout_ms={LIMIT_MS}"):
            within(LIMIT_MS, lambda: time.sleep(FOREVER))
        with pytest.raises(ZeroDivisionError):
            within(10_000, lambda: 1 // 0)
        assert FOREVER - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= FOREVER
        signal.raise_signal(signal.SIGALRM)
        assert rings == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_limit_that_is_over_before_the_step_begins_restores_the_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ring(_which: int, _seconds: float) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "setitimer", ring)
    try:
        with pytest.raises(StepTimeout, match=f"timeout_ms={LIMIT_MS}"):
            within(LIMIT_MS, lambda: pytest.fail("the limit is over"))
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_limit_in_a_thread_leaves_nothing_behind() -> None:
    found: list[object] = []

    def many() -> None:
        for _ in range(30):
            ends_at = time.monotonic() + 0.1

            def on_time(ends_at: float = ends_at) -> None:
                while time.monotonic() < ends_at:
                    pass

            try:
                within(100, on_time)
                found.append("ended")
            except StepTimeout:
                found.append("late")

    thread = threading.Thread(target=many)
    thread.start()
    thread.join()
    assert len(found) == 30
    assert set(found) <= {"ended", "late"}


def test_the_end_of_the_task_is_not_taken_for_the_limit() -> None:
    async def stopped() -> None:
        begun = asyncio.Event()

        async def hang() -> None:
            begun.set()
            await asyncio.sleep(FOREVER)

        running = asyncio.create_task(within_async(60_000, hang()))
        await begun.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())


def test_bad_limits_are_refused(app: Horsies) -> None:
    problems: list[str] = []

    @app.task("double")
    def double(number: int) -> int:
        return 2 * number

    @app.durable("careless")
    def careless(ctx: Durable) -> None:
        for limit in (0, 99, 1 << 31, True, 1.5, "1"):
            with pytest.raises(DurableMisuse, match="from 100 to"):
                ctx.with_options(timeout_ms=limit)  # type: ignore[arg-type]
        try:
            ctx.with_options(timeout_ms=1_000).start(double, 1)
        except DurableMisuse as misuse:
            problems.append(str(misuse))

    sent = careless.enqueue()
    run_pending(app)
    sent.result(timeout_ms=0)
    assert problems == [
        "ctx.start takes no timeout_ms; the task has its own: task.with_options(timeout_ms=...)."
    ]
