"""The session of ``tx.connection``, in which a task writes and the library records the task's outcome.

Unlike the library's other sessions, this session has the settings of the database and the role, so that a
task's SQL finds its tables. The library begins the transaction, executes the statements that record the
outcome last, and commits. The task itself can only roll back part of the transaction, to a savepoint. The
child's next task uses the session again, after its settings were reset.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg._preparing import PrepareManager
from psycopg.errors import InvalidTextRepresentation
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.sql import Composable

from horsies.db.database import (
    AsyncOwnConnection,
    AsyncPool,
    Database,
    OwnConnection,
    Pool,
    PoolLimits,
)
from horsies.db.own_statements import OwnStatements
from horsies.db.pipeline import given_options
from horsies.db.statement import Step
from horsies.db.statements.transactions import require_mark, use_session_role
from horsies.errors import TransactionMisuse

ROLE = "child-tx"
# How often the server checks whether the client of a running statement still exists. If a child dies during a
# long statement, the transaction keeps its locks, and the task is not recovered, until the next check.
CLIENT_CHECK_MS = 1_000
# How long a session may be idle between recording the outcome and the COMMIT.
IDLE_AFTER_RECORD_MS = 2_000
# How long the server may take to end a statement that was interrupted because the task was stopped.
CANCEL_SECONDS = 1.0
# Undoes the previous task's settings, role, temporary tables, cursors, channels and locks. It runs in a
# separate transaction of the same message, because DISCARD takes a snapshot, after which the task could no
# longer choose its isolation level.
_CLEAN = (
    b"BEGIN; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; DISCARD TEMP; CLOSE ALL; UNLISTEN *; "
    b"SELECT pg_catalog.pg_advisory_unlock_all(); COMMIT; "
)
_BY_ITSELF = (
    "the transaction commits with the outcome of the task, when its function returns a success"
)
_TO_ROLL_BACK = (
    "raise an exception or return an error to roll back, or use `with tx.connection.transaction():` for a "
    "part"
)
ENDED_BY_TASK = "the task has ended it; leave COMMIT and ROLLBACK out"
OVER = "The task of this transaction has ended; use it before the function returns."
_FORKED = (
    "tx.connection belongs to the process of the task; a forked process opens its own connection."
)
_BUSY = "a statement of another thread runs in it; wait for the thread before the function returns"
_OPEN_BLOCK = "a `with tx.connection.transaction():` block is still open"
_WITHOUT_TRIGGERS = (
    "session_replication_role is not 'origin', so that the triggers that notify workers and advance runs "
    "would not fire; reset it before the function returns"
)
_REFUSALS = {
    "commit": f"commit() is refused on tx.connection: {_BY_ITSELF}.",
    "rollback": f"rollback() is refused on tx.connection: {_TO_ROLL_BACK}.",
    "close": f"close() is refused on tx.connection: {_BY_ITSELF}.",
    "autocommit": f"tx.connection has no autocommit: {_BY_ITSELF}.",
    "tpc_begin": "tx.connection has no two-phase commit: PostgreSQL cannot prepare a transaction that "
    "notifies workers.",
}
_REASONS = {
    "COMMIT": _BY_ITSELF,
    "END": _BY_ITSELF,
    "DEALLOCATE ALL": "the session holds prepared statements of the library; name the statement",
}
# Matches a statement that ends the transaction; a rollback to a savepoint does not end it. If a task ends the
# transaction behind a semicolon, in a function, or below psycopg, the check for the transaction's mark
# detects this later.
_ENDING = re.compile(
    r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
    r"(commit|end|abort|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b)|prepare\s+transaction"
    r"|deallocate\s+(?:prepare\s+)?all)\b",
    re.IGNORECASE | re.DOTALL,
)


class _Loan:
    """Permission for a task to use its session, in its own process and until its function has returned."""

    __slots__ = ("_pid", "is_over")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_over = False

    @property
    def is_forked(self) -> bool:
        return self._pid != os.getpid()

    def check(self) -> None:
        if self.is_over:
            raise TransactionMisuse(OVER)
        if self.is_forked:
            raise TransactionMisuse(_FORKED)


def _refuse(what: str) -> NoReturn:
    raise TransactionMisuse(_REFUSALS[what])


def _refuse_end(query: Any) -> None:
    """Refuse a statement that would end the transaction or deallocate the library's prepared statements."""
    if isinstance(query, bytes):
        query = query.decode(errors="replace")
    elif isinstance(query, Composable):
        query = query.as_string()
    if isinstance(query, str) and (found := _ENDING.match(query)):
        word = " ".join(found[1].upper().split())
        why = _REASONS.get(word, _TO_ROLL_BACK)
        raise TransactionMisuse(f"{word} is refused on tx.connection: {why}.")


class TaskCursor(Cursor[Any]):
    """A ``tx.connection`` cursor."""

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Self:
        _refuse_end(query)
        return super().execute(query, *arguments, **options)

    def executemany(self, query: Any, *arguments: Any, **options: Any) -> None:
        _refuse_end(query)
        super().executemany(query, *arguments, **options)

    def stream(self, query: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        _refuse_end(query)
        return super().stream(query, *arguments, **options)


class AsyncTaskCursor(AsyncCursor[Any]):
    """``TaskCursor`` for a coroutine."""

    async def execute(self, query: Any, *arguments: Any, **options: Any) -> Self:
        _refuse_end(query)
        return await super().execute(query, *arguments, **options)

    async def executemany(self, query: Any, *arguments: Any, **options: Any) -> None:
        _refuse_end(query)
        await super().executemany(query, *arguments, **options)

    def stream(self, query: Any, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        _refuse_end(query)
        return super().stream(query, *arguments, **options)


class TaskConnection(Connection[Any]):
    """The connection object for the task's code. Only the library ends the transaction, and after it the
    task's access to the session. This object shares the state of the library's connection. A thread or
    coroutine that outlives the task still has this object but can no longer use the session through it.
    """

    loan: _Loan

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        self.loan.check()  # every psycopg statement passes through here, while the connection is locked
        return super().wait(gen, *arguments, **options)

    def cancel(self) -> None:
        self.loan.check()
        super().cancel()

    def cancel_safe(self, **options: Any) -> None:
        self.loan.check()
        super().cancel_safe(**options)

    def commit(self) -> NoReturn:
        _refuse("commit")

    def rollback(self) -> NoReturn:
        _refuse("rollback")

    def close(self) -> NoReturn:
        _refuse("close")

    def set_autocommit(self, value: bool) -> NoReturn:
        _refuse("autocommit")

    def tpc_begin(self, xid: Any) -> NoReturn:
        _refuse("tpc_begin")


class AsyncTaskConnection(AsyncConnection[Any]):
    """``TaskConnection`` for a coroutine."""

    loan: _Loan

    async def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        self.loan.check()
        return await super().wait(gen, *arguments, **options)

    def cancel(self) -> None:
        self.loan.check()
        super().cancel()

    async def cancel_safe(self, **options: Any) -> None:
        self.loan.check()
        await super().cancel_safe(**options)

    async def commit(self) -> NoReturn:
        _refuse("commit")

    async def rollback(self) -> NoReturn:
        _refuse("rollback")

    async def close(self) -> NoReturn:
        _refuse("close")

    async def set_autocommit(self, value: bool) -> NoReturn:
        _refuse("autocommit")

    async def tpc_begin(self, xid: Any) -> NoReturn:
        _refuse("tpc_begin")


AnyTaskConnection: TypeAlias = TaskConnection | AsyncTaskConnection
View = TypeVar("View", TaskConnection, AsyncTaskConnection)


class SessionConnection(OwnConnection):
    """The library's connection object of a session for task transactions.

    ``own`` executes the library's statements in it.
    """

    # Whether a pooler gives the server's sessions to other clients between two transactions.
    is_pooled = False
    # Whether a task has used the session.
    is_used = False
    # The number of uses after which psycopg prepares a task's statement.
    prepares_at: int | None = None
    own: OwnStatements


class AsyncSessionConnection(AsyncOwnConnection):
    """``SessionConnection`` for coroutines."""

    is_pooled = False
    is_used = False
    prepares_at: int | None = None


class Recorded(NamedTuple):
    """Whether the last statement returned a row, and why the transaction cannot commit, if it cannot."""

    problem: str | None
    is_owned: bool = False


class TaskSession:
    """The session of one attempt, from BEGIN to COMMIT or ROLLBACK."""

    def __init__(self, connection: SessionConnection, mark: str) -> None:
        self._connection = connection
        self._mark = mark
        self._loan = _Loan()
        _forget_task(connection)
        self.lent = _view(TaskConnection, connection, self._loan)
        self.lent.cursor_factory = TaskCursor

    def begin(self) -> None:
        self._connection.own.command(_begin_command(self._mark, self._connection))
        _refuse_standby(self._connection)

    @property
    def is_forked(self) -> bool:
        return self._loan.is_forked

    @property
    def is_lost(self) -> bool:
        """Return whether the session, and with it the transaction, was lost."""
        return _is_lost(self._connection)

    def end_loan(self) -> str | None:
        """End the task's access to its connection. Return the reason why the transaction cannot commit,
        or None.
        """
        if not self._connection.lock.acquire(blocking=False):
            return _BUSY
        try:
            self._loan.is_over = True
        finally:
            self._connection.lock.release()
        return _problem_of(self._connection, self.lent)

    def finish(self, steps: Sequence[Step]) -> None:
        """Execute the statements that record the outcome, and the COMMIT, in one round trip.

        The last statement checks that only the outcome of this attempt is committed. If the check fails,
        the statement raises an error and the server skips the COMMIT; ``refusal_of`` returns the reason.
        """
        self._connection.own.commit([_SESSION_ROLE, *steps])

    def record(self, steps: Sequence[Step]) -> Recorded:
        """Execute statements of the library whose rows decide whether to call ``commit``."""
        try:
            for statement, params in [require_mark(self._mark), *steps]:
                rows = statement.run(self._connection, params)
        except InvalidTextRepresentation as error:
            return _unrecorded(error)
        return Recorded(None, bool(rows))

    def commit(self) -> None:
        self._connection.own.command(b"COMMIT")

    def give_up(self) -> None:
        """Roll back without raising an error. If the session cannot roll back, it is closed, so that the
        server rolls back.
        """
        self._loan.is_over = True
        connection, pgconn = self._connection, self._connection.pgconn
        if connection.own.is_doubtful or pgconn.pipeline_status != PipelineStatus.OFF:
            pgconn.finish()
        with suppress(psycopg.Error):
            # A stop has interrupted a statement, or a thread of the task is executing one.
            if pgconn.transaction_status == TransactionStatus.ACTIVE:
                connection.cancel_safe(timeout=CANCEL_SECONDS)
            elif pgconn.transaction_status != TransactionStatus.IDLE:
                connection.rollback()
                return
        if connection.lock.acquire(timeout=CANCEL_SECONDS):
            connection.lock.release()
        if pgconn.transaction_status != TransactionStatus.IDLE:
            pgconn.finish()


class AsyncTaskSession:
    """``TaskSession`` for a coroutine."""

    def __init__(self, connection: AsyncSessionConnection, mark: str) -> None:
        self._connection = connection
        self._mark = mark
        self._loan = _Loan()
        _forget_task(connection)
        self.lent = _view(AsyncTaskConnection, connection, self._loan)
        self.lent.cursor_factory = AsyncTaskCursor

    async def begin(self) -> None:
        command = _begin_command(self._mark, self._connection)
        await self._connection.execute(command, prepare=False)
        _refuse_standby(self._connection)

    @property
    def is_forked(self) -> bool:
        return self._loan.is_forked

    @property
    def is_lost(self) -> bool:
        return _is_lost(self._connection)

    def end_loan(self) -> str | None:
        if self._connection.lock.locked():
            return _BUSY
        self._loan.is_over = True
        return _problem_of(self._connection, self.lent)

    async def finish(self, steps: Sequence[Step]) -> None:
        connection = self._connection
        async with connection.pipeline():
            for statement, params in [_SESSION_ROLE, *steps]:
                query = statement.query(connection.installation.schema)
                stored = await statement.stored_async(params, connection.installation.payloads)
                await connection.execute(query, statement.mapping(stored))
            ended = await connection.execute("COMMIT", prepare=False)
        if ended.statusmessage != "COMMIT":
            raise psycopg.OperationalError("the server answered COMMIT with a rollback")

    async def record(self, steps: Sequence[Step]) -> Recorded:
        try:
            for statement, params in [require_mark(self._mark), *steps]:
                rows = await statement.run_async(self._connection, params)
        except InvalidTextRepresentation as error:
            return _unrecorded(error)
        return Recorded(None, bool(rows))

    async def commit(self) -> None:
        await self._connection.execute("COMMIT", prepare=False)

    async def give_up(self) -> None:
        self._loan.is_over = True
        connection, pgconn = self._connection, self._connection.pgconn
        with suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(2 * CANCEL_SECONDS):
                if connection.lock.locked():  # a coroutine of the task is executing a statement
                    await connection.cancel_safe(timeout=CANCEL_SECONDS)
                is_open = pgconn.transaction_status != TransactionStatus.IDLE
                if is_open and pgconn.pipeline_status == PipelineStatus.OFF:
                    await connection.rollback()  # this waits for the connection's lock
        self.abandon()

    def abandon(self) -> None:
        """Close the session if its transaction is still open, so that the server rolls back."""
        self._loan.is_over = True
        pgconn = self._connection.pgconn
        if pgconn.transaction_status == TransactionStatus.IDLE and pgconn.status == ConnStatus.OK:
            return
        if pgconn.status == ConnStatus.OK:
            # Otherwise a coroutine that still waits for this socket would wait for the next file with the
            # same descriptor number.
            loop = asyncio.get_running_loop()
            loop.remove_reader(pgconn.socket)
            loop.remove_writer(pgconn.socket)
        pgconn.finish()


AnyTaskSession: TypeAlias = TaskSession | AsyncTaskSession


def _forget_task(connection: SessionConnection | AsyncSessionConnection) -> None:
    """Undo the changes that the previous task made to psycopg's connection object."""
    connection._notice_handlers.clear()
    connection._notify_handlers.clear()
    connection._notifies_backlog = deque()
    connection._prepared.prepare_threshold = connection.prepares_at
    connection._prepared.prepared_max = PrepareManager.prepared_max


def _view(kind: type[View], connection: Any, loan: _Loan) -> View:
    """Return a new object of this kind that shares a connection's state."""
    view: Any = kind.__new__(kind)
    view.__dict__.update(connection.__dict__)
    view.loan = loan
    view._pool = None  # psycopg warns when a connection without a pool is not closed
    view._adapters = None  # adapters that the task registers stay in this object
    found: View = view
    return found


def _begin_command(mark: str, connection: SessionConnection | AsyncSessionConnection) -> bytes:
    """Return the commands that begin a task's transaction, preceded by the commands that clean up after the
    previous task.
    """
    first = _CLEAN if connection.is_used and not connection.is_pooled else b""
    connection.is_used = True
    name = f"horsies:{ROLE} {mark.partition('/')[0]}"  # operators and commands find the session by this name
    settings = f"SET LOCAL horsies.attempt = '{mark}'; SET LOCAL application_name = '{name}'"
    return first + f"BEGIN; {settings}".encode()


# Executed before the statements that record an outcome.
_SESSION_ROLE = use_session_role()
# Matches the end of the error of a failed check. No other statement in the same group has a cast that could
# fail with such a text.
_REFUSED = re.compile(r'"horsies: (\w+)"$')
_PROBLEMS = {"ended": ENDED_BY_TASK, "replica": _WITHOUT_TRIGGERS}
LOST = "lost"


def refusal_of(error: BaseException) -> str | None:
    """Return the reason why a check prevented the COMMIT: a sentence, or LOST if another worker has the
    task. Return None for any other error.
    """
    text = error.diag.message_primary if isinstance(error, InvalidTextRepresentation) else None
    found = _REFUSED.search(text or "")
    return None if found is None else _PROBLEMS.get(found[1], found[1])


def _unrecorded(error: InvalidTextRepresentation) -> Recorded:
    if (refusal := refusal_of(error)) is None:
        raise error
    return Recorded(refusal)


def _is_lost(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    return bool(connection.closed or connection.pgconn.status != ConnStatus.OK)


def _refuse_standby(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Close a session whose server is read-only: after a failover, the next session may reach the primary."""
    if connection.pgconn.parameter_status(b"in_hot_standby") == b"on":
        connection.pgconn.finish()
        raise psycopg.OperationalError("the session leads to a standby, which takes no writes")


def _problem_of(
    connection: Connection[Any] | AsyncConnection[Any], lent: AnyTaskConnection
) -> str | None:
    """Return the reason why the transaction of a connected session cannot commit, or None."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return "it is in pipeline mode; leave the pipeline before the function returns"
    status = connection.pgconn.transaction_status
    if status == TransactionStatus.INERROR:
        return (
            "a statement in it failed; let the exception pass, or run the statement inside "
            "`with tx.connection.transaction():`"
        )
    if status == TransactionStatus.ACTIVE:
        return _BUSY
    if status != TransactionStatus.INTRANS:
        return ENDED_BY_TASK
    return _OPEN_BLOCK if lent._num_transactions else None


def open_pool(database: Database, most: int) -> Pool:
    """Return the pool of sessions for the transactions of a child's tasks; the child runs up to `most`
    tasks at a time.
    """
    return Pool(lambda: _connect(database), _limits(database, most))


def open_pool_async(database: Database, most: int) -> AsyncPool:
    """Like ``open_pool``, but for the coroutines of one event loop."""
    return AsyncPool(lambda: _connect_async(database), _limits(database, most))


def _limits(database: Database, most: int) -> PoolLimits:
    config = database.config
    return PoolLimits(most, most, config.pool_timeout, config.pool_recycle)


def _connect(database: Database) -> SessionConnection:
    connection = SessionConnection.connect(database.urls()[0], **_parameters(database))
    connection.installation = database.installation
    connection.is_pooled = database.config.pgbouncer_transaction_mode
    connection.prepares_at = connection.prepare_threshold
    connection.own = OwnStatements(connection, prepared=not connection.is_pooled)
    _keep_statements(connection)
    return connection


def _keep_statements(connection: SessionConnection) -> None:
    """Keep the library's prepared statements: after a DROP or a rollback, psycopg deallocates only statements
    that it has prepared itself.
    """
    statements = _TaskStatements()
    connection._prepared = statements


class _TaskStatements(PrepareManager):
    def clear(self) -> bool:
        self._counts.clear()
        names = list(self._names.values())
        self._names.clear()
        self._to_flush.extend(names)
        return bool(names)


async def _connect_async(database: Database) -> AsyncSessionConnection:
    connection = await AsyncSessionConnection.connect(database.urls()[0], **_parameters(database))
    connection.installation = database.installation
    connection.is_pooled = database.config.pgbouncer_transaction_mode
    connection.prepares_at = connection.prepare_threshold
    return connection


def _parameters(database: Database) -> dict[str, Any]:
    parameters = database.options(ROLE)
    if not database.config.pgbouncer_transaction_mode:  # PgBouncer rejects options
        check = f"-c client_connection_check_interval={CLIENT_CHECK_MS}"
        parameters["options"] = f"{given_options(database.urls()[0])} {check}"
    return parameters
