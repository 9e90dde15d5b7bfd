"""The transaction of a task in its child (``tx``): the outcome is recorded in it, and then it commits.

The statements are those with which a worker records outcomes: they match the row only while the task is
running, belongs to this worker and has the generation of this attempt. Without a row the task belongs to
another worker, and everything is rolled back. A child that is killed before COMMIT leaves nothing: the
server rolls back, and the worker's verdict on the dead child waits for the lock of the row until then.

``AttemptRecord`` decides; ``AttemptTransaction`` and ``AsyncAttemptTransaction`` execute.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import psycopg
from psycopg import AsyncConnection, Connection

from horsies.app import Horsies
from horsies.codec.calls import payload_bytes
from horsies.config.app import AppConfig
from horsies.current_task import CurrentTask
from horsies.db.caller_transaction import (
    UnusableTransactionError,
    borrowed,
    borrowed_async,
    leads_elsewhere,
)
from horsies.db.database import AsyncPool, Database, Installation, Lent, Pool
from horsies.db.errors import describe, is_of_text
from horsies.db.statement import Step
from horsies.db.statements.transactions import limit_idle
from horsies.db.statements.turn import find_completed
from horsies.db.task_transaction import (
    ENDED_BY_TASK,
    IDLE_AFTER_RECORD_MS,
    AsyncTaskConnection,
    TaskConnection,
    is_lost,
    open_pool,
    open_pool_async,
    problem_of,
)
from horsies.error_codes import OperationalErrorCode, resolve_exception_code
from horsies.errors import TransactionMisuse
from horsies.result import Err
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.outcome import Outcome, locking_steps, recording_steps
from horsies.tasks.transaction import CALLED_DIRECTLY, AsyncTaskTransaction, TaskTransaction
from horsies.worker.child.stop_switch import disarm_stops
from horsies.worker.protocol import Assignment, TransactionEnd

# The sessions of a child: an async child may run more tasks than this at a time, which then wait.
SESSIONS_MAX = 4
_SESSION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)
_CAUSES_MAX = 10
_IS_OVER = "The task of this transaction has ended; use it before the function returns."
_TWO_TRANSACTIONS = "A task uses either tx.connection or record_in: they are two transactions."
_RECORDED_TWICE = "The outcome of this task is already recorded."
_NO_SUCCESS = "record_in takes a success; to fail, roll back and return the error."
_ELSEWHERE = "record_in takes a transaction of the application's database; this one is of another."
_NOT_OURS = (
    "record_in found no running task of this worker: the task belongs to another worker now, or the "
    "transaction is one of another database; roll back."
)
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_LOST = OperationalErrorCode.TRANSACTION_LOST
_CONFLICT = OperationalErrorCode.TRANSACTION_CONFLICT
_NOT_COMMITTED = OperationalErrorCode.TRANSACTION_NOT_COMMITTED

Returned: TypeAlias = TaskResult[Any, TaskError] | TaskError


class Ended(NamedTuple):
    """The end of a transaction; with the error to report if the task's success is not recorded."""

    end: TransactionEnd
    error: TaskError | None = None
    # The result that the task has recorded in its own transaction.
    recorded: str | None = None


class Transactions:
    """The sessions for the transactions of a child's tasks; none is opened before a task asks for one.

    Without the id of a worker there is no row in which an outcome could be recorded.
    """

    def __init__(self, app: Horsies, worker_id: str = "") -> None:
        self._app = app
        self.worker_id = worker_id
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}

    @property
    def config(self) -> AppConfig:
        return self._app.config

    @property
    def installation(self) -> Installation:
        return Installation(self.config.broker.schema_name)

    @property
    def database(self) -> Database:
        return self._app.get_broker().database

    def pool(self) -> Pool:
        refuse_if(not self.worker_id, CALLED_DIRECTLY)
        with self._lock:
            if self._pool is None:
                self._pool = open_pool(self.database, SESSIONS_MAX)
            return self._pool

    def pool_async(self) -> AsyncPool:
        refuse_if(not self.worker_id, CALLED_DIRECTLY)
        loop = asyncio.get_running_loop()
        if (pool := self._async_pools.get(loop)) is None:
            pool = self._async_pools[loop] = open_pool_async(self.database, SESSIONS_MAX)
        return pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
        for pool in self._async_pools.values():
            pool.close()


def refuse_if(is_wrong: bool, problem: str) -> None:
    if is_wrong:
        raise TransactionMisuse(problem)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that it was raised from: a failed send, or SQLAlchemy, wraps the driver's."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


class AttemptRecord:
    """The statements that record one attempt, and the errors of a transaction that does not commit."""

    def __init__(
        self, transactions: Transactions, definition: TaskDefinition, assignment: Assignment
    ) -> None:
        self.transactions = transactions
        self._definition = definition
        self._assignment = assignment
        # The result that is recorded in the task's own transaction.
        self.result: str | None = None
        self.is_over = False
        # Whether the session could not be had, or was lost by record_in.
        self.was_lost = False

    @property
    def mark(self) -> str:
        return f"{self._assignment.task_id}/{self._assignment.generation}"

    def steps(self, result_json: str) -> list[Step]:
        """The statements that record the success: those of a worker's turn."""
        assignment = self._assignment
        outcome = Outcome(
            assignment.task_id,
            assignment.generation,
            CurrentTask(assignment, 0.0).workflow_id,
            TaskStatus.COMPLETED,
            result_json,
            TaskAttemptOutcome.COMPLETED,
        )
        steps = recording_steps(self.transactions.worker_id, [outcome])
        return [*locking_steps([outcome.workflow_id]), *steps.values()]

    def find(self) -> Step:
        """The statement that finds the success of this attempt, if it is committed."""
        return find_completed([self._assignment.task_id], [self._assignment.generation])

    def encoded(self, result: object, is_open: bool) -> str:
        """The JSON text of a success that record_in may record; TransactionMisuse otherwise."""
        refuse_if(self.is_over, _IS_OVER)
        refuse_if(self.result is not None, _RECORDED_TWICE)
        refuse_if(is_open, _TWO_TRANSACTIONS)
        value = result if isinstance(result, TaskResult) else TaskResult(ok=result)
        refuse_if(value.is_err(), _NO_SUCCESS)
        encoded = self._definition.results.encode(value)
        if isinstance(encoded, Err):
            raise TransactionMisuse(f"record_in cannot store this result: {encoded.value.message}")
        limit = self.transactions.config.payload.max_result_bytes
        is_too_large = limit is not None and payload_bytes(encoded.value) > limit
        refuse_if(
            is_too_large, f"record_in takes at most {limit} bytes (payload.max_result_bytes)."
        )
        return encoded.value

    def misuse(self, error: Exception) -> Exception:
        """The exception for a statement of record_in that failed in a framework's transaction."""
        if isinstance(error, UnusableTransactionError):
            return TransactionMisuse(f"record_in cannot use this transaction: {error}")
        if leads_elsewhere(error):
            return TransactionMisuse(_ELSEWHERE)
        self.was_lost = isinstance(error, _SESSION_ERRORS)
        return error

    def judged(self, returned: Returned, is_session_lost: bool) -> Returned:
        """Give an exception of the task the code of a conflict, a lost session or a misuse, if it is one
        and no mapper names another code.
        """
        if not isinstance(returned, TaskError):
            return returned
        raised = returned.exception
        if not isinstance(raised, BaseException):
            return returned
        if (code := self._code_of(raised, is_session_lost)) is None:
            return returned
        return returned.model_copy(update={"error_code": self._resolved(raised, code)})

    def _code_of(self, error: BaseException, is_session_lost: bool) -> OperationalErrorCode | None:
        causes = list(_causes(error))
        if any(isinstance(one, TransactionMisuse) for one in causes):
            return _NOT_COMMITTED
        if any(getattr(one, "sqlstate", None) in _CONFLICTS for one in causes):
            return _CONFLICT
        is_of_session = any(isinstance(one, _SESSION_ERRORS) for one in causes)
        return _LOST if is_of_session and (self.was_lost or is_session_lost) else None

    def _resolved(self, error: BaseException, code: OperationalErrorCode | None) -> Any:
        definition, config = self._definition, self.transactions.config
        return resolve_exception_code(
            error,
            definition.exception_mapper,
            config.exception_mapper,
            code or definition.default_unhandled_error_code,
            config.default_unhandled_error_code,
        )

    def problem(self, session: TaskConnection | AsyncTaskConnection) -> Ended | None:
        """The failure of a transaction that cannot commit; None if it can."""
        if is_lost(session):
            return self.failed(_LOST, "its session was lost before COMMIT")
        problem = problem_of(session)
        return None if problem is None else self.failed(_NOT_COMMITTED, problem)

    def unrecorded(self, answers: list[list[Any]] | None) -> Ended | None:
        """The failure of a transaction in which no outcome was recorded; None if it was."""
        if answers is None:
            return self.failed(_NOT_COMMITTED, ENDED_BY_TASK)
        if answers[-1]:
            return None
        problem = "the task belongs to another worker now; its rows were rolled back"
        return self.failed(_LOST, problem, end=TransactionEnd.LOST)

    def refused(self, error: Exception, session: TaskConnection | AsyncTaskConnection) -> Ended:
        """The failure of a statement that records the outcome, or of a COMMIT that the server refused."""
        if isinstance(error, psycopg.Error) and is_of_text(error):
            code: Any = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
        else:
            code = self._resolved(error, self._code_of(error, is_lost(session)))
        return self.failed(code, describe(error).rstrip("."), error)

    def commit_failed(
        self, error: Exception, session: TaskConnection | AsyncTaskConnection
    ) -> Ended:
        if not is_lost(session):
            return self.refused(error, session)
        problem = f"its session was lost during COMMIT ({describe(error)})"
        return self.failed(_LOST, problem, error, TransactionEnd.DOUBT)

    def found(self, rows: list[Any]) -> Ended:
        """The end of a task that has recorded its outcome in its own transaction, by the committed rows."""
        if rows:
            return Ended(TransactionEnd.RECORDED, None, self.result)
        problem = "record_in was called, but the transaction was rolled back or is still open"
        return self.failed(_NOT_COMMITTED, problem, end=TransactionEnd.DOUBT)

    def unconfirmed(self, error: Exception) -> Ended:
        problem = f"its COMMIT cannot be confirmed ({describe(error)})"
        return self.failed(_LOST, problem, error, TransactionEnd.DOUBT)

    def failed(
        self,
        code: Any,
        problem: str,
        error: Exception | None = None,
        end: TransactionEnd = TransactionEnd.NONE,
    ) -> Ended:
        name = self._definition.name
        message = (
            f"Task {name!r} returned a success, but its transaction did not commit: {problem}."
        )
        return Ended(end, TaskError(error_code=code, message=message, exception=error))


class AttemptTransaction:
    """The transaction of one attempt, from the first use of its connection to COMMIT or ROLLBACK."""

    def __init__(self, record: AttemptRecord, assignment: Assignment) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._lent: Lent[Any] | None = None
        self.given = TaskTransaction(assignment.attempt, assignment.generation, self)

    @property
    def _session(self) -> TaskConnection:
        assert self._lent is not None
        return cast("TaskConnection", self._lent.connection)

    @property
    def is_open(self) -> bool:
        """Whether the task has used its connection."""
        return self._lent is not None

    def connection(self) -> Connection[Any]:
        """Lend the connection to the task; the first call begins the transaction."""
        record = self._record
        with self._lock:
            refuse_if(record.is_over, _IS_OVER)
            refuse_if(record.result is not None, _TWO_TRANSACTIONS)
            if self._lent is None:
                self._lent = self._begun()
            return self._session

    def _begun(self) -> Lent[Any]:
        pool = self._record.transactions.pool()
        try:
            lent = pool.take()
            try:
                cast("TaskConnection", lent.connection).begin(self._record.mark)
            except BaseException:
                pool.put(lent)
                raise
        except psycopg.Error:
            self._record.was_lost = True
            raise
        return lent

    def record_in(self, transaction: object, result: object) -> None:
        """Record a success in the open transaction of a framework, which the task commits."""
        record = self._record
        text = record.encoded(result, self.is_open)
        disarm_stops()
        try:
            with borrowed(transaction, record.transactions.installation) as execute:
                rows = [execute(*step) for step in record.steps(text)][-1]
                execute(*limit_idle(IDLE_AFTER_RECORD_MS))
        except Exception as error:
            raise record.misuse(error) from error
        refuse_if(not rows, _NOT_OURS)
        record.result = text

    def judged(self, returned: Returned) -> Returned:
        return self._record.judged(returned, self.is_open and is_lost(self._session))

    def recorded(self) -> Ended | None:
        """The end of a task that has recorded its outcome in its own transaction; None if it has not."""
        record = self._record
        if record.result is None:
            return None
        statement, params = record.find()
        try:
            with record.transactions.database.connection() as connection:
                return record.found(statement.run(connection, params))
        except Exception as error:
            return record.unconfirmed(error)

    def finish(self, result_json: str) -> Ended:
        """Record the success in the transaction and commit. No stop interrupts this."""
        disarm_stops()
        record, session = self._record, self._session
        record.is_over = True
        if (problem := record.problem(session)) is not None:
            return problem
        try:
            answers = session.record(record.steps(result_json))
        except Exception as error:
            return record.refused(error, session)
        if (problem := record.unrecorded(answers)) is not None:
            return problem
        try:
            session.commit()
        except Exception as error:
            return record.commit_failed(error, session)
        return Ended(TransactionEnd.RECORDED)

    def close(self) -> None:
        """Roll back unless it has committed, and return the session for the next task of this child."""
        self._record.is_over = True
        with self._lock:
            lent, self._lent = self._lent, None
        if lent is not None:
            cast("TaskConnection", lent.connection).give_up()
            self._record.transactions.pool().put(lent)


class AsyncAttemptTransaction:
    """``AttemptTransaction`` for a coroutine."""

    def __init__(self, record: AttemptRecord, assignment: Assignment) -> None:
        self._record = record
        self._lent: Lent[Any] | None = None
        self._pool: AsyncPool | None = None
        self._opening = asyncio.Lock()
        self.given = AsyncTaskTransaction(assignment.attempt, assignment.generation, self)

    @property
    def _session(self) -> AsyncTaskConnection:
        assert self._lent is not None
        return cast("AsyncTaskConnection", self._lent.connection)

    @property
    def is_open(self) -> bool:
        return self._lent is not None

    async def connection(self) -> AsyncConnection[Any]:
        record = self._record
        refuse_if(record.is_over, _IS_OVER)
        refuse_if(record.result is not None, _TWO_TRANSACTIONS)
        async with self._opening:
            if self._lent is None:
                self._lent = await self._begun()
        return self._session

    async def _begun(self) -> Lent[Any]:
        self._pool = pool = self._record.transactions.pool_async()
        try:
            lent = await pool.take()
            try:
                await cast("AsyncTaskConnection", lent.connection).begin(self._record.mark)
            except BaseException:
                pool.put(lent)
                raise
        except psycopg.Error:
            self._record.was_lost = True
            raise
        return lent

    async def record_in(self, transaction: object, result: object) -> None:
        record = self._record
        text = record.encoded(result, self.is_open)
        try:
            async with borrowed_async(transaction, record.transactions.installation) as execute:
                rows = [await execute(*step) for step in record.steps(text)][-1]
                await execute(*limit_idle(IDLE_AFTER_RECORD_MS))
        except Exception as error:
            raise record.misuse(error) from error
        refuse_if(not rows, _NOT_OURS)
        record.result = text

    def judged(self, returned: Returned) -> Returned:
        return self._record.judged(returned, self.is_open and is_lost(self._session))

    async def recorded(self) -> Ended | None:
        record = self._record
        if record.result is None:
            return None
        statement, params = record.find()
        try:
            async with record.transactions.database.connection_async() as connection:
                return record.found(await statement.run_async(connection, params))
        except Exception as error:
            return record.unconfirmed(error)

    async def finish(self, result_json: str) -> Ended:
        defer_cancel()
        record, session = self._record, self._session
        record.is_over = True
        if (problem := record.problem(session)) is not None:
            return problem
        try:
            answers = await session.record(record.steps(result_json))
        except Exception as error:
            return record.refused(error, session)
        if (problem := record.unrecorded(answers)) is not None:
            return problem
        try:
            await session.commit()
        except Exception as error:
            return record.commit_failed(error, session)
        return Ended(TransactionEnd.RECORDED)

    async def close(self) -> None:
        self._record.is_over = True
        if self._lent is not None:
            await self._session.give_up()
            self.abandon()

    def abandon(self) -> None:
        """Return the session as it is: the pool closes it inside a transaction, and the server rolls back."""
        self._record.is_over = True
        lent, self._lent = self._lent, None
        if lent is not None and self._pool is not None:
            lent.connection.is_lent = False
            self._pool.put(lent)


def defer_cancel() -> None:
    """Note that the code of the running coroutine is over: no stop interrupts the record of its outcome."""
    disarm_stops()
    task: Any = asyncio.current_task()
    if hasattr(task, "is_finishing"):
        task.is_finishing = True
