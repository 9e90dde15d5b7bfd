"""A dead worker's tasks continue within seconds; a live one is never declared dead."""

from __future__ import annotations

import signal
from types import ModuleType

import psycopg

from horsies.logs import EventName
from tests.support.database import Database, backends
from tests.support.private_server import PrivateServer
from tests.support.rows import insert_raw
from tests.support.tables import attempts, task, wait_until_empty, witnessed
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, RunningWorker


def test_tasks_of_a_killed_worker_are_retried_or_failed(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    victim = fleet.start(processes=2)
    failed = programs.sleep.send(600).unwrap()
    retried = programs.sleep_again.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    fleet.start(processes=2)
    with witnessed(connection):
        victim.signal(signal.SIGKILL)
        error = failed.get(30_000).err_value
        wait_until(lambda: attempts(connection, retried.task_id))
    assert error.error_code == "WORKER_CRASHED"
    (attempt,) = attempts(connection, failed.task_id)
    assert (attempt.outcome, attempt.will_retry) == ("WORKER_FAILURE", False)
    (attempt,) = attempts(connection, retried.task_id)
    assert (attempt.outcome, attempt.will_retry) == ("WORKER_FAILURE", True)
    wait_until(lambda: len(journal.lines("start", retried.task_id)) == 2)
    assert [line.attempt for line in journal.lines("start", retried.task_id)] == [1, 2]


def test_tasks_of_a_worker_that_left_at_once_are_taken_over_as_quickly(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    leaver = fleet.start(processes=1)
    left = programs.never_stop.send().unwrap()
    wait_until(lambda: journal.lines("start"))
    fleet.start(processes=1)
    leaver.signal(signal.SIGTERM)
    assert leaver.wait_for("worker_stopping")["running"] == 1
    leaver.signal(signal.SIGTERM)
    assert leaver.wait_for("tasks_interrupted")["count"] == 1
    leaver.signal(signal.SIGTERM)
    assert leaver.wait() == 3
    assert left.get(30_000).err_value.error_code == "WORKER_CRASHED"
    assert task(connection, left.task_id).status == "FAILED"


def test_a_worker_that_starts_later_finds_what_the_dead_one_left(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    victim = fleet.start()
    left = programs.sleep.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    victim.signal(signal.SIGKILL)
    victim.wait()
    fleet.start()
    assert left.get(30_000).err_value.error_code == "WORKER_CRASHED"
    lost = "SELECT 1 FROM horsies_workers WHERE pid = %s AND was_lost AND stopped_at IS NOT NULL"
    wait_until(lambda: connection.execute(lost, (victim.pid,)).fetchone())


def test_a_live_worker_whose_connections_are_all_cut_is_not_declared_dead(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    victim = fleet.start()
    sent = programs.sleep.send(11).unwrap()
    wait_until(lambda: journal.lines("start"))
    mine = backends(connection, "horsies:turn") + backends(connection, "horsies:listener")
    watcher = fleet.start()
    for times in (1, 2):
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM unnest(%s::integer[]) AS pid", (mine,)
        )
        wait_until(lambda times=times: has_come_back(victim, fleet, times))  # type: ignore[misc]
        known = set(mine)
        mine = [
            pid
            for pid in backends(connection, "horsies:turn")
            + backends(connection, "horsies:listener")
            if pid not in known
        ]
    with psycopg.connect(fleet.database_url, autocommit=True) as fresh:
        assert sent.get(30_000).ok_value == "done"
        row = task(fresh, sent.task_id)
        assert (row.status, row.generation, row.retry_count) == ("COMPLETED", 1, 0)
        assert len(attempts(fresh, sent.task_id)) == 1
    assert not watcher.events("workers_lost") + victim.events("workers_lost")
    assert len(journal.lines("start")) == 1


def test_a_restart_of_the_server_costs_no_running_task(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    server, fleet = own_server, own_fleet
    workers = [fleet.start(ready=False) for _ in range(2)]
    for worker in workers:
        worker.wait_until_ready()
    with psycopg.connect(server.url, autocommit=True) as connection:
        task_ids = [insert_raw(connection, "sleep", "[8]") for _ in range(4)]
        wait_until(lambda: len(fleet.journal.lines("start")) == 4)
    for times in (1, 2):
        server.crash()
        server.start()
        for worker in workers:
            wait_until(lambda worker=worker, times=times: has_come_back(worker, fleet, times))  # type: ignore[misc]
    with psycopg.connect(server.url, autocommit=True) as connection:
        wait_until_empty(connection)
        for task_id in task_ids:
            row = task(connection, task_id)
            assert (row.status, row.generation, row.retry_count) == ("COMPLETED", 1, 0)
            assert len(attempts(connection, task_id)) == 1
    assert len(fleet.journal.lines("start")) == 4
    assert not any(worker.events("workers_lost") for worker in workers)


def has_come_back(worker: RunningWorker, fleet: Fleet, times: int) -> bool:
    """Whether it has met so many breaks and is over the last; a pooler may hide those of turns."""
    states = [event["event"] for event in worker.events() if event["event"].startswith("database_")]
    if states[-1:] == ["database_lost"]:
        return False
    back: EventName = "notifications_back" if fleet.is_pooled else "database_back"
    return len(worker.events(back)) >= times
