"""One dying child costs exactly one task."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from types import ModuleType

from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    task,
    wait_for_status,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import FORKSERVER, Fleet, Journal


def test_three_dying_children_cost_three_tasks_and_no_sibling_notices(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(*FORKSERVER, processes=8)
    siblings = [programs.rest_until_released.send("siblings").unwrap() for _ in range(5)]
    victim = programs.sleep.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 6)
    os.kill(task(connection, victim.task_id).worker_pid or 0, signal.SIGKILL)
    exiting = programs.exit_at_once.send(3).unwrap()
    crashing = programs.segfault.send().unwrap()

    reasons = {
        exiting.task_id: "exit code 3",
        crashing.task_id: "signal 11 (SIGSEGV)",
        victim.task_id: "signal 9 (SIGKILL)",
    }
    for task_id, reason in reasons.items():
        row = wait_for_status(connection, task_id, "FAILED")
        assert row.error_code == "WORKER_CRASHED"
        assert reason in (row.failed_reason or "")
        (attempt,) = attempts(connection, task_id)
        assert (attempt.outcome, attempt.attempt) == ("WORKER_FAILURE", 1)

    # The siblings occupy five children: only new children can run three more at once.
    more = [programs.rest_until_released.send("more").unwrap() for _ in range(3)]
    wait_until(lambda: len(journal.lines("start")) == 9)
    journal.release("more")
    for sent in more:
        assert sent.get(30_000).is_ok()
    journal.release("siblings")
    for sent in siblings:
        assert sent.get(30_000).ok_value == "done"
        (attempt,) = attempts(connection, sent.task_id)
        assert (attempt.outcome, attempt.attempt) == ("COMPLETED", 1)
    assert len(journal.lines("start")) == 9


def test_a_poisonous_task_does_not_hold_up_the_others(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    poison = [programs.exit_at_once.send().unwrap() for _ in range(10)]
    good = programs.noop.send_many(programs.noop.bind() for _ in range(100)).unwrap()
    assert all(sent.get(30_000).is_ok() for sent in good)
    assert all(sent.get(30_000).err_value.error_code == "WORKER_CRASHED" for sent in poison)


def test_every_killed_child_costs_at_most_one_task(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(*FORKSERVER, processes=4)
    killed = 0
    with witnessed(connection):
        programs.sleep.send_many(programs.sleep.bind(0.01) for _ in range(300)).unwrap()
        while count(connection, "PENDING", "RUNNING") > 10:
            goal = journal.length() + random.randint(10, 30)
            wait_until(
                lambda goal=goal: (  # type: ignore[misc]
                    journal.length() >= goal or count(connection, "PENDING") == 0
                ),
            )
            pid = journal.lines("start")[-1].pid
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        wait_until_empty(connection)
        assert_each_ended_once(connection)
    assert count(connection, "COMPLETED") + count(connection, "FAILED") == 300
    assert 1 <= count(connection, "FAILED") <= killed
    starts = [line.task_id for line in journal.lines("start")]
    assert len(starts) == len(set(starts))


def test_an_idle_child_killed_from_outside_costs_nothing(
    fleet: Fleet, programs: ModuleType
) -> None:
    worker = fleet.start("--start-method", "spawn", processes=2)
    children = set(worker.family()) - set(worker.guards())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    # The new children are counted without the guard, which is a process of the family too.
    wait_until(lambda: len(set(worker.family()) - set(worker.guards()) - children) == 2)
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert worker.stop() == 0
