"""The caller's transaction: find the psycopg connection inside a framework's connection object.

A send with ``transaction=`` inserts its row there, so it commits or rolls back with the caller's
work. A savepoint guards the insert: if it fails, the caller gets an error value and a transaction
that is still usable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import PipelineStatus, TransactionStatus

from horsies.db.database import AnyConnection

_SAVEPOINT = "SAVEPOINT horsies_send"
_RELEASE = "RELEASE SAVEPOINT horsies_send"
_ROLLBACK = "ROLLBACK TO SAVEPOINT horsies_send"


class UnusableTransactionError(Exception):
    """The object given as ``transaction=`` is not a connection this kind of send can use."""


def find_connection(transaction: object) -> Connection[Any]:
    """Return the synchronous psycopg connection behind a psycopg, SQLAlchemy or Django connection."""
    is_async_sqlalchemy = hasattr(transaction, "sync_session") or hasattr(
        transaction, "get_raw_connection"
    )
    if isinstance(transaction, AsyncConnection) or is_async_sqlalchemy:
        raise UnusableTransactionError("This transaction is asynchronous; use send_async with it.")
    found: Any = None if isinstance(transaction, type) else transaction
    if hasattr(found, "ensure_connection"):  # Django
        found.ensure_connection()
        found = found.connection
    elif hasattr(found, "get_bind"):  # a SQLAlchemy Session
        found = found.connection()
    if hasattr(found, "exec_driver_sql"):  # a SQLAlchemy Connection
        if not found.in_transaction():
            found.begin()  # as its own execute() does, so that its commit() commits our row
        found = found.connection.driver_connection
    return _usable(found, Connection, transaction)


async def find_connection_async(transaction: object) -> AsyncConnection[Any]:
    """Return the asynchronous psycopg connection behind a psycopg or SQLAlchemy connection."""
    found: Any = None if isinstance(transaction, type) else transaction
    if hasattr(found, "sync_session"):  # a SQLAlchemy AsyncSession
        found = await found.connection()
    if hasattr(found, "get_raw_connection"):  # a SQLAlchemy AsyncConnection
        if not found.in_transaction():
            await found.begin()
        found = (await found.get_raw_connection()).driver_connection
    return _usable(found, AsyncConnection, transaction)


def _usable(found: Any, kind: type[AnyConnection], transaction: object) -> AnyConnection:
    if not isinstance(found, kind):
        raise UnusableTransactionError(
            f"transaction= takes an open psycopg, SQLAlchemy (psycopg driver) or Django connection, "
            f"not {type(transaction).__name__}; send_async takes the asynchronous ones."
        )
    # In a pipeline, results come later and one failure skips all later statements, including the end
    # of a savepoint.
    if found.pgconn.pipeline_status != PipelineStatus.OFF:
        raise UnusableTransactionError(
            "This connection is in pipeline mode; leave the pipeline before sending with it."
        )
    if found._tpc is not None:
        raise UnusableTransactionError(
            "This connection is in a two-phase transaction, and PostgreSQL cannot prepare a transaction that "
            "notifies workers; send with another connection after the commit."
        )
    return found


@contextmanager
def savepoint(connection: Connection[Any]) -> Iterator[None]:
    """Keep the caller's transaction usable after a failed insert."""
    if not _in_transaction(connection):
        yield
        return
    with Cursor(connection) as cursor:
        cursor.execute(_SAVEPOINT)
        try:
            yield
        except BaseException:
            cursor.execute(_ROLLBACK)
            raise
        finally:
            cursor.execute(_RELEASE)


@asynccontextmanager
async def savepoint_async(connection: AsyncConnection[Any]) -> AsyncIterator[None]:
    """``savepoint`` on an asynchronous connection."""
    if not _in_transaction(connection):
        yield
        return
    async with AsyncCursor(connection) as cursor:
        await cursor.execute(_SAVEPOINT)
        try:
            yield
        except BaseException:
            await cursor.execute(_ROLLBACK)
            raise
        finally:
            await cursor.execute(_RELEASE)


def _in_transaction(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    # Without autocommit psycopg opens the transaction at the first statement, so an idle connection
    # counts too.
    return not connection.autocommit or connection.info.transaction_status != TransactionStatus.IDLE
