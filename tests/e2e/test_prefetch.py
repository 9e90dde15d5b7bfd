"""Claiming ahead: what a worker holds under a lease starts in order, goes back, or lapses; never twice."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    leases,
    task,
    tasks,
    wait_for_status,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal, RunningWorker

AHEAD = 3
PREFETCH = {"prefetch_buffer": AHEAD, "claim_lease_ms": 4_000}
# Nothing that is forgotten would come back by itself within a test.
LONG_LEASE = {"prefetch_buffer": AHEAD, "claim_lease_ms": 120_000}


def start_holder(
    fleet: Fleet,
    journal: Journal,
    programs: ModuleType,
    connection: Database,
    settings: Mapping[str, Any] = PREFETCH,
) -> tuple[RunningWorker, list[str]]:
    """A worker with one child that is busy until it is released, and the tasks it holds for later."""
    worker = fleet.start(processes=1, config={**settings, **HARDLY_POLLS})
    programs.rest_until_released.send("first").unwrap()
    wait_until(lambda: journal.lines("start"))
    held = [programs.sleep.send(0.01, str(n)).unwrap().task_id for n in range(AHEAD)]
    wait_until(lambda: count(connection, "CLAIMED") == AHEAD)
    return worker, held


def test_a_worker_holds_what_its_buffer_allows_and_starts_it_in_order(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with witnessed(connection):
        worker, held = start_holder(fleet, journal, programs, connection)
        more = programs.sleep.send(0.01, "last").unwrap().task_id
        # Longer than a lease: the worker renews what it really has.
        first_lease = leases(connection)
        wait_until(lambda: min(leases(connection)) > max(first_lease))
        journal.release("first")
        wait_until_empty(connection)
        assert_each_ended_once(connection)
    labels = [line.label for line in journal.lines("start")]
    assert labels == ["first", "0", "1", "2", "last"]
    assert {row.generation for row in tasks(connection)} == {1}
    assert [task(connection, one).status for one in [*held, more]] == ["COMPLETED"] * 4
    assert worker.stop() == 0


def test_a_stopping_worker_gives_back_at_once_what_it_has_not_started(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker, held = start_holder(fleet, journal, programs, connection)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: count(connection, "PENDING") == AHEAD)
    assert count(connection, "RUNNING") == 1
    other = fleet.start(processes=1)
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD)
    journal.release("first")
    assert worker.wait() == 0
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD + 1)
    assert [attempts(connection, one)[0].attempt for one in held] == [1] * AHEAD
    assert Counter(line.task_id for line in journal.lines("start")).most_common(1)[0][1] == 1
    assert other.stop() == 0


def test_leases_of_a_frozen_worker_lapse_and_others_take_over(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    frozen, held = start_holder(fleet, journal, programs, connection)
    frozen.signal(signal.SIGSTOP)
    journal.release("first")
    other = fleet.start(processes=1, config=PREFETCH | HARDLY_POLLS)
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD)
    owners = {task(connection, one).claimed_by_worker_id for one in held}
    assert len(owners) == 1
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD + 1)
    assert {row.retry_count for row in tasks(connection)} == {0}
    assert Counter(line.task_id for line in journal.lines("start")).most_common(1)[0][1] == 1
    assert len(attempts(connection)) == AHEAD + 1
    frozen.wait_for("claim_lost")
    assert [frozen.stop(), other.stop()] == [0, 0]


def change_first(connection: Database, held: list[str], change: str) -> str:
    """Change the row of the first task that a worker holds; its id."""
    changed = connection.execute(
        f"UPDATE horsies_tasks SET {change} WHERE id = %s AND status = 'CLAIMED'", (held[0],)
    )
    assert changed.rowcount == 1
    return held[0]


def test_a_held_task_whose_deadline_passes_expires_when_it_cannot_start(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker, held = start_holder(fleet, journal, programs, connection, LONG_LEASE)
    late = change_first(connection, held, "good_until = clock_timestamp()")
    journal.release("first")
    row = wait_for_status(connection, late, "EXPIRED")
    assert row.generation == 1, "nobody claims it again"
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD)
    assert attempts(connection, late) == []
    assert worker.stop() == 0


def test_a_held_task_that_cannot_start_goes_back_and_is_nobodys_after_the_stop(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker, held = start_holder(fleet, journal, programs, connection, LONG_LEASE)
    paused = change_first(connection, held, "held = true")
    journal.release("first")
    row = wait_for_status(connection, paused, "PENDING")
    assert (row.claimed_by_worker_id, row.generation) == (None, 1)
    wait_until(lambda: count(connection, "COMPLETED") == AHEAD)
    assert worker.stop() == 0
    assert count(connection, "CLAIMED", "RUNNING") == 0
