"""A task's transaction in its child (``tx``): the outcome is recorded in this transaction before it commits.
The statements are the same as in a worker's turn. They match the row only while the task is running, belongs
to this worker and has this attempt's generation. If no row matches, the task belongs to another worker, and
everything is rolled back. If a child is killed before COMMIT, the server rolls the transaction back; until
then, the worker's own statement about the dead child's task waits for the row's lock.

``AttemptRecord`` and ``Attempt`` decide; ``AttemptTransaction`` and ``AsyncAttemptTransaction`` execute
the statements.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import psycopg
from psycopg import AsyncConnection, Connection

from horsies.app import Horsies
from horsies.codec.calls import payload_bytes
from horsies.config.app import AppConfig
from horsies.current_task import run_of
from horsies.db.caller_transaction import (
    UnusableTransactionError,
    borrowed,
    borrowed_async,
    is_nested,
    leads_elsewhere,
)
from horsies.db.database import AsyncPool, Database, Installation, Lent, Pool
from horsies.db.errors import CONFLICTS, describe, is_of_text
from horsies.db.statement import (
    Script,
    Step,
    drive,
    drive_async,
    run_script,
    run_script_async,
)
from horsies.db.statements.transactions import complete_own, limit_idle
from horsies.db.statements.turn import CompleteTasks, complete_tasks, find_completed
from horsies.db.task_transaction import (
    CLIENT_CHECK_MS,
    IDLE_AFTER_RECORD_MS,
    LOST,
    OVER,
    AnyTaskSession,
    AsyncSessionConnection,
    AsyncTaskSession,
    SessionConnection,
    TaskSession,
    open_pool,
    open_pool_async,
    refusal_of,
)
from horsies.error_codes import OperationalErrorCode, resolve_exception_code
from horsies.errors import TransactionMisuse
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.outcome import locking_steps
from horsies.tasks.transaction import CALLED_DIRECTLY
from horsies.worker.child.payload import stored_result, stored_result_async
from horsies.worker.child.process_state import disarm_stops, stops_deferred
from horsies.worker.protocol import Assignment, TransactionEnd

# The maximum number of sessions that a child opens. In an async child, further tasks wait for a free session.
SESSIONS_MAX = 4
_SESSION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)
# Errors that report that the server has shut down or crashed, or has ended the session because of a time
# limit.
_ENDED_SESSIONS = ("57P01", "57P02", "57P05", "25P03", "25P04")
_CAUSES_MAX = 10
_TWO_TRANSACTIONS = "A task uses either tx.connection or record_in: they are two transactions."
_RECORDED_TWICE = "The outcome of this task is already recorded."
_NO_SUCCESS = "record_in takes a success; to fail, roll back and return the error."
_ELSEWHERE = "record_in takes a transaction of the application's database; this one is of another."
_NOT_OURS = (
    "record_in found no running task of this worker: the task belongs to another worker now, or the "
    "transaction is one of another database; roll back."
)
_NESTED = (
    "record_in was called inside a savepoint, which could be rolled back without the rest; call it in the "
    "outermost block of the transaction."
)
_LOST = OperationalErrorCode.TRANSACTION_LOST
_CONFLICT = OperationalErrorCode.TRANSACTION_CONFLICT
_NOT_COMMITTED = OperationalErrorCode.TRANSACTION_NOT_COMMITTED

Returned: TypeAlias = TaskResult[Any, TaskError] | TaskError
AnySession = TypeVar("AnySession", TaskSession, AsyncTaskSession)


class Ended(NamedTuple):
    """How a transaction ended, and the error to report if the task's success was not recorded."""

    end: TransactionEnd
    error: TaskError | None = None
    # The result that the task itself has recorded, in its own transaction.
    recorded: str | None = None


_COMMITTED = Ended(TransactionEnd.RECORDED)


class Transactions:
    """The sessions for the transactions of a child's tasks; a session is opened when a task first needs it.
    Without a worker's id, no row exists in which an outcome could be recorded.
    """

    def __init__(self, app: Horsies, worker_id: str = "") -> None:
        self._app = app
        self.worker_id = worker_id
        # Held while the pool or the parts of an attempt are created.
        self.lock = threading.Lock()
        self._pool: Pool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}

    @property
    def config(self) -> AppConfig:
        return self._app.config

    @property
    def installation(self) -> Installation:
        return self.database.installation

    @property
    def database(self) -> Database:
        return self._app.get_broker().database

    def pool(self) -> Pool:
        if (pool := self._pool) is not None:
            return pool
        refuse_if(not self.worker_id, CALLED_DIRECTLY)
        with self.lock:
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
        with self.lock:
            if self._pool is not None:
                self._pool.close()
        for pool in self._async_pools.values():
            pool.close()


def refuse_if(is_wrong: bool, problem: str) -> None:
    if is_wrong:
        raise TransactionMisuse(problem)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes. A failed send, or SQLAlchemy, wraps the driver's exception."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _state_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error from any driver; psycopg2 calls it ``pgcode``."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _ends_session(error: BaseException) -> bool:
    """Return whether an error, from any driver, means that the session has ended."""
    if getattr(error, "connection_invalidated", False):  # SQLAlchemy, for the errors of any driver
        return True
    state = _state_of(error)
    if state is None:  # exactly this class, because errors such as PoolTimeout are subclasses
        name = f"{type(error).__module__}.{type(error).__name__}"
        return type(error) is psycopg.OperationalError or name == "psycopg2.OperationalError"
    return state in _ENDED_SESSIONS or state.startswith("08")


def _is_of_session(error: BaseException) -> bool:
    """Return whether the loss of a session may have caused an error."""
    return isinstance(error, _SESSION_ERRORS) or _ends_session(error)


def _is_answer(error: BaseException) -> bool:
    """Return whether an error means that nothing was committed: the server refused the COMMIT, or it was
    never sent. A session that ended with a FATAL error may have executed the COMMIT before.
    """
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.diag.severity_nonlocalized == "ERROR"


class AttemptRecord:
    """Makes the statements that record one attempt, and the errors for a transaction that does not commit."""

    def __init__(
        self, transactions: Transactions, definition: TaskDefinition, assignment: Assignment
    ) -> None:
        self.transactions = transactions
        self._definition = definition
        self._assignment = assignment
        # The result that was recorded in a transaction that the task opened itself.
        self.result: str | None = None
        self.is_over = False
        # Whether no session could be opened, or the session was lost in record_in.
        self.was_lost = False

    @property
    def mark(self) -> str:
        return f"{self._assignment.task_id}/{self._assignment.generation}"

    def stored(self, result_json: str) -> str:
        """Return the text of the success in its stored form."""
        payloads = self.transactions.database.payloads
        return stored_result(payloads, self._assignment, result_json)

    async def stored_async(self, result_json: str) -> str:
        payloads = self.transactions.database.payloads
        return await stored_result_async(payloads, self._assignment, result_json)

    def _locking(self) -> list[Step]:
        """Return the statement that locks the task's workflow run, if the task is a node."""
        return locking_steps([run_of(self._assignment.stored)])

    def finishing(self, stored_json: str) -> list[Step]:
        """Return the statements that record the success at the end of the task's transaction."""
        task_id, generation = self._assignment.task_id, self._assignment.generation
        owner = self.transactions.worker_id
        return [
            *self._locking(),
            complete_own(owner, task_id, generation, self.mark, stored_json),
        ]

    def recording(self, stored_json: str) -> Script[list[Any]]:
        """Record the success in a transaction that the task has opened itself, with the statements of a
        worker's turn.

        Return the rows of the recorded tasks.
        """
        task_id, generation = self._assignment.task_id, self._assignment.generation
        owner = self.transactions.worker_id
        completion = CompleteTasks(owner, [task_id], [generation], [stored_json], [None])
        rows: list[Any] = []
        for step in [*self._locking(), (complete_tasks, completion)]:
            rows = yield step
        yield limit_idle(IDLE_AFTER_RECORD_MS, CLIENT_CHECK_MS)
        return rows

    def note(self, rows: list[Any], result_json: str) -> None:
        """Note that the success is recorded in a transaction that the task has opened itself; raise if no
        row was changed.
        """
        refuse_if(not rows, _NOT_OURS)
        self.result = result_json

    def confirming(self) -> Script[Ended]:
        """Find out whether the success of this attempt is committed."""
        rows = yield find_completed([self._assignment.task_id], [self._assignment.generation])
        return self.found(rows)

    def encoded(self, result: object, is_open: bool) -> str:
        """Return a success as JSON text; raise TransactionMisuse if record_in may not record it."""
        refuse_if(self.is_over, OVER)
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
        """Return the exception for a record_in statement that failed in a framework's transaction."""
        if isinstance(error, UnusableTransactionError):
            return TransactionMisuse(f"record_in cannot use this transaction: {error}")
        if leads_elsewhere(error):
            return TransactionMisuse(_ELSEWHERE)
        self.was_lost = isinstance(error, psycopg.InterfaceError) or _ends_session(error)
        return error

    def judged(self, returned: Returned, is_session_lost: bool) -> Returned:
        """If a task's exception is a conflict, a lost session or a misuse, give it that error code,
        unless a mapper names another.
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
        if any(_state_of(one) in CONFLICTS for one in causes):
            return _CONFLICT
        if self.was_lost or is_session_lost:
            is_lost = any(map(_is_of_session, causes))
        else:  # after record_in, the session that the task opened itself is checked
            is_lost = self.result is not None and any(map(_ends_session, causes))
        return _LOST if is_lost else None

    def _resolved(self, error: BaseException, code: OperationalErrorCode | None) -> Any:
        definition, config = self._definition, self.transactions.config
        return resolve_exception_code(
            error,
            definition.exception_mapper,
            config.exception_mapper,
            code or definition.default_unhandled_error_code,
            config.default_unhandled_error_code,
        )

    def problem(self, session: AnyTaskSession) -> Ended | None:
        """Return the failure of a transaction that cannot commit; None if it can."""
        if (problem := session.end_loan()) is None:
            return None
        if session.is_lost:
            return self.failed(_LOST, "its session was lost before COMMIT")
        return self.failed(_NOT_COMMITTED, problem)

    def refused(self, error: BaseException, session: AnyTaskSession) -> Ended:
        """Return the failure of a transaction that the server refused to commit."""
        if isinstance(error, psycopg.Error) and is_of_text(error):
            code: Any = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
        else:
            code = self._resolved(error, self._code_of(error, session.is_lost))
        return self.failed(code, describe(error).rstrip("."), error)

    def commit_failed(self, error: BaseException, session: AnyTaskSession) -> Ended:
        """Return the failure of a COMMIT; its effect is in doubt unless the server answered with an error."""
        if (refusal := refusal_of(error)) == LOST:
            problem = "the task belongs to another worker now; its rows were rolled back"
            return self.failed(_LOST, problem, end=TransactionEnd.LOST)
        if refusal is not None:
            return self.failed(_NOT_COMMITTED, refusal)
        if _is_answer(error) and not session.is_lost:
            return self.refused(error, session)
        lost = "its session was lost" if session.is_lost else "it was interrupted"
        why = describe(error).rstrip(".") or type(error).__name__
        return self.failed(_LOST, f"{lost} during COMMIT ({why})", error, TransactionEnd.DOUBT)

    def found(self, rows: list[Any]) -> Ended:
        """Return the end of a task that recorded its outcome in its own transaction, judged by the
        committed rows.
        """
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
        error: BaseException | None = None,
        end: TransactionEnd = TransactionEnd.NONE,
    ) -> Ended:
        name = self._definition.name
        message = (
            f"Task {name!r} returned a success, but its transaction did not commit: {problem}."
        )
        return Ended(end, TaskError(error_code=code, message=message, exception=error))


class Attempt(Generic[AnySession]):
    """The state of one attempt's transaction, and its decisions, for functions and coroutines."""

    __slots__ = ("_lent", "_pool", "record", "session")

    def __init__(self, record: AttemptRecord) -> None:
        self.record = record
        self._pool: Pool | AsyncPool | None = None
        self._lent: Lent[Any] | None = None
        self.session: AnySession | None = None

    def check(self) -> None:
        refuse_if(self.record.is_over, OVER)
        refuse_if(self.record.result is not None, _TWO_TRANSACTIONS)

    def open(self, pool: Pool | AsyncPool, lent: Lent[Any], session: AnySession) -> None:
        """Keep the session of a transaction that has begun."""
        self._pool, self._lent, self.session = pool, lent, session

    def judged(self, returned: Returned) -> Returned:
        session = self.session
        return self.record.judged(returned, session is not None and session.is_lost)

    def end(self, session: AnySession) -> Ended | None:
        """End the task's access to its transaction; return the failure if the transaction cannot commit."""
        if session.is_forked:  # this process was forked by the task, and its parent commits
            os._exit(0)
        self.record.is_over = True
        return self.record.problem(session)

    def abandon(self) -> None:
        """Return the session to the pool without a clean-up; the pool closes a session that is still inside a
        transaction.
        """
        lent, self._lent, self.session = self._lent, None, None
        if lent is not None and self._pool is not None:
            self._pool.put(lent)


class AttemptTransaction:
    """One attempt's transaction, from the first use of its connection to COMMIT or ROLLBACK.

    Its parts are created when the task first uses it, because they would make a task that declares a
    transaction without using it a third more expensive for its child than any other task.
    """

    __slots__ = ("_assignment", "_attempt", "_definition", "_is_over", "_lock", "_transactions")

    def __init__(
        self, transactions: Transactions, definition: TaskDefinition, assignment: Assignment
    ) -> None:
        self._transactions = transactions
        self._definition = definition
        self._assignment = assignment
        self._attempt: Attempt[TaskSession] | None = None
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether the task has used its ``connection``."""
        return self._attempt is not None and self._attempt.session is not None

    def _parts(self) -> Attempt[TaskSession]:
        """Return the parts; create them at the first call, which may come from any thread."""
        with self._transactions.lock:
            if self._attempt is None:
                record = AttemptRecord(self._transactions, self._definition, self._assignment)
                self._lock = threading.Lock()
                self._attempt = Attempt(record)
            return self._attempt

    def _use(self) -> Attempt[TaskSession]:
        attempt = self._attempt or self._parts()
        # Checked after the parts exist: ``close`` sets this flag before it checks whether there are parts. So
        # either this check refuses a late thread, or ``close`` ends the attempt of this thread.
        refuse_if(self._is_over, OVER)
        return attempt

    def connection(self) -> Connection[Any]:
        """Lend the connection to the task; the first call begins the transaction."""
        attempt = self._use()
        with self._lock:
            attempt.check()
            session = attempt.session or self._begin(attempt)
            return session.lent

    def _begin(self, attempt: Attempt[TaskSession]) -> TaskSession:
        pool = self._transactions.pool()
        try:
            lent = pool.take()
            try:
                session = TaskSession(cast(SessionConnection, lent.connection), attempt.record.mark)
                session.begin()
            except BaseException:
                pool.put(lent)
                raise
        except psycopg.Error:
            attempt.record.was_lost = True
            raise
        attempt.open(pool, lent, session)
        return session

    def record_in(self, transaction: object, result: object) -> None:
        """Record a success in a framework's open transaction, which the task itself commits."""
        record = self._use().record
        text = record.encoded(result, self.is_open)
        refuse_if(is_nested(transaction), _NESTED)
        stored = record.stored(text)
        with stops_deferred():
            try:
                with borrowed(transaction, record.transactions.installation) as execute:
                    rows = drive(execute, record.recording(stored))
            except Exception as error:
                raise record.misuse(error) from error
            record.note(rows, text)

    def recorded(self) -> Ended | None:
        """Return the end of a task that recorded its outcome in its own transaction; None if it did not
        record an outcome.
        """
        if self._attempt is None or self._attempt.record.result is None:
            return None
        record = self._attempt.record
        try:
            with record.transactions.database.connection() as connection:
                return run_script(connection, record.confirming())
        except Exception as error:
            return record.unconfirmed(error)

    def judged(self, error: TaskError) -> Returned:
        return (self._attempt or self._parts()).judged(error)

    def finish(self, result_json: str) -> Ended:
        """Record the success in the transaction and commit, without interruption by a stop."""
        disarm_stops()
        attempt = self._attempt
        assert attempt is not None
        assert attempt.session is not None
        record, session = attempt.record, attempt.session
        if (problem := attempt.end(session)) is not None:
            return problem
        try:
            session.finish(record.finishing(record.stored(result_json)))
        except BaseException as error:
            return record.commit_failed(error, session)
        attempt.abandon()  # nothing to roll back
        return _COMMITTED

    def close(self) -> None:
        """Roll the transaction back unless it has committed, and return the session to the pool for the
        child's next task.
        """
        self._is_over = True
        if (attempt := self._attempt) is None:
            return
        attempt.record.is_over = True
        with self._lock:
            if attempt.session is not None and not attempt.session.is_forked:
                try:
                    attempt.session.give_up()
                finally:
                    attempt.abandon()


class AsyncAttemptTransaction:
    """``AttemptTransaction`` for a coroutine."""

    __slots__ = (
        "_assignment",
        "_attempt",
        "_definition",
        "_is_over",
        "_opening",
        "_task",
        "_transactions",
    )

    def __init__(
        self, transactions: Transactions, definition: TaskDefinition, assignment: Assignment
    ) -> None:
        self._transactions = transactions
        self._definition = definition
        self._assignment = assignment
        self._attempt: Attempt[AsyncTaskSession] | None = None
        self._is_over = False
        # The task's code may call record_in in another asyncio task, which a stop of this asyncio task would
        # cancel too.
        self._task = asyncio.current_task()

    @property
    def is_open(self) -> bool:
        """Whether the task has used its ``connection``."""
        return self._attempt is not None and self._attempt.session is not None

    def _parts(self) -> Attempt[AsyncTaskSession]:
        """Return the parts; create them at the first call."""
        with self._transactions.lock:
            if self._attempt is None:
                record = AttemptRecord(self._transactions, self._definition, self._assignment)
                self._opening = asyncio.Lock()
                self._attempt = Attempt(record)
            return self._attempt

    def _use(self) -> Attempt[AsyncTaskSession]:
        attempt = self._attempt or self._parts()
        refuse_if(self._is_over, OVER)
        return attempt

    async def connection(self) -> AsyncConnection[Any]:
        attempt = self._use()
        async with self._opening:
            attempt.check()
            session = attempt.session or await self._begin(attempt)
            return session.lent

    async def _begin(self, attempt: Attempt[AsyncTaskSession]) -> AsyncTaskSession:
        pool = self._transactions.pool_async()
        try:
            lent = await pool.take()
            try:
                connection = cast(AsyncSessionConnection, lent.connection)
                session = AsyncTaskSession(connection, attempt.record.mark)
                await session.begin()
            except BaseException:
                pool.put(lent)
                raise
        except psycopg.Error:
            attempt.record.was_lost = True
            raise
        attempt.open(pool, lent, session)
        return session

    async def record_in(self, transaction: object, result: object) -> None:
        record = self._use().record
        text = record.encoded(result, self.is_open)
        refuse_if(is_nested(transaction), _NESTED)
        stored = await record.stored_async(text)
        with stops_deferred(self._task):
            try:
                async with borrowed_async(transaction, record.transactions.installation) as execute:
                    rows = await drive_async(execute, record.recording(stored))
            except Exception as error:
                raise record.misuse(error) from error
            record.note(rows, text)

    async def recorded(self) -> Ended | None:
        if self._attempt is None or self._attempt.record.result is None:
            return None
        record = self._attempt.record
        try:
            async with record.transactions.database.connection_async() as connection:
                return await run_script_async(connection, record.confirming())
        except Exception as error:
            return record.unconfirmed(error)

    def judged(self, error: TaskError) -> Returned:
        return (self._attempt or self._parts()).judged(error)

    async def finish(self, result_json: str) -> Ended:
        defer_cancel()
        attempt = self._attempt
        assert attempt is not None
        assert attempt.session is not None
        record, session = attempt.record, attempt.session
        if (problem := attempt.end(session)) is not None:
            return problem
        try:
            await session.finish(record.finishing(await record.stored_async(result_json)))
        except BaseException as error:
            return record.commit_failed(error, session)
        attempt.abandon()
        return _COMMITTED

    async def close(self) -> None:
        self._is_over = True
        if (attempt := self._attempt) is None:
            return
        attempt.record.is_over = True
        if attempt.session is not None and not attempt.session.is_forked:
            try:
                await attempt.session.give_up()
            finally:
                attempt.abandon()


def defer_cancel() -> None:
    """Note that the running coroutine's code has ended: no stop may interrupt the recording of its
    outcome.
    """
    disarm_stops()
    task: Any = asyncio.current_task()
    if hasattr(task, "is_finishing"):
        task.is_finishing = True
