"""Operator commands for workflows: list runs, draw one, and control it.

`horsies workflows` and `horsies workflow show|pause|resume|cancel|retry|signal|audit`. They need a
database, not an application, and use the exit codes of the other operator commands.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from horsies.cli import output
from horsies.cli.layout import Text
from horsies.cli.options import (
    DatabaseUrlOption,
    LocatorArgument,
    ModuleOption,
    RunIdArgument,
    SignalNameArgument,
    SignalValueArgument,
)
from horsies.cli.session import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    JsonOption,
    LimitOption,
    ReasonOption,
    exit_with,
    full_id,
    open_session,
    parse_since,
    unwrap_or_exit,
)
from horsies.db.statements.workflows import BrokenRun, RunSummary
from horsies.error_codes import error_code_text
from horsies.monitor.documents import page_document
from horsies.monitor.queries import RunFilters, list_runs
from horsies.result import Err
from horsies.states import WorkflowStatus, WorkflowTaskStatus
from horsies.words import elapsed
from horsies.workflow.run import listing
from horsies.workflow.run.draw import ASCII_SYMBOLS, SYMBOLS, Line, Symbols, draw
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.info import HandleErrorCode, HandleResult
from horsies.workflow.run.results import read_error

T = TypeVar("T")

AUDIT_LIMIT = 1_000

workflow = typer.Typer(
    help="Show, pause, resume, cancel, retry, signal or audit workflow runs.",
    no_args_is_help=True,
)

_NOT_FOUND = (
    HandleErrorCode.WORKFLOW_NOT_FOUND,
    HandleErrorCode.NODE_NOT_FOUND,
    HandleErrorCode.SIGNAL_NOT_FOUND,
)
_STYLES = {
    **output.STATUS_STYLES,
    "COMPLETED": "green",
    "PAUSED": "yellow",
    "SKIPPED": "dim",
    "RUNNING": "bold green",
    "name": "bold",
    "note": "dim",
    "frame": "dim",
    "error": "red",
}


def workflows(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    status: Annotated[
        list[WorkflowStatus] | None,
        typer.Option(case_sensitive=False, help="Only runs in this status; may be repeated."),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only runs of this workflow; may be repeated.")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="Only runs with this workflow_key; may be repeated.")
    ] = None,
    include_children: Annotated[
        bool, typer.Option("--all", help="Also list child runs of other runs.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            help=("Only runs started since: 90s, 15m, 2h, 1d, or a time like 2026-01-31T12:00.")
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Only runs started before this run, or after a page's cursor."
        ),
    ] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """List workflow runs, newest first.

    Exit codes: 0 done (even if no run matches), 1 failure, 4 no such run (--before).

    Example:
        horsies workflows --status running
    """
    filters = RunFilters(
        statuses=status or (),
        names=name or (),
        workflow_keys=key or (),
        since=parse_since(since),
        after=before,
        include_children=include_children,
        limit=limit,
    )
    with open_session("workflows", module or locator, database_url) as session:
        page = unwrap_or_exit(list_runs(session.broker, filters))
    if page is None:
        exit_with(f"There is no workflow run {before}.", EXIT_NOT_FOUND)
    if as_json:
        output.print_json(page_document(page, "workflows"))
        return
    _print_runs(page.rows)
    output.print_page_note(page, "runs")


@workflow.command()
def show(
    workflow_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    every_node: Annotated[
        bool, typer.Option("--all", help="Show every node; do not fold long rows.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one run and draw its graph.

    Exit codes: 0 done, 1 failure, 4 no such run.

    Example:
        horsies workflow show 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("workflow show", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        report = unwrap_or_exit(listing.read_run(session.broker, workflow_id))
    if report is None:
        exit_with(f"There is no workflow run {workflow_id}.", EXIT_NOT_FOUND)
    if as_json:
        output.print_json(listing.report_document(report))
    else:
        _print_run(report, fold=not every_node)


@workflow.command()
def pause(
    workflow_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause a run and its child runs: running tasks finish, and no new task starts.

    Exit codes: 0 paused, 1 failure or not running, 4 no such run.

    Example:
        horsies workflow pause 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("workflow pause", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        handle = WorkflowHandle[Any](workflow_id, session.broker)
        changed = _unwrap_or_exit(handle.pause(reason=reason))
        status = _unwrap_or_exit(handle.status())
    _print_change(workflow_id, status, changed, as_json, f"Workflow {workflow_id} is paused.")


@workflow.command()
def resume(
    workflow_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Retry failed nodes; also restarts a failed run."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Resume a paused run and its paused child runs.

    Exit codes: 0 resumed, 1 failure or not paused, 4 no such run.

    Example:
        horsies workflow resume 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("workflow resume", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        handle = WorkflowHandle[Any](workflow_id, session.broker)
        changed = _unwrap_or_exit(handle.resume(retry_failed=retry_failed))
        status = _unwrap_or_exit(handle.status())
    _print_change(workflow_id, status, changed, as_json, f"Workflow {workflow_id} is resumed.")


@workflow.command()
def cancel(
    workflow_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="Also stop the tasks that are running.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="The reason, stored with the run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a run and its child runs; running tasks are left to finish, or stopped with --interrupt.

    Exit codes: 0 cancelled, 1 failure or already ended, 4 no such run.

    Example:
        horsies workflow cancel 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("workflow cancel", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        handle = WorkflowHandle[Any](workflow_id, session.broker)
        before = _unwrap_or_exit(handle.status())
        _unwrap_or_exit(handle.cancel(interrupt=interrupt, reason=reason))
        status = _unwrap_or_exit(handle.status())
    changed = not before.is_terminal and status is WorkflowStatus.CANCELLED
    _print_change(workflow_id, status, changed, as_json, f"Workflow {workflow_id} is cancelled.")


@workflow.command()
def retry(
    workflow_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    node: Annotated[
        str | None, typer.Option(help="Only this node; by default, all failed nodes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Retry failed nodes; successful nodes keep their results, and skipped dependents wait again.

    Exit codes: 0 done, 1 failure or nothing to retry, 4 no such run or node.

    Example:
        horsies workflow retry 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("workflow retry", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        handle = WorkflowHandle[Any](workflow_id, session.broker)
        _unwrap_or_exit(handle.retry(node))
        status = _unwrap_or_exit(handle.status())
    what = "its failed nodes" if node is None else f"node {node}"
    _print_change(workflow_id, status, True, as_json, f"Workflow {workflow_id} retries {what}.")


@workflow.command()
def signal(
    workflow_id: RunIdArgument,
    name: SignalNameArgument,
    value: SignalValueArgument = "null",
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a value to the node that waits for a signal, or store it until one does.

    Exit codes: 0 delivered or stored, 1 failure or already ended, 4 no such run or signal.

    Example:
        horsies workflow signal 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a approval true
    """
    with open_session("workflow signal", module or locator, database_url) as session:
        workflow_id = full_id(session, workflow_id, "run")
        handle = WorkflowHandle[Any](workflow_id, session.broker)
        delivery = _unwrap_or_exit(handle.signal(name, _json(value)))
    if as_json:
        output.print_json({"workflow_id": workflow_id, "signal": name, "delivery": delivery})
    else:
        typer.echo(f"Signal {name} is {delivery.value}.")


@workflow.command()
def audit(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every open run with its nodes and tasks; contradictory rows were edited manually. Runs
    whose next change the database refuses are listed as blocked.

    Exit codes: 0 no problems; 1 failure, or problems found.

    Example:
        horsies workflow audit
    """
    with open_session("workflow audit", module or locator, database_url) as session:
        found = unwrap_or_exit(listing.audit(session.broker, AUDIT_LIMIT))
    if as_json:
        output.print_json({"found": listing.problems_document(found)})
    elif found:
        _print_problems(found)
        typer.echo(f"{len({one.id for one in found}):,} run(s) are inconsistent or blocked.")
    else:
        typer.echo("All open runs are consistent.")
    if found:
        raise typer.Exit(EXIT_FAILED)


def _unwrap_or_exit(result: HandleResult[T]) -> T:
    if isinstance(result, Err):
        code = EXIT_NOT_FOUND if result.value.code in _NOT_FOUND else EXIT_FAILED
        exit_with(result.value.message, code)
    return result.value


def _print_change(
    workflow_id: str, status: WorkflowStatus, changed: bool, as_json: bool, sentence: str
) -> None:
    if as_json:
        output.print_json({"workflow_id": workflow_id, "status": status, "changed": changed})
    elif changed:
        typer.echo(sentence)
    else:
        exit_with(f"Workflow {workflow_id} is {status.value}; nothing was changed.", EXIT_FAILED)
    if not changed:
        raise typer.Exit(EXIT_FAILED)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not JSON; text needs quotes of its own: '\"yes\"'", param_hint="VALUE"
        ) from None


# Output


def _print_runs(runs: Sequence[RunSummary]) -> None:
    """Print one line per run, and further lines for its key, parent and error."""
    table = output.plain_table("ID", "STATUS", "NODES", "AGE", "WORKFLOW", flexible="WORKFLOW")
    for run in runs:
        name = output.safe_text(run.name)
        if run.workflow_key is not None:
            name.append_text(output.safe_text(f"\n{run.workflow_key}", "dim"))
        if run.parent_workflow_id is not None:
            name.append("\npart of another", "dim")
        if run.error_code is not None:
            name.append_text(output.safe_text(f"\n{run.error_code}", "red"))
        done = f"{run.total_nodes - run.open_nodes:,}/{run.total_nodes:,}"
        status = Text(run.status, _STYLES.get(run.status, ""))
        table.add_row(run.id, status, done, output.age(run.age_seconds), name)
    output.print_parts(table if runs else "No workflow matches.")


def _print_run(report: listing.RunReport, *, fold: bool) -> None:
    """Print one run: a line per fact, then the drawing of its graph."""
    output.print_parts(output.fact_table(_facts(report)))
    _, *lines = draw(report, symbols=_symbols(), fold=fold)
    output.print_parts(*(_line(line) for line in lines))
    if not report.is_whole:
        output.print_parts(f"Only the first {len(report.below):,} runs below it are shown.")


def _facts(report: listing.RunReport) -> Iterable[tuple[str, str | None]]:
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
    yield "slot", output.timestamp(run.scheduled_for)
    yield "sent", output.timestamp(run.sent_at)
    yield "started", output.timestamp(run.started_at)
    yield "paused", output.timestamp(run.paused_at)
    yield "ended", output.timestamp(run.completed_at)
    yield "took" if run.completed_at else "running for", elapsed(run.duration_seconds)
    yield "below", run.parent_workflow_id
    yield "paused below", "\n".join(paused) or None


def _node_counts(report: listing.RunReport) -> str:
    """Count the nodes by status: 6: 4 completed, 1 failed, 1 pending."""
    counts = Counter(node.status for node in report.nodes[report.run.id])
    ended_first = sorted(WorkflowTaskStatus, key=lambda status: not status.is_terminal)
    parts = [
        f"{counts[status]:,} {status.value.lower()}" for status in ended_first if counts[status]
    ]
    return f"{report.run.total_nodes:,}: {', '.join(parts)}"


def _print_problems(problems: Sequence[BrokenRun]) -> None:
    """Print an audit's findings by run."""
    by_run: dict[str, list[str]] = {}
    for one in problems:
        by_run.setdefault(one.id, []).append(one.problem)
    table = output.plain_table("ID", "PROBLEM", flexible="PROBLEM")
    for workflow_id, found in by_run.items():
        table.add_row(workflow_id, output.safe_text("\n".join(found)))
    output.print_parts(table)


def _line(line: Line) -> Text:
    text = Text(no_wrap=True)
    for piece in line:
        text.append_text(output.safe_text(piece.text, _STYLES.get(piece.style, "")))
    return text


def _symbols() -> Symbols:
    """Return symbols that the encoding of standard output can represent."""
    drawn = "".join([*SYMBOLS.statuses.values(), SYMBOLS.branch, SYMBOLS.arrow, SYMBOLS.gap])
    try:
        drawn.encode(output_encoding())
    except (LookupError, UnicodeEncodeError):
        return ASCII_SYMBOLS
    return SYMBOLS


def output_encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "ascii"
