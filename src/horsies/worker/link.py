"""The worker's connection for its turns, and patience when it breaks.

The parent loop asks for the connection and gets it or None. While the database is away the loop goes
on serving children; ``Link`` says when to try again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

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

# A connection that breaks after this long is opened again at once: others see its lock free meanwhile.
STEADY_SECONDS = 0.2
# Errors of one transaction, by the beginning of their SQLSTATE: conflicts, resources, locks, a cancel.
# A standby's refusal to write is none: another connection may find the new primary.
_SURVIVED = ("40", "53", "55", "57014")


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
        return self.together is not None and time.monotonic() >= self.retry_at

    def open(self) -> Together | None:
        """Return the connection, opening it if it is time to; None while the database is away."""
        if time.monotonic() < self.retry_at:
            return None
        try:
            return self.open_now()
        except psycopg.Error as error:
            self.lose(error)
        return None

    def open_now(self) -> Together:
        """Return the connection, opening it and raising whatever goes wrong."""
        if self.together is None:
            self.together = self.connect()
            self._opened_at, self._is_proved = time.monotonic(), False
        return self.together

    def lose(self, error: psycopg.Error) -> None:
        """Wait after an error that may pass, raise one that will not; the connection is given up unless
        it was only a transaction that failed.
        """
        if not is_transient(error):
            self.close()
            raise error
        self.is_broken = True
        was_steady = self._is_steady()
        if self.together is not None and not _survives(self.together, error):
            self.close()
        if was_steady and self.together is None:
            self.retry_at = 0.0
            logger.error("connection to the database lost, opening another: %s", describe(error))
        else:
            self._wait(error)

    def _is_steady(self) -> bool:
        """Whether the connection has stood for a while, and something went through on it."""
        has_stood = time.monotonic() >= self._opened_at + STEADY_SECONDS
        return self.together is not None and self._is_proved and has_stood

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
        )

    def confirm(self) -> None:
        """A statement went through: the next trouble starts from the shortest delay again."""
        if self.is_broken:
            logger.info("database is back")
            self.is_broken = False
        self._is_proved = True
        self._backoff.reset()

    def close(self) -> None:
        """Close the connection."""
        together, self.together = self.together, None
        if together is None:
            return
        logger.debug(
            "turns: %d statements in %d round trips", together.statements, together.round_trips
        )
        self.on_close()
        together.connection.close()


def _survives(together: Together, error: psycopg.Error) -> bool:
    """Whether only a transaction failed, and the session is ready for the next."""
    pgconn = together.connection.pgconn
    return (
        (error.sqlstate or "").startswith(_SURVIVED)
        and pgconn.pipeline_status == PipelineStatus.OFF
        and pgconn.transaction_status == TransactionStatus.IDLE
    )


def turn_connector(database: Database) -> Callable[[], Together]:
    """Return what opens a connection tuned for turns: every statement prepared, generic plans."""
    return lambda: Together.open(database, TURN_ROLE, TURN_SETTINGS)
