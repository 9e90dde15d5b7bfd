"""The broker: runs scripts of statements on a suitable connection and turns failures into values. Every
database operation of a producer uses ``perform``, which never raises for operational failures;
``db/errors.py`` classifies the failures. The first statement brings the schema up to date.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psycopg
from psycopg.errors import ReadOnlySqlTransaction

from horsies.database_url import mask_url
from horsies.db.database import ONE_STATE, Database
from horsies.db.errors import describe, is_transient
from horsies.db.pipeline import Pipeline, execute, execute_async, stream, stream_async
from horsies.db.statement import (
    Script,
    Step,
    drive,
    drive_async,
    read_rows,
    run_script,
    run_script_async,
)
from horsies.encryption import CodecFailed
from horsies.errors import ConfigurationError, ErrorCode, HorsiesError
from horsies.modules import Deferred
from horsies.result import Err, Ok, Result

if TYPE_CHECKING:
    from horsies.config.postgres import PostgresConfig
    from horsies.db import blockers, caller_transaction, migrate
    from horsies.db.limits import Limits
    from horsies.db.statement import Statement
    from horsies.db.statements import monitor
    from horsies.db.statements.monitor import ExpiredTask, StaleTask, WorkerStats
    from horsies.db.statements.tasks import InsertTask, TaskId
    from horsies.tasks import recovery
    from horsies.tasks import waiters as result_waiters
    from horsies.tasks.waiters import FindObstacle, Waiters
else:
    blockers = Deferred("horsies.db.blockers")
    caller_transaction = Deferred("horsies.db.caller_transaction")
    migrate = Deferred("horsies.db.migrate")
    monitor = Deferred("horsies.db.statements.monitor")
    recovery = Deferred("horsies.tasks.recovery")
    result_waiters = Deferred("horsies.tasks.waiters")

T = TypeVar("T")


class BrokerErrorCode(StrEnum):
    """The operation that failed."""

    SCHEMA_INIT_FAILED = "SCHEMA_INIT_FAILED"
    """The tables could not be created, updated or checked."""
    ENQUEUE_FAILED = "ENQUEUE_FAILED"
    """The task was not stored, or its confirmation was lost."""
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    """The idempotency key belongs to a different request."""
    TASK_INFO_QUERY_FAILED = "TASK_INFO_QUERY_FAILED"
    """The state of a task could not be read."""
    MONITORING_QUERY_FAILED = "MONITORING_QUERY_FAILED"
    """A list, a count or a snapshot could not be read."""
    INVALID_QUERY = "INVALID_QUERY"
    """An argument of a query is wrong; the message names the argument."""
    CLEANUP_FAILED = "CLEANUP_FAILED"
    """A change to tasks failed, such as a cancellation or an expiry."""
    CLOSE_FAILED = "CLOSE_FAILED"
    """Connections could not be closed."""
    LISTENER_START_FAILED = "LISTENER_START_FAILED"
    """Reserved: the listening connection could not be opened."""
    LISTENER_SUBSCRIBE_FAILED = "LISTENER_SUBSCRIBE_FAILED"
    """Reserved: LISTEN on a channel failed."""
    NO_BROKER = "NO_BROKER"
    """The handle has no connection to a database."""
    DB_PING_FAILED = "DB_PING_FAILED"
    """The database did not respond to a ping."""
    WORKER_PING_FAILED = "WORKER_PING_FAILED"
    """The ping to workers could not be sent or received."""
    UNKNOWN_QUEUE = "UNKNOWN_QUEUE"
    """The application has no queue with this name."""
    QUEUE_SWITCH_FAILED = "QUEUE_SWITCH_FAILED"
    """A queue could not be paused or resumed."""
    KEY_CHANGE_FAILED = "KEY_CHANGE_FAILED"
    """A key could not be limited, paused or resumed."""
    UNKNOWN_SCHEDULE = "UNKNOWN_SCHEDULE"
    """No schedule has this name."""
    SCHEDULE_EXISTS = "SCHEDULE_EXISTS"
    """Another schedule already has this name."""
    SCHEDULE_OPERATION_FAILED = "SCHEDULE_OPERATION_FAILED"
    """A schedule could not be read or changed."""
    NO_TYPE_AVAILABLE = "NO_TYPE_AVAILABLE"
    """Reserved: the type of a stored value is unknown."""
    INVALID_JSON_PAYLOAD = "INVALID_JSON_PAYLOAD"
    """Reserved: a stored value is not JSON."""
    INVALID_TASK_OPTIONS = "INVALID_TASK_OPTIONS"
    """Reserved: the stored options of a task cannot be read."""


@dataclass(frozen=True, slots=True)
class BrokerOperationError:
    """The reason why a broker operation failed; ``retryable`` is set if a later attempt can succeed."""

    code: BrokerErrorCode
    """The operation that failed."""
    message: str
    """A sentence with the reason and the fix."""
    retryable: bool = False
    """Whether the same call can succeed later."""
    exception: BaseException | None = field(default=None, repr=False)
    """The exception behind the error, if there is one."""


BrokerResult: TypeAlias = Result[T, BrokerOperationError]
"""The result of a call to the database: ``Ok``, or ``Err`` with a ``BrokerOperationError``."""


STALE_THRESHOLD_MS_MIN = 1_000
RESEND_DELAYS_SECONDS = (0.2, 0.4, 0.8)

_ELSEWHERE = (
    "The connection given as transaction= leads to another database or schema than the "
    "application's; connect it to app.database_url"
)
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
_CLEANING = BrokerErrorCode.CLEANUP_FAILED


class PayloadMismatchError(Exception):
    """The id or idempotency key is already used by a different request."""


class PostgresBroker:
    """One process's access to the database: pools, schema, and result waiters.

    Without ``migrates`` it never changes a table, and an outdated schema is a failure. With ``limits``, no
    statement waits for long, and a failure names the session that holds the lock.
    """

    def __init__(
        self,
        config: PostgresConfig,
        *,
        role: str = "producer",
        migrates: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.config = config
        self.database = Database(config, role, migrates=migrates, limits=limits)
        # Whether statements may bypass psycopg's cursors. This is not possible with a pooler in
        # transaction mode, which needs a transaction with settings around each statement, or with
        # ``echo``, which logs each statement.
        self.is_direct = not (config.pgbouncer_transaction_mode or config.echo)
        # The schema that was found in a caller's transaction.
        self._within = self.database.installation
        self._waiters: Waiters | None = None
        # Explains why a task has not ended, for the message of a wait that times out.
        self.find_obstacle: FindObstacle | None = None
        # The lock is replaced in a forked process, because one of the parent's threads may have held it
        # during the fork.
        self._locks: dict[int, threading.Lock] = {}
        # A forked process inherits this value, because the schema belongs to the database.
        self._is_schema_ready = False

    @property
    def waiters(self) -> Waiters:
        """The waiters for results. They are created at the first wait, because most commands do not need
        them.
        """
        if self._waiters is None:
            with self._lock():
                if self._waiters is None:
                    made = result_waiters.Waiters(
                        self._connect_waiters, find_obstacle=self.find_obstacle
                    )
                    made.was_reached = self._is_schema_ready
                    self._waiters = made
        return self._waiters

    def skip_schema_check(self) -> None:
        """Skip the check of the schema before the first statement, because this child's worker has already
        checked the schema.

        The check opens a separate session. After a server crash, it would make a send inside a task's
        transaction fail, although only the session of that transaction matters.
        """
        self._is_schema_ready = True

    def ensure_schema_initialized(self) -> BrokerResult[None]:
        """Create or update the tables if they are outdated; safe to call in many processes at once."""
        try:
            self._ensure_schema()
        except Exception as error:
            return self._failed(BrokerErrorCode.SCHEMA_INIT_FAILED, error)
        return Ok(None)

    async def ensure_schema_initialized_async(self) -> BrokerResult[None]:
        return await asyncio.to_thread(self.ensure_schema_initialized)

    def perform(
        self,
        code: BrokerErrorCode,
        script: Script[T],
        transaction: object = None,
        *,
        atomic: bool = False,
        read_only: bool = False,
    ) -> BrokerResult[T]:
        """Run the script on a pooled connection, or inside the caller's transaction.

        Without a transaction, every statement is committed on its own; ``atomic`` puts all statements
        into one transaction. With ``read_only``, all statements see the same snapshot.
        """
        logged = self.config.echo
        try:
            self._ensure_schema()
            if transaction is None:
                with (
                    self.database.connection() as connection,
                    connection.transaction() if atomic or read_only else nullcontext(),
                ):
                    if read_only:
                        connection.execute(ONE_STATE)
                    return Ok(run_script(connection, script, logged=logged))
            with caller_transaction.borrowed(transaction, self._within) as execute:
                return Ok(drive(execute, script, logged=logged))
        except Exception as error:
            return self._failed(code, error, transaction)

    async def perform_async(
        self,
        code: BrokerErrorCode,
        script: Script[T],
        transaction: object = None,
        *,
        atomic: bool = False,
        read_only: bool = False,
    ) -> BrokerResult[T]:
        """Like ``perform``, but on the running event loop's connections."""
        logged = self.config.echo
        try:
            if not self._is_schema_ready:
                await asyncio.to_thread(self._ensure_schema)
            if transaction is None:
                async with (
                    self.database.connection_async() as connection,
                    connection.transaction() if atomic or read_only else nullcontext(),
                ):
                    if read_only:
                        await connection.execute(ONE_STATE)
                    return Ok(await run_script_async(connection, script, logged=logged))
            async with caller_transaction.borrowed_async(
                transaction, self._within
            ) as execute_async:
                return Ok(await drive_async(execute_async, script, logged=logged))
        except Exception as error:
            if self.database.limits is not None:
                return await asyncio.to_thread(self._failed, code, error, transaction)
            return self._failed(code, error, transaction)

    def store(
        self,
        make_script: Callable[[], Script[T]],
        transaction: object = None,
        *,
        resend: bool = False,
        atomic: bool = False,
    ) -> BrokerResult[T]:
        """Run a script that stores tasks or runs; ``resend`` repeats it up to three times after
        transient failures.

        Every repetition must use the same ids and fingerprints, so that no task is stored twice after a lost
        response.
        """
        code = BrokerErrorCode.ENQUEUE_FAILED
        for delay_seconds in resend_delays(resend, transaction):
            stored = self.perform(code, make_script(), transaction, atomic=atomic)
            if not _is_transient(stored):
                return stored
            time.sleep(delay_seconds)
        return self.perform(code, make_script(), transaction, atomic=atomic)

    async def store_async(
        self,
        make_script: Callable[[], Script[T]],
        transaction: object = None,
        *,
        resend: bool = False,
        atomic: bool = False,
    ) -> BrokerResult[T]:
        code = BrokerErrorCode.ENQUEUE_FAILED
        for delay_seconds in resend_delays(resend, transaction):
            stored = await self.perform_async(code, make_script(), transaction, atomic=atomic)
            if not _is_transient(stored):
                return stored
            await asyncio.sleep(delay_seconds)
        return await self.perform_async(code, make_script(), transaction, atomic=atomic)

    def insert(
        self, statement: Statement[Any, TaskId], row: InsertTask
    ) -> BrokerResult[str] | None:
        """Insert one task in one round trip and return its id; None if the id or key is already used. Allowed
        only if ``is_direct``. The bypassed layers would take half of the processor time of a send.
        """
        try:
            self._ensure_schema()
            pool = self.database.pool()
            lent = pool.take()
            try:
                inserted = execute(lent.connection, statement, row)
            except ReadOnlySqlTransaction:
                lent.expire()
                raise
            finally:
                pool.put(lent)
        except Exception as error:
            return Err(failure(BrokerErrorCode.ENQUEUE_FAILED, error))
        return Ok(row.id) if inserted else None

    async def insert_async(
        self, statement: Statement[Any, TaskId], row: InsertTask
    ) -> BrokerResult[str] | None:
        """Like ``insert``, but on the running event loop's connections."""
        try:
            if not self._is_schema_ready:
                await asyncio.to_thread(self._ensure_schema)
            pool = self.database.pool_async()
            lent = await pool.take()
            try:
                inserted = await execute_async(lent.connection, statement, row)
            except ReadOnlySqlTransaction:
                lent.expire()
                raise
            finally:
                pool.put(lent)
        except Exception as error:
            return Err(failure(BrokerErrorCode.ENQUEUE_FAILED, error))
        return Ok(row.id) if inserted else None

    def store_stream(self, steps: Iterable[Step]) -> BrokerResult[None]:
        """Run a stream's statements in one transaction; see ``pipeline.stream``."""
        try:
            self._ensure_schema()
            with self.database.connection() as connection, connection.transaction():
                stream(connection, steps)
        except Exception as error:
            return Err(failure(BrokerErrorCode.ENQUEUE_FAILED, error))
        return Ok(None)

    async def store_stream_async(self, steps: Iterable[Step]) -> BrokerResult[None]:
        try:
            if not self._is_schema_ready:
                await asyncio.to_thread(self._ensure_schema)
            async with self.database.connection_async() as connection, connection.transaction():
                await stream_async(connection, steps)
        except Exception as error:
            return Err(failure(BrokerErrorCode.ENQUEUE_FAILED, error))
        return Ok(None)

    def get_stale_tasks(self, stale_threshold_minutes: float = 2) -> BrokerResult[list[StaleTask]]:
        """List RUNNING tasks that have sent no heartbeat for longer than the threshold."""
        return self.perform(_READING, _stale_tasks(stale_threshold_minutes))

    async def get_stale_tasks_async(
        self, stale_threshold_minutes: float = 2
    ) -> BrokerResult[list[StaleTask]]:
        return await self.perform_async(_READING, _stale_tasks(stale_threshold_minutes))

    def get_worker_stats(self) -> BrokerResult[list[WorkerStats]]:
        """Count each child process's running tasks."""
        return self.perform(_READING, read_rows(monitor.count_worker_tasks()))

    async def get_worker_stats_async(self) -> BrokerResult[list[WorkerStats]]:
        return await self.perform_async(_READING, read_rows(monitor.count_worker_tasks()))

    def get_expired_tasks(self) -> BrokerResult[list[ExpiredTask]]:
        """List PENDING tasks past their ``good_until`` that no worker has expired yet."""
        return self.perform(_READING, read_rows(monitor.find_expired_tasks()))

    async def get_expired_tasks_async(self) -> BrokerResult[list[ExpiredTask]]:
        return await self.perform_async(_READING, read_rows(monitor.find_expired_tasks()))

    def mark_stale_tasks_as_failed(self, stale_threshold_ms: int = 300_000) -> BrokerResult[int]:
        """Fail stale RUNNING tasks as if their worker had crashed; return how many.

        Each task is retried or fails according to its policy, and its attempt is recorded. A task is
        stale if its start, this attempt's heartbeats and its worker's last heartbeat are all older than
        the threshold (at least 1,000 ms), and its worker does not hold its session lock.

        Example:
            handled = app.get_broker().mark_stale_tasks_as_failed(600_000).unwrap()
        """
        return self._recover_stale("RUNNING", stale_threshold_ms)

    async def mark_stale_tasks_as_failed_async(
        self, stale_threshold_ms: int = 300_000
    ) -> BrokerResult[int]:
        return await asyncio.to_thread(self.mark_stale_tasks_as_failed, stale_threshold_ms)

    def requeue_stale_claimed(self, stale_threshold_ms: int = 120_000) -> BrokerResult[int]:
        """Return stale CLAIMED tasks to their queues; return how many.

        They had not started, so no attempt is counted. "Stale" has the same meaning as for running tasks.
        """
        return self._recover_stale("CLAIMED", stale_threshold_ms)

    async def requeue_stale_claimed_async(
        self, stale_threshold_ms: int = 120_000
    ) -> BrokerResult[int]:
        return await asyncio.to_thread(self.requeue_stale_claimed, stale_threshold_ms)

    def expire_pending_tasks(self) -> BrokerResult[int]:
        """Mark PENDING tasks past their ``good_until`` as EXPIRED; return how many."""
        return self._recover(recovery.expire_pending)

    async def expire_pending_tasks_async(self) -> BrokerResult[int]:
        return await asyncio.to_thread(self.expire_pending_tasks)

    def _recover_stale(self, status: str, threshold_ms: int) -> BrokerResult[int]:
        if not threshold_ms >= STALE_THRESHOLD_MS_MIN:
            least = f"{STALE_THRESHOLD_MS_MIN:,}"
            message = f"stale_threshold_ms must be at least {least}, not {threshold_ms!r}."
            return Err(BrokerOperationError(_CLEANING, message))
        seconds = threshold_ms / 1000
        return self._recover(lambda pipeline: recovery.recover_stale(pipeline, seconds, status))

    def _recover(self, recover: Callable[[Pipeline], int]) -> BrokerResult[int]:
        recovery.refuse_running_loop()
        try:
            self._ensure_schema()
            with self.database.connection() as connection:
                pipeline = Pipeline(connection, prepared=False, logged=self.config.echo)
                return Ok(recover(pipeline))
        except Exception as error:
            return self._failed(_CLEANING, error)

    def close(self) -> BrokerResult[None]:
        """Close the waiters and the synchronous pool; report the first failure."""
        waiting = Ok(None) if self._waiters is None else _attempt(self._waiters.close)
        database = _attempt(self.database.close)
        return waiting if waiting.is_err() else database

    async def close_async(self) -> BrokerResult[None]:
        """Like ``close``, and also close the running event loop's connections."""
        closed = await asyncio.to_thread(self.close)
        closed_async = _attempt(self.database.close_async)
        return closed if closed.is_err() else closed_async

    def _ensure_schema(self) -> None:
        if self._is_schema_ready:
            return
        with self._lock():
            if self._is_schema_ready:
                return
            migrate.prepare_schema(self.database)
            self._is_schema_ready = True
            if self._waiters is not None:
                self._waiters.was_reached = True

    def _failed(
        self, code: BrokerErrorCode, error: Exception, transaction: object = None
    ) -> Err[BrokerOperationError]:
        if self.database.limits is not None:
            error = blockers.named(self.database, error)
        return Err(failure(code, error, transaction))

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _connect_waiters(self) -> Any:
        self._ensure_schema()
        return self.database.connect("waiters", session=True)


def resend_delays(resend: bool, transaction: object) -> Sequence[float]:
    """Return the delays before the repetitions of a failed send."""
    # A failed transaction of the caller can be repeated only by the caller.
    return RESEND_DELAYS_SECONDS if resend and transaction is None else ()


def _is_transient(stored: BrokerResult[Any]) -> bool:
    return isinstance(stored, Err) and stored.err_value.retryable


def _stale_tasks(stale_threshold_minutes: float) -> Script[list[StaleTask]]:
    return read_rows(monitor.find_stale_tasks(stale_threshold_minutes * 60))


def failure(
    code: BrokerErrorCode, error: BaseException, transaction: object = None
) -> BrokerOperationError:
    """Turn an exception into a value that contains no password."""
    if isinstance(error, PayloadMismatchError):
        return BrokerOperationError(BrokerErrorCode.PAYLOAD_MISMATCH, str(error))
    if isinstance(error, CodecFailed):
        return BrokerOperationError(code, str(error), exception=error.__cause__)
    if transaction is not None:
        if isinstance(error, caller_transaction.UnusableTransactionError):
            return BrokerOperationError(code, str(error))
        if caller_transaction.leads_elsewhere(error):
            message = f"{_ELSEWHERE} ({describe(error)})."
            return BrokerOperationError(code, message, exception=presentable(error))
    return BrokerOperationError(code, describe(error), is_transient(error), presentable(error))


def presentable(error: BaseException) -> BaseException:
    """Return the error, or a copy without its chain of causes if a text in the chain may show a password."""
    if isinstance(error, HorsiesError) or not revealing(error):
        return error
    kind = type(error) if isinstance(error, psycopg.Error) else RuntimeError
    return kind(describe(error))


def revealing(error: BaseException) -> list[BaseException]:
    """Return the exceptions in the chain of causes whose text may show a password that ``describe`` masks."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return [one for one in chain if _is_revealing(one)]


def _is_revealing(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, HorsiesError):  # describe() omits the rendered traceback
        return mask_url(text) != text
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    sentence = " ".join((primary or text).split())
    return sentence not in describe(error) or mask_url(text) != text


def _attempt(close: Any) -> BrokerResult[None]:
    try:
        close()
    except Exception as error:
        return Err(failure(BrokerErrorCode.CLOSE_FAILED, error))
    return Ok(None)


def build_broker(
    config: PostgresConfig,
    role: str,
    *,
    migrates: bool = True,
    find_obstacle: FindObstacle | None = None,
) -> PostgresBroker:
    """Return a broker that connects on first use; raise HRS-211 if the broker cannot be built."""
    try:
        broker = PostgresBroker(config, role=role, migrates=migrates)
    except HorsiesError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"The broker could not be built: {describe(error)}",
            code=ErrorCode.BROKER_INIT_FAILED,
        ) from presentable(error)
    broker.find_obstacle = find_obstacle
    return broker
