"""Rows in any state, written by plain SQL without producers or workers, and exact copies of them.

One builder per table. A column's value given as ``sql.SQL`` is an expression.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from psycopg import sql
from psycopg.rows import dict_row

from horsies.ids import new_id
from horsies.retry import RetryPolicy
from tests.support.database import Database

# The id of a task or run that no test adds.
UNKNOWN_ID = "01a1dd00-0000-7000-8000-000000000000"


def add_task(connection: Database, **columns: Any) -> str:
    """Insert one task, PENDING and due unless the columns say otherwise, and return its id."""
    values = {
        "id": new_id(),
        "task_name": "work",
        "queue_name": "default",
        "args": "[1]",
        "kwargs": "{}",
        "enqueue_sha": "sha",
        "enqueued_at": ago(60),
        **columns,
    }
    _insert(connection, "horsies_tasks", values)
    return str(values["id"])


def insert_raw(connection: Database, name: str, args: str, kwargs: str = "{}") -> str:
    """Insert a task that is enqueued now, with any arguments, and return its id."""
    return add_task(connection, task_name=name, args=args, kwargs=kwargs, enqueued_at=ago(0))


def ago(seconds: float) -> sql.SQL:
    """Return an expression for the database's time this many seconds ago; a negative number is in the
    future.
    """
    return sql.SQL(f"now() - interval '{float(seconds)} seconds'")


def add_worker(connection: Database, **columns: Any) -> str:
    values = {
        "worker_id": new_id(),
        "lock_key": 1,
        "hostname": "host-1",
        "pid": 100,
        "processes": 4,
        "queues": ["default"],
        **columns,
    }
    _insert(connection, "horsies_workers", values)
    return str(values["worker_id"])


def add_snapshot(connection: Database, worker_id: str, **columns: Any) -> None:
    values = {
        "worker_id": worker_id,
        "hostname": "host-1",
        "pid": 100,
        "processes": 4,
        "queues": ["default"],
        "tasks_running": 2,
        "tasks_claimed": 1,
        "max_claim_batch": 0,
        "max_claim_per_worker": 4,
        "worker_started_at": ago(3600),
        **columns,
    }
    _insert(connection, "horsies_worker_states", values)


def add_run(connection: Database, **columns: Any) -> str:
    run_id = new_id()
    values = {
        "id": run_id,
        "root_workflow_id": run_id,
        "name": "orders",
        "on_error": "fail",
        "definition_key": "orders",
        "fingerprint": "f",
        "total_nodes": 1,
        "open_nodes": 1,
        **columns,
    }
    _insert(connection, "horsies_workflows", values)
    return run_id


def add_attempt(connection: Database, task_id: str, **columns: Any) -> None:
    values = {
        "task_id": task_id,
        "attempt": 1,
        "outcome": "COMPLETED",
        "finished_at": ago(1),
        **columns,
    }
    _insert(connection, "horsies_task_attempts", values)


def add_heartbeat(connection: Database, task_id: str, seconds_ago: float) -> None:
    values = {"task_id": task_id, "sender_id": "w", "role": "runner", "sent_at": ago(seconds_ago)}
    _insert(connection, "horsies_heartbeats", values)


def _insert(connection: Database, table: str, values: dict[str, Any]) -> None:
    connection.execute(
        sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, values)),
            sql.SQL(", ").join(
                value if isinstance(value, sql.SQL) else sql.Literal(value)
                for value in values.values()
            ),
        )
    )


def stored(connection: Database) -> list[dict[str, Any]]:
    """Return all task rows in the order of their ids."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM horsies_tasks ORDER BY id").fetchall()


def stored_ids(connection: Database) -> list[str]:
    return [str(row["id"]) for row in stored(connection)]


def finish(
    connection: Database,
    task_ids: str | Sequence[str],
    result: str | None = '{"ok":1}',
    *,
    status: str = "COMPLETED",
    failed_reason: str | None = None,
) -> None:
    """End tasks from outside, in one statement."""
    connection.execute(
        "UPDATE horsies_tasks SET status = %s, result = %s, failed_reason = %s "
        "WHERE id = ANY(%s::uuid[])",
        (status, result, failed_reason, [task_ids] if isinstance(task_ids, str) else task_ids),
    )


def row_of(connection: Database, task_id: str) -> dict[str, Any]:
    """Return every column of the task."""
    found = connection.execute(
        "SELECT to_jsonb(task)::text FROM horsies_tasks AS task WHERE id = %s", (task_id,)
    ).fetchone()
    assert found is not None
    return dict(json.loads(found[0]))


def picture(connection: Database, task_id: str) -> tuple[Any, ...]:
    """Return the stored row: its version and all of its text."""
    found = connection.execute(
        "SELECT xmin::text, ctid::text, task::text FROM horsies_tasks AS task WHERE id = %s",
        (task_id,),
    ).fetchone()
    assert found is not None
    return tuple(found)


def attempts_of(connection: Database, task_id: str) -> list[dict[str, Any]]:
    """Return the attempts of the task, in order."""
    found = connection.execute(
        "SELECT to_jsonb(tried)::text FROM horsies_task_attempts AS tried "
        "WHERE task_id = %s ORDER BY attempt",
        (task_id,),
    )
    return [json.loads(text) for (text,) in found]


def add_failed(connection: Database, count: int, code: str = "CARD_REFUSED") -> None:
    """Insert failed tasks of the last minutes; each id contains the time of its send."""
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, status, args, kwargs, enqueue_sha, "
        "error_code, created_at, failed_at) "
        "SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - n * 100), 12, '0') || '7' "
        "|| substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid, 'charge', "
        "'payments', 'FAILED', '[]', '{}', 'sha', %s, now() - n * interval '100 ms', "
        "now() - n * interval '100 ms' FROM generate_series(1, %s) AS n",
        (code, count),
    )


def resent(connection: Database) -> list[int]:
    """Return how often failed tasks were sent again, as a set of counts."""
    found = connection.execute(
        "SELECT DISTINCT (SELECT count(*) FROM horsies_tasks AS again "
        "WHERE again.retried_from_task_id = task.id) FROM horsies_tasks AS task "
        "WHERE task.status = 'FAILED'"
    )
    return sorted(row[0] for row in found.fetchall())


def actions(connection: Database) -> list[tuple[Any, ...]]:
    """Return the history of changes, without drafts."""
    return connection.execute(
        "SELECT actor, verb, subject, outcome, detail FROM horsies_actions "
        "WHERE outcome <> 'draft' ORDER BY id"
    ).fetchall()


def drafts(connection: Database) -> list[tuple[Any, ...]]:
    """Return the dry runs that were never started."""
    return connection.execute(
        "SELECT actor, verb, subject FROM horsies_actions WHERE outcome = 'draft' ORDER BY id"
    ).fetchall()


def retried(*codes: str) -> dict[str, Any]:
    """Return the columns of a task that is retried once for these codes."""
    policy = RetryPolicy.fixed([5], auto_retry_for=list(codes), jitter=False)
    return {"max_retries": 1, "task_options": json.dumps({"retry_policy": policy.to_json()})}


def add_many(connection: Database, count: int, queue: str = "default") -> None:
    """Insert this many due tasks, one millisecond apart."""
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at) "
        "SELECT gen_random_uuid(), 'work', %s, 'sha', now() - n * interval '1 millisecond' "
        "FROM generate_series(1, %s) AS n",
        (queue, count),
    )
