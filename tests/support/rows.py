"""Task rows in any condition, written by plain SQL, and exact pictures of them."""

from __future__ import annotations

import json
from typing import Any

from psycopg import Connection, sql

from horsies.ids import new_id


def add_task(connection: Connection[Any], **columns: Any) -> str:
    """Insert one task, PENDING and due unless the columns say otherwise, and return its id.

    A value given as ``sql.SQL`` is an expression.
    """
    values = {
        "id": new_id(),
        "task_name": "work",
        "queue_name": "default",
        "args": "[1]",
        "kwargs": "{}",
        "enqueue_sha": "sha",
        "enqueued_at": sql.SQL("now() - interval '1 minute'"),
        **columns,
    }
    connection.execute(
        sql.SQL("INSERT INTO horsies_tasks ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, values)),
            sql.SQL(", ").join(
                value if isinstance(value, sql.SQL) else sql.Literal(value)
                for value in values.values()
            ),
        )
    )
    return str(values["id"])


def row_of(connection: Connection[Any], task_id: str) -> dict[str, Any]:
    """Return every column of the task."""
    found = connection.execute(
        "SELECT to_jsonb(task)::text FROM horsies_tasks AS task WHERE id = %s", (task_id,)
    ).fetchone()
    assert found is not None
    return dict(json.loads(found[0]))


def picture(connection: Connection[Any], task_id: str) -> tuple[Any, ...]:
    """Return the row as it lies on disk: which version it is, and all of its text."""
    found = connection.execute(
        "SELECT xmin::text, ctid::text, task::text FROM horsies_tasks AS task WHERE id = %s",
        (task_id,),
    ).fetchone()
    assert found is not None
    return tuple(found)


def attempts_of(connection: Connection[Any], task_id: str) -> list[dict[str, Any]]:
    """Return the attempts of the task, first one first."""
    found = connection.execute(
        "SELECT to_jsonb(tried)::text FROM horsies_task_attempts AS tried "
        "WHERE task_id = %s ORDER BY attempt",
        (task_id,),
    )
    return [json.loads(text) for (text,) in found]
