"""The library's own statements in the session of a task's transaction.

Unlike a group of ``Pipeline``, a group is the end of an open transaction. psycopg's compiled generators
read the answers, because most of a child's time for a transaction is spent in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import Error
from psycopg.abc import PQGen
from psycopg.errors import OperationalError, error_from_result
from psycopg.generators import execute, fetch_many, send
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from horsies.db.database import OwnConnection
from horsies.db.pipeline import refuse_oversized, send_statement
from horsies.db.statement import Step

# Constants, because accessing an enum member takes 0.1 to 0.5 µs.
_SYNC = ExecStatus.PIPELINE_SYNC
_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)
# The name of the prepared COMMIT.
_COMMIT = b"horsies_commit"


class OwnStatements:
    """Executes the library's statements in one session.

    Without ``prepared`` (behind a pooler in transaction mode) every statement is parsed each time.
    """

    def __init__(self, connection: OwnConnection, *, prepared: bool) -> None:
        self._connection = connection
        self._installation = connection.installation
        self._prepared: set[bytes] | None = set() if prepared else None
        # Whether the last group failed and had prepared a statement. Then the session may or may not have
        # this statement, and only a new session solves this.
        self.is_doubtful = False

    def command(self, text: bytes) -> None:
        """Execute commands without parameters in one message."""
        pgconn = self._connection.pgconn
        pgconn.send_query(text)
        results = self._connection.wait(execute(pgconn))
        if not results:
            raise OperationalError(pgconn.get_error_message())
        if results[-1].status in _FAILED:  # after a failure, the server executes nothing more
            raise error_from_result(results[-1])

    def commit(self, steps: Sequence[Step]) -> None:
        """Execute the statements and then COMMIT, in one round trip. If a statement fails, nothing is
        committed.
        """
        pgconn, prepared = self._connection.pgconn, self._prepared
        schema, payloads = self._installation.schema, self._installation.payloads
        texts = [
            statement.texts(statement.stored(params, payloads)) if params else []
            for statement, params in steps
        ]
        refuse_oversized(steps, texts)
        pgconn.enter_pipeline_mode()
        count = self._send_commit_last(pgconn, steps, texts, schema)
        pgconn.pipeline_sync()
        results = self._connection.wait(_read_group(pgconn, count))
        if not results or results[-1].status != _SYNC:
            raise _failure(results) or OperationalError(pgconn.get_error_message())
        pgconn.exit_pipeline_mode()
        if results[-2].command_status != b"COMMIT":
            self.is_doubtful = prepared is not None and count > len(steps) + 1
            answered = OperationalError("the server answered COMMIT with a rollback")
            raise _failure(results) or answered

    def _send_commit_last(
        self,
        pgconn: PGconn,
        steps: Sequence[Step],
        texts: Sequence[list[bytes | None]],
        schema: str,
    ) -> int:
        """Send the statements and COMMIT, and return how many results they have. COMMIT is prepared as well,
        which saves the server 3 us each time.
        """
        prepared, count = self._prepared, 1
        for (statement, _), values in zip(steps, texts, strict=True):
            count += send_statement(pgconn, statement, values, schema, prepared)
        if prepared is None:
            pgconn.send_query_params(b"COMMIT", None)
            return count
        if _COMMIT not in prepared:
            pgconn.send_prepare(_COMMIT, b"COMMIT")
            prepared.add(_COMMIT)
            count += 1
        pgconn.send_query_prepared(_COMMIT, [])
        return count


def _read_group(pgconn: PGconn, count: int) -> PQGen[list[PGresult]]:
    """Write everything, and read the results of this many statements and of the end of the group."""
    yield from send(pgconn)
    results: list[PGresult] = []
    for _ in range(count + 1):
        results += yield from fetch_many(pgconn)
    return results


def _failure(results: Sequence[PGresult]) -> Error | None:
    """Return the first failure; the statements after it were not executed."""
    return next((error_from_result(one) for one in results if one.status in _FAILED), None)
