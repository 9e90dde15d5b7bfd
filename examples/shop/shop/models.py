"""The shop's table, the value that travels to tasks, and the ways to the database."""

from __future__ import annotations

from typing import Any

import psycopg
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shop.app import app


class Line(BaseModel):
    """One position of an order."""

    article: str
    cents: int
    quantity: int = 1


class Base(DeclarativeBase):
    """The base class of the shop's tables."""


class Order(Base):
    """An order; ``confirmed_by`` is the id of the task that confirmed it."""

    __tablename__ = "shop_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]
    confirmed_by: Mapped[str | None]


def new_engine() -> AsyncEngine:
    """Return an engine for the application's own database, even if that is the embedded one."""
    return create_async_engine(app.database_url.replace("postgresql:", "postgresql+psycopg:", 1))


def connect() -> psycopg.Connection[Any]:
    """Open a connection for a task; leaving its ``with`` block commits."""
    return psycopg.connect(app.database_url)
