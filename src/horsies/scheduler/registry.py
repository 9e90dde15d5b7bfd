"""The book: all schedules a scheduler serves, those of its configuration and those in the database.

Brings the configuration's schedules on record without firing anything, and finds the entry of whatever
is due. What is decided about a schedule when a scheduler starts is here; what becomes of a due one is
in ``plan.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from horsies.config.app import AppConfig
from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    DueSchedule,
    FindDue,
    LookAhead,
    OwnedSchedules,
    ScheduleName,
    ScheduleNames,
    ScheduleStanding,
    StoreSchedules,
    list_orphaned_schedules,
    read_schedule_standings,
    store_schedules,
)
from horsies.errors import ErrorCode, HorsiesError
from horsies.modules import failure_at
from horsies.scheduler.entry import Definitions, Entry, Known, read_definition
from horsies.workflow.definition import BuildsSpecs, definition_keys

logger = logging.getLogger("horsies.scheduler")

DUE_MAX = 5_000


@dataclass(slots=True)
class Book:
    """What a scheduler serves, by name, and what it takes to read schedules that live elsewhere."""

    known: Known
    owner: str
    entries: Mapping[str, Entry]
    _stored: dict[str, Entry | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: AppConfig,
        definitions: Definitions,
        owner: str,
        app: BuildsSpecs | None = None,
    ) -> Book:
        """Read the enabled schedules of a configuration; raises the first mistake in them.

        ``app`` builds the workflows of schedules that start any.
        """
        if config.schedule is None or not config.schedule.enabled:
            raise _no_schedules(is_off=config.schedule is not None)
        known = Known(config, definitions, app)
        entries = {
            schedule.name: Entry.of(known, schedule)
            for schedule in config.schedule.schedules
            if schedule.enabled
        }
        return cls(known, owner[:255], entries)

    @property
    def names(self) -> list[str]:
        """The names of the configuration's schedules."""
        return list(self.entries)

    def find_due(self) -> FindDue:
        """Return whose slots to look for."""
        return FindDue(*self._served(), list(self.known.tasks), self._workflows(), DUE_MAX)

    def look_ahead(self, looked_at: datetime | None) -> LookAhead:
        """Return whose next slot to wait for."""
        return LookAhead(*self._served(), list(self.known.tasks), self._workflows(), looked_at)

    def _served(self) -> tuple[str, str]:
        hashes = (entry.hash for entry in self.entries.values())
        return "\n".join(self.entries), "\n".join(hashes)

    def _workflows(self) -> list[str]:
        return [] if self.known.app is None else definition_keys()

    def entry_of(self, due: DueSchedule) -> Entry | None:
        """Return the entry of a due schedule; None for one stored by a program that cannot be read."""
        if due.definition is None:
            return self.entries[due.name]
        if due.definition not in self._stored:
            if len(self._stored) >= 2 * DUE_MAX:
                self._stored.clear()
            self._stored[due.definition] = self._read(due.name, due.definition)
        return self._stored[due.definition]

    def _read(self, name: str, definition: str) -> Entry | None:
        try:
            return read_definition(self.known, definition)
        except (HorsiesError, ValueError, LookupError, TypeError) as error:
            reason = error.message if isinstance(error, HorsiesError) else type(error).__name__
            logger.error("schedule %r cannot be served and stays due: %s", name, reason)
            return None


def _no_schedules(*, is_off: bool) -> HorsiesError:
    code = ErrorCode.CONFIG_INVALID_SCHEDULE
    if is_off:
        return failure_at(None, "The schedules of this application are switched off.", code=code)
    help_text = "AppConfig(..., schedule=ScheduleConfig(schedules=[...]))"
    return failure_at(None, "This application has no schedules.", code=code, help_text=help_text)


def enter_schedules(book: Book, *, at_start: bool) -> Script[None]:
    """Bring the configuration's schedules on record; nothing fires, and nothing overdue is lost.

    A schedule whose timing has changed gets a new next slot, but only when a scheduler starts: later
    the change is another release's, and so are its slots.
    """
    standings: list[ScheduleStanding] = yield read_schedule_standings, ScheduleNames(book.names)
    wanted = [one for one in standings if _needs_entering(book, one, at_start)]
    if fresh := _fresh_rows(book, wanted):
        yield store_schedules, _columns(fresh)
    if at_start:
        owned = OwnedSchedules(book.owner, book.names)
        orphans: list[ScheduleName] = yield list_orphaned_schedules, owned
        if orphans:
            names = ", ".join(orphan.name for orphan in orphans)
            logger.warning("schedules on record that are not configured any more: %s", names)


def _needs_entering(book: Book, standing: ScheduleStanding, at_start: bool) -> bool:
    entry = book.entries[standing.name]
    if not standing.is_stored:
        return True
    if standing.hash != entry.hash:
        if at_start:
            logger.warning("schedule %r has another timing now", standing.name)
        return at_start
    was = (standing.task_name, standing.definition_key, standing.owner, standing.definition)
    has_changed = was != (entry.task_name, entry.definition_key, book.owner, None)
    return standing.next_run_at is None or (at_start and has_changed)


@dataclass(frozen=True, slots=True)
class _FreshRow:
    entry: Entry
    owner: str
    next_run_at: datetime | None


def _fresh_rows(book: Book, standings: Iterable[ScheduleStanding]) -> Sequence[_FreshRow]:
    fresh = []
    for standing in standings:
        entry = book.entries[standing.name]
        try:
            next_run_at = entry.timing.first_after(standing.looked_at.astimezone(UTC))
        except Exception:
            logger.exception("schedule %r: its next slot cannot be told", standing.name)
            continue
        # Written every minute, a schedule that has ended would say nothing new.
        if next_run_at is not None or not standing.is_stored or standing.hash != entry.hash:
            fresh.append(_FreshRow(entry, book.owner, next_run_at))
    return fresh


def _columns(rows: Sequence[_FreshRow]) -> StoreSchedules:
    return StoreSchedules(
        names=[row.entry.schedule.name for row in rows],
        next_run_at=[row.next_run_at for row in rows],
        hashes=[row.entry.hash for row in rows],
        timings=[row.entry.timing_text for row in rows],
        task_names=[row.entry.task_name for row in rows],
        definition_keys=[row.entry.definition_key for row in rows],
        owners=[row.owner for row in rows],
    )
