"""Durable functions with ``async def``: the same record, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from horsies import (
    AsyncDurable,
    AsyncTaskTransaction,
    Durable,
    Horsies,
    StepFailed,
    TaskDefinitionError,
)
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects


def test_an_async_function_takes_every_kind_of_step_once(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS async_effects (number integer)")

    async def fetch(number: int) -> int:
        effects.note("fetch")
        await asyncio.sleep(0)
        return number

    def plain(number: int) -> int:
        effects.note("plain")
        return number

    async def write(tx: AsyncTaskTransaction, number: int) -> int:
        own = await tx.connection()
        await own.execute("INSERT INTO async_effects VALUES (%s)", (number,))
        return number

    async def fail() -> None:
        effects.note("fail")
        raise ValueError("no")

    @app.task("double")
    def double(number: int) -> int:
        return 2 * number

    @app.durable("tour")
    async def tour(ctx: AsyncDurable, start: int) -> list[int]:
        found = [await ctx.step(fetch, start), await ctx.step(plain, 2)]
        found.append(await ctx.tx_step(write, 3))
        found += await ctx.gather(ctx.call(fetch, 4), ctx.call(plain, 5))
        with pytest.raises(StepFailed):
            await ctx.step(fail)
        await ctx.now()
        child = await ctx.start(double, 3)
        await ctx.sleep(timedelta(days=1))
        found.append(await ctx.result(child))
        found.append(await ctx.wait_signal("go", int))
        return found

    sent = tour.enqueue(1)
    try:
        run_pending(app)
        clock_of(app).advance(timedelta(days=2))
        run_pending(app)
        app.signal(sent.task_id, "go", 7).unwrap()
        run_pending(app)
        assert sent.result(timeout_ms=0) == [1, 2, 3, 4, 5, 6, 7]
        assert effects == {"fetch": 2, "plain": 2, "fail": 1}
        assert connection.execute("SELECT number FROM async_effects").fetchall() == [(3,)]
    finally:
        connection.execute("DROP TABLE async_effects")


async def one() -> int:
    return 1


async def in_other_asyncio_tasks(ctx: AsyncDurable) -> None:
    await asyncio.gather(ctx.step(one), ctx.step(one))


async def inside_a_step(ctx: AsyncDurable) -> None:
    async def outer() -> int:
        return await ctx.step(one)

    await ctx.step(outer)


async def too_many_at_once(ctx: AsyncDurable) -> None:
    await ctx.gather(*[ctx.call(one) for _ in range(257)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (in_other_asyncio_tasks, "use ctx.gather"),
        (inside_a_step, "used inside step 'outer'"),
        (too_many_at_once, "at most 256 steps"),
    ],
)
def test_a_misuse_of_the_context_fails_the_run_with_one_sentence(
    app: Horsies, body: Callable[[AsyncDurable], Awaitable[None]], message: str
) -> None:
    @app.durable("wrong")
    async def wrong(ctx: AsyncDurable) -> None:
        await body(ctx)

    sent = wrong.enqueue()
    run_pending(app)
    error = sent.get(timeout_ms=0).err_value
    assert message in (error.message or "")
    assert (error.data or {}).get("exception_type") == "DurableMisuse"


def test_the_context_fits_the_function(app: Horsies) -> None:
    with pytest.raises(TaskDefinitionError, match="wrong kind"):

        @app.durable("a")
        async def a(ctx: Durable) -> None: ...

    with pytest.raises(TaskDefinitionError, match="wrong kind"):

        @app.durable("b")  # type: ignore[arg-type]
        def b(ctx: AsyncDurable) -> None: ...

    with pytest.raises(TaskDefinitionError, match="must be its context"):

        @app.durable("c")  # type: ignore[arg-type]
        def c(number: int) -> None: ...
