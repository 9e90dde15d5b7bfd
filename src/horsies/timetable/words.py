"""Patterns in words: "every 15 minutes from 08:00 to 18:45, Monday to Friday".

The words describe a pattern's values, not its notation: two patterns with the same slots have the same
words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from horsies.timetable.next_run import Timetable, timetable_of
from horsies.timetable.patterns import LAST_DAY, SchedulePattern
from horsies.timetable.terms import MONTHS, WEEKDAYS, Domain

_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))
# With more times of day than this, the words describe the hours and the minutes instead.
_TIMES_MAX = 6


def in_words(pattern: SchedulePattern) -> str:
    """Describe when a pattern fires, without its time zone.

    Example:
        in_words(DailySchedule(time=time(3, 30)))  # "every day at 03:30"
    """
    timetable = timetable_of(pattern)
    if isinstance(timetable, timedelta):
        return _interval(int(timetable.total_seconds()))
    times, days = _times(timetable), _days(timetable)
    months = "" if len(timetable.months) == 12 else f"in {_named(timetable.months, MONTHS)}"
    if times.startswith("every"):
        return ", ".join(part for part in (times, days, months) if part)
    return " ".join(part for part in (days or "every day", months, times) if part)


def _interval(seconds: int) -> str:
    parts: list[str] = []
    for unit, size in _UNITS:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}s" if count > 1 else f"1 {unit}")
    text = _list(parts)
    return f"every {text.removeprefix('1 ') if len(parts) == 1 else text}"


def _times(timetable: Timetable) -> str:
    hours, minutes, second = timetable.hours, timetable.minutes, timetable.second
    if len(hours) * len(minutes) <= _TIMES_MAX:
        clock = [_clock(hour, minute, second) for hour in hours for minute in minutes]
        return f"at {_list(clock)}"
    at_second = f" at second {second}" if second else ""
    pace = _pace(minutes)
    if pace is not None:
        return f"every {pace}{_between(hours, minutes)}{at_second}"
    marks = _list([f":{minute:02d}" + (f":{second:02d}" if second else "") for minute in minutes])
    return f"every {_hours(hours)} at {marks}"


def _pace(minutes: Sequence[int]) -> str | None:
    """Return the interval between minutes that are evenly spaced around the clock, such as "15 minutes"."""
    if len(minutes) == 60:
        return "minute"
    step = minutes[1] - minutes[0] if len(minutes) > 1 else 60
    if tuple(minutes) != tuple(range(0, 60, step)) or 60 % step:
        return None
    return f"{step} minutes" if step < 60 else None


def _between(hours: Sequence[int], minutes: Sequence[int]) -> str:
    if len(hours) == 24:
        return ""
    if _is_row(hours):
        return f" from {_clock(hours[0], 0)} to {_clock(hours[-1], minutes[-1])}"
    return f" in the hours {_list([f'{hour:02d}' for hour in hours])}"


def _hours(hours: Sequence[int]) -> str:
    if len(hours) == 24:
        return "hour"
    step = hours[1] - hours[0] if len(hours) > 1 else 24
    if step > 1 and 24 % step == 0 and tuple(hours) == tuple(range(0, 24, step)):
        return f"{step} hours"
    if _is_row(hours):
        return f"hour from {hours[0]:02d} to {hours[-1]:02d}"
    return f"hour of {_list([f'{hour:02d}' for hour in hours])}"


def _days(timetable: Timetable) -> str:
    by_name = "" if len(timetable.weekdays) == 7 else _named(timetable.weekdays, WEEKDAYS)
    by_date = "" if len(timetable.month_days) >= 31 else _month_days(timetable.month_days)
    if by_name and by_date:
        joint = "or" if timetable.either_day else "if it is"
        return f"{by_date} {joint} {by_name}"
    return by_date or by_name


def _month_days(days: Iterable[int]) -> str:
    numbers = sorted(day for day in days if day != LAST_DAY)
    parts = (
        [f"{_ordinal(numbers[0])} to {_ordinal(numbers[-1])}"]
        if len(numbers) > 2 and _is_row(numbers)
        else [_ordinal(day) for day in numbers]
    )
    if LAST_DAY in days:
        parts.append("last day")
    return f"on the {_list(parts)} of the month"


def _named(values: Iterable[int], domain: Domain) -> str:
    numbers = sorted(values)
    names = [domain.shown(number).capitalize() for number in numbers]
    if len(names) > 2 and _is_row(numbers):
        return f"{names[0]} to {names[-1]}"
    return _list(names)


def _is_row(numbers: Sequence[int]) -> bool:
    return numbers[-1] - numbers[0] == len(numbers) - 1


def _clock(hour: int, minute: int, second: int = 0) -> str:
    return f"{hour:02d}:{minute:02d}" + (f":{second:02d}" if second else "")


def _ordinal(number: int) -> str:
    last = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
