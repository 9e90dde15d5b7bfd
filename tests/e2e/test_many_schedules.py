"""Schedulers with much to do: many schedules, or days to catch up; every slot once.

`HORSIES_TEST_SCHEDULES=10000 pytest -s tests/e2e/test_many_schedules.py` measures ten thousand.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from datetime import datetime, timedelta
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.schedulers import (
    MANY,
    MANY_SECONDS,
    check_books,
    config_of,
    enter,
    every,
    next_slots,
    sent,
    slots,
    start_scheduler,
    wait_until_serving,
)
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

ROUNDS = 4
DAYS = 3
MINUTES = DAYS * 24 * 60
DUE = "SELECT count(*) FROM horsies_schedule_state WHERE next_run_at <= clock_timestamp()"
BACK = "UPDATE horsies_schedule_state SET next_run_at = next_run_at - %s * interval '1 day'"


def is_anything_due(connection: Database) -> bool:
    return connection.execute(DUE).fetchone() != (0,)


def count(connection: Database) -> int:
    # Counting ten thousand without a rest would slow the scheduler down.
    row = connection.execute("SELECT count(*) FROM horsies_tasks, pg_sleep(0.1)").fetchone()
    assert row is not None
    return int(row[0])


def start_many(fleet: Fleet) -> RunningWorker:
    command = [
        sys.executable,
        "-m",
        "horsies",
        "scheduler",
        "tests.support.apps.many_schedules:app",
    ]
    scheduler = fleet.launch("scheduler", command, fleet.environment())
    wait_until_serving(scheduler, 120)
    return scheduler


def first_slots(connection: Database) -> dict[str, datetime]:
    """The first slot of every schedule that was sent."""
    found: dict[str, datetime] = {}
    for one in sent(connection):
        found.setdefault(one.schedule_name, one.slot)
    return found


@pytest.mark.timeout(120 if MANY <= 1_000 else 900)
def test_many_schedules_are_served_round_after_round(fleet: Fleet, connection: Database) -> None:
    first = start_many(fleet)
    wait_until(lambda: count(connection) >= MANY, 300)
    began = first_slots(connection)
    cpu_before, sent_before = first.cpu_seconds(), count(connection)
    wait_until(lambda: count(connection) >= ROUNDS * MANY, ROUNDS * 120)
    cpu = first.cpu_seconds() - cpu_before
    number = count(connection) - sent_before
    # Another one takes over in the middle of a round.
    second = start_many(fleet)
    first.signal(signal.SIGKILL)
    known = count(connection)
    wait_until(lambda: count(connection) >= known + MANY, 300)
    wait_until(lambda: not is_anything_due(connection), 120)
    assert second.stop() == 0
    assert check_books(connection, began, dict.fromkeys(began, MANY_SECONDS)) >= 5 * MANY
    delays = sorted((one.created_at - one.slot).total_seconds() for one in sent(connection))
    print(
        f"{MANY} schedules every {MANY_SECONDS} s: {1_000_000 * cpu / number:.0f} us of CPU a slot; "
        f"sent {delays[len(delays) // 2]:.2f} s after the slot at the median, "
        f"{delays[len(delays) * 99 // 100]:.2f} s at 99 %"
    )


def test_days_without_a_scheduler_are_caught_up_as_each_schedule_says(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    config = config_of(
        every(60, "all"),
        every(60, "few at a time", max_catch_up_runs=50),
        every(60, "latest", catch_up_missed=False),
        every(86_400, "daily"),
    )
    enter(connection, programs.app, config)
    connection.execute(BACK, (DAYS,))
    first = next_slots(connection)
    doomed = start_scheduler(fleet, config, ready=False)
    wait_until(lambda: len(slots(connection, "all")) > MINUTES // 10)
    heir = start_scheduler(fleet, config)
    doomed.signal(signal.SIGKILL)
    wait_until(lambda: not is_anything_due(connection), 60)
    assert heir.stop() == 0
    latest = first.pop("latest")
    check_books(connection, first, {"all": 60, "few at a time": 60, "daily": 86_400})
    counts = Counter(one.schedule_name for one in sent(connection))
    assert counts["all"] == counts["few at a time"] >= MINUTES
    assert counts["daily"] == DAYS
    assert 1 <= counts["latest"] <= 3, (
        "the slots of those days, and of this test, but one are dropped"
    )
    assert min(slots(connection, "latest")) - latest > timedelta(days=DAYS, minutes=-2)
