"""The behaviour of PgBouncer when the server behind it is busy, restarted or unreachable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult
from horsies.db.database import Database
from horsies.db.errors import describe, is_transient
from horsies.db.limits import NO_LIMITS
from horsies.db.migrate import apply_migrations
from horsies.db.pipeline import Pipeline, _pooled_frame
from horsies.db.statements.tasks import TaskId
from tests.support.pgbouncer import find_pgbouncer, running_pgbouncer
from tests.support.private_server import PrivateServer
from tests.support.rows import add_task, row_of
from tests.support.statements import ECHO, FINISH, Text
from tests.support.wait import wait_until

# A connection to a server on a busy machine takes some tenths of a second.
PATIENCE_MS = 2_000
NO_ANSWER = "no answer for 2 s"


def through(pooled_url: str, direct_url: str, patience_ms: int = PATIENCE_MS) -> Database:
    """The connections of a process that goes through the pooler."""
    config = PostgresConfig(
        database_url=pooled_url,
        session_database_url=direct_url,
        pgbouncer_transaction_mode=True,
        tcp_user_timeout_ms=patience_ms,
    )
    return Database(config, "worker")


@contextmanager
def opened(database: Database) -> Iterator[Pipeline]:
    pipeline = Pipeline.open(database, "turn")
    try:
        yield pipeline
    finally:
        pipeline.connection.close()


@pytest.fixture
def pooled_server(private_server: PrivateServer) -> Iterator[tuple[PrivateServer, Database]]:
    """A server that may be stopped, and the way through the pooler before it."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with running_pgbouncer(private_server.url) as url:
        yield private_server, through(url, private_server.url)
        private_server.start()


@contextmanager
def locked(url: str, task_id: str) -> Iterator[None]:
    """Hold the row of a task, so that others wait for it."""
    with psycopg.connect(url) as holder:
        holder.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (task_id,))
        yield


def waiting_pids(connection: Connection[Any]) -> list[int]:
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return [row[0] for row in rows]


def failure_of(database: Database, task_id: str) -> psycopg.Error:
    """Return the result of finishing the task, with another statement before and after."""
    with opened(database) as pipeline:
        pipeline._frame = _pooled_frame(
            None, NO_LIMITS, 150_000
        )  # locks may take longer than the whole group
        with pytest.raises(psycopg.Error) as caught:
            pipeline.run([(ECHO, Text("x")), (FINISH, TaskId(task_id)), (ECHO, Text("y"))])
    return caught.value


def test_a_group_that_is_given_up_is_cancelled_and_not_applied_later(
    connection: Connection[Any], process_url: str, pgbouncer_url: str
) -> None:
    task_id = add_task(connection)
    with locked(process_url, task_id):
        error = failure_of(through(pgbouncer_url, process_url), task_id)
        wait_until(lambda: waiting_pids(connection) == [])
    assert is_transient(error)
    assert describe(error) == NO_ANSWER
    assert row_of(connection, task_id)["status"] == "PENDING"


def test_a_lock_times_out_before_its_group_does(
    connection: Connection[Any], process_url: str, pgbouncer_url: str
) -> None:
    task_id = add_task(connection)
    with (
        locked(process_url, task_id),
        opened(through(pgbouncer_url, process_url)) as pipeline,
        pytest.raises(psycopg.errors.LockNotAvailable),
    ):
        pipeline.run([(FINISH, TaskId(task_id))])


def test_without_a_limit_a_group_is_waited_for(
    connection: Connection[Any], process_url: str, pgbouncer_url: str
) -> None:
    task_id = add_task(connection)
    answers: list[Any] = []
    with opened(through(pgbouncer_url, process_url, patience_ms=0)) as pipeline:
        thread = threading.Thread(
            target=lambda: answers.extend(pipeline.run([(FINISH, TaskId(task_id))]))
        )
        with locked(process_url, task_id):
            thread.start()
            wait_until(lambda: waiting_pids(connection) != [])
        thread.join()
    assert answers == [[TaskId(task_id)]]


def test_a_group_whose_server_connection_is_cut_says_why(
    connection: Connection[Any], process_url: str, pgbouncer_url: str
) -> None:
    task_id = add_task(connection)
    errors: list[psycopg.Error] = []
    database = through(pgbouncer_url, process_url, patience_ms=30_000)
    thread = threading.Thread(target=lambda: errors.append(failure_of(database, task_id)))
    with locked(process_url, task_id):
        thread.start()
        wait_until(lambda: waiting_pids(connection) != [])
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM unnest(%s::integer[]) AS pid",
            (waiting_pids(connection),),
        )
        thread.join()
    assert [(error.sqlstate, is_transient(error)) for error in errors] == [("57P01", True)]
    assert row_of(connection, task_id)["status"] == "PENDING"


def test_a_server_that_is_away_is_noticed_and_one_that_is_back_is_used(
    pooled_server: tuple[PrivateServer, Database],
) -> None:
    server, database = pooled_server
    with opened(database) as pipeline:
        pipeline.run([(ECHO, Text("x"))])
        server.stop()
        with pytest.raises(psycopg.OperationalError, match=NO_ANSWER) as caught:
            pipeline.run([(ECHO, Text("x"))])
    assert is_transient(caught.value)
    # PgBouncer has noticed by now, and reports it to every client.
    with pytest.raises(psycopg.Error, match="server_login_retry") as told:
        run_once(database)
    assert is_transient(told.value)
    server.start()
    wait_until(lambda: comes_through(database))


def run_once(database: Database) -> None:
    with opened(database) as pipeline:
        pipeline.run([(ECHO, Text("x"))])


def comes_through(database: Database) -> bool:
    try:
        run_once(database)
    except psycopg.Error as error:
        if not is_transient(error):
            raise
        return False
    return True


def test_a_send_while_the_server_is_away_can_be_repeated(
    pooled_server: tuple[PrivateServer, Database],
) -> None:
    server, database = pooled_server
    with psycopg.connect(server.url, autocommit=True) as connection:
        apply_migrations(connection)
    app = Horsies(AppConfig(broker=database.config))

    @app.task("noop")
    def noop() -> TaskResult[None, TaskError]:
        raise NotImplementedError

    assert noop.send().is_ok()
    app.close()
    server.stop()
    with pytest.raises(psycopg.Error):
        run_once(database)  # so that PgBouncer has noticed, and lets no client wait
    error = noop.send().err_value
    assert error.retryable
    assert error.task_id is not None
    server.start()
    wait_until(lambda: noop.retry_send(error).is_ok())
    with psycopg.connect(server.url, autocommit=True) as connection:
        assert row_of(connection, error.task_id)["status"] == "PENDING"
    app.close()
