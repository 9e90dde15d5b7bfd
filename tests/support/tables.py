"""What the database says about tasks, for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row

from horsies.ids import new_id
from tests.support.pgbouncer import client_names, server_pids
from tests.support.workers import Fleet, eventually


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The columns of a task that say what became of it."""

    id: str
    status: str
    retry_count: int
    generation: int
    error_code: str | None
    failed_reason: str | None
    result: str | None
    claimed_by_worker_id: str | None
    worker_pid: int | None
    enqueued_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    next_retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One recorded attempt."""

    task_id: str
    attempt: int
    outcome: str
    will_retry: bool
    error_code: str | None
    error_message: str | None
    failed_reason: str | None
    started_at: datetime
    finished_at: datetime
    worker_id: str
    worker_pid: int
    worker_process_name: str


TASK_COLUMNS = """id::text, status, retry_count, generation, error_code, failed_reason, result,
    claimed_by_worker_id, worker_pid, enqueued_at, started_at, completed_at, failed_at, next_retry_at"""
ATTEMPT_COLUMNS = """task_id::text, attempt, outcome, will_retry, error_code, error_message,
    failed_reason, started_at, finished_at, worker_id, worker_pid, worker_process_name"""


def tasks(connection: Connection[Any], status: str | None = None) -> list[TaskRow]:
    """All tasks, or those of a status, in the order they were sent."""
    with connection.cursor(row_factory=class_row(TaskRow)) as cursor:
        cursor.execute(
            f"SELECT {TASK_COLUMNS} FROM horsies_tasks "
            "WHERE %(status)s::text IS NULL OR status = %(status)s ORDER BY id",
            {"status": status},
        )
        return cursor.fetchall()


def task(connection: Connection[Any], task_id: str) -> TaskRow:
    """One task."""
    with connection.cursor(row_factory=class_row(TaskRow)) as cursor:
        cursor.execute(f"SELECT {TASK_COLUMNS} FROM horsies_tasks WHERE id = %s", (task_id,))
        (row,) = cursor.fetchall()
        return row


def attempts(connection: Connection[Any], task_id: str | None = None) -> list[AttemptRow]:
    """All recorded attempts, or those of one task, first attempt first."""
    with connection.cursor(row_factory=class_row(AttemptRow)) as cursor:
        cursor.execute(
            f"SELECT {ATTEMPT_COLUMNS} FROM horsies_task_attempts "
            "WHERE %(id)s::uuid IS NULL OR task_id = %(id)s ORDER BY task_id, attempt",
            {"id": task_id},
        )
        return cursor.fetchall()


def count(connection: Connection[Any], *statuses: str) -> int:
    """How many tasks have one of these statuses."""
    row = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status = ANY(%s)", (list(statuses),)
    ).fetchone()
    assert row is not None
    return int(row[0])


def insert_raw(connection: Connection[Any], name: str, args: str, kwargs: str = "{}") -> str:
    """Store a task without the producer, whatever its arguments; its id."""
    task_id = new_id()
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha) "
        "VALUES (%s, %s, 'default', %s, %s, 'raw')",
        (task_id, name, args, kwargs),
    )
    return task_id


def wait_for_status(
    connection: Connection[Any], task_id: str, status: str, seconds: float = 10.0
) -> TaskRow:
    """The task, once it has that status."""
    eventually(
        lambda: task(connection, task_id).status == status,
        seconds,
        lambda: task(connection, task_id),
    )
    return task(connection, task_id)


def wait_until_empty(connection: Connection[Any], seconds: float = 30.0) -> None:
    """Wait until no task is waiting or running."""
    open_statuses = ("PENDING", "CLAIMED", "RUNNING")
    eventually(
        lambda: count(connection, *open_statuses) == 0,
        seconds,
        lambda: f"{count(connection, *open_statuses)} tasks are still open",
    )


def backends(connection: Connection[Any], name: str) -> list[int]:
    """The server processes of connections whose application name is like this."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE %s ORDER BY pid",
        (name,),
    )
    return [row[0] for row in rows]


def held_connections(fleet: Fleet, connection: Connection[Any], name: str) -> int:
    """How many connections whose application name begins like this our processes hold: to the server,
    or to the pooler before it, whose own connections are not theirs.
    """
    pids = set(backends(connection, f"{name}%"))
    if not fleet.is_pooled:
        return len(pids)
    clients = [one for one in client_names(fleet.way.url) if one.startswith(name)]
    return len(clients) + len(pids - server_pids(fleet.way.url))


def terminate(connection: Connection[Any], name: str) -> list[int]:
    """Cut every connection whose application name is like this, as an outage does."""
    pids = backends(connection, name)
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM unnest(%s::integer[]) AS pid", (pids,)
    )
    return pids


def terminate_others(connection: Connection[Any]) -> None:
    """Cut every connection to the database but this one, those a pooler keeps in reserve included."""
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )


# What the recovery of a dead worker's tasks does, by the policy each task was sent with: listed
# crashes run again, others have failed.
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


def recover_dead_workers(connection: Connection[Any]) -> list[tuple[str, int]]:
    """Do what the recovery of dead workers does; the attempts that ended by it."""
    return list(connection.execute(RECOVER))


WITNESS = """
CREATE TABLE e2e_transitions (
    number bigint GENERATED ALWAYS AS IDENTITY, task_id uuid, was text, became text);
CREATE FUNCTION e2e_witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO e2e_transitions (task_id, was, became) VALUES (NEW.id, OLD.status, NEW.status);
    RETURN NULL;
END $$;
CREATE TRIGGER e2e_witness AFTER UPDATE ON horsies_tasks FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION e2e_witness();
"""
NO_WITNESS = """
DROP TRIGGER e2e_witness ON horsies_tasks; DROP FUNCTION e2e_witness; DROP TABLE e2e_transitions;
"""


@contextmanager
def witnessed(connection: Connection[Any]) -> Iterator[None]:
    """Have the database itself write down every change of a task's status."""
    connection.execute(WITNESS)
    try:
        yield
    finally:
        connection.execute(NO_WITNESS)


def transitions(connection: Connection[Any]) -> dict[str, list[tuple[str, str]]]:
    """The witnessed changes of every task, in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for task_id, was, became in connection.execute(
        "SELECT task_id::text, was, became FROM e2e_transitions ORDER BY number"
    ):
        found.setdefault(task_id, []).append((was, became))
    return found


def assert_each_ended_once(connection: Connection[Any]) -> None:
    """Every task has reached one terminal status, once, and nothing changed it afterwards."""
    terminal = {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}
    changes = transitions(connection)
    for row in tasks(connection):
        path = changes[row.id]
        assert [became in terminal for _, became in path] == [False] * (len(path) - 1) + [True]
        assert path[-1][1] == row.status
        final = [one for one in attempts(connection, row.id) if not one.will_retry]
        assert len(final) == 1, (row, final)
