"""`horsies tasks` and `horsies show`: task lists, and everything about one task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.layout import Text
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.session import (
    EXIT_NOT_FOUND,
    JsonOption,
    LimitOption,
    exit_with,
    fingerprint_option,
    full_id,
    open_session,
    parse_since,
    unwrap_or_exit,
)
from horsies.db.statements.monitor import TaskDetail, TaskSummary
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.error_codes import docs_command
from horsies.errors import UNLIMITED_RETRIES
from horsies.ids import stored_form
from horsies.monitor.diagnose.explain import read_task
from horsies.monitor.documents import page_document, stored_json, task_document
from horsies.monitor.overview import TaskReport, declared_transaction
from horsies.monitor.queries import TaskFilters, list_tasks
from horsies.states import TaskStatus

TaskIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The id of a task, or its first digits.")
]

_PARKED_YEAR = 9999  # The year of the time that horsies_never_v1() returns.


def tasks(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    status: Annotated[
        list[TaskStatus] | None,
        typer.Option(case_sensitive=False, help="Only tasks in this status; may be repeated."),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only tasks of this queue; may be repeated.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only tasks with this task name; may be repeated.")
    ] = None,
    error_code: Annotated[
        list[str] | None, typer.Option(help="Only tasks with this error code; may be repeated.")
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="DIGITS", help="Only tasks that failed for this reason; see `horsies failures`."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only tasks sent since this time: 90s, 15m, 2h, 1d ago, or a time like 2026-01-31T12:00."
        ),
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="ID", help="Only tasks sent before this task.")
    ] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first.

    Exit codes: 0 done (even if no task matches), 1 failure.

    Example:
        horsies tasks --status failed --since 2h
    """
    filters = TaskFilters(
        statuses=status or (),
        queues=queue or (),
        names=name or (),
        error_codes=error_code or (),
        fingerprint=None if fingerprint is None else fingerprint_option(fingerprint),
        since=parse_since(since),
        after=None if before is None else _task_id(before),
        limit=limit,
    )
    with open_session("tasks", module or locator, database_url) as session:
        page = unwrap_or_exit(list_tasks(session.broker, filters))
    if as_json:
        output.print_json(page_document(page, "tasks"))
    else:
        _print_tasks(page.rows)
        output.print_page_note(page, "tasks")


def _task_id(text: str) -> str:
    if (stored := stored_form(text)) is None:
        raise typer.BadParameter(f"{text!r} is not a task id.", param_hint="--before")
    return stored


def _print_tasks(tasks: Sequence[TaskSummary]) -> None:
    table = output.plain_table("ID", "STATUS", "AGE", "TASK", flexible="TASK")
    for task in tasks:
        name = output.safe_text(f"{task.task_name} on {task.queue_name}")
        if task.error_code is not None:
            name.append_text(output.safe_text(f"\n{task.error_code}", "red"))
        if due := _due(task):
            name.append(f"\ndue {due}")
        table.add_row(task.id, output.status_text(task.status), output.age(task.age_seconds), name)
    output.print_parts(table if tasks else "No task matches.")


def _due(task: TaskSummary | TaskDetail) -> str | None:
    """Describe when a delayed task becomes due by the database's clock; return None for other tasks."""
    seconds = (task.enqueued_at - task.created_at).total_seconds() - task.age_seconds
    if task.status != TaskStatus.PENDING.value or seconds <= 0:
        return None
    is_parked = task.enqueued_at.astimezone(UTC).year >= _PARKED_YEAR
    return "after an event" if is_parked else f"in {output.age(seconds)}"


def show(
    task_id: TaskIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Also show the arguments and the result.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one task, its options and its attempts.

    Exit codes: 0 done, 1 failure, 4 no such task.

    Example:
        horsies show 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("show", module or locator, database_url) as session:
        task_id = full_id(session, task_id)
        report = unwrap_or_exit(read_task(session.broker, task_id, payload=payload))
    if report is None:
        exit_with(f"There is no task {task_id}.", EXIT_NOT_FOUND)
    if report.transaction is None and session.app is not None:
        definition = session.app.definitions().get(report.task.task_name)
        report = replace(report, transaction=declared_transaction(definition))
    if as_json:
        output.print_json(task_document(report, payload))
    else:
        table = output.fact_table(_facts(report, payload))
        output.print_parts(table, *(_attempt_line(attempt) for attempt in report.attempts))


def _facts(report: TaskReport, payload: bool) -> Iterable[tuple[str, str | None]]:
    task = report.task
    yield "task", f"{task.task_name} on {task.queue_name}, priority {task.priority}"
    yield "id", task.id
    yield "status", task.status + (" (held)" if task.held else "")
    if (progress := report.progress) is not None:
        shown = str(progress).replace("\n", "\\n")  # The output escapes other characters.
        yield "progress", f"{shown} (attempt {progress.attempt})"
    yield "waits because", "\n".join(report.waits_because) or None
    yield "transaction", report.transaction
    yield "error", task.error_code
    yield "see", docs_command(task.error_code)
    yield "reason", task.failed_reason
    yield "sent", output.timestamp(task.sent_at)
    yield _enqueued_fact(task)
    for name in ("claimed_at", "started_at", "completed_at", "failed_at"):
        yield name.removesuffix("_at"), output.timestamp(getattr(task, name))
    yield "redacted", output.timestamp(task.redacted_at)
    yield "next retry", output.timestamp(task.next_retry_at)
    yield "cancel asked", output.timestamp(task.cancel_requested_at)
    yield "good until", output.timestamp(task.good_until)
    is_endless = task.max_retries >= UNLIMITED_RETRIES
    limit = "without limit" if is_endless else f"of {task.max_retries}"
    yield "retries", f"{task.retry_count} {limit}"
    yield "time limit", None if task.timeout_ms is None else f"{task.timeout_ms:,} ms"
    yield "worker", task.claimed_by_worker_id
    yield "process", _process(task)
    yield "idempotency key", task.idempotency_key
    yield "retry of", task.retried_from_task_id
    yield "workflow", task.workflow_id
    yield "schedule", task.schedule_name
    yield "slot", output.timestamp(task.scheduled_for)
    yield "options", _options(task.task_options)
    if payload:
        yield "args", task.args
        yield "kwargs", task.kwargs
        yield from _result_facts(task.result)


def _options(stored: str | None) -> str | None:
    """Format stored options, one per line."""
    match stored_json(stored):
        case dict() as options:
            given = {name: value for name, value in options.items() if value is not None}
            lines = (f"{name}: {_option(value)}" for name, value in given.items())
            return "\n".join(lines) or None
        case _:
            return stored


def _option(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_option(one)}" for name, one in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _enqueued_fact(task: TaskDetail) -> tuple[str, str | None]:
    time = output.timestamp(task.enqueued_at)
    if (due := _due(task)) is None:
        return "enqueued", time
    return "due", f"{due}, at {time}" if due.startswith("in ") else due


def _result_facts(stored: str | None) -> Iterable[tuple[str, str | None]]:
    """Separate the traceback from a stored error, because JSON escapes its line breaks."""
    match stored_json(stored):
        case {"err": {"exception": {"traceback": str(traceback)} as exception}} as document:
            del exception["traceback"]
            yield "result", json.dumps(document, ensure_ascii=False)
            yield "traceback", traceback.rstrip("\n")
        case _:
            yield "result", stored


def _process(row: TaskDetail | TaskAttemptInfo) -> str | None:
    if row.worker_hostname is None or row.worker_pid is None:
        return row.worker_hostname
    return f"{row.worker_hostname}, pid {row.worker_pid}"


def _attempt_line(attempt: TaskAttemptInfo) -> Text:
    parts = [
        f"attempt {attempt.attempt}: {attempt.outcome} at {output.timestamp(attempt.finished_at)}"
    ]
    if attempt.started_at is not None:
        seconds = (attempt.finished_at - attempt.started_at).total_seconds()
        parts.append(f"after {seconds:.3f} s")
    if process := _process(attempt):
        parts.append(process)
    if reason := attempt.retry_reason or ("will be retried" if attempt.will_retry else None):
        parts.append(reason)
    line = output.safe_text(", ".join(parts).replace("\n", "\\n"))
    if attempt.error_code is not None:
        error = f"{attempt.error_code}: {attempt.error_message or ''}".replace("\n", "\n    ")
        line.append_text(output.safe_text(f"\n  {error}", "red"))
    if attempt.raised_in is not None:
        place = f"\n  in {attempt.raised_in}, fingerprint {attempt.fingerprint}"
        line.append_text(output.safe_text(place, "dim"))
    return line
