"""Database: the connection pools and dedicated connections of one process.

``Database`` owns all of the process's sockets. It opens nothing before the first use and shares nothing
across a fork.

A caller that finds no idle connection in a pool opens one and returns it to the pool afterwards. No thread or
task runs in the background, so forks and event loops need no clean-up, and the first send after a server
outage succeeds without delay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.abc import AdaptContext, PQGen
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.pq import TransactionStatus
from psycopg.types.datetime import TimestamptzLoader

from horsies.database_url import (
    DEFAULT_SCHEMA,
    SCHEMA_VARIABLE,
    is_embedded,
    libpq_url,
    search_path_in_options,
)
from horsies.db import embedded
from horsies.db.limits import Limits, answering
from horsies.db.schema import SAFE_SEARCH_PATH
from horsies.encryption import Payloads
from horsies.modules import Deferred

if TYPE_CHECKING:  # importing these modules at run time would load pydantic
    from horsies.config.postgres import PostgresConfig

logger = logging.getLogger("horsies.schema")
# The statements of this module import horsies.db.database.
payload_keeper: Any = Deferred("horsies.db.payload_keeper")

# How long a command or page waits for a connection. A frozen server accepts connections but never responds.
LIMITED_CONNECT_SECONDS = 5
# The maximum number of connections that one process opens for large payloads.
PAYLOAD_CONNECTIONS = 4
# How long a surplus connection of a pool may stay idle before it is closed.
SPARE_SECONDS = 60.0

Value = TypeVar("Value")
AnyConnection = TypeVar("AnyConnection", Connection[Any], AsyncConnection[Any])

# The settings that statements and psycopg's parsers rely on. They are set explicitly, because a database, a
# role or the environment may have other values. They are not part of the startup packet, because PgBouncer
# rejects them there even in session mode.
_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "search_path": SAFE_SEARCH_PATH,
}
_SESSION_SETTINGS = (
    "".join(f"SET {name} = {value}; " for name, value in _SETTINGS.items())
    + "SET default_transaction_isolation = 'read committed'"
).encode()
# Behind a pooler in transaction mode, every transaction begins with these two statements.
TRANSACTION_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
# The first statement of a read-only transaction whose statements all see the same snapshot.
ONE_STATE = b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
TRANSACTION_SETTINGS = (
    "SELECT "
    + ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in _SETTINGS.items()
    )
).encode()
# The first PostgreSQL version with a time limit for transactions.
_TRANSACTION_TIMEOUT_SINCE = 170_000


def time_limits(statement_ms: int, server_version: int) -> dict[str, str]:
    """The settings that replace the time limits of the database or role. Only statements are limited: a
    limit on transactions would end the session.
    """
    settings = {
        "statement_timeout": str(statement_ms),
        "idle_in_transaction_session_timeout": "0",
    }
    if server_version >= _TRANSACTION_TIMEOUT_SINCE:
        settings["transaction_timeout"] = "0"
    return settings


@dataclass(frozen=True, slots=True)
class Installation:
    """The schema that a connection works in, and whether the connection goes through a pooler in
    transaction mode. Behind such a pooler, each transaction begins with the statement ``settings``.

    ``payloads`` encrypts payload if the application has a codec, and keeps large payload outside the
    tasks' rows if it has a store.
    """

    schema: str = DEFAULT_SCHEMA
    is_pooled: bool = False
    settings: bytes = TRANSACTION_SETTINGS
    payloads: Payloads | None = None


class IsoTimestamptzLoader(TimestamptzLoader):
    """Parses times in ISO style, which TRANSACTION_SETTINGS select, regardless of the style that the
    session reports, because the server reports a changed style only at the end of the transaction.
    """

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, None)


class OwnConnection(Connection[Any]):
    """A connection that this process opened."""

    installation = Installation()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The names of the statements that ``pipeline.execute`` has prepared on this connection.
        self.prepared: set[bytes] = set()


class AsyncOwnConnection(AsyncConnection[Any]):
    """An asynchronous connection that this process opened."""

    installation = Installation()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prepared: set[bytes] = set()


class LimitedConnection(OwnConnection):
    """A connection that is closed if the server does not respond within a time limit."""

    silence_seconds = 60.0

    def wait(self, gen: PQGen[Value], *arguments: Any, **options: Any) -> Value:
        return super().wait(answering(self, gen, self.silence_seconds), *arguments, **options)


class AsyncLimitedConnection(AsyncOwnConnection):
    """An asynchronous connection that is closed if the server does not respond within a time limit."""

    silence_seconds = 60.0

    async def wait(self, gen: PQGen[Value], *arguments: Any, **options: Any) -> Value:
        watched = answering(self, gen, self.silence_seconds)
        return await super().wait(watched, *arguments, **options)


AnyOwnConnection = TypeVar("AnyOwnConnection", OwnConnection, AsyncOwnConnection)


def installation_of(connection: Connection[Any] | AsyncConnection[Any]) -> Installation:
    """Return the installation of a connection; for a connection that this package did not open, the
    default schema.
    """
    found: Installation = getattr(connection, "installation", OwnConnection.installation)
    return found


class PoolTimeout(psycopg.OperationalError):
    """No connection became available within the time limit."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of a pool: how many idle connections to keep, how many to open at most, how long to wait for
    a connection, and how long a connection lives.
    """

    kept: int
    most: int
    wait_seconds: float
    lifetime_seconds: float
    check: bool = True

    def exhausted(self) -> PoolTimeout:
        return PoolTimeout(
            f"All {self.most} connections were in use for {self.wait_seconds:g} seconds; "
            "raise pool_size or max_overflow."
        )


@dataclass(slots=True)
class Lent(Generic[AnyOwnConnection]):
    """A connection of a pool, lent or idle."""

    connection: AnyOwnConnection
    expires_at: float
    put_back_at: float = 0.0

    def expire(self) -> None:
        """Never lend this connection again, because it leads to a standby; a new connection may reach the
        primary.
        """
        self.expires_at = 0.0


class _Pool(Generic[AnyOwnConnection]):
    """The idle connections of a pool.

    The connection returned last is lent first, so the first connection in the list has been idle the
    longest.
    """

    _release: Callable[[], None]

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Lent[AnyOwnConnection]] = []
        self._closed = False

    def put(self, lent: Lent[AnyOwnConnection]) -> None:
        """Take a connection back and keep it unless it is broken. Close idle connections that have been
        idle too long.
        """
        try:
            lent.put_back_at = time.monotonic()
            usable = lent.connection.pgconn.transaction_status == TransactionStatus.IDLE
            with self._lock:
                if usable and not self._closed:
                    self._idle.append(lent)
                    surplus = self._pop_surplus()
                else:
                    surplus = lent
            if surplus is not None:
                surplus.connection.pgconn.finish()
        finally:
            self._release()

    def close(self) -> None:
        """Close idle connections now, and lent connections when they are returned. No event loop is needed.
        In a forked process, the parent's connections stay open.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for lent in idle if self._pid == os.getpid() else ():
            lent.connection.pgconn.finish()

    def __del__(self) -> None:
        self.close()

    def _take_idle(self) -> Lent[AnyOwnConnection] | None:
        """Return an idle connection, or None. Connections that are too old or that the server has closed
        are dropped.
        """
        while True:
            with self._lock:
                if not self._idle:
                    return None
                lent = self._idle.pop()
            is_closed = self._limits.check and is_readable(lent.connection.pgconn)
            if time.monotonic() < lent.expires_at and not is_closed:
                return lent
            lent.connection.pgconn.finish()

    def _admit(self, connection: AnyOwnConnection) -> Lent[AnyOwnConnection]:
        return Lent(connection, time.monotonic() + self._limits.lifetime_seconds)

    def _pop_surplus(self) -> Lent[AnyOwnConnection] | None:
        if len(self._idle) <= self._limits.kept:
            return None
        if self._idle[0].put_back_at > time.monotonic() - SPARE_SECONDS:
            return None
        return self._idle.pop(0)


class Pool(_Pool[OwnConnection]):
    """Lends connections to the threads of one process."""

    def __init__(self, connect: Callable[[], OwnConnection], limits: PoolLimits) -> None:
        super().__init__(limits)
        self._connect = connect
        # The pool counts its connections itself: a Ctrl-C inside a threading.Semaphore could leave the
        # semaphore's lock held forever.
        self._slots: SimpleQueue[None] = SimpleQueue()
        self._release = partial(self._slots.put, None)
        for _ in range(limits.most):
            self._release()

    @contextmanager
    def connection(self) -> Iterator[OwnConnection]:
        """Lend a connection for the duration of a with block."""
        lent = self.take()
        try:
            yield lent.connection
        except ReadOnlySqlTransaction:
            lent.expire()
            raise
        finally:
            self.put(lent)

    def take(self) -> Lent[OwnConnection]:
        """Lend a connection until ``put`` returns it. This makes a send 3 µs faster than a with block."""
        try:
            self._slots.get(timeout=self._limits.wait_seconds)
        except Empty:
            raise self._limits.exhausted() from None
        try:
            return self._take_idle() or self._admit(self._connect())
        except BaseException:
            self._release()
            raise


class AsyncPool(_Pool[AsyncOwnConnection]):
    """Lends connections to the coroutines of one event loop."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncOwnConnection]], limits: PoolLimits
    ) -> None:
        super().__init__(limits)
        self._connect = connect
        self._slots = asyncio.Semaphore(limits.most)
        self._release = self._slots.release

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncOwnConnection]:
        """Lend a connection for the duration of a with block."""
        lent = await self.take()
        try:
            yield lent.connection
        except ReadOnlySqlTransaction:
            lent.expire()
            raise
        finally:
            self.put(lent)

    async def take(self) -> Lent[AsyncOwnConnection]:
        """Lend a connection until ``put`` returns it."""
        if self._slots.locked():
            try:
                async with asyncio.timeout(self._limits.wait_seconds):
                    await self._slots.acquire()
            except TimeoutError as error:
                raise self._limits.exhausted() from error
        else:
            await self._slots.acquire()  # a free slot needs no timeout, which would cost 10 µs
        try:
            return self._take_idle() or self._admit(await self._connect())
        except BaseException:
            self._release()
            raise


def is_readable(pgconn: Any) -> bool:
    """Return whether an idle connection has input, which most likely means that the server has closed it.

    This costs about 2 µs. The usual SELECT 1 costs 80 µs, a third of a whole send.
    """
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    return bool(poller.poll(0))


# Pools inherited through a fork are kept here forever: if the garbage collector closed their connections,
# it would end sessions that the parent process still uses.
_inherited: list[object] = []


def _warn_of_search_path(config: PostgresConfig) -> None:
    """Warn if the environment sets a search_path, which has no effect on the tables of Horsies."""
    path = search_path_in_options(os.environ.get("PGOPTIONS", ""))
    if path is not None and "schema_name" not in config.model_fields_set:
        logger.warning(
            "PGOPTIONS sets a search_path, which does not choose the schema of the tables of horsies: "
            "they are in the schema %s; use PostgresConfig(schema=...) or %s for another one",
            config.schema_name,
            SCHEMA_VARIABLE,
        )


class Database:
    """All connections of one process to one database."""

    def __init__(
        self,
        config: PostgresConfig,
        role: str = "producer",
        *,
        migrates: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.config = config
        self.role = role
        self.connect_seconds = 10 if limits is None else LIMITED_CONNECT_SECONDS
        # The time limits of all connections. They suit commands and pages, because a person waits for these.
        self.limits = limits
        # Whether this process may create and change tables.
        self.migrates = migrates
        self._forget()
        _databases.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._urls: tuple[str, str] | None = None
        self._pool: Pool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}
        self._payload_pool: Pool | None = None

    def reset_after_fork(self) -> None:
        """Forget connections and locks that belong to the parent process."""
        if self._pool is not None or self._async_pools or self._payload_pool is not None:
            _inherited.append((self._pool, self._async_pools, self._payload_pool))
        self._forget()

    @cached_property
    def payloads(self) -> Payloads | None:
        """The settings for encryption and large payloads; None without a codec and a store."""
        has_store = self.config.store is not None
        return Payloads.of(self.config, payload_keeper.PayloadKeeper(self) if has_store else None)

    @property
    def installation(self) -> Installation:
        """The installation of this database, for connections without a pooler."""
        return Installation(self.config.schema_name, payloads=self.payloads)

    def urls(self) -> tuple[str, str]:
        """Return the URL for ordinary work and the URL for LISTEN and schema changes."""
        with self._lock:
            if self._urls is None:
                _warn_of_search_path(self.config)
                url = resolve_url(self.config.database_url)
                session = self.config.session_database_url
                self._urls = url, resolve_url(session) if session else url
        return self._urls

    def options(self, role: str) -> dict[str, Any]:
        """Return the connection parameters shared by all connections."""
        config = self.config
        options: dict[str, Any] = {
            "application_name": f"horsies:{role}",
            # Overrides the encoding of the database and of PGCLIENTENCODING, because ``Pipeline`` writes
            # UTF-8.
            "client_encoding": "UTF8",
            "connect_timeout": self.connect_seconds,
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

    def connect(
        self,
        role: str,
        *,
        session: bool = False,
        options: str | None = None,
        statement_ms: int | None = None,
    ) -> OwnConnection:
        """Open a dedicated connection with autocommit; with ``session`` it bypasses a pooler.

        ``options`` go into the startup packet. ``statement_ms`` replaces the time limits of the database
        and the role, unless the connection goes through a pooler.
        """
        parameters = self.options(role) | ({} if options is None else {"options": options})
        kind = OwnConnection if self.limits is None else LimitedConnection
        connection = kind.connect(self.urls()[session], **parameters)
        try:
            self._set_up(connection, session)
            if connection.installation.is_pooled:
                connection.adapters.register_loader("timestamptz", IsoTimestamptzLoader)
                connection.isolation_level = IsolationLevel.READ_COMMITTED
            else:
                limits = self._settings(connection, statement_ms)
                connection.execute(_SESSION_SETTINGS + _set_commands(limits))
        except BaseException:
            connection.close()
            raise
        return connection

    async def connect_async(self, role: str) -> AsyncOwnConnection:
        """Like ``connect``, but on the running event loop, and only for ordinary work."""
        kind = AsyncOwnConnection if self.limits is None else AsyncLimitedConnection
        connection = await kind.connect(self.urls()[0], **self.options(role))
        try:
            self._set_up(connection, session=False)
            if connection.installation.is_pooled:
                connection.adapters.register_loader("timestamptz", IsoTimestamptzLoader)
                await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
            else:
                limits = self._settings(connection)
                await connection.execute(_SESSION_SETTINGS + _set_commands(limits))
        except BaseException:
            await connection.close()
            raise
        return connection

    def _set_up(self, connection: OwnConnection | AsyncOwnConnection, session: bool) -> None:
        is_pooled = self.config.pgbouncer_transaction_mode and not session
        settings = TRANSACTION_SETTINGS
        if is_pooled:
            settings += set_local(self._settings(connection))
        connection.installation = Installation(
            self.config.schema_name, is_pooled, settings, self.payloads
        )
        if isinstance(connection, LimitedConnection | AsyncLimitedConnection):
            assert self.limits is not None
            seconds = self.limits.silence_seconds
            connection.silence_seconds = inf if seconds is None else seconds

    def _settings(
        self, connection: OwnConnection | AsyncOwnConnection, statement_ms: int | None = None
    ) -> dict[str, str]:
        """Return the settings for the time limits of a connection."""
        settings = {}
        if self.limits is not None:
            settings["lock_timeout"] = str(self.limits.lock_ms)
            statement_ms = statement_ms or self.limits.statement_ms
        if statement_ms is not None:
            settings |= time_limits(statement_ms, connection.info.server_version)
        return settings

    def connection(self) -> AbstractContextManager[OwnConnection]:
        """Lend a pooled synchronous connection."""
        return self.pool().connection()

    def connection_async(self) -> AbstractAsyncContextManager[AsyncOwnConnection]:
        """Lend a connection from the running event loop's pool."""
        return self.pool_async().connection()

    def pool(self) -> Pool:
        if (pool := self._pool) is not None:
            return pool
        with self._lock:
            if self._pool is None:
                self._pool = Pool(lambda: self.connect(self.role), self._limits())
            return self._pool

    def payload_pool(self) -> Pool:
        """Return the pool of connections for large payloads. It is separate, because its callers already hold
        a connection from ``pool`` and could otherwise wait for each other.
        """
        with self._lock:
            if self._payload_pool is None:
                limits = replace(self._limits(), kept=1, most=PAYLOAD_CONNECTIONS)
                self._payload_pool = Pool(lambda: self.connect("payloads"), limits)
            return self._payload_pool

    def pool_async(self) -> AsyncPool:
        loop = asyncio.get_running_loop()
        if (pool := self._async_pools.get(loop)) is None:
            self._drop_closed_loops()
            pool = self._async_pools[loop] = AsyncPool(
                lambda: self.connect_async(self.role), self._limits()
            )
        return pool

    def _drop_closed_loops(self) -> None:
        for loop in list(self._async_pools):
            if loop.is_closed() and (pool := self._async_pools.pop(loop, None)) is not None:
                pool.close()

    def _limits(self) -> PoolLimits:
        config = self.config
        kept, most = pool_sizes(config, self.role)
        check = config.worker_child_pool_check if self.role == "child" else config.pool_pre_ping
        return PoolLimits(kept, most, config.pool_timeout, config.pool_recycle, check)

    def close(self) -> None:
        """Close the synchronous pool; the next use opens a new one."""
        with self._lock:
            pool, self._pool = self._pool, None
            payload_pool, self._payload_pool = self._payload_pool, None
        for one in (pool, payload_pool):
            if one is not None:
                one.close()
        self._drop_closed_loops()

    def close_async(self) -> None:
        """Close the pool of the running event loop."""
        pool = self._async_pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close()


def _set_commands(settings: Mapping[str, str]) -> bytes:
    return "".join(f"; SET {name} = {value}" for name, value in settings.items()).encode()


def set_local(settings: Mapping[str, str]) -> bytes:
    """Return the settings of a transaction, as more columns of ``TRANSACTION_SETTINGS``."""
    return "".join(
        f", pg_catalog.set_config('{name}', '{value}', true)" for name, value in settings.items()
    ).encode()


# Weak references, because a Database object ends with its broker.
_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _reset_all() -> None:
    for database in _databases:
        database.reset_after_fork()


# Runs at the fork, before the child has a second thread, so that no two threads reset a Database at the same
# time.
os.register_at_fork(after_in_child=_reset_all)


def pool_sizes(config: PostgresConfig, role: str) -> tuple[int, int]:
    """Return how many connections a pool keeps and may open in this process. Worker children get small pools,
    because only task code that sends uses them and many children share a server.
    """
    if role == "child":
        return config.worker_child_pool_min_size, config.worker_child_pool_max_size
    kept, more = config.pool_size, config.max_overflow
    if role == "worker":
        kept = kept if config.worker_pool_size is None else config.worker_pool_size
        more = more if config.worker_max_overflow is None else config.worker_max_overflow
    return kept, kept + more


def resolve_url(url: str) -> str:
    """Return a URL that libpq can read; for an embedded:// URL, start or join the server first."""
    return embedded.start_or_join(url) if is_embedded(url) else libpq_url(url)
