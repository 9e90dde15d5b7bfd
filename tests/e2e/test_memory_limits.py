"""A task that exceeds its memory limit costs one child; its neighbours finish."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, count, task, widest_window
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, is_gone

APPLICATION = "tests.support.apps.hungry:app"
LIMIT_MB = 300


@pytest.fixture(scope="module")
def hungry(programs: ModuleType) -> Iterable[ModuleType]:
    """The application, once the database of the tests is known."""
    module = importlib.import_module("tests.support.apps.hungry")
    yield module
    module.app.close()


@pytest.mark.parametrize(
    ("step_mb", "pause_seconds"), [(5, 0.02), (100, 0.0), (600, 60.0)], ids=["slow", "fast", "gulp"]
)
def test_a_task_that_allocates_without_end_is_ended_at_its_limit(
    fleet: Fleet,
    hungry: ModuleType,
    connection: Database,
    journal: Journal,
    step_mb: int,
    pause_seconds: float,
) -> None:
    worker = fleet.start(application=APPLICATION)
    neighbour = hungry.nap.send("beside").unwrap()
    wait_until(lambda: journal.lines("start"))
    sent = hungry.eat.send(step_mb, pause_seconds).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "MEMORY_LIMIT"
    assert f"more than its memory_limit_mb={LIMIT_MB}" in (error.message or "")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "MEMORY_LIMIT")
    (line,) = journal.lines("start", sent.task_id)
    assert is_gone(line.pid)
    assert task(connection, neighbour.task_id).status == "RUNNING"
    journal.release("beside")
    assert neighbour.get(30_000).ok_value == "done"
    assert [one.attempt for one in attempts(connection)] == [1, 1]
    assert worker.stop() == 0


def test_a_listed_code_is_retried_and_the_programs_of_the_attempt_are_killed(
    fleet: Fleet, hungry: ModuleType, connection: Database, journal: Journal
) -> None:
    fleet.start(application=APPLICATION)
    sent = hungry.eat_once.send(600).unwrap()
    assert sent.get(30_000).ok_value == "done"
    first, second = attempts(connection, sent.task_id)
    assert (first.error_code, first.will_retry) == ("MEMORY_LIMIT", True)
    assert (second.outcome, second.will_retry) == ("COMPLETED", False)
    (program,) = journal.lines("program")
    wait_until(lambda: is_gone(int(program.label)))


def test_memory_that_earlier_tasks_left_does_not_end_a_task(
    fleet: Fleet, hungry: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--max-tasks-per-child", "0", application=APPLICATION, processes=1)
    crowded = hungry.keep.send(220).unwrap().get(30_000).ok_value
    assert hungry.keep.send(150).unwrap().get(30_000).ok_value != crowded
    assert [one.outcome for one in attempts(connection)] == ["COMPLETED"] * 2
    assert worker.stop() == 0


def test_a_coroutine_with_a_limit_does_not_end_the_tasks_of_an_async_child(
    fleet: Fleet, hungry: ModuleType, journal: Journal
) -> None:
    fleet.start("--async-children", "1", application=APPLICATION)
    neighbour = hungry.nap.send("on the loop").unwrap()
    (line,) = wait_until(lambda: journal.lines("start"))
    error = hungry.eat_async.send(50).unwrap().get(30_000).err_value
    assert error.error_code == "MEMORY_LIMIT"
    assert hungry.own_pid.send().unwrap().get(30_000).ok_value != line.pid
    journal.release("on the loop")
    assert neighbour.get(30_000).ok_value == "done"


def test_the_memory_of_threads_counts(
    fleet: Fleet, hungry: ModuleType, connection: Database
) -> None:
    worker = fleet.start(application=APPLICATION)
    error = hungry.eat_in_threads.send(4, 5).unwrap().get(30_000).err_value
    assert error.error_code == "MEMORY_LIMIT"
    assert [one.error_code for one in attempts(connection)] == ["MEMORY_LIMIT"]
    assert worker.stop() == 0


def test_short_tasks_in_windows_finish_beside_tasks_that_are_ended(
    fleet: Fleet, hungry: ModuleType, connection: Database
) -> None:
    """A task with a limit never waits in a window, and none waits behind it, so its end costs no other."""
    short, hungry_ones = [], []
    for part in range(6):
        numbers = range(part * 200, (part + 1) * 200)
        short += hungry.quick.send_many([hungry.quick.bind(number) for number in numbers]).unwrap()
        hungry_ones.append(hungry.eat.send(100).unwrap())
    fleet.start("--quiet-tasks", processes=3, application=APPLICATION)
    widest = 0
    while count(connection, "PENDING", "CLAIMED", "RUNNING"):
        widest = max(widest, widest_window(connection))
    assert widest > 1, "no window opened"
    assert [one.get(30_000).ok_value for one in short] == list(range(1_200))
    codes = [str(one.get(30_000).err_value.error_code) for one in hungry_ones]
    assert codes == ["MEMORY_LIMIT"] * 6
    assert [one.attempt for one in attempts(connection)] == [1] * 1_206


def test_tasks_without_a_limit_may_use_more(fleet: Fleet, hungry: ModuleType) -> None:
    fleet.start(application=APPLICATION)
    assert hungry.unlimited.send(LIMIT_MB + 100).unwrap().get(30_000).ok_value == LIMIT_MB + 100


def test_a_worker_refuses_a_limit_below_a_fresh_child(fleet: Fleet) -> None:
    environment = {"HUNGRY_LIMIT_MB": "5"}
    worker = fleet.start(application=APPLICATION, environment=environment, ready=False)
    assert worker.wait() == 1
    assert "memory_limit_mb=5 of task 'eat'; raise the limit." in worker.log()
