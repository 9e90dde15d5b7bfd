"""Descriptions of runs from the oracle and from the database, in the same form for comparison."""

from __future__ import annotations

import json
from typing import Any

from psycopg import Connection

from tests.support.oracle.rules import Oracle
from tests.support.oracle.tree import NOTHING_YET, Node, Run, Work

Picture = dict[str, Any]

READ_RUNS = """
SELECT id::text, status, error, (horsies_run_result_v1(run, 1000000000)).result, open_nodes, failed_nodes,
    total_nodes, matched_case, completed_at IS NOT NULL, status <> 'PAUSED' OR paused_at IS NOT NULL,
    ARRAY(SELECT name || '=' || value FROM horsies_workflow_signals AS early
          WHERE early.workflow_id = run.id ORDER BY early.id)
FROM horsies_workflows AS run WHERE id = ANY(%s::uuid[])
"""

READ_NODES = """
SELECT node.workflow_id::text, node.task_index, node.status, node.propagated, deps_open, deps_ok,
    deps_bad, context_open, horsies_node_result_v1(node), node.sub_workflow_id::text,
    node.sub_workflow_summary, node.completed_at IS NOT NULL,
    CASE WHEN items_total > 0 THEN ARRAY[items_total, items_open, items_bad] END,
    task.status, task.held, CASE node.kind WHEN 'signal' THEN task.kwargs END
FROM horsies_workflow_tasks AS node LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
WHERE node.workflow_id = ANY(%s::uuid[]) ORDER BY node.workflow_id, node.task_index
"""

READ_ITEMS = """
SELECT node.workflow_id::text, node.task_index, task.status, task.held,
    task.enqueued_at = horsies_never_v1(), task.kwargs
FROM horsies_workflow_tasks AS node
CROSS JOIN LATERAL horsies_items(node.workflow_id, node.task_index) AS item
JOIN horsies_tasks AS task ON task.id = item.id
WHERE node.workflow_id = ANY(%s::uuid[]) AND node.kind = 'map'
ORDER BY node.workflow_id, node.task_index, item.item_index
"""


def assert_agree(connection: Connection[Any], oracle: Oracle) -> None:
    """Compare every run of the oracle with its rows."""
    stored = stored_picture(connection, sorted(oracle.runs))
    expected = {run.id: expected_run(run) for run in oracle.runs.values()}
    for run_id, run in expected.items():
        found = stored[run_id]
        assert found.pop("nodes") == run.pop("nodes"), f"nodes of {run_id}"
        assert found == run, run_id


def bare(value: Any) -> Any:
    """Remove texts whose wording may vary."""
    if isinstance(value, list):
        return [bare(element) for element in value]
    if not isinstance(value, dict):
        return value
    kept = {name: bare(part) for name, part in value.items() if name != "error_summary"}
    if isinstance(kept.get("error_code"), dict):
        kept.pop("message", None)
        kept.pop("exception", None)
    return kept


def expected_run(run: Run) -> Picture:
    return {
        "status": run.status,
        "error": bare(run.error),
        "result": bare(run.result()),
        "open_nodes": len(run.uncounted()),
        "failed_nodes": sum(node.counted and node.status == "FAILED" for node in run.nodes),
        "total_nodes": len(run.nodes),
        "matched_case": run.matched_case,
        "has_end": not run.is_open,
        "signals": [f"{name}={json.dumps(value)}" for name, value in run.stored_signals],
        "nodes": [_expected_node(node) for node in run.nodes],
    }


def _expected_counters(node: Node) -> tuple[int, ...] | None:
    """Return the counters of a waiting node."""
    if node.status != "PENDING":
        return None
    before = [node.run.nodes[index] for index in node.shape.after]
    good = sum(end.counted and end.status == "COMPLETED" for end in before)
    bad = sum(end.counted and end.status != "COMPLETED" for end in before)
    unseen = sum(not node.run.nodes[index].counted for index in node.shape.context)
    return len(before) - good - bad, good, bad, unseen


def _expected_node(node: Node) -> Picture:
    return {
        "index": node.index,
        "status": node.status,
        "counted": node.counted,
        "deps": _expected_counters(node),
        "result": bare(node.shown_result()),
        "child": node.child.id if node.child else None,
        "summary": node.summary,
        "has_end": node.has_ended and node.status != "SKIPPED",
        "task": _expected_task(node),
        "counts": _expected_counts(node),
        "items": [_expected_item(node, place, work) for place, work in enumerate(node.items)],
    }


def _expected_task(node: Node) -> tuple[Any, ...] | None:
    work = node.work
    if work is None:
        return None
    kwargs = None
    if node.shape.kind == "signal":
        kwargs = {} if work.value is NOTHING_YET else {"value": work.value}
    return work.state, _held(node, work), kwargs


def _held(node: Node, work: Work) -> bool | None:
    """Return whether the task is on hold, or None for an ended task, for which it is irrelevant."""
    return node.run.status == "PAUSED" if work.is_open else None


def _expected_counts(node: Node) -> list[int] | None:
    if not node.items:
        return None
    still_open = sum(work.is_open for work in node.items) + len(node.waiting)
    good = sum(work.state == "COMPLETED" for work in node.items)
    return [node.total, still_open, node.total - still_open - good]


def _expected_item(node: Node, place: int, work: Work) -> tuple[Any, ...]:
    assert node.shape.over is not None
    source = node.run.nodes[node.shape.over].shown_result()
    assert source is not None
    kwargs = {"seed": node.index, "element": bare(source["ok"][place])}
    parked = work.parked if work.is_open else None
    return work.state, _held(node, work), parked, kwargs


def stored_picture(connection: Connection[Any], run_ids: list[str]) -> dict[str, Picture]:
    """Return every run as described by its rows."""
    found = {
        row[0]: _stored_run(row)
        for row in connection.execute(READ_RUNS.encode(), (run_ids,)).fetchall()
    }
    for row in connection.execute(READ_NODES.encode(), (run_ids,)).fetchall():
        found[row[0]]["nodes"].append(_stored_node(row))
    for row in connection.execute(READ_ITEMS.encode(), (run_ids,)).fetchall():
        found[row[0]]["nodes"][row[1]]["items"].append(_stored_item(row))
    return found


def _stored_run(row: tuple[Any, ...]) -> Picture:
    assert row[9], "a paused run says since when"
    return {
        "status": row[1],
        "error": bare(_read(row[2])),
        "result": bare(_read(row[3])),
        "open_nodes": row[4],
        "failed_nodes": row[5],
        "total_nodes": row[6],
        "matched_case": row[7],
        "has_end": row[8],
        "signals": row[10],
        "nodes": [],
    }


def _stored_node(row: tuple[Any, ...]) -> Picture:
    return {
        "index": row[1],
        "status": row[2],
        "counted": row[3],
        "deps": tuple(row[4:8]) if row[2] == "PENDING" else None,
        "result": bare(_read(row[8])),
        "child": row[9],
        "summary": bare(_read(row[10])),
        "has_end": row[11],
        "task": _stored_task(row),
        "counts": row[12],
        "items": [],
    }


def _stored_task(row: tuple[Any, ...]) -> tuple[Any, ...] | None:
    status, held, kwargs = row[13:16]
    if status is None:
        return None
    is_open = status in {"PENDING", "CLAIMED", "RUNNING"}
    return status, held if is_open else None, _read(kwargs)


def _stored_item(row: tuple[Any, ...]) -> tuple[Any, ...]:
    status, held, parked, kwargs = row[2:6]
    is_open = status in {"PENDING", "CLAIMED", "RUNNING"}
    return status, held if is_open else None, parked if is_open else None, bare(_read(kwargs))


def _read(text: str | None) -> Any:
    return None if text is None else json.loads(text)
