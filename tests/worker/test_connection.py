"""One session for turns and notifications, on a real database: what it hears, how it breaks and is mended."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.app import WorkerResilienceConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.listen import Listener
from horsies.db.pipeline import Pipeline
from horsies.worker import connection as link_module
from horsies.worker.connection import (
    DatabaseGivenUpError,
    TurnConnection,
    TurnListener,
    make_sessions,
)
from horsies.worker.notifications import CANCEL_CHANNEL, EAR, SILENCE, News, Notifications
from tests.support.wait import wait_until

QUEUE = "task_queue_default"
RESILIENCE = WorkerResilienceConfig(db_retry_initial_ms=100, db_retry_max_attempts=3)


@dataclass(slots=True)
class Sessions:
    """What a worker's loop has in hand."""

    link: TurnConnection
    notifications: Notifications
    selector: selectors.BaseSelector
    locked: list[Connection[Any]] = field(default_factory=list)

    @property
    def pipeline(self) -> Pipeline:
        assert self.link.pipeline is not None
        return self.link.pipeline

    @property
    def pid(self) -> int:
        return self.pipeline.connection.info.backend_pid

    def wait_for_socket(self) -> None:
        assert [key.data for key, _ in self.selector.select(10)] == [EAR]

    def turn(self, statement: str) -> None:
        """Run something as turns do: no notification handler of psycopg's is asked."""
        pgconn = self.pipeline.connection.pgconn
        assert pgconn.exec_(statement.encode()).status == psycopg.pq.ExecStatus.TUPLES_OK


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection counts as one that has stood for a while."""
    monkeypatch.setattr(link_module, "STEADY_SECONDS", 0.0)


@pytest.fixture
def make(process_url: str) -> Iterator[Callable[[], Sessions]]:
    made: list[Sessions] = []

    def open_sessions() -> Sessions:
        database = Database(PostgresConfig(database_url=process_url), "worker")
        locked: list[Connection[Any]] = []
        link, listener = make_sessions(database, RESILIENCE, (QUEUE, CANCEL_CHANNEL), locked.append)
        assert isinstance(listener, TurnListener)
        selector = selectors.DefaultSelector()
        made.append(Sessions(link, Notifications(listener, selector, 5.0), selector, locked))
        link.on_close = made[-1].notifications.follow_socket
        made[-1].notifications.open()
        return made[-1]

    yield open_sessions
    for one in made:
        one.notifications.close()
        assert not one.selector.get_map()
        one.selector.close()


@pytest.fixture
def sessions(make: Callable[[], Sessions], caplog: pytest.LogCaptureFixture) -> Sessions:
    caplog.set_level(logging.INFO, "horsies.worker")
    return make()


def notify(connection: Connection[Any], channel: str, payload: str = "") -> None:
    connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))


def cut(connection: Connection[Any], sessions: Sessions) -> None:
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (sessions.pid,))


def test_what_others_say_is_heard_while_turns_rest(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    assert sessions.locked == [sessions.pipeline.connection]
    notify(connection, CANCEL_CHANNEL, "id")
    sessions.wait_for_socket()
    assert sessions.notifications.receive() == News(False, frozenset({"id"}))
    assert sessions.notifications.seconds_until_retry() is None


def test_what_comes_with_the_answer_to_a_turn_is_heard_without_the_socket(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    notify(connection, QUEUE)
    sessions.wait_for_socket()
    sessions.turn("SELECT 1")
    assert sessions.selector.select(0) == []
    assert sessions.notifications.seconds_until_retry() == 0.0
    assert sessions.notifications.receive().work
    assert sessions.notifications.seconds_until_retry() is None


@pytest.mark.parametrize("is_deaf", [True, False])
def test_our_own_notifications_can_be_left_out(sessions: Sessions, is_deaf: bool) -> None:
    sessions.turn(f"SELECT pg_notify('{QUEUE}', '')")
    assert sessions.notifications.seconds_until_retry() == 0.0
    heard = sessions.notifications.receive(sessions.pipeline.sender_pid if is_deaf else None)
    assert heard == (SILENCE if is_deaf else News(True, frozenset()))


def test_what_psycopg_reads_beside_a_statement_of_its_own_is_heard(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    notify(connection, QUEUE)
    sessions.wait_for_socket()
    sessions.pipeline.connection.execute("SELECT 1")
    assert sessions.notifications.receive().work


def wait_until_lost(sessions: Sessions) -> None:
    def is_lost() -> bool:
        sessions.notifications.receive()
        return sessions.link.pipeline is None

    wait_until(is_lost)


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_while_it_rests_is_opened_anew_at_once(
    sessions: Sessions, connection: Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = sessions.pid
    sessions.link.confirm()
    cut(connection, sessions)
    sessions.wait_for_socket()
    wait_until_lost(sessions)
    assert not sessions.selector.get_map()
    assert not sessions.notifications.is_connected()
    assert sessions.notifications.seconds_until_retry() is None, "the link says when"
    assert sessions.link.open() is sessions.pipeline
    assert sessions.pid != first
    assert len(sessions.locked) == 2
    assert sessions.notifications.seconds_until_retry() == 0.0
    assert sessions.notifications.receive().gap
    assert sessions.notifications.receive() == SILENCE
    notify(connection, QUEUE)
    sessions.wait_for_socket()
    assert sessions.notifications.receive().work
    sessions.link.confirm()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "connection to the database lost, opening another",
        "database is back",
    ]


def test_a_session_that_is_cut_as_soon_as_it_is_open_waits(
    sessions: Sessions,
    connection: Connection[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "STEADY_SECONDS", 3600.0)
    sessions.link.confirm()
    cut(connection, sessions)
    with pytest.raises(psycopg.OperationalError) as caught:
        sessions.pipeline.connection.execute("SELECT 1")
    sessions.link.lose(caught.value)
    assert sessions.link.pipeline is None
    assert sessions.link.open() is None
    assert caplog.messages[0].startswith("database away, next try in 0.1 s (1/3)")


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_again_before_anything_went_through_waits(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    error = psycopg.OperationalError("no answer for 3 s")
    sessions.link.confirm()
    sessions.link.lose(error)
    for number in (1, 2, 3):
        wait_until(lambda: sessions.link.open() is not None)
        sessions.link.lose(error)
        assert f"({number}/3)" in caplog.messages[-1]
    wait_until(lambda: sessions.link.open() is not None)
    with pytest.raises(DatabaseGivenUpError):
        sessions.link.lose(error)


@pytest.mark.usefixtures("steady")
def test_a_transaction_that_fails_costs_a_pause_but_not_the_session(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    first = sessions.pid
    for _ in range(3):
        with pytest.raises(psycopg.errors.DeadlockDetected) as caught:
            sessions.pipeline.connection.execute(raising("40P01"))
        sessions.link.lose(caught.value)
        assert not sessions.link.is_up
        assert sessions.link.open() is None
        assert sessions.notifications.is_connected()
        notify(connection, QUEUE)
        sessions.wait_for_socket()
        assert sessions.notifications.receive().work, "it hears meanwhile"
        wait_until(lambda: sessions.link.open() is not None)
    assert sessions.pid == first
    with pytest.raises(DatabaseGivenUpError):
        sessions.link.lose(caught.value)


@pytest.mark.usefixtures("steady")
def test_a_session_that_is_cut_in_that_pause_is_opened_anew_at_once(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    sessions.link.confirm()
    first = sessions.pid
    with pytest.raises(psycopg.errors.DeadlockDetected) as caught:
        sessions.pipeline.connection.execute(raising("40P01"))
    sessions.link.lose(caught.value)
    assert sessions.link.open() is None
    cut(connection, sessions)
    wait_until_lost(sessions)
    assert sessions.link.open() is not None
    assert sessions.pid != first


@pytest.mark.usefixtures("steady")
def test_an_echo_that_was_lost_with_its_session_is_not_missed(
    sessions: Sessions, connection: Connection[Any]
) -> None:
    now = time.monotonic()
    sessions.link.confirm()
    sessions.notifications.note_call(now)
    cut(connection, sessions)
    wait_until_lost(sessions)
    second = sessions.link.open()
    assert sessions.notifications.check(now + 60)
    sessions.notifications.note_call(now + 60)
    assert sessions.link.pipeline is second


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("sqlstate", ["57P01", "25006"])
def test_a_server_that_goes_or_does_not_write_costs_the_session(
    sessions: Sessions, sqlstate: str
) -> None:
    first = sessions.pid
    sessions.link.confirm()
    with pytest.raises(psycopg.Error) as caught:
        sessions.pipeline.connection.execute(raising(sqlstate))
    sessions.link.lose(caught.value)
    assert sessions.link.pipeline is None
    assert not sessions.selector.get_map()
    assert sessions.link.open() is not None
    assert sessions.pid != first


def test_a_mistake_is_raised_and_costs_the_session(sessions: Sessions) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable) as caught:
        sessions.pipeline.connection.execute("SELECT * FROM nothing")
    with pytest.raises(psycopg.errors.UndefinedTable):
        sessions.link.lose(caught.value)
    assert sessions.link.pipeline is None


@pytest.mark.parametrize("has_two", [False, True])
def test_a_session_that_cannot_listen_is_closed(process_url: str, has_two: bool) -> None:
    opened: list[Connection[Any]] = []

    def refuse(connection: Connection[Any]) -> None:
        opened.append(connection)
        connection.execute("SELECT * FROM nothing")

    session_url = process_url if has_two else None
    config = PostgresConfig(database_url=process_url, session_database_url=session_url)
    link, listener = make_sessions(Database(config, "worker"), RESILIENCE, (QUEUE,), refuse)
    with pytest.raises(psycopg.errors.UndefinedTable):
        listener.open()
    assert link.pipeline is None
    assert [connection.closed for connection in opened] == [True]


def test_a_session_of_its_own_listens_where_the_address_says_so(process_url: str) -> None:
    config = PostgresConfig(database_url=process_url, session_database_url=process_url)
    locked: list[Connection[Any]] = []
    link, listener = make_sessions(Database(config, "worker"), RESILIENCE, (QUEUE,), locked.append)
    assert isinstance(listener, Listener)
    listener.open()
    assert locked == [listener.connection]
    assert link.open_now().connection is not listener.connection
    listener.close()
    link.close()


def raising(sqlstate: str) -> sql.Composed:
    """A statement that fails with this SQLSTATE."""
    body = sql.Literal(f"BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}'; END")
    return sql.SQL("DO {}").format(body)
