"""The Horsies application, the table of orders, and the task that confirms an order."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from horsies import Horsies

app = Horsies()
engine = create_async_engine(app.database_url.replace("postgresql:", "postgresql+psycopg:", 1))
# Objects stay readable after the commit: an asynchronous session cannot reload them on access.
new_session = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """The tables of this project."""


class Order(Base):
    """An order, with the id of the task that confirms it."""

    __tablename__ = "api_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str]
    pieces: Mapped[int]
    task_id: Mapped[str | None]


@app.task
async def confirm(order_id: int) -> str:
    """Confirm an order; its row was committed with this task, so it is always there."""
    async with new_session() as session:
        order = await session.get_one(Order, order_id)
        return f"confirmed: {order.pieces} x {order.article}"


@app.on_child_process_stop
async def close_engine() -> None:
    """Close the connections of a worker's child process."""
    await engine.dispose()
