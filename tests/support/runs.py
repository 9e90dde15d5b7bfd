"""Runs of workflows, started and read by plain statements, for the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row

from horsies.app import Horsies
from horsies.db.statements.workflows import (
    find_broken_runs,
    read_nodes,
    read_runs,
    start_runs,
)
from horsies.ids import new_id
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment, ChildReport, NodeInput, NodePart
from horsies.workflow.build.plan import plan
from horsies.workflow.spec import WorkflowSpec
from tests.support.wait import wait_until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run."""

    id: str
    status: str
    parent_workflow_id: str | None
    depth: int
    error: str | None


def start(connection: Connection[Any], *specs: WorkflowSpec[Any]) -> list[str]:
    """Start runs in one statement; return their ids."""
    run_ids = [new_id() for _ in specs]
    plans = [plan(spec, run_id) for spec, run_id in zip(specs, run_ids, strict=True)]
    rows = start_runs.fetch(connection, f"[{','.join(plans)}]")
    assert all(row.created for row in rows)
    return run_ids


def execute_node(
    app: Horsies,
    spec: WorkflowSpec[Any],
    node_id: str,
    results: Mapping[str, str],
    kwargs: str | None = None,
) -> ChildReport:
    """Run a node's task as a child process does, with these stored results of other nodes by node id.

    ``kwargs`` are the stored arguments of an item of a map.
    """
    rows = {row["node_id"]: row for row in json.loads(plan(spec, new_id()))["nodes"]}
    sources = tuple(
        NodeInput(rows[one]["task_index"], rows[one]["kind"], rows[one]["task_name"], text)
        for one, text in results.items()
    )
    row, run_id = rows[node_id], new_id()
    part = NodePart(run_id, row["task_index"], row.get("inputs"), sources, root_workflow_id=run_id)
    stored = row["task_kwargs"] if kwargs is None else kwargs
    return execute(app, Assignment("task", 1, row["task_name"], 1, "[]", stored, None, part))


def status(connection: Connection[Any], run_id: str) -> str:
    """Return the status of the run."""
    (row,) = connection.execute("SELECT status FROM horsies_workflows WHERE id = %s", (run_id,))
    return str(row[0])


def wait_for(connection: Connection[Any], run_id: str, wanted: str, seconds: float = 60.0) -> None:
    """Wait until the run has this status."""
    wait_until(
        lambda: status(connection, run_id) == wanted,
        seconds,
        lambda: (status(connection, run_id), nodes(connection, run_id)),
    )


def wait_for_ends(connection: Connection[Any], seconds: float = 60.0) -> None:
    """Wait until no run is open."""
    wait_until(
        lambda: not [row for row in all_runs(connection) if row.status not in ENDED],
        seconds,
        lambda: [row for row in all_runs(connection) if row.status not in ENDED],
    )


def all_runs(connection: Connection[Any]) -> list[RunRow]:
    """Return every run in the order of ids."""
    with connection.cursor(row_factory=class_row(RunRow)) as cursor:
        cursor.execute(
            "SELECT id::text, status, parent_workflow_id::text, depth, error "
            "FROM horsies_workflows ORDER BY id"
        )
        return cursor.fetchall()


def result(connection: Connection[Any], run_id: str) -> Any:
    """Return the stored result of the run, as plain JSON."""
    (row,) = read_runs.fetch(connection, [run_id], 1 << 30)
    return None if row.result is None else json.loads(row.result)


def nodes(connection: Connection[Any], run_id: str) -> dict[str, str]:
    """Return the status of every node by its id."""
    rows = read_nodes.fetch(connection, run_id)
    return {row.node_id: row.status for row in rows}


def problems(connection: Connection[Any]) -> list[str]:
    """Return the inconsistencies of open runs."""
    return [row.problem for row in find_broken_runs.fetch(connection, 100)]


def deadlocks(connection: Connection[Any]) -> int:
    """Return the number of deadlocks that the server has resolved."""
    (row,) = connection.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    return int(row[0])


def end_runs(connection: Connection[Any]) -> None:
    """Run all tasks of all runs successfully until no run is open."""
    while connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', result = '{\"ok\":\"done\"}' "
        "WHERE status = 'PENDING' AND workflow_id IS NOT NULL"
    ).rowcount:
        pass
