"""Connections: the two pools of a producer, dedicated connections, and what a database error means.

``Database`` owns every socket of a process. Nothing is opened before it is needed, nothing survives
a fork, and the classification of errors into passing and lasting ones lives here and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from horsies.config import PostgresConfig
from horsies.db import embedded
from horsies.dsn import libpq_url, mask_url

SyncPool = ConnectionPool[Connection[Any]]
AsyncPool = AsyncConnectionPool[AsyncConnection[Any]]

# Pools inherited through a fork are parked here for ever: letting the garbage collector finish
# their connections would send a goodbye over sockets the parent process still uses.
_inherited: list[object] = []

_TRANSIENT_CLASSES = ("08", "53")
_TRANSIENT_STATES = {"57P01", "57P02", "57P03", "57014", "40001", "40P01", "55P03", "25P03"}


class Database:
    """All connections of one process to one database."""

    def __init__(self, config: PostgresConfig, role: str = "producer") -> None:
        self.config = config
        self.role = role
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._urls: tuple[str, str] | None = None
        self._pool: SyncPool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}

    def _leave_parent_behind(self) -> None:
        if self._pid != os.getpid():
            _inherited.append((self._pool, self._async_pools))
            self._lock = threading.Lock()
            self._forget()

    def urls(self) -> tuple[str, str]:
        """Return the URL for ordinary work and the one for LISTEN and schema work."""
        self._leave_parent_behind()
        with self._lock:
            if self._urls is None:
                url = _resolve(self.config.database_url)
                session = self.config.session_database_url
                self._urls = url, _resolve(session) if session else url
        return self._urls

    def options(self, role: str) -> dict[str, Any]:
        """Return the connection parameters every connection of ours shares."""
        config = self.config
        options: dict[str, Any] = {
            "application_name": f"horsies:{role}",
            "connect_timeout": 10,
            "autocommit": True,
            "prepare_threshold": None if config.pgbouncer_transaction_mode else 5,
            "tcp_user_timeout": config.tcp_user_timeout_ms,
        }
        if config.tcp_keepalives:
            options |= {
                "keepalives": 1,
                "keepalives_idle": config.tcp_keepalives_idle,
                "keepalives_interval": config.tcp_keepalives_interval,
                "keepalives_count": config.tcp_keepalives_count,
            }
        return options

    def connect(self, role: str, *, session: bool = False) -> Connection[Any]:
        """Open a dedicated autocommit connection; ``session`` asks for one that is not pooled on
        the way.
        """
        url, session_url = self.urls()
        return Connection.connect(session_url if session else url, **self.options(role))

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """Borrow a pooled synchronous connection."""
        try:
            with self.pool().connection() as connection:
                yield connection
        except PoolTimeout as error:
            self._raise_the_cause(error)

    @asynccontextmanager
    async def connection_async(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Borrow a pooled connection of the running event loop."""
        try:
            async with (await self.pool_async()).connection() as connection:
                yield connection
        except PoolTimeout as error:
            await asyncio.to_thread(self._raise_the_cause, error)

    def _raise_the_cause(self, error: PoolTimeout) -> None:
        """A pool only says that it waited; one direct attempt says why (refused, wrong password,
        full).
        """
        self.connect(self.role).close()
        raise error

    def pool(self) -> SyncPool:
        """Return the synchronous pool, opened on first use."""
        url, _ = self.urls()
        with self._lock:
            if self._pool is None:
                self._pool = ConnectionPool(url, check=self._check(), **self._pool_settings())
        return self._pool

    async def pool_async(self) -> AsyncPool:
        """Return the running event loop's pool, opened on first use."""
        url, _ = self.urls()
        loop = asyncio.get_running_loop()
        if (pool := self._async_pools.get(loop)) is None:
            self._drop_closed_loops()
            pool = AsyncConnectionPool(
                url, check=self._check_async(), **self._pool_settings(opened=False)
            )
            self._async_pools[loop] = pool
            await pool.open()
        return pool

    def _drop_closed_loops(self) -> None:
        for loop in [loop for loop in self._async_pools if loop.is_closed()]:
            del self._async_pools[loop]

    def _pool_settings(self, *, opened: bool = True) -> dict[str, Any]:
        config = self.config
        return {
            "min_size": config.pool_size,
            "max_size": config.pool_size + config.max_overflow,
            "timeout": config.pool_timeout,
            "max_lifetime": config.pool_recycle,
            "kwargs": self.options(self.role),
            "name": "horsies",
            "open": opened,
        }

    def _check(self) -> Any:
        return check_quietly if self.config.pool_pre_ping else None

    def _check_async(self) -> Any:
        return check_quietly_async if self.config.pool_pre_ping else None

    def close(self) -> None:
        """Close the synchronous pool; the next use opens a new one."""
        self._leave_parent_behind()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    async def close_async(self) -> None:
        """Close the pool of the running event loop."""
        pool = self._async_pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()


def check_quietly(connection: Connection[Any]) -> None:
    """Refuse a connection the server has closed, without a round trip.

    An idle connection has nothing to read; a readable one carries the server's goodbye. This costs
    about 2 µs where the usual SELECT 1 costs 80, a third of a whole send.
    """
    _check_socket(connection.pgconn)


async def check_quietly_async(connection: AsyncConnection[Any]) -> None:
    """The same for the asynchronous pool."""
    _check_socket(connection.pgconn)


def _check_socket(pgconn: Any) -> None:
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    if poller.poll(0):
        pgconn.consume_input()


def _resolve(url: str) -> str:
    return embedded.start_or_join(url) if embedded.is_embedded(url) else libpq_url(url)


def is_transient(error: BaseException) -> bool:
    """Tell whether trying again later can help.

    Connection failures carry no SQLSTATE at all ("too many clients" included), so an
    OperationalError or InterfaceError without one counts as passing.
    """
    if isinstance(error, PoolTimeout):
        return True
    state = getattr(error, "sqlstate", None)
    if state is None:
        is_connection_error = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return is_connection_error and not _is_refusal(str(error).lower())
    return state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES


def _is_refusal(lowered: str) -> bool:
    """The server answered, and will answer the same again: wrong password, no such database or role."""
    unknown = "does not exist" in lowered and ("database" in lowered or "role" in lowered)
    return unknown or any(mark in lowered for mark in _REFUSALS)


_REFUSALS = ("password authentication failed", "no password supplied", "no pg_hba.conf entry")

_REMEDIES = (
    (
        "password authentication failed",
        "PostgreSQL refused the user name or password; correct database_url",
    ),
    ("no password supplied", "PostgreSQL wants a password; add it to database_url"),
    (
        "no pg_hba.conf entry",
        "PostgreSQL does not let this user in from this host; see its pg_hba.conf",
    ),
    (
        "too many clients",
        "PostgreSQL has no free connection slot; lower the pool sizes or raise max_connections",
    ),
    (
        "connection refused",
        "Nothing answers at this address; start PostgreSQL or correct host and port",
    ),
    (
        "no such file or directory",
        "No server owns this socket; start PostgreSQL or correct the host",
    ),
    ("could not translate host", "The host name is unknown; correct the host in database_url"),
    ("failed to resolve host", "The host name is unknown; correct the host in database_url"),
    ("timeout", "The server did not answer in time; check host, port and the network"),
)


def describe(error: BaseException) -> str:
    """Say in one sentence what a database error means and what to do, without any password."""
    text = mask_url(" ".join(str(error).split()))
    lowered = text.lower()
    if "database" in lowered and "does not exist" in lowered:
        return f"The database does not exist; create it or correct database_url ({text})."
    for mark, remedy in _REMEDIES:
        if mark in lowered:
            return f"{remedy} ({text})."
    return text or type(error).__name__
