"""The next slot of a pattern after an instant: exact, pure, and the same on every machine.

Intervals are elapsed time. All other patterns are wall-clock times in a zone. A clock change can skip or
repeat such a time. A skipped time is dropped or moved to the end of the gap; a repeated time fires once,
unless the pattern fires in every hour.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal, TypeAlias, assert_never
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from horsies.timetable.patterns import (
    LAST_DAY,
    CronSchedule,
    DailySchedule,
    EitherDay,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
    SchedulePattern,
    WeeklySchedule,
)
from horsies.timetable.terms import (
    HOURS,
    MINUTES,
    MONTH_DAYS,
    MONTHS,
    WEEKDAYS,
    CronEvery,
    CronStep,
    values_of,
)

GapRule: TypeAlias = Literal["skip", "shift"]

# The calendar, including its weekdays, repeats after 400 years: a pattern without a slot in that time
# never has one.
_MONTHS_AHEAD = 400 * 12
_ONE_SECOND = timedelta(seconds=1)
_ANY = (CronEvery(),)


def calculate_next_run(
    pattern: SchedulePattern, from_time: datetime, tz: str, on_dst_gap: GapRule = "skip"
) -> datetime:
    """Return the first slot strictly after ``from_time``, in UTC.

    An interval counts from ``from_time``, so pass the previous slot. ``on_dst_gap`` decides about a time
    that the clock skips: ``"skip"`` drops it, and ``"shift"`` takes the first instant after the gap. A
    pattern that fires in every hour is not shifted, because it has a slot after the gap anyway. Raises
    ValueError for a naive ``from_time``, an unknown zone, or a pattern that never fires again.

    Example:
        calculate_next_run(DailySchedule(time=time(2, 30)), now, "Europe/Berlin")
    """
    if from_time.utcoffset() is None:
        raise ValueError("from_time has no time zone; write datetime(..., tzinfo=UTC)")
    zone = load_zone(tz)
    found = next_run(timetable_of(pattern), from_time.astimezone(UTC), zone, on_dst_gap)
    if found is None:
        raise ValueError(f"after {from_time.isoformat()} this pattern never fires in {tz}")
    return found


def load_zone(name: str) -> ZoneInfo:
    """Return the time zone of an IANA name, or raise ValueError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"unknown time zone {name!r}; use an IANA name such as Europe/Berlin, and install "
            "the tzdata package if this machine has no time zones"
        ) from error


def next_run(
    timetable: Timetable | timedelta, after: datetime, zone: ZoneInfo, on_dst_gap: GapRule
) -> datetime | None:
    """Return the first slot after an instant in UTC, or None if the pattern never fires again."""
    if isinstance(timetable, timedelta):
        return after + timetable
    wall_before = after.astimezone(zone).replace(tzinfo=None)
    start = wall_before
    if timetable.is_periodic:
        early, late = _instants(wall_before, zone)
        # The instant is in the first pass of a repeated time: continue at the start of the second
        # pass.
        if early == after:
            start -= late - early
    second_pass: datetime | None = None
    for wall in timetable.walls_from(start.replace(microsecond=0)):
        early, late = _instants(wall, zone)
        if early > late:  # The clock skips this time.
            if on_dst_gap == "skip" or timetable.fires_every_hour:
                continue
            early = _end_of_gap(late, early, zone)
        if early > after:
            return early if second_pass is None else min(early, second_pass)
        if timetable.is_periodic and late > after and second_pass is None:
            second_pass = late
    return second_pass


def _instants(wall: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Return the first and second instant of a wall-clock time; they differ only at a clock change.

    For a skipped time their order is reversed: the first has the offset after the gap, the second has
    the offset before it.
    """
    early = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
    late = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return early, late


def _end_of_gap(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the instant of the clock change between these two instants."""
    offset = before.astimezone(zone).utcoffset()
    while after - before > _ONE_SECOND:
        middle = (before + (after - before) // 2).replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            after = middle
    return after


@dataclass(frozen=True, slots=True)
class Timetable:
    """A wall-clock pattern as plain numbers: times, days and months.

    A day must match the month day and the weekday, or one of the two. Patterns with ``is_periodic`` fire
    in every hour, including both passes of a repeated hour.
    """

    hours: tuple[int, ...]
    minutes: tuple[int, ...]
    second: int = 0
    month_days: frozenset[int] = frozenset(range(1, 32))
    weekdays: frozenset[int] = frozenset(range(1, 8))
    either_day: bool = False
    months: frozenset[int] = frozenset(range(1, 13))
    is_periodic: bool = False

    @property
    def fires_every_hour(self) -> bool:
        """Whether every hour of a matching day has a slot."""
        return len(self.hours) == 24

    def walls_from(self, start: datetime) -> Iterator[datetime]:
        """Yield the wall-clock times from ``start`` onwards, in ascending order."""
        for day in self._dates_from(start.date()):
            earliest = start.time() if day == start.date() else time()
            for wall in self._times_from(earliest):
                yield datetime.combine(day, wall)

    def _times_from(self, earliest: time) -> Iterator[time]:
        first_minute = earliest.minute + (self.second < earliest.second)
        for hour in self.hours[bisect_left(self.hours, earliest.hour) :]:
            skipped = bisect_left(self.minutes, first_minute) if hour == earliest.hour else 0
            for minute in self.minutes[skipped:]:
                yield time(hour, minute, self.second)

    def _dates_from(self, start: date) -> Iterator[date]:
        first = start.year * 12 + start.month - 1
        for number in range(first, first + _MONTHS_AHEAD + 1):
            year, month = number // 12, number % 12 + 1
            if year >= date.max.year:
                return
            if month in self.months:
                first_day = start.day if number == first else 1
                yield from (date(year, month, day) for day in self._days(year, month, first_day))

    def _days(self, year: int, month: int, first_day: int) -> Iterator[int]:
        first_weekday, length = monthrange(year, month)
        for day in range(first_day, length + 1):
            by_date = day in self.month_days or (day == length and LAST_DAY in self.month_days)
            by_name = (first_weekday + day - 1) % 7 + 1 in self.weekdays
            if (by_date or by_name) if self.either_day else (by_date and by_name):
                yield day


def timetable_of(pattern: SchedulePattern) -> Timetable | timedelta:
    """Return a pattern as a Timetable, or an interval as its length."""
    match pattern:
        case IntervalSchedule():
            return pattern.total
        case HourlySchedule(minute=minute, second=second):
            return Timetable(tuple(range(24)), (minute,), second, is_periodic=True)
        case DailySchedule(time=at):
            return _at(at)
        case WeeklySchedule(days=days, time=at):
            return replace(_at(at), weekdays=frozenset(map(WEEKDAYS.number, days)))
        case MonthlySchedule(day=day, time=at):
            return replace(_at(at), month_days=frozenset([day]))
        case CronSchedule():
            return _cron_timetable(pattern)
        case _:
            assert_never(pattern)


def _at(at: time) -> Timetable:
    return Timetable((at.hour,), (at.minute,), at.second)


def _cron_timetable(pattern: CronSchedule) -> Timetable:
    hours = values_of(pattern.hour, HOURS)
    by_date = getattr(pattern.day, "day_of_month", _ANY)
    by_name = getattr(pattern.day, "day_of_week", _ANY)
    return Timetable(
        hours,
        values_of(pattern.minute, MINUTES),
        month_days=frozenset(values_of(by_date, MONTH_DAYS)),
        weekdays=frozenset(values_of(by_name, WEEKDAYS)),
        either_day=isinstance(pattern.day, EitherDay),
        months=frozenset(values_of(pattern.month, MONTHS)),
        is_periodic=len(hours) == 24
        or any(isinstance(term, CronEvery | CronStep) for term in pattern.hour),
    )
