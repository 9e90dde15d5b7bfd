"""LISTEN: a connection that receives notifications, reconnects by itself, and reports gaps.

A notification is only a hint. Notifications sent while the connection is down are lost. So every reconnect is
reported as a gap, after which the owner reads the tables again. The owner is a single thread or selector
loop; listeners are not shared between threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from psycopg import Connection, sql
from psycopg.pq.abc import PGconn

from horsies.database_url import channel_prefix
from horsies.db.database import installation_of, is_readable
from horsies.ids import new_id

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0


class Received(NamedTuple):
    """The (channel, payload) pairs received since the last call."""

    notifications: Sequence[tuple[str, str]] = ()
    # True after a (re)connect: notifications may have been lost, so read the tables.
    gap: bool = False


@dataclass(slots=True)
class Inbox:
    """Received notifications that the owner has not taken yet.

    Notifications sent by the server process ``ignore_pid`` are dropped, except on the channels in
    ``kept``; ``delivered`` counts dropped notifications as well.
    """

    ignore_pid: int | None = None
    kept: Sequence[str] = ()
    delivered: int = 0
    # The prefix of this schema's channels; owners use the channel names without it.
    _prefix: str = ""
    _queue: list[tuple[int, str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._queue)

    def subscribe(self, connection: Connection[Any], channels: Sequence[str]) -> None:
        """LISTEN on these channels, and also collect notifications that arrive with the response to a
        statement.
        """
        self._prefix = channel_prefix(installation_of(connection).schema)
        connection.add_notify_handler(lambda note: self._keep(note.pid, note.channel, note.payload))
        for channel in channels:
            name = sql.Identifier(self._prefix + channel)
            connection.execute(sql.SQL("LISTEN {}").format(name))

    def collect(self, pgconn: PGconn) -> bool:
        """Take the notifications that libpq has already read from the socket. Return whether the inbox has
        any.
        """
        while note := pgconn.notifies():
            self._keep(note.be_pid, note.relname.decode(), note.extra.decode())
        return bool(self._queue)

    def drain(self, pgconn: PGconn) -> None:
        """Read the socket without waiting and take its notifications."""
        pgconn.consume_input()
        self.collect(pgconn)

    def take(self) -> Sequence[tuple[str, str]]:
        """Empty the inbox and return channels and payloads in order of arrival."""
        taken, self._queue = self._queue, []
        return tuple(
            (channel, text)
            for pid, channel, text in taken
            if pid != self.ignore_pid or channel in self.kept
        )

    def _keep(self, pid: int, channel: str, payload: str) -> None:
        self._queue.append((pid, channel.removeprefix(self._prefix), payload))
        self.delivered += 1


@dataclass(slots=True)
class Listener:
    """A LISTEN connection owned by one loop. ``connect`` opens a session connection, and every new connection
    subscribes to ``channels``. ``failure`` holds the latest connection error while the listener is down.
    """

    connect: Callable[[], Connection[Any]]
    channels: Sequence[str]
    inbox: Inbox = field(default_factory=Inbox)
    connection: Connection[Any] | None = None
    failure: Exception | None = None
    _retry_at: float = 0.0
    _retry_seconds: float = FIRST_RETRY_SECONDS

    def open(self) -> None:
        """Connect and subscribe to the channels; errors are raised."""
        connection = self.connect()
        try:
            self.inbox.subscribe(connection, self.channels)
        except BaseException:
            connection.close()
            raise
        self.connection, self.failure = connection, None
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._retry_at = time.monotonic() + FIRST_RETRY_SECONDS

    def fileno(self) -> int:
        """Return the socket to wait for, or -1 while the connection is down."""
        if self.connection is None or self.connection.closed:
            return -1
        return self.connection.pgconn.socket

    def seconds_until_retry(self) -> float | None:
        """Return the seconds until ``receive`` may reconnect, or None while connected."""
        if self.connection is None:
            return max(0.0, self._retry_at - time.monotonic())
        return 0.0 if self.connection.closed else None  # a statement found the connection closed

    def has_notifications(self) -> bool:
        """Take notifications that arrived with the response to a statement on this connection; they do not
        make the socket readable.
        """
        if self.connection is not None:
            self.inbox.collect(self.connection.pgconn)
        return len(self.inbox) > 0

    def receive(self, *, at_once: bool = False) -> Received:
        """Take the received notifications without waiting.

        Reconnect if it is time to retry, or immediately if ``at_once`` is set.
        """
        if self.connection is None:
            return self._reconnect(at_once)
        try:
            self.inbox.drain(self.connection.pgconn)
        except psycopg.Error as error:
            self._lose(error)
        return Received(self.inbox.take())

    def _reconnect(self, at_once: bool) -> Received:
        if not at_once and time.monotonic() < self._retry_at:
            return Received()
        try:
            self.open()
        except Exception as error:  # the server is down, or the schema is newer than the code
            self._lose(error)
            return Received()
        return Received(self.inbox.take(), gap=True)

    def _lose(self, error: Exception) -> None:
        self.failure = error
        if self.connection is not None:
            # Let the next call reconnect immediately, unless the connection was opened just now.
            self.connection.close()
            self.connection = None
            return
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(self._retry_seconds * 2, LAST_RETRY_SECONDS)

    def close(self) -> None:
        """Close the connection. Only a call of ``receive`` opens a new one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def is_connection_alive(connection: Connection[Any], inbox: Inbox) -> bool:
    """Read all input, then check that the server has not closed the connection."""
    while not connection.closed:
        if not is_readable(connection.pgconn):
            return True
        with suppress(psycopg.Error):
            inbox.drain(connection.pgconn)
    return False


def free_notification_queue(connection: Connection[Any]) -> None:
    """Free the part of the server's notification queue that every listening session has read. Otherwise the
    queue stays full even after the session that blocked it has ended: the server truncates it only in this
    function and after a commit with a notification, which a full queue rejects.
    """
    connection.execute("SELECT pg_catalog.pg_notification_queue_usage()", prepare=False)


def receives_own_notification(
    connect: Callable[[], Connection[Any]], timeout_seconds: float = 5.0
) -> bool:
    """Verify that LISTEN works, by sending a notification and waiting for it.

    A pooler in transaction mode accepts LISTEN but never delivers notifications, so only a received
    notification proves that LISTEN works. A second connection sends the notification, because a connection
    that notifies itself receives it with the response to its own statement, even behind a pooler.
    """
    channel = f"horsies_echo_{new_id().replace('-', '')}"
    with connect() as connection, connect() as sender:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        free_notification_queue(sender)
        sender.execute("SELECT pg_notify(%s, 'echo')", (channel,))
        received = any(connection.notifies(timeout=timeout_seconds, stop_after=1))
        connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
    return received
