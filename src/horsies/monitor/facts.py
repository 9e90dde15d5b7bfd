"""The facts behind a diagnosis: rows that are read once for all rules, and the rules' limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from horsies.database_url import DEFAULT_SCHEMA
from horsies.db.statement import Row, Script, Statement
from horsies.monitor.defaults import OVERDUE_SECONDS

T = TypeVar("T")

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
MEGABYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The values at which a fact becomes a finding; a pair has the limits for yellow and red."""

    lock_seconds: float = 1.0
    xmin_seconds: tuple[float, float] = (5 * MINUTE, HOUR)
    xmin_transactions: tuple[int, int] = (1_000_000, 50_000_000)
    notification_usage: tuple[float, float] = (0.1, 0.5)
    connection_share: tuple[float, float] = (0.8, 0.95)
    clock_seconds: tuple[float, float] = (1.0, 30.0)
    dead_rows: int = 10_000
    claim_index_bytes: int = 50 * MEGABYTE
    claim_index_bytes_per_task: int = 10_240
    unanalysed_rows: int = 1_000
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
    """The rows read in one run of the rules, shared by rules that need the same rows."""

    schema: str = DEFAULT_SCHEMA
    limits: Limits = Limits()
    now: Callable[[], datetime] = _now
    _known: dict[tuple[str, str], list[Any]] = field(default_factory=dict)

    def read(self, step: tuple[Statement[Any, Row], Any]) -> Script[list[Row]]:
        """Return a statement's rows for these parameters; run the statement once per run of the rules."""
        statement, params = step
        key = (statement.name, repr(params))
        if key not in self._known:
            self._known[key] = yield step
        return self._known[key]

    def share(self, name: str, make: Callable[[], Script[list[T]]]) -> Script[list[T]]:
        """Return a script's result, computed once per run of the rules and identified by the name."""
        key = (name, "")
        if key not in self._known:
            self._known[key] = yield from make()
        return self._known[key]
