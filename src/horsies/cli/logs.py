"""`horsies logs`: print the captured log lines of a task's attempts."""

from __future__ import annotations

from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.layout import Text
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.session import (
    EXIT_NOT_FOUND,
    JsonOption,
    exit_with,
    full_id,
    open_session,
    unwrap_or_exit,
)
from horsies.cli.tasks import TaskIdArgument
from horsies.monitor.task_logs import AttemptLog, list_logs


def logs(
    task_id: TaskIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Only this attempt; default: all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the log lines of a task's attempts, if the application captures them.

    Exit codes: 0 done, 1 failure, 4 no such task.

    Example:
        horsies logs 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("logs", module or locator, database_url) as session:
        task_id = full_id(session, task_id)
        found = unwrap_or_exit(list_logs(session.broker, task_id, attempt))
    if found is None:
        exit_with(f"There is no task {task_id}.", EXIT_NOT_FOUND)
    if as_json:
        output.print_json({"task_id": task_id, "logs": [log.to_dict() for log in found]})
    elif found:
        output.print_parts(*map(_part, found))
    else:
        typer.echo(
            f"Nothing is kept of task {task_id}: no attempt that has ended logged anything, log_capture "
            "was off in its worker, or recovery.log_retention_hours has passed.",
            err=True,
        )


def _part(log: AttemptLog) -> Text:
    heading = f"attempt {log.attempt}, until {output.timestamp(log.stored_at)}"
    text = output.safe_text("\n".join([heading, *log.lines]))
    text.no_wrap = True
    return text
