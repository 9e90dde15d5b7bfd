"""Measures: buckets, percentiles, series; and the tally that counts the attempts of a worker."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.db.statement import drive
from horsies.db.statements.measures import AddMeasures, Measured, add_measures
from horsies.monitor.measures import (
    BOUNDS,
    BUCKETS,
    NAMES_MAX,
    Series,
    bucket_of,
    fitting_step,
    percentile,
    percentiles,
    read_measures_script,
)
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.tasks.outcome import Outcome, outcome_of_crash, outcome_of_stop
from horsies.worker import tally as tally_module
from horsies.worker.agenda import NEVER
from horsies.worker.tally import ENDS, Tally
from tests.support.examples import examples
from tests.support.pool import claimed

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.005, 0), (0.0051, 1), (1.0, 7), (1800.0, 14), (1801.0, 15)]
)
def test_a_duration_at_a_bound_belongs_to_the_bucket_below(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0.0, 3600.0), min_size=1), st.sampled_from((0.5, 0.95, 0.99)))
def test_a_percentile_is_in_the_bucket_of_the_exact_one(
    durations: list[float], share: float
) -> None:
    buckets = [0] * BUCKETS
    for duration in durations:
        buckets[bucket_of(duration)] += 1
    exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
    found = percentile(buckets, share)
    assert found is not None
    assert bucket_of(found) == min(bucket_of(exact), len(BOUNDS) - 1)


def test_percentiles_of_nothing_are_unknown() -> None:
    assert percentile([0] * BUCKETS, 0.5) is None
    assert percentiles((), 0).p95 is None


def test_percentiles_are_interpolated_inside_their_bucket() -> None:
    found = percentiles([0] * 7 + [100] + [0] * 8, 75_000)
    assert (found.count, found.mean, found.p50) == (100, 0.75, 0.75)


def test_a_series_over_days_has_steps_of_ten_minutes_at_least() -> None:
    minute, ten = timedelta(minutes=1), timedelta(minutes=10)
    assert fitting_step(timedelta(hours=6), minute) == minute
    assert fitting_step(timedelta(hours=7), minute) == ten
    assert fitting_step(timedelta(hours=1), timedelta(seconds=5)) == minute
    assert fitting_step(timedelta(days=14), timedelta(minutes=64)) == 6 * ten


def measured(minutes: int, done: int = 0) -> Measured:
    buckets = [done] + [0] * (BUCKETS - 1) if done else []
    at, until = NOON + timedelta(minutes=minutes), NOON + timedelta(minutes=2, seconds=30)
    return Measured(at, until, "", done, 0, 0, 0, 0, done * 2, done, buckets, buckets)


def test_a_series_has_an_empty_slot_for_every_minute_without_attempts() -> None:
    def series_of(*rows: Measured) -> Series:
        script = read_measures_script(timedelta(minutes=2), timedelta(minutes=1))
        return drive(lambda _statement, _params: list(rows), script)

    series = series_of(measured(0, 3), measured(1), measured(2, 2))
    assert [slot.done for slot in series.slots] == [3, 0, 2]
    assert [slot.at.minute for slot in series.slots] == [0, 1, 2]
    assert (series.total.done, series.total.ran.count, series.total.waited.mean) == (5, 5, 0.002)
    assert series.per_minute(series.total.attempts) == 2.0
    assert series_of(measured(0), measured(1)).total.attempts == 0


class Clock:
    """The two clocks of a tally."""

    def __init__(self) -> None:
        self.now = NOON.timestamp()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tally_module, "time", clock)
    return clock


def flushed(tally: Tally) -> AddMeasures | None:
    steps = tally.take_flush()
    assert all(statement is add_measures for statement, _ in steps)
    return steps[0][1] if steps else None


def test_a_tally_stores_the_growth_of_each_minute_once(clock: Clock) -> None:
    tally = Tally()
    task = claimed("a", 1)
    done = Outcome.completed(task, "1")
    assert flushed(tally) is None
    assert tally.flush_at == NEVER
    clock.now += 59
    tally.note_ends([(done, task, 0.02), (done, task, None)])
    assert tally.flush_at == clock.now + tally_module.FLUSH_SECONDS
    clock.now += 2
    tally.note_ends([(done, task, 3.0)])
    columns = flushed(tally)
    assert columns is not None
    minute = int(NOON.timestamp()) // 60
    assert (columns.minutes, columns.done, columns.ran_ms) == (
        [minute, minute + 1],
        [2, 1],
        [20, 3000],
    )
    assert columns.ran[0] == "{0,0,1,0,0,0,0,0,0,0,0,0,0,0,0,0}"
    assert flushed(tally) is None, "the growth is stored once"
    assert tally.totals()[task.queue_name, task.task_name].ends[0] == 3, "the totals stay"


def test_a_clock_that_returns_to_a_minute_makes_one_row_of_it(clock: Clock) -> None:
    tally, task = Tally(), claimed("a", 1)
    for seconds in (59, 2, -2, 2):
        clock.now += seconds
        tally.note_ends([(Outcome.completed(task, "1"), task, 0.1)])
    columns = flushed(tally)
    assert columns is not None
    assert columns.done == [2, 2]


def test_waiting_counts_from_the_due_time_on_the_clock_of_the_database(clock: Clock) -> None:
    tally = Tally()
    database_now = NOON + timedelta(hours=1)
    tally.note_clock(database_now, 0.0)
    due = [str(database_now - timedelta(seconds=4)), "2026-01-31 13:00:00.5+00", "-infinity"]
    tally.note_starts([claimed("a", 1)._replace(enqueued_at=text) for text in due])
    columns = flushed(tally)
    assert columns is not None
    assert columns.waited == ["{1,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0}"], "at once, four seconds"
    assert columns.waited_ms == [4000]
    assert columns.minutes == [int(database_now.timestamp()) // 60]


def test_every_end_counts_once(clock: Clock) -> None:
    task = claimed("a", 1)
    failed = Outcome(
        task.id, 1, None, TaskStatus.FAILED, "", TaskAttemptOutcome.FAILED, error_code="BROKE"
    )
    outcomes = [
        Outcome.completed(task, "1"),
        failed,
        failed._replace(delay_seconds=1.0),
        outcome_of_crash(task, "signal 9"),
        outcome_of_stop(task, "timeout"),
        outcome_of_stop(task, "cancel"),
        outcome_of_stop(task, "shutdown"),
    ]
    tally = Tally()
    tally.note_ends([(outcome, task, 1.0) for outcome in outcomes])
    assert list(next(iter(tally.totals().values())).ends) == [1] * len(ENDS)
    columns = flushed(tally)
    assert columns is not None
    ends = (columns.done, columns.failed, columns.retried, columns.crashed, columns.stopped)
    assert ends == ([1], [1], [1], [1], [3])


def test_names_beyond_the_limit_count_as_one(clock: Clock) -> None:
    tally = Tally()
    tasks = [claimed(f"{n}", 1)._replace(task_name=f"task{n % 300}") for n in range(600)]
    tally.note_ends([(Outcome.completed(task, "1"), task, 0.1) for task in tasks])
    columns = flushed(tally)
    assert columns is not None
    assert len(set(columns.names)) == NAMES_MAX + 1
    by_name = dict(zip(columns.names, columns.done, strict=True))
    assert (by_name["task0"], by_name[""], sum(columns.done)) == (2, 200, 600)
