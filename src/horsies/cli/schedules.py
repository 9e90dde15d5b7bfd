"""`horsies schedules`: what is due when, and a hand on it.

Listing, pausing, resuming and telling the next slots need a database and nothing else; running one now
needs the application, whose task or workflow it is. Exit codes are those of the other operator commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, TypeVar, assert_never

import typer

from horsies.cli import output
from horsies.cli.options import DatabaseUrlOption, ModuleOption, open_app, refuse_both
from horsies.cli.tasks_queues_workers import EXIT_FAILED, JsonOption, answer, open_target
from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    ScheduleRun,
    ScheduleState,
    pause_schedule,
    resume_schedule,
)
from horsies.errors import ValidationReport
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import failure_at
from horsies.scheduler.api import (
    WORKING,
    RunHandle,
    Schedules,
    Told,
    list_script,
    next_script,
    runs_script,
    switch_script,
    told,
)
from horsies.tasks.broker import PostgresBroker
from horsies.tasks.handle import TaskHandle
from horsies.tasks.send import Producer
from horsies.workflow.run.handle import WorkflowHandle

T = TypeVar("T")

COUNT_MAX = 1_000


class ScheduleAction(StrEnum):
    """What to do with schedules."""

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
            help="Without it, the schedules on record are listed.",
            show_default=False,
        ),
    ] = ScheduleAction.LIST,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The schedule; all actions but list.")
    ] = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    count: Annotated[
        int, typer.Option(min=1, max=COUNT_MAX, help="How many slots or runs to show.")
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """List the schedules, tell the next slots or the newest runs of one, run, pause or resume it.

    A paused schedule lets its slots pass, on all schedulers, until it is resumed. Running one sends its
    task or starts its workflow now and leaves the timetable alone; this needs the application (-m).

    Exit codes: 0 done, 1 failure, 4 no such schedule.
    """
    if action is ScheduleAction.LIST:
        _list(module, database_url, as_json)
        return
    if name is None:
        raise failure_at(
            None,
            f"horsies schedules {action.value} needs the name of a schedule.",
            help_text=f"horsies schedules {action.value} NAME",
        )
    if action is ScheduleAction.RUN:
        _run(module, database_url, name, as_json)
        return
    with open_target("schedules", module, database_url) as target:
        _act(target.broker, action, name, count, as_json)


def _list(module: str | None, database_url: str | None, as_json: bool) -> None:
    with open_target("schedules", module, database_url) as target:
        found = _perform(target.broker, list_script())
    if as_json:
        output.print_json({"schedules": [output.schedule_document(one) for one in found]})
    else:
        output.print_schedules(found)


def _run(module: str | None, database_url: str | None, name: str, as_json: bool) -> None:
    """Send the task of a schedule, or start its workflow, through the application."""
    attach_handler(LogLevel.WARNING, LogFormat.TEXT)
    refuse_both("--module", module, "--database-url", database_url)
    if module is None:
        raise failure_at(
            None,
            "horsies schedules run needs to know the application.",
            help_text=f"horsies schedules run {name} -m package.module:app",
        )
    app = open_app("schedules", module)
    if errors := app.check(live=False):
        typer.echo(ValidationReport("check", errors).format(), err=True)
        raise typer.Exit(EXIT_FAILED)
    broker = PostgresBroker(app.config.broker, role="operator", migrates=False)
    producer = Producer(app.config, lambda: broker, app.are_sends_suppressed)
    try:
        handle = answer(Schedules(producer, app.definitions, app).run(name))
    finally:
        broker.close()
    _show_handle(name, handle, as_json)


def _show_handle(name: str, handle: RunHandle, as_json: bool) -> None:
    match handle:
        case TaskHandle():
            document = {"name": name, "task_id": handle.task_id}
            line = f"Schedule {name} was sent as task {handle.task_id}."
        case WorkflowHandle():
            document = {"name": name, "workflow_id": handle.workflow_id}
            line = f"Schedule {name} was started as workflow {handle.workflow_id}."
        case _:
            assert_never(handle)
    if as_json:
        output.print_json(document)
    else:
        typer.echo(line)


def _act(
    broker: PostgresBroker, action: ScheduleAction, name: str, count: int, as_json: bool
) -> None:
    match action:
        case ScheduleAction.NEXT:
            slots = _perform(broker, next_script(name, count))
            _show_slots(name, slots, as_json)
        case ScheduleAction.RUNS:
            runs = _perform(broker, runs_script(name, count))
            _show_runs(name, runs, as_json)
        case ScheduleAction.PAUSE:
            _show_state(_perform(broker, switch_script(name, pause_schedule)), as_json)
        case ScheduleAction.RESUME:
            _show_state(_perform(broker, switch_script(name, resume_schedule)), as_json)
        case ScheduleAction.LIST | ScheduleAction.RUN:
            raise AssertionError("handled before")
        case _:
            assert_never(action)


def _perform(broker: PostgresBroker, script: Script[Told[T]]) -> T:
    return answer(told(broker.perform(WORKING, script)))


def _show_slots(name: str, slots: Sequence[datetime], as_json: bool) -> None:
    if as_json:
        output.print_json({"name": name, "slots": list(slots)})
    elif not slots:
        typer.echo(f"Schedule {name} has ended: no slot will come.")
    for slot in () if as_json else slots:
        typer.echo(output.moment(slot))


def _show_runs(name: str, runs: Sequence[ScheduleRun], as_json: bool) -> None:
    if as_json:
        output.print_json({"name": name, "runs": [run._asdict() for run in runs]})
    else:
        output.print_schedule_runs(runs)


def _show_state(state: ScheduleState, as_json: bool) -> None:
    if as_json:
        output.print_json(output.schedule_document(state))
    elif state.is_paused:
        typer.echo(f"Schedule {state.name} is paused since {output.moment(state.paused_at)}.")
    else:
        following = output.moment(state.next_run_at) or "never"
        typer.echo(f"Schedule {state.name} is not paused; its next slot: {following}.")
