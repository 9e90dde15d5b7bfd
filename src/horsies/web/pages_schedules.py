"""Schedule pages: the list with its next slots, and one schedule with its history."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from statistics import median
from typing import Any
from urllib.parse import quote

from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    Schedulers,
    ScheduleState,
    TimedScheduleRun,
    find_schedulers,
    list_newest_schedule_runs,
    list_schedules,
)
from horsies.monitor.action_log import list_actions_script
from horsies.monitor.defaults import OVERDUE_SECONDS
from horsies.scheduler.decide import SkipReason
from horsies.scheduler.timing import Timing, TimingFields, timing_words
from horsies.timetable.next_run import load_zone
from horsies.timetable.words import in_words
from horsies.web.reading import NotFound
from horsies.web.rendering import Page, Route, View

# The number of runs per schedule: twenty rows from an index, so a page of fifty schedules reads
# about a thousand.
SCHEDULES_PER_PAGE = 50
RUNS_SHOWN = 20
SLOTS_SHOWN = 10
CHANGES_SHOWN = 10
DAY_HOURS = 24
SLOTS_PER_HOUR_MAX = 10
REASONS = {
    SkipReason.MISSED: "no scheduler ran at that time, or an earlier slot was still due",
    SkipReason.MISFIRE: "it was later than misfire_grace_seconds allows",
    SkipReason.PAUSED: "the schedule was paused",
    SkipReason.OVERLAP: "the run before had not ended",
    SkipReason.REFUSED: "its task or workflow could not be built",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A past slot: its task or run, or the reason why it was skipped."""

    at: datetime
    status: str
    run: TimedScheduleRun | None = None
    reason: str | None = None

    @property
    def words(self) -> str:
        """Describe the slot and its outcome in one line."""
        code = f", {self.run.error_code}" if self.run is not None and self.run.error_code else ""
        why = f", {self.reason.lower()}" if self.reason else ""
        return f"{self.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC {self.status.lower()}{code}{why}"


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A schedule for display, read at ``now`` by the database's clock."""

    state: ScheduleState
    runs: tuple[TimedScheduleRun, ...]
    now: datetime
    fields: TimingFields | None

    @classmethod
    def of(cls, state: ScheduleState, runs: list[TimedScheduleRun], now: datetime) -> ScheduleView:
        """Read the stored timing, which may be unreadable if another release stored it."""
        try:
            fields = TimingFields.model_validate_json(state.timing or "")
        except ValueError:
            fields = None
        return cls(state, tuple(runs), now, fields)

    @property
    def words(self) -> str:
        """Describe the pattern with its time zone."""
        if self.fields is None:
            return "a pattern that this release cannot read"
        pattern = in_words(self.fields.pattern)
        return pattern if self.fields.pattern.type == "interval" else f"{pattern}, {self.zone}"

    @property
    def zone(self) -> str:
        return "UTC" if self.fields is None else self.fields.timezone

    @property
    def overdue_seconds(self) -> float | None:
        """Return how long the next slot is overdue, or None unless it is late enough to need attention."""
        if self.state.next_run_at is None or self.state.is_paused:
            return None
        late = (self.now - self.state.next_run_at).total_seconds()
        return late if late > OVERDUE_SECONDS else None

    @property
    def seconds_left(self) -> float | None:
        """Return the time until the next slot, or None for a paused or ended schedule."""
        if self.state.next_run_at is None or self.state.is_paused:
            return None
        return (self.state.next_run_at - self.now).total_seconds()

    def next_slots(self, count: int) -> list[datetime]:
        """Return the next slots, as `horsies schedules next` computes them."""
        if self.fields is None or self.state.next_run_at is None:
            return []
        timing = Timing.of(self.fields)
        return list(islice(timing.slots_from(self.state.next_run_at.astimezone(UTC)), count))

    def hours_ahead(self) -> list[int] | None:
        """Count the slots in each of the next 24 hours; return None if there are more than ten per hour."""
        counts = [0] * DAY_HOURS
        if self.fields is None or self.state.next_run_at is None or self.state.is_paused:
            return counts
        timing, end = Timing.of(self.fields), self.now + timedelta(hours=DAY_HOURS)
        slot = timing.since(self.state.next_run_at.astimezone(UTC), self.now.astimezone(UTC))
        for at in takewhile(lambda at: at < end, timing.slots_from(slot)):
            hour = int((at - self.now).total_seconds() // 3600)
            counts[hour] += 1
            if counts[hour] > SLOTS_PER_HOUR_MAX:
                return None
        return counts

    @property
    def took_seconds(self) -> float | None:
        """Return the median duration of the shown runs."""
        found = [run.took_seconds for run in self.runs if run.took_seconds is not None]
        return median(found) if found else None

    def history(self) -> list[Slot]:
        """Return the newest slots, oldest first: the runs, and the latest skipped slot. Earlier skipped
        slots are not stored.
        """
        slots = [Slot(run.scheduled_for or run.sent_at, run.status, run) for run in self.runs]
        skipped, reason = self.state.skipped_at, self.state.skip_reason
        if skipped is not None and (not slots or skipped >= min(slot.at for slot in slots)):
            slots.append(Slot(skipped, "SKIPPED", reason=reason))
        return sorted(slots, key=lambda slot: slot.at)[-RUNS_SHOWN:]


@dataclass(frozen=True, slots=True)
class SchedulesRead:
    """The schedules of one page, and whether any scheduler is connected."""

    schedules: list[ScheduleView]
    schedulers: Schedulers
    next_name: str | None = None

    @property
    def overdue(self) -> list[ScheduleView]:
        """Return the schedules with an overdue slot."""
        return [one for one in self.schedules if one.overdue_seconds is not None]


def schedules_script(
    name: str | None, after: str = "", limit: int | None = None
) -> Script[SchedulesRead]:
    """Read a page of schedules, or one schedule, with their newest runs."""
    more = None if limit is None else limit + 1
    states: list[ScheduleState] = yield list_schedules(name, after, more)
    shown = states[:limit]
    names = list_newest_schedule_runs([state.name for state in shown], RUNS_SHOWN)
    runs: list[TimedScheduleRun] = yield names
    (schedulers,) = yield find_schedulers()
    by_name: dict[str, list[TimedScheduleRun]] = {state.name: [] for state in shown}
    for run in runs:
        by_name[run.name].append(run)
    views = [ScheduleView.of(one, by_name[one.name], schedulers.looked_at) for one in shown]
    return SchedulesRead(views, schedulers, shown[-1].name if len(states) > len(shown) else None)


async def schedules_page(view: View) -> Page:
    after = view.query.get("after", "")
    found = await view.read(schedules_script(None, after, SCHEDULES_PER_PAGE))
    following = found.next_name
    ahead, frequent = _ahead(found.schedules)
    context: dict[str, Any] = {
        "found": found,
        "after": after,
        "ahead": ahead,
        "frequent": frequent,
        "next_url": None if following is None else view.url(f"/schedules?after={quote(following)}"),
    }
    return Page("schedules.html", "Schedules", context)


def _ahead(schedules: list[ScheduleView]) -> tuple[list[int], list[str]]:
    """Sum the slots of the next 24 hours by hour; also return the names of schedules that fire too often
    to count.
    """
    hours = {schedule.state.name: schedule.hours_ahead() for schedule in schedules}
    counts = [one for one in hours.values() if one is not None]
    sums = [sum(column) for column in zip(*counts, strict=True)] or [0] * DAY_HOURS
    return sums, [name for name, counts in hours.items() if counts is None]


async def schedule_page(view: View) -> Page:
    """Show one schedule: its pattern, its next slots and its newest runs."""
    name = view.params["name"]
    found = await view.read(schedules_script(name))
    if not found.schedules:
        raise NotFound(f"There is no schedule {name!r} on record.")
    (schedule,) = found.schedules
    context = {
        "found": found,
        "schedule": schedule,
        "state": schedule.state,
        "slots": schedule.next_slots(SLOTS_SHOWN),
        "can_run": view.site.app is not None,
        "path_of": schedule_path(name),
        "original": timing_words(schedule.state.original_timing),
        "local": lambda at: f"{at.astimezone(load_zone(schedule.zone)):%H:%M %Z}",
        "reasons": REASONS,
        "changes": await view.read(list_actions_script(f"schedule {name}", limit=CHANGES_SHOWN)),
    }
    return Page("schedule.html", f"Schedule {name}", context)


def schedule_path(name: str) -> str:
    return f"/schedules/{quote(name, safe='')}"


ROUTES: tuple[Route, ...] = (
    Route("GET", "/schedules", None, schedules_page),
    Route("GET", "/schedules/{name:path}", None, schedule_page),
)
