"""The scheduler as a service: ticks in time, waits out a database that is away, never dies of a tick.
Only a database that will not let it in, now or later, ends it.

It waits for nobody itself: the loop in ``loop.py`` asks ``next_at`` how long it may sleep and calls
``step``.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg

from horsies.config.app import AppConfig
from horsies.db.database import Database
from horsies.db.errors import describe, is_transient
from horsies.db.listen import Listener
from horsies.db.migrate import apply_migrations
from horsies.db.pipeline import Pipeline
from horsies.events import as_event
from horsies.retry import Backoff
from horsies.scheduler.entry import Definitions
from horsies.scheduler.registry import Book, enter_schedules
from horsies.scheduler.tick import tick
from horsies.workflow.definition import BuildsSpecs

logger = logging.getLogger("horsies.scheduler")

# How often to look whether somebody removed the record of a schedule.
REFRESH_SECONDS = 60.0
# Clocks run at slightly different speeds: awake a moment late is one look, a moment early are two.
MARGIN_SECONDS = 0.001


class SchedulerGaveUpError(Exception):
    """The database stayed away for longer than the resilience settings allow, or will not let us in."""


class Scheduler:
    """Serves the schedules of one application on a connection of its own.

    ``owner`` names the application in the records; ``connect`` opens the connection; ``app`` builds
    the workflows of schedules that start any.
    """

    def __init__(
        self,
        config: AppConfig,
        definitions: Definitions,
        owner: str,
        connect: Callable[[], Pipeline],
        app: BuildsSpecs | None = None,
    ) -> None:
        self._book = Book.of(config, definitions, owner, app)
        assert config.schedule is not None
        self._interval_seconds = float(config.schedule.check_interval_seconds)
        limits = config.resilience
        self._backoff = Backoff(
            limits.db_retry_initial_ms, limits.db_retry_max_ms, limits.db_retry_max_attempts
        )
        self._connect = connect
        self._pipeline: Pipeline | None = None
        self._has_entered = False
        self._refresh_at = 0.0
        self._next_at = 0.0

    def next_at(self) -> float:
        """Return when to call ``step``, on the monotonic clock."""
        return self._next_at

    def wake(self) -> None:
        """Make the next step look: somebody changed a schedule. A lost connection keeps its patience."""
        if self._pipeline is not None:
            self._next_at = 0.0

    def step(self) -> None:
        """Tick if it is time to; trouble with the database only delays the next one."""
        if time.monotonic() < self._next_at:
            return
        try:
            seconds = self._guarded_tick(self._open())
        except psycopg.Error as error:
            self._lose(error)
        else:
            self._backoff.reset()
            self._next_at = time.monotonic() + seconds

    def _open(self) -> Pipeline:
        """Return the connection, opening it if there is none; give up where that can never work."""
        if self._pipeline is None:
            try:
                self._pipeline = self._connect()
            except psycopg.Error as error:
                if is_transient(error):
                    raise
                raise SchedulerGaveUpError(describe(error)) from error
        return self._pipeline

    def _guarded_tick(self, pipeline: Pipeline) -> float:
        try:
            return self._tick(pipeline)
        except psycopg.Error:
            raise
        except Exception:
            logger.exception("this tick failed; the next one comes in its time")
            return self._interval_seconds

    def _tick(self, pipeline: Pipeline) -> float:
        """Do what is due and return how long to sleep."""
        now = time.monotonic()
        if now >= self._refresh_at:
            pipeline.follow(enter_schedules(self._book, at_start=not self._has_entered))
            if not self._has_entered:
                logger.info(
                    "serving %d schedule(s)",
                    len(self._book.entries),
                    extra=as_event("scheduler_ready", schedules=len(self._book.entries)),
                )
            self._has_entered = True
            self._refresh_at = now + REFRESH_SECONDS
        ticked = tick(pipeline, self._book)
        if ticked.seconds_until_next is None:
            return self._interval_seconds
        return min(self._interval_seconds, max(0.0, ticked.seconds_until_next) + MARGIN_SECONDS)

    def _lose(self, error: psycopg.Error) -> None:
        self.close()
        self._refresh_at = 0.0
        delay_seconds = self._backoff.next_delay_seconds()
        if delay_seconds is None:
            raise SchedulerGaveUpError(describe(error)) from error
        self._next_at = time.monotonic() + delay_seconds
        logger.error(
            "nothing can be scheduled, next try in %.1f s: %s",
            delay_seconds,
            describe(error),
            extra=as_event("scheduler_database_lost"),
        )

    def close(self) -> None:
        """Close the connection; a later step opens a new one."""
        if self._pipeline is not None:
            self._pipeline.connection.close()
            self._pipeline = None


# How long the end of a thread is waited for; what it builds then is left unbuilt.
LAST_STEP_SECONDS = 5.0


def serve(service: Scheduler, called: socket.socket, listener: Listener | None = None) -> None:
    """Serve schedules until a byte comes in on ``called``.

    With a ``listener`` changes of schedules are served at once, else by the next look.
    """
    while True:
        service.step()
        heard = listener.receive() if listener is not None else None
        if heard is not None and (heard.gap or heard.notifications):
            service.wake()
        if _is_called(called, listener, _seconds_to_sleep(service, listener)):
            return


def _seconds_to_sleep(service: Scheduler, listener: Listener | None) -> float:
    seconds = service.next_at() - time.monotonic()
    retry_seconds = None if listener is None else listener.seconds_until_retry()
    return max(0.0, seconds if retry_seconds is None else min(seconds, retry_seconds))


def _is_called(called: socket.socket, listener: Listener | None, timeout_seconds: float) -> bool:
    """Sleep until the time is over or something comes in; tell whether it is time to leave."""
    sockets = [called.fileno()]
    if listener is not None and listener.fileno() >= 0:
        sockets.append(listener.fileno())
    ready, _, _ = select.select(sockets, [], [], timeout_seconds)
    return called.fileno() in ready


def migrating_connector(database: Database) -> Callable[[], Pipeline]:
    """Return what opens the scheduler's connection, and before the first one brings the schema up to
    date.
    """
    is_current = False

    def connect() -> Pipeline:
        nonlocal is_current
        if not is_current:
            with database.connect("schema", session=True) as connection:
                apply_migrations(connection)
            is_current = True
        return Pipeline.open(database, "scheduler")

    return connect


class SchedulerThread:
    """A scheduler beside another loop of the same process.

    ``on_failure`` hears why it ended by itself; it is called in the thread.
    """

    def __init__(self, service: Scheduler, on_failure: Callable[[Exception], None]) -> None:
        self._service = service
        self._on_failure = on_failure
        self._caller, self._called = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="horsies-scheduler", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Let the current step be the last one; may come from a signal handler."""
        with suppress(OSError):  # it has ended already
            self._caller.send(b"!")

    def stop(self) -> None:
        """End it, and wait for the end as long as that makes sense."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(LAST_STEP_SECONDS)
        if self._thread.is_alive():
            logger.warning("a workflow is still being built; its slot is left to others")
            return
        self._caller.close()
        self._called.close()

    def _run(self) -> None:
        try:
            serve(self._service, self._called)
        except Exception as error:
            self._on_failure(error)
        finally:
            self._service.close()
