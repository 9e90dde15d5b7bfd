"""A schedule's timing: exactly the fields that determine its slots.

The timing is stored as JSON next to the schedule's state; a changed hash means a changed timetable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from pydantic import BaseModel

from horsies.config.schedules import Schedule
from horsies.timetable.next_run import GapRule, Timetable, load_zone, next_run, timetable_of
from horsies.timetable.patterns import SchedulePattern
from horsies.timetable.texts import pattern_text
from horsies.validation import FROZEN_MODEL

_MICROSECOND = timedelta(microseconds=1)
_FIRST_WINDOW = timedelta(minutes=1)


class TimingFields(BaseModel):
    """The stored fields, which determine a schedule's slots."""

    model_config = FROZEN_MODEL

    pattern: SchedulePattern
    timezone: str = "UTC"
    on_dst_gap: GapRule = "skip"
    start_at: datetime | None = None
    end_at: datetime | None = None


def timing_json(schedule: Schedule) -> str:
    """Return a schedule's timing as JSON text: the pattern, the zone, and all fields with non-default
    values.
    """
    return fields_json(
        TimingFields(**{name: getattr(schedule, name) for name in TimingFields.model_fields})
    )


def fields_json(fields: TimingFields) -> str:
    changed = fields.model_dump(mode="json", exclude_defaults=True)
    whole = changed | fields.model_dump(mode="json", include={"pattern", "timezone"})
    return json.dumps(whole, sort_keys=True, separators=(",", ":"))


def changed_timing(text: str, pattern: SchedulePattern | None, timezone: str | None) -> str:
    """Return a stored timing with another pattern or zone, as JSON text.

    Raises ValueError for an unknown zone or an unreadable stored text.
    """
    fields = read_fields(text)
    zone = timezone or fields.timezone
    load_zone(zone)
    changes = {"pattern": pattern or fields.pattern, "timezone": zone}
    return fields_json(fields.model_copy(update=changes))


def read_fields(text: str | None) -> TimingFields:
    """Parse a stored timing; raise ValueError if this release cannot read it."""
    try:
        return TimingFields.model_validate_json(text or "")
    except ValueError:
        raise ValueError("this release cannot read the schedule's stored timing") from None


def timing_words(text: str | None) -> str:
    """Describe a stored timing as an operator would type it, with its zone unless it is an interval."""
    try:
        fields = read_fields(text)
    except ValueError:
        return "a timing that this release cannot read"
    words = pattern_text(fields.pattern)
    return words if fields.pattern.type == "interval" else f"{words}, {fields.timezone}"


def config_hash(timing: str) -> str:
    return hashlib.sha256(timing.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Timing:
    """Computes when a schedule is due. All times are in UTC; Methods return None if no slot follows."""

    timetable: Timetable | timedelta
    zone: ZoneInfo
    on_dst_gap: GapRule = "skip"
    start_at: datetime | None = None
    end_at: datetime | None = None

    @classmethod
    def of(cls, fields: Schedule | TimingFields) -> Timing:
        """Parse a schedule's timing; raise ValueError for an unknown zone."""
        return cls(
            timetable_of(fields.pattern),
            load_zone(fields.timezone),
            fields.on_dst_gap,
            fields.start_at.astimezone(UTC) if fields.start_at else None,
            fields.end_at.astimezone(UTC) if fields.end_at else None,
        )

    @classmethod
    def read(cls, text: str) -> Timing:
        """Parse a stored timing; ValueError if this release cannot read it."""
        return _read(text)

    def first_after(self, start: datetime) -> datetime | None:
        """Return the first slot of a schedule that starts at this time."""
        if not isinstance(self.timetable, timedelta):
            return self.after(start)
        if self.start_at is None:
            return self._bounded(start + self.timetable)
        if start < self.start_at:
            return self._bounded(self.start_at)
        passed = (start - self.start_at) // self.timetable
        return self._bounded(self.start_at + (passed + 1) * self.timetable)

    def after(self, slot: datetime) -> datetime | None:
        """Return the slot that follows this one."""
        is_interval = isinstance(self.timetable, timedelta)
        if self.start_at is not None and not is_interval:
            slot = max(slot, self.start_at - _MICROSECOND)
        found = next_run(self.timetable, slot, self.zone, self.on_dst_gap)
        assert found is None or found > slot, "time stood still"
        return self._bounded(found)

    def since(self, due: datetime, cutoff: datetime) -> datetime | None:
        """Return the first slot at or after the cutoff, starting from the slot ``due``."""
        if due >= cutoff:
            return due
        if isinstance(self.timetable, timedelta):
            left_out = -((due - cutoff) // self.timetable)
            return self._bounded(due + left_out * self.timetable)
        return self.after(cutoff - _MICROSECOND)

    def latest(self, due: datetime, until: datetime) -> datetime:
        """Return the last slot up to ``until``, starting from ``due``, which is not after ``until``."""
        until = min(until, self.end_at or until)
        if isinstance(self.timetable, timedelta):
            return due + ((until - due) // self.timetable) * self.timetable
        found = self._some_late_slot(due, until)
        while (following := self.after(found)) is not None and following <= until:
            found = following
        return found

    def _some_late_slot(self, due: datetime, until: datetime) -> datetime:
        """Find a slot near ``until`` by doubling the window, instead of stepping through all slots."""
        window = _FIRST_WINDOW
        while until - window > due:
            found = self.after(until - window)
            if found is not None and found <= until:
                return found
            window *= 2
        return due

    def slots_from(self, slot: datetime | None) -> Iterator[datetime]:
        while slot is not None:
            yield slot
            slot = self.after(slot)

    def _bounded(self, slot: datetime | None) -> datetime | None:
        is_over = slot is not None and self.end_at is not None and slot > self.end_at
        return None if is_over else slot


# Cached, because a scheduler parses an edited schedule's timing at every slot.
@lru_cache(maxsize=10_000)
def _read(text: str) -> Timing:
    return Timing.of(read_fields(text))
