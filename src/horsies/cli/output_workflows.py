"""Output of runs of workflows: lists and drawings for people, JSON for programs.

This module only formats. Stored text cannot control the terminal.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from horsies.cli.layout import Text
from horsies.cli.output import (
    STATUS_STYLES,
    duration,
    fact_table,
    plain_table,
    print_parts,
    safe_text,
    timestamp,
)
from horsies.db.statements.workflows import BrokenRun, RunSummary
from horsies.error_codes import error_code_text
from horsies.logs import elapsed
from horsies.states import WorkflowStatus, WorkflowTaskStatus
from horsies.workflow.run.draw import ASCII_SYMBOLS, SYMBOLS, Line, Symbols, draw
from horsies.workflow.run.listing import RunReport
from horsies.workflow.run.results import read_error

_STYLES = {
    **STATUS_STYLES,
    "COMPLETED": "green",
    "PAUSED": "yellow",
    "SKIPPED": "dim",
    "RUNNING": "bold green",
    "name": "bold",
    "note": "dim",
    "frame": "dim",
    "error": "red",
}


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Print one line per run, and further lines for its key, parent and error."""
    if not runs:
        print_parts("No workflow matches.")
        return
    table = plain_table("ID", "STATUS", "NODES", "AGE", "WORKFLOW", flexible="WORKFLOW")
    for run in runs:
        name = safe_text(run.name)
        if run.workflow_key is not None:
            name.append_text(safe_text(f"\n{run.workflow_key}", "dim"))
        if run.parent_workflow_id is not None:
            name.append("\npart of another", "dim")
        if run.error_code is not None:
            name.append_text(safe_text(f"\n{run.error_code}", "red"))
        done = f"{run.total_nodes - run.open_nodes:,}/{run.total_nodes:,}"
        status = Text(run.status, _STYLES.get(run.status, ""))
        table.add_row(run.id, status, done, duration(run.age_seconds), name)
    print_parts(table)


def print_run(report: RunReport, *, fold: bool = True) -> None:
    """Print one run: a line per fact, then the drawing of its graph."""
    print_parts(fact_table(_facts(report)))
    _, *lines = draw(report, symbols=_symbols(), fold=fold)
    print_parts(*(_line(line) for line in lines))
    if not report.is_whole:
        print_parts(f"Only the first {len(report.below):,} runs below it are shown.")


def _facts(report: RunReport) -> Iterable[tuple[str, str | None]]:
    run, error = report.run, read_error(report.run.error)
    paused = [one.id for one in report.below if one.status == WorkflowStatus.PAUSED]
    yield "workflow", f"{run.name} ({run.definition_key})"
    yield "id", run.id
    yield "key", run.workflow_key
    yield "status", run.status
    if error is not None:
        code = error_code_text(error.error_code)
        yield "error", ": ".join(part for part in (code, error.message) if part)
    yield "success case", None if run.matched_case is None else str(run.matched_case)
    yield "nodes", _node_counts(report)
    yield "schedule", run.schedule_name
    yield "slot", timestamp(run.scheduled_for)
    yield "sent", timestamp(run.sent_at)
    yield "started", timestamp(run.started_at)
    yield "paused", timestamp(run.paused_at)
    yield "ended", timestamp(run.completed_at)
    yield "took" if run.completed_at else "running for", elapsed(run.duration_seconds)
    yield "below", run.parent_workflow_id
    yield "paused below", "\n".join(paused) or None


def _node_counts(report: RunReport) -> str:
    """Count the nodes by status: 6: 4 completed, 1 failed, 1 pending."""
    counts = Counter(node.status for node in report.nodes[report.run.id])
    ended_first = sorted(WorkflowTaskStatus, key=lambda status: not status.is_terminal)
    parts = [
        f"{counts[status]:,} {status.value.lower()}" for status in ended_first if counts[status]
    ]
    return f"{report.run.total_nodes:,}: {', '.join(parts)}"


def print_problems(problems: Sequence[BrokenRun]) -> None:
    """Print the findings of an audit by run."""
    by_run: dict[str, list[str]] = {}
    for one in problems:
        by_run.setdefault(one.id, []).append(one.problem)
    if not by_run:
        return
    table = plain_table("ID", "PROBLEM", flexible="PROBLEM")
    for workflow_id, found in by_run.items():
        table.add_row(workflow_id, safe_text("\n".join(found)))
    print_parts(table)


def _line(line: Line) -> Text:
    text = Text(no_wrap=True)
    for piece in line:
        text.append_text(safe_text(piece.text, _STYLES.get(piece.style, "")))
    return text


def _symbols() -> Symbols:
    """Return symbols that the encoding of standard output has."""
    drawn = "".join([*SYMBOLS.statuses.values(), SYMBOLS.branch, SYMBOLS.arrow, SYMBOLS.gap])
    try:
        drawn.encode(output_encoding())
    except (LookupError, UnicodeEncodeError):
        return ASCII_SYMBOLS
    return SYMBOLS


def output_encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "ascii"
