"""Finds slots by brute force: checks for every minute whether the local time matches. Independent of the
arithmetic under test, it uses only zoneinfo's conversion from UTC and the patterns' own fields.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from horsies.timetable.patterns import (
    CronSchedule,
    DailySchedule,
    HourlySchedule,
    MonthlySchedule,
    WeeklySchedule,
)

MINUTE = timedelta(minutes=1)
WEEKDAY_NAMES = [name.lower() for name in calendar.day_name]
MONTH_NAMES = [name.lower() for name in calendar.month_name][1:]


def slots(
    pattern: Any, since: datetime, until: datetime, zone: str, gap: str = "skip"
) -> list[datetime]:
    """Return all slots after `since` and not after `until`, by checking every minute between them."""
    place = ZoneInfo(zone)
    found = []
    moment = since.replace(second=second_of(pattern), microsecond=0) - MINUTE
    before = moment.astimezone(place)
    while moment <= until + MINUTE:
        local = moment.astimezone(place)
        candidates = [moment] if is_slot(pattern, local) else []
        if gap == "shift" and not fires_every_hour(pattern):
            candidates += shifted(pattern, before, local)
        found += [slot for slot in candidates if since < slot <= until]
        before = local
        moment += MINUTE
    return sorted(set(found))


def is_slot(pattern: Any, local: datetime) -> bool:
    """Return whether a time is a slot. A repeated time counts only the first time, unless the pattern
    fires in every hour.
    """
    return matches(pattern, local) and (local.fold == 0 or goes_through_hours(pattern))


def shifted(pattern: Any, before: datetime, local: datetime) -> Iterator[datetime]:
    """Return the first time after the clock is set forward, if a skipped time matches."""
    assert before.tzinfo is not None
    leap = (local.utcoffset() or timedelta()) - (before.utcoffset() or timedelta())
    if leap <= timedelta():
        return
    # The clock changes at a whole minute, but the pattern may fire at another second.
    end = local.replace(second=0)
    missing = end.replace(tzinfo=None) - leap
    while missing < end.replace(tzinfo=None):
        if matches(pattern, missing.replace(second=second_of(pattern))):
            yield end.astimezone(UTC)
            return
        missing += MINUTE


def second_of(pattern: Any) -> int:
    match pattern:
        case HourlySchedule():
            return pattern.second
        case CronSchedule():
            return 0
        case _:
            return int(pattern.time.second)


def goes_through_hours(pattern: Any) -> bool:
    if isinstance(pattern, HourlySchedule):
        return True
    if not isinstance(pattern, CronSchedule):
        return False
    return fires_every_hour(pattern) or any(term.kind == "step" for term in pattern.hour)


def fires_every_hour(pattern: Any) -> bool:
    if isinstance(pattern, HourlySchedule):
        return True
    if not isinstance(pattern, CronSchedule):
        return False
    return all(any(fits(term, hour, 0) for term in pattern.hour) for hour in range(24))


def matches(pattern: Any, local: datetime) -> bool:
    match pattern:
        case HourlySchedule():
            return local.minute == pattern.minute
        case DailySchedule():
            return same_minute(pattern, local)
        case WeeklySchedule():
            return same_minute(pattern, local) and weekday(local) in list(pattern.days)
        case MonthlySchedule():
            last = calendar.monthrange(local.year, local.month)[1]
            wanted = last if pattern.day == -1 else pattern.day
            return same_minute(pattern, local) and local.day == wanted
        case CronSchedule():
            return (
                any(fits(term, local.minute, 0) for term in pattern.minute)
                and any(fits(term, local.hour, 0) for term in pattern.hour)
                and any(fits_name(term, MONTH_NAMES, local.month - 1) for term in pattern.month)
                and fits_day(pattern.day, local)
            )
        case _:
            raise AssertionError(pattern)


def same_minute(pattern: Any, local: datetime) -> bool:
    return (local.hour, local.minute) == (pattern.time.hour, pattern.time.minute)


def weekday(local: datetime) -> str:
    return WEEKDAY_NAMES[local.weekday()]


def fits(term: Any, value: int, low: int) -> bool:
    match term.kind:
        case "every":
            return True
        case "step":
            return bool((value - low) % term.step == 0)
        case "values":
            return bool(value in term.values)
        case _:
            inside = term.start <= value <= term.end
            return bool(inside and (value - term.start) % term.step == 0)


def fits_name(term: Any, names: list[str], place: int) -> bool:
    match term.kind:
        case "every":
            return True
        case "enum_step":
            return bool(place % term.step == 0)
        case "enum_values":
            return names[place] in list(term.values)
        case _:
            start, end = names.index(term.start), names.index(term.end)
            return bool(start <= place <= end and (place - start) % term.step == 0)


def fits_day(day: Any, local: datetime) -> bool:
    def by_date() -> bool:
        return any(fits(term, local.day, 1) for term in day.day_of_month)

    def by_name() -> bool:
        return any(fits_name(term, WEEKDAY_NAMES, local.weekday()) for term in day.day_of_week)

    match day.kind:
        case "every_day":
            return True
        case "by_month_day":
            return by_date()
        case "by_weekday":
            return by_name()
        case "either_day":
            return by_date() or by_name()
        case _:
            return by_date() and by_name()
