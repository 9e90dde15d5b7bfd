"""The scheduler as a service: it ticks on time and waits while the database is unavailable.

``Scheduler`` itself never sleeps; ``serve`` sleeps until ``next_at`` and then calls ``step``.
``SchedulerThread`` runs the same loop next to a worker. A failed tick only delays the next one; the
service ends if the database permanently rejects the login, or is unavailable for longer than the
resilience settings allow.
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
from horsies.db.errors import describe, is_refusal, is_transient
from horsies.db.limits import Limits
from horsies.db.listen import Listener
from horsies.db.migrate import prepare_schema
from horsies.db.pipeline import Pipeline
from horsies.logs import as_event
from horsies.retry import Backoff
from horsies.scheduler.entry import Definitions
from horsies.scheduler.registry import Registry, store_configured
from horsies.scheduler.tick import Refused, tick
from horsies.workflow.definition import BuildsSpecs

logger = logging.getLogger("horsies.scheduler")

# Seconds between two checks that the configured schedules are still stored.
REFRESH_SECONDS = 60.0
# If a tick is later than this, the database did not respond, probably to other schedulers either.
STALL_SECONDS = 10.0
# The delay of a wake-up after its slot. Clocks drift: a late wake-up costs one tick, an early one
# costs two.
MARGIN_SECONDS = 0.001
# The time limit of the last step during a stop. A workflow that still builds after it is abandoned.
LAST_STEP_SECONDS = 5.0


class SchedulerGaveUpError(Exception):
    """The database was unavailable for too long, or permanently rejects the login."""


class Scheduler:
    """Serves one application's schedules on its own connection.

    ``owner`` names the application in the database; ``connect`` opens the connection; ``app`` builds the
    workflows of schedules that start one. If ``is_in_worker``, the scheduler keeps waiting when its login
    is rejected after a reconnect, because the worker decides when to give up.
    """

    def __init__(
        self,
        config: AppConfig,
        definitions: Definitions,
        owner: str,
        connect: Callable[[], Pipeline],
        app: BuildsSpecs | None = None,
        *,
        is_in_worker: bool = False,
    ) -> None:
        self._registry = Registry.of(config, definitions, owner, app)
        assert config.schedule is not None
        self._interval_seconds = float(config.schedule.check_interval_seconds)
        limits = config.resilience
        self._backoff = Backoff(
            limits.db_retry_initial_ms, limits.db_retry_max_ms, limits.db_retry_max_attempts
        )
        self._connect = connect
        self._is_in_worker = is_in_worker
        self._pipeline: Pipeline | None = None
        self._refused = Refused()
        self._has_started = False
        self._is_lost = False
        # Whether the current connection was already open at the last refresh.
        self._has_refreshed = False
        self._refresh_at = 0.0
        self._ticked_at = 0.0
        self._next_at = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the last step reached the database."""
        return self._pipeline is not None

    def next_at(self) -> float:
        """Return when to call ``step``, on the monotonic clock."""
        return self._next_at

    def wake(self) -> None:
        """Tick on the next step, because a schedule has changed. A pending reconnect still waits for its
        backoff.
        """
        if self._pipeline is not None:
            self._next_at = 0.0

    def step(self) -> None:
        """Tick if a tick is due; a database error only delays the next tick."""
        if time.monotonic() < self._next_at:
            return
        try:
            seconds = self._guarded_tick(self._open())
        except psycopg.Error as error:
            self._back_off(error)
        else:
            if self._is_lost:
                event = as_event("scheduler_database_back")
                logger.info("the scheduler is connected again", extra=event)
            self._is_lost = False
            self._backoff.reset()
            self._next_at = time.monotonic() + seconds

    def _open(self) -> Pipeline:
        if self._pipeline is None:
            try:
                self._pipeline = self._connect()
            except psycopg.Error as error:
                if is_transient(error) or (
                    self._is_in_worker and self._has_started and is_refusal(error)
                ):
                    raise
                raise SchedulerGaveUpError(describe(error)) from error
        return self._pipeline

    def _guarded_tick(self, pipeline: Pipeline) -> float:
        try:
            return self._tick(pipeline)
        except psycopg.Error:
            raise
        except Exception:
            logger.exception("the tick failed; the next one follows as usual")
            return self._interval_seconds

    def _tick(self, pipeline: Pipeline) -> float:
        """Fire the due slots and return how long to sleep."""
        now = time.monotonic()
        if now >= self._refresh_at:
            has_watched = self._is_on_time if self._has_refreshed else (lambda: False)
            self._has_refreshed = True
            configured = store_configured(
                self._registry, at_start=not self._has_started, has_watched=has_watched
            )
            pipeline.run_script(configured)
            if not self._has_started:
                logger.info(
                    "serving %d schedule(s)",
                    len(self._registry.entries),
                    extra=as_event("scheduler_ready", schedules=len(self._registry.entries)),
                )
            self._has_started = True
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
        seconds = tick(pipeline, self._registry, self._refused).seconds_until_next
        self._ticked_at = time.monotonic()
        if seconds is None:
            return self._interval_seconds
        return min(self._interval_seconds, max(0.0, seconds) + MARGIN_SECONDS)

    def _is_on_time(self) -> bool:
        """Whether the last tick was on time."""
        return time.monotonic() - self._ticked_at < self._interval_seconds + STALL_SECONDS

    def _back_off(self, error: psycopg.Error) -> None:
        self.close()
        self._refresh_at, self._has_refreshed = 0.0, False
        delay_seconds = self._backoff.next_delay_seconds()
        if delay_seconds is None:
            raise SchedulerGaveUpError(describe(error)) from error
        self._next_at = time.monotonic() + delay_seconds
        self._is_lost = True
        logger.error(
            "cannot schedule anything; next try in %.1f s: %s",
            delay_seconds,
            describe(error),
            extra=as_event("scheduler_database_lost"),
        )

    def close(self) -> None:
        """Close the connection; a later step opens a new one."""
        if self._pipeline is not None:
            self._pipeline.connection.close()
            self._pipeline = None


def serve(service: Scheduler, stop: socket.socket, listener: Listener | None = None) -> None:
    """Serve schedules until ``stop`` becomes readable.

    Changes to schedules take effect immediately with a ``listener``, otherwise on the next tick.
    """
    while True:
        service.step()
        received = listener.receive() if listener is not None else None
        if received is not None and (received.gap or received.notifications):
            service.wake()
        if _sleep(service, stop, listener):
            return


def _sleep(service: Scheduler, stop: socket.socket, listener: Listener | None) -> bool:
    """Sleep until the next step or until input arrives; return whether to stop."""
    seconds = service.next_at() - time.monotonic()
    # Use poll() instead of select(), which rejects descriptors above 1,023: a worker has two per
    # child.
    poll = select.poll()
    poll.register(stop, select.POLLIN)
    if listener is not None:
        retry_seconds = listener.seconds_until_retry()
        seconds = seconds if retry_seconds is None else min(seconds, retry_seconds)
        if listener.fileno() >= 0:
            poll.register(listener.fileno(), select.POLLIN)
    return stop.fileno() in dict(poll.poll(max(0.0, seconds) * 1000))


def migrating_connector(
    database: Database, statement_ms: int | None = None
) -> Callable[[], Pipeline]:
    """Return a function that opens the scheduler's connection; the first call also updates the schema.

    ``statement_ms`` limits each statement; None leaves the database's limit in place.
    """
    is_current = False
    limits = Limits(statement_ms=statement_ms)

    def connect() -> Pipeline:
        nonlocal is_current
        if not is_current:
            prepare_schema(database)
            is_current = True
        return Pipeline.open(database, "scheduler", limits=limits)

    return connect


class SchedulerThread:
    """A scheduler in a thread, next to the main loop of the same process.

    ``on_failure`` is called in the thread with the exception that ended the scheduler.
    """

    def __init__(self, service: Scheduler, on_failure: Callable[[Exception], None]) -> None:
        self._service = service
        self._on_failure = on_failure
        self._stop_sender, self._stop_receiver = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="horsies-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Make the scheduler stop after the current step; safe to call in a signal handler."""
        with suppress(OSError):  # The thread has already ended.
            self._stop_sender.send(b"!")

    def stop(self) -> None:
        """Stop the thread and wait for it, up to ``LAST_STEP_SECONDS``."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(LAST_STEP_SECONDS)
        if self._thread.is_alive():
            logger.warning("a workflow is still being built; its slot is left to other schedulers")
            return
        self._stop_sender.close()
        self._stop_receiver.close()

    def _run(self) -> None:
        try:
            serve(self._service, self._stop_receiver)
        except Exception as error:
            self._on_failure(error)
        finally:
            self._service.close()
