"""Schedules of two releases: one that another release leaves is taken over, one that is switched off and
comes back does not catch up on the time in between.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from horsies.scheduler.registry import Registry
from horsies.timetable.patterns import IntervalSchedule
from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.scheduling import (
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    refresh,
    registry_of,
    schedule,
    slots,
    state,
    tick,
)

MONTH = timedelta(days=30)


def leave(connection: Database, seconds: float, **columns: Any) -> None:
    """Pretend that no scheduler has served a slot for so long."""
    columns = {
        "next_run_at": ago(connection, seconds),
        "updated_at": ago(connection, seconds),
    } | columns
    assigned = ", ".join(f"{name} = %s" for name in columns)
    connection.execute(
        f"UPDATE horsies_schedule_state SET {assigned}".encode(), [*columns.values()]
    )


def two_releases(connection: Database, make_app: MakeApp, **fields: Any) -> tuple[Registry, str]:
    """The second release serves; the first one restarted last, and its timing is stored."""
    newer = registry_of(make_app(schedule(pattern=IntervalSchedule(seconds=10), **fields)))
    enter(connection, make_app(schedule()))
    return newer, state(connection)["config_hash"]


def test_a_schedule_that_its_release_no_longer_serves_is_taken_over(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    newer, old_hash = two_releases(connection, make_app, catch_up_missed=True)
    leave(connection, 90)
    unserved = state(connection)["next_run_at"]
    with caplog.at_level(logging.WARNING, "horsies"):
        refresh(connection, newer)
    assert "schedule 'report': no other release serves its slots" in caplog.text
    assert state(connection)["config_hash"] != old_hash
    tick(connection, newer)
    assert slots(connection)[:2] == [unserved + timedelta(seconds=n) for n in (10, 20)]
    assert len(slots(connection)) == 9


@pytest.mark.parametrize(
    ("seconds", "columns"),
    [
        (30, {}),
        (90, {"paused_at": "now"}),
        (90, {"updated_at": "now"}),  # its release catches up
    ],
)
def test_a_schedule_that_its_release_serves_is_left_alone(
    connection: Database, make_app: MakeApp, seconds: float, columns: dict[str, Any]
) -> None:
    newer, old_hash = two_releases(connection, make_app)
    leave(connection, seconds, **columns)
    refresh(connection, newer)
    assert state(connection)["config_hash"] == old_hash


def test_a_scheduler_that_has_just_connected_gives_the_others_time(
    connection: Database, make_app: MakeApp
) -> None:
    newer, old_hash = two_releases(connection, make_app)
    leave(connection, 90)
    refresh(connection, newer, has_watched=False)
    assert state(connection)["config_hash"] == old_hash


def test_a_schedule_that_waits_for_its_last_task_is_not_taken_over(
    connection: Database, make_app: MakeApp
) -> None:
    newer, old_hash = two_releases(connection, make_app, overlap="queue")
    leave(connection, 90)
    task_id = add_task(connection, schedule_name="report")
    refresh(connection, newer)
    assert state(connection)["config_hash"] == old_hash
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED' WHERE id = %s", (task_id,))
    refresh(connection, newer)
    assert state(connection)["config_hash"] != old_hash


@pytest.mark.parametrize("catches_up", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_schedule_that_was_switched_off_does_not_catch_up_when_it_comes_back(
    connection: Database, make_app: MakeApp, catches_up: bool, is_removed: bool
) -> None:
    fields: dict[str, Any] = {
        "pattern": IntervalSchedule(minutes=1),
        "catch_up_missed": catches_up,
    }
    enter(connection, make_app(schedule(**fields)))
    without = [schedule("other")] if is_removed else [schedule(enabled=False, **fields)]
    off = enter(connection, make_app(*without))
    leave(connection, 90)
    refresh(connection, off)
    assert state(connection)["disabled_at"] is not None
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = next_run_at - %(time)s, "
        "updated_at = updated_at - %(time)s, disabled_at = disabled_at - %(time)s",
        {"time": MONTH},
    )
    back = enter(connection, make_app(schedule(**fields)))
    tick(connection, back)
    assert slots(connection) == []
    assert database_now(connection) < state(connection)["next_run_at"]
    leave(connection, 150)
    tick(connection, back)
    assert len(slots(connection)) == (3 if catches_up else 1)


def test_an_interruption_of_all_schedulers_is_not_a_time_switched_off(
    connection: Database, make_app: MakeApp
) -> None:
    fields: dict[str, Any] = {"pattern": IntervalSchedule(minutes=1), "catch_up_missed": True}
    app = make_app(schedule(**fields))
    enter(connection, app)
    leave(connection, 150)
    refresh(connection, enter(connection, app))
    assert state(connection)["disabled_at"] is None
    tick(connection, enter(connection, app))
    assert len(slots(connection)) == 3


def test_a_schedule_that_another_release_serves_is_not_switched_off(
    connection: Database, make_app: MakeApp
) -> None:
    fields: dict[str, Any] = {"pattern": IntervalSchedule(minutes=1), "catch_up_missed": True}
    older = enter(connection, make_app(schedule(**fields)))
    newer = enter(connection, make_app(schedule(enabled=False, **fields)))
    refresh(connection, newer)
    assert state(connection)["disabled_at"] is None
    leave(connection, 150)
    refresh(connection, newer)  # the older one was away for a moment
    tick(connection, older)
    assert len(slots(connection)) == 3
    make_due(connection, ago(connection, 30))
    tick(connection, enter(connection, make_app(schedule(**fields))))
    assert len(slots(connection)) == 4
