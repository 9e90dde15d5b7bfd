"""`horsies run`: execute a stored task in this process, to debug it."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import typer

from horsies.app import Horsies, set_current_app
from horsies.cli import output
from horsies.cli.options import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
    refuse_broken_app,
)
from horsies.cli.session import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    READING,
    exit_with,
    unwrap_or_exit,
)
from horsies.current_task import CurrentTask, set_running_task
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Script
from horsies.db.statements.lookup import read_request
from horsies.db.statements.turn import ClaimedTask
from horsies.ids import stored_form
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from horsies.tasks.hooks import as_plain_calls
from horsies.worker.child.builtin_tasks import is_builtin
from horsies.worker.child.execute import execute
from horsies.worker.child.process_state import configure_logging, label_handlers
from horsies.worker.node_inputs import NodeInputs, tasks_with_injection
from horsies.worker.protocol import Assignment, ChildReport, NodePart, assignment_of

logger = logging.getLogger("horsies.run")


def run(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a task, in any status.")],
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run a stored task in this process, to debug it: breakpoint() works, and no time limit applies.

    The task's row, result and retries are not changed. Its code runs for real: side effects happen, and
    tasks that it sends are stored. The result is printed as JSON. Exit codes: 0 the task succeeded, 1
    it failed, 4 no such task.

    Example:
        horsies run 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a shop.py
    """
    attach_handler(loglevel, log_format)
    app = open_app("run", module or locator)
    refuse_broken_app(app)
    assignment = _read(app, task_id)
    if app.get_task(assignment.task_name) is None and not is_builtin(assignment):
        name = assignment.task_name
        exit_with(f"Task {name!r} is not registered in this application.", EXIT_FAILED)
    configure_logging(loglevel.value, log_format.value)
    label_handlers()
    typer.echo(f"running {assignment.task_name} {assignment.task_id} in this process", err=True)
    report = _execute(app, assignment)
    if report.ok:
        typer.echo(report.result_json)
    else:
        message = output.safe_text(report.error_message or "").plain
        typer.echo(f"failed with {report.error_code}: {message}", err=True)
    typer.echo("Nothing was stored: the row of the task is unchanged.", err=True)
    raise typer.Exit(0 if report.ok else EXIT_FAILED)


def _read(app: Horsies, task_id: str) -> Assignment:
    """Read the stored request and, for a workflow node, the results that it takes from others."""
    stored = stored_form(task_id)
    broker = PostgresBroker(app.config.broker, role="operator", migrates=False, limits=READING)
    try:
        reading = BrokerErrorCode.MONITORING_QUERY_FAILED
        done = None if stored is None else broker.perform(reading, _request_script(stored))
        task = None if done is None else unwrap_or_exit(done)
        if task is None:
            exit_with(f"There is no task {task_id}.", EXIT_NOT_FOUND)
        return assignment_of(task, _node_part(app, broker, task))
    finally:
        broker.close()


def _request_script(task_id: str) -> Script[ClaimedTask | None]:
    rows = yield read_request(task_id)
    return rows[0] if rows else None


def _node_part(app: Horsies, broker: PostgresBroker, task: ClaimedTask) -> NodePart | None:
    inputs = NodeInputs(tasks_with_injection(app), app.config.payload.max_input_bytes)
    if task.workflow_id is None or not inputs.has_part(task):
        return None
    pipeline = Pipeline.open(broker.database, "run")
    with pipeline.connection:
        parts, refused = inputs.read(pipeline, [task])
    for _, outcome in refused:
        exit_with(outcome.error_message or "The inputs of the node cannot be read.", EXIT_FAILED)
    return parts[task.id]


def _execute(app: Horsies, assignment: Assignment) -> ChildReport:
    """Execute the task as a child process does, between the application's start and stop hooks."""
    app.set_role("child")
    set_current_app(app)
    for hook in as_plain_calls(app.hooks.start):
        hook()
    set_running_task(CurrentTask(assignment, time.time()))
    try:
        return execute(app, assignment)
    finally:
        set_running_task(None)
        for hook in as_plain_calls(app.hooks.stop[::-1]):
            hook()
        app.close()
