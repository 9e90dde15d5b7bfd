"""Caps hold at every instant, across workers that die and come back."""

from __future__ import annotations

import importlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, RunningWorker

APPLICATION = "tests.support.apps.capped:app"
WORKERS = 4
TASKS = 1_000
BUSY_WORKER = """
SELECT worker.pid FROM horsies_tasks AS task
JOIN horsies_workers AS worker ON worker.worker_id = task.claimed_by_worker_id
WHERE task.status = 'RUNNING' AND worker.pid = ANY(%s)
"""


@pytest.fixture
def capped(programs: ModuleType) -> Iterator[ModuleType]:
    """The capped application, for sending on the same way as the others."""
    module = importlib.import_module("tests.support.apps.capped")
    yield module
    module.app.close()


def start(fleet: Fleet, *, ready: bool = True) -> RunningWorker:
    return fleet.start(processes=4, application=APPLICATION, ready=ready)


def most_at_once(directory: Path) -> dict[str, int]:
    """The largest number of tasks that ran side by side, as the tasks themselves saw it."""
    most: dict[str, int] = defaultdict(int)
    for line in (directory / "places").read_text().splitlines():
        queue, place, place_here = line.split()
        most["cluster"] = max(most["cluster"], int(place))
        most[queue] = max(most[queue], int(place_here))
    return dict(most)


def kill_a_busy_one(fleet: Fleet, connection: Database) -> None:
    """Kill a worker that has just been running a task."""
    living = {worker.pid: worker for worker in fleet.workers if worker.process.poll() is None}
    busy = wait_until(lambda: connection.execute(BUSY_WORKER, (list(living),)).fetchall())
    victim = living[busy[0][0]]
    victim.signal(signal.SIGKILL)
    victim.wait()


@pytest.mark.slow
def test_caps_hold_while_workers_are_killed_and_restarted(
    fleet: Fleet, capped: ModuleType, connection: Database
) -> None:
    workers = [start(fleet, ready=False) for _ in range(WORKERS)]
    for worker in workers:
        worker.wait_until_ready()
        worker.family()
    with witnessed(connection):
        began = time.monotonic()
        for function, share in (
            (capped.occupy_wide, TASKS // 2),
            (capped.occupy_narrow, TASKS // 10),
            (capped.occupy_open, TASKS - TASKS // 2 - TASKS // 10),
        ):
            function.send_many(function.bind(0.005) for _ in range(share)).unwrap()
        for goal in (TASKS // 4, TASKS // 2):
            wait_until(lambda goal=goal: count(connection, "COMPLETED") >= goal, 40)  # type: ignore[misc]
            kill_a_busy_one(fleet, connection)
            start(fleet, ready=False)
        wait_until_empty(connection, 60)
        seconds = time.monotonic() - began
        assert count(connection, "COMPLETED") == TASKS
        assert_each_ended_once(connection)
    crashed = [one for one in attempts(connection) if one.outcome == "WORKER_FAILURE"]
    most = most_at_once(fleet.directory)
    print(f"{TASKS / seconds:.0f} tasks/s, two kills included; {len(crashed)} cut off; most {most}")
    assert most["cluster"] <= capped.CLUSTER_CAP
    assert most["wide"] <= capped.QUEUE_CAPS["wide"]
    assert most["narrow"] <= capped.QUEUE_CAPS["narrow"]
    assert most["cluster"] > 1, "nothing ever ran side by side: the caps were not tried"


def test_a_place_freed_by_one_worker_wakes_another_at_once(
    fleet: Fleet, capped: ModuleType, connection: Database
) -> None:
    """A stopping worker frees a place it will not take again; no other worker has to wait for its
    poll.
    """
    first = start(fleet)
    blocker = capped.occupy_narrow.send(3.0).unwrap()
    wait_until(lambda: count(connection, "RUNNING") == 1)
    fleet.start(processes=1, application=APPLICATION, config=HARDLY_POLLS)
    blocked = capped.occupy_narrow.send(0.0).unwrap()
    first.signal(signal.SIGTERM)
    assert blocker.get(30_000).is_ok()
    assert blocked.get(30_000).is_ok()
    assert first.wait() == 0


def test_a_place_freed_by_the_death_of_a_worker_wakes_another_at_once(
    fleet: Fleet, capped: ModuleType, connection: Database
) -> None:
    """The one that notices the death is busy; the one that could go on lives on notifications."""
    victim = fleet.start(processes=1, application=APPLICATION)
    blocker = capped.occupy_narrow_once.send(600).unwrap()
    wait_until(lambda: count(connection, "RUNNING") == 1)
    fleet.start(processes=1, application=APPLICATION)
    capped.occupy_open.send(600).unwrap()
    wait_until(lambda: count(connection, "RUNNING") == 2)
    fleet.start(processes=1, application=APPLICATION, config=HARDLY_POLLS)
    blocked = capped.occupy_narrow.send(0.0).unwrap()
    victim.signal(signal.SIGKILL)
    assert blocker.get(30_000).err_value.error_code == "WORKER_CRASHED"
    assert blocked.get(30_000).is_ok()
