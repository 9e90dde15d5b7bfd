"""What the type checker knows about durable functions.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_type
from uuid import UUID

from horsies import (
    AsyncDurable,
    AsyncTaskTransaction,
    Child,
    Durable,
    Horsies,
    StepCall,
    TaskError,
    TaskFunction,
    TaskHandle,
    TaskResult,
    TaskTransaction,
)

app = Horsies("postgresql://localhost/shop")


def charge(order_id: int, *, amount: float = 1.0) -> str:
    return f"{order_id} {amount}"


def refund(order_id: int) -> TaskResult[bytes, TaskError]:
    return TaskResult(ok=b"")


def book(tx: TaskTransaction, order_id: int) -> float:
    return 1.0


@app.task("render")
def render(page: int) -> list[str]:
    return []


@app.durable("order", queue_name="flows", version=2, signals={"approve": bool})
def order(ctx: Durable, order_id: int, note: str = "") -> str:
    assert_type(ctx.step(charge, order_id, amount=2.0), str)
    assert_type(ctx.step(refund, order_id), bytes)
    assert_type(ctx.tx_step(book, order_id), float)
    assert_type(ctx.with_options(name="again", timeout_ms=1_000).step(charge, order_id), str)
    assert_type(ctx.call(charge, 1), StepCall[str])
    assert_type(ctx.gather(ctx.call(charge, 1), ctx.call(refund, 1)), tuple[str, bytes])
    assert_type(ctx.start(render, 1), Child[list[str]])
    assert_type(ctx.result(ctx.start(render, 1)), list[str])
    assert_type(ctx.result(ctx.start(report, "x")), int)
    assert_type(ctx.wait_signal("approve", bool, timeout=timedelta(days=1)), bool)
    assert_type(ctx.wait_any(ctx.start(render, 1)), Child[list[str]])
    assert_type(ctx.wait_any(ctx.start(render, 1), "stop", timeout=60), Child[list[str]] | str)
    assert_type(ctx.now(), datetime)
    assert_type(ctx.random(), float)
    assert_type(ctx.uuid(), UUID)
    assert_type(ctx.patched("change"), bool)
    ctx.step(charge, "x")  # type: ignore[call-overload]
    ctx.step(charge)  # type: ignore[call-overload]
    ctx.tx_step(book, "x")  # type: ignore[arg-type]
    ctx.start(render, "x")  # type: ignore[call-overload]
    ctx.sleep("a day")  # type: ignore[arg-type]
    return note


@app.durable("report")
def report(ctx: Durable, name: str) -> TaskResult[int, TaskError]:
    return TaskResult(ok=1)


async def charge_async(order_id: int) -> str:
    return str(order_id)


async def book_async(tx: AsyncTaskTransaction, order_id: int) -> float:
    return 1.0


@app.durable("async_order", signals={"approve": bool})
async def async_order(ctx: AsyncDurable, order_id: int) -> str:
    assert_type(await ctx.step(charge_async, order_id), str)
    assert_type(await ctx.step(charge, order_id, amount=2.0), str)
    assert_type(await ctx.tx_step(book_async, order_id), float)
    assert_type(await ctx.with_options(name="again").step(charge_async, order_id), str)
    assert_type(ctx.call(charge_async, 1), StepCall[str])
    both = await ctx.gather(ctx.call(charge_async, 1), ctx.call(book_plain, 1))
    assert_type(both, tuple[str, float])
    child = await ctx.start(render, 1)
    assert_type(child, Child[list[str]])
    assert_type(await ctx.result(child), list[str])
    assert_type(await ctx.wait_any(child), Child[list[str]])
    assert_type(await ctx.wait_any(child, "stop", timeout=60), Child[list[str]] | str)
    assert_type(await ctx.wait_signal("approve", bool), bool)
    assert_type(await ctx.now(), datetime)
    assert_type(await ctx.random(), float)
    assert_type(await ctx.uuid(), UUID)
    assert_type(await ctx.patched("change"), bool)
    await ctx.step(charge_async, "x")  # type: ignore[call-overload]
    await ctx.tx_step(book_async, "x")  # type: ignore[arg-type]
    await ctx.start(render, "x")  # type: ignore[call-overload]
    return str(order_id)


def book_plain(order_id: int) -> float:
    return 1.0


assert_type(order.enqueue(7, note="x"), TaskHandle[str])
assert_type(async_order.enqueue(7), TaskHandle[str])
assert_type(report.enqueue("x").result(), int)
accepted: TaskFunction[..., str] = order
order.enqueue("x")  # type: ignore[arg-type]
order.enqueue(7, ctx=1)  # type: ignore[call-arg]
