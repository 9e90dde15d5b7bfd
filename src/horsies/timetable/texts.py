"""Patterns as a line of text that a person can type: "every day at 03:00", or a cron expression.
`pattern_text` writes the line, and `read_pattern` parses it into a pattern with the same slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import time
from typing import Any, TypeAlias, cast, get_args

from horsies.timetable.patterns import (
    LAST_DAY,
    BothDays,
    ByMonthDay,
    ByWeekday,
    Choice,
    CronSchedule,
    DailySchedule,
    EitherDay,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
    SchedulePattern,
    WeeklySchedule,
    refuse,
)
from horsies.timetable.terms import (
    HOURS,
    MINUTES,
    MONTH_DAYS,
    MONTHS,
    WEEKDAYS,
    AnyTerm,
    CronEnumRange,
    CronEnumStep,
    CronEvery,
    CronRange,
    CronStep,
    Domain,
    Weekday,
    values_of,
)
from horsies.timetable.words import in_words

FORMS = (
    "every 90 seconds, every 1 hour and 30 minutes, every hour at :15, every day at 03:00, "
    "Monday to Friday at 17:00, on the 1st of the month at 04:00, on the last day of the month at "
    "23:00, or a cron expression such as */15 8-18 * * mon-fri"
)

_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?"
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_UNIT = r"(?:days?|d|hours?|h|minutes?|min|m|seconds?|sec|s)"
_DURATION = re.compile(
    rf"every\s+(?P<parts>(?:\d{{1,6}}\s*{_UNIT}(?:\s*,\s*|\s+and\s+|\s*))+)", re.I
)
_PART = re.compile(rf"(\d+)\s*({_UNIT})", re.I)
_ONE = re.compile(r"every\s+(?P<unit>day|hour|minute|second)", re.I)
_HOURLY = re.compile(r"every\s+hour\s+at\s+:(?P<minute>\d{2})(?::(?P<second>\d{2}))?", re.I)
_DAILY = re.compile(rf"every\s+day\s+at\s+{_CLOCK}", re.I)
_WEEKLY = re.compile(rf"(?P<days>[a-z, ]+?)\s+at\s+{_CLOCK}", re.I)
_MONTHLY = re.compile(
    rf"on\s+the\s+(?:(?P<day>\d{{1,2}})(?:st|nd|rd|th)?|last\s+day)\s+of\s+the\s+month\s+at\s+{_CLOCK}",
    re.I,
)
_Read: TypeAlias = Callable[[re.Match[str]], SchedulePattern | None]


def pattern_text(pattern: SchedulePattern) -> str:
    """Format a pattern as a line that `read_pattern` can parse.

    Example:
        pattern_text(DailySchedule(time=time(3)))  # "every day at 03:00"
    """
    return _expression(pattern) if isinstance(pattern, CronSchedule) else in_words(pattern)


def read_pattern(text: str) -> SchedulePattern:
    """Parse a line such as "every day at 03:00" or a cron expression; raise HRS-205 with all mistakes.

    When both day fields of a cron expression are restricted, its last word is "either" or "both".

    Example:
        read_pattern("every 90 seconds")
        read_pattern("0 9 13 * fri both")
    """
    line = " ".join(text.split())
    for form, read in _FORMS:
        found = form.fullmatch(line)
        pattern = None if found is None else read(found)
        if pattern is not None:
            return pattern
    words = line.split()
    if len(words) in (5, 6) and not line[:1].isalpha():
        return _read_cron(words)
    refuse(f"The pattern {line[:100]!r}", [f"it has none of these forms: {FORMS}"])
    raise AssertionError("unreachable")


def _read_cron(words: Sequence[str]) -> CronSchedule:
    expression, choice = " ".join(words[:5]), words[5].lower() if len(words) == 6 else None
    where = f"The pattern {' '.join(words)[:100]!r}"
    if choice not in (None, *get_args(Choice)):
        refuse(where, [f'its sixth word is "either" or "both", not {choice!r}'])
    is_ambiguous = choice is None and "*" not in (words[2], words[4])
    if is_ambiguous:
        problem = 'both day fields are restricted: end it with "either", as in cron, or with "both"'
        refuse(where, [problem])
    return CronSchedule.parse(expression, days=cast(Choice | None, choice))


def _read_duration(found: re.Match[str]) -> SchedulePattern:
    sums: dict[str, Any] = {}
    for count, unit in _PART.findall(found["parts"]):
        name = _UNITS[unit[0].lower()]
        sums[name] = sums.get(name, 0) + int(count)
    return IntervalSchedule(**sums)


def _read_one(found: re.Match[str]) -> SchedulePattern:
    unit: dict[str, Any] = {_UNITS[found["unit"][0].lower()]: 1}
    return IntervalSchedule(**unit)


def _read_hourly(found: re.Match[str]) -> SchedulePattern:
    return HourlySchedule(minute=int(found["minute"]), second=int(found["second"] or 0))


def _read_daily(found: re.Match[str]) -> SchedulePattern:
    return DailySchedule(time=_clock(found))


def _read_monthly(found: re.Match[str]) -> SchedulePattern:
    day = LAST_DAY if found["day"] is None else int(found["day"])
    return MonthlySchedule(day=day, time=_clock(found))


def _read_weekly(found: re.Match[str]) -> SchedulePattern | None:
    """Parse "Monday to Friday at 17:00"; return None if the words are not days."""
    listed: list[Weekday] = []
    for part in re.split(r"\s*,\s*|\s+and\s+", found["days"].strip()):
        first, *rest = [_weekday(word) for word in re.split(r"\s+to\s+", part)]
        last = rest[0] if rest else first
        if first is None or last is None or len(rest) > 1:
            return None
        days = list(Weekday)
        start, end = days.index(first), days.index(last)
        listed += days[start : end + 1] if start <= end else days[start:] + days[: end + 1]
    return WeeklySchedule(days=listed, time=_clock(found))


def _weekday(word: str) -> Weekday | None:
    """Find a day by its full name or at least its first three letters."""
    text = word.strip().lower().removesuffix("s") if len(word) > 6 else word.strip().lower()
    return next((day for day in Weekday if len(text) > 2 and day.value.startswith(text)), None)


def _clock(found: re.Match[str]) -> time:
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    if hour > 23 or minute > 59 or second > 59:
        refuse(f"The pattern {found[0][:100]!r}", ["there is no such time of day"])
    return time(hour, minute, second)


_FORMS: tuple[tuple[re.Pattern[str], _Read], ...] = (
    (_ONE, _read_one),
    (_DURATION, _read_duration),
    (_HOURLY, _read_hourly),
    (_DAILY, _read_daily),
    (_MONTHLY, _read_monthly),
    (_WEEKLY, _read_weekly),
)


def _expression(cron: CronSchedule) -> str:
    """Return a cron pattern as a classic expression, term by term."""
    day, days, choice = cron.day, ("*", "*"), ""
    if isinstance(day, ByMonthDay):
        days = (_field(day.day_of_month, MONTH_DAYS), "*")
    elif isinstance(day, ByWeekday):
        days = ("*", _field(day.day_of_week, WEEKDAYS))
    elif isinstance(day, EitherDay | BothDays):
        days = (_field(day.day_of_month, MONTH_DAYS), _field(day.day_of_week, WEEKDAYS))
        choice = " either" if isinstance(day, EitherDay) else " both"
    fields = (_field(cron.minute, MINUTES), _field(cron.hour, HOURS), days[0])
    return " ".join((*fields, _field(cron.month, MONTHS), days[1])) + choice


def _field(terms: Sequence[AnyTerm], domain: Domain) -> str:
    """Write the terms unchanged: at a clock change, an hour given as a step behaves differently."""
    return ",".join(_term(term, domain) for term in terms)


def _term(term: AnyTerm, domain: Domain) -> str:
    # Cron counts weekdays from Sunday, so a step from Monday becomes a list.
    is_weekday_step = domain is WEEKDAYS and getattr(term, "step", 1) > 1
    match term:
        case CronEvery():
            return "*"
        case CronStep(step=step) | CronEnumStep(step=step) if not is_weekday_step:
            return f"*/{step}"
        case CronRange(start=start, end=end) | CronEnumRange(start=start, end=end) if (
            not is_weekday_step
        ):
            pace = f"/{term.step}" if term.step > 1 else ""
            return f"{_name(start, domain)}-{_name(end, domain)}{pace}"
        case _:
            return ",".join(_name(value, domain) for value in values_of([term], domain))


def _name(value: object, domain: Domain) -> str:
    return domain.shown(domain.number(value))[:3]
