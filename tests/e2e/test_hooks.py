"""Start hooks, from the decorator to the exit code of the worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.support.rows import insert_raw
from tests.support.tables import task, wait_for_status
from tests.support.workers import Fleet, is_gone

APPLICATION = "tests.support.apps.hooks:app"
FAILING_VARIABLE = "HORSIES_E2E_FAILING_HOOK"
FILE_VARIABLE = "HORSIES_E2E_HOOK_FAILS_IF"


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_hooks_run_once_and_in_order_in_every_child_and_its_replacements(
    fleet: Fleet, programs: ModuleType, connection: psycopg.Connection[Any], method: str
) -> None:
    fleet.start("--start-method", method, "--max-tasks-per-child", "2", application=APPLICATION)
    ids = [insert_raw(connection, "hooks_that_ran", "[]") for _ in range(12)]
    answers = [programs.app.get_result(task_id, 60_000).ok_value for task_id in ids]
    assert all(ran == ["open_first", "open_second", "open_async"] for _, *ran in answers)
    assert len({pid for pid, *_ in answers}) >= 6


def test_stop_hooks_run_in_reverse_order_in_every_child_that_ends_in_order(
    fleet: Fleet, programs: ModuleType, connection: psycopg.Connection[Any]
) -> None:
    worker = fleet.start(application=APPLICATION)
    task_id = insert_raw(connection, "is_on_the_loop_of_the_hook", "[]")
    assert programs.app.get_result(task_id, 60_000).ok_value is True
    assert worker.stop() == 0
    lines = fleet.journal.path.read_text().splitlines()
    by_child: dict[str, list[str]] = {}
    for name, pid in map(str.split, lines):
        by_child.setdefault(pid, []).append(name)
    assert list(by_child.values()) == [["close_second", "close_first"]] * 2
    assert "stop hook close_second raised RuntimeError" in worker.log()


def test_a_stop_hook_that_overruns_its_limit_is_given_up(fleet: Fleet) -> None:
    worker = fleet.start(
        application=APPLICATION,
        processes=1,
        config={"hook_timeout_seconds": 0.5},
        environment={FAILING_VARIABLE: "stop overruns"},
    )
    assert worker.stop() == 0
    assert "stop hook close_first ran longer than 0.5 s" in worker.log()


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_hook_that_raises_ends_the_worker_and_is_named(fleet: Fleet, method: str) -> None:
    worker = fleet.start(
        "--start-method",
        method,
        application=APPLICATION,
        environment={FAILING_VARIABLE: "raises"},
        ready=False,
    )
    assert worker.wait() == 1
    assert "hook open_second raised RuntimeError: no licence left" in worker.log()
    assert not worker.events("children_ready")


def test_a_hook_that_overruns_its_limit_ends_the_worker_and_is_named(fleet: Fleet) -> None:
    worker = fleet.start(
        application=APPLICATION,
        config={"hook_timeout_seconds": 1.5},
        environment={FAILING_VARIABLE: "overruns"},
        ready=False,
    )
    assert worker.wait(30) == 1
    assert "hook open_second ran longer than 1.5 s" in worker.log()


def test_a_hook_that_fails_in_a_replacement_stops_the_worker_after_its_running_tasks(
    fleet: Fleet, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    marker = tmp_path / "fails"
    worker = fleet.start(
        "--start-method",
        "spawn",
        application=APPLICATION,
        environment={FAILING_VARIABLE: "raises later", FILE_VARIABLE: str(marker)},
    )
    task_id = insert_raw(connection, "rest", "[2.0]")
    busy = wait_for_status(connection, task_id, "RUNNING").worker_pid
    (idle,) = set(worker.family()) - {busy, *worker.guards()}
    marker.touch()
    os.kill(idle, signal.SIGKILL)
    worker.wait_for("worker_failed")
    assert "hook open_second raised RuntimeError: no licence left" in worker.log()
    assert worker.wait() == 1
    assert task(connection, task_id).status == "COMPLETED"
    assert all(map(is_gone, worker.seen_pids))
