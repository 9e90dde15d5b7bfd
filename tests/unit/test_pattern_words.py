"""Patterns of schedules in words."""

from __future__ import annotations

from datetime import time, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.timetable.next_run import Timetable, timetable_of
from horsies.timetable.patterns import (
    CronSchedule,
    DailySchedule,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
    SchedulePattern,
    WeeklySchedule,
)
from horsies.timetable.terms import Weekday
from horsies.timetable.words import in_words
from tests.support.examples import examples

WORKDAYS = [Weekday.MONDAY, Weekday.TUESDAY, Weekday.WEDNESDAY, Weekday.THURSDAY, Weekday.FRIDAY]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (IntervalSchedule(seconds=30), "every 30 seconds"),
        (IntervalSchedule(hours=1), "every hour"),
        (IntervalSchedule(minutes=1, seconds=30), "every 1 minute and 30 seconds"),
        (IntervalSchedule(days=1, hours=2, minutes=3), "every 1 day, 2 hours and 3 minutes"),
        (HourlySchedule(minute=15), "every hour at :15"),
        (HourlySchedule(minute=5, second=30), "every hour at :05:30"),
        (DailySchedule(time=time(3)), "every day at 03:00"),
        (DailySchedule(time=time(3, 0, 5)), "every day at 03:00:05"),
        (WeeklySchedule(days=WORKDAYS, time=time(17)), "Monday to Friday at 17:00"),
        (
            WeeklySchedule(days=[Weekday.SUNDAY, Weekday.MONDAY], time=time(8)),
            "Monday and Sunday at 08:00",
        ),
        (MonthlySchedule(day=1, time=time(4)), "on the 1st of the month at 04:00"),
        (MonthlySchedule(day=22, time=time(4)), "on the 22nd of the month at 04:00"),
        (MonthlySchedule(day=-1, time=time(23)), "on the last day of the month at 23:00"),
    ],
)
def test_a_pattern_reads_as_a_sentence(pattern: SchedulePattern, words: str) -> None:
    assert in_words(pattern) == words


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("* * * * *", "every minute"),
        ("*/15 * * * *", "every 15 minutes"),
        ("*/15 8-18 * * mon-fri", "every 15 minutes from 08:00 to 18:45, Monday to Friday"),
        ("0 */4 * * *", "every day at 00:00, 04:00, 08:00, 12:00, 16:00 and 20:00"),
        ("0 */2 * * *", "every 2 hours at :00"),
        ("5,35 9-17 * * *", "every hour from 09 to 17 at :05 and :35"),
        ("30 2 * * *", "every day at 02:30"),
        ("0 9,17 1 * *", "on the 1st of the month at 09:00 and 17:00"),
        ("0 0 1-7 mar-may *", "on the 1st to 7th of the month in March to May at 00:00"),
        ("0 0 * jan,jul sat,sun", "Saturday and Sunday in January and July at 00:00"),
    ],
)
def test_a_cron_expression_reads_as_a_sentence(expression: str, words: str) -> None:
    assert in_words(CronSchedule.parse(expression)) == words


def test_two_day_fields_say_whether_one_or_both_must_match() -> None:
    either = CronSchedule.parse("0 9 13 * fri", days="either")
    both = CronSchedule.parse("0 9 13 * fri", days="both")
    assert in_words(either) == "on the 13th of the month or Friday at 09:00"
    assert in_words(both) == "on the 13th of the month if it is Friday at 09:00"


fields = st.sampled_from(["*", "*/2", "*/6", "0", "3", "1-5", "2,4", "1-3,7", "5-6"])
expressions = st.tuples(fields, fields, fields, fields, fields).map(
    lambda parts: " ".join(parts[:2] + tuple(_from_one(part) for part in parts[2:]))
)


def _from_one(field: str) -> str:
    return "1" if field == "0" else field


def _slots(expression: str) -> tuple[object, ...]:
    found = timetable_of(CronSchedule.parse(expression, days="both"))
    assert isinstance(found, Timetable)
    return found.hours, found.minutes, found.month_days, found.weekdays, found.months


@settings(max_examples=examples(100))
@given(expressions, expressions)
def test_different_slots_never_read_the_same(one: str, other: str) -> None:
    words = {in_words(CronSchedule.parse(text, days="both")) for text in (one, other)}
    assert len(words) == len({_slots(one), _slots(other)})


@given(st.integers(1, 90_000), st.integers(1, 90_000))
def test_different_intervals_never_read_the_same(one: int, other: int) -> None:
    words = {
        in_words(IntervalSchedule(days=seconds // 86_400 or None, seconds=seconds % 86_400 or None))
        for seconds in (one, other)
    }
    assert len(words) == len({timedelta(seconds=one), timedelta(seconds=other)})
