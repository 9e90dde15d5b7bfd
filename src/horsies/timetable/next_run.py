"""From a pattern and an instant to the next slot: exact, pure, and the same on every machine.

Intervals are elapsed time. All other patterns are wall-clock times of a zone, and twice a year such
a time happens never or twice: a missing one is skipped or moved to the end of the gap, a repeated one
counts once unless the pattern goes through the hours of the day.
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

# After 400 years the calendar, weekdays included, begins anew: what has not come by then never does.
_MONTHS_AHEAD = 400 * 12
_ONE_SECOND = timedelta(seconds=1)
_ANY = (CronEvery(),)


def calculate_next_run(
    pattern: SchedulePattern, from_time: datetime, tz: str, on_dst_gap: GapRule = "skip"
) -> datetime:
    """Return the first slot strictly after ``from_time``, in UTC.

    An interval counts from ``from_time``, which therefore is the slot before. ``on_dst_gap`` says what
    becomes of a time that the clock leaps over: ``"skip"`` drops it, ``"shift"`` takes the first
    instant after the gap; patterns that fire in every hour lose nothing and are not shifted. Raises
    ValueError for a naive ``from_time``, an unknown zone, and a time that never comes.

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
            f"there is no time zone {name!r}; use an IANA name such as Europe/Berlin, and install "
            "the tzdata package if this machine has no time zones"
        ) from error


def next_run(
    timetable: Timetable | timedelta, after: datetime, zone: ZoneInfo, on_dst_gap: GapRule
) -> datetime | None:
    """The same with everything read and checked: ``after`` is in UTC, and None means never again."""
    if isinstance(timetable, timedelta):
        return after + timetable
    wall_before = after.astimezone(zone).replace(tzinfo=None)
    start = (
        wall_before - _repeat_ahead(wall_before, after, zone)
        if timetable.is_periodic
        else wall_before
    )
    second_pass: datetime | None = None
    for wall in timetable.walls_from(start.replace(microsecond=0)):
        early, late = _instants(wall, zone)
        if early > late:  # the clock leaps over this time
            if on_dst_gap == "skip" or timetable.fires_every_hour:
                continue
            early = _end_of_gap(late, early, zone)
        if early > after:
            return early if second_pass is None else min(early, second_pass)
        if timetable.is_periodic and late > after and second_pass is None:
            second_pass = late
    return second_pass


def _instants(wall: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """Return when a wall-clock time happens: twice the same, first and second pass, or for one that is
    leapt over, what the clocks after and before the leap would make of it.
    """
    early = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
    late = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return early, late


def _repeat_ahead(wall: datetime, instant: datetime, zone: ZoneInfo) -> timedelta:
    """Return how far the clock will be turned back when this is the first pass of a repeated time."""
    early, late = _instants(wall, zone)
    return late - early if early == instant else timedelta()


def _end_of_gap(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the first instant after the leap of the clock that lies between these two."""
    offset = before.astimezone(zone).utcoffset()
    while after - before > _ONE_SECOND:
        middle = before + (after - before) // 2
        middle = middle.replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            after = middle
    return after


@dataclass(frozen=True, slots=True)
class Timetable:
    """A wall-clock pattern as plain numbers: at these times, on these days of these months.

    Days match by month day and weekday, or by one of them. ``is_periodic`` patterns go through the
    hours of the day and fire in both passes of a repeated hour.
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
        """Whether no hour of a matching day passes without a slot."""
        return len(self.hours) == 24

    def walls_from(self, start: datetime) -> Iterator[datetime]:
        """Yield the wall-clock times from ``start`` on in ascending order."""
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
    """Return a pattern as numbers, or the length of an interval."""
    match pattern:
        case IntervalSchedule():
            return pattern.total
        case HourlySchedule(minute=minute, second=second):
            return Timetable(tuple(range(24)), (minute,), second, is_periodic=True)
        case DailySchedule(time=at):
            return _at(at)
        case WeeklySchedule(days=days, time=at):
            numbers = frozenset(WEEKDAYS.number(day) for day in days)
            return replace(_at(at), weekdays=numbers)
        case MonthlySchedule(day=day, time=at):
            return replace(_at(at), month_days=frozenset([day]))
        case CronSchedule():
            return _cron_timetable(pattern)
        case _:
            assert_never(pattern)


def _at(moment: time) -> Timetable:
    return Timetable((moment.hour,), (moment.minute,), moment.second)


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
