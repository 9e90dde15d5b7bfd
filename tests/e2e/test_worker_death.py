"""Processes of tasks when their worker is killed: none of them is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType

import pytest

from horsies.worker import os_process
from horsies.worker.child import guard
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, RunningWorker, is_gone

METHODS = ("forkserver", "fork", "spawn")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user")

StartPrograms = Callable[..., list[int]]


@pytest.fixture
def start_programs(journal: Journal, programs: ModuleType) -> Iterator[StartPrograms]:
    """Send a task that starts three programs and wait for it; their pids. None outlives the test."""

    def start(**arguments: bool) -> list[int]:
        programs.start_programs.send(**arguments).unwrap()
        wait_until(lambda: journal.lines("start"))
        return pids()

    def pids() -> list[int]:
        return [int(line.label) for line in journal.lines("program")]

    yield start
    for pid in pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill(worker: RunningWorker) -> None:
    worker.signal(signal.SIGKILL)
    worker.wait()


def guard_of(worker: RunningWorker) -> int:
    (pid,) = worker.guards()
    return pid


def assert_ends(pids: list[int]) -> None:
    wait_until(lambda: all(map(is_gone, pids)), 30, lambda: f"left: {list_left(pids)}")


def list_left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not is_gone(pid)]


@pytest.mark.parametrize("method", METHODS)
def test_programs_of_a_task_die_with_a_killed_worker(
    fleet: Fleet, start_programs: StartPrograms, method: str
) -> None:
    worker = fleet.start("--start-method", method, processes=1)
    started = start_programs()
    assert len(started) == 3
    family = worker.family()
    assert list_left(started) == started
    kill(worker)
    assert_ends([*family, *started])


@needs_root
@pytest.mark.parametrize("method", METHODS)
def test_a_task_that_changed_its_user_dies_with_a_killed_worker(
    fleet: Fleet, start_programs: StartPrograms, method: str
) -> None:
    worker = fleet.start("--start-method", method, processes=1)
    started = start_programs(changes_user=True)
    family = worker.family()
    kill(worker)
    assert_ends([*family, *started])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_programs_die_with_a_worker_whose_fork_server_is_dead_or_stuck(
    fleet: Fleet, start_programs: StartPrograms, number: int
) -> None:
    worker = fleet.start("--start-method", "forkserver", processes=1)
    started = start_programs()
    (child,) = {line.pid for line in fleet.journal.lines("start")}
    for pid in set(worker.family()) - {child, guard_of(worker), *started}:
        os.kill(pid, number)
    family = worker.family()
    kill(worker)
    assert_ends([*family, *started])


def test_a_killed_guard_is_replaced(fleet: Fleet, start_programs: StartPrograms) -> None:
    worker = fleet.start(processes=1)
    started = start_programs()
    first = guard_of(worker)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: worker.guards() not in ([], [first]))
    kill(worker)
    assert_ends(started)


def test_detached_programs_outlive_an_orderly_stop(
    fleet: Fleet, start_programs: StartPrograms
) -> None:
    worker = fleet.start(processes=1)
    plain, *detached = start_programs(ends=True)
    family = worker.family()
    assert worker.stop() == 0
    assert_ends([plain, *(pid for pid in family if pid not in detached)])
    assert list_left(detached) == detached


def test_a_signal_to_all_processes_of_a_worker_does_not_end_its_guard(
    fleet: Fleet, start_programs: StartPrograms
) -> None:
    worker = fleet.start("--start-method", "spawn", processes=1)
    started = start_programs()
    pid = guard_of(worker)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    kill(worker)
    assert_ends([pid, *started])


def test_programs_die_with_a_worker_that_ran_inside_a_task_of_a_killed_worker(
    fleet: Fleet, start_programs: StartPrograms
) -> None:
    outer_mark = os_process.new_mark()
    marked = (
        "import os, resource, sys; "
        "resource.setrlimit(resource.RLIMIT_RTTIME, (int(sys.argv[1]), resource.RLIM_INFINITY)); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    through = (sys.executable, "-c", marked, str(outer_mark))
    worker = fleet.start(processes=1, through=through)
    started = start_programs()
    family = worker.family()
    assert guard.kill_marked(outer_mark) == []
    worker.wait()
    assert_ends([*family, *started])


def test_a_worker_that_cannot_have_a_guard_warns_and_works(
    fleet: Fleet, programs: ModuleType
) -> None:
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_RTTIME, (10**9, 10**9)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    worker = fleet.start(processes=1, through=(sys.executable, "-c", limited))
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert worker.guards() == []
    assert "RLIMIT_RTTIME is limited" in worker.log()
