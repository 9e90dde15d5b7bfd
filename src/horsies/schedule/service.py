"""The scheduler as a service: ticks in time, waits out a database that is away, never dies of a tick.
Only a database that will not let it in, now or later, ends it.

It waits for nobody itself: the loop in ``loop.py`` asks ``next_at`` how long it may sleep and calls
``step``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psycopg

from horsies.config import AppConfig
from horsies.db.connect import describe, is_transient
from horsies.db.together import Together
from horsies.retry import Backoff
from horsies.schedule.book import Book, enter_schedules
from horsies.schedule.entry import Definitions
from horsies.schedule.tick import tick
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
        connect: Callable[[], Together],
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
        self._together: Together | None = None
        self._has_entered = False
        self._refresh_at = 0.0
        self._next_at = 0.0

    def next_at(self) -> float:
        """Return when to call ``step``, on the monotonic clock."""
        return self._next_at

    def wake(self) -> None:
        """Make the next step look: somebody changed a schedule. A lost connection keeps its patience."""
        if self._together is not None:
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

    def _open(self) -> Together:
        """Return the connection, opening it if there is none; give up where that can never work."""
        if self._together is None:
            try:
                self._together = self._connect()
            except psycopg.Error as error:
                if is_transient(error):
                    raise
                raise SchedulerGaveUpError(describe(error)) from error
        return self._together

    def _guarded_tick(self, together: Together) -> float:
        try:
            return self._tick(together)
        except psycopg.Error:
            raise
        except Exception:
            logger.exception("this tick failed; the next one comes in its time")
            return self._interval_seconds

    def _tick(self, together: Together) -> float:
        """Do what is due and return how long to sleep."""
        now = time.monotonic()
        if now >= self._refresh_at:
            together.follow(enter_schedules(self._book, at_start=not self._has_entered))
            if not self._has_entered:
                logger.info("serving %d schedule(s)", len(self._book.entries))
            self._has_entered = True
            self._refresh_at = now + REFRESH_SECONDS
        ticked = tick(together, self._book)
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
            "nothing can be scheduled, next try in %.1f s: %s", delay_seconds, describe(error)
        )

    def close(self) -> None:
        """Close the connection; a later step opens a new one."""
        if self._together is not None:
            self._together.connection.close()
            self._together = None
