"""Time limits and cancelling end one task and leave its siblings alone."""

from __future__ import annotations

import random
from functools import partial
from types import ModuleType

import pytest

from horsies import Err, Ok, TaskStatus
from tests.support.database import Database, terminate
from tests.support.tables import (
    attempts,
    task,
    tasks,
    transitions,
    wait_for_status,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal, is_gone


def seconds_taken(connection: Database, task_id: str) -> float:
    (attempt,) = attempts(connection, task_id)
    return float((attempt.finished_at - attempt.started_at).total_seconds())


def test_a_time_limit_ends_that_task_and_no_other(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    sibling = programs.sleep.send(1.0).unwrap()
    wait_until(lambda: journal.lines("start"), 5)
    sent = programs.limited.send(600).unwrap()
    error = sent.get(10_000).err_value
    assert error.error_code == "TASK_TIMEOUT"
    assert "timeout_ms=300" in (error.message or "")
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("FAILED", "TASK_TIMEOUT")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "TASK_TIMEOUT")
    assert 0.3 <= seconds_taken(connection, sent.task_id) < 1.3
    assert task(connection, sibling.task_id).status == "RUNNING"
    assert sibling.get(10_000).ok_value == "done"


def test_a_task_within_its_time_limit_is_left_alone(fleet: Fleet, programs: ModuleType) -> None:
    fleet.start(processes=1)
    for _ in range(3):
        assert programs.limited.send(0.15).unwrap().get(10_000).ok_value == "done"


@pytest.mark.parametrize("name", ["limited_and_wrapping", "limited_in_group"])
def test_a_time_limit_is_told_apart_from_the_exception_it_came_out_as(
    fleet: Fleet, programs: ModuleType, connection: Database, name: str
) -> None:
    fleet.start(processes=1)
    sent = getattr(programs, name).send().unwrap()
    assert sent.get(10_000).err_value.error_code == "TASK_TIMEOUT"
    assert seconds_taken(connection, sent.task_id) < 3


def test_a_task_deaf_to_its_time_limit_is_killed(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    sent = programs.limited_and_deaf.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"), 5)
    assert sent.get(15_000).err_value.error_code == "TASK_TIMEOUT"
    assert is_gone(line.pid)
    assert 5 <= seconds_taken(connection, sent.task_id) < 7


def test_a_time_limit_is_tried_again_when_its_policy_lists_it(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    sent = programs.limited_and_retried.send().unwrap()
    assert sent.get(10_000).ok_value == "done"
    first, second = attempts(connection, sent.task_id)
    assert (first.error_code, first.will_retry) == ("TASK_TIMEOUT", True)
    assert (second.outcome, second.will_retry) == ("COMPLETED", False)


def test_a_waiting_task_is_cancelled_at_once_without_an_attempt(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    sent = programs.noop.schedule(60).unwrap()
    assert sent.cancel().unwrap().was_status is TaskStatus.PENDING
    assert sent.get(5_000).err_value.error_code == "TASK_CANCELLED"
    assert task(connection, sent.task_id).status == "CANCELLED"
    assert attempts(connection, sent.task_id) == []


@pytest.mark.pooled
def test_a_running_task_is_asked_to_stop_and_may_clean_up(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start()
    sibling = programs.sleep.send(1.0).unwrap()
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2, 5)
    assert sent.cancel().unwrap().was_status is TaskStatus.RUNNING
    assert sent.get(5_000).err_value.error_code == "TASK_CANCELLED"
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
    assert sibling.get(5_000).ok_value == "done"
    assert worker.stop() == 0


def test_a_running_coroutine_cleans_up_when_it_is_cancelled(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=1)
    sent = programs.sleep_async.send(600).unwrap()
    wait_until(lambda: journal.lines("start"), 5)
    sent.cancel().unwrap()
    assert sent.get(5_000).err_value.error_code == "TASK_CANCELLED"
    assert journal.lines("clean-up", sent.task_id)
    assert programs.add_async.send(1, 2).unwrap().get(5_000).ok_value == 3


def test_a_task_that_ignores_the_request_is_killed(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    sent = programs.never_stop.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"), 5)
    sent.cancel().unwrap()
    assert sent.get(15_000).err_value.error_code == "TASK_CANCELLED"
    assert journal.lines("ignored")
    assert is_gone(line.pid)
    assert task(connection, sent.task_id).status == "CANCELLED"


def test_what_a_cancelled_task_started_dies_with_it(
    fleet: Fleet, journal: Journal, programs: ModuleType
) -> None:
    fleet.start()
    sent = programs.start_grandchild.send().unwrap()
    (line,) = wait_until(lambda: journal.lines("start"), 5)
    assert not is_gone(int(line.label))
    sent.cancel().unwrap()
    assert sent.get(5_000).err_value.error_code == "TASK_CANCELLED"
    wait_until(lambda: is_gone(int(line.label)), 2)


def test_a_cancel_and_a_finish_have_exactly_one_winner(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=4)
    with witnessed(connection):
        answers = {}
        for _ in range(100):
            handle = programs.sleep.send(random.random() / 100).unwrap()
            # Cancel when it has started, when it has ended, or as it comes.
            if what := random.choice(["start", "end", None]):
                wait_until(partial(journal.lines, what, handle.task_id), 5)
            answers[handle.task_id] = handle.cancel()
        wait_until_empty(connection)
        ends = {line.task_id for line in journal.lines("end")}
        for task_id, answer in answers.items():
            row = task(connection, task_id)
            made = attempts(connection, task_id)
            terminal = [became for _, became in transitions(connection)[task_id]][-1]
            assert terminal == row.status
            match answer:
                case Ok(cancelled) if cancelled.was_status is TaskStatus.PENDING:
                    assert (row.status, made) == ("CANCELLED", [])
                    assert task_id not in ends
                case Ok(_):
                    assert row.status in ("CANCELLED", "COMPLETED")
                    assert len(made) == 1
                case Err(refused):
                    assert refused.current_status is TaskStatus.COMPLETED
                    assert row.status == "COMPLETED"
            if row.status == "COMPLETED":
                assert task_id in ends
    assert {row.status for row in tasks(connection)} == {"CANCELLED", "COMPLETED"}


def test_a_cancel_whose_notification_got_lost_is_found_by_the_next_heartbeat(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(config=QUICK_RECOVERY)
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: journal.lines("start"), 5)
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = clock_timestamp() WHERE id = %s",
        (sent.task_id,),
    )
    wait_for_status(connection, sent.task_id, "CANCELLED", 1.5)


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_cancel_sent_while_the_worker_was_deaf_is_found_when_it_hears_again(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, sessions: int
) -> None:
    worker = fleet.start(config=fleet.sessions(sessions))
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: journal.lines("start"), 5)
    assert len(terminate(connection, fleet.listening(sessions))) == 1
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = clock_timestamp() WHERE id = %s",
        (sent.task_id,),
    )
    wait_for_status(connection, sent.task_id, "CANCELLED", 3)
    assert worker.events("notifications_back") or worker.events("database_back")
