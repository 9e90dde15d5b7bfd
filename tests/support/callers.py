"""Callers with their own transaction: psycopg, asyncpg, SQLAlchemy and Django, both synchronous and
asynchronous.

Each caller opens a transaction, lends it for a send, executes its own statement, and then commits or
rolls back in its own way. All callers are coroutines, so that one test covers both APIs; callers of
synchronous libraries never wait and need no event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import asyncpg
import django
import psycopg
import psycopg2  # type: ignore[import-untyped]
from django.conf import settings
from django.db import connection as django_connection
from django.db import transaction as django_transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from horsies.app import Horsies
from tests.support.applications import run_closing

Execute: TypeAlias = Callable[[str], Awaitable[Any]]
Lent: TypeAlias = tuple[Any, Execute]
Open: TypeAlias = Callable[[str, str], AbstractAsyncContextManager[Lent]]


@dataclass(frozen=True)
class Caller:
    """A library's open transaction, which ends with 'commit' or 'rollback'."""

    name: str
    open: Open
    is_async: bool = False

    def __str__(self) -> str:
        return self.name

    async def call(self, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the synchronous or asynchronous form of the method, depending on this caller."""
        if self.is_async:
            return await getattr(target, f"{method}_async")(*args, **kwargs)
        return getattr(target, method)(*args, **kwargs)

    def run(self, app: Horsies, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a test that covers both APIs."""
        return run_closing(app, work) if self.is_async else run_now(work)


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a synchronous caller waited")


def at_once(function: Callable[[str], Any]) -> Execute:
    async def execute(statement: str) -> Any:
        return function(statement)

    return execute


def alchemy_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@asynccontextmanager
async def psycopg_connection(url: str, end: str) -> AsyncIterator[Lent]:
    with psycopg.connect(url) as connection:
        yield connection, at_once(lambda statement: connection.execute(statement.encode()))
        getattr(connection, end)()


@asynccontextmanager
async def psycopg_block(url: str, end: str) -> AsyncIterator[Lent]:
    with (
        psycopg.connect(url, autocommit=True) as connection,
        connection.transaction(force_rollback=end == "rollback"),
    ):
        yield connection, at_once(lambda statement: connection.execute(statement.encode()))


@asynccontextmanager
async def alchemy_connection(url: str, end: str) -> AsyncIterator[Lent]:
    engine = create_engine(alchemy_url(url), poolclass=NullPool)
    with engine.connect() as connection:
        yield connection, at_once(lambda statement: connection.execute(text(statement)))
        getattr(connection, end)()


@asynccontextmanager
async def alchemy_block(url: str, end: str) -> AsyncIterator[Lent]:
    engine = create_engine(alchemy_url(url), poolclass=NullPool)
    with engine.connect() as connection, connection.begin() as block:
        yield connection, at_once(lambda statement: connection.execute(text(statement)))
        getattr(block, end)()


@asynccontextmanager
async def alchemy_session(url: str, end: str) -> AsyncIterator[Lent]:
    engine = create_engine(alchemy_url(url), poolclass=NullPool)
    with Session(engine) as session:
        yield session, at_once(lambda statement: session.execute(text(statement)))
        getattr(session, end)()


@asynccontextmanager
async def django_atomic(url: str, end: str) -> AsyncIterator[Lent]:
    configure_django(url)
    try:
        with django_transaction.atomic():
            yield django_connection, at_once(lambda sql: django_connection.cursor().execute(sql))
            django_transaction.set_rollback(end == "rollback")
    finally:
        django_connection.close()


def configure_django(url: str) -> None:
    """Point Django at the database of this test process, once."""
    if settings.configured:
        return
    parts = conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host"}
    database = {name: parts.get(part) or "" for name, part in names.items()}
    database |= {"ENGINE": "django.db.backends.postgresql", "PORT": parts.get("port") or ""}
    settings.configure(DATABASES={"default": database}, USE_TZ=True)
    django.setup()


@asynccontextmanager
async def psycopg_async(url: str, end: str) -> AsyncIterator[Lent]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection, lambda statement: connection.execute(statement.encode())
        await getattr(connection, end)()


@asynccontextmanager
async def alchemy_async_connection(url: str, end: str) -> AsyncIterator[Lent]:
    engine = create_async_engine(alchemy_url(url), poolclass=NullPool)
    async with engine.connect() as connection:
        yield connection, lambda statement: connection.execute(text(statement))
        await getattr(connection, end)()


@asynccontextmanager
async def alchemy_async_session(url: str, end: str) -> AsyncIterator[Lent]:
    engine = create_async_engine(alchemy_url(url), poolclass=NullPool)
    async with AsyncSession(engine) as session:
        yield session, lambda statement: session.execute(text(statement))
        await getattr(session, end)()


@asynccontextmanager
async def psycopg2_session(url: str, end: str) -> AsyncIterator[Lent]:
    engine = psycopg2_engine(url)
    with Session(engine) as session:
        yield session, at_once(lambda statement: session.execute(text(statement)))
        getattr(session, end)()


def psycopg2_engine(url: str) -> Engine:
    # Use a creator function, because it takes the URL as libpq does, with a directory as the host.
    creator = partial(psycopg2.connect, url)
    return create_engine("postgresql+psycopg2://", creator=creator, poolclass=NullPool)


@asynccontextmanager
async def asyncpg_connection(url: str, end: str) -> AsyncIterator[Lent]:
    connection = await asyncpg.connect(url)
    block = connection.transaction()
    await block.start()
    yield connection, connection.execute
    await getattr(block, end)()
    await connection.close()


def asyncpg_engine(url: str) -> AsyncEngine:
    creator = partial(asyncpg.connect, url)
    return create_async_engine("postgresql+asyncpg://", async_creator=creator, poolclass=NullPool)


@asynccontextmanager
async def alchemy_asyncpg_connection(url: str, end: str) -> AsyncIterator[Lent]:
    async with asyncpg_engine(url).connect() as connection:
        yield connection, lambda statement: connection.execute(text(statement))
        await getattr(connection, end)()


@asynccontextmanager
async def alchemy_asyncpg_session(url: str, end: str) -> AsyncIterator[Lent]:
    async with AsyncSession(asyncpg_engine(url)) as session:
        yield session, lambda statement: session.execute(text(statement))
        await getattr(session, end)()


CALLERS = [
    Caller("psycopg", psycopg_connection),
    Caller("psycopg-block", psycopg_block),
    Caller("sqlalchemy-connection", alchemy_connection),
    Caller("sqlalchemy-block", alchemy_block),
    Caller("sqlalchemy-session", alchemy_session),
    Caller("django", django_atomic),
    Caller("psycopg-async", psycopg_async, is_async=True),
    Caller("sqlalchemy-async-connection", alchemy_async_connection, is_async=True),
    Caller("sqlalchemy-async-session", alchemy_async_session, is_async=True),
    Caller("sqlalchemy-psycopg2-session", psycopg2_session),
    Caller("asyncpg", asyncpg_connection, is_async=True),
    Caller("sqlalchemy-asyncpg-connection", alchemy_asyncpg_connection, is_async=True),
    Caller("sqlalchemy-asyncpg-session", alchemy_asyncpg_session, is_async=True),
]
