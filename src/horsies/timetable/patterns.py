"""Schedule patterns, from "every 30 seconds" to typed cron.

A contradictory pattern, or one that can never fire, is rejected with HRS-205 when it is built; one
report lists all mistakes. `next_run.py` turns patterns into instants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import time, timedelta
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from horsies.errors import ErrorCode
from horsies.timetable.terms import (
    HOURS,
    MINUTES,
    MONTH_DAYS,
    MONTHS,
    WEEKDAYS,
    CronEvery,
    ExpressionProblem,
    MonthTerm,
    NumericTerm,
    Weekday,
    WeekdayTerm,
    read_expression,
    term_problems,
    values_of,
)
from horsies.validation import FrozenModel, raise_problems

Choice: TypeAlias = Literal["either", "both"]

LAST_DAY = -1

# February has 29 days here, because a schedule for the 29th is possible, if rare.
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def refuse(where: str, problems: Iterable[str]) -> None:
    """Raise HRS-205 with all problems of an object; do nothing if the list is empty."""
    code = ErrorCode.CONFIG_INVALID_SCHEDULE
    raise_problems(where, ((code, f"{where}: {problem}") for problem in problems))


class _Pattern(FrozenModel):
    """A pattern that is checked when it is built."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(type(self).__name__, self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        yield from ()


class IntervalSchedule(_Pattern):
    """Fires when the sum of its fields has passed since the previous slot; ignores time zones.

    Example:
        IntervalSchedule(minutes=1, seconds=30)
    """

    type: Literal["interval"] = "interval"
    """Marks the kind of pattern in stored JSON."""
    seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Seconds between two slots."""
    minutes: int | None = Field(default=None, ge=1, le=1_440)
    """Minutes between two slots, added to the other fields."""
    hours: int | None = Field(default=None, ge=1, le=168)
    """Hours between two slots, added to the other fields."""
    days: int | None = Field(default=None, ge=1, le=365)
    """Days of 24 hours between two slots, added to the other fields."""

    @property
    def total(self) -> timedelta:
        """The time between two slots."""
        return timedelta(
            days=self.days or 0,
            hours=self.hours or 0,
            minutes=self.minutes or 0,
            seconds=self.seconds or 0,
        )

    def _problems(self) -> Iterator[str]:
        if not self.total:
            yield "give at least one of seconds, minutes, hours and days"


class HourlySchedule(_Pattern):
    """Fires once in every hour: `HourlySchedule(minute=15)`."""

    type: Literal["hourly"] = "hourly"
    """Marks the kind of pattern in stored JSON."""
    minute: int = Field(ge=0, le=59)
    """The minute of every hour."""
    second: int = Field(default=0, ge=0, le=59)
    """The second of that minute."""


class DailySchedule(_Pattern):
    """Fires every day at a wall-clock time: `DailySchedule(time=time(3, 30))`."""

    type: Literal["daily"] = "daily"
    """Marks the kind of pattern in stored JSON."""
    time: time
    """The time of day, in the schedule's time zone."""

    def _problems(self) -> Iterator[str]:
        return _time_problems(self.time)


class WeeklySchedule(_Pattern):
    """Fires on some days of the week: `WeeklySchedule(days=[Weekday.MONDAY], time=time(17))`."""

    type: Literal["weekly"] = "weekly"
    """Marks the kind of pattern in stored JSON."""
    days: list[Weekday]
    """The weekdays on which the schedule fires."""
    time: time
    """The time of day, in the schedule's time zone."""

    def _problems(self) -> Iterator[str]:
        if not self.days:
            yield "days needs at least one weekday"
        for day in Weekday:
            if self.days.count(day) > 1:
                yield f"days names {day.value} more than once"
        yield from _time_problems(self.time)


class MonthlySchedule(_Pattern):
    """Fires on one day of the month; months without that day are skipped, and -1 is always the last
    day.

    Example:
        MonthlySchedule(day=-1, time=time(23, 0))
    """

    type: Literal["monthly"] = "monthly"
    """Marks the kind of pattern in stored JSON."""
    day: int
    """The day of the month from 1 to 31, or -1 for the last day."""
    time: time
    """The time of day, in the schedule's time zone."""

    def _problems(self) -> Iterator[str]:
        if self.day != LAST_DAY and not 1 <= self.day <= 31:
            yield f"day {self.day} is neither between 1 and 31 nor -1, the last day of the month"
        yield from _time_problems(self.time)


def _time_problems(at: time) -> Iterator[str]:
    if at.tzinfo is not None:
        yield "time carries a time zone; name the zone in the schedule's timezone instead"
    if at.microsecond:
        yield "time has microseconds; slots are on whole seconds"


class EveryDay(FrozenModel):
    """All days."""

    kind: Literal["every_day"] = "every_day"
    """Marks the kind of selector in stored JSON."""


class ByMonthDay(FrozenModel):
    """Selects days by their number in the month."""

    kind: Literal["by_month_day"] = "by_month_day"
    """Marks the kind of selector in stored JSON."""
    day_of_month: list[NumericTerm]
    """The days of the month that match, from 1 to 31."""


class ByWeekday(FrozenModel):
    """Selects days by weekday."""

    kind: Literal["by_weekday"] = "by_weekday"
    """Marks the kind of selector in stored JSON."""
    day_of_week: list[WeekdayTerm]
    """The weekdays that match."""


class EitherDay(FrozenModel):
    """Selects days that match the month day or the weekday, as classic cron does if both fields are
    restricted.
    """

    kind: Literal["either_day"] = "either_day"
    """Marks the kind of selector in stored JSON."""
    day_of_month: list[NumericTerm]
    """The days of the month that match, from 1 to 31."""
    day_of_week: list[WeekdayTerm]
    """The weekdays that match."""


class BothDays(FrozenModel):
    """Selects days that match both the month day and the weekday, such as every Friday the 13th."""

    kind: Literal["both_days"] = "both_days"
    """Marks the kind of selector in stored JSON."""
    day_of_month: list[NumericTerm]
    """The days of the month that match, from 1 to 31."""
    day_of_week: list[WeekdayTerm]
    """The weekdays that match."""


DaySelector: TypeAlias = Annotated[
    EveryDay | ByMonthDay | ByWeekday | EitherDay | BothDays, Field(discriminator="kind")
]
"""One of the selectors of days in a ``CronSchedule``."""


class CronSchedule(_Pattern):
    """Fires at second 0 of every minute whose minute, hour, month and day all match.

    Several terms in one field are combined. A range does not wrap around.

    Example:
        CronSchedule(
            minute=[CronValues(values=[0, 30])],
            hour=[CronRange(start=9, end=17)],
            day=ByWeekday(day_of_week=[CronEnumRange(start=Weekday.MONDAY, end=Weekday.FRIDAY)]),
        )
    """

    type: Literal["cron"] = "cron"
    """Marks the kind of pattern in stored JSON."""
    minute: list[NumericTerm]
    """The minutes that match."""
    hour: list[NumericTerm]
    """The hours that match."""
    day: DaySelector = Field(default_factory=EveryDay)
    """The days that match; every day by default."""
    month: list[MonthTerm] = Field(default=[CronEvery()])
    """The months that match; every month by default."""

    @classmethod
    def parse(cls, expression: str, *, days: Choice | None = None) -> CronSchedule:
        """Parse a classic expression of five fields: minute, hour, day of month, month, day of week.

        If both day fields are restricted, ``days`` decides whether a day must match ``"either"`` of them,
        as in cron, or ``"both"``. Raises HRS-205 for an invalid expression.

        Example:
            CronSchedule.parse("15 */4 * * *")
            CronSchedule.parse("0 9 13 * fri", days="both")
        """
        try:
            fields = read_expression(expression)
            day = _selector(fields.day_of_month, fields.day_of_week, days)
        except ExpressionProblem as problem:
            refuse(f"CronSchedule.parse({expression!r})", problem.problems)
            raise
        return cls(minute=fields.minute, hour=fields.hour, day=day, month=fields.month)

    def _problems(self) -> Iterator[str]:
        problems = [*term_problems(self.minute, MINUTES), *term_problems(self.hour, HOURS)]
        problems += term_problems(self.month, MONTHS)
        if isinstance(self.day, ByMonthDay | EitherDay | BothDays):
            problems += term_problems(self.day.day_of_month, MONTH_DAYS)
        if isinstance(self.day, ByWeekday | EitherDay | BothDays):
            problems += term_problems(self.day.day_of_week, WEEKDAYS)
        yield from problems
        # Each faulty field has already been reported, and its pattern never fires for the same
        # reason.
        if not problems and not self._can_happen():
            yield "none of its months has such a day, so it would never fire"

    def _can_happen(self) -> bool:
        if not isinstance(self.day, ByMonthDay | BothDays):
            return True
        first_day = values_of(self.day.day_of_month, MONTH_DAYS)[0]
        return any(
            first_day <= _LONGEST_MONTHS[month - 1] for month in values_of(self.month, MONTHS)
        )


def _selector(
    month_days: list[NumericTerm], weekdays: list[WeekdayTerm], days: Choice | None
) -> EveryDay | ByMonthDay | ByWeekday | EitherDay | BothDays:
    every = [CronEvery()]
    if every not in (month_days, weekdays):
        if days is None:
            problem = (
                'both day fields are restricted: add days="either", as in cron, or days="both"'
            )
            raise ExpressionProblem([problem])
        chosen = EitherDay if days == "either" else BothDays
        return chosen(day_of_month=month_days, day_of_week=weekdays)
    if month_days != every:
        return ByMonthDay(day_of_month=month_days)
    return EveryDay() if weekdays == every else ByWeekday(day_of_week=weekdays)


SchedulePattern: TypeAlias = Annotated[
    IntervalSchedule
    | HourlySchedule
    | DailySchedule
    | WeeklySchedule
    | MonthlySchedule
    | CronSchedule,
    Field(discriminator="type"),
]
"""One of the patterns for the times at which a schedule fires."""
