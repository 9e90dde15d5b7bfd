"""The worker's connection for its turns, and patience when it breaks.

The parent loop asks for the connection and gets it or None. While the database is away the loop goes
on serving children; ``Link`` says when to try again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.pq import PipelineStatus, TransactionStatus

from horsies.config.app import WorkerResilienceConfig
from horsies.db.database import Database
from horsies.db.errors import describe, is_transient
from horsies.db.listen import Heard, Inbox, Listener, stands
from horsies.db.pipeline import Pipeline
from horsies.events import as_event
from horsies.retry import Backoff

logger = logging.getLogger("horsies.worker")

TURN_ROLE = "turn"
# Stable plans, planned once: planning took 0.46 of a claim's 0.47 ms when PostgreSQL planned each
# one anew. A plan made while the table was almost empty would scan it whole for ever, so only the
# indexes are left to choose from.
TURN_SETTINGS = " ".join(
    f"-c {setting}"
    for setting in (
        "plan_cache_mode=force_generic_plan",
        "enable_seqscan=off",
        "enable_bitmapscan=off",
        "enable_hashjoin=off",
        "enable_mergejoin=off",
        "enable_material=off",
    )
)

# A connection that breaks after this long is opened again at once: others see its lock free meanwhile.
STEADY_SECONDS = 0.2
# Errors of one transaction, by the beginning of their SQLSTATE: conflicts, resources, locks, a cancel.
# A standby's refusal to write is none: another connection may find the new primary.
_SURVIVED = ("40", "53", "55", "57014")


class DatabaseGivenUpError(Exception):
    """The database stayed away for longer than the resilience settings allow."""


@dataclass(slots=True)
class TurnConnection:
    """The turn connection, opened again after every loss, with backoff."""

    connect: Callable[[], Pipeline]
    resilience: WorkerResilienceConfig
    pipeline: Pipeline | None = None
    retry_at: float = 0.0
    is_broken: bool = False
    # Called before the connection is closed: whoever waits for its socket must let go of it.
    on_close: Callable[[], None] = lambda: None
    _opened_at: float = 0.0
    # Whether anything has gone through on this connection.
    _is_proved: bool = False
    _backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the backoff."""
        limits = self.resilience
        self._backoff = Backoff(
            limits.db_retry_initial_ms, limits.db_retry_max_ms, limits.db_retry_max_attempts
        )

    @property
    def is_up(self) -> bool:
        """Whether there is a connection and no reason to spare it."""
        return self.pipeline is not None and time.monotonic() >= self.retry_at

    def open(self) -> Pipeline | None:
        """Return the connection, opening it if it is time to; None while the database is away."""
        if time.monotonic() < self.retry_at:
            return None
        try:
            return self.open_now()
        except psycopg.Error as error:
            self.lose(error)
        return None

    def open_now(self) -> Pipeline:
        """Return the connection, opening it and raising whatever goes wrong."""
        if self.pipeline is None:
            self.pipeline = self.connect()
            self._opened_at, self._is_proved = time.monotonic(), False
        return self.pipeline

    def lose(self, error: psycopg.Error) -> None:
        """Wait after an error that may pass, raise one that will not; the connection is given up unless
        it was only a transaction that failed.
        """
        if not is_transient(error):
            self.close()
            raise error
        self.is_broken = True
        was_steady = self._is_steady()
        if self.pipeline is not None and not _survives(self.pipeline, error):
            self.close()
        if was_steady and self.pipeline is None:
            self.retry_at = 0.0
            logger.error(
                "connection to the database lost, opening another: %s",
                describe(error),
                extra=as_event("database_lost", attempt=0),
            )
        else:
            self._wait(error)

    def _is_steady(self) -> bool:
        """Whether the connection has stood for a while, and something went through on it."""
        has_stood = time.monotonic() >= self._opened_at + STEADY_SECONDS
        return self.pipeline is not None and self._is_proved and has_stood

    def _wait(self, error: psycopg.Error) -> None:
        delay_seconds = self._backoff.next_delay_seconds()
        if delay_seconds is None:
            raise DatabaseGivenUpError(describe(error)) from error
        self.retry_at = time.monotonic() + delay_seconds
        limit = self.resilience.db_retry_max_attempts or "inf"
        logger.error(
            "database away, next try in %.1f s (%s/%s): %s",
            delay_seconds,
            self._backoff.attempts,
            limit,
            describe(error),
            extra=as_event("database_lost", attempt=self._backoff.attempts),
        )

    def confirm(self) -> None:
        """A statement went through: the next trouble starts from the shortest delay again."""
        if self.is_broken:
            logger.info("database is back", extra=as_event("database_back"))
            self.is_broken = False
        self._is_proved = True
        self._backoff.reset()

    def close(self) -> None:
        """Close the connection."""
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is None:
            return
        logger.debug(
            "turns: %d statements in %d round trips", pipeline.statements, pipeline.round_trips
        )
        self.on_close()
        pipeline.connection.close()


def _survives(pipeline: Pipeline, error: psycopg.Error) -> bool:
    """Whether only a transaction failed, and the session is ready for the next."""
    pgconn = pipeline.connection.pgconn
    return (
        (error.sqlstate or "").startswith(_SURVIVED)
        and pgconn.pipeline_status == PipelineStatus.OFF
        and pgconn.transaction_status == TransactionStatus.IDLE
    )


def turn_connector(database: Database) -> Callable[[], Pipeline]:
    """Return what opens a connection tuned for turns: every statement prepared, generic plans."""
    return lambda: Pipeline.open(database, TURN_ROLE, TURN_SETTINGS)


class TurnListener:
    """Hears on the connection of the turns. The link opens and mends it, and tells of its losses."""

    failure = None

    def __init__(self, link: TurnConnection, inbox: Inbox) -> None:
        self.inbox = inbox
        self._link = link
        # The connection last heard on: another one means that something may have been missed.
        self._known: Pipeline | None = None

    @property
    def connection(self) -> Connection[Any] | None:
        """The connection, None while there is none."""
        return None if (pipeline := self._link.pipeline) is None else pipeline.connection

    def open(self) -> None:
        """Connect and subscribe, raising whatever goes wrong."""
        self._known = self._link.open_now()

    def fileno(self) -> int:
        """Return the socket to wait on, or -1 while the connection is down."""
        connection = self.connection
        return -1 if connection is None or connection.closed else connection.pgconn.socket

    def seconds_until_retry(self) -> float | None:
        """Return 0 when ``receive`` should look at once, None otherwise: the link says when to connect."""
        if (pipeline := self._link.pipeline) is None:
            return None
        return 0.0 if pipeline is not self._known or pipeline.connection.closed else None

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
        pipeline = self._link.pipeline
        if pipeline is None:
            return Heard(self.inbox.take())
        is_new, self._known = pipeline is not self._known, pipeline
        try:
            self.inbox.drain(pipeline.connection.pgconn)
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
) -> tuple[TurnConnection, Listener | TurnListener]:
    """Return what takes turns and what listens to these channels, with ``lock`` taken on the latter."""
    if database.config.session_database_url is None:
        inbox = Inbox()
        link = TurnConnection(lambda: _open_both(database, inbox, channels, lock), resilience)
        return link, TurnListener(link, inbox)

    listener = Listener(lambda: _open_listener(database, lock), channels)
    return TurnConnection(turn_connector(database), resilience), listener


def _open_both(
    database: Database,
    inbox: Inbox,
    channels: Sequence[str],
    lock: Callable[[Connection[Any]], None],
) -> Pipeline:
    pipeline = turn_connector(database)()
    with _closed_on_error(pipeline.connection) as connection:
        lock(connection)
        inbox.subscribe(connection, channels)
    return pipeline


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
