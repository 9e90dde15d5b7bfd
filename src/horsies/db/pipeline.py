"""Several statements in one round trip and one transaction: what every turn of a worker rides on.

The same as psycopg's pipeline without a BEGIN, one level lower: prepared statements over libpq's
pipeline mode, parameters as text, rows through psycopg's own loaders. A turn spends 0.45 ms of Python
in psycopg's cursors and generators, 0.1 ms here, out of about one millisecond in all. Schedulers use it
as well, one statement at a time.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from psycopg import Connection, Error
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import OperationalError, error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from horsies.db.database import Database
from horsies.db.errors import is_transient
from horsies.db.statement import Script, Statement, Step, echo, follow

Answer = TypeVar("Answer")

_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE, ExecStatus.PIPELINE_ABORTED)
# How long to wait for somebody to take a cancel request.
CANCEL_SECONDS = 2.0
# How long to wait for an answer at a time.
WAIT_SECONDS = 0.1


class Pipeline:
    """Runs groups of statements on one connection, each group as one transaction.

    Without ``prepared`` (behind a pooler that hands out another session each time) every statement is
    parsed anew. A group that gets no answer for ``patience_seconds`` is cancelled and raises; None
    waits for ever, as long as the connection lives. With ``echoes`` the statements' names and durations
    are logged.
    """

    def __init__(
        self,
        connection: Connection[Any],
        *,
        prepared: bool = True,
        patience_seconds: float | None = None,
        echoes: bool = False,
    ) -> None:
        self.connection = connection
        self.patience_seconds = patience_seconds
        self._echoes = echoes
        self._prepared: set[bytes] | None = set() if prepared else None
        self._poller = select.poll()
        # Called again and again while an answer is waited for; if it raises, the connection is lost.
        self.meanwhile: Callable[[], None] | None = None
        # What reading from the socket ran into.
        self._break: OperationalError | None = None
        self._transformer = Transformer(connection)
        self.round_trips = 0
        self.statements = 0

    @classmethod
    def open(cls, database: Database, role: str, session_settings: str | None = None) -> Pipeline:
        """Connect, with settings for the session where nobody else will ever use it.

        A pooler takes every statement at once and keeps it while the database is away, two minutes by
        default. So what tells of a dead server elsewhere, unacknowledged data, is a limit here.
        """
        config, parameters = database.config, database.options(role)
        url, _ = database.urls()
        if not config.pgbouncer_transaction_mode:
            if session_settings is not None:
                parameters["options"] = f"{_given_options(url)} {session_settings}"
            return cls(Connection.connect(url, **parameters), echoes=config.echo)
        connection = Connection.connect(url, **parameters)
        patience_seconds = config.tcp_user_timeout_ms / 1000 or None
        return cls(
            connection, prepared=False, patience_seconds=patience_seconds, echoes=config.echo
        )

    @property
    def sender_pid(self) -> int | None:
        """The server process whose notifications are ours; unknown behind a pooler."""
        return None if self._prepared is None else self.connection.pgconn.backend_pid

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        """Execute the statements in order and return the rows of each; all of them or none apply."""
        pgconn = self.connection.pgconn
        self.round_trips += 1
        self.statements += len(steps)
        started = time.perf_counter()
        texts = [statement.texts(params) for statement, params in steps]
        pgconn.enter_pipeline_mode()
        expected = [
            self._send(pgconn, statement, values)
            for (statement, _), values in zip(steps, texts, strict=True)
        ]
        pgconn.pipeline_sync()
        results: list[PGresult] = []
        try:
            self._send_everything(pgconn)
            for count in expected:
                results.append(self._take_result(pgconn, count))
            self._take_result(pgconn, 1)
            pgconn.exit_pipeline_mode()
        except OperationalError as error:
            raise _last_words(results) or error from None
        if self._echoes:
            echo(steps, started)
        self._raise_first_failure(results)
        return [
            self._rows(statement, result)
            for (statement, _), result in zip(steps, results, strict=True)
        ]

    def follow(self, script: Script[Answer]) -> Answer:
        """Run a script, every statement of it as a group of its own, and return its answer."""
        return follow(script, lambda step: self.run([step])[0])

    def _send(
        self, pgconn: PGconn, statement: Statement[Any, Any], values: list[bytes | None]
    ) -> int:
        """Send one statement and return how many results will answer it."""
        if self._prepared is None:
            pgconn.send_query_params(statement.numbered, values)
            return 1
        name = statement.prepared_name
        if name in self._prepared:
            pgconn.send_query_prepared(name, values)
            return 1
        pgconn.send_prepare(name, statement.numbered)
        pgconn.send_query_prepared(name, values)
        self._prepared.add(name)
        return 2

    def _send_everything(self, pgconn: PGconn) -> None:
        """Write all of it, reading meanwhile: with large texts both ways, a server that waits for us to
        read and we that wait for it would wait for ever.
        """
        while pgconn.flush():
            if not self._wait(pgconn, select.POLLIN | select.POLLOUT):
                return

    def _take_result(self, pgconn: PGconn, count: int) -> PGresult:
        """Take the answers to one statement; the first failure among them counts."""
        result: PGresult | None = None
        for _ in range(count):
            found = self._next_result(pgconn)
            if found is None or pgconn.status != ConnStatus.OK:
                raise self._loss(pgconn, found)
            if result is None or result.status not in _FAILED:
                result = found
            if found.status != ExecStatus.PIPELINE_SYNC:
                self._next_result(pgconn)  # the end mark of this answer
        assert result is not None
        return result

    def _next_result(self, pgconn: PGconn) -> PGresult | None:
        # libpq would wait by itself, but deaf to signals and with the interpreter locked.
        while pgconn.is_busy():
            if not self._wait(pgconn, select.POLLIN):
                break
        return pgconn.get_result()

    def _wait(self, pgconn: PGconn, events: int) -> bool:
        """Wait for the socket; False when it has been closed, and only what was read is left."""
        self._poller.register(pgconn.socket, events)
        patience = self.patience_seconds
        ready = self._first_event(patience)
        if not ready:
            self._cancel()
            raise OperationalError(f"no answer for {patience:g} s")
        ((_, event),) = ready
        if event & ~select.POLLOUT:
            try:
                pgconn.consume_input()
            except OperationalError as error:
                self._break = error
                return False
        return True

    def _first_event(self, patience: float | None) -> list[tuple[int, int]]:
        """What happens on the socket, nothing when patience is at its end; others have their turn
        while we wait.
        """
        while True:
            slice_seconds = WAIT_SECONDS if patience is None else min(WAIT_SECONDS, patience)
            ready = self._poller.poll(slice_seconds * 1000)
            if patience is not None:
                patience -= slice_seconds
            if ready or (patience is not None and patience <= 0):
                return ready
            if self.meanwhile is not None:
                self.meanwhile()

    def _loss(self, pgconn: PGconn, result: PGresult | None) -> Error:
        """The reason why the connection is gone, in the server's words if it said any."""
        if result is not None and result.error_field(DiagnosticField.SQLSTATE):
            return error_from_result(result)
        return self._break or OperationalError(pgconn.get_error_message())

    def _cancel(self) -> None:
        """Keep a group that nobody waits for from being applied much later."""
        with suppress(Error):
            self.connection.cancel_safe(timeout=CANCEL_SECONDS)

    def _rows(self, statement: Statement[Any, Any], result: PGresult) -> list[Any]:
        if result.status != ExecStatus.TUPLES_OK:
            return []
        transformer = self._transformer
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, statement.make_row)

    def _raise_first_failure(self, results: Sequence[PGresult]) -> None:
        for result in results:
            if result.status in _FAILED:
                # Nothing of this group was applied, its PREPAREs may not have been either.
                if self._prepared is not None:
                    self._forget_prepared()
                raise error_from_result(result)

    def _forget_prepared(self) -> None:
        try:
            self.connection.execute("DEALLOCATE ALL")
        except Error as error:  # nobody knows what is prepared: only another session helps
            raise OperationalError(f"the session is in doubt: {error}") from error
        self._prepared = set()


def _given_options(url: str) -> str:
    """The options a connection to this address has anyway; one that brings its own has only those."""
    in_address = conninfo_to_dict(url).get("options")
    return str(os.environ.get("PGOPTIONS", "") if in_address is None else in_address)


def _last_words(results: Iterable[PGresult]) -> Error | None:
    """What the server said before the connection broke: that it shuts down, a pooler that it is away."""
    failures = (error_from_result(result) for result in results if result.status in _FAILED)
    return next((error for error in failures if is_transient(error)), None)
