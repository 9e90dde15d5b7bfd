"""A database that keeps a turn waiting: children are looked after, and the worker can be stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psycopg

from tests.support.database import Database
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, RunningWorker, is_gone

FORCED = 3
SOON_LATE = {
    "recovery": {
        "runner_heartbeat_interval_ms": 1_000,
        "running_stale_threshold_ms": 2_000,
        "claimer_heartbeat_interval_ms": 1_000,
    }
}


@contextmanager
def locked(database_url: str) -> Iterator[Database]:
    """Nobody gets at the tasks; lends a connection that may look at everything else."""
    with psycopg.connect(database_url) as holder, holder.transaction():
        holder.execute("LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")
        yield holder


def keeps_somebody_waiting(holder: Database) -> bool:
    found = holder.execute(
        "SELECT count(*) FROM pg_locks WHERE NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    return found is not None and found[0] > 0


def insists_on_the_end(worker: RunningWorker) -> bool:
    """Signal once more; signals that come too fast for one another count as one."""
    worker.signal(signal.SIGTERM)
    return is_gone(worker.pid)


def test_a_time_limit_is_kept_while_the_database_keeps_the_worker_waiting(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=2)
    short = programs.sleep.send(0.5).unwrap()
    limited = programs.limited_and_telling.send(600).unwrap()
    for sent in (short, limited):
        wait_until(lambda sent=sent: journal.lines("start", sent.task_id))  # type: ignore[misc]
    with locked(fleet.database_url) as holder:
        wait_until(lambda: keeps_somebody_waiting(holder))
        wait_until(lambda: journal.lines("stopped", limited.task_id))
    assert limited.get(30_000).err_value.error_code == "TASK_TIMEOUT"
    assert short.get(30_000).ok_value == "done"
    assert len(attempts(connection, limited.task_id)) == 1


def test_the_last_request_to_stop_is_obeyed_while_the_database_keeps_the_worker_waiting(
    fleet: Fleet, journal: Journal, programs: ModuleType
) -> None:
    worker = fleet.start()
    sent = programs.sleep.send(0.5).unwrap()
    wait_until(lambda: journal.lines("start", sent.task_id))
    family = worker.family()
    with locked(fleet.database_url) as holder:
        wait_until(lambda: keeps_somebody_waiting(holder))
        wait_until(lambda: insists_on_the_end(worker))
        assert worker.wait() == FORCED
        wait_until(lambda: all(is_gone(pid) for pid in family))


def test_a_worker_that_was_kept_waiting_was_not_frozen(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=2, config=SOON_LATE)
    short = programs.sleep.send(0.5).unwrap()
    long = programs.sleep.send(6).unwrap()
    for sent in (short, long):
        wait_until(lambda sent=sent: journal.lines("start", sent.task_id))  # type: ignore[misc]
    with locked(fleet.database_url) as holder:
        wait_until(lambda: keeps_somebody_waiting(holder))
        wait_until(lambda: journal.lines("end", long.task_id))
    assert long.get(30_000).ok_value == "done"
    row = task(connection, long.task_id)
    assert (row.status, row.generation) == ("COMPLETED", 1)
    assert not worker.events("worker_frozen")
