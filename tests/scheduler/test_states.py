"""The rows that a scheduler stores when it starts, and those it does not change."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest

from horsies.timetable.patterns import CronSchedule, HourlySchedule, IntervalSchedule
from tests.support.database import Database
from tests.support.scheduling import (
    LONG_AGO,
    OWNER,
    MakeApp,
    database_now,
    enter,
    make_due,
    schedule,
    slots,
    state,
    tasks,
    tick,
)


def test_the_first_start_of_a_schedule_fires_nothing(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(
        schedule("hourly", pattern=HourlySchedule(minute=0)),
        schedule("often", pattern=IntervalSchedule(seconds=30)),
    )
    before = database_now(connection)
    registry = enter(connection, app)
    tick(connection, registry)
    assert tasks(connection, None) == []
    often, hourly = state(connection, "often"), state(connection, "hourly")
    assert often["next_run_at"] >= before + timedelta(seconds=30)
    assert before < hourly["next_run_at"] <= before + timedelta(hours=1)
    assert hourly["next_run_at"].minute == 0
    for one in (often, hourly):
        assert (one["run_count"], one["last_run_at"], one["last_task_id"]) == (0, None, None)
        assert (one["task_name"], one["owner"], one["definition"]) == ("note", OWNER, None)


def test_an_unchanged_timing_keeps_an_overdue_slot(connection: Database, make_app: MakeApp) -> None:
    enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    connection.execute("UPDATE horsies_schedule_state SET run_count = 5")
    other = schedule(kwargs={"text": "other"}, catch_up_missed=True, overlap="queue")
    enter(connection, make_app(other))
    kept = state(connection)
    assert (kept["next_run_at"], kept["run_count"]) == (LONG_AGO, 5)


def test_a_changed_timing_begins_anew_and_keeps_the_counters(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    connection.execute("UPDATE horsies_schedule_state SET run_count = 5, paused_at = now()")
    before = state(connection)
    with caplog.at_level(logging.WARNING, "horsies"):
        enter(connection, make_app(schedule(pattern=IntervalSchedule(hours=2))))
    assert "schedule 'report' has a new timing" in caplog.text
    after = state(connection)
    assert after["next_run_at"] > database_now(connection) + timedelta(hours=1, minutes=59)
    assert after["config_hash"] != before["config_hash"]
    assert (after["run_count"], after["paused_at"]) == (5, before["paused_at"])


def test_disabled_schedules_are_not_on_record(connection: Database, make_app: MakeApp) -> None:
    enter(connection, make_app(schedule(enabled=False), schedule("other")))
    names = connection.execute("SELECT schedule_name FROM horsies_schedule_state").fetchall()
    assert names == [("other",)]


def test_a_schedule_that_was_disabled_keeps_its_record_and_does_not_fire(
    connection: Database, make_app: MakeApp
) -> None:
    enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    registry = enter(connection, make_app(schedule(enabled=False)))
    tick(connection, registry)
    assert state(connection)["next_run_at"] == LONG_AGO
    assert tasks(connection) == []


def test_schedules_that_left_the_configuration_are_kept_and_reported(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    enter(connection, make_app(schedule("old"), schedule("older"), schedule()))
    make_due(connection, LONG_AGO)
    with caplog.at_level(logging.WARNING, "horsies"):
        registry = enter(connection, make_app(schedule()))
    assert "no longer configured: old, older" in caplog.text
    tick(connection, registry)
    assert state(connection, "old")["next_run_at"] == LONG_AGO
    assert tasks(connection, "old") == []


def test_a_record_that_somebody_deleted_comes_back_without_firing(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    connection.execute("DELETE FROM horsies_schedule_state")
    registry = enter(connection, app, at_start=False)
    tick(connection, registry)
    assert state(connection)["next_run_at"] > database_now(connection)
    assert tasks(connection) == []


def test_a_running_scheduler_leaves_the_timing_of_another_release_alone(
    connection: Database, make_app: MakeApp
) -> None:
    older = make_app(schedule())
    old_book = enter(connection, older)
    newer = make_app(schedule(pattern=IntervalSchedule(hours=2), kwargs={"text": "new"}))
    new_book = enter(connection, newer)
    stored = state(connection)
    enter(connection, older, at_start=False)
    assert state(connection)["config_hash"] == stored["config_hash"]
    make_due(connection, LONG_AGO)
    tick(connection, old_book)
    assert slots(connection) == []
    tick(connection, new_book)
    assert [task["kwargs"] for task in tasks(connection)] == ['{"text":"new"}']


def test_a_slot_that_cannot_be_told_does_not_stop_the_others(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    # The clock of New York leaps over this time, every year.
    never = CronSchedule.parse("30 2 8-14 3 sun", days="both")
    app = make_app(
        schedule("never", pattern=never, timezone="America/New_York"),
        schedule("ended", end_at=datetime(2020, 1, 1, tzinfo=UTC)),
        schedule(),
    )
    registry = enter(connection, app)
    assert state(connection, "never")["next_run_at"] is None
    assert state(connection, "ended")["next_run_at"] is None
    assert state(connection)["next_run_at"] is not None
    # What has ended is neither due nor in the way, and is not written again and again.
    written = state(connection, "ended")["updated_at"]
    enter(connection, app, at_start=False)
    assert tick(connection, registry).fired == []
    assert state(connection, "ended")["updated_at"] == written


def test_a_schedule_whose_end_was_moved_begins_again(
    connection: Database, make_app: MakeApp
) -> None:
    enter(connection, make_app(schedule(end_at=datetime(2020, 1, 1, tzinfo=UTC))))
    assert state(connection)["next_run_at"] is None
    enter(connection, make_app(schedule(end_at=datetime(2090, 1, 1, tzinfo=UTC))))
    assert state(connection)["next_run_at"] is not None
