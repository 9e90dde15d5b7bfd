"""Only the database's clock counts: workers and producers ten minutes off change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.support.database import Database
from tests.support.schedulers import APPLICATION as SCHEDULED
from tests.support.schedulers import check_books, config_of, enter, every
from tests.support.tables import TaskRow, attempts, count, leases, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import (
    AHEAD,
    BEHIND,
    QUICK_RECOVERY,
    REPOSITORY,
    Fleet,
    Journal,
    RunningWorker,
    skew,
)

LEASES = {"prefetch_buffer": 2, "claim_lease_ms": 4_000}
# Clocks are wrong by ten minutes; what takes less than half of that depends on none of them.
LIMIT_SECONDS = 300


def send_from(fleet: Fleet, offset: str, good_until: datetime) -> dict[str, str]:
    """Send with a wrong clock; the ids by what they are about."""
    environment = fleet.environment() | skew(fleet, offset)
    command = [sys.executable, "-m", "tests.support.apps.skewed_producer", good_until.isoformat()]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ids, clock = done.stdout.splitlines()
    wrong_by = datetime.fromisoformat(clock) - datetime.now(UTC)
    assert abs(wrong_by.total_seconds()) > 500, "the clock was not wrong: this proves nothing"
    return dict(json.loads(ids))


def waited_seconds(row: TaskRow, since: datetime) -> float:
    assert row.started_at is not None
    return float((row.started_at - since).total_seconds())


@pytest.mark.parametrize(("worker", "producer"), [(AHEAD, BEHIND), (BEHIND, AHEAD)])
def test_delays_retries_and_deadlines_do_not_depend_on_anybodys_clock(
    fleet: Fleet, connection: Database, worker: str, producer: str
) -> None:
    fleet.start(environment=skew(fleet, worker))
    began = datetime.now(UTC)
    ids = send_from(fleet, producer, datetime.now(UTC) + timedelta(seconds=LIMIT_SECONDS))
    for task_id in ids.values():
        wait_for_status(connection, task_id, "COMPLETED")
    rows = {name: task(connection, task_id) for name, task_id in ids.items()}
    assert 2.0 <= waited_seconds(rows["delayed"], began) < LIMIT_SECONDS
    first, second = attempts(connection, ids["retried"])
    assert 1.0 <= (second.started_at - first.finished_at).total_seconds() < LIMIT_SECONDS
    now = datetime.now(UTC)
    for row in rows.values():
        assert row.completed_at is not None
        assert began <= row.completed_at <= now


@pytest.mark.parametrize("offset", [AHEAD, BEHIND])
def test_a_task_expires_on_time_whatever_the_workers_clock_says(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, offset: str
) -> None:
    fleet.start(processes=1, environment=skew(fleet, offset))
    blocker = programs.rest_until_released.send("blocker").unwrap()
    wait_for_status(connection, blocker.task_id, "RUNNING")
    deadline = datetime.now(UTC) + timedelta(seconds=1)
    late = programs.noop.with_options(good_until=deadline).send().unwrap()
    in_time = (
        programs.noop.with_options(good_until=deadline + timedelta(seconds=LIMIT_SECONDS))
        .send()
        .unwrap()
    )
    assert late.get(30_000).err_value.error_code == "TASK_EXPIRED"
    row = task(connection, late.task_id)
    assert row.failed_at is not None
    # A busy worker notices at its poll, five seconds by default.
    assert 0 <= (row.failed_at - deadline).total_seconds() < LIMIT_SECONDS
    journal.release("blocker")
    assert in_time.get(30_000).is_ok()


def test_leases_hold_between_workers_with_different_clocks(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    holder = fleet.start(processes=1, config=LEASES, environment=skew(fleet, BEHIND))
    programs.rest_until_released.send("blocker").unwrap()
    wait_until(lambda: journal.lines("start"))
    held = [programs.sleep.send(0).unwrap() for _ in range(2)]
    wait_until(lambda: count(connection, "CLAIMED") == 2)
    ahead = fleet.start(config=LEASES, environment=skew(fleet, AHEAD))
    first = leases(connection)
    wait_until(lambda: min(leases(connection)) > max(first))
    journal.release("blocker")
    for one in held:
        assert one.get(30_000).is_ok()
    owners = {task(connection, one.task_id).claimed_by_worker_id for one in held}
    assert owners == {worker_id_of(connection, holder)}
    assert {task(connection, one.task_id).generation for one in held} == {1}
    assert not ahead.events("workers_lost") + holder.events("workers_lost")


def test_a_clock_that_jumps_while_worker_and_scheduler_run_changes_nothing(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    offset = fleet.directory / "offset"
    offset.write_text("+0")
    config = config_of(every(1, "often")) | QUICK_RECOVERY
    first = enter(connection, programs.app, config)
    other = fleet.start(config=config)
    jumping = fleet.start(
        "--with-scheduler",
        application=SCHEDULED,
        config=config,
        environment=skew(fleet, offset),
    )
    for hours in (3, -3, 0):
        long = programs.sleep.send(3).unwrap()
        delayed = programs.noop.schedule(1).unwrap()
        retried = programs.fail_then_work.send().unwrap()
        limited = programs.limited.send(600).unwrap()
        wait_for_status(connection, long.task_id, "RUNNING")
        offset.write_text(f"{hours:+}h")
        for one in (long, delayed, retried):
            assert one.get(30_000).is_ok()
        assert limited.get(30_000).err_value.error_code == "TASK_TIMEOUT"
        waited = waited_seconds(task(connection, delayed.task_id), sent_at(connection, delayed))
        assert 1.0 <= waited < LIMIT_SECONDS
        assert len(attempts(connection, long.task_id)) == 1
        wait_until(partial(has_jumped, jumping, hours))
    for worker in (jumping, other):
        assert not worker.events("workers_lost") + worker.events("worker_declared_lost")
    assert [jumping.stop(), other.stop()] == [0, 0]
    assert check_books(connection, first, {"often": 1}) >= 3


def has_jumped(worker: RunningWorker, hours: int) -> bool:
    """Whether the clock of a process was wrong by this much when it sent slots, this minute or so."""
    times = [datetime.fromisoformat(event["time"]) for event in worker.events("slots_sent")]
    return hours in [round((one - datetime.now(UTC)).total_seconds() / 3_600) for one in times]


def sent_at(connection: Database, handle: Any) -> datetime:
    (moment,) = connection.execute(
        "SELECT created_at FROM horsies_tasks WHERE id = %s", (handle.task_id,)
    ).fetchone() or (None,)
    assert isinstance(moment, datetime)
    return moment


def worker_id_of(connection: Database, worker: RunningWorker) -> str:
    row = connection.execute(
        "SELECT worker_id FROM horsies_workers WHERE pid = %s", (worker.pid,)
    ).fetchone()
    assert row is not None
    return str(row[0])
