"""Statements without psycopg's cursors: the turns of workers, and sends.

Parameters are sent as text, and most statements are prepared once per session.

``Pipeline`` runs several statements in one round trip and one transaction. Every worker turn uses it. It
works like psycopg's pipeline without a BEGIN, but at a lower level: libpq's pipeline mode, rows through
psycopg's own loaders. A turn takes about one millisecond in all. psycopg's cursors and generators would
account for 0.45 ms of that; this module takes 0.1 ms. Schedulers use it as well, one statement at a time.

``execute`` runs one statement in its own transaction, for sends. libpq and the kernel take about 60 µs of
processor time per send. A cursor would add 100 µs; this module adds 20 µs. It works only without a pooler,
because a pooler's sessions cannot keep prepared statements.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from psycopg import Connection, Error
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import DataError, OperationalError, QueryCanceled, error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from horsies.db.database import (
    TRANSACTION_BEGIN,
    TRANSACTION_SETTINGS,
    AsyncOwnConnection,
    Database,
    OwnConnection,
    installation_of,
    set_local,
    time_limits,
)
from horsies.db.errors import is_notification_queue_full, is_transient
from horsies.db.limits import NO_LIMITS, Limits
from horsies.db.listen import free_notification_queue
from horsies.db.statement import Script, Statement, Step, drive, log_statements

Answer = TypeVar("Answer")

_Frame: TypeAlias = tuple[tuple[bytes, ...], tuple[bytes, ...]]
_NO_FRAME: _Frame = (), ()
# Constants, because accessing an enum member takes 0.1 to 0.5 µs, and a turn needs about ten of them.
_CONNECTED, _SYNC, _ROWS = ConnStatus.OK, ExecStatus.PIPELINE_SYNC, ExecStatus.TUPLES_OK
_FAILURES = frozenset(
    (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE, ExecStatus.PIPELINE_ABORTED)
)
_STATUS = attrgetter("status")
# The time limit of a cancel request.
CANCEL_SECONDS = 2.0
# The server accepts messages of up to a gigabyte, which includes the lengths and formats of parameters.
MESSAGE_BYTES_MAX = 1024 * 1024 * 1024 - 64 * 1024
# A statement's time limit does not end a COMMIT, so the whole group is cancelled too: this many seconds after
# the time limit, or after twice the limit if that is sooner.
COMMIT_SECONDS = 5.0
# Behind a pooler, the server ends a statement after this fraction of the time limit for the response, so that
# it can report the reason.
_STATEMENT_SHARE = 0.8
# The wait event of a server process.
_WAIT_EVENT = "SELECT wait_event FROM pg_catalog.pg_stat_activity WHERE pid = %s"
# How long to wait for a response between two calls of ``meanwhile``.
WAIT_SECONDS = 0.1
# The time limit of a cancel request for a send that was interrupted.
SEND_CANCEL_SECONDS = 5.0
_DONE = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
# psycopg sends DEALLOCATE ALL after one of its own transactions was rolled back.
_UNKNOWN_STATEMENT = b"26000"


class Pipeline:
    """Runs groups of statements on one connection, each group as one transaction.

    Without ``prepared`` (behind a pooler in transaction mode) every statement is parsed each time. A group
    without a response for ``timeout_seconds`` is cancelled and raises an error; None means no limit. With
    ``logged`` the statements' names and durations are logged.
    """

    def __init__(
        self,
        connection: Connection[Any],
        *,
        prepared: bool = True,
        timeout_seconds: float | None = None,
        logged: bool = False,
        limits: Limits = NO_LIMITS,
        connect: Callable[[], Connection[Any]] | None = None,
    ) -> None:
        self.connection = connection
        # Opens a second session, which finds out why the first session does not respond.
        self._connect = connect
        self.timeout_seconds = self._patience_seconds = timeout_seconds
        # Whether the current group took too long and was cancelled.
        self._has_cancelled = False
        self._installation = installation_of(connection)
        is_pooled = self._installation.is_pooled
        version = connection.info.server_version
        self._frame = _pooled_frame(timeout_seconds, limits, version) if is_pooled else _NO_FRAME
        self._logged = logged
        # The names of the statements that the session has prepared.
        self._prepared: set[bytes] | None = set() if prepared else None
        self._poller = select.poll()
        # Called every WAIT_SECONDS while waiting for a response; an exception from it closes the connection.
        self.meanwhile: Callable[[], None] | None = None
        # The error because of which the socket can no longer be read.
        self._break: OperationalError | None = None
        # The transformer is created without the connection, because behind a pooler the connection's
        # settings are those of the last transaction.
        self._transformer = Transformer(None)
        self.round_trips = 0
        self.statements = 0

    @classmethod
    def open(
        cls,
        database: Database,
        role: str,
        session_settings: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Pipeline:
        """Connect to the database.

        ``session_settings`` apply only without a pooler, where the session belongs to this process alone;
        the lock limit applies only behind a pooler. A pooler accepts every statement immediately and
        keeps it while the database is down, by default for two minutes, so TCP never notices that the
        server is dead. For this reason ``tcp_user_timeout_ms`` limits the wait behind a pooler.
        """
        config, options = database.config, None
        is_pooled = config.pgbouncer_transaction_mode
        if session_settings is not None and not is_pooled:
            options = f"{given_options(database.urls()[0])} {session_settings}"
        return cls(
            database.connect(role, options=options, statement_ms=limits.statement_ms),
            prepared=not is_pooled,
            timeout_seconds=_answer_seconds(config.tcp_user_timeout_ms, limits, is_pooled),
            logged=config.echo,
            limits=limits,
            connect=None if is_pooled else lambda: database.connect(role),
        )

    @property
    def is_midway(self) -> bool:
        """Return whether a group was abandoned before its response arrived; the remedy is a new session."""
        return self.connection.pgconn.pipeline_status != PipelineStatus.OFF

    @property
    def sender_pid(self) -> int | None:
        """The server process that sends our notifications; it is unknown behind a pooler."""
        return None if self._prepared is None else self.connection.pgconn.backend_pid

    def run(self, steps: Sequence[Step], timeout_seconds: float | None = None) -> list[list[Any]]:
        """Execute the statements in order, in one transaction, and return the rows of each.
        ``timeout_seconds`` shortens the time limit for this group.
        """
        self._patience_seconds = self.timeout_seconds
        if timeout_seconds is not None:
            longest = math.inf if self.timeout_seconds is None else self.timeout_seconds
            self._patience_seconds = min(timeout_seconds, longest)
        self._has_cancelled = False
        self.round_trips += 1
        self.statements += len(steps)
        if not self._logged:
            return self._answers(steps)
        with log_statements(steps):
            return self._answers(steps)

    def _answers(self, steps: Sequence[Step]) -> list[list[Any]]:
        results = self._exchange(self.connection.pgconn, steps)
        if not _FAILURES.isdisjoint(map(_STATUS, results)):
            self._raise_first_failure(results)
        if self._has_cancelled:
            raise OperationalError(
                "the commit is in doubt, because its wait for a standby was cancelled"
            )
        before, after = self._frame
        if after:
            if results[-1].command_status != b"COMMIT":
                raise OperationalError("the server answered COMMIT with a rollback")
            results = results[len(before) : -1]
        return [
            self._rows(statement, result)
            for (statement, _), result in zip(steps, results, strict=True)
        ]

    def run_script(self, script: Script[Answer]) -> Answer:
        """Run a script, with each of its statements in its own transaction, and return the
        script's result.
        """
        return drive(lambda statement, params: self.run([(statement, params)])[0], script)

    def _exchange(self, pgconn: PGconn, steps: Sequence[Step]) -> list[PGresult]:
        """Send the statements and return their results.

        Behind a pooler, sessions keep no settings, so the statements are wrapped in BEGIN and COMMIT. An
        error at the commit is returned as one more result.
        """
        before, after = self._frame
        schema, payloads = self._installation.schema, self._installation.payloads
        texts = [
            statement.texts(params if payloads is None else statement.stored(params, payloads))
            for statement, params in steps
        ]
        refuse_oversized(steps, texts)
        pgconn.enter_pipeline_mode()
        expected = [_send_plain(pgconn, command) for command in before] if before else []
        for (statement, _), values in zip(steps, texts, strict=True):
            expected.append(send_statement(pgconn, statement, values, schema, self._prepared))
        if after:
            expected += [_send_plain(pgconn, command) for command in after]
        pgconn.pipeline_sync()
        results: list[PGresult] = []
        try:
            self._flush(pgconn)
            for count in expected:
                results.append(self._take_result(pgconn, count))
            self._take_sync(pgconn, results)
            pgconn.exit_pipeline_mode()
        except OperationalError as error:
            raise _transient_failure(results) or error from None
        return results

    def _flush(self, pgconn: PGconn) -> None:
        """Write all data and read at the same time. With large texts in both directions, the server and
        this process would otherwise wait for each other to read.
        """
        while pgconn.flush():
            if not self._wait(pgconn, select.POLLIN | select.POLLOUT):
                return

    def _take_result(self, pgconn: PGconn, count: int) -> PGresult:
        """Take one statement's results and return the first failure, or the last result."""
        result = self._take_one(pgconn)
        for _ in range(count - 1):
            found = self._take_one(pgconn)
            if result.status not in _FAILURES:
                result = found
        return result

    def _take_one(self, pgconn: PGconn) -> PGresult:
        """Take one result of a group, and the None that follows it, which libpq has at once."""
        found = self._next_result(pgconn)
        if found is None or pgconn.status != _CONNECTED:
            raise self._loss(pgconn, found)
        if found.status != _SYNC:
            pgconn.get_result()
        return found

    def _take_sync(self, pgconn: PGconn, results: list[PGresult]) -> None:
        """Read up to the end of the group and add errors raised at its commit to the results.

        The server commits at the Sync message, after the results of all statements: a deferred
        constraint, a serialization failure or a full notification queue is reported only then.
        """
        while True:
            found = self._next_result(pgconn)
            if found is None or pgconn.status != _CONNECTED:
                raise self._loss(pgconn, found)
            if found.status == _SYNC:
                return
            results.append(found)
            pgconn.get_result()  # read the None that follows the error

    def _next_result(self, pgconn: PGconn) -> PGresult | None:
        # get_result() could wait too, but it would not handle signals, and it would hold the GIL.
        while pgconn.is_busy():
            if not self._wait(pgconn, select.POLLIN):
                break
        return pgconn.get_result()

    def _wait(self, pgconn: PGconn, events: int) -> bool:
        """Wait for the socket; return False if it is closed and only buffered input remains."""
        self._poller.register(pgconn.socket, events)
        ((_, event),) = self._first_event(self._patience_seconds) or self._late_event()
        if event & ~select.POLLOUT:
            try:
                pgconn.consume_input()
            except OperationalError as error:
                self._break = error
                return False
        return True

    def _late_event(self) -> list[tuple[int, int]]:
        """Wait for a standby, or cancel the group, after the time limit; raise an error if the server still
        does not respond.
        """
        ready: list[tuple[int, int]] = []
        while not ready and self._waits_for_standby():
            ready = self._first_event(self._patience_seconds)
        if not ready:
            # Send a cancel request, because otherwise the server could apply the abandoned group much later.
            # A reachable server responds to the request with an error, and the session continues.
            self._has_cancelled = True
            with suppress(Error):
                self.connection.cancel_safe(timeout=CANCEL_SECONDS)
            ready = self._first_event(CANCEL_SECONDS)
        if not ready:
            raise OperationalError(self._silence())
        return ready

    def _waits_for_standby(self) -> bool:
        """Return whether the server has committed the group locally and is waiting for a synchronous
        standby.

        A cancel request would end that wait, and a commit that no standby has received would count as a
        success. Behind a pooler the server process is unknown.
        """
        if self._connect is None:
            return False
        pid = self.connection.pgconn.backend_pid
        try:
            with self._connect() as session:
                row = session.execute(_WAIT_EVENT, (pid,), prepare=False).fetchone()
        except Error:
            return False
        return row is not None and tuple(row) == ("SyncRep",)

    def _first_event(self, remaining: float | None) -> list[tuple[int, int]]:
        """Wait for a socket event and call ``meanwhile`` regularly during the wait. The result is empty after
        ``remaining`` seconds.
        """
        while True:
            slice_seconds = WAIT_SECONDS if remaining is None else min(WAIT_SECONDS, remaining)
            if ready := self._poller.poll(slice_seconds * 1000):
                return ready
            if remaining is not None:
                remaining -= slice_seconds
                if remaining <= 0:
                    return ready
            if self.meanwhile is not None:
                self.meanwhile()

    def _loss(self, pgconn: PGconn, result: PGresult | None) -> Error:
        """Return the server's reason for closing the connection, or the client's error if there is none."""
        if result is not None and result.error_field(DiagnosticField.SQLSTATE):
            return error_from_result(result)
        return self._break or OperationalError(pgconn.get_error_message())

    def _rows(self, statement: Statement[Any, Any], result: PGresult) -> list[Any]:
        if result.status != _ROWS:
            return []
        transformer = self._transformer
        transformer.set_pgresult(result)
        rows = transformer.load_rows(0, result.ntuples, statement.make_row)
        return statement.read(rows, self._installation.payloads)

    def _raise_first_failure(self, results: Sequence[PGresult]) -> None:
        failed = next(result for result in results if result.status in _FAILURES)
        self._restore_session()
        failure = error_from_result(failed)
        if is_notification_queue_full(failure):
            with suppress(Error):  # if this fails, the next group fails with the same error
                free_notification_queue(self.connection)
        if self._has_cancelled and isinstance(failure, QueryCanceled):
            raise QueryCanceled(self._silence())
        raise failure

    def _restore_session(self) -> None:
        """Prepare the session for the next group after a group has failed. If the server does not answer
        within the time limit of the group, raise an error; the caller then replaces the session.

        The group was rolled back, and its PREPAREs may have been undone as well.
        """
        pgconn = self.connection.pgconn
        if self._prepared is not None:
            self._restore(pgconn, b"DEALLOCATE ALL")
            self._prepared = set()
        if pgconn.transaction_status != TransactionStatus.IDLE:  # BEGIN has opened a transaction
            self._restore(pgconn, b"ROLLBACK")

    def _restore(self, pgconn: PGconn, command: bytes) -> None:
        _send_plain(pgconn, command)
        self._flush(pgconn)
        result = self._next_result(pgconn)
        if result is None or pgconn.status != _CONNECTED:
            raise self._loss(pgconn, result)
        self._next_result(pgconn)  # read the None that ends the command
        if result.status in _FAILURES:
            error = error_from_result(result)
            raise OperationalError(f"the session is in doubt: {error}") from error

    def _silence(self) -> str:
        return f"no answer for {self._patience_seconds:g} s"


def send_statement(
    pgconn: PGconn,
    statement: Statement[Any, Any],
    values: list[bytes | None],
    schema: str,
    prepared: set[bytes] | None,
) -> int:
    """Send one statement and return how many results it has. ``prepared`` has the names of the statements
    that the session has prepared; if it is None, the statement is parsed each time.
    """
    if prepared is None:
        pgconn.send_query_params(statement.numbered(schema), values)
        return 1
    name = statement.prepared_name
    if name in prepared:
        pgconn.send_query_prepared(name, values)
        return 1
    pgconn.send_prepare(name, statement.numbered(schema))
    pgconn.send_query_prepared(name, values)
    prepared.add(name)
    return 2


def refuse_oversized(steps: Sequence[Step], texts: Sequence[list[bytes | None]]) -> None:
    """Raise an error for a statement so large that the server would close the connection without giving a
    reason.
    """
    if sum(map(len, filter(None, chain.from_iterable(texts)))) <= MESSAGE_BYTES_MAX:
        return  # all statements together are small enough
    for (statement, _), values in zip(steps, texts, strict=True):
        size = sum(map(len, filter(None, values)))
        if size > MESSAGE_BYTES_MAX:
            raise DataError(
                f"the parameters of {statement.name} take {size:,} bytes; "
                f"PostgreSQL accepts at most {MESSAGE_BYTES_MAX:,}"
            )


def _answer_seconds(tcp_timeout_ms: int, limits: Limits, is_pooled: bool) -> float | None:
    """Return how long to wait for a response. Without a pooler there is no limit, because the connection
    itself reports its loss.
    """
    if is_pooled and tcp_timeout_ms:
        return tcp_timeout_ms / 1000
    if limits.statement_ms is None:
        return None
    seconds = limits.statement_ms / 1000
    return seconds + min(COMMIT_SECONDS, seconds)


def _pooled_frame(
    timeout_seconds: float | None, limits: Limits, server_version: int
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the commands around a group of statements. The time limits of locks and statements must be
    shorter than the limit of the whole group.
    """
    answer_ms = math.inf if timeout_seconds is None else 1000 * timeout_seconds
    settings = {"lock_timeout": str(round(min(limits.lock_ms, answer_ms / 2)))}
    if limits.statement_ms is not None:
        statement_ms = round(min(limits.statement_ms, _STATEMENT_SHARE * answer_ms))
        settings |= time_limits(statement_ms, server_version)
    return (TRANSACTION_BEGIN, TRANSACTION_SETTINGS + set_local(settings)), (b"COMMIT",)


def _send_plain(pgconn: PGconn, command: bytes) -> int:
    """Send a command without parameters and rows; return how many results it has."""
    pgconn.send_query_params(command, None)
    return 1


def given_options(url: str) -> str:
    """Return the user's connection options, without the options that this library adds. Options in the URL
    replace PGOPTIONS.
    """
    in_address = conninfo_to_dict(url).get("options")
    return str(os.environ.get("PGOPTIONS", "") if in_address is None else in_address)


def _transient_failure(results: Iterable[PGresult]) -> Error | None:
    """Return the server's last error before the connection broke, such as a shutdown of the server."""
    failures = (error_from_result(result) for result in results if result.status in _FAILURES)
    return next((error for error in failures if is_transient(error)), None)


def execute(
    connection: OwnConnection, statement: Statement[Any, Any], params: tuple[Any, ...]
) -> int:
    """Execute the statement in its own transaction and return how many rows it returned."""
    pgconn, installation = connection.pgconn, connection.installation
    values = statement.texts(statement.stored(params, installation.payloads))
    name, query = statement.prepared_name, statement.numbered(installation.schema)
    if name not in connection.prepared:
        pgconn.send_prepare(name, query)
        _checked(_wait(connection))
        connection.prepared.add(name)
    pgconn.send_query_prepared(name, values)
    result = _wait(connection)
    if _is_forgotten(result):
        connection.prepared.clear()
        pgconn.send_query_params(query, values)
        result = _wait(connection)
    return _checked(result).ntuples


async def execute_async(
    connection: AsyncOwnConnection, statement: Statement[Any, Any], params: tuple[Any, ...]
) -> int:
    """Like ``execute``, but without blocking the event loop."""
    pgconn, installation = connection.pgconn, connection.installation
    values = statement.texts(await statement.stored_async(params, installation.payloads))
    name, query = statement.prepared_name, statement.numbered(installation.schema)
    if name not in connection.prepared:
        pgconn.send_prepare(name, query)
        _checked(await _wait_async(connection))
        connection.prepared.add(name)
    pgconn.send_query_prepared(name, values)
    result = await _wait_async(connection)
    if _is_forgotten(result):
        connection.prepared.clear()
        pgconn.send_query_params(query, values)
        result = await _wait_async(connection)
    return _checked(result).ntuples


def stream(connection: OwnConnection, steps: Iterable[Step]) -> None:
    """Execute statements in the open transaction, and build each statement while the server executes the
    previous one.

    The returned rows are discarded. The statements are not prepared, because a prepared statement that
    the session no longer has would fail the transaction.
    """
    pgconn, installation, is_sent = connection.pgconn, connection.installation, False
    try:
        for statement, params in steps:
            values = statement.texts(statement.stored(params, installation.payloads))
            if is_sent:
                is_sent = False
                _checked(_wait(connection))
            pgconn.send_query_params(statement.numbered(installation.schema), values)
            is_sent = True
            connection.wait(_flush(pgconn))
    except Exception:
        if is_sent:  # a rollback is possible only when the session is not busy
            _wait(connection)
        raise
    if is_sent:
        _checked(_wait(connection))


async def stream_async(connection: AsyncOwnConnection, steps: Iterable[Step]) -> None:
    """Like ``stream``, but blocks the event loop only while it builds a statement."""
    pgconn, installation, is_sent = connection.pgconn, connection.installation, False
    try:
        for statement, params in steps:
            values = statement.texts(await statement.stored_async(params, installation.payloads))
            if is_sent:
                is_sent = False
                _checked(await _wait_async(connection))
            pgconn.send_query_params(statement.numbered(installation.schema), values)
            is_sent = True
            await connection.wait(_flush(pgconn))
    except Exception:
        if is_sent:
            await _wait_async(connection)
        raise
    if is_sent:
        _checked(await _wait_async(connection))


def _wait(connection: OwnConnection) -> PGresult:
    """Wait until the statement ends and return its result."""
    pgconn = connection.pgconn
    results: list[PGresult] = []
    try:
        if pgconn.flush():  # a large text is not sent completely yet
            connection.wait(_flush(pgconn))
        poller = select.poll()
        poller.register(pgconn.socket, select.POLLIN)
        while True:
            while pgconn.is_busy():
                poller.poll()
                pgconn.consume_input()
            if (found := pgconn.get_result()) is None:
                return _decisive(pgconn, results)
            results.append(found)
    except Error:
        # The server returns rows before it commits, so success is not certain yet; only a failure is.
        if (failed := _failure(results)) is None:
            raise
        return failed
    except BaseException:
        # A signal has interrupted the wait. The pool then closes the connection, because its statement has
        # not ended.
        with suppress(Error):
            connection.cancel_safe(timeout=SEND_CANCEL_SECONDS)
        raise


async def _wait_async(connection: AsyncOwnConnection) -> PGresult:
    pgconn = connection.pgconn
    results: list[PGresult] = []
    try:
        if pgconn.flush():
            await connection.wait(_flush(pgconn))
        while True:
            if pgconn.is_busy():
                await _input(pgconn)
            if (found := pgconn.get_result()) is None:
                return _decisive(pgconn, results)
            results.append(found)
    except Error:
        if (failed := _failure(results)) is None:
            raise
        return failed
    except BaseException:  # cancelled
        with suppress(Error):
            await connection.cancel_safe(timeout=SEND_CANCEL_SECONDS)
        raise


def _flush(pgconn: PGconn) -> PQGen[None]:
    """Write all data and read at the same time, because the server may respond before it has received all
    data.
    """
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()


async def _input(pgconn: PGconn) -> None:
    """Read until the next result is complete."""
    loop, socket = asyncio.get_running_loop(), pgconn.socket
    done = loop.create_future()
    loop.add_reader(socket, _read, pgconn, done)
    try:
        await done
    finally:
        loop.remove_reader(socket)


def _read(pgconn: PGconn, done: asyncio.Future[None]) -> None:
    try:
        pgconn.consume_input()
        is_complete = not pgconn.is_busy()
    except Error as error:
        if not done.done():
            done.set_exception(error)
        return
    if is_complete and not done.done():
        done.set_result(None)


def _decisive(pgconn: PGconn, results: Sequence[PGresult]) -> PGresult:
    if not results:  # the connection is lost
        raise OperationalError(pgconn.get_error_message())
    return _failure(results) or results[-1]


def _failure(results: Sequence[PGresult]) -> PGresult | None:
    """Return the first failure: the failure of the statement, of its commit, or of the session."""
    return next((one for one in results if one.status not in _DONE), None)


def _is_forgotten(result: PGresult) -> bool:
    return (
        result.status not in _DONE
        and result.error_field(DiagnosticField.SQLSTATE) == _UNKNOWN_STATEMENT
    )


def _checked(result: PGresult) -> PGresult:
    if result.status not in _DONE:
        raise error_from_result(result)
    return result
