"""Edits: a new timing for a stored schedule, set by an operator while schedulers run. An edit changes
when a schedule fires, not what it sends; configured schedules can be edited too. The database keeps the
edit, across restarts and deployments, until it is reset. A slot that is due at the time of the edit is
still sent.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TypeAlias

from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    ScheduleName,
    ScheduleRecord,
    edit_schedule,
    read_schedule_records,
)
from horsies.result import Err, Ok, Result
from horsies.scheduler.decide import SkipReason
from horsies.scheduler.timing import (
    Timing,
    changed_timing,
    config_hash,
    read_fields,
    timing_words,
)
from horsies.timetable.patterns import SchedulePattern
from horsies.timetable.texts import pattern_text, read_pattern

# The maximum number of tries of an edit. A try fails if a scheduler serves the schedule at the same
# time.
ATTEMPTS_MAX = 10
PREVIEW_SLOTS = 10
_MICROSECOND = timedelta(microseconds=1)

# Computes the new timing of a stored row as JSON text, or None if the row has no other timing.
NewTiming: TypeAlias = Callable[[ScheduleRecord], str | None]


@dataclass(frozen=True, slots=True)
class Edit:
    """A schedule's timing before and after an edit, as stored JSON, and the next slots of both."""

    timing: str | None
    new_timing: str
    slots: list[datetime]
    new_slots: list[datetime]
    was_edited: bool = False

    @property
    def is_changed(self) -> bool:
        return self.timing != self.new_timing

    @property
    def words(self) -> str:
        """Describe the edit as the history of changes shows it."""
        return f"from {timing_words(self.timing)} to {timing_words(self.new_timing)}"


def undo_edit(name: str, edit: Edit) -> str:
    """Return the command that undoes an edit or a reset."""
    command = f"horsies schedules {{}} {shlex.quote(name)}"
    if not edit.was_edited:
        return command.format("reset")
    try:
        fields = read_fields(edit.timing)
    except ValueError:
        return command.format("reset")
    pattern = shlex.quote(pattern_text(fields.pattern))
    zone = "" if fields.pattern.type == "interval" else f" --timezone {fields.timezone}"
    return f"{command.format('edit')} --pattern {pattern}{zone}"


@dataclass(frozen=True, slots=True)
class NextSlot:
    """The next slot after an edit; if overdue slots are dropped, also the end of their range and the
    reason.
    """

    at: datetime | None
    skipped_at: datetime | None = None
    skip_reason: str | None = None


def new_timing(pattern: SchedulePattern | str | None, timezone: str | None) -> NewTiming:
    """Return an edit of the pattern, the zone or both; raise HRS-205 for an invalid text."""
    wanted = read_pattern(pattern) if isinstance(pattern, str) else pattern
    return lambda record: changed_timing(record.timing or "", wanted, timezone)


def original_timing(record: ScheduleRecord) -> str | None:
    """Return the original timing of an edited schedule, from its configuration or program."""
    return record.original_timing


def preview_script(name: str, new: NewTiming) -> Script[Result[Edit | None, str]]:
    """Compute an edit without storing it; return None if the schedule is unknown or has no other timing."""
    (record,) = yield read_schedule_records([name])
    return _edit_of(record, new)


def edit_script(name: str, new: NewTiming) -> Script[Result[Edit | None, str]]:
    """Store another timing; return None if the schedule does not exist or has no other timing."""
    for _ in range(ATTEMPTS_MAX):
        records: list[ScheduleRecord] = yield read_schedule_records([name])
        (record,) = records
        found = _edit_of(record, new)
        if isinstance(found, Err) or found.ok_value is None or not found.ok_value.is_changed:
            return found
        timing = found.ok_value.new_timing
        following = next_slot(record, timing)
        edited: list[ScheduleName] = yield edit_schedule(
            name=name,
            hash_before=record.hash,
            due_before=record.next_run_at,
            timing=timing,
            hash=config_hash(timing),
            edited_at=record.looked_at,
            next_run_at=following.at,
            skipped_at=following.skipped_at,
            skip_reason=following.skip_reason,
        )
        if edited:
            return found
    return Err(f"Schedule {name!r} keeps changing; nothing was edited. Try again.")


def _edit_of(record: ScheduleRecord, new: NewTiming) -> Result[Edit | None, str]:
    """Compute an edit; reject one that leaves no slot."""
    if not record.is_stored:
        return Ok(None)
    try:
        wanted = new(record)
        slots = [] if wanted is None else _next_slots(Timing.read(wanted), record.looked_at)
    except ValueError as error:
        return Err(f"Schedule {record.name!r}: {error}.")
    if wanted is None:
        return Ok(None)
    if not slots:
        return Err(f"Schedule {record.name!r} would have no more slots; pause it instead.")
    was_edited = record.original_timing is not None
    return Ok(Edit(record.timing, wanted, _slots_before(record), slots, was_edited))


def _next_slots(timing: Timing, now: datetime) -> list[datetime]:
    first = timing.first_after(now.astimezone(UTC))
    return list(islice(timing.slots_from(first), PREVIEW_SLOTS))


def _slots_before(record: ScheduleRecord) -> list[datetime]:
    timing = _stored_timing(record)
    if timing is None or record.next_run_at is None:
        return []
    return list(islice(timing.slots_from(record.next_run_at.astimezone(UTC)), PREVIEW_SLOTS))


def _stored_timing(record: ScheduleRecord) -> Timing | None:
    try:
        return Timing.read(record.timing or "")
    except ValueError:
        return None


def next_slot(record: ScheduleRecord, timing: str) -> NextSlot:
    """Return the next slot after an edit.

    An overdue slot is sent first, or the latest slot if several are overdue, as after an outage. Slots
    missed during a pause are not sent.
    """
    now, due = record.looked_at.astimezone(UTC), record.next_run_at
    if due is None or record.is_paused or due > record.looked_at:
        return NextSlot(Timing.read(timing).first_after(now))
    due_at, old = due.astimezone(UTC), _stored_timing(record)
    latest = due_at if old is None else old.latest(due_at, now)
    if latest == due_at:
        return NextSlot(due_at)
    return NextSlot(latest, latest - _MICROSECOND, SkipReason.MISSED.value)
