"""A living worker keeps its tasks through every kind of silence; one that prefers to stop them does."""

from __future__ import annotations

from datetime import datetime
from types import ModuleType

import psycopg

from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, is_gone

# One wait between two attempts to reconnect is longer than the threshold for a freeze.
LONG_WAITS = {
    "recovery": {"runner_heartbeat_interval_ms": 1_000, "running_stale_threshold_ms": 2_000},
    "resilience": {"db_retry_initial_ms": 4_000, "db_retry_max_ms": 8_000},
}
STOPS_TASKS = {"recovery": {"worker_lost_after_ms": 10_000, "stop_tasks_after_silence_ms": 5_000}}


def test_a_planned_wait_for_the_database_is_not_a_freeze(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.database_url) as proxy:
        worker = fleet.start(processes=1, config=LONG_WAITS, database_url=proxy.url)
        sent = programs.sleep.send(6).unwrap()
        wait_until(lambda: journal.lines("start"))
        proxy.stop()
        wait_until(lambda: journal.lines("end"))
        proxy.start()
        assert sent.get(30_000).ok_value == "done"
        assert len(attempts(connection, sent.task_id)) == 1
        assert not worker.events("worker_frozen")
        assert worker.stop() == 0


def test_a_worker_may_stop_its_tasks_before_others_run_them_again(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.database_url) as proxy:
        worker = fleet.start(processes=1, config=STOPS_TASKS, database_url=proxy.url)
        sent = programs.sleep_again.send(600).unwrap()
        (first,) = wait_until(lambda: journal.lines("start"))
        fleet.start(processes=1, config=STOPS_TASKS)
        proxy.stop()
        stopped_at = datetime.fromisoformat(worker.wait_for("tasks_stopped")["time"])
        wait_until(lambda: is_gone(first.pid))
        wait_until(lambda: len(journal.lines("start")) == 2)
        began_at = journal.lines("start")[-1].at
        assert began_at > stopped_at.timestamp(), "the other one began before this one stopped"
        assert task(connection, sent.task_id).retry_count == 1
        proxy.start()
        worker.wait_for("worker_declared_lost")


def test_a_connected_worker_does_not_stop_its_tasks(fleet: Fleet, programs: ModuleType) -> None:
    worker = fleet.start(config={"recovery": {"stop_tasks_after_silence_ms": 2_500}})
    assert programs.sleep.send(4).unwrap().get(30_000).ok_value == "done"
    assert not worker.events("tasks_stopped")


def test_a_row_that_another_session_has_locked_keeps_no_other_task_waiting(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    workers = [fleet.start(processes=2) for _ in range(2)]
    locked = programs.rest_until_released.send("locked").unwrap()
    wait_until(lambda: journal.lines("start"))
    with psycopg.connect(fleet.database_url) as holder:
        holder.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (locked.task_id,))
        journal.release("locked")
        wait_until(lambda: any(worker.events("blocked") for worker in workers))
        others = [programs.add.send(number, 1).unwrap() for number in range(20)]
        assert [sent.get(30_000).unwrap() for sent in others] == list(range(1, 21))
        assert task(connection, locked.task_id).status == "RUNNING"
    assert locked.get(30_000).ok_value == "done"
    assert (
        len(attempts(connection, locked.task_id)) == len(journal.lines("end", locked.task_id)) == 1
    )
    assert not any(worker.events("workers_lost") for worker in workers)
    assert [worker.stop() for worker in workers] == [0, 0]
