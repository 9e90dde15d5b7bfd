"""Several workers: they watch each other in a ring, and a send wakes a few of them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal, RunningWorker

WORKERS = 5
WAITING = "SELECT count(*) FROM horsies_workers WHERE waits"
RING = "SELECT worker_id, pid FROM horsies_workers WHERE stopped_at IS NULL ORDER BY worker_id"


def start_ring(
    fleet: Fleet, connection: Database, config: Mapping[str, Any]
) -> dict[str, RunningWorker]:
    """Workers by their ids, in the order of their ring."""
    workers = [fleet.start(processes=1, config=config) for _ in range(WORKERS)]
    by_pid = {worker.pid: worker for worker in workers}
    wait_until(lambda: len(connection.execute(RING).fetchall()) == WORKERS)
    return {worker_id: by_pid[pid] for worker_id, pid in connection.execute(RING)}


@pytest.fixture
def ring(fleet: Fleet, connection: Database) -> dict[str, RunningWorker]:
    return start_ring(fleet, connection, {})


@pytest.fixture
def hardly_polling(fleet: Fleet, connection: Database) -> dict[str, RunningWorker]:
    workers = start_ring(fleet, connection, HARDLY_POLLS)
    wait_until(lambda: connection.execute(WAITING).fetchone() == (WORKERS,))
    return workers


def run_by(connection: Database, task_id: str) -> str:
    """The worker that runs this task."""
    found = wait_until(lambda: task(connection, task_id).claimed_by_worker_id)
    return str(found)


def lost(connection: Database) -> set[str]:
    found = connection.execute("SELECT worker_id FROM horsies_workers WHERE was_lost")
    return {worker_id for (worker_id,) in found}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_worker_is_recovered_although_its_watchers_die_or_freeze_with_it(
    ring: dict[str, RunningWorker],
    journal: Journal,
    programs: ModuleType,
    connection: Database,
    number: signal.Signals,
) -> None:
    sent = programs.sleep_again.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    ids = list(ring)
    victim = run_by(connection, sent.task_id)
    place = ids.index(victim)
    watchers = [ids[place - 1], ids[place - 2]]
    for worker_id in watchers:
        ring[worker_id].signal(number)
    ring[victim].signal(signal.SIGKILL)
    wait_until(lambda: len(journal.lines("start")) == 2)
    dead = {victim, *watchers} if number == signal.SIGKILL else {victim}
    wait_until(lambda: lost(connection) >= dead)
    if number == signal.SIGSTOP:
        for worker_id in watchers:
            ring[worker_id].signal(signal.SIGCONT)
        assert programs.noop.send().unwrap().get(30_000).is_ok()
    assert lost(connection) == dead, "a living worker was declared lost"
    assert run_by(connection, sent.task_id) in set(ids) - dead


def test_one_worker_that_is_left_recovers_the_tasks_of_all_others(
    ring: dict[str, RunningWorker], journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sent = [programs.sleep.send(600).unwrap().task_id for _ in range(WORKERS)]
    wait_until(lambda: len(journal.lines("start")) == WORKERS)
    left, *others = ring
    theirs = [one for one in sent if run_by(connection, one) != left]
    assert len(theirs) == len(others)
    for worker_id in others:
        ring[worker_id].signal(signal.SIGKILL)
    wait_until(lambda: all(attempts(connection, one) for one in theirs))
    assert lost(connection) == set(others)


# Wake-ups. The workers hardly poll, so only a wake-up starts a task.


def occupy(programs: ModuleType, journal: Journal, connection: Database, count: int) -> set[str]:
    """Keep this many workers busy; returns their ids."""
    sent = [programs.sleep.send(600).unwrap().task_id for _ in range(count)]
    wait_until(lambda: len(journal.lines("start")) == count)
    return {run_by(connection, one) for one in sent}


def test_sends_start_at_once_on_every_idle_worker_although_a_frozen_one_seems_to_wait(
    hardly_polling: dict[str, RunningWorker],
    journal: Journal,
    programs: ModuleType,
    connection: Database,
) -> None:
    frozen, *others = hardly_polling
    hardly_polling[frozen].signal(signal.SIGSTOP)
    for _ in range(20):
        connection.execute("UPDATE horsies_workers SET waits = true")
        assert programs.noop.send().unwrap().get(30_000).is_ok()
    hardly_polling[frozen].signal(signal.SIGCONT)
    assert occupy(programs, journal, connection, WORKERS) == {frozen, *others}


def test_a_send_reaches_the_only_idle_worker_while_the_others_are_busy_or_stop(
    hardly_polling: dict[str, RunningWorker],
    journal: Journal,
    programs: ModuleType,
    connection: Database,
) -> None:
    busy = occupy(programs, journal, connection, WORKERS - 1)
    (idle,) = set(hardly_polling) - busy
    for stops in (False, True):
        if stops:
            for worker_id in busy:
                hardly_polling[worker_id].signal(signal.SIGTERM)
                hardly_polling[worker_id].wait_for("worker_stopping")
        for _ in range(5):
            # Outdated rows: every worker seems to wait.
            connection.execute("UPDATE horsies_workers SET waits = true")
            sent = programs.noop.send().unwrap()
            assert sent.get(30_000).is_ok()
            assert task(connection, sent.task_id).claimed_by_worker_id == idle
