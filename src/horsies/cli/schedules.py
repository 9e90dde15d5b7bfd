"""`horsies schedules`: list, pause, resume and run schedules.

Only running a schedule needs an application, for its task or workflow; the other actions need a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, assert_never

import typer

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
    Schedules,
    change,
    list_script,
    next_script,
    perform,
    runs_script,
    switch_script,
)
from horsies.tasks.handle import TaskHandle
from horsies.tasks.recording import Action
from horsies.tasks.send import Producer

COUNT_MAX = 1_000


class ScheduleAction(StrEnum):
    LIST = "list"
    NEXT = "next"
    RUNS = "runs"
    RUN = "run"
    PAUSE = "pause"
    RESUME = "resume"


def schedules(
    action: Annotated[
        ScheduleAction,
        typer.Argument(
            metavar="[list|next|runs|run|pause|resume]",
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
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the schedules; show one schedule's next slots or newest runs; run, pause or resume it.

    While a schedule is paused, its slots do not fire on any scheduler. Running a schedule sends its task
    or starts its workflow now, without changing the timetable; this needs LOCATOR.

    Exit codes: 0 done, 1 failure, 4 no such schedule.

    Example:
        horsies schedules
        horsies schedules next nightly-report
    """
    if action is not ScheduleAction.LIST:
        name, locator = name_before_locator(name, locator)
    if name is None and action is not ScheduleAction.LIST:
        raise failure_at(
            None,
            f"horsies schedules {action.value} needs the name of a schedule.",
            help_text=f"horsies schedules {action.value} NAME",
        )
    if action is ScheduleAction.RUN:
        refuse_both("LOCATOR", module or locator, "--database-url", database_url)
        if not (module or locator):
            raise failure_at(
                None,
                "horsies schedules run needs an application.",
                help_text=f"horsies schedules run {name} package.module:app",
            )
    with open_session("schedules", module or locator, database_url) as session:
        _act(session, action, name or "", count, as_json, reason)


def _run(session: Session, name: str, as_json: bool) -> None:
    """Send a schedule's task, or start its workflow, through the application."""
    app = session.app
    assert app is not None
    refuse_broken_app(app)
    producer = Producer(app.config, lambda: session.broker, app.are_sends_suppressed)
    handle = unwrap_or_exit(Schedules(producer, app.definitions, app).run(name))
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


def _act(
    session: Session,
    action: ScheduleAction,
    name: str,
    count: int,
    as_json: bool,
    reason: str | None,
) -> None:
    broker = session.broker
    match action:
        case ScheduleAction.LIST:
            _show_states(unwrap_or_exit(perform(broker, list_script())), as_json)
        case ScheduleAction.NEXT:
            _show_slots(name, unwrap_or_exit(perform(broker, next_script(name, count))), as_json)
        case ScheduleAction.RUNS:
            _show_runs(name, unwrap_or_exit(perform(broker, runs_script(name, count))), as_json)
        case ScheduleAction.PAUSE | ScheduleAction.RESUME:
            switch = pause_schedule if action is ScheduleAction.PAUSE else resume_schedule
            record = Action(f"{action.value}_schedule", f"schedule {name}", reason)
            done = change(broker, record, switch_script(name, switch))
            _show_state(unwrap_or_exit(done).state, as_json)
        case ScheduleAction.RUN:
            _run(session, name, as_json)
        case _:
            assert_never(action)


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
