"""A check: a ``horsies doctor`` rule for the whole installation, and shortcuts that create its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from horsies.db.database import Database
from horsies.db.statement import Script
from horsies.findings import Finding, Level
from horsies.monitor.facts import Facts

Rule: TypeAlias = Callable[[Facts], Script[Iterable[Finding]]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check: a script that reads facts and judges them, or a probe that opens connections.

    Checks with ``is_cheap`` read few enough rows for a page that refreshes itself. A check without
    ``needs_tables`` works on a database that has no horsies tables.
    """

    id: str
    looks_at: str
    yellow: str
    red: str
    find: Rule | None
    is_cheap: bool = False
    needs_tables: bool = True
    probe: Callable[[Database], Iterable[Finding]] | None = None

    @property
    def code(self) -> str:
        """The code of the check's findings, unless a finding has its own code from the catalogue."""
        return self.id.upper().replace("-", "_")


def _found(
    level: Level,
    sentence: str,
    remedy: str | None = None,
    evidence: Iterable[str] = (),
    *,
    is_sql: bool = False,
) -> Finding:
    return Finding("", sentence, level, remedy=remedy, evidence=tuple(evidence), is_sql=is_sql)


# Findings that use their check's code.
red = partial(_found, Level.RED)
yellow = partial(_found, Level.YELLOW)


def graded(value: float, limits: tuple[float, float]) -> partial[Finding] | None:
    """Return ``yellow`` or ``red`` for a value above these limits, otherwise None."""
    if value < limits[0]:
        return None
    return red if value >= limits[1] else yellow
