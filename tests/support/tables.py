"""Reads tasks and attempts, waits for them, and installs a trigger that records every change of status."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeAlias

from psycopg.rows import namedtuple_row

from tests.support.database import Database, backends
from tests.support.pgbouncer import client_names, server_pids
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

# A task or an attempt as a named tuple of its columns.
TaskRow: TypeAlias = Any
AttemptRow: TypeAlias = Any

TASK_COLUMNS = """id::text, status, retry_count, generation, error_code, failed_reason, result,
    claimed_by_worker_id, worker_pid, enqueued_at, started_at, completed_at, failed_at, next_retry_at,
    max_retries"""
ATTEMPT_COLUMNS = """task_id::text, attempt, outcome, will_retry, error_code, error_message,
    failed_reason, started_at, finished_at, worker_id, worker_pid, worker_process_name,
    retry_reason"""


def tasks(connection: Database, status: str | None = None) -> list[TaskRow]:
    """Return all tasks, or the tasks with a status, in the order of their sends."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        cursor.execute(
            f"SELECT {TASK_COLUMNS} FROM horsies_tasks "
            "WHERE %(status)s::text IS NULL OR status = %(status)s ORDER BY id",
            {"status": status},
        )
        return cursor.fetchall()


def task(connection: Database, task_id: str) -> TaskRow:
    """One task."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        cursor.execute(f"SELECT {TASK_COLUMNS} FROM horsies_tasks WHERE id = %s", (task_id,))
        (row,) = cursor.fetchall()
        return row


def attempts(connection: Database, task_id: str | None = None) -> list[AttemptRow]:
    """Return all recorded attempts, or the attempts of one task, first attempt first."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        cursor.execute(
            f"SELECT {ATTEMPT_COLUMNS} FROM horsies_task_attempts "
            "WHERE %(id)s::uuid IS NULL OR task_id = %(id)s ORDER BY task_id, attempt",
            {"id": task_id},
        )
        return cursor.fetchall()


def count(connection: Database, *statuses: str) -> int:
    """Return the number of tasks with one of these statuses."""
    row = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status = ANY(%s)", (list(statuses),)
    ).fetchone()
    assert row is not None
    return int(row[0])


def widest_window(connection: Database) -> int:
    """Return the current maximum number of tasks in a child."""
    rows = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status = 'RUNNING' GROUP BY worker_pid"
    ).fetchall()
    return max((held for (held,) in rows), default=0)


def wait_for_status(
    connection: Database, task_id: str, status: str, seconds: float = 60.0
) -> TaskRow:
    """Wait until the task has this status, and return it."""
    wait_until(
        lambda: task(connection, task_id).status == status,
        seconds,
        lambda: task(connection, task_id),
    )
    return task(connection, task_id)


def leases(connection: Database) -> list[datetime]:
    """Return the expiry times of the leases of tasks that wait in a worker."""
    found = connection.execute(
        "SELECT claim_expires_at FROM horsies_tasks WHERE status = 'CLAIMED'"
    )
    return [expires_at for (expires_at,) in found]


def wait_until_empty(connection: Database, seconds: float = 60.0) -> None:
    """Wait until no task is waiting or running."""
    open_statuses = ("PENDING", "CLAIMED", "RUNNING")
    wait_until(
        lambda: count(connection, *open_statuses) == 0,
        seconds,
        lambda: f"{count(connection, *open_statuses)} tasks are still open",
    )


def held_connections(fleet: Fleet, connection: Database, name: str) -> int:
    """Return the number of our processes' connections whose application name begins with this text, to
    the server or to the pooler. The pooler's own connections do not count.
    """
    pids = set(backends(connection, f"{name}%"))
    if not fleet.is_pooled:
        return len(pids)
    clients = [one for one in client_names(fleet.way.url) if one.startswith(name)]
    return len(clients) + len(pids - server_pids(fleet.way.url))


# The effect of recovery on a dead worker's tasks: a task runs again if its policy lists the crash,
# otherwise it has failed.
RECOVER = """
WITH dead AS MATERIALIZED (
    SELECT id, retry_count < max_retries AS again FROM horsies_tasks WHERE status = 'RUNNING' FOR UPDATE),
recovered AS (
    UPDATE horsies_tasks AS task SET
        status = CASE WHEN dead.again THEN 'PENDING' ELSE 'FAILED' END,
        retry_count = task.retry_count + dead.again::integer,
        error_code = CASE WHEN dead.again THEN NULL ELSE 'WORKER_CRASHED' END,
        failed_reason = CASE WHEN dead.again THEN NULL ELSE 'recovered' END,
        claimed_by_worker_id = NULL
    FROM dead WHERE task.id = dead.id
    RETURNING task.id, task.retry_count, task.started_at, dead.again)
INSERT INTO horsies_task_attempts (
    task_id, attempt, outcome, will_retry, error_code, failed_reason, started_at, finished_at,
    worker_id, worker_pid, worker_process_name)
SELECT id, retry_count + (NOT again)::integer, 'WORKER_FAILURE', again, 'WORKER_CRASHED', 'recovered',
    started_at, clock_timestamp(), 'dead', 0, 'dead'
FROM recovered
RETURNING task_id::text, attempt
"""


def recover_dead_workers(connection: Database) -> list[tuple[str, int]]:
    """Recover the tasks of dead workers; return the attempts that the recovery ended."""
    return list(connection.execute(RECOVER))


def busy_children(worker: RunningWorker, connection: Database) -> list[TaskRow]:
    """Return the tasks that children of this worker are running."""
    family = set(worker.family())
    return [row for row in tasks(connection, "RUNNING") if row.worker_pid in family]


def kill_a_busy_child(worker: RunningWorker, connection: Database) -> None:
    """Kill a child of this worker while it runs a task, unless all tasks end before."""

    def has_lost_an_attempt() -> bool:
        busy = busy_children(worker, connection)
        if not busy:
            return count(connection, "PENDING", "CLAIMED", "RUNNING") == 0
        row = busy[0]
        with suppress(ProcessLookupError):  # it was replaced meanwhile
            os.kill(row.worker_pid, signal.SIGKILL)
        # The task may have ended before the kill.
        (ended,) = wait_until(
            lambda: [
                one for one in attempts(connection, row.id) if one.attempt == row.retry_count + 1
            ]
        )
        return bool(ended.error_code == "WORKER_CRASHED")

    wait_until(has_lost_an_attempt)


def stop_family(worker: RunningWorker, connection: Database, *task_ids: str) -> list[int]:
    """Freeze a worker and the children of these tasks, and end the worker's session."""
    rows = connection.execute(
        "SELECT DISTINCT worker_pid FROM horsies_tasks WHERE id = ANY(%s::uuid[])",
        (list(task_ids),),
    )
    children = [pid for (pid,) in rows]
    for child in children:
        os.kill(child, signal.SIGSTOP)
    worker.signal(signal.SIGSTOP)
    for pid in backends(connection, "horsies:turn"):
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return [*children, worker.pid]


WITNESS = """
CREATE TABLE e2e_transitions (
    number bigint GENERATED ALWAYS AS IDENTITY, task_id uuid, was text, became text);
CREATE FUNCTION e2e_witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.e2e_transitions (task_id, was, became) VALUES (NEW.id, OLD.status, NEW.status);
    RETURN NULL;
END $$;
CREATE TRIGGER e2e_witness AFTER UPDATE ON horsies_tasks FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION e2e_witness();
"""
NO_WITNESS = """
DROP TRIGGER e2e_witness ON horsies_tasks; DROP FUNCTION e2e_witness; DROP TABLE e2e_transitions;
"""


@contextmanager
def witnessed(connection: Database) -> Iterator[None]:
    """Make the database record every change of a task's status."""
    connection.execute(WITNESS)
    try:
        yield
    finally:
        connection.execute(NO_WITNESS)


def transitions(connection: Database) -> dict[str, list[tuple[str, str]]]:
    """Return the recorded changes of every task in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for task_id, was, became in connection.execute(
        "SELECT task_id::text, was, became FROM e2e_transitions ORDER BY number"
    ):
        found.setdefault(task_id, []).append((was, became))
    return found


def assert_each_ended_once(connection: Database) -> None:
    """Check that every task reached one terminal status once, and did not change afterwards."""
    terminal = {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}
    changes = transitions(connection)
    finals = Counter(one.task_id for one in attempts(connection) if not one.will_retry)
    for row in tasks(connection):
        path = changes[row.id]
        assert [became in terminal for _, became in path] == [False] * (len(path) - 1) + [True]
        assert path[-1][1] == row.status
        assert finals[row.id] == 1, (row, attempts(connection, row.id))
