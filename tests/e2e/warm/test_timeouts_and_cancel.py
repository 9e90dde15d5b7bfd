"""Time limits and cancelling end one task and leave its siblings alone."""

from __future__ import annotations

from types import ModuleType

import pytest

from horsies import TaskStatus
from tests.support.database import Database
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker, is_gone

# After this time beyond its limit, a task that does not end is killed.
GRACE_SECONDS = 5


def seconds_taken(connection: Database, task_id: str) -> float:
    (attempt,) = attempts(connection, task_id)
    return float((attempt.finished_at - attempt.started_at).total_seconds())


def test_a_time_limit_ends_that_task_and_no_other(
    worker: RunningWorker, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sibling = programs.rest_until_released.send("beside a limit").unwrap()
    wait_until(lambda: journal.lines("start"))
    sent = programs.limited.send(600).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "TASK_TIMEOUT"
    assert "timeout_ms=300" in (error.message or "")
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("FAILED", "TASK_TIMEOUT")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "TASK_TIMEOUT")
    assert 0.3 <= seconds_taken(connection, sent.task_id) < GRACE_SECONDS
    assert task(connection, sibling.task_id).status == "RUNNING"
    journal.release("beside a limit")
    assert sibling.get(30_000).ok_value == "done"


def test_a_task_within_its_time_limit_is_left_alone(
    worker: RunningWorker, programs: ModuleType
) -> None:
    patient = programs.limited.with_options(timeout_ms=5_000)
    for _ in range(3):
        assert patient.send(0.15).unwrap().get(30_000).ok_value == "done"


@pytest.mark.parametrize("name", ["limited_and_wrapping", "limited_in_group"])
def test_a_time_limit_is_told_apart_from_the_exception_it_came_out_as(
    worker: RunningWorker, programs: ModuleType, connection: Database, name: str
) -> None:
    sent = getattr(programs, name).send().unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_TIMEOUT"
    assert seconds_taken(connection, sent.task_id) < GRACE_SECONDS


def test_a_task_deaf_to_its_time_limit_is_killed(
    worker: RunningWorker, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sent = programs.limited_and_deaf.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"))
    assert sent.get(30_000).err_value.error_code == "TASK_TIMEOUT"
    assert is_gone(line.pid)
    assert seconds_taken(connection, sent.task_id) >= GRACE_SECONDS


def test_a_time_limit_is_tried_again_when_its_policy_lists_it(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.limited_and_retried.send().unwrap()
    assert sent.get(30_000).ok_value == "done"
    first, second = attempts(connection, sent.task_id)
    assert (first.error_code, first.will_retry) == ("TASK_TIMEOUT", True)
    assert (second.outcome, second.will_retry) == ("COMPLETED", False)


def test_a_waiting_task_is_cancelled_at_once_without_an_attempt(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.noop.schedule(60).unwrap()
    assert sent.cancel().unwrap().was_status is TaskStatus.PENDING
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert task(connection, sent.task_id).status == "CANCELLED"
    assert attempts(connection, sent.task_id) == []


@pytest.mark.pooled
def test_a_running_task_is_asked_to_stop_and_may_clean_up(
    worker: RunningWorker, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sibling = programs.sleep.send(1.0).unwrap()
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    assert sent.cancel().unwrap().was_status is TaskStatus.RUNNING
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("CANCELLED", "TASK_CANCELLED")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.attempt, attempt.outcome) == (1, "FAILED")
    assert (attempt.error_code, attempt.will_retry) == ("TASK_CANCELLED", False)
    assert [line.what for line in journal.lines(task_id=sent.task_id)] == [
        "start",
        "stopped",
        "clean-up",
    ]
    assert sibling.get(30_000).ok_value == "done"


def test_a_running_coroutine_cleans_up_when_it_is_cancelled(
    worker: RunningWorker, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sent = programs.sleep_async.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    sent.cancel().unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert journal.lines("clean-up", sent.task_id)
    assert programs.add_async.send(1, 2).unwrap().get(30_000).ok_value == 3


def test_a_task_that_ignores_the_request_is_killed(
    worker: RunningWorker, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    sent = programs.never_stop.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"))
    sent.cancel().unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert journal.lines("ignored")
    assert is_gone(line.pid)
    assert task(connection, sent.task_id).status == "CANCELLED"


def test_what_a_cancelled_task_started_dies_with_it(
    worker: RunningWorker, journal: Journal, programs: ModuleType
) -> None:
    sent = programs.start_grandchild.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"))
    assert not is_gone(int(line.label))
    sent.cancel().unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    wait_until(lambda: is_gone(int(line.label)))
