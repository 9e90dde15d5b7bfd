"""The worker's sessions: one that takes the turns and listens, or two where they cannot be the same.

Each commit that notifies wakes every other session that listens, and waking an idle core is dear: a
worker whose turns listen themselves is 6 to 8 % faster as long as no child is replaced. Only where
``session_database_url`` leads another way, around a pooler, is there a session that listens alone.
Whichever listens also holds the lock that says that the worker lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import Connection

from horsies.config import WorkerResilienceConfig
from horsies.db.connect import Database
from horsies.db.listen import Heard, Inbox, Listener, stands
from horsies.db.together import Together
from horsies.worker.link import Link, turn_connector


class TurnListener:
    """Hears on the connection of the turns. The link opens and mends it, and tells of its losses."""

    failure = None

    def __init__(self, link: Link, inbox: Inbox) -> None:
        self.inbox = inbox
        self._link = link
        # The connection last heard on: another one means that something may have been missed.
        self._known: Together | None = None

    @property
    def connection(self) -> Connection[Any] | None:
        """The connection, None while there is none."""
        return None if (together := self._link.together) is None else together.connection

    def open(self) -> None:
        """Connect and subscribe, raising whatever goes wrong."""
        self._known = self._link.open_now()

    def fileno(self) -> int:
        """Return the socket to wait on, or -1 while the connection is down."""
        connection = self.connection
        return -1 if connection is None or connection.closed else connection.pgconn.socket

    def seconds_until_retry(self) -> float | None:
        """Return 0 when ``receive`` should look at once, None otherwise: the link says when to connect."""
        if (together := self._link.together) is None:
            return None
        return 0.0 if together is not self._known or together.connection.closed else None

    def has_heard(self) -> bool:
        """Tell whether notifications came in with the answer to a turn."""
        if (connection := self.connection) is not None:
            self.inbox.collect(connection.pgconn)
        return len(self.inbox) > 0

    def look(self) -> None:
        """Read what has arrived and keep it for ``receive``, which also meets whatever is wrong."""
        if (connection := self.connection) is not None:
            with suppress(psycopg.Error):
                self.inbox.drain(connection.pgconn)

    def is_connected(self) -> bool:
        """Tell whether the connection still stands, with all read that the server may have said last."""
        return (connection := self.connection) is not None and stands(connection, self.inbox)

    def receive(self) -> Heard:
        """Take what has arrived, without waiting; a connection that broke is the link's to mend."""
        together = self._link.together
        if together is None:
            return Heard(self.inbox.take())
        is_new, self._known = together is not self._known, together
        try:
            self.inbox.drain(together.connection.pgconn)
        except psycopg.Error as error:
            self._link.lose(error)
        return Heard(self.inbox.take(), gap=is_new)

    def close(self) -> None:
        """Close the connection, which takes no more turns either."""
        self._link.close()


def make_sessions(
    database: Database,
    resilience: WorkerResilienceConfig,
    channels: Sequence[str],
    lock: Callable[[Connection[Any]], None],
) -> tuple[Link, Listener | TurnListener]:
    """Return what takes turns and what listens to these channels, with ``lock`` taken on the latter."""
    if database.config.session_database_url is None:
        inbox = Inbox()
        link = Link(lambda: _open_both(database, inbox, channels, lock), resilience)
        return link, TurnListener(link, inbox)

    listener = Listener(lambda: _open_listener(database, lock), channels)
    return Link(turn_connector(database), resilience), listener


def _open_both(
    database: Database,
    inbox: Inbox,
    channels: Sequence[str],
    lock: Callable[[Connection[Any]], None],
) -> Together:
    together = turn_connector(database)()
    with _closed_on_error(together.connection) as connection:
        lock(connection)
        inbox.subscribe(connection, channels)
    return together


def _open_listener(database: Database, lock: Callable[[Connection[Any]], None]) -> Connection[Any]:
    with _closed_on_error(database.connect("listener", session=True)) as connection:
        lock(connection)
    return connection


@contextmanager
def _closed_on_error(connection: Connection[Any]) -> Iterator[Connection[Any]]:
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
