"""Retention without any patience, while tasks and runs are in progress: only finished records go."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psycopg

from horsies.db.statements.workers import (
    delete_old_heartbeats,
    delete_old_tasks,
    delete_old_worker_states,
    delete_old_workers,
)
from horsies.db.statements.workflows import delete_old_workflows
from tests.support.database import Database
from tests.support.tables import transitions, witnessed
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal

FLOWS = "tests.support.apps.flows:app"
STATEMENTS = (
    delete_old_heartbeats,
    delete_old_worker_states,
    delete_old_workers,
    delete_old_tasks,
)
RUNS, NODES, TASKS = 12, 4, 100


@contextmanager
def impatient_retention(url: str) -> Iterator[list[str]]:
    """Delete finished records again and again, in small batches, as soon as they have ended."""
    stopping = threading.Event()
    deleted: list[str] = []

    def sweep() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not stopping.wait(0.005):
                for statement in STATEMENTS:
                    deleted.extend(row.id for row in statement.fetch(connection, 0, 7))
                runs = delete_old_workflows.fetch(connection, 0, 2)
                deleted.extend(row.id for row in runs)

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        yield deleted
    finally:
        stopping.set()
        thread.join()


def test_records_are_deleted_while_others_are_in_progress_and_no_work_is_lost(
    fleet: Fleet, journal: Journal, programs: ModuleType, flows: ModuleType, connection: Database
) -> None:
    workers = [fleet.start(application=FLOWS) for _ in range(2)]
    with witnessed(connection), impatient_retention(fleet.database_url) as deleted:
        long = programs.rest_until_released.send("long").unwrap()
        wait_until(lambda: journal.lines("start", long.task_id))
        started = [flows.chain(NODES).start().unwrap() for _ in range(RUNS)]
        sent = programs.add.send_many([programs.add.bind(1, 1)] * TASKS).unwrap()
        gone = {one.task_id for one in sent} | {run.workflow_id for run in started}
        wait_until(lambda: gone <= set(deleted), 60, lambda: f"{len(gone - set(deleted))} are left")
        assert connection.execute("SELECT id::text, status FROM horsies_tasks").fetchall() == [
            (long.task_id, "RUNNING")
        ]
        journal.release("long")
        wait_until(lambda: long.task_id in deleted)
        ends = Counter(changes[-1][1] for changes in transitions(connection).values())
    assert ends == {"COMPLETED": TASKS + RUNS * NODES + 1}
    assert [worker.stop() for worker in workers] == [0, 0]
    for table in ("horsies_task_attempts", "horsies_workflows", "horsies_workflow_tasks"):
        (count,) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (1,)
        assert count == 0, table
