"""Decisions: which slots of a due schedule fire, by example and against a plain list of slots."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.config.schedules import TaskSchedule
from horsies.scheduler.decide import Decision, DueState, SkipReason, decide
from horsies.scheduler.timing import Timing, TimingFields, config_hash, timing_json
from horsies.timetable.patterns import (
    CronSchedule,
    DailySchedule,
    HourlySchedule,
    IntervalSchedule,
    MonthlySchedule,
)
from tests.support.examples import examples

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
EVERY_5_SECONDS = IntervalSchedule(seconds=5)


def schedule(**fields: Any) -> TaskSchedule:
    defaults: dict[str, Any] = {"name": "report", "task_name": "make", "pattern": EVERY_5_SECONDS}
    return TaskSchedule(**(defaults | fields))


def decided(late_seconds: float, *, runs_max: int = 1_000, **fields: Any) -> Decision | None:
    """The decision about a schedule that was due at noon and is served this many seconds later."""
    standing = {
        name: fields.pop(name) for name in ("is_unfinished", "resumed_at") if name in fields
    }
    one = schedule(**fields)
    now = NOON + timedelta(seconds=late_seconds)
    return decide(one, Timing.of(one), DueState(NOON, now, **standing), runs_max)


def seconds(decision: Decision | None) -> tuple[list[float], float | None]:
    """The fired slots and the next one, as seconds after noon."""
    assert decision is not None
    fired = [(slot - NOON).total_seconds() for slot in decision.fire]
    following = decision.next_run_at
    return fired, None if following is None else (following - NOON).total_seconds()


def test_a_slot_met_in_time_fires_alone_and_drops_nothing() -> None:
    for catch_up in (True, False):
        decision = decided(0, catch_up_missed=catch_up)
        assert seconds(decision) == ([0], 5)
        assert decision is not None
        assert decision.dropped is None


def test_without_catch_up_the_latest_due_slot_fires_not_none_and_not_the_oldest() -> None:
    decision = decided(17)
    assert seconds(decision) == ([15], 20)
    assert decision is not None
    assert decision.dropped is not None
    assert decision.dropped.reason is SkipReason.MISSED
    assert (decision.dropped.first, decision.dropped.before) == (NOON, NOON + 15 * SECOND)


def test_catch_up_begins_with_the_first_due_slot() -> None:
    assert seconds(decided(17, catch_up_missed=True)) == ([0, 5, 10, 15], 20)


def test_catch_up_goes_on_in_later_ticks_where_it_was_cut() -> None:
    assert seconds(decided(17, catch_up_missed=True, max_catch_up_runs=3)) == ([0, 5, 10], 15)
    assert seconds(decided(17, catch_up_missed=True, runs_max=1)) == ([0], 5)


def test_slots_older_than_the_grace_are_dropped() -> None:
    decision = decided(17, catch_up_missed=True, misfire_grace_seconds=7)
    assert seconds(decision) == ([10, 15], 20)
    assert decision is not None
    assert decision.dropped is not None
    assert decision.dropped.reason is SkipReason.MISFIRE
    # Nothing but old slots: none fires, the schedule goes on.
    assert seconds(decided(17, misfire_grace_seconds=1)) == ([], 20)
    assert seconds(decided(17, misfire_grace_seconds=2)) == ([15], 20)
    # A hundred years are the most, and nothing is older.
    assert seconds(decided(17, misfire_grace_seconds=3_162_240_000)) == ([15], 20)


@pytest.mark.parametrize("late", [0, 17])
def test_an_unfinished_task_is_overtaken_awaited_or_given_way_to(late: int) -> None:
    latest = 5 * (late // 5)
    assert seconds(decided(late, is_unfinished=True)) == ([latest], latest + 5)
    assert decided(late, is_unfinished=True, overlap="queue") is None
    skipped = decided(late, is_unfinished=True, overlap="skip")
    assert seconds(skipped) == ([], latest + 5)
    assert skipped is not None
    assert skipped.dropped is not None
    assert skipped.dropped.reason is SkipReason.OVERLAP


def test_a_queueing_schedule_fires_one_slot_at_a_time() -> None:
    assert seconds(decided(17, overlap="queue")) == ([15], 20)
    assert seconds(decided(17, overlap="queue", catch_up_missed=True)) == ([0], 5)


def test_slots_of_a_pause_are_dropped_unless_none_may_be_missed() -> None:
    resumed_at = NOON + 16 * SECOND
    decision = decided(17, resumed_at=resumed_at)
    assert seconds(decision) == ([], 20)
    assert decision is not None
    assert decision.dropped is not None
    assert decision.dropped.reason is SkipReason.PAUSED
    assert seconds(decided(22, resumed_at=resumed_at)) == ([20], 25)
    caught_up = decided(17, resumed_at=resumed_at, catch_up_missed=True)
    assert seconds(caught_up) == ([0, 5, 10, 15], 20)
    assert seconds(decided(2, resumed_at=NOON - SECOND)) == ([0], 5)


def test_after_its_end_a_schedule_has_no_next_slot() -> None:
    end_at = NOON + 10 * SECOND
    assert seconds(decided(17, end_at=end_at)) == ([10], None)
    assert seconds(decided(17, end_at=end_at, catch_up_missed=True)) == ([0, 5, 10], None)
    assert seconds(decided(17, end_at=end_at, misfire_grace_seconds=1)) == ([], None)


def test_a_year_of_missed_minutes_costs_nothing_to_skip() -> None:
    one = schedule(pattern=CronSchedule.parse("* * * * *"), timezone="Europe/Berlin")
    standing = DueState(NOON, NOON + timedelta(days=365, seconds=30))
    decision = decide(one, Timing.of(one), standing, 1_000)
    assert decision is not None
    assert decision.fire == (NOON + timedelta(days=365),)


WALL = st.sampled_from(
    [
        HourlySchedule(minute=17),
        DailySchedule(time=time(2, 30)),
        MonthlySchedule(day=31, time=time(12)),
        CronSchedule.parse("*/7 0-11 * * *"),
        CronSchedule.parse("0 */5 * * mon"),
    ]
)
ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.one_of(WALL, st.builds(IntervalSchedule, seconds=st.integers(600, 86_400))),
    ZONES,
    st.datetimes(datetime(2026, 3, 1), datetime(2026, 11, 5), timezones=st.just(UTC)),
    st.floats(0, 30),
    st.floats(0, 10),
)
def test_jumping_over_slots_ends_where_walking_would(
    pattern: Any, zone: str, start: datetime, late_days: float, cut_days: float
) -> None:
    timing = Timing.of(TimingFields(pattern=pattern, timezone=zone))
    due = timing.first_after(start)
    assert due is not None
    now, cutoff = due + timedelta(days=late_days), due + timedelta(days=cut_days)
    walked = []
    for slot in timing.slots_from(due):
        walked.append(slot)
        if slot > max(now, cutoff):
            break
    assert timing.latest(due, now) == max(slot for slot in walked if slot <= now)
    assert timing.since(due, cutoff) == min(slot for slot in walked if slot >= cutoff)


def test_an_interval_counts_from_its_start() -> None:
    start_at = NOON - timedelta(seconds=12)
    counted = Timing.of(schedule(start_at=start_at))
    assert counted.first_after(NOON) == NOON + 3 * SECOND
    assert counted.first_after(start_at - SECOND) == start_at
    assert counted.first_after(start_at) == start_at + 5 * SECOND
    assert Timing.of(schedule()).first_after(NOON) == NOON + 5 * SECOND


def test_a_wall_clock_schedule_begins_at_its_start_and_stops_at_its_end() -> None:
    noon_daily: dict[str, Any] = {
        "pattern": DailySchedule(time=time(12)),
        "end_at": NOON + timedelta(days=2),
    }
    timing = Timing.of(schedule(**noon_daily, start_at=NOON))
    first = timing.first_after(NOON - timedelta(days=30))
    assert first == NOON
    assert list(timing.slots_from(first)) == [NOON + timedelta(days=day) for day in range(3)]


def test_only_what_decides_the_slots_is_in_the_hash() -> None:
    plain = schedule()
    same = schedule(
        args=(1,),
        kwargs={"b": 2},
        queue_name="q",
        enabled=False,
        catch_up_missed=True,
        overlap="queue",
    )
    assert timing_json(plain) == timing_json(same)
    others = [
        schedule(timezone="Europe/Berlin"),
        schedule(pattern=IntervalSchedule(seconds=6)),
        schedule(on_dst_gap="shift"),
        schedule(start_at=NOON),
        schedule(end_at=NOON),
    ]
    hashes = {config_hash(timing_json(one)) for one in [plain, *others]}
    assert len(hashes) == len(others) + 1
    assert {len(one) for one in hashes} == {64}


def test_a_stored_timing_is_read_back() -> None:
    one = schedule(
        pattern=CronSchedule.parse("5 4 * * *"),
        timezone="America/New_York",
        on_dst_gap="shift",
        start_at=NOON,
        end_at=NOON + timedelta(days=30),
    )
    assert Timing.read(timing_json(one)) == Timing.of(one)
