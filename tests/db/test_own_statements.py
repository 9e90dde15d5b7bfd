"""The library's own statements in a task's session: what commits, and how a failure leaves the session."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.pq import PipelineStatus, TransactionStatus

from horsies.db.database import OwnConnection
from horsies.db.own_statements import OwnStatements
from horsies.db.statement import Step
from horsies.db.statements.transactions import require_mark, use_session_role

MARK = "id-1/1"
STEPS: list[Step] = [use_session_role(), require_mark(MARK)]


@pytest.fixture
def session(migrated_url: str) -> Iterator[OwnConnection]:
    with OwnConnection.connect(migrated_url, autocommit=True) as session:
        session.execute("CREATE TABLE written (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield session


def begin(own: OwnStatements, mark: str = MARK, numbers: str = "(1)") -> None:
    own.command(f"BEGIN; SET LOCAL horsies.attempt = '{mark}'".encode())
    own.command(f"INSERT INTO written VALUES {numbers}".encode())


def written(url: str) -> int:
    with psycopg.connect(url) as other:
        row = other.execute("SELECT count(*) FROM written").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("prepared", [True, False])
def test_a_group_commits_with_the_rows_before_it(
    session: OwnConnection, migrated_url: str, prepared: bool
) -> None:
    own = OwnStatements(session, prepared=prepared)
    for number in (1, 2):
        begin(own, numbers=f"({number})")
        own.commit(STEPS)
        assert session.pgconn.transaction_status == TransactionStatus.IDLE
        assert written(migrated_url) == number
    assert not own.is_doubtful


@pytest.mark.parametrize("prepared", [True, False])
def test_commit_is_prepared_unless_a_pooler_shares_the_session(
    session: OwnConnection, prepared: bool
) -> None:
    own = OwnStatements(session, prepared=prepared)
    begin(own)
    own.commit(STEPS)
    rows = session.execute("SELECT name FROM pg_prepared_statements", prepare=False).fetchall()
    assert (("horsies_commit",) in rows) is prepared


def test_a_failed_check_commits_nothing_and_leaves_a_new_statement_in_doubt(
    session: OwnConnection, migrated_url: str
) -> None:
    own = OwnStatements(session, prepared=True)
    begin(own, mark="another")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation, match="horsies: ended"):
        own.commit(STEPS)
    assert session.pgconn.pipeline_status == PipelineStatus.OFF
    assert own.is_doubtful
    own.command(b"ROLLBACK")
    assert written(migrated_url) == 0


def test_after_a_failure_known_statements_can_be_used_again(
    session: OwnConnection, migrated_url: str
) -> None:
    own = OwnStatements(session, prepared=True)
    begin(own)
    own.commit(STEPS)
    begin(own, mark="another", numbers="(2)")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        own.commit(STEPS)
    assert not own.is_doubtful
    own.command(b"ROLLBACK")
    begin(own, numbers="(3)")
    own.commit(STEPS)
    assert written(migrated_url) == 2


def test_an_error_at_commit_is_raised(session: OwnConnection, migrated_url: str) -> None:
    own = OwnStatements(session, prepared=True)
    begin(own, numbers="(1), (1)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        own.commit(STEPS)
    assert written(migrated_url) == 0


def test_the_commit_of_a_failed_transaction_is_an_error(session: OwnConnection) -> None:
    own = OwnStatements(session, prepared=True)
    begin(own)
    with pytest.raises(psycopg.errors.DivisionByZero):
        own.command(b"SELECT 1; SELECT 1 / 0; SELECT 2")
    with pytest.raises(psycopg.OperationalError, match="answered COMMIT with a rollback"):
        own.commit([])


@pytest.mark.parametrize("sent", ["command", "commit"])
def test_a_session_that_the_server_has_ended_is_an_error(
    session: OwnConnection, migrated_url: str, sent: str
) -> None:
    own = OwnStatements(session, prepared=True)
    begin(own)
    with psycopg.connect(migrated_url, autocommit=True) as other:
        pid = session.pgconn.backend_pid
        assert other.execute("SELECT pg_terminate_backend(%s, 20000)", (pid,)).fetchone() == (True,)
    with pytest.raises(
        psycopg.OperationalError, match=r"terminating connection|closed the connect"
    ):
        own.commit(STEPS) if sent == "commit" else own.command(b"SELECT 1")
    assert session.closed
    assert written(migrated_url) == 0
