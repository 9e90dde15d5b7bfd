"""`horsies cancel`, `horsies retry` and `horsies history`: change tasks, one by one or in bulk, and list
who changed what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from horsies.cli import output
from horsies.cli.layout import Text
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.orders import (
    BulkCommand,
    DryRunOption,
    OrderOption,
    YesOption,
)
from horsies.cli.session import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    JsonOption,
    LimitOption,
    ReasonOption,
    Session,
    exit_with,
    fingerprint_option,
    full_id,
    open_session,
    parse_since,
    unwrap_or_exit,
)
from horsies.ids import stored_form
from horsies.monitor.action_log import ActionRow, list_actions_script
from horsies.monitor.actions import TaskRetried, retry_task
from horsies.monitor.diagnose.explain import read_task
from horsies.monitor.edited_calls import EditProblem, edit_reason, edited_call, named_arguments
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.queries import TaskFilters
from horsies.result import Err, Result
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.handle import TaskActionError, TaskActionErrorCode, TaskCancelled, TaskHandle

Change = TypeVar("Change", TaskCancelled, TaskRetried)

TaskIdsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID...] [LOCATOR]",
        help="The ids of tasks, or their first digits, unless filters choose them; the application, "
        "package.module:app, may come last.",
        show_default=False,
    ),
]
StatusOption = Annotated[
    list[TaskStatus] | None,
    typer.Option(case_sensitive=False, help="All tasks in this status; may be repeated."),
]
QueueOption = Annotated[
    list[str] | None, typer.Option(help="All tasks of this queue; may be repeated.")
]
NameOption = Annotated[
    list[str] | None, typer.Option(help="All tasks with this task name; may be repeated.")
]
CodeOption = Annotated[
    list[str] | None, typer.Option(help="All tasks with this error code; may be repeated.")
]
FingerprintOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIGITS", help="All tasks that failed for this reason; see `horsies failures`."
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        help="All tasks sent since this time: 90s, 15m, 2h, 1d ago, or a time like 2026-01-31T12:00."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=JSON",
        help="Send one task with this argument changed; may be repeated. Needs the application.",
    ),
]
UntilOption = Annotated[
    str | None, typer.Option(help="All tasks sent before this time (format as --since).")
]


def cancel(  # noqa: PLR0913, PLR0917
    task_ids: TaskIdsArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    status: StatusOption = None,
    queue: QueueOption = None,
    name: NameOption = None,
    error_code: CodeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    no_running: Annotated[
        bool, typer.Option("--no-running", help="Refuse to cancel a task that is already running.")
    ] = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel tasks: waiting tasks immediately, running tasks by stopping them.

    Name the tasks by id, or choose them with filters; without --status, filters choose all tasks that
    have not ended. A bulk cancel shows its counts and asks first.

    Exit codes: 0 cancelled or asked to stop, 1 failure or refusal, 4 no such task.

    Example:
        horsies cancel 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
        horsies cancel --queue mail --since 2h --dry-run
    """
    filters = filters_of(status, queue, name, error_code, None, since, until)
    ids, locator = split_locator(task_ids or [], is_bulk=filters is not None or order is not None)
    with open_session("cancel", module or locator, database_url) as session:
        ids = full_ids(session, ids)

        def cancel_one(task_id: str) -> Result[TaskCancelled, TaskActionError]:
            handle = TaskHandle[Any](task_id, session.broker)
            return handle.cancel(include_running=not no_running, reason=reason)

        words = command_words("cancel", module or locator)
        bulk = BulkCommand(session, OrderVerb.CANCEL_TASKS, words, dry_run, yes, as_json)
        if order is not None:
            bulk.resume(order_alone(order, filters, ids))
        elif filters is None and not dry_run:
            _change_each(ids, cancel_one, _cancelled_sentence, as_json)
        else:
            chosen, running = filters or TaskFilters(), not no_running
            bulk.run(
                draft_order(bulk.verb, chosen, ids=ids, include_running=running, reason=reason)
            )


def _cancelled_sentence(cancelled: TaskCancelled) -> str:
    if cancelled.was_status is TaskStatus.RUNNING:
        return f"Task {cancelled.task_id} is running; its worker has been asked to stop it."
    return f"Task {cancelled.task_id} was {cancelled.was_status.value}; it is cancelled."


def retry(  # noqa: PLR0913, PLR0917
    task_ids: TaskIdsArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    status: StatusOption = None,
    queue: QueueOption = None,
    name: NameOption = None,
    error_code: CodeOption = None,
    fingerprint: FingerprintOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    changes: SetOption = None,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retry finished tasks: send the same requests again, as new tasks that refer to the old ones.

    Name the tasks by id, or choose them with filters; without --status, filters choose failed tasks. A
    bulk retry shows its counts and asks first. It skips tasks that have already been retried. --set
    sends one task with other arguments, which are checked by the parameters of its function.

    Exit codes: 0 sent, 1 failure or refusal, 4 no such task.

    Example:
        horsies retry 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
        horsies retry --error-code GATEWAY_DOWN --since 2h --dry-run
        horsies retry 01a1dd42fbaa shop.background:app --set amount=12
    """
    filters = filters_of(status, queue, name, error_code, fingerprint, since, until)
    ids, locator = split_locator(task_ids or [], is_bulk=filters is not None or order is not None)
    with open_session("retry", module or locator, database_url) as session:
        ids = full_ids(session, ids)
        words = command_words("retry", module or locator)
        bulk = BulkCommand(session, OrderVerb.RETRY_TASKS, words, dry_run, yes, as_json)
        if order is not None:
            bulk.resume(order_alone(order, filters, ids))
        elif changes:
            is_alone = len(ids) == 1 and not dry_run
            retry_edited = partial(_retry_edited, session, _changes(changes, is_alone), reason)
            _change_each(ids, retry_edited, _retried_sentence, as_json)
        elif filters is None and not dry_run:
            retry_one = partial(retry_task, session.broker, reason=reason)
            _change_each(ids, retry_one, _retried_sentence, as_json)
        else:
            bulk.run(draft_order(bulk.verb, filters or TaskFilters(), ids=ids, reason=reason))


def _changes(texts: Sequence[str], is_alone: bool) -> dict[str, Any]:
    """Parse NAME=JSON arguments; reject a value that is not JSON."""
    if not is_alone:
        raise typer.BadParameter("--set changes one task, named by its id.", param_hint="--set")
    found = {}
    for text in texts:
        name, mark, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            mark = ""
        if not name or not mark:
            hint = """write NAME=JSON, as in amount=12 or 'city="Rome"'"""
            raise typer.BadParameter(f"{text!r} is not an argument; {hint}.", param_hint="--set")
    return found


def _retry_edited(
    session: Session, changes: Mapping[str, Any], reason: str | None, task_id: str
) -> Result[TaskRetried, TaskActionError]:
    """Send a task with some of its arguments changed."""
    report = unwrap_or_exit(read_task(session.broker, task_id, payload=True))
    if report is None:
        exit_with(f"There is no task {task_id}.", EXIT_NOT_FOUND)
    name = report.task.task_name
    definition = session.app.definitions().get(name) if session.app else None
    if session.app is None or definition is None:
        exit_with(f"--set needs the application that has task {name!r}: add LOCATOR.", EXIT_FAILED)
    try:
        arguments = named_arguments(definition.signature, report.task) | dict(changes)
        call = edited_call(session.app.config.payload, definition, report.task, arguments)
    except EditProblem as problem:
        exit_with(f"{problem} Nothing was sent.", EXIT_FAILED)
    edited = edit_reason(sorted(changes), reason)
    return retry_task(session.broker, task_id, reason=edited, call=call)


def _retried_sentence(retried: TaskRetried) -> str:
    old, was = retried.retried_from_task_id, retried.was_status.value
    return f"Task {old} was {was}; sent again as task {retried.task_id}."


def order_alone(order_id: str, filters: TaskFilters | None, ids: Sequence[str]) -> str:
    if filters is not None or ids:
        raise typer.BadParameter("--order stands alone: the order has its own filters.")
    return order_id


def filters_of(
    status: list[TaskStatus] | None,
    queue: list[str] | None,
    name: list[str] | None,
    error_code: list[str] | None,
    fingerprint: str | None,
    since: str | None,
    until: str | None,
) -> TaskFilters | None:
    """Return the filters of a bulk command, or None if it has none."""
    if not (status or queue or name or error_code or fingerprint or since or until):
        return None
    return TaskFilters(
        statuses=status or (),
        queues=queue or (),
        names=name or (),
        error_codes=error_code or (),
        fingerprint=None if fingerprint is None else fingerprint_option(fingerprint),
        since=parse_since(since),
        until=parse_since(until, "--until"),
    )


def command_words(command: str, locator: str | None) -> tuple[str, ...]:
    return (command, "-m", locator) if locator else (command,)


def history(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    subject: Annotated[
        str | None,
        typer.Option(help="Only changes to this subject, such as 'queue mail' or 'task ID'."),
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only changes by this author.")] = None,
    before: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Only changes before this one.")
    ] = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """List manual changes, newest first: the author, the time, the change and its outcome.

    Exit codes: 0 done (even if no change is on record), 1 failure.

    Example:
        horsies history --subject 'queue mail'
    """
    with open_session("history", module or locator, database_url) as session:
        script = list_actions_script(subject, actor, before, limit)
        code = BrokerErrorCode.MONITORING_QUERY_FAILED
        found = unwrap_or_exit(session.broker.perform(code, script))
    if as_json:
        output.print_json({"actions": [row._asdict() for row in found]})
        return
    table = output.plain_table("TIME (UTC)", "BY", "CHANGE", flexible="CHANGE")
    for row in found:
        by = output.safe_text(f"{row.actor}\n{row.source}")
        table.add_row((output.timestamp(row.at) or "")[:19], by, _change_text(row))
    output.print_parts(table if found else "No change is on record.")
    if len(found) == limit:
        typer.echo(f"There may be more: --before {found[-1].id}", err=True)


def _change_text(row: ActionRow) -> Text:
    words = f"{row.verb.replace('_', ' ')}: {row.subject}".replace("\n", "\\n")
    text = output.safe_text(words)
    if row.outcome != "done":
        text.append_text(output.safe_text(f" ({row.outcome})", "yellow"))
    if row.detail:
        text.append_text(output.safe_text("\n" + row.detail.replace("\n", "\\n"), "dim"))
    return text


def split_locator(arguments: Sequence[str], *, is_bulk: bool) -> tuple[list[str], str | None]:
    """Split the arguments into task ids and the optional LOCATOR."""
    if not arguments and not is_bulk:
        raise typer.BadParameter("Name the tasks by their ids, or choose them by filters.")
    *others, last = arguments or [""]
    could_be_locator = last.isidentifier() or any(mark in last for mark in ":./\\")
    is_id = stored_form(last) is not None
    has_locator = (bool(others) or is_bulk) and could_be_locator and not is_id
    ids = list(dict.fromkeys(others if has_locator else arguments))
    if ids and is_bulk:
        raise typer.BadParameter("Ids and filters exclude each other.")
    return ids, last if has_locator else None


def full_ids(session: Session, given: Sequence[str]) -> list[str]:
    """Complete all abbreviated ids before any task is changed; one invalid id ends the command."""
    found = [full_id(session, one, "task") for one in given]
    for one in found if len(found) > 1 else ():
        if stored_form(one) is None:
            exit_with(f"{one!r} is not a task id; no task was changed.", EXIT_NOT_FOUND)
    return list(dict.fromkeys(found))


def _change_each(
    ids: Sequence[str],
    change: Callable[[str], Result[Change, TaskActionError]],
    sentence: Callable[[Change], str],
    as_json: bool,
) -> None:
    """Change the tasks one by one and print each outcome; end the command if the database fails."""
    changes: list[Change] = []
    exit_codes: list[int] = []
    for task_id in ids:
        done = change(task_id)
        if isinstance(done, Err):
            typer.echo(f"error: {done.err_value.message}", err=True)
            code = done.err_value.code
            is_missing = code is TaskActionErrorCode.TASK_NOT_FOUND
            exit_codes.append(EXIT_NOT_FOUND if is_missing else EXIT_FAILED)
            if code is TaskActionErrorCode.DB_OPERATION_FAILED:
                break
        else:
            changes.append(done.ok_value)
            if not as_json:
                typer.echo(sentence(done.ok_value))
    if as_json and len(ids) > 1:
        output.print_json({"tasks": [asdict(one) for one in changes]})
    elif as_json and changes:
        output.print_json(asdict(changes[0]))
    if exit_codes:
        raise typer.Exit(min(exit_codes))
