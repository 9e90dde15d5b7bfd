"""Async children that die, are stopped, and are replaced: every task in them has its own outcome."""

from __future__ import annotations

import importlib
import os
import signal
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import async_children

from tests.support.database import Database
from tests.support.tables import assert_each_ended_once, attempts, count, task, witnessed
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, RunningWorker

APPLICATION = "tests.support.apps.coroutines:app"


@pytest.fixture(scope="session")
def coroutines(programs: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.coroutines")


def start(
    fleet: Fleet, *options: str, children: int = 1, processes: int = 0, slots: int = 50
) -> RunningWorker:
    flags = ("--async-children", str(children), "--async-slots", str(slots), *options)
    return fleet.start(*flags, application=APPLICATION, processes=processes)


def test_a_crash_costs_the_tasks_of_its_child_each_by_its_policy(
    fleet: Fleet, coroutines: ModuleType, connection: Database
) -> None:
    worker = start(fleet)
    for how, description in (("exit", "exit code 7"), ("kill", "signal 9 (SIGKILL)")):
        failing = [coroutines.nap.send(600).unwrap() for _ in range(3)]
        retried = [coroutines.retried_nap.send(600).unwrap() for _ in range(3)]
        wait_until(lambda: count(connection, "RUNNING") == 6)
        crashing = coroutines.ends_its_process.send(how).unwrap()
        for one in (*failing, crashing):
            error = one.get(20_000).err_value
            assert error.error_code == "WORKER_CRASHED"
            assert description in (error.message or "")
            assert len(attempts(connection, one.task_id)) == 1
        for one in retried:
            assert one.get(20_000).ok_value == 2
            first, second = attempts(connection, one.task_id)
            assert (first.error_code, first.outcome) == ("WORKER_CRASHED", "WORKER_FAILURE")
            assert second.outcome == "COMPLETED"
    assert worker.stop() == 0


def test_a_coroutine_that_swallows_its_cancel_costs_its_child(
    fleet: Fleet, journal: Journal, coroutines: ModuleType, connection: Database
) -> None:
    start(fleet, children=2)
    stubborn = coroutines.endless.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start", stubborn.task_id))
    others = [coroutines.nap.send(30).unwrap() for _ in range(6)]
    assert stubborn.get(20_000).err_value.error_code == "TASK_TIMEOUT"
    assert journal.lines("cancelled", stubborn.task_id)
    # Those beside it are lost, those in the other child are not.
    ended = wait_until(lambda: [one for one in others if count_of(connection, one.task_id)])
    for one in ended:
        error = one.get(30_000).err_value
        assert error.error_code == "WORKER_CRASHED"
        assert "task 'endless' in it did not end within 5 s" in (error.message or "")
        assert attempts(connection, one.task_id)[0].worker_pid == line.pid
    assert count(connection, "RUNNING") == len(others) - len(ended) > 0


def count_of(connection: Database, task_id: str) -> int:
    return len(attempts(connection, task_id))


def test_a_stop_waits_for_coroutines_and_a_second_one_cancels_them(
    fleet: Fleet, journal: Journal, coroutines: ModuleType, connection: Database
) -> None:
    worker = start(fleet)
    short = coroutines.nap.send(0.5).unwrap()
    long = coroutines.nap.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    worker.signal(signal.SIGTERM)
    assert short.get(30_000).is_ok()
    assert task(connection, long.task_id).status == "RUNNING"
    worker.signal(signal.SIGTERM)
    assert long.get(30_000).err_value.error_code == "WORKER_STOPPED"
    assert worker.wait() == 3


def test_a_child_at_its_limit_takes_no_more_tasks_finishes_and_is_replaced(
    fleet: Fleet, coroutines: ModuleType, connection: Database
) -> None:
    # Two tasks per slot; 50 slots.
    worker = start(fleet, "--max-tasks-per-child", "2")
    last = coroutines.nap.send(1.5).unwrap()
    sent = [coroutines.nap.send(0).unwrap() for _ in range(300)]
    pids = [one.get(20_000).ok_value for one in sent]
    assert last.get(30_000).is_ok()
    by_pid = {pid: pids.count(pid) for pid in pids}
    assert len(by_pid) >= 3
    assert max(by_pid.values()) <= 100
    assert worker.stop() == 0
    assert worker.events("child_died") == []
    lines = Path(f"{fleet.journal.path}.hooks").read_text().splitlines()
    # Every child opened and closed its session once.
    assert len(lines) == len({line.split()[0] for line in lines}) >= len(by_pid)
    assert {line.split()[1] for line in lines} == {"1"}


def test_workers_without_ordinary_children_leave_other_tasks_alone(
    fleet: Fleet, coroutines: ModuleType, connection: Database
) -> None:
    start(fleet)
    waiting = [coroutines.ordinary.send().unwrap() for _ in range(50)]
    assert coroutines.nap.send(0).unwrap().get(30_000).is_ok()
    assert count(connection, "PENDING") == 50
    fleet.start(application=APPLICATION, processes=1)
    assert all(one.get(30_000).is_ok() for one in waiting)


def test_a_limit_of_claims_holds_for_coroutines_and_other_tasks_together(
    fleet: Fleet, journal: Journal, programs: ModuleType
) -> None:
    sent = [programs.sleep.send(0.2).unwrap() for _ in range(6)]
    sent += [programs.sleep_async.send(0.2).unwrap() for _ in range(6)]
    flags = ("--async-children", "1", "--async-slots", "5", "--max-claim-per-worker", "3")
    fleet.start(*flags, processes=2)
    assert all(one.get(30_000).is_ok() for one in sent)
    changes = sorted((line.at, 1 if line.what == "start" else -1) for line in journal.lines())
    assert len(changes) == 24
    assert max(accumulate(change for _, change in changes)) == 3


def test_a_backlog_of_other_tasks_leaves_half_of_a_limit_to_coroutines(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    for _ in range(4):
        programs.sleep.send(600).unwrap()
    sent = [programs.sleep_async.send(0).unwrap() for _ in range(3)]
    flags = ("--async-children", "1", "--async-slots", "5", "--max-claim-per-worker", "2")
    fleet.start(*flags, processes=2)
    assert all(one.get(30_000).is_ok() for one in sent)
    assert count(connection, "RUNNING", "PENDING") == 4


def test_both_kinds_of_tasks_take_turns_where_one_may_be_claimed_at_a_time(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    others = [programs.noop.send().unwrap() for _ in range(20)]
    coroutine = programs.sleep_async.send(0).unwrap()
    flags = ("--async-children", "1", "--async-slots", "5", "--max-claim-per-worker", "1")
    fleet.start(*flags, processes=2)
    assert all(one.get(30_000).is_ok() for one in (coroutine, *others))
    starts = sorted((task(connection, one.task_id).started_at, one) for one in (coroutine, *others))
    assert coroutine in [one for _, one in starts[:2]]


def test_a_worker_killed_with_its_coroutines_is_recovered(
    fleet: Fleet, journal: Journal, coroutines: ModuleType, connection: Database
) -> None:
    worker = start(fleet)
    retried = [coroutines.retried_nap.send(600).unwrap() for _ in range(5)]
    wait_until(lambda: len(journal.lines("start")) == 5)
    os.kill(worker.pid, signal.SIGKILL)
    start(fleet)
    assert [one.get(30_000).ok_value for one in retried] == [2] * 5


@pytest.mark.parametrize("victim", ["child", "worker"])
def test_five_hundred_coroutines_killed_at_once_have_an_outcome_each(
    fleet: Fleet, journal: Journal, coroutines: ModuleType, connection: Database, victim: str
) -> None:
    worker = start(fleet, slots=500)
    with witnessed(connection):
        calls = [coroutines.nap.bind(600)] * 250
        failing = coroutines.nap.send_many(calls).unwrap()
        retried = coroutines.retried_nap.send_many([coroutines.retried_nap.bind(600)] * 250)
        wait_until(lambda: len(journal.lines("start")) == 500)
        (child,) = {line.pid for line in journal.lines("start")}
        os.kill(child if victim == "child" else worker.pid, signal.SIGKILL)
        if victim == "worker":
            start(fleet, slots=500)
        wait_until(lambda: count(connection, "FAILED") == 250)
        wait_until(lambda: count(connection, "COMPLETED") == 250)
        assert failing[0].get(30_000).err_value.error_code == "WORKER_CRASHED"
        assert {one.get(30_000).ok_value for one in retried.unwrap()} == {2}
        assert_each_ended_once(connection)
    # No coroutine of either kind began more often than its attempts say.
    assert len(journal.lines("start")) == len(attempts(connection)) == 750
    assert coroutines.wrapped.send(7).unwrap().get(30_000).ok_value == 7


def test_the_benchmark_measures_sleepers_and_finds_the_blocking_task_named(
    process_url: str, connection: Database
) -> None:
    done = async_children.measure(process_url, tasks=200, children=2, slots=50)
    assert 2 <= done.seconds < 20  # two rounds of a second each
    assert done.connections >= 1
    assert done.names_blocking_task
