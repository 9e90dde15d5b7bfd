"""The session in which a task writes, and in which its outcome is recorded: ``tx.connection``.

Unlike the library's own sessions it has the settings of the database and the role, so that the SQL of a
task finds its tables. The library begins the transaction, records the outcome as its last statements and
commits; the task itself can only roll back a part of it, to a savepoint. A session is used again by the
next task of its child, with its settings reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

import psycopg
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from horsies.db.database import (
    AsyncOwnConnection,
    AsyncPool,
    Database,
    Installation,
    OwnConnection,
    Pool,
    PoolLimits,
)
from horsies.db.pipeline import Pipeline, given_options
from horsies.db.statement import Step
from horsies.db.statements.transactions import limit_idle, read_mark
from horsies.errors import TransactionMisuse

ROLE = "child-tx"
# A child that dies during a long statement does not end it: the server looks for its client this often. The
# locks of the transaction, and the recovery of the task, wait for that.
CLIENT_CHECK_MS = 1_000
# How long a session may be idle between the recorded outcome and COMMIT.
IDLE_AFTER_RECORD_MS = 2_000
# How long a statement that a stop has interrupted may take to end.
CANCEL_SECONDS = 1.0
# The settings, the role and the temporary tables of the task before. In its own transaction, though in the
# same message: DISCARD takes a snapshot, after which the task could not choose its isolation level.
_CLEAN = "BEGIN; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; DISCARD TEMP; COMMIT; "
_BY_ITSELF = (
    "the transaction commits with the outcome of the task, when its function returns a success"
)
ENDED_BY_TASK = "the task has ended it; leave COMMIT and ROLLBACK out"
_REFUSALS = {
    "commit": f"commit() is refused on tx.connection: {_BY_ITSELF}.",
    "rollback": "rollback() is refused on tx.connection: raise an exception or return an error to roll back, "
    "or use `with tx.connection.transaction():` for a part.",
    "close": f"close() is refused on tx.connection: {_BY_ITSELF}.",
    "autocommit": f"tx.connection has no autocommit: {_BY_ITSELF}.",
    "tpc_begin": "tx.connection has no two-phase commit: PostgreSQL cannot prepare a transaction that "
    "notifies workers.",
}


class TaskConnection(OwnConnection):
    """A connection whose transaction only the library ends while a task has it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_lent = False
        # Its sessions belong to other clients between two transactions.
        self.is_pooled = False
        self._mark = ""
        self._pipeline_of_record: Pipeline | None = None

    def begin(self, mark: str) -> None:
        """Begin the transaction of an attempt, which `mark` names, and let its task use the connection."""
        self._mark = mark
        self.row_factory = tuple_row
        self.execute(_begin_command(mark, self.is_pooled), prepare=False)
        self.is_lent = True

    def record(self, steps: Sequence[Step]) -> list[list[Any]] | None:
        """Execute the statements that record the outcome; return their rows, or None if this is not the
        transaction that ``begin`` began.
        """
        self.is_lent = False
        if self._pipeline_of_record is None:
            self._pipeline_of_record = Pipeline(self, prepared=False)
        answers = self._pipeline_of_record.run(_with_checks(steps))
        return _checked(answers, self._mark)

    def give_up(self) -> None:
        """Roll back, without an exception; a session that cannot is closed, and the server rolls back."""
        self.is_lent = False
        if self.pgconn.pipeline_status != PipelineStatus.OFF:
            self.pgconn.finish()
        with suppress(psycopg.Error):
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:  # a stop interrupted it
                self.cancel_safe(timeout=CANCEL_SECONDS)
            elif self.pgconn.transaction_status != TransactionStatus.IDLE:
                super().rollback()
                return
        if self.pgconn.transaction_status != TransactionStatus.IDLE:
            self.pgconn.finish()

    def commit(self) -> None:
        _refuse(self, "commit")
        super().commit()

    def rollback(self) -> None:
        _refuse(self, "rollback")
        super().rollback()

    def close(self) -> None:
        _refuse(self, "close")
        super().close()

    def set_autocommit(self, value: bool) -> None:
        _refuse(self, "autocommit")
        super().set_autocommit(value)

    def tpc_begin(self, xid: Any) -> NoReturn:
        raise TransactionMisuse(_REFUSALS["tpc_begin"])


class AsyncTaskConnection(AsyncOwnConnection):
    """``TaskConnection`` for a coroutine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_lent = False
        self.is_pooled = False
        self._mark = ""

    async def begin(self, mark: str) -> None:
        self._mark = mark
        self.row_factory = tuple_row
        await self.execute(_begin_command(mark, self.is_pooled), prepare=False)
        self.is_lent = True

    async def record(self, steps: Sequence[Step]) -> list[list[Any]] | None:
        self.is_lent = False
        answers = [
            await statement.run_async(self, params) for statement, params in _with_checks(steps)
        ]
        return _checked(answers, self._mark)

    async def give_up(self) -> None:
        self.is_lent = False
        if self.pgconn.pipeline_status != PipelineStatus.OFF:
            self.pgconn.finish()
        if self.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            with suppress(psycopg.Error):
                await super().rollback()
        if self.pgconn.transaction_status != TransactionStatus.IDLE:
            self.pgconn.finish()

    async def commit(self) -> None:
        _refuse(self, "commit")
        await super().commit()

    async def rollback(self) -> None:
        _refuse(self, "rollback")
        await super().rollback()

    async def close(self) -> None:
        _refuse(self, "close")
        await super().close()

    async def set_autocommit(self, value: bool) -> None:
        _refuse(self, "autocommit")
        await super().set_autocommit(value)

    async def tpc_begin(self, xid: Any) -> NoReturn:
        raise TransactionMisuse(_REFUSALS["tpc_begin"])


AnyTaskConnection: TypeAlias = TaskConnection | AsyncTaskConnection


def _refuse(connection: AnyTaskConnection, what: str) -> None:
    if connection.is_lent:
        raise TransactionMisuse(_REFUSALS[what])


def _begin_command(mark: str, is_pooled: bool) -> bytes:
    clean = "" if is_pooled else _CLEAN
    return f"{clean}BEGIN; SET LOCAL horsies.attempt = '{mark}'".encode()


def _with_checks(steps: Sequence[Step]) -> list[Step]:
    """The statements that record the outcome, between the check of the mark and the limit for idleness."""
    return [read_mark(), *steps, limit_idle(IDLE_AFTER_RECORD_MS)]


def _checked(answers: Sequence[list[Any]], mark: str) -> list[list[Any]] | None:
    (found,), *rows, _ = answers
    return rows if found.mark == mark else None


def is_lost(connection: AnyTaskConnection) -> bool:
    """Whether the session has ended, and its transaction with it."""
    return bool(connection.closed or connection.pgconn.status != ConnStatus.OK)


def problem_of(connection: AnyTaskConnection) -> str | None:
    """Return why the transaction of a session that is not lost cannot commit, or None."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return "it is in pipeline mode; leave the pipeline before the function returns"
    status = connection.pgconn.transaction_status
    if status == TransactionStatus.INERROR:
        return (
            "a statement in it failed; let the exception pass, or run the statement inside "
            "`with tx.connection.transaction():`"
        )
    if status != TransactionStatus.INTRANS:
        return ENDED_BY_TASK
    return None


def open_pool(database: Database, most: int) -> Pool:
    """Return the pool for the transactions of a child's tasks, of which it runs `most` at a time."""
    return Pool(lambda: _connect(database), _limits(database, most))


def open_pool_async(database: Database, most: int) -> AsyncPool:
    """``open_pool`` for the coroutines of one event loop."""
    return AsyncPool(lambda: _connect_async(database), _limits(database, most))


def _limits(database: Database, most: int) -> PoolLimits:
    config = database.config
    return PoolLimits(most, most, config.pool_timeout, config.pool_recycle)


def _connect(database: Database) -> TaskConnection:
    connection = TaskConnection.connect(database.urls()[0], **_parameters(database))
    connection.installation = Installation(database.config.schema_name)
    connection.is_pooled = database.config.pgbouncer_transaction_mode
    return connection


async def _connect_async(database: Database) -> AsyncTaskConnection:
    connection = await AsyncTaskConnection.connect(database.urls()[0], **_parameters(database))
    connection.installation = Installation(database.config.schema_name)
    connection.is_pooled = database.config.pgbouncer_transaction_mode
    return connection


def _parameters(database: Database) -> dict[str, Any]:
    parameters = database.options(ROLE)
    if not database.config.pgbouncer_transaction_mode:  # PgBouncer refuses options
        check = f"-c client_connection_check_interval={CLIENT_CHECK_MS}"
        parameters["options"] = f"{given_options(database.urls()[0])} {check}"
    return parameters
