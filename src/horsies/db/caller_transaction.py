"""The caller's transaction: execute statements on another library's connection.

If a framework's object contains a psycopg connection, that connection is used directly. With asyncpg, or with
SQLAlchemy on another driver, the statements run through that library.

A send with ``transaction=`` inserts its row in the caller's transaction, so the row commits or rolls back
with the caller's work. A savepoint guards the insert: if the insert fails, the caller gets an error value
and its transaction stays usable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import PipelineStatus, TransactionStatus

from horsies.db.database import AnyConnection, Installation
from horsies.db.statement import Execute, ExecuteAsync, Statement

_SAVEPOINT = "SAVEPOINT horsies_send"
_ROLLBACK = "ROLLBACK TO SAVEPOINT horsies_send"
_RELEASE = "RELEASE SAVEPOINT horsies_send"
_TWO_PHASE = (
    "This connection is in a two-phase transaction, and PostgreSQL cannot prepare a transaction that "
    "notifies workers; send with another connection after the commit."
)
_CLOSED = "This connection is closed; send while it is open, before its `with` block ends."
_PIPELINE = "This connection is in pipeline mode; leave the pipeline before sending with it."
_NO_TRANSACTION = (
    "This connection commits every statement by itself, so the task would not be part of a transaction; "
    "open a transaction first, or leave transaction= out."
)
# The table, the function or the schema does not exist.
_MISSING_STATES = ("42P01", "42883", "3F000")


class UnusableTransactionError(Exception):
    """The object passed as ``transaction=`` is not a connection that this kind of send can use."""


class DriverError(Exception):
    """An error from the caller's driver. Contains only the primary message, without parameters or rows."""

    def __init__(self, error: BaseException) -> None:
        # SQLAlchemy wraps the driver's error and quotes the parameters; its asyncpg adapter wraps the
        # error a second time.
        inner = getattr(error, "orig", None) or error
        inner = inner.__cause__ or inner
        primary = getattr(getattr(inner, "diag", None), "message_primary", None)
        super().__init__(
            primary or getattr(inner, "message", None) or str(inner).partition("\n")[0]
        )
        self.sqlstate = getattr(inner, "sqlstate", None) or getattr(inner, "pgcode", None)
        # Whether SQLAlchemy has found that the connection was lost.
        self.connection_invalidated = getattr(error, "connection_invalidated", False)


def leads_elsewhere(error: BaseException) -> bool:
    """Return whether the caller's connection leads to a database without the application's tables."""
    return getattr(error, "sqlstate", None) in _MISSING_STATES


def is_nested(transaction: object) -> bool:
    """Return whether the caller is inside a savepoint, which could be rolled back without its transaction."""
    found: Any = getattr(transaction, "sync_session", transaction)
    if hasattr(found, "ensure_connection"):  # Django
        return any(found.savepoint_ids)
    nested = getattr(found, "in_nested_transaction", None)  # SQLAlchemy
    return nested is not None and bool(nested())


@contextmanager
def borrowed(transaction: object, within: Installation) -> Iterator[Execute]:
    """Execute statements in the caller's transaction, inside a savepoint."""
    found = _find(transaction)
    if _is_sqlalchemy(found):
        with _translated(), found.begin_nested():
            yield lambda statement, params: _fetch(found, statement, params, within)
        return
    connection = _usable(found, Connection, transaction)
    with savepoint(connection):
        yield lambda statement, params: statement.run(connection, params, within)


@asynccontextmanager
async def borrowed_async(transaction: object, within: Installation) -> AsyncIterator[ExecuteAsync]:
    """Like ``borrowed``, but on an asynchronous connection."""
    found = await _find_async(transaction)
    if _is_asyncpg(found):
        with _translated():
            _refuse_if(found.is_closed(), _CLOSED)
            _refuse_if(not found.is_in_transaction(), _NO_TRANSACTION)
            async with found.transaction():  # a savepoint inside asyncpg's open transaction
                yield lambda statement, params: _fetch_asyncpg(found, statement, params, within)
    elif _is_sqlalchemy_async(found):
        with _translated():
            async with found.begin_nested():
                yield lambda statement, params: _fetch_async(found, statement, params, within)
    else:
        connection = _usable(found, AsyncConnection, transaction)
        async with savepoint_async(connection):
            yield lambda statement, params: statement.run_async(connection, params, within)


def _find(transaction: object) -> Any:
    """Return the psycopg connection inside a psycopg, SQLAlchemy or Django connection, or the
    SQLAlchemy connection if it uses another driver.
    """
    if (
        isinstance(transaction, AsyncConnection)
        or _is_asyncpg(transaction)
        or hasattr(transaction, "sync_session")
        or getattr(transaction, "is_asynchronous", False) is True
        or _is_sqlalchemy_async(transaction)
    ):
        raise UnusableTransactionError(
            f"This {type(transaction).__name__} is asynchronous: use send_async or start_async with it, "
            f"or pass a {_synchronous_kind(transaction)}."
        )
    found: Any = None if isinstance(transaction, type) else transaction
    if hasattr(found, "fencing_token"):  # a task's transaction
        return found.connection
    if hasattr(found, "ensure_connection"):  # Django
        found.ensure_connection()
        _refuse_if(_commits_alone(found.connection), _NO_TRANSACTION)
        return found.connection
    if hasattr(found, "get_bind"):  # a SQLAlchemy Session
        _refuse_ended(found, found() if hasattr(found, "registry") else found)
        found = found.connection()
    if not _is_sqlalchemy(found):
        return found
    _refuse_if(found.closed, _CLOSED)
    _refuse_if(_commits_alone(found.connection.dbapi_connection), _NO_TRANSACTION)
    if not found.in_transaction():
        found.begin()  # as SQLAlchemy's execute() does, so that the session's commit() commits our row
    driver = found.connection.driver_connection
    if isinstance(driver, Connection):
        return driver
    _refuse_if(hasattr(found.get_transaction(), "xid"), _TWO_PHASE)
    return found


def _synchronous_kind(transaction: object) -> str:
    name = type(transaction).__name__
    return name.removeprefix("Async") if name.startswith("Async") else "synchronous connection"


async def _find_async(transaction: object) -> Any:
    found: Any = None if isinstance(transaction, type) else transaction
    if getattr(found, "is_asynchronous", False) is True:  # a task's transaction
        return await found.connection()
    if hasattr(found, "sync_session"):  # a SQLAlchemy AsyncSession
        _refuse_ended(found, found.sync_session)
        found = await found.connection()
    if not _is_sqlalchemy_async(found):
        _refuse_synchronous(found)
        return found
    _refuse_if(found.closed, _CLOSED)
    raw = await found.get_raw_connection()
    _refuse_if(_commits_alone(raw.dbapi_connection), _NO_TRANSACTION)
    if not found.in_transaction():
        await found.begin()
    driver = raw.driver_connection
    return driver if isinstance(driver, AsyncConnection) else found


def _refuse_ended(given: object, session: Any) -> None:
    """Reject a SQLAlchemy session that was closed: it would begin a transaction that is never committed.

    A closed session looks like a session after a commit. A new session also looks the same, but unlike a
    closed one it has not dispatched any events yet.
    """
    if "dispatch" in vars(session) and not session.in_transaction():
        name = type(given).__name__
        raise UnusableTransactionError(
            f"This {name} has no open transaction: it is closed, or its last transaction has ended; "
            "begin one first, with `session.begin()`."
        )


def _refuse_synchronous(found: Any) -> None:
    is_django = hasattr(found, "ensure_connection")
    if (
        is_django
        or isinstance(found, Connection)
        or hasattr(found, "fencing_token")
        or hasattr(found, "get_bind")
        or _is_sqlalchemy(found)
    ):
        name = type(found).__name__
        other = "" if is_django else f", or pass an Async{name}"
        raise UnusableTransactionError(
            f"This {name} is synchronous: use send or start with it{other}."
        )


def _refuse_if(is_wrong: bool, problem: str) -> None:
    if is_wrong:
        raise UnusableTransactionError(problem)


def _commits_alone(connection: Any) -> bool:
    """Return whether the driver's connection has no open transaction and commits every statement alone."""
    is_autocommit = getattr(connection, "autocommit", False) is True
    if not isinstance(connection, Connection | AsyncConnection):
        return is_autocommit
    # Without autocommit, psycopg opens a transaction at the first statement, so even an idle connection
    # counts as inside one.
    return is_autocommit and connection.info.transaction_status == TransactionStatus.IDLE


def _is_sqlalchemy(found: Any) -> bool:
    return hasattr(found, "exec_driver_sql")


def _is_sqlalchemy_async(found: object) -> bool:
    return hasattr(found, "get_raw_connection")


def _is_asyncpg(found: object) -> bool:
    is_class = isinstance(found, type)
    return not is_class and hasattr(found, "is_in_transaction") and hasattr(found, "fetchrow")


@contextmanager
def _translated() -> Iterator[None]:
    """Raise other drivers' errors as DriverError."""
    try:
        yield
    except Exception as error:
        is_of_driver = type(error).__module__.partition(".")[0] in ("sqlalchemy", "asyncpg")
        if not is_of_driver:
            raise
        raise DriverError(error) from None


def _fetch(
    connection: Any, statement: Statement[Any, Any], params: Any, within: Installation
) -> list[Any]:
    stored = statement.stored(params, within.payloads)
    result = connection.exec_driver_sql(*_driver_sql(connection, statement, stored, within))
    rows = statement.rows(result.fetchall() if statement.has_rows else ())
    return statement.read(rows, within.payloads)


async def _fetch_async(
    connection: Any, statement: Statement[Any, Any], params: Any, within: Installation
) -> list[Any]:
    stored = await statement.stored_async(params, within.payloads)
    result = await connection.exec_driver_sql(*_driver_sql(connection, statement, stored, within))
    rows = statement.rows(result.fetchall() if statement.has_rows else ())
    return await statement.read_async(rows, within.payloads)


async def _fetch_asyncpg(
    connection: Any, statement: Statement[Any, Any], params: Any, within: Installation
) -> list[Any]:
    stored = await statement.stored_async(params, within.payloads)
    found = await connection.fetch(statement.numbered(within.schema).decode(), *stored)
    return await statement.read_async(statement.rows(found), within.payloads)


def _driver_sql(
    connection: Any, statement: Statement[Any, Any], params: Any, within: Installation
) -> tuple[str, Any]:
    """Return a statement's text and parameters in the style of the connection's driver."""
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise UnusableTransactionError(
            f"This connection belongs to {dialect.name}; tasks are stored in PostgreSQL."
        )
    if dialect.paramstyle == "numeric_dollar":
        return statement.numbered(within.schema).decode(), tuple(params)
    if dialect.paramstyle == "pyformat":
        return statement.query(within.schema).decode(), statement.mapping(params)
    return statement.positional(params, within.schema)


def _usable(found: Any, kind: type[AnyConnection], transaction: object) -> AnyConnection:
    if not isinstance(found, kind):
        raise UnusableTransactionError(
            f"transaction= takes an open psycopg, asyncpg, SQLAlchemy or Django connection, "
            f"not {type(transaction).__name__}; send_async takes the asynchronous ones."
        )
    _refuse_if(found.closed and not found.broken, _CLOSED)
    # In a pipeline, a failure skips all later statements, including the one that ends the savepoint.
    _refuse_if(found.pgconn.pipeline_status != PipelineStatus.OFF, _PIPELINE)
    _refuse_if(found._tpc is not None, _TWO_PHASE)
    _refuse_if(_commits_alone(found), _NO_TRANSACTION)
    return found


@contextmanager
def savepoint(connection: Connection[Any]) -> Iterator[None]:
    """Keep the caller's transaction usable after a failed insert."""
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
    """Like ``savepoint``, but on an asynchronous connection."""
    async with AsyncCursor(connection) as cursor:
        await cursor.execute(_SAVEPOINT)
        try:
            yield
        except BaseException:
            await cursor.execute(_ROLLBACK)
            raise
        finally:
            await cursor.execute(_RELEASE)
