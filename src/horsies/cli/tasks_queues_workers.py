"""The operator's commands: what waits and runs, who works, and a hand on both.

`horsies status`, `workers`, `queues`, `tasks`, `show`, `cancel` and `retry`. They need a database, not
an application, and never create or change its tables. Exit codes: 0 done, 1 failure or refusal, 4 not
found; 2 is typer's own for arguments it does not understand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Never, TypeVar

import psycopg
import typer

from horsies.cli import output
from horsies.cli.options import (
    DatabaseUrlOption,
    LocatorArgument,
    ModuleOption,
    named_database,
    open_app,
    refuse_both,
)
from horsies.errors import ErrorCode, HorsiesError
from horsies.ids import stored_form
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import failure_at
from horsies.monitor import overview
from horsies.monitor.actions import QueueOrder, retry_task, switch_queue
from horsies.monitor.health import PING_TIMEOUT_SECONDS, WorkerPong, ping_workers
from horsies.monitor.overview import TaskFilters, TaskPage, WorkerStanding
from horsies.result import Err, Ok
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.handle import TaskHandle
from horsies.tasks.info import TaskActionError, TaskActionErrorCode

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_NOT_FOUND = 4
LIST_LIMIT_MAX = 1_000

_NOT_FOUND = (BrokerErrorCode.UNKNOWN_QUEUE, BrokerErrorCode.UNKNOWN_SCHEDULE)
_SINCE_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TaskIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of a task.")]


class QueueAction(StrEnum):
    """What to do with a queue."""

    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Target:
    """The database a command works on, and the application's queues if one was named."""

    broker: PostgresBroker
    queue_names: Sequence[str] | None


def status(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every queue and how busy the workers are.

    DUE waits to be claimed, DELAYED is due later, OLDEST is how long the oldest due task has waited.
    Rates are attempts that ended within the last minute; FAILED leaves out those that will be retried.

    Exit codes: 0 done, 1 failure.
    """
    with open_target("status", module or locator, database_url) as target:
        found = answer(overview.read_overview(target.broker, target.queue_names or ()))
    if as_json:
        output.print_json(
            {
                "queues": [output.queue_document(queue) for queue in found.queues],
                "workers": [output.worker_document(worker) for worker in found.workers],
            }
        )
        return
    output.print_queues(found.queues)
    output.print_worker_summary(found.workers)


def workers(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    include_stopped: Annotated[
        bool, typer.Option("--all", help="Also those that have stopped.")
    ] = False,
    ping: Annotated[
        bool, typer.Option("--ping", help="Call them, and show how long their answers take.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the workers.

    A worker is alive when it was seen within 15 seconds, or is idle and holds its connection; silent
    when it holds its connection only; lost when that is gone too.

    Exit codes: 0 done, 1 failure.
    """
    with open_target("workers", module or locator, database_url) as target:
        found = answer(overview.read_workers(target.broker, include_stopped=include_stopped))
        pongs = _ping(target.broker, found) if ping else None
    if as_json:
        answers = pongs or {}
        documents = [
            output.worker_document(one, answers.get(one.worker.worker_id)) for one in found
        ]
        output.print_json({"workers": documents})
        return
    output.print_workers(found, pongs)


def _ping(
    broker: PostgresBroker, found: Sequence[overview.WorkerOverview]
) -> dict[str, WorkerPong]:
    living = sum(one.standing is WorkerStanding.ALIVE for one in found)
    if not living:
        return {}
    done = ping_workers(broker, timeout_seconds=PING_TIMEOUT_SECONDS, min_responses=living)
    return {pong.worker_id: pong for pong in answer(done)}


def queues(
    action: Annotated[
        QueueAction | None,
        typer.Argument(metavar="[pause|resume]", help="Without it, the queues are listed."),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The queue to pause or resume.")
    ] = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the queues, or pause or resume one.

    Workers leave a paused queue alone, wherever they run, from this moment on; what is running goes on.
    Known queues are those of the application (-m), else those that are or were in use.

    Exit codes: 0 done, 1 failure, 4 no such queue.
    """
    if action is not None and name is None:
        raise failure_at(
            None,
            f"horsies queues {action.value} needs the name of a queue.",
            help_text=f"horsies queues {action.value} NAME",
        )
    with open_target("queues", module, database_url) as target:
        if action is None or name is None:
            _list_queues(target, as_json)
        else:
            _switch_queue(target, action, name, as_json)


def _list_queues(target: Target, as_json: bool) -> None:
    found = answer(overview.read_overview(target.broker, target.queue_names or ())).queues
    if as_json:
        output.print_json({"queues": [output.queue_document(queue) for queue in found]})
    else:
        output.print_queues(found)


def _switch_queue(target: Target, action: QueueAction, name: str, as_json: bool) -> None:
    order = QueueOrder(name, action is QueueAction.PAUSE, target.queue_names)
    state = answer(switch_queue(target.broker, order))
    if as_json:
        output.print_json({"paused": state.is_paused, **state._asdict()})
    elif state.is_paused:
        typer.echo(f"Queue {state.name} is paused since {output.moment(state.paused_at)}.")
    else:
        typer.echo(f"Queue {state.name} is not paused.")


def tasks(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    status: Annotated[
        list[TaskStatus] | None,
        typer.Option(case_sensitive=False, help="Only in this status; may be repeated."),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only of this queue; may be repeated.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only of this task name; may be repeated.")
    ] = None,
    error_code: Annotated[
        list[str] | None, typer.Option(help="Only with this error code; may be repeated.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only sent since: 90s, 15m, 2h, 1d, or a time like 2026-01-31T12:00."),
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="ID", help="Only sent before this task.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=LIST_LIMIT_MAX, help="Show at most this many.")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first.

    Exit codes: 0 done (also when nothing matches), 1 failure.
    """
    filters = TaskFilters(
        statuses=status or (),
        queues=queue or (),
        names=name or (),
        error_codes=error_code or (),
        since=None if since is None else moment_of(since),
        before=None if before is None else _id_of(before),
        limit=limit,
    )
    with open_target("tasks", module or locator, database_url) as target:
        page = answer(overview.list_tasks(target.broker, filters))
    if as_json:
        output.print_json(output.page_document(page))
        return
    output.print_tasks(page.tasks)
    if note := _page_note(page):
        typer.echo(note, err=True)


def _page_note(page: TaskPage) -> str | None:
    if page.next_before is None:
        return None
    if page.looked_at_all:
        return f"There may be more: --before {page.next_before}"
    return (
        f"Only the newest {overview.LIST_WINDOW:,} tasks were looked at; "
        f"further back: --before {page.next_before}"
    )


def show(
    task_id: TaskIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Also the arguments and the result.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one task, its options and its attempts.

    Exit codes: 0 done, 1 failure, 4 no such task.
    """
    with open_target("show", module or locator, database_url) as target:
        report = answer(overview.read_task(target.broker, task_id, payload=payload))
    if report is None:
        leave(f"There is no task {task_id}.", EXIT_NOT_FOUND)
    if as_json:
        output.print_json(output.task_document(report.task, report.attempts, payload))
    else:
        output.print_task(report.task, report.attempts, payload)


def cancel(
    task_id: TaskIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    no_running: Annotated[
        bool, typer.Option("--no-running", help="Leave it alone if it is running already.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Cancel a task: at once while it waits, by stopping it while it runs.

    Exit codes: 0 cancelled or asked to stop, 1 failure or refusal, 4 no such task.
    """
    with open_target("cancel", module or locator, database_url) as target:
        done = TaskHandle(task_id, target.broker).cancel(include_running=not no_running)
    match done:
        case Err(error):
            _refuse(error)
        case Ok(cancelled):
            if as_json:
                output.print_json(asdict(cancelled))
            elif cancelled.was_status is TaskStatus.RUNNING:
                typer.echo(f"Task {task_id} is running; its worker has been asked to stop it.")
            else:
                typer.echo(f"Task {task_id} was {cancelled.was_status.value}; it is cancelled.")


def retry(
    task_id: TaskIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send the request of a finished task again, as a new task that names the old one.

    Exit codes: 0 sent, 1 failure or refusal, 4 no such task.
    """
    with open_target("retry", module or locator, database_url) as target:
        done = retry_task(target.broker, task_id)
    match done:
        case Err(error):
            _refuse(error)
        case Ok(retried):
            if as_json:
                output.print_json(asdict(retried))
            else:
                was = retried.was_status.value
                typer.echo(f"Task {task_id} was {was}; sent again as task {retried.task_id}.")


@contextmanager
def open_target(command: str, locator: str | None, database_url: str | None) -> Iterator[Target]:
    """Open the database a command was given, by itself or through an application."""
    attach_handler(LogLevel.WARNING, LogFormat.TEXT)
    refuse_both("LOCATOR", locator, "--database-url", database_url)
    if locator:
        app = open_app(command, locator)
        config, names = app.config.broker, app.get_valid_queue_names()
    else:
        config, names = named_database(database_url), None
    broker = PostgresBroker(config, role="operator", migrates=False)
    try:
        yield Target(broker, names)
    finally:
        broker.close()


def answer(done: BrokerResult[T]) -> T:
    """Return what the database said, or end the command with its refusal."""
    match done:
        case Ok(value):
            return value
        case Err(error):
            if error.code in _NOT_FOUND:
                leave(error.message, EXIT_NOT_FOUND)
            raise _report(error)


def _report(error: BrokerOperationError) -> HorsiesError:
    if isinstance(error.exception, HorsiesError):
        error.exception.location = None  # the address is wrong, not the line that led here
        return error.exception
    unreachable = isinstance(error.exception, psycopg.OperationalError)
    code = ErrorCode.BROKER_INVALID_URL if unreachable else ErrorCode.BROKER_INIT_FAILED
    return failure_at(None, error.message, code=code)


def _refuse(error: TaskActionError) -> Never:
    missing = error.code is TaskActionErrorCode.TASK_NOT_FOUND
    leave(error.message, EXIT_NOT_FOUND if missing else EXIT_FAILED)


def leave(message: str, exit_code: int) -> Never:
    """End the command with one sentence on standard error."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


def moment_of(text: str) -> datetime:
    """Read ``--since``: so long ago, or a time, which is local unless it says otherwise."""
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
            length = timedelta(**{_SINCE_UNITS[found[2]]: int(found[1])})
            return datetime.now(UTC) - length
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a duration like 15m nor a time like 2026-01-31T12:00.",
            param_hint="--since",
        ) from None


def _id_of(text: str) -> str:
    stored = stored_form(text)
    if stored is None:
        raise typer.BadParameter(f"{text!r} is not a task id.", param_hint="--before")
    return stored
