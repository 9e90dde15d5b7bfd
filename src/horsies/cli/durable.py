"""Operator commands for durable functions: show a run with its steps, signal, resume, reset or export it."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import typer

from horsies.cli import output
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
    ReasonOption,
    Session,
    exit_with,
    full_id,
    open_session,
)
from horsies.durable.handle import DurableHandle, DurableInfo, run_document
from horsies.result import Err, Result
from horsies.tasks.handle import TaskActionError, TaskActionErrorCode

T = TypeVar("T")

durable = typer.Typer(
    help="Show, signal, resume, reset or export runs of durable functions.", no_args_is_help=True
)

_NOT_FOUND = (
    TaskActionErrorCode.TASK_NOT_FOUND,
    TaskActionErrorCode.STEP_NOT_FOUND,
    TaskActionErrorCode.SIGNAL_NOT_FOUND,
)
_SHOWN_CHARACTERS = 60


def _handle(session: Session, run_id: str) -> DurableHandle:
    definitions = {} if session.app is None else session.app.definitions()
    return DurableHandle(run_id, session.broker, definitions.get)


def _unwrap_or_exit(result: Result[T, TaskActionError]) -> T:
    if isinstance(result, Err):
        code = EXIT_NOT_FOUND if result.value.code in _NOT_FOUND else EXIT_FAILED
        exit_with(result.value.message, code)
    return result.value


@durable.command()
def show(
    run_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run of a durable function: its recorded steps, and what it waits for.

    Exit codes: 0 done, 1 failure, 4 no such run.

    Example:
        horsies durable show 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("durable show", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        info = _unwrap_or_exit(_handle(session, run_id).info())
    if as_json:
        output.print_json(run_document(info))
    else:
        _print_run(info)


@durable.command()
def signal(
    run_id: RunIdArgument,
    name: SignalNameArgument,
    value: SignalValueArgument = "null",
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a value to a run, which is stored until a step takes it; with LOCATOR, types are checked.

    Exit codes: 0 delivered or stored, 1 failure or already ended, 4 no such run or signal.

    Example:
        horsies durable signal 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a approve true
    """
    try:
        sent = json.loads(value)
    except (ValueError, RecursionError):
        exit_with(f"The value {value!r} is not JSON; put text in double quotes.", EXIT_FAILED)
    with open_session("durable signal", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        delivery = _unwrap_or_exit(_handle(session, run_id).signal_json(name, sent))
    if as_json:
        output.print_json({"task_id": run_id, "signal": name, "delivery": delivery})
    else:
        typer.echo(f"Signal {name} is {delivery.value}.")


@durable.command()
def resume(
    run_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    reason: ReasonOption = None,
) -> None:
    """Continue a run that is held because its code does not fit its record.

    Exit codes: 0 resumed, 1 failure or not held, 4 no such run.

    Example:
        horsies durable resume 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
    """
    with open_session("durable resume", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        _unwrap_or_exit(_handle(session, run_id).resume(reason=reason))
    typer.echo(f"Run {run_id} is resumed.")


@durable.command()
def reset(
    run_id: RunIdArgument,
    step: Annotated[str, typer.Argument(metavar="STEP", help="The first step to forget.")],
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    reason: ReasonOption = None,
) -> None:
    """Forget a step and all later ones, and continue there; their effects stay and happen again.

    Exit codes: 0 done, 1 failure, running or ended, 4 no such run or step.

    Example:
        horsies durable reset 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a charge
    """
    with open_session("durable reset", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        count = _unwrap_or_exit(_handle(session, run_id).reset(step, reason=reason))
    typer.echo(f"Run {run_id} continues at {step}; it has forgotten {count} step(s).")


@durable.command()
def export(
    run_id: RunIdArgument,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
) -> None:
    """Print the record of a run as JSON, for `horsies.testing.replay`; it holds arguments and results.

    Exit codes: 0 done, 1 failure, 4 no such run.

    Example:
        horsies durable export 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a > run.json
    """
    with open_session("durable export", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        record = _unwrap_or_exit(_handle(session, run_id).export())
    output.print_json(record)


def _print_run(info: DurableInfo) -> None:
    facts: list[tuple[str, str | None]] = [
        ("run", info.task_id),
        ("task", info.task_name),
        ("status", info.status.value),
    ]
    events = [f"signal {name}" for name in info.signals] + [f"task {one}" for one in info.children]
    if info.parked_until is not None:
        events.append(f"until {info.parked_until:%Y-%m-%d %H:%M:%S%z}")
    if info.parked_since is not None and info.problem is None:
        facts.append(("waits for", ", ".join(events) or None))
    facts.append(("held", info.problem))
    output.print_parts(output.fact_table(facts))
    if not info.steps:
        typer.echo("No step is recorded.")
        return
    table = output.plain_table("STEP", "KIND", "ENDED", "ATTEMPT", "RESULT", flexible="RESULT")
    for step in info.steps:
        ended = f"{step.ended_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(
            step.name, step.kind, ended, str(step.attempt), _shown(step.error, step.result)
        )
    output.print_parts(table)


def _shown(error: Any, result: Any) -> str:
    if error is not None:
        return f"failed with {error.get('code')}"
    text = json.dumps(result)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
