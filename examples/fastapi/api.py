"""The web application: it stores orders, sends their tasks, and shows the dashboard below /tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from orders import Base, Order, app, confirm, engine, new_session
from pydantic import BaseModel

from horsies.web import ViewOnly, create_app

STOCK = 100


class NewOrder(BaseModel):
    """The body of a new order."""

    article: str
    pieces: int


class OrderState(BaseModel):
    """An order and the state of its task; ``result`` is null until the task has succeeded."""

    id: int
    status: str
    result: str | None = None


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Create the table, and close all connections when the server stops."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await app.close_async()
    await engine.dispose()


api = FastAPI(lifespan=lifespan)
# Anyone who reaches this site may look at the tasks: pass a policy of your own before you deploy it.
api.mount("/tasks", create_app(app, policy=ViewOnly()))


@api.post("/orders", status_code=201)
async def create_order(new: NewOrder) -> OrderState:
    """Store an order and send its task: either both are committed or neither is."""
    async with new_session.begin() as session:
        order = Order(article=new.article, pieces=new.pieces)
        session.add(order)
        await session.flush()  # assigns the id
        handle = await confirm.with_options(transaction=session).enqueue_async(order.id)
        order.task_id = handle.task_id
        if new.pieces > STOCK:  # the exception rolls back the order and its task
            raise HTTPException(409, f"Only {STOCK} pieces are in stock.")
    return OrderState(id=order.id, status="PENDING")


@api.get("/orders/{order_id}")
async def read_order(order_id: int) -> OrderState:
    """Return an order with the state of its task, without waiting for it."""
    async with new_session() as session:
        order = await session.get(Order, order_id)
    if order is None or order.task_id is None:
        raise HTTPException(404, "There is no such order.")
    info = (await app.get_task_info_async(order.task_id, include_result=True)).unwrap()
    if info is None:  # the task has ended, and its row was deleted after the retention time
        return OrderState(id=order_id, status="DELETED")
    result = info.result.ok if info.result else None
    return OrderState(id=order_id, status=info.status, result=result)
