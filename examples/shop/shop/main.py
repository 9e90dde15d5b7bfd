"""A tour of the shop: place an order, fulfil it, and look at everything else."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from horsies import TaskFailed
from shop.app import app
from shop.fulfilment import fulfil
from shop.models import Base, Line, Order, new_engine
from shop.tasks import charge, confirm, import_catalogue, invoice, recommend, report

WAIT_MS = 30_000
LINES = [Line(article="book", cents=1_250, quantity=2), Line(article="lamp", cents=4_000)]


async def place_order(engine: AsyncEngine, customer: str, lines: list[Line]) -> int:
    """Store an order and send its task in one transaction: both are committed, or neither is."""
    async with AsyncSession(engine) as session, session.begin():
        order = Order(customer=customer, cents=sum(line.cents * line.quantity for line in lines))
        session.add(order)
        await session.flush()  # the database gives the order its id here
        task = confirm.with_options(transaction=session, priority=1, headers={"customer": customer})
        handle = await task.enqueue_async(order.id, lines)
        order_id = order.id
    print("confirmed", await handle.result_async(WAIT_MS), "cents")
    return order_id


async def main() -> None:
    """Run the tour."""
    engine = new_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    order_id = await place_order(engine, "ada", LINES)

    run = (await fulfil(order_id, LINES).start_async()).unwrap()
    (await run.signal_async("approve", True)).unwrap()
    print("shipped", await run.result_async(WAIT_MS))

    try:
        refused = await charge.enqueue_async(order_id + 1_000, 5_000_000)
        await refused.result_async(WAIT_MS)
    except TaskFailed as failure:
        print("refused", failure.code, failure.message)

    invoices = [await invoice.enqueue_async("ada", number) for number in range(1, 6)]
    print("invoices", *[await one.result_async(WAIT_MS) for one in invoices])

    catalogue = await import_catalogue.enqueue_async(50_000)
    async for state in catalogue.watch_async(WAIT_MS):
        print("import", state.status.value, state.progress or "")

    once = report.with_options(
        delay=timedelta(seconds=1), idempotency_key="report", unique="while_open"
    )
    first, second = await once.enqueue_async(), await once.enqueue_async()
    print("one report", first.task_id == second.task_id, await first.result_async(WAIT_MS))

    soon = datetime.now(UTC) + timedelta(milliseconds=200)
    later = await recommend.with_options(at=soon, queue_name="reports").enqueue_async("book")
    print("recommended", *await later.result_async(WAIT_MS))

    sent = await app.send_by_name_async(
        "shop.tasks.recommend", {"article": "lamp"}, queue_name="orders"
    )
    print("by name", *await sent.unwrap().result_async(WAIT_MS))

    failed = (await app.tasks_where_async(status="FAILED")).unwrap()
    print("failed", *{task.error_code for task in failed.rows})
    await engine.dispose()
    (await app.close_async()).unwrap()


if __name__ == "__main__":
    asyncio.run(main())
