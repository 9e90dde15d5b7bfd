"""Notifications on a session of their own, on a real database: their meaning, and their absence."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import Connection

from horsies.config.app import WorkerResilienceConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.ids import new_id
from horsies.worker.connection import NOTIFICATION_SOCKET, WorkerConnection
from horsies.worker.liveness import lock_key
from horsies.worker.notifications import (
    ECHO_CHANNEL,
    LISTENER_PATIENCE,
    NOTHING_RECEIVED,
    PATIENCE_SECONDS,
    NotificationBatch,
    worker_channels,
)
from tests.support.database import notify
from tests.support.wait import wait_until

QUEUE, CANCEL_CHANNEL, PAUSE_CHANNEL, PING_CHANNEL = worker_channels(["default"])


@pytest.fixture
def worker(
    process_url: str, selector: selectors.BaseSelector, caplog: pytest.LogCaptureFixture
) -> Iterator[WorkerConnection]:
    caplog.set_level(logging.INFO, "horsies.worker")
    config = PostgresConfig(database_url=process_url, session_database_url=process_url)
    worker = WorkerConnection(
        Database(config, "worker"),
        WorkerResilienceConfig(),
        (QUEUE, CANCEL_CHANNEL, PAUSE_CHANNEL, PING_CHANNEL, ECHO_CHANNEL),
        lock_key(new_id()),
        selector,
    )
    worker.listen()
    yield worker
    worker.close()


def wait_for_socket(selector: selectors.BaseSelector) -> None:
    assert [key.data for key, _ in selector.select(10)] == [NOTIFICATION_SOCKET]


def test_an_echo_is_no_news(
    connection: Connection[Any], worker: WorkerConnection, selector: selectors.BaseSelector
) -> None:
    notify(connection, ECHO_CHANNEL)
    wait_for_socket(selector)
    assert worker.receive() == NotificationBatch(False, frozenset())
    with connection.transaction():
        notify(connection, ECHO_CHANNEL)
        notify(connection, QUEUE)
        notify(connection, CANCEL_CHANNEL, "id")
        notify(connection, PING_CHANNEL, "ping")
    wait_for_socket(selector)
    assert worker.receive() == NotificationBatch(True, frozenset({"id"}), ("ping",))
    notify(connection, PAUSE_CHANNEL, "default")
    wait_for_socket(selector)
    assert worker.receive() == NotificationBatch(False, frozenset(), paused=True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_echo_proves_delivery_although_own_notifications_are_ignored(
    connection: Connection[Any],
    worker: WorkerConnection,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
    is_ours: bool,
) -> None:
    now = time.monotonic()
    worker.note_heartbeat(now, called=True)
    turns = worker.open()
    assert turns is not None
    notify(turns.connection if is_ours else connection, ECHO_CHANNEL)
    wait_for_socket(selector)
    assert worker.receive(ignores_own=is_ours) == NOTHING_RECEIVED
    assert worker.check_notifications(now + 60)
    assert caplog.messages == []


def test_an_echo_that_lies_in_the_socket_counts_and_is_not_lost(
    connection: Connection[Any], worker: WorkerConnection, selector: selectors.BaseSelector
) -> None:
    now = time.monotonic()
    worker.note_heartbeat(now, called=True)
    with connection.transaction():
        notify(connection, ECHO_CHANNEL)
        notify(connection, QUEUE)
    wait_for_socket(selector)
    assert worker.check_notifications(now + 60)
    assert worker.seconds_until_receive() == 0.0
    assert worker.receive().work


def test_silence_is_told_once_and_the_connection_replaced_after_the_next_sign_of_life(
    connection: Connection[Any],
    worker: WorkerConnection,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.monotonic()
    first = worker._session
    worker.note_heartbeat(now, called=True)
    assert not worker.check_notifications(now + PATIENCE_SECONDS)
    assert worker._session is first, "no other worker has seen this one alive yet"
    worker.note_heartbeat(now + PATIENCE_SECONDS, called=True)
    assert worker._session is None
    assert not selector.get_map()
    assert worker.seconds_until_receive() is not None
    wait_until(lambda: worker.receive().gap)
    assert worker._session is not None
    assert len(selector.get_map()) == 1
    assert not worker.check_notifications(now + 60), "a new connection alone proves nothing"
    worker.note_heartbeat(now + 60, called=True)
    notify(connection, ECHO_CHANNEL)
    wait_for_socket(selector)
    worker.receive()
    assert worker.check_notifications(now + 62)
    assert caplog.messages == [
        "notifications are not delivered; polling every 5 s",
        "notifications are received again",
    ]


def test_a_cut_connection_is_not_heard_on_and_no_silence(
    connection: Connection[Any],
    worker: WorkerConnection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.monotonic()
    assert worker.check_notifications(now)
    worker.note_heartbeat(now, called=True)
    assert worker._session is not None
    pid = worker._session.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    def is_down() -> bool:
        worker.receive()
        return worker._session is None

    wait_until(is_down)
    assert not worker.check_notifications(now)
    wait_until(lambda: worker.receive().gap)
    assert worker.check_notifications(now + 60)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "notifications lost",
        "notifications are back",
    ]


@pytest.mark.parametrize(
    "look",
    [lambda worker: worker.check_notifications(time.monotonic()), WorkerConnection.is_connected],
)
def test_whoever_finds_the_connection_cut_lets_go_of_its_socket(
    connection: Connection[Any],
    worker: WorkerConnection,
    selector: selectors.BaseSelector,
    look: Callable[[WorkerConnection], bool],
) -> None:
    assert worker._session is not None
    pid = worker._session.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    wait_until(lambda: not look(worker))
    assert not selector.get_map()
    wait_until(lambda: worker.receive().gap)
    assert len(selector.get_map()) == 1


def test_a_worker_that_received_anything_since_its_last_heartbeat_does_not_call(
    connection: Connection[Any], worker: WorkerConnection, selector: selectors.BaseSelector
) -> None:
    now = time.monotonic()
    assert worker.deliveries.check.wants_call
    worker.note_heartbeat(now, called=False)
    notify(connection, ECHO_CHANNEL)
    wait_for_socket(selector)
    assert worker.check_notifications(now)
    assert not worker.deliveries.check.wants_call
    for _ in range(LISTENER_PATIENCE):
        assert not worker.deliveries.check.wants_call
        worker.note_heartbeat(now, called=False)
        assert worker.check_notifications(now + 60), "without a call, silence proves nothing"
    assert worker.deliveries.check.wants_call
