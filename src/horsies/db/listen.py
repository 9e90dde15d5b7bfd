"""LISTEN: one connection that hears notifications, reconnects by itself, and says when it may have
missed some.

A notification is a hint. What is sent while the connection is down is gone, so every reconnect is
reported as a gap and the owner looks at the tables again. The owner is one thread or one selector
loop; nothing here is shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection, sql
from psycopg.pq.abc import PGconn

from horsies.db.pool import is_readable
from horsies.ids import new_id

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What one look at the listener brought."""

    notifications: Sequence[tuple[str, str]] = ()
    # True after a (re)connect: notifications may have been lost, look at the tables.
    gap: bool = False


@dataclass(slots=True)
class Inbox:
    """Notifications that have come in and that nobody has taken yet.

    What the server process ``deaf_to`` sent is no news to the owner and is left out; ``delivered``
    counts it nevertheless.
    """

    ignore_pid: int | None = None
    delivered: int = 0
    _queue: list[tuple[int, str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._queue)

    def subscribe(self, connection: Connection[Any], channels: Sequence[str]) -> None:
        """Hear these channels on a connection from now on, also beside the answers to statements."""
        connection.add_notify_handler(lambda note: self._keep(note.pid, note.channel, note.payload))
        for channel in channels:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def collect(self, pgconn: PGconn) -> None:
        """Take over what libpq has already read off the socket."""
        while note := pgconn.notifies():
            self._keep(note.be_pid, note.relname.decode(), note.extra.decode())

    def drain(self, pgconn: PGconn) -> None:
        """Take over what has arrived, without waiting."""
        pgconn.consume_input()
        self.collect(pgconn)

    def take(self) -> Sequence[tuple[str, str]]:
        """Empty it: channels and payloads, in the order in which they came."""
        taken, self._queue = self._queue, []
        return tuple((channel, text) for pid, channel, text in taken if pid != self.ignore_pid)

    def _keep(self, pid: int, channel: str, payload: str) -> None:
        self._queue.append((pid, channel, payload))
        self.delivered += 1


@dataclass(slots=True)
class Listener:
    """A LISTEN connection owned by one loop.

    ``connect`` opens a session connection; ``channels`` are subscribed to after every connect.
    ``failure`` holds the last connection error while the listener is down.
    """

    connect: Callable[[], Connection[Any]]
    channels: Sequence[str]
    inbox: Inbox = field(default_factory=Inbox)
    connection: Connection[Any] | None = None
    failure: Exception | None = None
    _retry_at: float = 0.0
    _retry_seconds: float = FIRST_RETRY_SECONDS

    def open(self) -> None:
        """Connect and subscribe, raising whatever goes wrong."""
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
        """Return the socket to wait on, or -1 while the connection is down."""
        if self.connection is None or self.connection.closed:
            return -1
        return self.connection.pgconn.socket

    def seconds_until_retry(self) -> float | None:
        """Return how long to wait before ``receive`` should be called to reconnect, None while
        connected.
        """
        if self.connection is None:
            return max(0.0, self._retry_at - time.monotonic())
        return 0.0 if self.connection.closed else None  # a statement run on it met its end

    def has_heard(self) -> bool:
        """Tell whether notifications came in with the answer to a statement run on the connection:
        they are off the socket, which will not become readable for them.
        """
        return len(self.inbox) > 0

    def look(self) -> None:
        """Read what has arrived and keep it for ``receive``, which also meets whatever is wrong."""
        if self.connection is not None:
            with suppress(psycopg.Error):
                self.inbox.drain(self.connection.pgconn)

    def is_connected(self) -> bool:
        """Tell whether the connection still stands, with all read that the server may have said last."""
        return self.connection is not None and stands(self.connection, self.inbox)

    def receive(self) -> Heard:
        """Take what has arrived without waiting; reconnect when it is time to."""
        if self.connection is None:
            return self._reconnect()
        try:
            self.inbox.drain(self.connection.pgconn)
        except psycopg.Error as error:
            self._lose(error)
        return Heard(self.inbox.take())

    def _reconnect(self) -> Heard:
        if time.monotonic() < self._retry_at:
            return Heard()
        try:
            self.open()
        except Exception as error:  # a server that is away, or a schema newer than the code
            self._lose(error)
            return Heard()
        return Heard(self.inbox.take(), gap=True)

    def _lose(self, error: Exception) -> None:
        self.failure = error
        if self.connection is not None:
            # The next call may open it anew, unless it has only just been opened.
            self.connection.close()
            self.connection = None
            return
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(self._retry_seconds * 2, LAST_RETRY_SECONDS)

    def close(self) -> None:
        """Close the connection; only ``receive`` would open another."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def stands(connection: Connection[Any], inbox: Inbox) -> bool:
    """Tell whether a connection is there, with all read that the server may have said last."""
    while not connection.closed:
        if not is_readable(connection.pgconn):
            return True
        with suppress(psycopg.Error):
            inbox.drain(connection.pgconn)
    return False


def hears_itself(connect: Callable[[], Connection[Any]], timeout_seconds: float = 5.0) -> bool:
    """Prove that LISTEN works: send a notification to ourselves and wait for it.

    Behind a pooler in transaction mode LISTEN is accepted and nothing is ever delivered; only an
    echo tells. It is sent over a second connection: one that notifies itself hears the echo in the
    answer to its own statement, pooler or not.
    """
    channel = f"horsies_echo_{new_id().replace('-', '')}"
    with connect() as connection, connect() as sender:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        sender.execute("SELECT pg_notify(%s, 'echo')", (channel,))
        heard = any(connection.notifies(timeout=timeout_seconds, stop_after=1))
        connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
    return heard
