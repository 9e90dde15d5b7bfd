"""Patterns: accepted values, values refused with HRS-205, and the reading of cron expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta, timezone
from typing import Any

import pytest
from pydantic import TypeAdapter

from horsies.config.schedules import ScheduleConfig, TaskSchedule
from horsies.errors import ErrorCode, HorsiesError, InvalidFieldError, MultipleValidationErrors
from horsies.scheduler.timing import Timing
from horsies.timetable.patterns import (
    BothDays,
    ByMonthDay,
    ByWeekday,
    CronSchedule,
    DailySchedule,
    EitherDay,
    EveryDay,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
    SchedulePattern,
    WeeklySchedule,
)
from horsies.timetable.terms import (
    HOURS,
    MINUTES,
    MONTHS,
    WEEKDAYS,
    CronEnumRange,
    CronEnumStep,
    CronEnumValues,
    CronEvery,
    CronRange,
    CronStep,
    CronValues,
    Month,
    Weekday,
    values_of,
)

EVERY = [CronEvery()]


def problems(build: Callable[[], object]) -> list[str]:
    """The sentences of the HRS-205 errors that building this raises."""
    with pytest.raises(HorsiesError) as raised:
        build()
    error = raised.value
    errors = error.report.errors if isinstance(error, MultipleValidationErrors) else [error]
    assert {one.code for one in errors} == {ErrorCode.CONFIG_INVALID_SCHEDULE}
    return [one.message.partition(": ")[2] for one in errors]


def cron(**fields: Any) -> CronSchedule:
    return CronSchedule(**({"minute": EVERY, "hour": EVERY} | fields))


def test_the_fields_of_an_interval_are_added_up() -> None:
    pattern = IntervalSchedule(days=1, hours=2, minutes=3, seconds=4)
    assert pattern.total == timedelta(days=1, hours=2, minutes=3, seconds=4)
    assert problems(IntervalSchedule) == ["give at least one of seconds, minutes, hours and days"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: IntervalSchedule(seconds=0),
        lambda: IntervalSchedule(seconds=86_401),
        lambda: IntervalSchedule(minutes=1_441),
        lambda: IntervalSchedule(hours=169),
        lambda: IntervalSchedule(days=366),
        lambda: HourlySchedule(minute=60),
        lambda: HourlySchedule(minute=0, second=60),
        lambda: HourlySchedule(minute=0, hour=1),  # type: ignore[call-arg]
        lambda: CronStep(step=0),
        lambda: CronValues(values=[]),
        lambda: CronEnumValues[Month](values=[Weekday.MONDAY]),  # type: ignore[list-item]
        lambda: TaskSchedule(name="a", task_name="b", pattern=HourlySchedule(minute=1), tz="UTC"),  # type: ignore[call-arg]
        lambda: TaskSchedule(
            name="a", task_name="b", pattern=HourlySchedule(minute=1), max_catch_up_runs=10_001
        ),
        lambda: ScheduleConfig(check_interval_seconds=61),
    ],
)
def test_a_value_out_of_range_or_an_unknown_field_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(InvalidFieldError):
        build()


def test_a_week_needs_days_and_names_each_once() -> None:
    assert problems(lambda: WeeklySchedule(days=[], time=time(1))) == [
        "days needs at least one weekday"
    ]
    days = [Weekday.MONDAY, Weekday.MONDAY, Weekday.FRIDAY, Weekday.FRIDAY]
    assert problems(lambda: WeeklySchedule(days=days, time=time(1, tzinfo=UTC))) == [
        "days names monday more than once",
        "days names friday more than once",
        "time carries a time zone; name the zone in the schedule's timezone instead",
    ]


@pytest.mark.parametrize("day", [0, -2, 32])
def test_a_month_has_days_1_to_31_and_a_last_one(day: int) -> None:
    assert problems(lambda: MonthlySchedule(day=day, time=time(1))) == [
        f"day {day} is neither between 1 and 31 nor -1, the last day of the month"
    ]
    assert MonthlySchedule(day=-1, time=time(1)).day == -1


def test_a_time_of_day_is_on_a_whole_second() -> None:
    assert problems(lambda: DailySchedule(time=time(1, 2, 3, 4))) == [
        "time has microseconds; slots are on whole seconds"
    ]


def test_terms_are_united() -> None:
    terms: list[Any] = [
        CronStep(step=30),
        CronValues(values=[5, 5, 1]),
        CronRange(start=50, end=59, step=4),
    ]
    assert values_of(terms, MINUTES) == (0, 1, 5, 30, 50, 54, 58)
    assert values_of([CronEvery()], HOURS) == tuple(range(24))
    quarters: list[Any] = [CronEnumStep[Month](step=3), CronEnumValues(values=[Month.DECEMBER])]
    assert values_of(quarters, MONTHS) == (1, 4, 7, 10, 12)
    work: list[Any] = [CronEnumRange(start=Weekday.MONDAY, end=Weekday.FRIDAY, step=2)]
    assert values_of(work, WEEKDAYS) == (1, 3, 5)


def test_all_mistakes_of_a_cron_pattern_come_together() -> None:
    def build() -> CronSchedule:
        return CronSchedule(
            minute=[CronStep(step=60), CronValues(values=[0, 60, -1])],
            hour=[CronRange(start=22, end=2)],
            day=BothDays(
                day_of_month=[CronRange(start=0, end=40, step=31)],
                day_of_week=[CronEnumRange(start=Weekday.SATURDAY, end=Weekday.MONDAY)],
            ),
            month=[CronEnumStep[Month](step=12)],
        )

    assert problems(build) == [
        "minute step 60 is larger than 59, so only the first value matches",
        "minute 60 is not between 0 and 59",
        "minute -1 is not between 0 and 59",
        "hour range 22 to 2 ends before it starts; write two ranges to wrap around",
        "month step 12 is larger than 11, so only the first value matches",
        "day of month step 31 is larger than 30, so only the first value matches",
        "day of month 0 is not between 1 and 31",
        "day of month 40 is not between 1 and 31",
        "day of week range saturday to monday ends before it starts; write two ranges to wrap around",
    ]


@pytest.mark.parametrize("field", ["minute", "hour", "month"])
def test_a_field_needs_a_term(field: str) -> None:
    assert problems(lambda: cron(**{field: []})) == [f"{field} needs at least one term"]


def test_largest_steps_are_accepted() -> None:
    cron(
        minute=[CronStep(step=59)],
        hour=[CronStep(step=23)],
        month=[CronEnumStep(step=11)],
        day=BothDays(day_of_month=[CronStep(step=30)], day_of_week=[CronEnumStep(step=6)]),
    )


def test_a_day_that_never_comes_is_refused() -> None:
    never = ["none of its months has such a day, so it would never fire"]
    february: list[Any] = [CronEnumValues(values=[Month.FEBRUARY])]
    thirtieth: list[Any] = [CronRange(start=30, end=31)]
    friday: list[Any] = [CronEnumValues(values=[Weekday.FRIDAY])]
    by_date = ByMonthDay(day_of_month=thirtieth)
    both = BothDays(day_of_month=thirtieth, day_of_week=friday)
    assert problems(lambda: cron(month=february, day=by_date)) == never
    assert problems(lambda: cron(month=february, day=both)) == never
    cron(month=february, day=EitherDay(day_of_month=thirtieth, day_of_week=friday))
    cron(month=february, day=ByMonthDay(day_of_month=[CronValues(values=[29, 31])]))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", cron()),
        (
            "15 */4 * * *",
            cron(minute=[CronValues(values=[15])], hour=[CronStep(step=4)]),
        ),
        (
            "0,30 9-17 * * 1-5",
            cron(
                minute=[CronValues(values=[0, 30])],
                hour=[CronRange(start=9, end=17)],
                day=ByWeekday(
                    day_of_week=[CronEnumRange(start=Weekday.MONDAY, end=Weekday.FRIDAY)]
                ),
            ),
        ),
        (
            "5/15 0 1,15 jan-mar,dec *",
            cron(
                minute=[CronRange(start=5, end=50, step=15)],
                hour=[CronValues(values=[0])],
                day=ByMonthDay(day_of_month=[CronValues(values=[1, 15])]),
                month=[
                    CronEnumRange(start=Month.JANUARY, end=Month.MARCH),
                    CronEnumValues(values=[Month.DECEMBER]),
                ],
            ),
        ),
        (
            "0 0 * */3 SUN,6",
            cron(
                minute=[CronValues(values=[0])],
                hour=[CronValues(values=[0])],
                month=[CronEnumStep[Month](step=3)],
                day=ByWeekday(
                    day_of_week=[CronEnumValues(values=[Weekday.SATURDAY, Weekday.SUNDAY])]
                ),
            ),
        ),
        # Cron counts every second day from Sunday.
        (
            "* * * * */2",
            cron(
                day=ByWeekday(
                    day_of_week=[
                        CronEnumValues(
                            values=[
                                Weekday.TUESDAY,
                                Weekday.THURSDAY,
                                Weekday.SATURDAY,
                                Weekday.SUNDAY,
                            ]
                        )
                    ]
                )
            ),
        ),
        ("* *,5 * * 0,*", cron()),
    ],
)
def test_classic_expressions_become_typed_patterns(expression: str, expected: CronSchedule) -> None:
    assert CronSchedule.parse(expression) == expected


def test_months_keep_the_order_in_which_they_are_written() -> None:
    (term,) = CronSchedule.parse("0 9 * nov,3,mar *").month
    assert term == CronEnumValues[Month](values=[Month.NOVEMBER, Month.MARCH, Month.MARCH])


def test_two_restricted_day_fields_need_a_choice() -> None:
    month_days: list[Any] = [CronValues(values=[13])]
    weekdays: list[Any] = [CronEnumValues(values=[Weekday.FRIDAY])]
    either = CronSchedule.parse("0 9 13 * fri", days="either")
    assert either.day == EitherDay(day_of_month=month_days, day_of_week=weekdays)
    both = CronSchedule.parse("0 9 13 * 5", days="both")
    assert both.day == BothDays(day_of_month=month_days, day_of_week=weekdays)
    assert problems(lambda: CronSchedule.parse("0 9 13 * fri")) == [
        'both day fields are restricted: add days="either", as in cron, or days="both"'
    ]
    assert isinstance(CronSchedule.parse("0 9 * * *", days="both").day, EveryDay)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * *", "a cron expression has 5 fields separated by spaces, this one has 4"),
        ("0 * * * * *", "a cron expression has 5 fields separated by spaces, this one has 6"),
        ("", "a cron expression has 5 fields separated by spaces, this one has 0"),
        ("@daily", "a cron expression has 5 fields separated by spaces, this one has 1"),
        ("60 * * * *", "bad minute '60'"),
        ("* 5-1 * * *", "bad hour '5-1'"),
        ("* * * foo *", "bad month 'foo'"),
        ("1,,2 * * * *", "bad minute ''"),
        ("* * L * *", "'L' is an extension of cron that has no typed form"),
        ("* * * * mon#2", "'mon#2' is an extension of cron that has no typed form"),
        ("*/60 * * * *", "minute step 60 is larger than 59, so only the first value matches"),
        ("0 0 31 2 *", "none of its months has such a day, so it would never fire"),
    ],
)
def test_what_is_no_expression_is_refused(expression: str, expected: str) -> None:
    assert problems(lambda: CronSchedule.parse(expression)) == [expected]


def test_all_mistakes_of_an_expression_come_together() -> None:
    assert len(problems(lambda: CronSchedule.parse("61 24 32 13 8"))) == 5


@pytest.mark.parametrize(
    "pattern",
    [
        IntervalSchedule(seconds=5),
        HourlySchedule(minute=5),
        DailySchedule(time=time(1, 2, 3)),
        WeeklySchedule(days=[Weekday.SUNDAY], time=time(1)),
        MonthlySchedule(day=-1, time=time(1)),
        CronSchedule.parse("*/5 1-3 1,2 feb,3-5 sun", days="both"),
    ],
)
def test_a_pattern_survives_json(pattern: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(SchedulePattern)
    text = adapter.dump_json(pattern)
    assert adapter.validate_json(text) == pattern


def schedule(**fields: Any) -> TaskSchedule:
    pattern = HourlySchedule(minute=0)
    defaults: dict[str, Any] = {"name": "report", "task_name": "make", "pattern": pattern}
    return TaskSchedule(**(defaults | fields))


def test_a_schedule_that_contradicts_itself_is_refused_with_all_its_mistakes() -> None:
    naive = datetime(2026, 1, 1)
    build: Callable[[], object] = lambda: schedule(  # noqa: E731
        name=" ", catch_up_missed=True, overlap="skip", start_at=naive, end_at=naive
    )
    assert problems(build) == [
        "name must be a text of 1 to 255 printable characters",
        'catch_up_missed contradicts overlap="skip"; use overlap="queue"',
        "start_at has no time zone; write datetime(..., tzinfo=UTC)",
        "end_at has no time zone; write datetime(..., tzinfo=UTC)",
    ]
    start = datetime(2026, 1, 2, tzinfo=UTC)
    ends_early = {"start_at": start, "end_at": start - timedelta(days=1)}
    assert problems(lambda: schedule(**ends_early)) == ["end_at is before start_at"]


@pytest.mark.parametrize("field", ["misfire_grace_seconds", "good_for_seconds"])
@pytest.mark.parametrize("seconds", [math.inf, math.nan, 3_162_240_001, 1e12])
def test_times_no_calendar_can_count_are_refused(field: str, seconds: float) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        schedule(**{field: seconds})
    assert getattr(schedule(**{field: 3_162_240_000}), field) == 3_162_240_000


WEST, EAST = timezone(timedelta(hours=-5)), timezone(timedelta(hours=5))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"start_at": datetime.min.replace(tzinfo=UTC)}, "start_at must be in the years 2 to 9000"),
        (
            {"start_at": datetime.min.replace(tzinfo=EAST)},
            "start_at must be in the years 2 to 9000",
        ),
        ({"start_at": datetime.max.replace(tzinfo=UTC)}, "start_at must be in the years 2 to 9000"),
        ({"end_at": datetime.max.replace(tzinfo=WEST)}, "end_at must be in the years 2 to 9999"),
        ({"end_at": datetime.min.replace(tzinfo=EAST)}, "end_at must be in the years 2 to 9999"),
    ],
)
def test_timestamps_at_the_ends_of_the_calendar_are_refused(
    fields: dict[str, datetime], problem: str
) -> None:
    assert problems(lambda: schedule(**fields)) == [f"{problem}, counted in UTC"]


def test_timestamps_near_the_ends_of_the_calendar_can_be_used() -> None:
    early, late = datetime(2, 1, 1, tzinfo=UTC), datetime(9000, 12, 31, 23, 59, tzinfo=UTC)
    never = datetime.max.replace(tzinfo=UTC)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for pattern in (HourlySchedule(minute=0), IntervalSchedule(days=365)):
        for zone in ("Pacific/Kiritimati", "Pacific/Midway"):
            one = {"pattern": pattern, "timezone": zone, "end_at": never}
            first = Timing.of(schedule(**one, start_at=early)).first_after(now)
            assert first is not None
            assert now < first <= now + timedelta(days=366)
            last = Timing.of(schedule(**one, start_at=late)).first_after(now)
            assert last is not None
            assert last + timedelta(seconds=3_162_240_000) < never


def test_a_task_may_start_before_it_expires() -> None:
    assert problems(lambda: schedule(jitter_seconds=60, good_for_seconds=60)) == [
        "jitter_seconds must be below good_for_seconds, or tasks expire before they may start"
    ]
    schedule(jitter_seconds=59, good_for_seconds=60)


def test_the_names_of_schedules_are_unique() -> None:
    twice = [schedule(), schedule(), schedule(name="other")]
    assert problems(lambda: ScheduleConfig(schedules=twice)) == ["the name 'report' is used twice"]


def test_arguments_are_not_shown() -> None:
    secret = schedule(args=("hunter2",), kwargs={"password": "hunter3"})
    assert "hunter" not in repr(secret) + str(secret) + repr(ScheduleConfig(schedules=[secret]))


@pytest.mark.parametrize("pattern", ["* * * * *", timedelta(hours=1), 30, None, DailySchedule])
def test_a_schedule_names_the_patterns_it_takes(pattern: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        TaskSchedule(name="nightly", task_name="report", pattern=pattern)
    assert caught.value.message == (
        "TaskSchedule.pattern must be one of IntervalSchedule, HourlySchedule, DailySchedule, "
        "WeeklySchedule, MonthlySchedule, CronSchedule."
    )


@pytest.mark.parametrize(
    ("model", "shown"),
    [(IntervalSchedule, "IntervalSchedule(seconds=...)"), (EveryDay, "EveryDay()")],
)
def test_a_value_without_a_name_is_answered_with_a_field_to_set(
    model: Callable[[object], object], shown: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        model(30)
    assert caught.value.message.endswith(f"takes its fields by name; write {shown}.")
