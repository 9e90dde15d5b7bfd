"""Exact slots: listed around the clock changes of 2026, and found the slow way."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horsies.timetable.next_run import GapRule, calculate_next_run
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
    WeeklySchedule,
)
from horsies.timetable.terms import (
    CronEnumRange,
    CronEnumStep,
    CronEnumValues,
    CronEvery,
    CronRange,
    CronStep,
    CronValues,
    Month,
    Weekday,
)
from tests.support import slot_oracle
from tests.support.examples import examples

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def utc(text: str) -> datetime:
    """A timestamp of 2026 in UTC, written as month, day and time."""
    return datetime.strptime(f"2026-{text}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)


def runs(pattern: Any, since: str, count: int, zone: str, gap: GapRule = "skip") -> list[str]:
    """The next slots after a timestamp, in UTC."""
    at, found = utc(since), []
    for _ in range(count):
        at = calculate_next_run(pattern, at, zone, gap)
        assert at.utcoffset() == timedelta()
        found.append(at.strftime("%m-%d %H:%M"))
    return found


AT_0230 = DailySchedule(time=time(2, 30))
AT_0130 = DailySchedule(time=time(1, 30))
PATTERNS: dict[str, Any] = {
    "every hour": IntervalSchedule(hours=1),
    "every 90 min": IntervalSchedule(minutes=90),
    "hourly :30": HourlySchedule(minute=30),
    "daily 02:30": AT_0230,
    "daily 01:30": AT_0130,
    "sundays 02:30": WeeklySchedule(days=[Weekday.SUNDAY], time=time(2, 30)),
    "sundays 01:30": WeeklySchedule(days=[Weekday.SUNDAY], time=time(1, 30)),
    "on the 29th": MonthlySchedule(day=29, time=time(2, 30)),
    "on the 25th": MonthlySchedule(day=25, time=time(2, 30)),
    "on the 8th": MonthlySchedule(day=8, time=time(2, 30)),
    "on the 1st": MonthlySchedule(day=1, time=time(1, 30)),
    "last day": MonthlySchedule(day=-1, time=time(1, 30)),
    "*/20 *": CronSchedule.parse("*/20 * * * *"),
    "30 */2": CronSchedule.parse("30 */2 * * *"),
    "30 */1": CronSchedule.parse("30 */1 * * *"),
    "30 1,2,3": CronSchedule.parse("30 1,2,3 * * *"),
}
# Moments of 2026 in UTC: the one asked about, and the slots that follow it.
# 02:30 does not exist in Berlin on 29 March, when the clock leaps from 02:00 to 03:00 at 01:00 UTC.
BERLIN_SPRING = """
every hour    | skip  | 03-29 00:15 | 03-29 01:15, 03-29 02:15, 03-29 03:15
hourly :30    | skip  | 03-28 23:30 | 03-29 00:30, 03-29 01:30, 03-29 02:30
daily 02:30   | skip  | 03-27 12:00 | 03-28 01:30, 03-30 00:30, 03-31 00:30
daily 02:30   | shift | 03-27 12:00 | 03-28 01:30, 03-29 01:00, 03-30 00:30
sundays 02:30 | skip  | 03-20 00:00 | 03-22 01:30, 04-05 00:30, 04-12 00:30
sundays 02:30 | shift | 03-20 00:00 | 03-22 01:30, 03-29 01:00, 04-05 00:30
on the 29th   | skip  | 01-01 00:00 | 01-29 01:30, 04-29 00:30
on the 29th   | shift | 01-01 00:00 | 01-29 01:30, 03-29 01:00, 04-29 00:30
*/20 *        | skip  | 03-29 00:30 | 03-29 00:40, 03-29 01:00, 03-29 01:20
*/20 *        | shift | 03-29 00:30 | 03-29 00:40, 03-29 01:00, 03-29 01:20
30 */2        | skip  | 03-28 22:00 | 03-28 23:30, 03-29 02:30, 03-29 04:30
30 */2        | shift | 03-28 22:00 | 03-28 23:30, 03-29 01:00, 03-29 02:30
30 1,2,3      | skip  | 03-29 00:00 | 03-29 00:30, 03-29 01:30, 03-29 23:30
30 1,2,3      | shift | 03-29 00:00 | 03-29 00:30, 03-29 01:00, 03-29 01:30
"""
# 02:30 happens at 00:30 and again at 01:30 UTC in Berlin on 25 October.
BERLIN_AUTUMN = """
every hour    | skip  | 10-25 00:15 | 10-25 01:15, 10-25 02:15, 10-25 03:15
hourly :30    | skip  | 10-24 23:30 | 10-25 00:30, 10-25 01:30, 10-25 02:30
daily 02:30   | skip  | 10-23 12:00 | 10-24 00:30, 10-25 00:30, 10-26 01:30
daily 02:30   | shift | 10-23 12:00 | 10-24 00:30, 10-25 00:30, 10-26 01:30
daily 02:30   | skip  | 10-25 01:00 | 10-26 01:30
sundays 02:30 | skip  | 10-12 00:00 | 10-18 00:30, 10-25 00:30, 11-01 01:30
on the 25th   | skip  | 09-01 00:00 | 09-25 00:30, 10-25 00:30, 11-25 01:30
*/20 *        | skip  | 10-25 00:30 | 10-25 00:40, 10-25 01:00, 10-25 01:20, 10-25 01:40, 10-25 02:00
30 */2        | skip  | 10-24 22:00 | 10-24 22:30, 10-25 00:30, 10-25 01:30, 10-25 03:30
30 1,2,3      | skip  | 10-24 23:00 | 10-24 23:30, 10-25 00:30, 10-25 02:30, 10-26 00:30
"""
# 02:30 does not exist in New York on 8 March, when the clock leaps to 03:00 at 07:00 UTC.
NEW_YORK_SPRING = """
every 90 min  | skip  | 03-08 06:00 | 03-08 07:30, 03-08 09:00
hourly :30    | skip  | 03-08 05:30 | 03-08 06:30, 03-08 07:30, 03-08 08:30
daily 02:30   | skip  | 03-07 00:00 | 03-07 07:30, 03-09 06:30, 03-10 06:30
daily 02:30   | shift | 03-07 00:00 | 03-07 07:30, 03-08 07:00, 03-09 06:30
sundays 02:30 | skip  | 02-27 00:00 | 03-01 07:30, 03-15 06:30
sundays 02:30 | shift | 02-27 00:00 | 03-01 07:30, 03-08 07:00, 03-15 06:30
on the 8th    | skip  | 02-01 00:00 | 02-08 07:30, 04-08 06:30
*/20 *        | skip  | 03-08 06:30 | 03-08 06:40, 03-08 07:00, 03-08 07:20
30 */2        | skip  | 03-08 05:00 | 03-08 05:30, 03-08 08:30, 03-08 10:30
30 1,2,3      | skip  | 03-08 06:00 | 03-08 06:30, 03-08 07:30, 03-09 05:30
"""
# 01:30 happens at 05:30 and again at 06:30 UTC in New York on 1 November.
NEW_YORK_AUTUMN = """
every 90 min  | skip  | 11-01 05:00 | 11-01 06:30, 11-01 08:00
hourly :30    | skip  | 11-01 04:30 | 11-01 05:30, 11-01 06:30, 11-01 07:30
daily 01:30   | skip  | 10-31 00:00 | 10-31 05:30, 11-01 05:30, 11-02 06:30
daily 01:30   | skip  | 11-01 06:00 | 11-02 06:30
sundays 01:30 | skip  | 10-24 12:00 | 10-25 05:30, 11-01 05:30, 11-08 06:30
on the 1st    | skip  | 09-15 00:00 | 10-01 05:30, 11-01 05:30, 12-01 06:30
last day      | skip  | 09-15 00:00 | 09-30 05:30, 10-31 05:30, 11-30 06:30
*/20 *        | skip  | 11-01 05:30 | 11-01 05:40, 11-01 06:00, 11-01 06:20, 11-01 06:40, 11-01 07:00
30 */1        | skip  | 11-01 04:30 | 11-01 05:30, 11-01 06:30, 11-01 07:30
30 1,2,3      | skip  | 11-01 04:00 | 11-01 05:30, 11-01 07:30, 11-01 08:30, 11-02 06:30
"""


def read_table(zone: str, table: str) -> list[Any]:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return [
        pytest.param(
            zone,
            gap,
            PATTERNS[name],
            since,
            slots.split(", "),
            id=f"{zone}, {name}, {gap}, {since}",
        )
        for name, gap, since, slots in rows
    ]


TABLES = [
    *read_table(BERLIN, BERLIN_SPRING),
    *read_table(BERLIN, BERLIN_AUTUMN),
    *read_table(NEW_YORK, NEW_YORK_SPRING),
    *read_table(NEW_YORK, NEW_YORK_AUTUMN),
]


@pytest.mark.parametrize(("zone", "gap", "pattern", "since", "expected"), TABLES)
def test_the_slots_around_the_clock_changes_of_2026_are_exactly_these(
    zone: str, gap: GapRule, pattern: Any, since: str, expected: list[str]
) -> None:
    assert runs(pattern, since, len(expected), zone, gap) == expected


@pytest.mark.parametrize(("zone", "gap", "pattern", "since", "expected"), TABLES)
def test_the_tables_agree_with_a_look_at_every_minute(
    zone: str, gap: GapRule, pattern: Any, since: str, expected: list[str]
) -> None:
    if isinstance(pattern, IntervalSchedule):
        step = pattern.total
        found = [utc(since) + (number + 1) * step for number in range(len(expected))]
    else:
        found = slot_oracle.slots(pattern, utc(since), utc(expected[-1]), zone, gap)
    assert [slot.strftime("%m-%d %H:%M") for slot in found] == expected


def test_a_gap_is_skipped_a_repeat_fires_once_and_hourly_patterns_go_on() -> None:
    new_york_2025 = datetime(2025, 3, 9, tzinfo=UTC)
    skipped = calculate_next_run(AT_0230, new_york_2025, NEW_YORK)
    assert skipped == datetime(2025, 3, 10, 6, 30, tzinfo=UTC)
    once = calculate_next_run(AT_0130, datetime(2025, 11, 2, tzinfo=UTC), NEW_YORK)
    assert once == datetime(2025, 11, 2, 5, 30, tzinfo=UTC)
    # Begun after the only pass that counts: tomorrow, never a slot that has passed.
    late = calculate_next_run(AT_0130, datetime(2025, 11, 2, 6, tzinfo=UTC), NEW_YORK)
    assert late == datetime(2025, 11, 3, 6, 30, tzinfo=UTC)
    half_past = HourlySchedule(minute=30)
    again = calculate_next_run(half_past, datetime(2025, 11, 2, 5, 30, tzinfo=UTC), NEW_YORK)
    assert again == datetime(2025, 11, 2, 6, 30, tzinfo=UTC)
    every_minute = CronSchedule.parse("* * * * *")
    at = datetime(2025, 11, 2, 5, 58, tzinfo=UTC)
    for _ in range(130):
        following = calculate_next_run(every_minute, at, NEW_YORK)
        assert following - at == timedelta(minutes=1)
        at = following


def test_ordinary_days() -> None:
    assert runs(HourlySchedule(minute=30), "06-01 14:45", 1, "UTC") == ["06-01 15:30"]
    assert runs(MonthlySchedule(day=31, time=time(0)), "02-01 00:00", 2, "UTC") == [
        "03-31 00:00",
        "05-31 00:00",
    ]
    monday = WeeklySchedule(days=[Weekday.MONDAY], time=time(17))
    assert runs(monday, "06-01 18:00", 1, "UTC") == ["06-08 17:00"]
    assert runs(monday, "06-01 16:59", 1, "UTC") == ["06-01 17:00"]
    assert runs(MonthlySchedule(day=-1, time=time(12)), "01-31 12:00", 3, "UTC") == [
        "02-28 12:00",
        "03-31 12:00",
        "04-30 12:00",
    ]


def test_a_slot_is_not_its_own_successor_and_parts_of_a_second_count() -> None:
    at_noon = DailySchedule(time=time(12, 0, 5))
    noon = datetime(2026, 6, 1, 12, 0, 5, tzinfo=UTC)
    instant = timedelta(microseconds=1)
    assert calculate_next_run(at_noon, noon - instant, "UTC") == noon
    assert calculate_next_run(at_noon, noon, "UTC") == noon + timedelta(days=1)
    assert calculate_next_run(at_noon, noon + instant, "UTC") == noon + timedelta(days=1)


def test_any_zone_may_be_asked_in_any_zone() -> None:
    asked = datetime.fromisoformat("2026-06-01T14:45:00+05:30")
    assert calculate_next_run(HourlySchedule(minute=30), asked, "UTC") == utc("06-01 09:30")


def test_a_leap_day_on_a_weekday_is_found_decades_ahead() -> None:
    pattern = CronSchedule.parse("0 0 29 2 mon", days="both")
    found = calculate_next_run(pattern, datetime(2072, 3, 1, tzinfo=UTC), "UTC")
    assert found == datetime(2112, 2, 29, tzinfo=UTC)
    assert found.weekday() == 0


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "", "../etc/passwd", "Berlin\0"])
def test_an_unknown_zone_is_a_value_error(zone: str) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        calculate_next_run(AT_0130, utc("01-01 00:00"), zone)


def test_a_naive_time_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="from_time has no time zone"):
        calculate_next_run(AT_0130, datetime(2026, 1, 1), "UTC")


def test_a_time_that_never_comes_is_a_value_error() -> None:
    # The second Sunday of March is when New York leaps over 02:30, for ever by today's rules.
    pattern = CronSchedule.parse("30 2 8-14 3 sun", days="both")
    with pytest.raises(ValueError, match="never fires"):
        calculate_next_run(pattern, utc("01-01 00:00"), NEW_YORK)
    shifted = calculate_next_run(pattern, utc("01-01 00:00"), NEW_YORK, "shift")
    assert shifted == utc("03-08 07:00")


def test_a_day_that_a_country_left_out_is_skipped() -> None:
    # Samoa had no 30 December 2011.
    before = datetime(2011, 12, 29, 12, tzinfo=UTC)
    at_noon = DailySchedule(time=time(12))
    first = calculate_next_run(at_noon, before, "Pacific/Apia")
    assert first == datetime(2011, 12, 29, 22, tzinfo=UTC)
    assert calculate_next_run(at_noon, first, "Pacific/Apia") == first + timedelta(days=1)
    shifted = calculate_next_run(at_noon, first, "Pacific/Apia", "shift")
    assert shifted == datetime(2011, 12, 30, 10, tzinfo=UTC)


ZONES = [
    "UTC",
    BERLIN,
    NEW_YORK,
    "Australia/Lord_Howe",  # half an hour
    "America/Santiago",  # at midnight
    "Africa/Cairo",
    "America/St_Johns",
    "Asia/Kolkata",
]
TIMES = st.builds(time, st.integers(0, 23), st.integers(0, 59), st.sampled_from([0, 0, 17]))
RANGES = st.tuples(st.integers(0, 23), st.integers(0, 23)).map(sorted)
NAMED = st.sampled_from([Weekday, Month])


def numeric_terms(low: int, high: int) -> st.SearchStrategy[list[Any]]:
    number = st.integers(low, high)
    step = st.integers(1, high - low)
    term = st.one_of(
        st.just(CronEvery()),
        st.builds(CronStep, step=step),
        st.builds(CronValues, values=st.lists(number, min_size=1, max_size=5)),
        st.builds(
            lambda ends, step: CronRange(start=min(ends), end=max(ends), step=step),
            st.tuples(number, number),
            step,
        ),
    )
    return st.lists(term, min_size=1, max_size=3)


def enum_terms(kind: Any) -> st.SearchStrategy[list[Any]]:
    names = list(kind)
    step = st.integers(1, len(names) - 1)
    place = st.integers(0, len(names) - 1)
    term = st.one_of(
        st.just(CronEvery()),
        st.builds(CronEnumStep[kind], step=step),
        st.builds(CronEnumValues[kind], values=st.lists(st.sampled_from(names), min_size=1)),
        st.builds(
            lambda ends, step: CronEnumRange[kind](
                start=names[min(ends)], end=names[max(ends)], step=step
            ),
            st.tuples(place, place),
            step,
        ),
    )
    return st.lists(term, min_size=1, max_size=2)


MONTH_DAY, WEEK_DAY = numeric_terms(1, 31), enum_terms(Weekday)
DAYS = st.one_of(
    st.just(EveryDay()),
    st.builds(ByMonthDay, day_of_month=MONTH_DAY),
    st.builds(ByWeekday, day_of_week=WEEK_DAY),
    st.builds(EitherDay, day_of_month=MONTH_DAY, day_of_week=WEEK_DAY),
    st.builds(BothDays, day_of_month=MONTH_DAY, day_of_week=WEEK_DAY),
)


@st.composite
def crons(draw: st.DrawFn) -> CronSchedule:
    try:
        return CronSchedule(
            minute=draw(numeric_terms(0, 59)),
            hour=draw(numeric_terms(0, 23)),
            day=draw(DAYS),
            month=draw(enum_terms(Month)),
        )
    except Exception:  # a day that none of the months has
        assume(False)
        raise


WALL_PATTERNS = st.one_of(
    st.builds(HourlySchedule, minute=st.integers(0, 59), second=st.sampled_from([0, 17])),
    st.builds(DailySchedule, time=TIMES),
    st.builds(
        WeeklySchedule,
        days=st.lists(st.sampled_from(list(Weekday)), min_size=1, unique=True),
        time=TIMES,
    ),
    st.builds(MonthlySchedule, day=st.sampled_from([-1, 1, 8, 25, 28, 29, 30, 31]), time=TIMES),
    crons(),
)
CHANGES = [
    utc("03-29 01:00"),
    utc("10-25 01:00"),
    utc("03-08 07:00"),
    utc("11-01 06:00"),
    utc("04-04 15:00"),
    utc("10-03 15:30"),
    utc("04-05 03:00"),
    utc("09-06 04:00"),
    utc("04-23 22:00"),
    utc("10-29 21:00"),
]
MOMENTS = st.builds(
    lambda change, minutes, microseconds: (
        change + timedelta(minutes=minutes, microseconds=microseconds)
    ),
    st.sampled_from(CHANGES),
    st.integers(-26 * 60, 3 * 60),
    st.sampled_from([0, 1, 17_000_000, 59_999_999]),
)


@settings(max_examples=examples(150), deadline=None)
@given(WALL_PATTERNS, MOMENTS, st.sampled_from(ZONES), st.sampled_from(["skip", "shift"]))
def test_the_next_slot_is_the_first_that_a_look_at_every_minute_finds(
    pattern: Any, at: datetime, zone: str, gap: GapRule
) -> None:
    until = at + timedelta(hours=26)
    expected = slot_oracle.slots(pattern, at, until, zone, gap)
    try:
        found = calculate_next_run(pattern, at, zone, gap)
    except ValueError:
        assert expected == []
        return
    assert found > at
    assert found.utcoffset() == timedelta()
    if expected:
        assert found == expected[0]
    else:
        assert found > until


@settings(max_examples=examples(50), deadline=None)
@given(WALL_PATTERNS, st.sampled_from(CHANGES), st.sampled_from(ZONES))
def test_walking_from_slot_to_slot_meets_all_of_them(
    pattern: Any, change: datetime, zone: str
) -> None:
    since, until = change - timedelta(hours=4), change + timedelta(hours=5)
    walked, at = [], since
    while True:
        try:
            at = calculate_next_run(pattern, at, zone)
        except ValueError:
            break
        if at > until:
            break
        walked.append(at)
    assert walked == slot_oracle.slots(pattern, since, until, zone)


@given(st.integers(1, 86_400), MOMENTS, st.sampled_from(ZONES))
def test_an_interval_is_elapsed_time_in_every_zone(seconds: int, at: datetime, zone: str) -> None:
    pattern = IntervalSchedule(seconds=seconds)
    assert calculate_next_run(pattern, at, zone) == at + timedelta(seconds=seconds)
