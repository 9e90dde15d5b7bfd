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
    unwrap_or_exit,
)
from horsies.db.statement import read_rows
from horsies.db.statements.durable import list_newest_runs
from horsies.durable.handle import DurableHandle, DurableInfo, DurableStep, run_document
from horsies.findings import command
from horsies.ids import stored_form
from horsies.monitor.diagnose.explain import explain_task_script
from horsies.monitor.diagnose.tasks import signal_command
from horsies.result import Err, Result
from horsies.states import TASK_TERMINAL_STATES
from horsies.tasks.broker import BrokerErrorCode
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
# The default count of --failed, the maximum of --last, and the number of runs to search.
_EXPORTED, _EXPORTED_MAX = 20, 1_000
_SEARCHED_RUNS = 50_000
_TIME = "%Y-%m-%d %H:%M:%S"


def _handle(session: Session, run_id: str, *words: str) -> DurableHandle:
    """Return the run's handle. Its error messages suggest the command ``words`` with an application."""
    definitions = {} if session.app is None else session.app.definitions()
    remedy = f"name the application that has it: {command('durable', *words)} APP"
    return DurableHandle(run_id, session.broker, definitions.get, remedy)


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
        unread = None if as_json else _unread(session, info)
    if as_json:
        output.print_json(run_document(info))
    else:
        _print_run(info, unread)


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
    """Send a value to a run, which is stored until a step takes it. LOCATOR checks its type and encrypts it.

    Without LOCATOR, values of declared types and of runs whose payload is encrypted are refused.

    Exit codes: 0 delivered or stored, 1 failure or already ended, 4 no such run or signal.

    Example:
        horsies durable signal 01a1dd42 approve true shop.tasks:app
    """
    try:
        sent = json.loads(value)
    except (ValueError, RecursionError):
        exit_with(f"The value {value!r} is not JSON; put text in double quotes.", EXIT_FAILED)
    with open_session("durable signal", module or locator, database_url) as session:
        run_id = full_id(session, run_id, "task")
        handle = _handle(session, run_id, "signal", run_id, name, value)
        delivery = _unwrap_or_exit(handle.signal_json(name, sent))
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
    run_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The id of a run, or its first digits.")
    ] = None,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    failed: Annotated[bool, typer.Option("--failed", help="Print the newest failed runs.")] = False,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, max=_EXPORTED_MAX, help="Print this many of the newest runs; 20 with --failed."
        ),
    ] = None,
) -> None:
    """Print the record of a run as JSON, for `horsies.testing.replay`; it holds arguments and results.

    With --last or --failed, print the records of several runs, which check_replay reads as well. Runs
    without a recorded step are left out.

    Exit codes: 0 done, 1 failure, 4 no such run.

    Example:
        horsies durable export 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a > run.json
        horsies durable export --failed --last 50 > tests/records/failed.json
    """
    if failed or last is not None:
        _refuse_run(run_id, locator)
        run_id, locator = None, locator or run_id
    elif run_id is None:
        raise typer.BadParameter("name a run, or use --failed or --last.", param_hint="ID")
    with open_session("durable export", module or locator, database_url) as session:
        if run_id is None:
            output.print_json({"runs": _newest_records(session, failed, last or _EXPORTED)})
        else:
            output.print_json(_record(session, full_id(session, run_id, "task")))


def _refuse_run(given: str | None, locator: str | None) -> None:
    """Reject the id of a run together with --last or --failed, which take only a LOCATOR."""
    if given is not None and (locator is not None or stored_form(given) is not None):
        raise typer.BadParameter(
            "a run and --failed or --last exclude each other.", param_hint="ID"
        )


def _record(session: Session, run_id: str) -> dict[str, Any]:
    return _unwrap_or_exit(_handle(session, run_id, "export", run_id).export())


def _newest_records(session: Session, failed: bool, last: int) -> list[dict[str, Any]]:
    step = list_newest_runs(failed, last, _SEARCHED_RUNS)
    code = BrokerErrorCode.MONITORING_QUERY_FAILED
    found = unwrap_or_exit(session.broker.perform(code, read_rows(step)))
    return [_record(session, one.task_id) for one in found]


def _unread(session: Session, info: DurableInfo) -> str | None:
    """Explain why no worker of the run's queue can read its payload."""
    if info.status in TASK_TERMINAL_STATES:
        return None
    code, script = BrokerErrorCode.MONITORING_QUERY_FAILED, explain_task_script(info.task_id)
    reasons = unwrap_or_exit(session.broker.perform(code, script)).reasons
    return next((one.sentence for one in reasons if one.code == "PAYLOAD_UNREADABLE"), None)


def _print_run(info: DurableInfo, unread: str | None) -> None:
    facts: list[tuple[str, str | None]] = [
        ("run", info.task_id),
        ("task", info.task_name),
        ("status", info.status.value),
    ]
    if info.deadline is not None:
        facts.append(("deadline", f"{info.deadline:{_TIME}%z}"))
    events = [f"signal {name}" for name in info.signals] + [f"task {one}" for one in info.children]
    if info.parked_until is not None:
        events.append(f"until {info.parked_until:{_TIME}%z}")
    if info.parked_since is not None and info.problem is None:
        facts.append(("waits for", ", ".join(events) or None))
        facts += [("send it", signal_command(info.task_id, name)) for name in info.signals]
    facts += [("held", info.problem), ("held", unread), ("encrypted", _unshown(info))]
    output.print_parts(output.fact_table(facts))
    if not info.steps:
        typer.echo("No step is recorded.")
        return
    table = output.plain_table("STEP", "KIND", "RECORDED", "ATTEMPT", "RESULT", flexible="RESULT")
    for step in info.steps:
        recorded = f"{step.ended_at:{_TIME}}"
        table.add_row(step.name, step.kind, recorded, str(step.attempt), _shown(step))
    output.print_parts(table)


def _unshown(info: DurableInfo) -> str | None:
    if info.missing_key is None:
        return None
    return (
        f"with key {info.missing_key}, which this command does not have; name the application: "
        f"{command('durable', 'show', info.task_id)} APP"
    )


def _shown(step: DurableStep) -> str:
    """Return the value of a step; for a step without a value, describe its record."""
    if step.error is not None:
        return f"failed with {step.error.get('code')}"
    if step.kind == "on_cancel":
        return "registered"
    if step.due_at is not None:
        return f"until {step.due_at:{_TIME}}"
    text = json.dumps(step.result)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
