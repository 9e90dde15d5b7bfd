"""The portrait of a run: what was read of it, arranged for drawing.

Pure, between the survey, which reads, and the drawing, which knows nothing of rows. Beside the line
producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC

from horsies.db.workflows import RunRow, TreeNode
from horsies.states import WORKFLOW_TASK_TERMINAL_STATES, WorkflowStatus
from horsies.workflow.draw import DrawnNode, DrawnRun, Line, Piece
from horsies.workflow.survey import RunReport

_WAITING = ("ENQUEUED", "READY")


def portrait(report: RunReport) -> DrawnRun:
    """Return the run and everything below it, ready to be drawn.

    Example:
        for line in draw(portrait(report)):
            print("".join(piece.text for piece in line))
    """
    runs = {run.id: run for run in (report.run, *report.below)}
    return _drawn(report.run, runs, report.nodes)


def _drawn(run: RunRow, runs: dict[str, RunRow], nodes: dict[str, list[TreeNode]]) -> DrawnRun:
    rows = nodes.get(run.id, [])
    return DrawnRun(_title(run, rows), [_node(row, run, runs, nodes) for row in rows])


def _title(run: RunRow, rows: Sequence[TreeNode]) -> Line:
    ended = sum(row.status in WORKFLOW_TASK_TERMINAL_STATES for row in rows)
    return (
        Piece(run.name, "name"),
        Piece(f"  {run.id}  ", "note"),
        Piece(run.status, run.status),
        Piece(f"  {ended:,} of {run.total_nodes:,} nodes ended", "note"),
        Piece(f"  {elapsed(run.duration_seconds)}", "note"),
    )


def _node(
    row: TreeNode, run: RunRow, runs: dict[str, RunRow], nodes: dict[str, list[TreeNode]]
) -> DrawnNode:
    child = runs.get(row.sub_workflow_id or "")
    return DrawnNode(
        node_id=row.node_id,
        status=_status(row, run, child),
        dependencies=row.dependencies,
        label=_label(row),
        notes=list(_notes(row, child)),
        error=row.error_code,
        child=None if child is None else _drawn(child, runs, nodes),
        join=row.join_type,
        min_success=row.min_success,
    )


def _status(row: TreeNode, run: RunRow, child: RunRow | None) -> str:
    """Return the status to show: what is held back by a pause is shown as paused."""
    holder = child if row.status == "RUNNING" else run
    is_held = holder is not None and holder.status == WorkflowStatus.PAUSED
    return "PAUSED" if is_held and row.status in (*_WAITING, "RUNNING") else row.status


def _label(row: TreeNode) -> str:
    match row.kind:
        case "workflow":
            return f"workflow {row.sub_workflow_name}"
        case "map":
            return f"map of {row.task_name}"
        case "signal":
            return f"signal {row.signal_name}"
        case "sleep":
            return "sleep"
        case _:
            return row.task_name


def _notes(row: TreeNode, child: RunRow | None) -> Iterator[str]:
    if row.items_total is not None and row.items_open is not None:
        yield f"{row.items_total - row.items_open:,}/{row.items_total:,}"
        if row.items_bad:
            yield f"{row.items_bad:,} failed"
    if child is not None and child.status == WorkflowStatus.PAUSED:
        yield "paused"
    if row.kind in ("sleep", "signal") and row.due_at is not None:
        yield f"until {row.due_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if row.retry_count:
        yield f"retry {row.retry_count}"
    if row.duration_seconds is not None:
        yield elapsed(row.duration_seconds)


def elapsed(seconds: float) -> str:
    """Write a length of time as exactly as it deserves: 12ms, 1.4s, 42s, 4m12s, 3h05m, 5d04h."""
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
