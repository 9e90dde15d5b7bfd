"""The worker's connection on a real database: notifications, losses, reconnects, and the session lock."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.app import WorkerResilienceConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.limits import Limits
from horsies.db.pipeline import Pipeline
from horsies.db.statements.tasks import TaskId
from horsies.ids import new_id
from horsies.worker import connection as connection_module
from horsies.worker.connection import (
    NOTIFICATION_SOCKET,
    DatabaseGivenUpError,
    Outages,
    SessionLock,
    WorkerConnection,
    open_turns,
)
from horsies.worker.liveness import lock_key
from horsies.worker.notifications import (
    CANCEL_CHANNEL,
    NOTHING_RECEIVED,
    PAUSE_CHANNEL,
    NotificationBatch,
)
from tests.support.database import notify
from tests.support.rows import add_task
from tests.support.statements import FINISH
from tests.support.wait import wait_until

QUEUE = "task_queue_default"
RESILIENCE = WorkerResilienceConfig(db_retry_initial_ms=100, db_retry_max_attempts=3)


def make_connection(
    process_url: str, selector: selectors.BaseSelector, *, has_two: bool = False
) -> WorkerConnection:
    session_url = process_url if has_two else None
    config = PostgresConfig(database_url=process_url, session_database_url=session_url)
    database = Database(config, "worker")
    key = lock_key(new_id())
    return WorkerConnection(
        database, RESILIENCE, (QUEUE, CANCEL_CHANNEL, PAUSE_CHANNEL), key, selector
    )


@dataclass(slots=True)
class Session:
    """A worker's connection, and the selector of its loop."""

    worker: WorkerConnection
    selector: selectors.BaseSelector

    @property
    def pipeline(self) -> Pipeline:
        assert self.worker.pipeline is not None
        return self.worker.pipeline

    @property
    def pid(self) -> int:
        return self.pipeline.connection.info.backend_pid

    def wait_for_socket(self) -> None:
        assert [key.data for key, _ in self.selector.select(10)] == [NOTIFICATION_SOCKET]

    def turn(self, statement: str) -> None:
        """Run something as turns do: without psycopg's notification handlers."""
        pgconn = self.pipeline.connection.pgconn
        assert pgconn.exec_(statement.encode()).status == psycopg.pq.ExecStatus.TUPLES_OK


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection counts as one that has held for a while."""
    monkeypatch.setattr(connection_module, "STEADY_SECONDS", 0.0)


@pytest.fixture
def session(
    process_url: str, selector: selectors.BaseSelector, caplog: pytest.LogCaptureFixture
) -> Iterator[Session]:
    caplog.set_level(logging.INFO, "horsies.worker")
    worker = make_connection(process_url, selector)
    worker.listen()
    yield Session(worker, selector)
    worker.close()
    assert not selector.get_map()


def cut(connection: Connection[Any], session: Session) -> None:
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (session.pid,))


def test_notifications_are_received_between_turns(
    session: Session, connection: Connection[Any]
) -> None:
    notify(connection, CANCEL_CHANNEL, "id")
    session.wait_for_socket()
    assert session.worker.receive() == NotificationBatch(False, frozenset({"id"}))
    assert session.worker.seconds_until_receive() is None


def test_notifications_that_come_with_the_answer_to_a_turn_are_received_without_the_socket(
    session: Session, connection: Connection[Any]
) -> None:
    notify(connection, QUEUE)
    session.wait_for_socket()
    session.turn("SELECT 1")
    assert session.selector.select(0) == []
    assert session.worker.seconds_until_receive() == 0.0
    assert session.worker.receive().work
    assert session.worker.seconds_until_receive() is None


@pytest.mark.parametrize("ignores_own", [True, False])
def test_our_own_notifications_can_be_left_out(session: Session, ignores_own: bool) -> None:
    session.turn(f"SELECT pg_notify('{QUEUE}', '')")
    assert session.worker.seconds_until_receive() == 0.0
    received = session.worker.receive(ignores_own=ignores_own)
    assert received == (NOTHING_RECEIVED if ignores_own else NotificationBatch(True, frozenset()))
    session.turn(f"SELECT pg_notify('{PAUSE_CHANNEL}', '')")
    assert session.worker.receive(ignores_own=ignores_own).paused


def test_notifications_that_psycopg_reads_with_a_statement_of_its_own_are_received(
    session: Session, connection: Connection[Any]
) -> None:
    notify(connection, QUEUE)
    session.wait_for_socket()
    session.pipeline.connection.execute("SELECT 1")
    assert session.worker.receive().work


def wait_until_lost(session: Session) -> None:
    def is_lost() -> bool:
        session.worker.receive()
        return session.worker.pipeline is None

    wait_until(is_lost)


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_while_it_rests_is_opened_anew_at_once(
    session: Session, connection: Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = session.pid
    session.worker.confirm()
    cut(connection, session)
    session.wait_for_socket()
    wait_until_lost(session)
    assert not session.selector.get_map()
    assert not session.worker.is_connected()
    assert session.worker.seconds_until_receive() is None, "open() reconnects"
    assert session.worker.open() is session.pipeline
    assert session.pid != first
    assert session.worker.seconds_until_receive() == 0.0
    assert session.worker.receive().gap
    assert session.worker.receive() == NOTHING_RECEIVED
    notify(connection, QUEUE)
    session.wait_for_socket()
    assert session.worker.receive().work
    session.worker.confirm()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "connection to the database lost, opening another",
        "database is back",
    ]


def test_a_session_that_is_cut_as_soon_as_it_is_open_waits(
    session: Session,
    connection: Connection[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "STEADY_SECONDS", 3600.0)
    session.worker.confirm()
    cut(connection, session)
    with pytest.raises(psycopg.OperationalError) as caught:
        session.pipeline.connection.execute("SELECT 1")
    session.worker.lose(caught.value)
    assert session.worker.pipeline is None
    assert session.worker.open() is None
    assert caplog.messages[0].startswith("database unavailable, next attempt in 0.1 s (1/3)")


@pytest.mark.usefixtures("steady")
def test_the_log_does_not_call_a_database_with_a_locked_table_unavailable(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.worker.confirm()
    session.worker.lose(psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"))
    session.worker.open()
    session.worker.lose(psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"))
    assert caplog.messages[-1].startswith(
        "another session holds a lock (horsies doctor names it), next attempt in"
    )


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_again_before_anything_went_through_waits(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    error = psycopg.OperationalError("no answer for 3 s")
    session.worker.confirm()
    session.worker.lose(error)
    for number in (1, 2, 3):
        wait_until(lambda: session.worker.open() is not None)
        session.worker.lose(error)
        assert f"({number}/3)" in caplog.messages[-1]
    wait_until(lambda: session.worker.open() is not None)
    with pytest.raises(DatabaseGivenUpError):
        session.worker.lose(error)


@pytest.mark.usefixtures("steady")
def test_a_transaction_that_fails_costs_a_pause_but_not_the_session(
    session: Session, connection: Connection[Any]
) -> None:
    first = session.pid
    for _ in range(3):
        with pytest.raises(psycopg.errors.DeadlockDetected) as caught:
            session.pipeline.connection.execute(raising("40P01"))
        session.worker.lose(caught.value)
        assert not session.worker.is_up
        assert session.worker.open() is None
        assert session.worker.is_connected()
        notify(connection, QUEUE)
        session.wait_for_socket()
        assert session.worker.receive().work, "it receives meanwhile"
        wait_until(lambda: session.worker.open() is not None)
    assert session.pid == first
    with pytest.raises(DatabaseGivenUpError):
        session.worker.lose(caught.value)


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_in_that_pause_is_opened_anew_at_once(
    session: Session, connection: Connection[Any]
) -> None:
    session.worker.confirm()
    first = session.pid
    with pytest.raises(psycopg.errors.DeadlockDetected) as caught:
        session.pipeline.connection.execute(raising("40P01"))
    session.worker.lose(caught.value)
    assert session.worker.open() is None
    cut(connection, session)
    wait_until_lost(session)
    assert session.worker.open() is not None
    assert session.pid != first


@pytest.mark.usefixtures("steady")
def test_an_echo_that_was_lost_with_its_session_is_not_missed(
    session: Session, connection: Connection[Any]
) -> None:
    now = time.monotonic()
    session.worker.confirm()
    session.worker.note_heartbeat(now, called=True)
    cut(connection, session)
    wait_until_lost(session)
    second = session.worker.open()
    assert session.worker.check_notifications(now + 60)
    session.worker.note_heartbeat(now + 60, called=True)
    assert session.worker.pipeline is second


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("sqlstate", ["57P01", "25006"])
def test_a_server_that_goes_or_does_not_write_costs_the_session(
    session: Session, sqlstate: str
) -> None:
    first = session.pid
    session.worker.confirm()
    with pytest.raises(psycopg.Error) as caught:
        session.pipeline.connection.execute(raising(sqlstate))
    session.worker.lose(caught.value)
    assert session.worker.pipeline is None
    assert not session.selector.get_map()
    assert session.worker.open() is not None
    assert session.pid != first


def test_a_mistake_is_raised_and_costs_the_session(session: Session) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable) as caught:
        session.pipeline.connection.execute("SELECT * FROM nothing")
    with pytest.raises(psycopg.errors.UndefinedTable):
        session.worker.lose(caught.value)
    assert session.worker.pipeline is None


@pytest.mark.parametrize("has_two", [False, True])
def test_a_session_that_cannot_take_its_lock_is_closed(
    process_url: str,
    selector: selectors.BaseSelector,
    monkeypatch: pytest.MonkeyPatch,
    has_two: bool,
) -> None:
    opened: list[Connection[Any]] = []

    def refuse(_: SessionLock, connection: Connection[Any]) -> None:
        opened.append(connection)
        connection.execute("SELECT * FROM nothing")

    monkeypatch.setattr(SessionLock, "take", refuse)
    worker = make_connection(process_url, selector, has_two=has_two)
    with pytest.raises(psycopg.errors.UndefinedTable):
        worker.listen()
    assert worker.pipeline is None
    assert [connection.closed for connection in opened] == [True]


def test_a_session_that_fails_after_it_took_its_lock_is_closed(
    process_url: str,
    selector: selectors.BaseSelector,
    connection: Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Connection[Any]] = []

    def fail(pipeline: Pipeline) -> None:
        opened.append(pipeline.connection)
        pipeline.connection.execute("SELECT * FROM nothing")

    monkeypatch.setattr(connection_module, "_warn_of_silent_triggers", fail)
    worker = make_connection(process_url, selector)
    with pytest.raises(psycopg.errors.UndefinedTable):
        worker.listen()
    assert [one.closed for one in opened] == [True]
    wait_until(lambda: lock_is_free(connection, worker.lock._key.lock_key))
    assert worker.pipeline is None
    assert not selector.get_map()


@pytest.mark.parametrize("has_two", [False, True])
def test_the_session_that_listens_holds_the_lock(
    process_url: str,
    selector: selectors.BaseSelector,
    monkeypatch: pytest.MonkeyPatch,
    has_two: bool,
) -> None:
    locked: list[Connection[Any]] = []
    monkeypatch.setattr(SessionLock, "take", lambda _, connection: locked.append(connection))
    worker = make_connection(process_url, selector, has_two=has_two)
    worker.listen()
    pipeline = worker.open()
    assert pipeline is not None
    assert locked == [worker._session]
    assert (pipeline.connection is locked[0]) is not has_two
    worker.close()
    assert not selector.get_map()


def test_every_break_is_counted(session: Session, connection: Connection[Any]) -> None:
    breaks = session.worker.breaks
    assert session.worker.is_connected()
    assert session.worker.breaks == breaks
    cut(connection, session)
    wait_until(lambda: not session.worker.is_connected())
    assert session.worker.breaks > breaks


def lock_is_free(connection: Connection[Any], key: int) -> bool:
    row = connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
    assert row is not None
    return bool(row[0])


@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_turn_waits_for_a_lock_no_longer_than_it_may(
    connection: Connection[Any], process_url: str, is_pooled: bool
) -> None:
    config = PostgresConfig(
        database_url=process_url,
        session_database_url="postgresql://localhost/unused" if is_pooled else None,
        pgbouncer_transaction_mode=is_pooled,
    )
    task_id = add_task(connection)
    pipeline = open_turns(Database(config, "worker"), Limits(100))
    with pipeline.connection, connection.transaction():
        connection.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (task_id,))
        started = time.monotonic()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            pipeline.run([(FINISH, TaskId(task_id))])
        assert time.monotonic() - started < 4, "the default is five seconds"


def test_the_lock_lives_and_dies_with_its_connection(
    connection: Connection[Any], process_url: str
) -> None:
    key = lock_key(new_id())
    with psycopg.connect(process_url, autocommit=True) as session:
        SessionLock(key).take(session)
        assert not lock_is_free(connection, key)
    wait_until(lambda: lock_is_free(connection, key))


def test_a_new_session_ends_the_earlier_one_that_still_holds_the_lock(
    connection: Connection[Any], process_url: str
) -> None:
    key = lock_key(new_id())
    lock = SessionLock(key)
    with psycopg.connect(process_url, autocommit=True) as old:
        lock.take(old)
        with psycopg.connect(process_url, autocommit=True) as new:
            lock.take(new)
            assert not lock_is_free(connection, key)
            with pytest.raises(psycopg.OperationalError):
                old.execute("SELECT 'a turn that the server had not executed yet'")
        wait_until(lambda: lock_is_free(connection, key))


def test_a_session_that_may_not_end_the_earlier_one_waits_for_its_end(
    connection: Connection[Any], process_url: str
) -> None:
    lock = SessionLock(lock_key(new_id()))
    connection.execute("CREATE ROLE test_owner")
    connection.execute("CREATE ROLE test_login LOGIN PASSWORD 'x' IN ROLE test_owner")
    connection.execute("ALTER ROLE test_login SET role = test_owner")
    login: dict[str, Any] = {"user": "test_login", "password": "x", "autocommit": True}
    try:
        with (
            psycopg.connect(process_url, **login) as old,
            psycopg.connect(process_url, **login) as new,
        ):
            lock.take(old)
            with pytest.raises(psycopg.OperationalError, match="has not ended yet"):
                lock.take(new)
            old.close()
            wait_until(lambda: lock._is_taken(new))
    finally:
        connection.execute("DROP ROLE test_login")
        connection.execute("DROP ROLE test_owner")


def test_the_probe_of_an_observer_is_left_alone(
    connection: Connection[Any], process_url: str
) -> None:
    key = lock_key(new_id())
    with psycopg.connect(process_url, autocommit=True) as session:
        with connection.transaction():
            connection.execute("SELECT pg_try_advisory_xact_lock_shared(%s)", (key,))
            with pytest.raises(psycopg.OperationalError, match="has not ended yet"):
                SessionLock(key).take(session)
            connection.execute("SELECT 'the observer goes on'")
        SessionLock(key).take(session)
        assert not lock_is_free(connection, key)


def raising(sqlstate: str) -> sql.Composed:
    """A statement that fails with this SQLSTATE."""
    body = sql.Literal(f"BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}'; END")
    return sql.SQL("DO {}").format(body)


REFUSED = psycopg.OperationalError('FATAL: password authentication failed for user "worker"')
UNREACHABLE = psycopg.OperationalError("connection refused")


@pytest.mark.parametrize("holds_tasks", [False, True])
def test_a_worker_with_tasks_waits_for_a_server_that_refuses_its_password(
    session: Session, holds_tasks: bool
) -> None:
    session.worker.outages._holds_tasks = lambda: holds_tasks
    if holds_tasks:
        session.worker.lose(REFUSED)
        assert session.worker.outages.retry_at > time.monotonic()
    else:
        with pytest.raises(psycopg.OperationalError, match="password"):
            session.worker.lose(REFUSED)


def test_a_password_that_is_refused_at_the_start_ends_the_worker(
    process_url: str, selector: selectors.BaseSelector
) -> None:
    worker = make_connection(process_url, selector)
    worker.outages._holds_tasks = lambda: True
    with pytest.raises(psycopg.OperationalError, match="password"):
        worker.lose(REFUSED)


def test_a_worker_with_tasks_reconnects_every_second_without_counting_more_attempts() -> None:
    slow = WorkerResilienceConfig(
        db_retry_initial_ms=60_000, db_retry_max_ms=60_000, db_retry_max_attempts=1
    )
    tasks = ["a"]
    outages = Outages(slow, lambda: bool(tasks), retry_seconds=1.0)
    outages.has_been_open = True
    for _ in range(5):
        outages.pause(UNREACHABLE)
        assert 0 < outages.retry_at - time.monotonic() <= 1.0
    tasks.clear()
    outages.pause(UNREACHABLE)
    assert outages.retry_at - time.monotonic() > 40.0


def test_the_lock_is_taken_again_while_a_statement_waits_behind_a_pooler(
    connection: Connection[Any], process_url: str, selector: selectors.BaseSelector
) -> None:
    worker = make_connection(process_url, selector, has_two=True)
    worker.listen()
    assert worker._session is not None
    pid = worker._session.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    def is_back() -> bool:
        worker.keep_lock()
        return worker._session is not None and worker.is_connected()

    wait_until(is_back)
    assert not lock_is_free(connection, worker.lock._key.lock_key)
    assert worker.seconds_until_receive() == 0.0
    assert worker.receive().gap, "notifications may have been missed meanwhile"
    worker.close()


def test_a_session_without_triggers_is_warned_of(
    process_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(process_url, autocommit=True) as operator:
        name = sql.Identifier(operator.info.dbname)
        setting = sql.SQL("ALTER DATABASE {} {} session_replication_role {}")
        operator.execute(setting.format(name, sql.SQL("SET"), sql.SQL("= replica")))
        try:
            with selectors.DefaultSelector() as selector:
                opened = make_connection(process_url, selector)
                assert opened.open() is not None
                opened.close()
        finally:
            operator.execute(setting.format(name, sql.SQL("RESET"), sql.SQL("")))
        warned = [one for one in caplog.messages if "triggers do not fire" in one]
        assert len(warned) == 1
        with selectors.DefaultSelector() as selector:
            opened = make_connection(process_url, selector)
            assert opened.open() is not None
            opened.close()
        assert [one for one in caplog.messages if "triggers do not fire" in one] == warned
