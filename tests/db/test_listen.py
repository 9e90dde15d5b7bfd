"""The listener: it reconnects by itself, reports gaps, and proves that notifications arrive."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db import listen
from horsies.db.listen import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    Listener,
    Received,
    is_connection_alive,
    receives_own_notification,
)
from horsies.db.migrate import UnusableSchemaError
from tests.support.database import notify
from tests.support.private_server import PrivateServer
from tests.support.wait import wait_until

CHANNELS = ("first_channel", "Second Channel")


@pytest.fixture
def listener(process_url: str) -> Iterator[Listener]:
    """A listener that is connected."""
    listener = Listener(lambda: psycopg.connect(process_url, autocommit=True), CHANNELS)
    assert listener.receive() == Received(gap=True)
    yield listener
    listener.close()


def wait_for_news(listener: Listener) -> Received:
    """Sleep as an owner does, on the socket and the retry time, until there is something to tell."""
    news: list[Received] = []

    def has_news() -> bool:
        sockets = [listener] if listener.fileno() >= 0 else []
        seconds = listener.seconds_until_retry()
        select.select(sockets, [], [], 0.05 if seconds is None else min(seconds, 0.05))
        news.append(listener.receive())
        return news[-1] != Received()

    wait_until(has_news)
    return news[-1]


def test_what_one_server_process_sends_can_be_left_out(
    connection: Connection[Any], listener: Listener
) -> None:
    listener.inbox.ignore_pid = connection.info.backend_pid
    notify(connection, "first_channel", "ours")
    with psycopg.connect(connection.info.dsn, autocommit=True) as other:
        notify(other, "first_channel", "theirs")
    assert wait_for_news(listener) == Received((("first_channel", "theirs"),))
    listener.inbox.ignore_pid = None
    notify(connection, "first_channel", "ours")
    assert wait_for_news(listener) == Received((("first_channel", "ours"),))


def terminate(connection: Connection[Any], listener: Listener) -> None:
    """Cut the listener's connection on the server's side, and wait until it is gone."""
    assert listener.connection is not None
    pid = listener.connection.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))


def test_every_channel_is_heard_with_its_payload(
    connection: Connection[Any], listener: Listener
) -> None:
    with connection.transaction():
        notify(connection, "first_channel", "a")
        notify(connection, "Second Channel", "b,c")
        notify(connection, "another", "d")
    assert wait_for_news(listener) == Received(
        (
            ("first_channel", "a"),
            ("Second Channel", "b,c"),
        )
    )


def test_a_look_without_news_returns_at_once(listener: Listener) -> None:
    assert listener.receive() == Received()
    assert listener.seconds_until_retry() is None


def test_a_cut_listener_comes_back_subscribes_again_and_reports_a_gap(
    connection: Connection[Any], listener: Listener
) -> None:
    terminate(connection, listener)
    notify(connection, "first_channel", "nobody hears this")
    assert wait_for_news(listener) == Received(gap=True)
    assert listener.failure is None
    for channel in CHANNELS:
        notify(connection, channel, "again")
        assert wait_for_news(listener) == Received(((channel, "again"),))


def test_notifications_that_came_before_the_cut_are_not_lost(
    connection: Connection[Any], listener: Listener
) -> None:
    notify(connection, "first_channel", "last words")
    assert select.select([listener], [], [], 10.0)[0], "they are on their way"
    terminate(connection, listener)
    heard = [wait_for_news(listener), wait_for_news(listener)]
    assert heard == [Received((("first_channel", "last words"),)), Received(gap=True)]


def test_a_cut_is_known_before_anything_is_received(
    connection: Connection[Any], listener: Listener
) -> None:
    notify(connection, "first_channel", "kept")
    assert select.select([listener], [], [], 10.0)[0], "it is on its way"
    listening = listener.connection
    assert listening is not None
    assert is_connection_alive(listening, listener.inbox)
    terminate(connection, listener)
    assert not is_connection_alive(listening, listener.inbox)
    assert wait_for_news(listener) == Received((("first_channel", "kept"),))
    listener.close()
    assert not is_connection_alive(listening, listener.inbox)


def test_a_cut_noticed_by_a_statement_leaves_no_dead_socket_to_wait_on(
    connection: Connection[Any], listener: Listener
) -> None:
    terminate(connection, listener)
    assert listener.connection is not None
    with pytest.raises(psycopg.OperationalError):
        listener.connection.execute("SELECT 1")
    assert listener.fileno() == -1
    assert listener.seconds_until_retry() == 0
    assert wait_for_news(listener) == Received(gap=True)


def test_a_notification_that_came_with_an_answer_is_kept_for_the_next_look(
    connection: Connection[Any], listener: Listener
) -> None:
    assert listener.connection is not None
    notify(connection, "first_channel", "x")
    listener.connection.execute("SELECT 1")
    assert listener.has_notifications()
    assert listener.receive() == Received((("first_channel", "x"),))
    assert not listener.has_notifications()


def test_the_failure_is_kept_while_the_server_refuses(private_server: PrivateServer) -> None:
    url = private_server.url
    listener = Listener(lambda: psycopg.connect(url, autocommit=True), CHANNELS)
    listener.open()
    private_server.stop()
    try:
        wait_until(lambda: not listener.receive().gap and "No such file" in str(listener.failure))
        assert listener.fileno() == -1
        assert listener.seconds_until_retry() is not None
    finally:
        private_server.start()
    assert wait_for_news(listener) == Received(gap=True)
    assert listener.failure is None
    listener.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(listen, "time", clock)
    return clock


def always(error: Exception) -> Callable[[], Connection[Any]]:
    def connect() -> Connection[Any]:
        raise error

    return connect


def test_the_pauses_between_attempts_grow_to_a_bound(clock: SimpleNamespace) -> None:
    listener = Listener(always(psycopg.OperationalError("refused")), CHANNELS)
    pauses: list[float] = []
    for _ in range(10):
        assert listener.receive() == Received()
        pauses.append(round(listener.seconds_until_retry() or 0.0, 6))
        clock.now += pauses[-1]
    assert pauses[:4] == [FIRST_RETRY_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_RETRY_SECONDS


def test_no_attempt_is_made_before_its_time(clock: SimpleNamespace) -> None:
    attempts: list[float] = []

    def connect() -> Connection[Any]:
        attempts.append(clock.now)
        raise psycopg.OperationalError("refused")

    listener = Listener(connect, CHANNELS)
    for _ in range(5):
        listener.receive()
    assert attempts == [1000.0]
    clock.now += FIRST_RETRY_SECONDS
    listener.receive()
    assert attempts == [1000.0, 1000.0 + FIRST_RETRY_SECONDS]


def test_a_successful_connect_starts_the_pauses_over(
    clock: SimpleNamespace, process_url: str
) -> None:
    listener = Listener(always(psycopg.OperationalError("refused")), CHANNELS)
    for _ in range(4):
        listener.receive()
        clock.now += LAST_RETRY_SECONDS
    listener.connect = lambda: psycopg.connect(process_url, autocommit=True)
    assert listener.receive() == Received(gap=True)
    listener.connect = always(psycopg.OperationalError("refused again"))
    listener.close()
    clock.now += LAST_RETRY_SECONDS
    listener.receive()
    assert listener.seconds_until_retry() == pytest.approx(FIRST_RETRY_SECONDS)


@pytest.mark.parametrize(
    "error", [UnusableSchemaError("newer"), OSError("no route"), ValueError("x")]
)
def test_whatever_connecting_runs_into_is_kept_and_not_raised(error: Exception) -> None:
    listener = Listener(always(error), CHANNELS)
    assert listener.receive() == Received()
    assert listener.failure is error


def test_opening_directly_raises_what_goes_wrong() -> None:
    listener = Listener(always(psycopg.OperationalError("refused")), CHANNELS)
    with pytest.raises(psycopg.OperationalError, match="refused"):
        listener.open()
    assert listener.fileno() == -1


def test_a_direct_connection_receives_its_own_notification(process_url: str) -> None:
    assert receives_own_notification(lambda: psycopg.connect(process_url, autocommit=True))


def test_a_connection_through_a_transaction_pooler_is_deaf_and_found_out(
    pgbouncer_url: str,
) -> None:
    def connect() -> Connection[Any]:
        return psycopg.connect(pgbouncer_url, autocommit=True)

    assert not receives_own_notification(connect, timeout_seconds=0.3)
    with connect() as connection:
        row = connection.execute("SELECT current_setting('application_name')").fetchone()
    assert row is not None, "it works for everything but LISTEN"
