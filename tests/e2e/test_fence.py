"""A worker that lost a task can record nothing for it, however late it notices."""

from __future__ import annotations

import signal
import time
from types import ModuleType

import psutil
import psycopg

from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    recover_dead_workers,
    task,
    transitions,
    wait_for_status,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import FORKSERVER, QUICK_RECOVERY, Fleet, Journal, RunningWorker, is_gone

# Recovery gives the task back to its queue, and another worker claims it.
TAKE_AWAY = "UPDATE horsies_tasks SET status = 'PENDING', claimed_by_worker_id = NULL WHERE id = %s"
CLAIM_ELSEWHERE = """
UPDATE horsies_tasks SET status = 'RUNNING', claimed_by_worker_id = 'another', generation = generation + 1,
    started_at = clock_timestamp() WHERE id = %s
"""
CLAIM_WAITS = """
SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%horsies_claim_v1(%'
    AND datname = current_database()
"""
# The tests recover by SQL and the other worker is an invention, which a real reaper would see through.
NO_REAPER = {
    "recovery": QUICK_RECOVERY["recovery"]
    | {"auto_fail_stale_running": False, "auto_requeue_stale_claimed": False}
}
# The threshold of two seconds, the sleep that the worker may have planned, and a little.
FROZEN_SECONDS = 4.5


def freeze(worker: RunningWorker) -> float:
    """Stop the parent; return when it has been frozen for too long, on the monotonic clock."""
    worker.signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    return time.monotonic() + FROZEN_SECONDS


def test_a_frozen_worker_wakes_to_find_its_tasks_gone_and_kills_their_children(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(*FORKSERVER, processes=3, config=NO_REAPER)
    running = programs.sleep.send(600).unwrap()
    ending = programs.rest_until_released.send("ending").unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    (start,) = journal.lines("start", running.task_id)
    with witnessed(connection):
        over_at = freeze(worker)
        for sent in (running, ending):
            connection.execute(TAKE_AWAY, (sent.task_id,))
            connection.execute(CLAIM_ELSEWHERE, (sent.task_id,))
        # One of the two ends meanwhile; its report waits in the socket of the frozen parent.
        journal.release("ending")
        wait_until(lambda: journal.lines("end", ending.task_id))
        wait_until(lambda: time.monotonic() > over_at)
        worker.signal(signal.SIGCONT)
        # The other child has ended its task and may go on.
        wait_until(lambda: is_gone(start.pid), 30, "the child outlived the freeze")
        # The worker is well and works on.
        assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
        worker.wait_for("outcome_dropped", times=2)
        for sent in (running, ending):
            row = task(connection, sent.task_id)
            assert (row.status, row.claimed_by_worker_id) == ("RUNNING", "another")
            assert row.result is None
            assert attempts(connection, sent.task_id) == []
            assert transitions(connection)[sent.task_id] == [
                ("RUNNING", "PENDING"),
                ("PENDING", "RUNNING"),
            ]
    assert worker.events("worker_frozen")
    assert worker.stop() == 0


def test_a_task_that_was_claimed_before_a_freeze_and_lost_in_it_does_not_begin(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, process_url: str
) -> None:
    worker = fleet.start(processes=2, config=NO_REAPER)
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    with psycopg.connect(process_url) as other:
        worker.signal(signal.SIGSTOP)
        lost, kept = (programs.sleep.send(0.1).unwrap() for _ in range(2))
        other.execute("LOCK TABLE horsies_tasks IN SHARE ROW EXCLUSIVE MODE")
        worker.signal(signal.SIGCONT)
        wait_until(lambda: connection.execute(CLAIM_WAITS).fetchone())
        over_at = freeze(worker)
    wait_for_status(connection, lost.task_id, "RUNNING")
    connection.execute(TAKE_AWAY, (lost.task_id,))
    connection.execute(CLAIM_ELSEWHERE, (lost.task_id,))
    wait_until(lambda: time.monotonic() > over_at)
    worker.signal(signal.SIGCONT)
    assert kept.get(30_000).is_ok()
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert [line.task_id for line in journal.lines("start")] == [kept.task_id]
    assert task(connection, kept.task_id).generation == 1
    assert worker.stop() == 0


def test_a_short_freeze_costs_nothing(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(config=NO_REAPER)
    sent = programs.sleep.send(0.5).unwrap()
    wait_until(lambda: journal.lines("start"))
    freeze(worker)
    wait_until(lambda: journal.lines("end"))
    worker.signal(signal.SIGCONT)
    assert sent.get(30_000).ok_value == "done"
    assert len(attempts(connection, sent.task_id)) == 1


def test_a_worker_that_claims_its_own_lost_task_again_records_the_new_attempt_only(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=2)
    sent = programs.sleep.send(2.0, "same").unwrap()
    wait_until(lambda: journal.lines("start"))
    connection.execute(TAKE_AWAY, (sent.task_id,))
    assert sent.get(30_000).ok_value == "done"
    row = task(connection, sent.task_id)
    assert (row.status, row.generation) == ("COMPLETED", 2)
    first, second = journal.lines("start")
    (end,) = journal.lines("end")
    assert (end.pid, second.pid != first.pid) == (second.pid, True)
    assert end.at - second.at >= 2.0
    (attempt,) = attempts(connection, sent.task_id)
    assert attempt.worker_pid == second.pid


def test_a_task_that_was_taken_away_ends_without_a_trace(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(config=NO_REAPER)
    sent = programs.rest_until_released.send("taken away").unwrap()
    wait_until(lambda: journal.lines("start"))
    with connection.transaction():
        connection.execute(TAKE_AWAY, (sent.task_id,))
        connection.execute(CLAIM_ELSEWHERE, (sent.task_id,))
    journal.release("taken away")
    worker.wait_for("outcome_dropped")
    wait_for_status(connection, sent.task_id, "RUNNING")
    assert attempts(connection, sent.task_id) == []
    assert worker.stop() == 0


def test_a_worker_frozen_under_load_records_nothing_for_what_it_lost(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    frozen = fleet.start(processes=4, config=NO_REAPER)
    with witnessed(connection):
        for task_function in (programs.sleep, programs.sleep_again):
            task_function.send_many(task_function.bind(0.02) for _ in range(150)).unwrap()
        wait_until(lambda: len(journal.lines("end")) >= 40)
        over_at = freeze(frozen)
        lost = recover_dead_workers(connection)
        fleet.start(processes=2, config=NO_REAPER)
        wait_until(lambda: time.monotonic() > over_at)
        frozen.signal(signal.SIGCONT)
        wait_until_empty(connection, 30)
        assert frozen.stop() == 0
        assert_each_ended_once(connection)
        for task_id, attempt in lost:
            recorded = attempts(connection, task_id)[attempt - 1]
            assert (recorded.worker_id, recorded.outcome) == ("dead", "WORKER_FAILURE")
    assert lost


def test_long_tasks_and_only_those_are_said_to_be_alive(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start(config=NO_REAPER)
    long = programs.sleep.send(2.5).unwrap()
    short = [programs.noop.send().unwrap() for _ in range(5)]
    assert all(one.get(30_000).is_ok() for one in short)
    assert long.get(30_000).is_ok()
    beats = connection.execute(
        "SELECT task_id::text, role, pid, sender_id FROM horsies_heartbeats"
    ).fetchall()
    row = task(connection, long.task_id)
    assert 1 <= len(beats) <= 3
    assert set(beats) == {(long.task_id, "runner", row.worker_pid, row.claimed_by_worker_id)}
