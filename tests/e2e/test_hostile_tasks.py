"""Every hostile act of a task on a real worker, beside innocent tasks: none of these is harmed.

``pytest -s`` on this file prints a table of the kinds with the number of innocent tasks that each harmed.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest

from tests.support.apps.hostile import KINDS, LOOP_KINDS
from tests.support.database import Database
from tests.support.tables import task, tasks, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker

APPLICATION = "tests.support.apps.hostile_tasks:app"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
# Tasks that a child has learned to be short may be in a window.
WARM_UPS = 40
INNOCENT = 8
# In an async child these cost the coroutines that run beside them in its process.
COSTS_THE_PROCESS = {
    "shut_reading",
    "shut_writing",
    "shut_sockets",
    "close_descriptors",
    "replace_descriptors",
    "limit_descriptors",
    "limit_memory",
    "limit_memory_softly",
    "limit_files",
    "mask_signals",
    "exit_at_once",
    "kill_itself",
    "become_another_program",
    "stop_itself",
}


@pytest.fixture(scope="module")
def hostile(programs: ModuleType) -> Iterator[ModuleType]:
    """The application, once the database of the tests is known."""
    module = importlib.import_module("tests.support.apps.hostile_tasks")
    yield module
    module.app.close()


def send(function: Any, number: int, *args: object) -> list[str]:
    calls = [function.bind(*args) for _ in range(number)]
    return [one.task_id for one in function.send_many(calls).unwrap()]


class Trial:
    """One worker and the outcomes of the innocent tasks on it, by kind."""

    def __init__(self, fleet: Fleet, connection: Database, worker: RunningWorker) -> None:
        self.fleet = fleet
        self.connection = connection
        self.worker = worker
        self.harmed: dict[str, int] = {}
        self.sharing_harmed: dict[str, int] = {}

    def wait_for_end(self, ids: list[str]) -> None:
        def is_over() -> bool:
            return self._count(ids, ENDED) == len(ids)

        wait_until(is_over, 60, lambda: [task(self.connection, one) for one in ids])

    def _count(self, ids: list[str], statuses: tuple[str, ...]) -> int:
        row = self.connection.execute(
            "SELECT count(*) FROM horsies_tasks WHERE id = ANY(%s::uuid[]) AND status = ANY(%s)",
            (ids, list(statuses)),
        ).fetchone()
        assert row is not None
        return int(row[0])

    def count_harmed(self, ids: list[str]) -> int:
        """How many of these tasks did not complete at their first attempt, or ran more or less than once."""
        path = self.fleet.journal.path
        lines = path.read_text().splitlines() if path.exists() else []
        runs = Counter(line.split()[0] for line in lines)
        rows = {row.id: row for row in tasks(self.connection)}
        return sum(
            (rows[one].status, rows[one].retry_count, runs[one]) != ("COMPLETED", 0, 1)
            for one in ids
        )

    def heartbeat(self) -> object:
        row = self.connection.execute("SELECT max(seen_at) FROM horsies_workers").fetchone()
        assert row is not None
        return row[0]

    def check_worker(self) -> None:
        """The worker is alive, sends heartbeats, and shuts down cleanly."""
        before = self.heartbeat()
        wait_until(lambda: self.heartbeat() != before, 30, "no heartbeat")
        assert self.worker.process.poll() is None
        assert self.worker.stop() == 0

    def report(self, mode: str) -> None:
        print(f"\n{mode}: {len(self.harmed)} kinds, {sum(self.harmed.values())} innocent harmed")
        for kind, harmed in self.harmed.items():
            shared = self.sharing_harmed.get(kind)
            beside = "" if shared is None else f", {shared} beside it in its process"
            print(f"  {kind:<24} {harmed}{beside}")

    def replace_child(self, pid: int | None) -> None:
        """Kill the child of the last kind, so that the next one starts with a fresh process."""
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_bursts(trial: Trial, hostile: ModuleType, kind: str) -> None:
    """The attack stands between others in one window."""
    hostile.app.pause_queue("default").unwrap()
    before = send(hostile.innocent_burst, INNOCENT // 2)
    attack = send(hostile.attack_burst, 1, kind)
    behind = send(hostile.innocent_burst, INNOCENT)
    hostile.app.resume_queue("default").unwrap()
    trial.wait_for_end([*before, *attack, *behind])
    trial.harmed[kind] = trial.count_harmed([*before, *behind])


def run_strict(trial: Trial, hostile: ModuleType, kind: str) -> None:
    """The others follow one by one."""
    attack = send(hostile.attack, 1, kind)
    behind = send(hostile.innocent, INNOCENT)
    trial.wait_for_end([*attack, *behind])
    trial.harmed[kind] = trial.count_harmed(behind)


def cancel_one(trial: Trial, hostile: ModuleType, kind: str) -> None:
    """Cancelling works in the same child, which is then replaced: the next kind gets a fresh one."""
    waiting = hostile.wait.send(kind).unwrap()
    path = trial.fleet.journal.path
    wait_until(lambda: waiting.task_id in path.read_text(), 30, "a task did not begin")
    waiting.cancel().unwrap()
    wait_for_status(trial.connection, waiting.task_id, "CANCELLED")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", [run_bursts, run_strict])
def test_a_hostile_task_harms_no_other_one(
    fleet: Fleet, hostile: ModuleType, connection: Database, run: Any
) -> None:
    worker = fleet.start(
        "--quiet-tasks", processes=2, application=APPLICATION, config=QUICK_RECOVERY
    )
    trial = Trial(fleet, connection, worker)
    warm = send(hostile.innocent_burst, WARM_UPS) + send(hostile.attack_burst, WARM_UPS, "")
    trial.wait_for_end(warm)
    # It is in the other child all the time.
    (bystander,) = send(hostile.wait, 1, "bystander")
    wait_for_status(connection, bystander, "RUNNING")
    for kind in KINDS:
        run(trial, hostile, kind)
        cancel_one(trial, hostile, kind)
    trial.report(run.__name__)
    fleet.journal.release("bystander")
    trial.wait_for_end([bystander])
    assert trial.count_harmed([bystander]) == 0
    assert {kind: harmed for kind, harmed in trial.harmed.items() if harmed} == {}
    trial.check_worker()


@pytest.mark.timeout(300)
def test_a_hostile_coroutine_harms_no_task_of_another_process(
    fleet: Fleet, hostile: ModuleType, connection: Database
) -> None:
    options = ("--quiet-tasks", "--async-children", "1", "--async-slots", "50")
    worker = fleet.start(*options, processes=1, application=APPLICATION, config=QUICK_RECOVERY)
    trial = Trial(fleet, connection, worker)
    (bystander,) = send(hostile.wait, 1, "bystander")
    wait_for_status(connection, bystander, "RUNNING")
    for kind in (*KINDS, *LOOP_KINDS):
        run_coroutines(trial, hostile, kind)
    trial.report("coroutines")
    fleet.journal.release("bystander")
    trial.wait_for_end([bystander])
    assert trial.count_harmed([bystander]) == 0
    assert {kind: harmed for kind, harmed in trial.harmed.items() if harmed} == {}
    beside = {kind for kind, harmed in trial.sharing_harmed.items() if harmed}
    assert beside <= COSTS_THE_PROCESS
    trial.check_worker()


def run_coroutines(trial: Trial, hostile: ModuleType, kind: str) -> None:
    sharing = send(hostile.innocent_async, INNOCENT, 0.3)
    path = trial.fleet.journal.path
    wait_until(lambda: path.exists() and all(one in path.read_text() for one in sharing), 60)
    attack = send(hostile.attack_async, 1, kind)
    trial.wait_for_end(attack)
    later = send(hostile.innocent_async, INNOCENT, 0.0)
    trial.wait_for_end([*sharing, *later])
    trial.harmed[kind] = trial.count_harmed(later)
    trial.sharing_harmed[kind] = trial.count_harmed(sharing)
    trial.replace_child(task(trial.connection, later[-1]).worker_pid)
