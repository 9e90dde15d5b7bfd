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
from tests.support.workers import HARDLY_POLLS, QUICK_RECOVERY, Fleet, Journal


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
                wait_until(partial(journal.lines, what, handle.task_id))
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
    fleet.start(config=QUICK_RECOVERY | HARDLY_POLLS)
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = clock_timestamp() WHERE id = %s",
        (sent.task_id,),
    )
    wait_for_status(connection, sent.task_id, "CANCELLED")


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_cancel_sent_while_the_worker_was_deaf_is_found_when_it_hears_again(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, sessions: int
) -> None:
    worker = fleet.start(config=HARDLY_POLLS | fleet.sessions(sessions))
    sent = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    # Without a notification, as if it had been lost with the session that ends below. In the other order a
    # worker that listens again within milliseconds would have looked for cancels before this one.
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = clock_timestamp() WHERE id = %s",
        (sent.task_id,),
    )
    assert len(terminate(connection, fleet.listening(sessions))) == 1
    wait_for_status(connection, sent.task_id, "CANCELLED")
    wait_until(lambda: worker.events("notifications_back") or worker.events("database_back"))
