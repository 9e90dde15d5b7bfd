"""Children are replaced under load and no task notices."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, count, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import REPOSITORY, Fleet


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_children_are_replaced_by_count_under_load(
    fleet: Fleet, programs: ModuleType, connection: Database, method: str
) -> None:
    tasks_in_all = {"forkserver": 400, "spawn": 30}[method]
    worker = fleet.start("--max-tasks-per-child", "10", "--start-method", method)
    calls = (programs.noop.bind() for _ in range(tasks_in_all))
    programs.noop.send_many(calls).unwrap()
    wait_until_empty(connection, 90)
    assert count(connection, "COMPLETED") == tasks_in_all
    made = attempts(connection)
    assert [one.attempt for one in made] == [1] * tasks_in_all
    by_pid = Counter(one.worker_pid for one in made)
    assert max(by_pid.values()) <= 10
    assert len(by_pid) >= tasks_in_all / 10
    assert worker.stop() == 0
    assert "ERROR" not in worker.log()


def test_children_that_grow_are_replaced_under_load(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--max-memory-per-child-mb", "250", "--max-tasks-per-child", "0")
    sent = [programs.grow.send(100).unwrap() for _ in range(16)]
    pids = Counter(one.get(30_000).ok_value for one in sent)
    assert len(pids) >= 5
    assert max(pids.values()) <= 3
    assert [one.attempt for one in attempts(connection)] == [1] * 16
    assert worker.stop() == 0
    assert "ERROR" not in worker.log()


def test_a_worker_refuses_a_memory_limit_below_a_fresh_child(fleet: Fleet) -> None:
    worker = fleet.start("--max-memory-per-child-mb", "5", ready=False)
    assert worker.wait() == 1
    found = re.search(r"already uses (\d+) MB.*max_memory_per_child_mb=5", worker.log())
    assert found is not None, worker.log()
    assert not worker.events("worker_ready")

    close = int(int(found[1]) * 1.1) + 1
    worker = fleet.start("--max-memory-per-child-mb", str(close))
    assert re.search(rf"uses \d+ MB of max_memory_per_child_mb={close}", worker.log())
    assert worker.stop() == 0


def test_no_child_is_replaced_without_a_limit(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--max-tasks-per-child", "0", "--start-method", "spawn")
    children = set(worker.family())
    programs.noop.send_many(programs.noop.bind() for _ in range(300)).unwrap()
    wait_until_empty(connection)
    assert {one.worker_pid for one in attempts(connection)} <= children
    wait_until(lambda: set(worker.family()) == children)


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_children_are_replaced_in_a_working_directory_that_has_been_removed(
    fleet: Fleet, programs: ModuleType, tmp_path: Path, method: str
) -> None:
    release = tmp_path / "release"
    release.mkdir()
    enter = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
    worker = fleet.start(
        *("--start-method", method, "--max-tasks-per-child", "2"),
        processes=1,
        environment={"PYTHONPATH": str(REPOSITORY)},
        through=(sys.executable, "-c", enter, str(release)),
    )
    release.rmdir()
    handles = [programs.own_pid.send().unwrap() for _ in range(6)]
    pids = [handle.get(30_000).ok_value for handle in handles]
    assert len(set(pids)) >= 3
    assert worker.stop() == 0
