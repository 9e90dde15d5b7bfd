"""Retries, delayed tasks and deadlines happen when they are due, on a worker that is asleep."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

from tests.support.database import Database
from tests.support.tables import attempts, task, wait_for_status
from tests.support.wait import in_seconds, wait_until
from tests.support.workers import FORKSERVER, HARDLY_POLLS, Fleet, Journal

# Less than any interval that could stand in for a due time; the machine may be busy.
SOON_SECONDS = 5.0


def test_retries_start_at_their_due_times(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(*FORKSERVER, config=HARDLY_POLLS)
    sent = programs.fail_on_schedule.send().unwrap()
    assert sent.get(30_000).err_value.error_code == "FLAKY"
    made = attempts(connection, sent.task_id)
    assert [one.will_retry for one in made] == [True, True, True, False]
    assert [one.attempt for one in made] == [1, 2, 3, 4]
    late = [
        (after.started_at - before.finished_at).total_seconds() - delay
        for (before, after), delay in zip(pairwise(made), [1, 1, 2], strict=True)
    ]
    print("late by", [f"{seconds * 1000:.0f} ms" for seconds in late])
    assert all(-0.01 <= seconds < SOON_SECONDS for seconds in late), late
    lines = journal.lines("start")
    assert [line.attempt for line in lines] == [1, 2, 3, 4]
    for line, one in zip(lines, made, strict=True):
        assert line.at - one.started_at.timestamp() < SOON_SECONDS
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code, row.retry_count) == ("FAILED", "FLAKY", 3)


def test_a_retry_that_waits_can_still_expire(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start()
    ask_for_retry = programs.ask_for_retry.with_options(good_until=in_seconds(600))
    sent = ask_for_retry.send(60, 1).unwrap()
    wait_until(lambda: task(connection, sent.task_id).retry_count == 1)
    assert worker.stop() == 0
    let_deadline_pass(connection, sent.task_id)
    fleet.start()
    assert sent.get(30_000).err_value.error_code == "TASK_EXPIRED"
    assert len(attempts(connection, sent.task_id)) == 1


def let_deadline_pass(connection: Database, task_id: str) -> None:
    connection.execute(
        "UPDATE horsies_tasks SET good_until = clock_timestamp() WHERE id = %s", (task_id,)
    )


def test_what_expired_while_no_worker_ran_is_expired_by_the_first_claim(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    late = programs.sleep.with_options(good_until=in_seconds(600)).send(0).unwrap()
    fine = programs.sleep.send(0).unwrap()
    let_deadline_pass(connection, late.task_id)
    fleet.start()
    assert fine.get(30_000).is_ok()
    assert late.get(30_000).err_value.error_code == "TASK_EXPIRED"
    assert [line.task_id for line in journal.lines("start")] == [fine.task_id]


def test_a_worker_without_an_idle_child_still_keeps_deadlines(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=1, config={"resilience": {"notify_poll_interval_ms": 1_000}})
    busy = programs.sleep.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    late = programs.noop.with_options(good_until=in_seconds(2)).send().unwrap()
    assert late.get(30_000).err_value.error_code == "TASK_EXPIRED"
    assert task(connection, busy.task_id).status == "RUNNING"


def test_an_idle_worker_sleeps(fleet: Fleet, connection: Database, programs: ModuleType) -> None:
    worker = fleet.start()
    # A task a second away keeps the agenda planning; the loop must not spin towards it.
    sent = programs.noop.schedule(1.0).unwrap()
    before = worker.cpu_seconds()
    wait_for_status(connection, sent.task_id, "COMPLETED")
    assert worker.cpu_seconds() - before < 0.3
