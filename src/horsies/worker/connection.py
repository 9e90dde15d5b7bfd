"""The worker's database connection: turns, LISTEN and the session lock, kept through outages.

While the database is unavailable, the loop gets None instead of a connection and continues to serve
children.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus

from horsies.config.app import WorkerResilienceConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.errors import (
    ErrorKind,
    describe,
    is_lock_timeout,
    is_of_data,
    is_refusal,
    kind_of,
    may_last,
)
from horsies.db.limits import NO_LIMITS, Limits
from horsies.db.listen import (
    Inbox,
    Listener,
    Received,
    is_connection_alive,
    receives_own_notification,
)
from horsies.db.migrate import prepare_schema
from horsies.db.pipeline import Pipeline
from horsies.db.statements.workers import (
    ClientProbes,
    LockKey,
    end_earlier_session,
    notice_lost_client,
    read_trigger_mode,
    take_worker_lock,
)
from horsies.logs import as_event
from horsies.retry import Backoff
from horsies.worker.notifications import (
    PAUSE_CHANNEL,
    EchoCheck,
    NotificationBatch,
    sort_notifications,
)

logger = logging.getLogger("horsies.worker")

TURN_ROLE = "turn"
# Each statement is planned once: when PostgreSQL planned each claim separately, a claim took 0.47 ms, 0.46 ms
# of them for planning. A plan made while the table was almost empty would keep scanning the whole table, so
# only index scans and nested loops are allowed.
TURN_SETTINGS = (
    "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off "
    "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_material=off"
)
# The data of the selector key for the socket that receives notifications.
NOTIFICATION_SOCKET = "notifications"

# If a connection has lasted this long, a replacement is opened immediately when it breaks. Until then the
# worker's lock is free, which other workers notice.
STEADY_SECONDS = 0.2
# The time limit for one attempt to reconnect while tasks run, well below worker_lost_after_ms.
RECONNECT_TIMEOUT_SECONDS = 4
# The first characters of SQLSTATEs that concern only one transaction: conflicts, resources, locks,
# cancellation. The refusal of a standby to write is not among them, because a new connection may reach the
# new primary.
_SURVIVED = ("40", "53", "54", "55", "57014")
_CLOSED = ConnStatus.BAD  # a constant, because accessing an enum member takes 0.1 to 0.5 µs


class DatabaseGivenUpError(Exception):
    """The database was unavailable for longer than the resilience settings allow."""


class NotificationsLostError(Exception):
    """LISTEN succeeds but no notifications arrive, as behind a pooler in transaction mode."""


def open_turns(database: Database, limits: Limits = NO_LIMITS) -> Pipeline:
    """Open a connection that is tuned for turns: every statement is prepared, with a generic plan."""
    settings = f"{TURN_SETTINGS} -c lock_timeout={limits.lock_ms}"
    return Pipeline.open(database, TURN_ROLE, settings, limits)


def _warn_of_silent_triggers(pipeline: Pipeline) -> None:
    """Warn if session_replication_role disables triggers, because runs then stop after their first node.
    Only a superuser can reset it.
    """
    ((mode,),) = pipeline.run([read_trigger_mode()])
    if mode.is_silent:
        logger.warning(
            "session_replication_role is replica for this worker, so triggers do not fire: workflow runs "
            "do not advance and nothing is notified; `horsies doctor --only triggers` prints the remedy"
        )


class SessionLock:
    """The advisory lock that shows other workers that this worker is alive."""

    __slots__ = ("_key",)

    def __init__(self, key: int) -> None:
        self._key = LockKey(key)

    def take(self, connection: Connection[Any]) -> None:
        """Take the lock on a new session, and end an earlier session of this worker that still holds it. The
        server may not have noticed the loss of the earlier session, and may execute its last statements after
        those of the new session. A late claim would take tasks that this worker is not aware of, and a late
        release would take back a running task. A failure is transient: either an observer is probing the
        lock, or the earlier session needs time to end. After SET ROLE, the role may lack the right to end its
        own sessions; then the server must notice the lost session itself.
        """
        if not self._is_taken(connection):
            with suppress(psycopg.errors.InsufficientPrivilege):
                end_earlier_session.run(connection, self._key)
            if not self._is_taken(connection):
                raise psycopg.OperationalError(
                    "an earlier session of this worker has not ended yet"
                )

    def _is_taken(self, connection: Connection[Any]) -> bool:
        (answer,) = take_worker_lock.run(connection, self._key)
        return answer.held


class Outages:
    """Decides when to try the database again after an error: with growing delays, or every
    `retry_seconds` while tasks run.

    `holds_tasks` returns whether tasks are running.
    """

    def __init__(
        self,
        resilience: WorkerResilienceConfig,
        holds_tasks: Callable[[], bool],
        retry_seconds: float,
    ) -> None:
        self.retry_at = 0.0
        # The number of past outages.
        self.ended = 0
        # Whether the worker has ever had a session.
        self.has_been_open = False
        self._holds_tasks = holds_tasks
        self._retry_seconds = retry_seconds
        self._max_attempts = resilience.db_retry_max_attempts
        self._backoff = Backoff(
            resilience.db_retry_initial_ms, resilience.db_retry_max_ms, self._max_attempts
        )
        self.is_on = False
        # Attempts to reconnect that fail before this time do not lengthen the backoff.
        self._counted_at = 0.0

    @property
    def is_waiting_worthwhile(self) -> bool:
        return self.has_been_open and self._holds_tasks()

    def retry_now(self, error: psycopg.Error) -> None:
        """Note that a session was lost after it had worked for a while."""
        self.is_on = True
        self.retry_at = 0.0
        logger.error(
            "connection to the database lost, opening another: %s",
            describe(error),
            extra=as_event("database_lost", attempt=0),
        )

    def pause(self, error: psycopg.Error) -> None:
        """Schedule the next attempt to reach the database; raise DatabaseGivenUpError if no attempts are
        left.
        """
        self.is_on = True
        now = time.monotonic()
        if now >= self._counted_at:
            self._count_attempt(error, now)
        else:
            logger.debug("database still unavailable: %s", describe(error))
        self.retry_at = self._counted_at
        if self.is_waiting_worthwhile:
            self.retry_at = min(self.retry_at, now + self._retry_seconds)

    def _count_attempt(self, error: psycopg.Error, now: float) -> None:
        delay_seconds = self._backoff.next_delay_seconds()
        if delay_seconds is None:
            raise DatabaseGivenUpError(describe(error)) from error
        self._counted_at = now + delay_seconds
        logger.error(
            "%s, next attempt in %.1f s (%s/%s): %s",
            _trouble(error),
            delay_seconds,
            self._backoff.attempts,
            self._max_attempts or "inf",
            describe(error),
            extra=as_event("database_lost", attempt=self._backoff.attempts),
        )

    def end(self) -> None:
        """Note that a statement succeeded, so that the delay after the next error is minimal."""
        logger.info("database is back", extra=as_event("database_back"))
        self.ended += 1
        self.is_on = False
        self._counted_at = 0.0
        self._backoff.reset()


def _trouble(error: psycopg.Error) -> str:
    """Return what keeps the worker from working, for its log."""
    if is_lock_timeout(error):
        return "another session holds a lock (horsies doctor names it)"
    return "statement refused" if is_of_data(error) or may_last(error) else "database unavailable"


class Deliveries:
    """Decides by the echoes of the worker's own calls whether notifications arrive."""

    def __init__(self, inbox: Inbox, poll_seconds: float) -> None:
        self.check = EchoCheck()
        self._inbox = inbox
        self._poll_seconds = poll_seconds
        self._delivered = 0

    def note(self) -> None:
        """Take note of the notifications that have arrived since the last call."""
        if self._inbox.delivered == self._delivered:
            return
        self._delivered = self._inbox.delivered
        if not self.check.is_receiving:
            event = as_event("notifications_back")
            logger.info("notifications are received again", extra=event)
        self.check.note_delivery()

    def judge(self, now: float) -> bool:
        """Return whether notifications are delivered. Must be called when the last call's echo should have
        arrived.
        """
        self.note()
        was_receiving = self.check.is_receiving
        self.check.judge(now)
        if was_receiving and not self.check.is_receiving:
            logger.error(
                "notifications are not delivered; polling every %g s",
                self._poll_seconds,
                extra=as_event("notifications_lost", silent=True),
            )
        return self.check.is_receiving


class WorkerConnection:
    """Takes turns, receives notifications and holds the worker's session lock.

    One session does all three. With ``session_database_url``, which is needed behind a pooler in
    transaction mode, a second session receives notifications and holds the lock. The receiving socket
    stays in `selector` through every reconnect.
    """

    def __init__(
        self,
        database: Database,
        resilience: WorkerResilienceConfig,
        channels: Sequence[str],
        lock_key: int,
        selector: selectors.BaseSelector,
        *,
        holds_tasks: Callable[[], bool] = lambda: False,
        retry_seconds: float = 1.0,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.outages = Outages(resilience, holds_tasks, retry_seconds)
        self.lock = SessionLock(lock_key)
        self._database = database
        self._limits = limits
        self._channels = channels
        self._selector = selector
        # An outcome that this worker records may pause a run whose tasks are in its children's windows.
        self._inbox = Inbox(kept=[PAUSE_CHANNEL])
        self.deliveries = Deliveries(self._inbox, resilience.notify_poll_interval_ms / 1000)
        self._listener: Listener | None = None
        if database.config.session_database_url is not None:
            self._listener = Listener(self._open_listening_session, channels, self._inbox)
        self._watched_fd = -1
        # Whether the session that receives notifications has been replaced since the last ``receive``.
        self._has_gap = False
        self._opened_at = 0.0
        # Whether any statement has succeeded on the current session for turns.
        self._is_proven = False
        # How many times the session that holds the lock was opened or lost.
        self.breaks = 0

    # Opening, losing and closing

    def start(self) -> None:
        """Migrate the schema, check that notifications are delivered, then listen; raise any error."""
        prepare_schema(self._database)
        if not receives_own_notification(lambda: self._database.connect("listener", session=True)):
            raise NotificationsLostError(
                "LISTEN is accepted but nothing is delivered: there is a pooler in transaction mode in "
                "between; set session_database_url to a direct connection."
            )
        self.listen()

    def listen(self) -> None:
        if self._listener is None:
            self._open_turns()
            self._has_gap = False
        else:
            self._listener.open()
        self.watch_socket()

    @property
    def is_up(self) -> bool:
        """Whether there is a session for turns that is not paused after an error."""
        return self.pipeline is not None and time.monotonic() >= self.outages.retry_at

    @property
    def holds_lock(self) -> bool:
        """Whether there is a session for turns, and a session that holds the worker's lock."""
        return self.is_up and self._session is not None

    def open(self) -> Pipeline | None:
        """Return the session for turns, and open it if an attempt is due; None while there is no session."""
        if time.monotonic() >= self.outages.retry_at:
            try:
                return self._open_turns()
            except psycopg.Error as error:
                self.lose(error)
        if self.pipeline is None:
            self.breaks += 1
        return None

    def _open_turns(self) -> Pipeline:
        if self.pipeline is None:
            pipeline = open_turns(self._database, self._limits)
            if self._listener is None:
                self._prepare_session(pipeline.connection)
            try:
                _warn_of_silent_triggers(pipeline)
            except BaseException:
                pipeline.connection.close()  # the session may hold the worker's lock
                raise
            self.pipeline = pipeline
            self._has_gap = self._has_gap or self._listener is None
            self._opened_at, self._is_proven = time.monotonic(), False
        return self.pipeline

    def _open_listening_session(self) -> Connection[Any]:
        connection = self._database.connect("listener", session=True)
        self._prepare_session(connection)
        return connection

    def _prepare_session(self, connection: Connection[Any]) -> None:
        """Take the worker's lock on a new session. Also subscribe to notifications, unless the listener
        does that.
        """
        self.breaks += 1
        self.outages.has_been_open = True
        self._database.connect_seconds = RECONNECT_TIMEOUT_SECONDS
        try:
            self.lock.take(connection)
            if (config := self._database.config).tcp_keepalives:
                notice_lost_client.run(connection, _client_probes(config))
            if self._listener is None:
                self._inbox.subscribe(connection, self._channels)
        except BaseException:
            connection.close()
            raise

    def lose(self, error: psycopg.Error) -> None:
        """Pause after an error, or raise the error if only an operator can remove its cause. The session is
        closed unless only a transaction failed. A data error concerns single tasks and is isolated where it
        occurs; if it reaches this method nevertheless, it must not end a running worker. A server that
        rejects the credentials of a worker with tasks may accept them later, because passwords are rotated
        and databases are restored.
        """
        kind = kind_of(error)
        is_starting = self.pipeline is None
        is_refused = is_refusal(error) and self.outages.is_waiting_worthwhile
        if (kind is ErrorKind.INSTALLATION and not is_refused) or (
            kind is ErrorKind.DATA and is_starting
        ):
            self.close_turns()
            raise error
        was_steady = (
            self.pipeline is not None
            and self._is_proven
            and time.monotonic() >= self._opened_at + STEADY_SECONDS
        )
        if self.pipeline is not None and not _survives(self.pipeline, error):
            self.close_turns()
        if was_steady and self.pipeline is None:
            self.outages.retry_now(error)
        else:
            self.outages.pause(error)

    def confirm(self) -> None:
        """Note that a statement succeeded."""
        if self.outages.is_on:
            self.outages.end()
        self._is_proven = True

    def close_turns(self) -> None:
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is None:
            return
        self.breaks += 1
        logger.debug(
            "turns: %d statements in %d round trips", pipeline.statements, pipeline.round_trips
        )
        self.watch_socket()
        pipeline.connection.close()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self.watch_socket()
        self.close_turns()

    # Notifications

    @property
    def _session(self) -> Connection[Any] | None:
        """The session that receives notifications."""
        if self._listener is not None:
            return self._listener.connection
        return None if self.pipeline is None else self.pipeline.connection

    def watch_socket(self) -> None:
        """Make the selector watch the current socket, if there is one. This must be called immediately after
        a change, because the descriptor number of a closed socket can be reused for a child's socket.
        """
        session = self._session
        current = -1 if session is None or session.closed else session.pgconn.socket
        if current == self._watched_fd:
            return
        if self._watched_fd >= 0:
            self._selector.unregister(self._watched_fd)
            self.deliveries.check.note_lost()
        if current >= 0:
            self._selector.register(current, selectors.EVENT_READ, NOTIFICATION_SOCKET)
        self._watched_fd = current

    def seconds_until_receive(self) -> float | None:
        """Return the seconds until ``receive`` must be called even if the socket is not readable.

        This is 0 after notifications that arrived with the response to a statement, and on a new session.
        Before a reconnect it is the remaining delay; in all other cases it is None.
        """
        if self._listener is not None:
            has_news = self._has_gap or len(self._inbox)
            return 0.0 if has_news else self._listener.seconds_until_retry()
        pipeline = self.pipeline
        if pipeline is not None:
            pgconn = pipeline.connection.pgconn
            has_news = self._inbox.collect(pgconn)
            return 0.0 if has_news or self._has_gap or pgconn.status == _CLOSED else None
        return 0.0 if len(self._inbox) else None

    def receive(self, *, ignores_own: bool = False) -> NotificationBatch:
        """Take the notifications that have arrived, without waiting, and reconnect if an attempt is due.

        With `ignores_own`, notifications sent by the session for turns are dropped, except for pauses.
        """
        pipeline = self.pipeline
        self._inbox.ignore_pid = pipeline.sender_pid if ignores_own and pipeline else None
        if self._listener is None:
            received = self._receive_on_turns()
        else:
            received = self._receive_on_listener(self._listener)
        self.deliveries.note()
        self.watch_socket()
        gap, self._has_gap = received.gap or self._has_gap, False
        return sort_notifications(received.notifications, gap=gap)

    def _receive_on_turns(self) -> Received:
        pipeline = self.pipeline
        if pipeline is None:
            return Received(self._inbox.take())
        try:
            self._inbox.drain(pipeline.connection.pgconn)
        except psycopg.Error as error:
            self.lose(error)
        return Received(self._inbox.take())

    def _receive_on_listener(self, listener: Listener) -> Received:
        was_down = listener.failure is not None
        received = listener.receive()
        if listener.failure is not None and not was_down:
            event, reason = as_event("notifications_lost", silent=False), describe(listener.failure)
            logger.error("notifications lost, polling until they are back: %s", reason, extra=event)
        if received.gap and was_down and self.deliveries.check.is_receiving:
            logger.info("notifications are back", extra=as_event("notifications_back"))
        return received

    # Liveness

    def keep_lock(self) -> None:
        """While a statement waits for its response, reconnect the session that holds the lock, if this is a
        separate session.

        A pooler may hold the statement back for minutes after the server is available again.
        """
        listener = self._listener
        if listener is None or self.is_connected() or listener.seconds_until_retry() != 0.0:
            return
        self._has_gap = listener.receive().gap or self._has_gap
        self.watch_socket()

    def check_notifications(self, now: float) -> bool:
        """Return whether notifications are delivered. Must be called before ``note_heartbeat``, when the echo
        of the previous call should have arrived.
        """
        if (session := self._session) is not None:
            with suppress(psycopg.Error):  # the next ``receive`` raises the same error
                self._inbox.drain(session.pgconn)
        self.watch_socket()
        return self.deliveries.judge(now) and self._watched_fd >= 0

    def note_heartbeat(self, now: float, *, called: bool) -> None:
        """Note that the worker has just sent a heartbeat, and whether it notified itself.

        A session that delivers no notifications is closed immediately after the heartbeat, because this
        releases the worker's lock for a moment.
        """
        self.deliveries.check.note_heartbeat()
        if called:
            self.deliveries.check.note_call(now)
        if not self.deliveries.check.needs_new_connection:
            return
        if self._listener is None:
            self.close_turns()
        else:
            self._listener.close()
            self.watch_socket()

    def is_connected(self) -> bool:
        """Return whether the session that holds the worker's lock is alive right now."""
        session = self._session
        is_connected = session is not None and is_connection_alive(session, self._inbox)
        if not is_connected:
            self.breaks += 1
        self.watch_socket()
        return is_connected


def _client_probes(config: PostgresConfig) -> ClientProbes:
    """The server's keepalive limits for the connection, equal to the client's."""
    return ClientProbes(
        str(config.tcp_keepalives_idle),
        str(config.tcp_keepalives_interval),
        str(config.tcp_keepalives_count),
        str(config.tcp_user_timeout_ms),
    )


def _survives(pipeline: Pipeline, error: psycopg.Error) -> bool:
    """Return whether only the transaction failed, so that the session can begin the next transaction."""
    pgconn = pipeline.connection.pgconn
    return (
        (is_of_data(error) or (error.sqlstate or "").startswith(_SURVIVED))
        and pgconn.pipeline_status == PipelineStatus.OFF
        and pgconn.transaction_status == TransactionStatus.IDLE
    )
