"""Only the database's clock counts: workers and producers ten minutes off change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import TaskRow, attempts, count, leases, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import AHEAD, BEHIND, REPOSITORY, Fleet, Journal, RunningWorker, skew

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


def worker_id_of(connection: Database, worker: RunningWorker) -> str:
    row = connection.execute(
        "SELECT worker_id FROM horsies_workers WHERE pid = %s", (worker.pid,)
    ).fetchone()
    assert row is not None
    return str(row[0])
