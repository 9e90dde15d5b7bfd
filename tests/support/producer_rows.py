"""The other side of the table: what a producer stored, and rows finished as a worker would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from psycopg import Connection
from psycopg.rows import dict_row

Database: TypeAlias = Connection[tuple[Any, ...]]


def stored(connection: Connection[Any]) -> list[dict[str, Any]]:
    """Return all task rows in the order of their ids."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM horsies_tasks ORDER BY id").fetchall()


def stored_ids(connection: Connection[Any]) -> list[str]:
    return [str(row["id"]) for row in stored(connection)]


def finish(
    connection: Connection[Any],
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


def backends(connection: Connection[Any], role: str) -> list[int]:
    """Return the server processes that serve connections of this role in this database."""
    found = connection.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE application_name = %s AND datname = current_database()",
        (f"horsies:{role}",),
    )
    return [row[0] for row in found]


def terminate(connection: Connection[Any], role: str) -> None:
    """Cut the connections of this role from the server's side, and wait until they are gone."""
    for pid in backends(connection, role):
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
