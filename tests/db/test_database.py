"""Connections: errors explained in one sentence without a password; pools and forks on real
servers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import Connection, errors

from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database, PoolTimeout
from horsies.db.errors import describe, is_transient
from horsies.db.statements.tasks import InsertTask, insert_task, read_task
from horsies.errors import ConfigurationError, ErrorCode
from horsies.ids import new_id
from horsies.tasks.broker import revealing
from tests.support.ports import free_port
from tests.support.private_server import LOCKED_ROLE, PASSWORD, PrivateServer

TRANSIENT_STATES = (
    *("08000", "08001", "08003", "08006", "53000", "53100", "53200", "53300"),
    *("57P01", "57P02", "57P03", "57P05", "57014", "40001", "40P01", "55P03", "25P03", "25P04"),
    "25006",
)
LASTING_STATES = (
    *("23505", "23502", "22001", "22021", "42P01", "42501", "42601", "3D000", "28P01", "28000"),
    *("0A000", "25P02", "54000", "57P04", "XX000"),
)


@pytest.mark.parametrize("state", TRANSIENT_STATES)
def test_errors_that_pass_are_transient(state: str) -> None:
    assert is_transient(errors.lookup(state)("x"))


@pytest.mark.parametrize("state", LASTING_STATES)
def test_errors_that_last_are_not_transient(state: str) -> None:
    assert not is_transient(errors.lookup(state)("x"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.OperationalError("sorry, too many clients already"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (PoolTimeout("All 5 connections were in use"), True),
        (psycopg.OperationalError('password authentication failed for user "a"'), False),
        (psycopg.OperationalError('FATAL: database "a" does not exist'), False),
        (psycopg.OperationalError('FATAL: role "a" does not exist'), False),
        (psycopg.ProgrammingError("invalid connection info"), False),
        (psycopg.DataError("a NUL"), False),
        (OSError("no space left"), False),
        (ValueError("x"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_without_a_state_are_judged_by_what_they_are(
    error: BaseException, expected: bool
) -> None:
    assert is_transient(error) is expected


def failure_at(url: str) -> psycopg.Error:
    """Return the exception that connecting there raises."""
    with pytest.raises(psycopg.Error) as caught:
        psycopg.connect(url, connect_timeout=5)
    return caught.value


def assert_one_sentence(text: str, beginning: str) -> None:
    assert text.startswith(beginning), text
    assert "\n" not in text
    assert text.endswith(".")


def test_a_refused_connection_is_described() -> None:
    error = failure_at(f"postgresql://app:hunter2@127.0.0.1:{free_port()}/shop")
    assert_one_sentence(describe(error), "No server listens at this address; start PostgreSQL or")
    assert "hunter2" not in describe(error)
    assert is_transient(error)


def test_an_error_of_the_configuration_is_described_without_its_drawing() -> None:
    code = ErrorCode.BROKER_INVALID_URL
    error = ConfigurationError("A server is missing.", code=code, help_text="install one")
    assert describe(error) == "A server is missing; install one."
    assert revealing(error) == []
    bare = ConfigurationError("A server is missing.", code=code)
    assert describe(bare) == "A server is missing."


def test_an_unknown_host_is_described() -> None:
    error = failure_at("postgresql://app:hunter2@no-such-host.invalid/shop")
    assert_one_sentence(describe(error), "The host name is unknown; correct the host")
    assert "hunter2" not in describe(error)
    assert is_transient(error), "name servers have bad days"


def test_a_socket_without_a_server_is_described() -> None:
    error = failure_at("postgresql://app:hunter2@/shop?host=/nonexistent")
    assert_one_sentence(describe(error), "No server owns this socket; start PostgreSQL or")
    assert "hunter2" not in describe(error)


def test_a_wrong_password_is_described_and_lasts(private_server: PrivateServer) -> None:
    error = failure_at(private_server.locked_url("hunter2"))
    assert_one_sentence(describe(error), "PostgreSQL refused the user name or password; correct")
    assert "hunter2" not in describe(error)
    assert not is_transient(error)
    psycopg.connect(private_server.locked_url(PASSWORD), dbname="postgres").close()


def test_a_missing_password_is_described_and_lasts(private_server: PrivateServer) -> None:
    error = failure_at(private_server.locked_url(""))
    assert_one_sentence(describe(error), "PostgreSQL requires a password; add it to database_url")
    assert not is_transient(error)


def test_a_missing_database_is_described_and_lasts(private_server: PrivateServer) -> None:
    error = failure_at(private_server.url.replace("/postgres?", "/nowhere?"))
    assert_one_sentence(describe(error), "The database does not exist; create it or correct")
    assert not is_transient(error)


def test_a_missing_user_is_described_and_lasts(private_server: PrivateServer) -> None:
    error = failure_at(private_server.url.replace("//postgres@", "//nobody:hunter2@"))
    assert_one_sentence(describe(error), "The database user does not exist; create it or correct")
    assert "hunter2" not in describe(error)
    assert not is_transient(error)


def test_a_user_that_may_not_log_in_is_described_and_passes(private_server: PrivateServer) -> None:
    with psycopg.connect(private_server.url, autocommit=True) as connection:
        connection.execute(f"ALTER ROLE {LOCKED_ROLE} NOLOGIN".encode())
        try:
            error = failure_at(private_server.locked_url(PASSWORD))
        finally:
            connection.execute(f"ALTER ROLE {LOCKED_ROLE} LOGIN".encode())
    assert_one_sentence(describe(error), "PostgreSQL does not let this user log in; grant the role")
    assert is_transient(error)


def test_a_full_server_is_described_and_passes(private_server: PrivateServer) -> None:
    with psycopg.connect(private_server.url, autocommit=True) as connection:
        connection.execute(f"ALTER ROLE {LOCKED_ROLE} CONNECTION LIMIT 0".encode())
        error = failure_at(private_server.locked_url(PASSWORD))
        connection.execute(f"ALTER ROLE {LOCKED_ROLE} CONNECTION LIMIT -1".encode())
    assert_one_sentence(describe(error), "PostgreSQL has no free connection slot; lower the pool")
    assert is_transient(error)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            'could not extend file "base/5/16384": No space left on device',
            "The disk of the database server is full; free",
        ),
        (
            'could not resize shared memory segment "/PostgreSQL.42" to 8 bytes: No space left on device',
            "The shared memory of the database server is full; give its container more",
        ),
    ],
)
def test_a_server_without_space_is_described_and_passes(
    connection: Connection[Any], message: str, remedy: str
) -> None:
    with pytest.raises(errors.DiskFull) as caught:
        connection.execute(
            f"DO $$ BEGIN RAISE disk_full USING MESSAGE = '{message}'; END $$".encode()
        )
    assert_one_sentence(describe(caught.value), remedy)
    assert message in describe(caught.value)
    assert is_transient(caught.value)


@pytest.mark.parametrize(
    "password", ["hunter%2", "hun ter2", "hunter%00", "hun@ter2", "[hunter2", "hunter2%"]
)
def test_an_address_that_cannot_be_read_does_not_give_its_password_away(password: str) -> None:
    error = failure_at(f"postgresql://app:{password}@127.0.0.1:{free_port()}/shop")
    text = describe(error)
    assert text.endswith(".")
    assert not any(part in text for part in ("hun", "ter2", password))


def test_a_refused_row_is_described_without_the_task_arguments(connection: Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation) as caught:
        insert_task.run(connection, new_task()._replace(enqueue_sha=None))  # type: ignore[arg-type]
    assert "secret argument" in str(caught.value), "PostgreSQL quotes the whole row"
    assert "secret argument" not in describe(caught.value)
    assert "enqueue_sha" in describe(caught.value)
    assert not is_transient(caught.value)


@pytest.mark.parametrize(
    ("setting", "statement"),
    [("statement_timeout", "SELECT pg_sleep(30)"), ("lock_timeout", "DELETE FROM horsies_tasks")],
)
def test_the_timeouts_of_an_administrator_pass_and_are_not_called_an_outage(
    connection: Connection[Any], process_url: str, setting: str, statement: str
) -> None:
    connection.execute(f"SET {setting} = 20".encode())
    with psycopg.connect(process_url) as other:
        other.execute("LOCK TABLE horsies_tasks")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(statement.encode())
    assert is_transient(caught.value)
    assert setting.replace("_", " ") in describe(caught.value)
    assert "network" not in describe(caught.value)


def test_a_server_that_is_read_only_after_a_failover_passes(connection: Connection[Any]) -> None:
    connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.Error) as caught:
        insert_task.run(connection, new_task())
    assert is_transient(caught.value)
    assert_one_sentence(describe(caught.value), "PostgreSQL takes only reads here, as a standby")


def test_an_error_without_words_still_has_a_description() -> None:
    assert describe(ConnectionResetError()) == "ConnectionResetError"


def new_task() -> InsertTask:
    return InsertTask(
        id=new_id(),
        task_name="work",
        queue_name="default",
        priority=100,
        args='["secret argument"]',
        kwargs="{}",
        sent_at=datetime.now(UTC),
        enqueue_at=None,
        delay_seconds=0.0,
        good_until=None,
        max_retries=0,
        task_options="{}",
        timeout_ms=None,
        retention_seconds=None,
        enqueue_sha="sha",
        idempotency_key=None,
        idempotency_sha=None,
        unique_key=None,
        unique_while=None,
    )


def small_database(url: str, **settings: Any) -> Database:
    return Database(PostgresConfig(database_url=url, pool_size=1, max_overflow=0, **settings))


def test_the_pool_hands_out_no_connection_the_server_has_closed(
    connection: Connection[Any], process_url: str
) -> None:
    database = small_database(process_url)
    for _ in range(3):
        with database.connection() as lent:
            pid = lent.info.backend_pid
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with database.connection() as lent:
            assert insert_task.run(lent, new_task())
            assert lent.info.backend_pid != pid
    database.close()


def test_the_pool_of_an_event_loop_hands_out_no_closed_connection_either(
    connection: Connection[Any], process_url: str
) -> None:
    async def send_twice() -> None:
        database = small_database(process_url)
        async with database.connection_async() as lent:
            pid = lent.info.backend_pid
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        async with database.connection_async() as lent:
            assert await insert_task.run_async(lent, new_task())
        database.close_async()

    asyncio.run(send_twice())


def test_connections_say_who_they_are(connection: Connection[Any], process_url: str) -> None:
    database = Database(PostgresConfig(database_url=process_url), role="scheduler")
    shown = "SELECT current_setting('application_name')"
    with database.connection() as lent, database.connect("ear") as dedicated:
        assert lent.execute(shown).fetchone() == ("horsies:scheduler",)
        assert dedicated.execute(shown).fetchone() == ("horsies:ear",)
        assert dedicated.autocommit
    database.close()


def test_the_session_address_is_for_those_who_ask_for_it(process_url: str) -> None:
    config = PostgresConfig(
        database_url="postgresql+psycopg://pooler:6432/shop", session_database_url=process_url
    )
    database = Database(config)
    assert database.urls() == ("postgresql://pooler:6432/shop", process_url)
    with database.connect("schema", session=True) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_statements_work_again_and_again_through_a_transaction_pooler(
    pgbouncer_url: str, process_url: str, connection: Connection[Any]
) -> None:
    config = PostgresConfig(
        database_url=pgbouncer_url,
        session_database_url=process_url,
        pgbouncer_transaction_mode=True,
    )
    database, task = Database(config), new_task()
    with database.connection() as one, database.connection() as two:
        insert_task.run(one, task)
        for lent in [one, two] * 10:
            assert len(read_task.fetch(lent, task.id, True, True)) == 1
            connection.execute("SELECT 1")
    database.close()


FORK = """
import os, sys
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database

def backend(database):
    with database.connection() as connection:
        return connection.execute("SELECT pg_backend_pid()").fetchone()[0]

database = Database(PostgresConfig(database_url=sys.argv[1], pool_size=1, max_overflow=0))
mine = backend(database)
child = os.fork()
if child == 0:
    theirs = backend(database)
    assert theirs != mine, "the child talks over its parent's socket"
    assert backend(database) == theirs, "the child has a pool of its own"
    {ending}
_, status = os.waitpid(child, 0)
assert status == 0, status
assert backend(database) == mine, "the child has ended its parent's connection"
print("fine")
"""


@pytest.mark.parametrize(
    "ending", ["sys.exit()", "database.close(); sys.exit()", "del database; sys.exit()"]
)
def test_a_forked_child_uses_sockets_of_its_own(
    connection: Connection[Any], process_url: str, ending: str
) -> None:
    script = FORK.replace("{ending}", ending)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, process_url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("fine\n", "")


def test_nothing_is_opened_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Callable[[], None]:
        raise AssertionError("opened a connection")

    monkeypatch.setattr(Connection, "connect", refuse)
    database = Database(PostgresConfig(database_url="postgresql://nowhere/shop"))
    database.pool()
    database.close()


@pytest.mark.parametrize("schema", [None, "jobs"])
def test_a_search_path_in_the_environment_is_answered_with_a_warning(
    process_url: str,
    schema: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c search_path=jobs")
    given: dict[str, Any] = {} if schema is None else {"schema": schema}
    database = Database(PostgresConfig(database_url=process_url, **given))
    for _ in range(2):
        database.urls()
    assert caplog.text.count("PGOPTIONS sets a search_path") == (1 if schema is None else 0)
