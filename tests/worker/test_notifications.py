"""The ear on a real database: what it makes of notifications, and of their absence."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.listen import Listener
from horsies.ids import new_id
from horsies.worker.liveness import PING_CHANNEL, echo_channel
from horsies.worker.notifications import (
    CANCEL_CHANNEL,
    EAR,
    PATIENCE_SECONDS,
    SILENCE,
    News,
    Notifications,
)
from tests.support.wait import wait_until

ECHO = echo_channel(new_id())
QUEUE = "task_queue_default"


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def listener(process_url: str) -> Listener:
    channels = (QUEUE, CANCEL_CHANNEL, PING_CHANNEL, ECHO)
    return Listener(lambda: psycopg.connect(process_url, autocommit=True), channels)


@pytest.fixture
def notifications(
    listener: Listener, selector: selectors.BaseSelector, caplog: pytest.LogCaptureFixture
) -> Iterator[Notifications]:
    caplog.set_level(logging.INFO, "horsies.worker")
    notifications = Notifications(listener, selector, 5.0)
    notifications.open()
    yield notifications
    notifications.close()


def notify(connection: Connection[Any], channel: str, payload: str = "") -> None:
    connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))


def wait_for_socket(selector: selectors.BaseSelector) -> None:
    assert [key.data for key, _ in selector.select(10)] == [EAR]


def test_an_echo_is_no_news(
    connection: Connection[Any], notifications: Notifications, selector: selectors.BaseSelector
) -> None:
    notify(connection, ECHO)
    wait_for_socket(selector)
    assert notifications.receive() == News(False, frozenset())
    with connection.transaction():
        notify(connection, ECHO)
        notify(connection, QUEUE)
        notify(connection, CANCEL_CHANNEL, "id")
        notify(connection, PING_CHANNEL, "ping")
    wait_for_socket(selector)
    assert notifications.receive() == News(True, frozenset({"id"}), ("ping",))


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_echo_proves_hearing_though_we_are_deaf_to_its_sender(
    connection: Connection[Any],
    notifications: Notifications,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
    is_ours: bool,
) -> None:
    now = time.monotonic()
    notifications.note_call(now)
    notify(connection, ECHO)
    wait_for_socket(selector)
    assert notifications.receive(connection.info.backend_pid if is_ours else None) == SILENCE
    assert notifications.check(now + 60)
    assert caplog.messages == []


def test_an_echo_that_lies_in_the_socket_counts_and_is_not_lost(
    connection: Connection[Any], notifications: Notifications, selector: selectors.BaseSelector
) -> None:
    now = time.monotonic()
    notifications.note_call(now)
    with connection.transaction():
        notify(connection, ECHO)
        notify(connection, QUEUE)
    wait_for_socket(selector)
    assert notifications.check(now + 60)
    assert notifications.seconds_until_retry() == 0.0
    assert notifications.receive().work


def test_silence_is_told_once_and_the_connection_replaced_after_the_next_sign_of_life(
    connection: Connection[Any],
    notifications: Notifications,
    listener: Listener,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.monotonic()
    first = listener.connection
    notifications.note_call(now)
    assert not notifications.check(now + PATIENCE_SECONDS)
    assert listener.connection is first, "nobody has seen us live yet"
    notifications.note_call(now + PATIENCE_SECONDS)
    assert listener.connection is None
    assert not selector.get_map()
    assert notifications.seconds_until_retry() is not None
    wait_until(lambda: notifications.receive().gap)
    assert listener.connection is not None
    assert len(selector.get_map()) == 1
    assert not notifications.check(now + 60), "a new connection alone proves nothing"
    notifications.note_call(now + 60)
    notify(connection, ECHO)
    wait_for_socket(selector)
    notifications.receive()
    assert notifications.check(now + 62)
    assert caplog.messages == [
        "notifications are silent; polling every 5 s",
        "notifications are heard again",
    ]


def test_a_cut_connection_is_not_heard_on_and_no_silence(
    connection: Connection[Any],
    notifications: Notifications,
    listener: Listener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.monotonic()
    assert notifications.check(now)
    notifications.note_call(now)
    assert listener.connection is not None
    pid = listener.connection.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    def is_down() -> bool:
        notifications.receive()
        return listener.connection is None

    wait_until(is_down)
    assert not notifications.check(now)
    wait_until(lambda: notifications.receive().gap)
    assert notifications.check(now + 60)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "notifications lost",
        "notifications are back",
    ]


@pytest.mark.parametrize(
    "look",
    [lambda notifications: notifications.check(time.monotonic()), Notifications.is_connected],
)
def test_whoever_finds_the_connection_cut_lets_go_of_its_socket(
    connection: Connection[Any],
    notifications: Notifications,
    listener: Listener,
    selector: selectors.BaseSelector,
    look: Callable[[Notifications], bool],
) -> None:
    assert listener.connection is not None
    pid = listener.connection.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    wait_until(lambda: not look(notifications))
    assert not selector.get_map()
    wait_until(lambda: notifications.receive().gap)
    assert len(selector.get_map()) == 1
