"""The dashboard's bounded read-only transactions, and the problems that end a request. Every read is one
transaction that cannot write, with short time limits for locks and statements, even behind a pooler. The
process uses at most four connections for all of its viewers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, OperationalError

from horsies.config.postgres import PostgresConfig
from horsies.db import blockers
from horsies.db.blockers import LockedError
from horsies.db.database import (
    TRANSACTION_SETTINGS,
    AsyncOwnConnection,
    Database,
    PoolTimeout,
    installation_of,
)
from horsies.db.errors import describe, is_transient
from horsies.db.limits import Limits, hang_up, silent
from horsies.db.statement import Script, Statement, drive_async
from horsies.result import Err
from horsies.tasks.broker import PostgresBroker

T = TypeVar("T")

CONNECTIONS_MAX = 4
STATEMENT_TIMEOUT_MS = 3_000
LOCK_TIMEOUT_MS = 500
POOL_WAIT_SECONDS = 5.0
# The server ends a statement earlier than this, so a longer silence means that it is frozen or cut
# off.
SILENCE_SECONDS = 8.0
# The time limit of a change that waits for locks; after it, the connection is closed, which undoes
# the change.
CHANGE_SECONDS = 30.0
CHANGE_LIMITS = Limits(lock_ms=5_000, statement_ms=25_000, silence_seconds=CHANGE_SECONDS)

# All facts of a page are read in one snapshot, so that its numbers agree.
_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LIMITS = (
    f"SELECT pg_catalog.set_config('statement_timeout', '{STATEMENT_TIMEOUT_MS}', true), "
    f"pg_catalog.set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)"
).encode()


class Problem(Exception):
    """Ends a request with an error page or, below ``/api``, with ``application/problem+json``."""

    status = 500
    code = "INTERNAL_ERROR"

    def __init__(self, sentence: str, *, code: str | None = None, **members: object) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code or self.code
        # Further members of the problem document, such as a task's current status.
        self.members = members


class BadRequest(Problem):
    """A filter or a value that the page does not accept."""

    status = 400
    code = "BAD_REQUEST"


class Unauthenticated(Problem):
    """The request is not authenticated."""

    status = 401
    code = "UNAUTHENTICATED"


class Forbidden(Problem):
    """The viewer lacks the permission, or the request did not come from a page of the dashboard."""

    status = 403
    code = "FORBIDDEN"


class NotFound(Problem):
    """The page, the task or the run does not exist."""

    status = 404
    code = "NOT_FOUND"


class Refused(Problem):
    """The task, run, queue or schedule is not in a state that allows the change."""

    status = 409
    code = "REFUSED"


class TookTooLong(Problem):
    """A statement exceeded its time limit. A costly panel catches this and shows a note."""

    status = 504
    code = "TOOK_TOO_LONG"


class Locked(TookTooLong):
    """Another session holds a lock; ``remedy`` is the statement that ends the session."""

    code = "DATABASE_LOCKED"


def locked(error: LockedError) -> Locked:
    """Return the problem for a lock that was not released in time."""
    first = error.blockers[0]
    return Locked(blockers.blocker_sentence(first), remedy=blockers.remedy_of(first), pid=first.pid)


class Unavailable(Problem):
    """The database cannot be reached, or it is not ready for this release."""

    status = 503
    code = "DATABASE_UNAVAILABLE"


def web_broker(config: PostgresConfig) -> PostgresBroker:
    """Return the dashboard's own broker: few connections, and never a migration."""
    pool = {"pool_size": 1, "max_overflow": CONNECTIONS_MAX - 1, "pool_timeout": POOL_WAIT_SECONDS}
    broker = PostgresBroker(config.model_copy(update=pool), role="web", migrates=False)
    broker.database = _WatchedDatabase(broker.config, "web", migrates=False, limits=CHANGE_LIMITS)
    return broker


class _WatchedDatabase(Database):
    """Closes the connections of a change that takes too long; see ``bounded_change``."""

    @asynccontextmanager
    async def connection_async(self) -> AsyncIterator[AsyncOwnConnection]:
        async with super().connection_async() as connection:
            if (deadline := _change_deadline.get()) is None:
                yield connection
                return
            timer = asyncio.get_running_loop().call_at(deadline, hang_up, connection)
            try:
                yield connection
            finally:
                timer.cancel()


# The loop time by which this request's change must be finished.
_change_deadline: ContextVar[float | None] = ContextVar("change_deadline", default=None)


@contextmanager
def bounded_change() -> Iterator[None]:
    """Limit the time of the changes inside the block; raise TookTooLong if a change was cut off."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CHANGE_SECONDS
    before = _change_deadline.set(deadline)
    try:
        yield
    except Unavailable as problem:
        if loop.time() < deadline:
            raise
        raise TookTooLong(
            f"The database did not answer for {CHANGE_SECONDS:g} s, and the connection was closed; look at "
            "the page again before you repeat the change."
        ) from problem
    finally:
        _change_deadline.reset(before)


class Reader:
    """Runs the scripts of pages on one broker's connections."""

    def __init__(self, broker: PostgresBroker) -> None:
        self._broker = broker
        self._is_ready = False

    async def read(self, script: Script[T]) -> T:
        """Run the script in one read-only transaction; raise a ``Problem`` if the database fails."""
        await self._require_schema()
        try:
            async with self._broker.database.connection_async() as connection:
                return await _read(connection, script, logged=self._broker.config.echo)
        except psycopg.errors.LockNotAvailable as error:
            named = await asyncio.to_thread(blockers.named, self._broker.database, error)
            raise _problem(named) from error
        except psycopg.Error as error:
            raise _problem(error) from error

    async def _require_schema(self) -> None:
        if self._is_ready:
            return
        ready = await self._broker.ensure_schema_initialized_async()
        if isinstance(ready, Err):
            error = ready.err_value
            if isinstance(error.exception, LockedError):
                raise locked(error.exception)
            raise Unavailable(error.message, retryable=error.retryable) from error.exception
        self._is_ready = True


async def _read(connection: AsyncConnection[Any], script: Script[T], *, logged: bool) -> T:
    installation = installation_of(connection)
    unpooled = replace(installation, is_pooled=False)

    async def execute(statement: Statement[Any, Any], params: Any) -> list[Any]:
        with _answering(connection):
            return await statement.run_async(connection, params, unpooled)

    try:
        # Send the settings with the first statement of the script, in one round trip.
        async with connection.pipeline() as pipeline:
            await connection.execute(_BEGIN)
            await connection.execute(_LIMITS)
            if installation.is_pooled:
                await connection.execute(TRANSACTION_SETTINGS)
            answer = await drive_async(execute, script, logged=logged)
            await connection.execute(b"COMMIT")
            with _answering(connection):
                await pipeline.sync()
        return answer
    except BaseException:
        with suppress(psycopg.Error):
            await connection.rollback()
        raise


@contextmanager
def _answering(connection: AsyncConnection[Any]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    timer = loop.call_later(SILENCE_SECONDS, hang_up, connection)
    try:
        yield
    except OperationalError as error:
        if loop.time() < timer.when():
            raise
        raise silent(SILENCE_SECONDS) from error
    finally:
        timer.cancel()


def _problem(error: Exception) -> Problem:
    if isinstance(error, LockedError):
        return locked(error)
    if isinstance(error, psycopg.errors.LockNotAvailable):
        seconds = LOCK_TIMEOUT_MS / 1000
        return TookTooLong(f"A lock on the tables was not free within {seconds:g} s; try again.")
    if isinstance(error, psycopg.errors.QueryCanceled):
        seconds = STATEMENT_TIMEOUT_MS / 1000
        return TookTooLong(
            f"The database did not answer within {seconds:g} s; choose a shorter range or narrow the "
            "filter if there is one, or look for the load of the server."
        )
    if isinstance(error, psycopg.DataError) and error.sqlstate is None:  # refused before sending
        return BadRequest(f"{error}.")
    if isinstance(error, PoolTimeout):
        sentence = (
            f"All {CONNECTIONS_MAX} connections of the dashboard are in use: many viewers ask at once, or "
            "the database does not answer; try again."
        )
        return Unavailable(sentence, retryable=True)
    return Unavailable(describe(error), retryable=is_transient(error))
