"""What workers would have left behind: their own rows, their snapshots, attempts and heartbeats."""

from __future__ import annotations

from typing import Any

from psycopg import Connection, sql

from horsies.ids import new_id
from tests.support.rows import add_task

__all__ = [
    "add_attempt",
    "add_heartbeat",
    "add_run",
    "add_snapshot",
    "add_task",
    "add_worker",
    "ago",
]


def ago(seconds: float) -> sql.SQL:
    """Return an expression for a moment in the past of the database, or in its future."""
    return sql.SQL(f"now() - interval '{float(seconds)} seconds'")


def add_worker(connection: Connection[Any], **columns: Any) -> str:
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


def add_snapshot(connection: Connection[Any], worker_id: str, **columns: Any) -> None:
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


def add_run(connection: Connection[Any], **columns: Any) -> str:
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


def add_attempt(connection: Connection[Any], task_id: str, **columns: Any) -> None:
    values = {
        "task_id": task_id,
        "attempt": 1,
        "outcome": "COMPLETED",
        "finished_at": ago(1),
        **columns,
    }
    _insert(connection, "horsies_task_attempts", values)


def add_heartbeat(connection: Connection[Any], task_id: str, seconds_ago: float) -> None:
    values = {"task_id": task_id, "sender_id": "w", "role": "runner", "sent_at": ago(seconds_ago)}
    _insert(connection, "horsies_heartbeats", values)


def _insert(connection: Connection[Any], table: str, values: dict[str, Any]) -> None:
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
