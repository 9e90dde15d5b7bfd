"""Findings of the checks of ``horsies doctor``, the facts they are made from, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from horsies.database_url import DEFAULT_SCHEMA
from horsies.db.database import Database
from horsies.db.statement import Row, Script, Statement
from horsies.monitor.defaults import OVERDUE_SECONDS

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
MEGABYTE = 1024 * 1024


class Level(StrEnum):
    """How serious a finding is; UNKNOWN when the check could not read its facts."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: a sentence, the rows that show it, and the remedy.

    ``is_sql`` marks a remedy that is a statement for psql, not a command or advice.
    """

    level: Level
    sentence: str
    evidence: tuple[str, ...] = ()
    remedy: str | None = None
    is_sql: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """From which values on a fact is a finding; where there are two, yellow and red."""

    xmin_seconds: tuple[float, float] = (5 * MINUTE, HOUR)
    xmin_transactions: tuple[int, int] = (1_000_000, 50_000_000)
    notification_usage: tuple[float, float] = (0.1, 0.5)
    connection_share: tuple[float, float] = (0.8, 0.95)
    clock_seconds: tuple[float, float] = (1.0, 30.0)
    dead_rows: int = 10_000
    claim_index_bytes: int = 50 * MEGABYTE
    claim_index_bytes_per_task: int = 10_240
    unanalysed_rows: int = 1_000
    paused_queue_seconds: float = HOUR
    rollout_seconds: float = HOUR
    recovery_seconds: float = MINUTE
    long_running_seconds: float = 6 * HOUR
    long_paused_seconds: float = DAY
    overdue_seconds: float = OVERDUE_SECONDS
    retention_slack_seconds: float = 2 * HOUR
    unlimited_rows: float = 10_000_000.0
    table_bytes: int = 50 * 1024 * MEGABYTE
    payload_bytes: int = 100 * 1024
    crashes_of_task: int = 3
    crashes_of_name: int = 10


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Facts:
    """The rows that the checks of one run have read; checks that need the same rows share them."""

    schema: str = DEFAULT_SCHEMA
    limits: Limits = Limits()
    now: Callable[[], datetime] = _now
    _known: dict[str, list[Any]] = field(default_factory=dict)

    def read(self, statement: Statement[Any, Row], params: tuple[Any, ...]) -> Script[list[Row]]:
        """The rows of a statement, read once per run."""
        if statement.name not in self._known:
            self._known[statement.name] = yield statement, params
        return self._known[statement.name]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a script that reads facts and judges them, or a probe that opens connections.

    ``is_cheap`` checks read little enough for a page that is refreshed. Without ``needs_tables``, a check
    works on a database that has no tables of horsies.
    """

    id: str
    looks_at: str
    yellow: str
    red: str
    find: Callable[[Facts], Script[list[Finding]]] | None
    is_cheap: bool = False
    needs_tables: bool = True
    probe: Callable[[Database], list[Finding]] | None = None


def level_of(value: float, limits: tuple[float, float]) -> Level:
    """Compare a value with the limits for yellow and red."""
    yellow, red = limits
    if value < yellow:
        return Level.GREEN
    return Level.RED if value >= red else Level.YELLOW
