"""`horsies schedules`: list, pause, resume, edit and run schedules.

Only running a schedule needs an application, for its task or workflow; the other actions need a database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, NamedTuple, assert_never

import typer

from horsies.app import producer_on
from horsies.cli import output
from horsies.cli.locator import name_before_locator
from horsies.cli.options import (
    DatabaseUrlOption,
    LocatorArgument,
    ModuleOption,
    refuse_both,
    refuse_broken_app,
)
from horsies.cli.session import JsonOption, ReasonOption, Session, open_session, unwrap_or_exit
from horsies.db.statements.schedules import (
    ScheduleRun,
    ScheduleState,
    pause_schedule,
    resume_schedule,
)
from horsies.modules import failure_at
from horsies.monitor.documents import schedule_document
from horsies.scheduler.api import (
    EditedSchedule,
    Schedules,
    change,
    edit_document,
    edited_script,
    list_script,
    next_script,
    perform,
    previewed_script,
    runs_script,
    switch_script,
)
from horsies.scheduler.edit import new_timing, original_timing, undo_edit
from horsies.scheduler.timing import timing_words
from horsies.tasks.handle import TaskHandle
from horsies.tasks.recording import Action

COUNT_MAX = 1_000


class ScheduleAction(StrEnum):
    LIST = "list"
    NEXT = "next"
    RUNS = "runs"
    RUN = "run"
    PAUSE = "pause"
    RESUME = "resume"
    EDIT = "edit"
    RESET = "reset"


class _Options(NamedTuple):
    """The options of the command, except the action and the schedule."""

    limit: int
    as_json: bool
    reason: str | None
    pattern: str | None
    timezone: str | None
    dry_run: bool


def schedules(
    action: Annotated[
        ScheduleAction,
        typer.Argument(
            metavar="[list|next|runs|run|pause|resume|edit|reset]",
            help="Without an action, the stored schedules are listed.",
            show_default=False,
        ),
    ] = ScheduleAction.LIST,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The schedule, for every action except list."),
    ] = None,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    count: Annotated[
        int, typer.Option(min=1, max=COUNT_MAX, help="How many slots or runs to show.")
    ] = 10,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="For edit: every day at 03:00, every 90 s, or a cron expression."
        ),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="For edit: the time zone of the pattern.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="For edit and reset: show the slots, change nothing.")
    ] = False,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the schedules; show one schedule's next slots or newest runs; run, pause, resume or edit it.

    While a schedule is paused, its slots do not fire on any scheduler. Running a schedule sends its task
    or starts its workflow now, without changing the timetable; this needs LOCATOR. Edit changes when it
    fires, even if it is configured; reset returns to the configuration.

    Exit codes: 0 done, 1 failure, 4 no such schedule.

    Example:
        horsies schedules
        horsies schedules edit nightly-report --pattern "every day at 04:00"
    """
    if action is not ScheduleAction.LIST:
        name, locator = name_before_locator(name, locator)
    _refuse_missing(action, name, is_edit_empty=pattern is None and timezone is None)
    application = module or locator
    if action is ScheduleAction.RUN:
        _refuse_without_app(name, application, database_url)
    options = _Options(count, as_json, reason, pattern, timezone, dry_run)
    with open_session("schedules", application, database_url) as session:
        _act(session, action, name or "", options)


def _refuse_missing(action: ScheduleAction, name: str | None, *, is_edit_empty: bool) -> None:
    if name is None and action is not ScheduleAction.LIST:
        raise failure_at(
            None,
            f"horsies schedules {action.value} needs the name of a schedule.",
            help_text=f"horsies schedules {action.value} NAME",
        )
    if action is ScheduleAction.EDIT and is_edit_empty:
        raise failure_at(
            None,
            "horsies schedules edit needs a pattern or a time zone.",
            help_text=f'horsies schedules edit {name} --pattern "every day at 03:00"',
        )


def _refuse_without_app(
    name: str | None, application: str | None, database_url: str | None
) -> None:
    refuse_both("LOCATOR", application, "--database-url", database_url)
    if not application:
        raise failure_at(
            None,
            "horsies schedules run needs an application.",
            help_text=f"horsies schedules run {name} package.module:app",
        )


def _run(session: Session, name: str, as_json: bool) -> None:
    """Send a schedule's task, or start its workflow, through the application."""
    app = session.app
    assert app is not None
    refuse_broken_app(app)
    handle = unwrap_or_exit(
        Schedules(producer_on(app, session.broker), app.definitions, app).run(name)
    )
    if isinstance(handle, TaskHandle):
        document = {"name": name, "task_id": handle.task_id}
        line = f"Schedule {name} was sent as task {handle.task_id}."
    else:
        document = {"name": name, "workflow_id": handle.workflow_id}
        line = f"Schedule {name} was started as workflow {handle.workflow_id}."
    if as_json:
        output.print_json(document)
    else:
        typer.echo(line)


def _act(session: Session, action: ScheduleAction, name: str, options: _Options) -> None:
    broker, count, as_json = session.broker, options.limit, options.as_json
    match action:
        case ScheduleAction.LIST:
            _show_states(unwrap_or_exit(perform(broker, list_script())), as_json)
        case ScheduleAction.NEXT:
            _show_slots(name, unwrap_or_exit(perform(broker, next_script(name, count))), as_json)
        case ScheduleAction.RUNS:
            _show_runs(name, unwrap_or_exit(perform(broker, runs_script(name, count))), as_json)
        case ScheduleAction.PAUSE | ScheduleAction.RESUME:
            switch = pause_schedule if action is ScheduleAction.PAUSE else resume_schedule
            record = Action(f"{action.value}_schedule", f"schedule {name}", options.reason)
            done = change(broker, record, switch_script(name, switch))
            _show_state(unwrap_or_exit(done).state, as_json)
        case ScheduleAction.EDIT | ScheduleAction.RESET:
            _edit(session, action, name, options)
        case ScheduleAction.RUN:
            _run(session, name, as_json)
        case _:
            assert_never(action)


def _edit(session: Session, action: ScheduleAction, name: str, options: _Options) -> None:
    """Change a schedule's timing, or only show the slots that it would have."""
    is_reset = action is ScheduleAction.RESET
    new = original_timing if is_reset else new_timing(options.pattern, options.timezone)
    if options.dry_run:
        found = unwrap_or_exit(perform(session.broker, previewed_script(name, new)))
    else:
        record = Action(f"{action.value}_schedule", f"schedule {name}", options.reason)
        found = unwrap_or_exit(change(session.broker, record, edited_script(name, new))).state
    if options.as_json:
        output.print_json(edit_document(found, is_stored=not options.dry_run))
    else:
        typer.echo("\n".join(_edit_lines(found, options.dry_run)))


def _edit_lines(found: EditedSchedule, dry_run: bool) -> Iterator[str]:
    state, edit = found
    if edit is None:
        yield f"Schedule {state.name} was not edited, so there is nothing to reset."
        return
    yield f"Schedule {state.name} {'would fire' if dry_run else 'fires'} {timing_words(edit.new_timing)}:"
    yield from (f"  {output.timestamp(slot)}" for slot in edit.new_slots)
    if dry_run or not edit.is_changed:
        yield "Nothing was changed."
        return
    yield f"Before: {timing_words(edit.timing)}. To undo it: {undo_edit(state.name, edit)}"


def _show_states(states: Sequence[ScheduleState], as_json: bool) -> None:
    if as_json:
        output.print_json({"schedules": [schedule_document(state) for state in states]})
        return
    columns = ("SCHEDULE", "NEXT (UTC)", "LAST (UTC)", "STATUS", "RUNS")
    table = output.plain_table(*columns, flexible="SCHEDULE")
    for state in states:
        target = state.task_name or state.definition_key
        name = output.safe_text(state.name).append_text(output.safe_text(f"\n{target}", "dim"))
        if state.is_paused:
            name.append("\npaused", "yellow")
        if state.is_edited:
            name.append("\nedited", "yellow")
        table.add_row(
            name,
            _second(state.next_run_at) or "never",
            _second(state.last_run_at) or "-",
            output.status_text(state.last_status or "-"),
            f"{state.run_count:,}",
        )
    output.print_parts(table if states else "No schedule is on record.")


def _show_slots(name: str, slots: Sequence[datetime], as_json: bool) -> None:
    if as_json:
        output.print_json({"name": name, "slots": list(slots)})
    elif not slots:
        typer.echo(f"Schedule {name} has ended: there are no more slots.")
    else:
        typer.echo("\n".join(output.timestamp(slot) or "" for slot in slots))


def _show_runs(name: str, runs: Sequence[ScheduleRun], as_json: bool) -> None:
    if as_json:
        output.print_json({"name": name, "runs": [run._asdict() for run in runs]})
        return
    table = output.plain_table("ID", "STATUS", "SLOT (UTC)", "ERROR", flexible="ERROR")
    for run in runs:
        slot = _second(run.scheduled_for) or "by hand"
        error = output.safe_text(run.error_code or "", "red")
        table.add_row(run.task_id, output.status_text(run.status), slot, error)
    output.print_parts(table if runs else "No run is on record.")


def _show_state(state: ScheduleState, as_json: bool) -> None:
    if as_json:
        output.print_json(schedule_document(state))
    elif state.is_paused:
        typer.echo(f"Schedule {state.name} is paused since {output.timestamp(state.paused_at)}.")
    else:
        following = output.timestamp(state.next_run_at) or "never"
        slots = f"its next slot: {following}"
        if state.next_run_at is not None and state.next_run_at < datetime.now(UTC):
            slots = f"its slots since {following} have passed: the next tick of a scheduler fires "
            slots += "or drops them"
        typer.echo(f"Schedule {state.name} is not paused; {slots}.")


def _second(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
