"""The registry of all schedules that a scheduler serves: configured schedules, and schedules stored in
the database. At a scheduler's start, it stores the configured schedules without firing a slot. Later it
finds the entry of each due schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from horsies.config.app import AppConfig
from horsies.db.statement import Script, Step
from horsies.db.statements.schedules import (
    DueSchedule,
    ScheduleName,
    ScheduleRecord,
    StoreSchedules,
    find_due_schedules,
    list_orphaned_schedules,
    note_disabled_schedules,
    read_schedule_records,
    seconds_until_next_slot,
    store_schedules,
)
from horsies.errors import ErrorCode, HorsiesError
from horsies.logs import as_event
from horsies.modules import failure_at
from horsies.scheduler.entry import Application, Definitions, Entry, read_definition
from horsies.scheduler.timing import Timing
from horsies.workflow.definition import BuildsSpecs, definition_keys

logger = logging.getLogger("horsies.scheduler")

DUE_MAX = 5_000
_NEW_TIMING = {
    False: "schedule %r has a new timing",
    True: "schedule %r has a new timing in the configuration, but keeps the one that was edited at run "
    "time; `horsies schedules reset` takes the configuration's",
}
_UNREADABLE = "schedule %r stays due: this release cannot read its edited timing; reset it"


@dataclass(slots=True)
class Registry:
    """The configured schedules by name, and a cache of entries read from the database."""

    application: Application
    owner: str
    entries: Mapping[str, Entry]
    # The configured schedules with ``enabled=False``.
    disabled: Sequence[str] = ()
    _stored: dict[str, Entry | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: AppConfig, definitions: Definitions, owner: str, app: BuildsSpecs | None = None
    ) -> Registry:
        """Check a configuration's enabled schedules, and raise the first error. ``app`` builds the
        workflows.
        """
        if config.schedule is None or not config.schedule.enabled:
            raise _no_schedules(is_off=config.schedule is not None)
        application = Application(config, definitions, app)
        entries = {
            schedule.name: Entry.of(application, schedule)
            for schedule in config.schedule.schedules
            if schedule.enabled
        }
        disabled = [one.name for one in config.schedule.schedules if not one.enabled]
        return cls(application, owner[:255], entries, disabled)

    def find_due(self) -> Step:
        return find_due_schedules(*self._served(), DUE_MAX)

    def look_ahead(self, looked_at: datetime | None) -> Step:
        return seconds_until_next_slot(*self._served(), looked_at)

    def _served(self) -> tuple[str, str, list[str], list[str]]:
        """Return the names and hashes of configured schedules, and the tasks and workflows that can be
        served.
        """
        hashes = (entry.hash for entry in self.entries.values())
        workflows = [] if self.application.app is None else definition_keys()
        return "\n".join(self.entries), "\n".join(hashes), list(self.application.tasks), workflows

    def entry_of(self, due: DueSchedule) -> Entry | None:
        """Return the entry of a due schedule, with its edited timing if there is one; return None if the
        stored schedule cannot be read.
        """
        entry = self._unedited(due)
        if entry is None or due.edited_timing is None:
            return entry
        try:
            return entry.with_timing(due.edited_timing)
        except ValueError:
            logger.error(_UNREADABLE, due.name)
            return None

    def _unedited(self, due: DueSchedule) -> Entry | None:
        if due.definition is None:
            return self.entries[due.name]
        if due.definition not in self._stored:
            if len(self._stored) >= 2 * DUE_MAX:
                self._stored.clear()
            self._stored[due.definition] = self._read(due.name, due.definition)
        return self._stored[due.definition]

    def _read(self, name: str, definition: str) -> Entry | None:
        try:
            return read_definition(self.application, definition)
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


def store_configured(
    registry: Registry, *, at_start: bool, has_watched: Callable[[], bool] = lambda: False
) -> Script[None]:
    """Store the configured schedules, without firing a slot and without losing an overdue slot.

    When a scheduler starts, a schedule with a changed timing gets a new next slot. A later change means
    that a scheduler of another release serves the schedule; this scheduler takes the schedule over only
    if a slot is overdue. ``has_watched`` is called after the stored state is read. It returns whether
    this scheduler has run long enough without interruption that a live owner would have served the slot.
    """
    names = list(registry.entries)
    records: list[ScheduleRecord] = yield read_schedule_records(names)
    judges_others = has_watched()
    rows = list(_rows_to_store(registry, records, at_start, judges_others))
    if rows:
        yield store_schedules, _columns(registry.owner, rows)
    if judges_others:
        yield note_disabled_schedules(registry.owner, names, registry.disabled)
    if at_start:
        owned = list_orphaned_schedules(registry.owner, names)
        orphans: list[ScheduleName] = yield owned
        if orphans:
            removed = ", ".join(orphan.name for orphan in orphans)
            logger.warning("stored schedules that are no longer configured: %s", removed)


def _rows_to_store(
    registry: Registry, records: Sequence[ScheduleRecord], at_start: bool, judges_others: bool
) -> Iterator[tuple[Entry, datetime | None]]:
    """Yield the entries to store, each with its next slot."""
    for record in records:
        entry = registry.entries[record.name]
        takes_over = judges_others and _is_deserted(entry, record)
        if takes_over:
            event = as_event("schedule_taken", schedule=record.name)
            message = "schedule %r: no other release serves its slots any more; taking it over"
            logger.warning(message, record.name, extra=event)
        elif not _needs_storing(registry, record, at_start):
            continue
        # The next slot of a taken-over schedule is the slot after the one that no scheduler served.
        start = record.next_run_at if takes_over and record.next_run_at else record.looked_at
        try:
            next_run_at = _timing_in_force(entry, record).first_after(start.astimezone(UTC))
        except Exception:
            logger.exception("schedule %r: the next slot cannot be computed", record.name)
            continue
        # Skip an ended schedule: it does not change, and its row would be rewritten every minute.
        if next_run_at is not None or not record.is_stored or _has_new_timing(entry, record):
            yield entry, next_run_at


def _timing_in_force(entry: Entry, record: ScheduleRecord) -> Timing:
    """Return the stored timing if an operator has edited it; raise ValueError if this release cannot
    read it.
    """
    if record.original_timing is None:
        return entry.timing
    return Timing.read(record.timing or "")


def _has_new_timing(entry: Entry, record: ScheduleRecord) -> bool:
    """Return whether the configuration's timing differs from the stored timing, or from the timing
    before an edit.
    """
    if record.original_timing is not None:
        return record.original_timing != entry.timing_text
    return record.hash != entry.hash


def _is_deserted(entry: Entry, record: ScheduleRecord) -> bool:
    """Return whether the timing belongs to another release that has no live scheduler. A schedule that
    waits for an unfinished task or run counts as served. An edited schedule belongs to every release.
    """
    is_waiting = entry.schedule.overlap == "queue" and record.is_unfinished
    is_foreign = record.original_timing is None and record.hash != entry.hash
    return is_foreign and record.is_unserved and not is_waiting


def _needs_storing(registry: Registry, record: ScheduleRecord, at_start: bool) -> bool:
    entry = registry.entries[record.name]
    if not record.is_stored:
        return True
    if _has_new_timing(entry, record):
        if at_start:
            logger.warning(_NEW_TIMING[record.original_timing is not None], record.name)
        return at_start
    stored = (record.task_name, record.definition_key, record.owner, record.definition)
    has_changed = stored != (entry.task_name, entry.definition_key, registry.owner, None)
    return record.next_run_at is None or (at_start and (has_changed or record.was_disabled))


def _columns(owner: str, rows: Sequence[tuple[Entry, datetime | None]]) -> StoreSchedules:
    entries = [entry for entry, _ in rows]
    return StoreSchedules(
        names=[entry.schedule.name for entry in entries],
        next_run_at=[next_run_at for _, next_run_at in rows],
        hashes=[entry.hash for entry in entries],
        timings=[entry.timing_text for entry in entries],
        task_names=[entry.task_name for entry in entries],
        definition_keys=[entry.definition_key for entry in entries],
        owners=[owner for _ in entries],
    )
