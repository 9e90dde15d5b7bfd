"""Decides which slots of a due schedule fire, which slots are dropped, and when the schedule is due
next. Pure functions: the tick reads the state and writes all decisions in one statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice, takewhile

from horsies.config.schedules import Schedule
from horsies.scheduler.timing import Timing

_MICROSECOND = timedelta(microseconds=1)


class SkipReason(StrEnum):
    """The reasons for dropping slots."""

    MISSED = "MISSED"
    MISFIRE = "MISFIRE"
    PAUSED = "PAUSED"
    OVERLAP = "OVERLAP"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class DueState:
    """The state of a due schedule. Times are in UTC, by the database's clock."""

    due_at: datetime
    now: datetime
    is_unfinished: bool = False
    resumed_at: datetime | None = None
    edited_at: datetime | None = None

    @property
    def belongs_to_old_timing(self) -> bool:
        """Whether the slot was already due when an operator changed the timing."""
        return self.edited_at is not None and self.due_at <= self.edited_at


@dataclass(frozen=True, slots=True)
class Dropped:
    """Slots that will not fire: from ``first`` up to ``before``, which is not included."""

    reason: SkipReason
    first: datetime
    before: datetime


@dataclass(frozen=True, slots=True)
class Decision:
    """The slots to fire, the next slot, and the slots that are dropped before the next one."""

    fire: tuple[datetime, ...]
    next_run_at: datetime | None
    dropped: Dropped | None = None


def decide(schedule: Schedule, timing: Timing, state: DueState, runs_max: int) -> Decision | None:
    """Decide about a due schedule; return None if one of its runs must finish first. At most
    ``runs_max`` slots fire in one decision, and never more than the schedule allows.
    """
    if state.is_unfinished and schedule.overlap != "allow":
        return None if schedule.overlap == "queue" else _skip_all(timing, state)
    cutoff, reason = _cutoff(schedule, state)
    if state.belongs_to_old_timing:
        return _leave_old_timing(timing, state, cutoff, reason)
    first = timing.since(state.due_at, cutoff)
    if first is None or first > state.now:
        return Decision((), first, Dropped(reason, state.due_at, cutoff))
    if schedule.catch_up_missed:
        # With overlap="queue", at most one task or run may be unfinished; later slots stay due.
        allowed = 1 if schedule.overlap == "queue" else min(schedule.max_catch_up_runs, runs_max)
        due = takewhile(lambda slot: slot <= state.now, timing.slots_from(first))
        fire = tuple(islice(due, allowed))
    else:
        fire = (timing.latest(first, state.now),)
        reason = reason if fire[0] == first else SkipReason.MISSED
    dropped = Dropped(reason, state.due_at, fire[0]) if fire[0] > state.due_at else None
    return Decision(fire, timing.after(fire[-1]), dropped)


def _leave_old_timing(
    timing: Timing, state: DueState, cutoff: datetime, reason: SkipReason
) -> Decision:
    """Fire the slot that was due at the time of the edit, unless it is too old; later slots follow the
    new timing.
    """
    assert state.edited_at is not None
    following = timing.first_after(state.edited_at)
    if state.due_at < cutoff:
        return Decision((), following, Dropped(reason, state.due_at, cutoff))
    return Decision((state.due_at,), following)


def _skip_all(timing: Timing, state: DueState) -> Decision:
    if state.belongs_to_old_timing:
        return _leave_old_timing(timing, state, state.due_at + _MICROSECOND, SkipReason.OVERLAP)
    latest = timing.latest(state.due_at, state.now)
    dropped = Dropped(SkipReason.OVERLAP, state.due_at, latest + _MICROSECOND)
    return Decision((), timing.after(latest), dropped)


def _cutoff(schedule: Schedule, state: DueState) -> tuple[datetime, SkipReason]:
    """Return the time before which slots are too old to fire, and the reason."""
    cutoff, reason = state.due_at, SkipReason.MISSED
    if schedule.misfire_grace_seconds is not None:
        oldest = state.now - timedelta(seconds=schedule.misfire_grace_seconds)
        if oldest > cutoff:
            cutoff, reason = oldest, SkipReason.MISFIRE
    # Drop slots missed during a pause, unless the schedule must catch up every missed slot.
    if state.resumed_at is not None and not schedule.catch_up_missed:
        after_pause = state.resumed_at + _MICROSECOND
        if after_pause > cutoff:
            cutoff, reason = after_pause, SkipReason.PAUSED
    return cutoff, reason
