"""The plan: which slots of a due schedule fire, which are dropped, and when it is due next.

Pure. The tick reads where schedules stand, asks here, and writes the answer down in one statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice, takewhile

from horsies.config.schedules import Schedule
from horsies.scheduler.timing import Timing

_MOMENT = timedelta(microseconds=1)


class SkipReason(StrEnum):
    """Why slots were dropped."""

    MISSED = "MISSED"
    MISFIRE = "MISFIRE"
    PAUSED = "PAUSED"
    OVERLAP = "OVERLAP"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a due schedule stands, by the database's clock."""

    due_at: datetime
    now: datetime
    is_unfinished: bool = False
    resumed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Slots that will not fire: the first of them, and the slot or moment before which they end."""

    reason: SkipReason
    first: datetime
    before: datetime


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a due schedule."""

    fire: tuple[datetime, ...]
    next_run_at: datetime | None
    dropped: Dropped | None = None


def decide(
    schedule: Schedule, timing: Timing, standing: Standing, runs_max: int
) -> Decision | None:
    """Return what to do with a due schedule; None leaves it due, for a run that must end first.

    At most ``runs_max`` slots fire at once, and never more than the schedule allows.
    """
    if standing.is_unfinished and schedule.overlap != "allow":
        return None if schedule.overlap == "queue" else _skip_all(timing, standing)
    cutoff, reason = _cutoff(schedule, standing)
    first = timing.since(standing.due_at, cutoff)
    if first is None or first > standing.now:
        return Decision((), first, Dropped(reason, standing.due_at, cutoff))
    if schedule.catch_up_missed:
        dropped = _dropped(reason, standing.due_at, first)
        return _catch_up(schedule, timing, standing.now, first, runs_max, dropped)
    latest = timing.latest(first, standing.now)
    reason = reason if latest == first else SkipReason.MISSED
    dropped = _dropped(reason, standing.due_at, latest)
    return Decision((latest,), timing.after(latest), dropped)


def _skip_all(timing: Timing, standing: Standing) -> Decision:
    latest = timing.latest(standing.due_at, standing.now)
    dropped = Dropped(SkipReason.OVERLAP, standing.due_at, latest + _MOMENT)
    return Decision((), timing.after(latest), dropped)


def _cutoff(schedule: Schedule, standing: Standing) -> tuple[datetime, SkipReason]:
    """Return the moment before which slots are too old to fire, and why."""
    cutoff, reason = standing.due_at, SkipReason.MISSED
    if schedule.misfire_grace_seconds is not None:
        oldest = standing.now - timedelta(seconds=schedule.misfire_grace_seconds)
        if oldest > cutoff:
            cutoff, reason = oldest, SkipReason.MISFIRE
    # Whoever pauses a schedule wants its slots dropped, unless none may ever be.
    if standing.resumed_at is not None and not schedule.catch_up_missed:
        after_pause = standing.resumed_at + _MOMENT
        if after_pause > cutoff:
            cutoff, reason = after_pause, SkipReason.PAUSED
    return cutoff, reason


def _catch_up(
    schedule: Schedule,
    timing: Timing,
    now: datetime,
    first: datetime,
    runs_max: int,
    dropped: Dropped | None,
) -> Decision:
    # A queueing schedule has one unfinished task or run at most: the others wait their turn.
    allowed = 1 if schedule.overlap == "queue" else min(schedule.max_catch_up_runs, runs_max)
    due = takewhile(lambda slot: slot <= now, timing.slots_from(first))
    fire = tuple(islice(due, allowed))
    return Decision(fire, timing.after(fire[-1]), dropped)


def _dropped(reason: SkipReason, due_at: datetime, first: datetime) -> Dropped | None:
    return Dropped(reason, due_at, first) if first > due_at else None
