"""`horsies status`, `horsies queues` and `horsies workers`: inspect queues and workers, pause queues."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from horsies.cli import output
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.orders import (
    DryRunOption,
    OrderOption,
    OrderRun,
    YesOption,
    continue_order,
    run_draft,
)
from horsies.cli.session import (
    EXIT_FAILED,
    JsonOption,
    ReasonOption,
    Session,
    exit_with,
    open_session,
    unwrap_or_exit,
)
from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.monitor import WorkerSummary
from horsies.modules import failure_at
from horsies.monitor.actions import QueueOrder, check_queue, switch_queue
from horsies.monitor.defaults import PING_TIMEOUT_SECONDS
from horsies.monitor.documents import overview_document, queue_document, worker_document
from horsies.monitor.health import WorkerPong, ping_workers
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.overview import (
    Overview,
    QueueOverview,
    WorkerHealth,
    health_of,
    misses_notifications,
    read_overview,
    read_workers,
)
from horsies.monitor.queries import TaskFilters
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerResult, PostgresBroker

_QUEUE_COUNTS = ("CAP", "DUE", "DELAYED", "CLAIMED", "RUNNING", "OLDEST", "DONE/MIN", "FAILED/MIN")
# Workers of one set of queues that `status` names.
_NAMES_SHOWN = 5
CLEAR_SCREEN = "\x1b[H\x1b[2J"
_WORKER_COLUMNS = ("WORKER", "STATE", "BUSY", "MEMORY", "SEEN")
_HEALTH_STYLES = {"alive": "green", "silent": "yellow", "lost": "red", "stopped": "dim"}


class QueueAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    PURGE = "purge"


def status(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the status again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two looks of --watch.")
    ] = 2.0,
) -> None:
    """Show all queues, a summary of the workers, and blocked tasks and runs.

    CAP is the max_concurrency of a queue as its workers have it, or the application if none serves it.
    DUE tasks can be claimed now, DELAYED tasks are due later; both are counted up to 10,000 of a queue, and
    beyond shown as "10,000+". OLDEST is the waiting time of the oldest due task.
    Rates count the attempts that ended within the last minute; FAILED/MIN leaves out attempts that will be
    retried. The next change of a BLOCKED task or run is refused by the database; workers try it again.

    With --watch, a terminal is redrawn; other output gets one report after the other.

    Exit codes: 0 done, 1 failure.
    """
    with open_session("status", module or locator, database_url) as session:
        if not watch:
            _print_status(_read_status(session), as_json)
            return
        with suppress(KeyboardInterrupt):
            _watch_status(session, as_json, every)


def _read_status(session: Session) -> Overview:
    return unwrap_or_exit(read_overview(session.broker, session.queue_caps))


def _watch_status(session: Session, as_json: bool, every: float) -> None:
    """Print the status until an interrupt. A database that goes away later is waited for."""
    found: BrokerResult[Overview] = Ok(_read_status(session))
    while True:
        if isinstance(found, Err):
            typer.echo(f"error: {found.err_value.message}", err=True)
        else:
            if sys.stdout.isatty():
                sys.stdout.write(CLEAR_SCREEN)
            _print_status(found.ok_value, as_json)
            sys.stdout.flush()
        time.sleep(every)
        found = read_overview(session.broker, session.queue_caps)


def _print_status(found: Overview, as_json: bool) -> None:
    if as_json:
        output.print_json(overview_document(found))
    else:
        _print_queues(found.queues)
        lines = [_worker_summary(found.workers), *_serving_lines(found.workers)]
        output.print_parts(output.safe_text("\n".join(lines)))
        _print_blocked(found.blocked, found.blocked_count)


def _print_blocked(blocked: Sequence[BlockedRow], count: int) -> None:
    if not blocked:
        return
    lines = [f"{count} blocked task(s) or run(s): the database refuses their next change."]
    for row in blocked:
        run = f" of run {row.workflow_id}" if row.kind == "task" and row.workflow_id else ""
        since = output.duration(row.blocked_seconds)
        lines.append(f"  {row.kind} {row.id}{run}, {row.action}, for {since}: {row.error}")
    if count > len(blocked):
        lines.append(f"  and {count - len(blocked)} more")
    output.print_parts(output.safe_text("\n".join(lines), "yellow"))


def queues(
    action: Annotated[
        QueueAction | None,
        typer.Argument(metavar="[pause|resume|purge]", help="Without it, the queues are listed."),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The queue to pause, resume or purge.")
    ] = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the queues, or pause, resume or purge one.

    Workers stop claiming from a paused queue at once, on every host; running tasks continue. A purge cancels
    all waiting tasks of a queue, at most 10,000 at a time; it shows their number and asks first. Valid names
    are the queues of the application (-m) or, without one, queues that are served, have open tasks or were
    paused before.

    Exit codes: 0 done, 1 failure, 4 no such queue.
    """
    if action is not None and name is None:
        raise failure_at(
            None,
            f"horsies queues {action.value} needs the name of a queue.",
            help_text=f"horsies queues {action.value} NAME",
        )
    if action is not QueueAction.PURGE and (dry_run or yes or order is not None):
        raise typer.BadParameter("--dry-run, --yes and --order belong to horsies queues purge.")
    with open_session("queues", module, database_url) as session:
        if action is None or name is None:
            _list_queues(session, as_json)
        elif action is QueueAction.PURGE:
            words = ("queues", "purge", name, *(("-m", module) if module else ()))
            _purge_queue(session, name, reason, order, OrderRun(words, dry_run, yes, as_json))
        else:
            _switch_queue(session, action, name, reason, as_json)


def _purge_queue(
    session: Session, name: str, reason: str | None, order: str | None, run: OrderRun
) -> None:
    if order is not None:
        continue_order(session, order, {OrderVerb.PURGE_QUEUE}, run)
        return
    known = None if session.queue_caps is None else list(session.queue_caps)
    unwrap_or_exit(check_queue(session.broker, name, known))
    filters = TaskFilters(queues=[name])
    run_draft(session, draft_order(OrderVerb.PURGE_QUEUE, filters, reason=reason), run)


def _list_queues(session: Session, as_json: bool) -> None:
    found = unwrap_or_exit(read_overview(session.broker, session.queue_caps)).queues
    if as_json:
        output.print_json({"queues": [queue_document(queue) for queue in found]})
    else:
        _print_queues(found)


def _switch_queue(
    session: Session, action: QueueAction, name: str, reason: str | None, as_json: bool
) -> None:
    known = None if session.queue_caps is None else list(session.queue_caps)
    order = QueueOrder(name, action is QueueAction.PAUSE, known, reason)
    state = unwrap_or_exit(switch_queue(session.broker, order))
    if as_json:
        output.print_json({"paused": state.is_paused, **state._asdict()})
    elif state.is_paused:
        typer.echo(f"Queue {state.name} is paused since {output.timestamp(state.paused_at)}.")
    else:
        typer.echo(f"Queue {state.name} is not paused.")


def _print_queues(queues: Sequence[QueueOverview]) -> None:
    if not queues:
        output.print_parts(
            "No queue is in use: no tasks are waiting or running, and no worker is alive."
        )
        return
    table = output.plain_table("QUEUE", *_QUEUE_COUNTS, flexible="QUEUE")
    for queue in queues:
        name = output.safe_text(queue.name)
        if queue.paused_at is not None:
            name.append("\npaused", "yellow")
        if not queue.workers:
            name.append("\nno worker", "yellow")
        rates = (queue.done_per_minute, queue.failed_per_minute)
        table.add_row(
            name,
            _cap_text(queue.caps),
            _waiting_text(queue, queue.due),
            _waiting_text(queue, queue.delayed),
            f"{queue.claimed:,}",
            f"{queue.running:,}",
            output.duration(queue.oldest_waiting_seconds),
            *(f"{rate:,.0f}" for rate in rates),
        )
    output.print_parts(table)


def _waiting_text(queue: QueueOverview, count: int) -> str:
    return f"{count:,}+" if queue.is_at_least(count) else f"{count:,}"


def _cap_text(caps: Iterable[int | None]) -> str:
    """Format the caps of all workers, which differ during a change of the configuration."""
    return ", ".join("-" if cap is None else f"{cap:,}" for cap in caps) or "-"


def workers(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    include_stopped: Annotated[
        bool, typer.Option("--all", help="Also list workers that have stopped.")
    ] = False,
    ping: Annotated[
        bool, typer.Option("--ping", help="Ping the workers and show their round-trip times.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the workers.

    A worker is alive if it was seen within 15 seconds, or if it is idle and its connection is open;
    silent if only its connection is open; lost if the connection is closed too.

    Exit codes: 0 done, 1 failure, or no worker responded to --ping.
    """
    with open_session("workers", module or locator, database_url) as session:
        found = unwrap_or_exit(read_workers(session.broker, include_stopped=include_stopped))
        pongs = _ping(session.broker, found) if ping else None
    if as_json:
        replies = pongs or {}
        documents = [worker_document(one, replies.get(one.worker_id)) for one in found]
        output.print_json({"workers": documents})
    else:
        _print_workers(found, pongs)
    if ping and not pongs:
        exit_with("No worker responded to the ping.", EXIT_FAILED)


def _ping(broker: PostgresBroker, found: Sequence[WorkerSummary]) -> dict[str, WorkerPong]:
    alive = sum(health_of(worker) is WorkerHealth.ALIVE for worker in found)
    if not alive:
        return {}
    done = ping_workers(broker, timeout_seconds=PING_TIMEOUT_SECONDS, min_responses=alive)
    return {pong.worker_id: pong for pong in unwrap_or_exit(done)}


def _worker_summary(workers: Sequence[WorkerSummary]) -> str:
    """Describe in one line how many workers there are and how busy they are."""
    if not workers:
        return "No worker is running."
    healths = [health_of(worker) for worker in workers]
    alive = [worker for worker in workers if health_of(worker) is WorkerHealth.ALIVE]
    busy = sum(worker.tasks_running for worker in alive)
    total = sum(worker.processes for worker in alive)
    children = "child" if total == 1 else "children"
    line = f"{_counted(len(alive), 'worker')} alive, {busy} of {total} {children} busy"
    known = [worker.memory_mb for worker in alive if worker.memory_mb is not None]
    line += f", {output.memory(sum(known))} of memory" if known else ""
    polling = sum(map(misses_notifications, alive))
    line += f", {polling} without notifications" if polling else ""
    for health in (WorkerHealth.SILENT, WorkerHealth.LOST):
        count = healths.count(health)
        line += f", {count} {health.value}" if count else ""
    caps = sorted({one.cluster_wide_cap for one in alive if one.cluster_wide_cap is not None})
    line += f", cluster-wide cap {_cap_text(caps)}" if caps else ""
    return f"{line}."


def _serving_lines(workers: Sequence[WorkerSummary]) -> Iterator[str]:
    """Name the live workers of each set of queues."""
    by_queues: dict[str, list[str]] = {}
    for worker in workers:
        if health_of(worker) is WorkerHealth.ALIVE:
            name = worker.name or f"{worker.hostname} pid {worker.pid}"
            by_queues.setdefault(", ".join(worker.queues), []).append(name)
    for queues, names in sorted(by_queues.items()):
        more = len(names) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        yield f"  {queues}: {', '.join(sorted(names)[:_NAMES_SHOWN])}{rest}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_workers(
    workers: Sequence[WorkerSummary], pongs: dict[str, WorkerPong] | None = None
) -> None:
    if not workers:
        output.print_parts("No worker is running.")
        return
    columns = _WORKER_COLUMNS if pongs is None else (*_WORKER_COLUMNS, "PING")
    table = output.plain_table(*columns, flexible="WORKER")
    for worker in workers:
        health = health_of(worker).value
        place = f"{worker.hostname}, pid {worker.pid}, queues {', '.join(worker.queues)}"
        name = output.safe_text(worker.worker_id)
        if worker.name is not None:
            name.append_text(output.safe_text(f"\n{worker.name}"))
        name.append_text(output.safe_text(f"\n{place}", "dim"))
        if misses_notifications(worker):
            name.append("\nreceives no notifications, finds work by polling", "yellow")
        cells: list[Text | str] = [
            name,
            Text(health, _HEALTH_STYLES[health]),
            f"{worker.tasks_running}/{worker.processes}",
            output.memory(worker.memory_mb),
            output.duration(worker.seen_seconds_ago),
        ]
        if pongs is not None:
            pong = pongs.get(worker.worker_id)
            cells.append(f"{pong.latency_ms:.0f} ms" if pong else "none")
        table.add_row(*cells)
    output.print_parts(table)
