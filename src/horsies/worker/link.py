"""The worker's two connections: one for turns, one that listens; and patience when they break.

The parent loop asks for the turn connection and gets it or None. While the database is away the
loop goes on serving children; ``Link`` says when to try again and what to repair first: claims
whose COMMIT was in doubt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from horsies.config import WorkerResilienceConfig
from horsies.db.connect import Database, describe, is_transient
from horsies.db.together import Together
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


class DatabaseGivenUpError(Exception):
    """The database stayed away for longer than the resilience settings allow."""


@dataclass(slots=True)
class Link:
    """The turn connection, opened again after every loss, with backoff."""

    connect: Callable[[], Together]
    resilience: WorkerResilienceConfig
    together: Together | None = None
    retry_at: float = 0.0
    is_broken: bool = False
    _backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the backoff."""
        limits = self.resilience
        self._backoff = Backoff(
            limits.db_retry_initial_ms, limits.db_retry_max_ms, limits.db_retry_max_attempts
        )

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self.together is not None

    def open(self) -> Together | None:
        """Return the connection, opening it if it is time to; None while the database is away."""
        if self.together is not None:
            return self.together
        if time.monotonic() < self.retry_at:
            return None
        try:
            self.together = self.connect()
        except psycopg.Error as error:
            self.lose(error)
        return self.together

    def lose(self, error: psycopg.Error) -> None:
        """Forget the connection after an error that may pass; raise one that will not."""
        self.close()
        if not is_transient(error):
            raise error
        self.is_broken = True
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
        )

    def confirm(self) -> None:
        """A statement went through: the next trouble starts from the shortest delay again."""
        if self.is_broken:
            logger.info("database is back")
            self.is_broken = False
        self._backoff.reset()

    def close(self) -> None:
        """Close the connection."""
        if self.together is not None:
            logger.debug(
                "turns: %d statements in %d round trips",
                self.together.statements,
                self.together.round_trips,
            )
            self.together.connection.close()
            self.together = None


def turn_connector(database: Database) -> Callable[[], Together]:
    """Return what opens a connection tuned for turns: every statement prepared, generic plans."""
    return lambda: Together.open(database, TURN_ROLE, TURN_SETTINGS)
