"""Patterns as the line that a person types, and back."""

from __future__ import annotations

from datetime import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.errors import HorsiesError
from horsies.timetable.next_run import timetable_of
from horsies.timetable.patterns import (
    CronSchedule,
    DailySchedule,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
    SchedulePattern,
    WeeklySchedule,
)
from horsies.timetable.terms import CronEnumStep, Month, Weekday
from horsies.timetable.texts import pattern_text, read_pattern
from tests.support.examples import examples

times = st.times().map(lambda at: at.replace(microsecond=0))
fields = st.sampled_from(["*", "*/2", "*/6", "3", "1-5", "2,4", "1-3,7", "2-6/2"])
patterns: st.SearchStrategy[SchedulePattern] = st.one_of(
    st.builds(IntervalSchedule, seconds=st.integers(1, 86_400)),
    st.builds(IntervalSchedule, days=st.integers(1, 9), minutes=st.integers(1, 1_440)),
    st.builds(HourlySchedule, minute=st.integers(0, 59), second=st.integers(0, 59)),
    st.builds(DailySchedule, time=times),
    st.builds(
        WeeklySchedule,
        days=st.lists(st.sampled_from(Weekday), min_size=1, unique=True),
        time=times,
    ),
    st.builds(MonthlySchedule, day=st.sampled_from([-1, *range(1, 32)]), time=times),
    st.builds(
        lambda parts, days: CronSchedule.parse(" ".join(parts), days=days),
        st.tuples(fields, fields, fields, fields, fields),
        st.sampled_from(["either", "both"]),
    ),
)


@settings(max_examples=examples(200))
@given(patterns)
def test_a_written_pattern_is_read_with_the_same_slots(pattern: SchedulePattern) -> None:
    assert timetable_of(read_pattern(pattern_text(pattern))) == timetable_of(pattern)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("every 90s", IntervalSchedule(seconds=90)),
        ("Every 1h30m", IntervalSchedule(hours=1, minutes=30)),
        ("every  minute", IntervalSchedule(minutes=1)),
        ("every day at 3:00", DailySchedule(time=time(3))),
        ("mon to wed and Fridays at 09:30", None),
        ("0 9 13 * fri both", CronSchedule.parse("0 9 13 * fri", days="both")),
    ],
)
def test_a_line_is_read_as_it_is_typed(text: str, pattern: SchedulePattern | None) -> None:
    days = [Weekday.MONDAY, Weekday.TUESDAY, Weekday.WEDNESDAY, Weekday.FRIDAY]
    assert read_pattern(text) == (pattern or WeeklySchedule(days=days, time=time(9, 30)))


def test_steps_of_months_and_weekdays_keep_their_slots() -> None:
    by_step = CronSchedule.parse("0 0 * * *").model_copy(
        update={"month": [CronEnumStep[Month](step=5)]}
    )
    assert pattern_text(by_step) == "0 0 * */5 *"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "none of these forms: every 90 seconds"),
        ("sometimes", "none of these forms"),
        ("someday at 03:00", "none of these forms"),
        ("every day at 25:00", "no such time of day"),
        ("every 0 seconds", "seconds"),
        ("on the 32nd of the month at 04:00", "day 32"),
        ("61 * * * *", "61"),
        ("0 9 13 * fri", 'end it with "either", as in cron, or with "both"'),
        ("0 9 13 * fri maybe", "sixth word"),
        ("0 0 30 2 *", "never fire"),
    ],
)
def test_a_line_that_is_no_pattern_gets_a_sentence(text: str, problem: str) -> None:
    with pytest.raises(HorsiesError) as raised:
        read_pattern(text)
    assert problem in str(raised.value)
