"""`horsies queues` and `horsies workers`: inspect queues and workers, pause queues."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

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
    JsonOption,
    ReasonOption,
    Session,
    exit_with,
    open_session,
    unwrap_or_exit,
)
from horsies.cli.status import print_queues
from horsies.db.statements.monitor import WorkerSummary
from horsies.modules import failure_at
from horsies.monitor.actions import QueueOrder, check_queue, switch_queue
from horsies.monitor.defaults import PING_TIMEOUT_SECONDS
from horsies.monitor.documents import queue_document, worker_document
from horsies.monitor.health import WorkerPong, ping_workers
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.overview import (
    WorkerHealth,
    health_of,
    misses_notifications,
    read_overview,
    read_workers,
)
from horsies.monitor.queries import TaskFilters
from horsies.tasks.broker import PostgresBroker

_WORKER_COLUMNS = ("WORKER", "STATE", "BUSY", "MEMORY", "SEEN")
_HEALTH_STYLES = {"alive": "green", "silent": "yellow", "lost": "red", "stopped": "dim"}


class QueueAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    PURGE = "purge"


def queues(
    action: Annotated[
        QueueAction | None,
        typer.Argument(
            metavar="[pause|resume|purge]", help="Without an action, the queues are listed."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The queue to pause, resume or purge.")
    ] = None,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the queues, or pause, resume or purge one.

    Workers on every host stop claiming from a paused queue immediately; running tasks continue. A purge
    cancels all of a queue's waiting tasks, at most 10,000 at a time; it shows their number and asks
    first. Valid names are the application's queues or, without an application, queues that are
    served, have open tasks or were paused before.

    Exit codes: 0 done, 1 failure, 4 no such queue.

    Example:
        horsies queues
        horsies queues pause mail --reason 'the provider is down'
    """
    if action is not None and name is None:
        raise failure_at(
            None,
            f"horsies queues {action.value} needs the name of a queue.",
            help_text=f"horsies queues {action.value} NAME",
        )
    if action is not QueueAction.PURGE and (dry_run or yes or order is not None):
        raise typer.BadParameter("--dry-run, --yes and --order belong to horsies queues purge.")
    with open_session("queues", module or locator, database_url) as session:
        if action is None or name is None:
            _list_queues(session, as_json)
        elif action is QueueAction.PURGE:
            words = ("queues", "purge", name, *filter(None, [module or locator]))
            bulk = BulkCommand(session, OrderVerb.PURGE_QUEUE, words, dry_run, yes, as_json)
            _purge_queue(bulk, name, reason, order)
        else:
            _switch_queue(session, action, name, reason, as_json)


def _purge_queue(bulk: BulkCommand, name: str, reason: str | None, order: str | None) -> None:
    if order is not None:
        bulk.resume(order)
        return
    caps = bulk.session.queue_caps
    unwrap_or_exit(check_queue(bulk.session.broker, name, None if caps is None else list(caps)))
    bulk.run(draft_order(bulk.verb, TaskFilters(queues=[name]), reason=reason))


def _list_queues(session: Session, as_json: bool) -> None:
    found = unwrap_or_exit(read_overview(session.broker, session.queue_caps)).queues
    if as_json:
        output.print_json({"queues": [queue_document(queue) for queue in found]})
    else:
        print_queues(found)


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

    Example:
        horsies workers --ping
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


def _print_workers(workers: Sequence[WorkerSummary], pongs: dict[str, WorkerPong] | None) -> None:
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
            output.age(worker.seen_seconds_ago),
        ]
        if pongs is not None:
            pong = pongs.get(worker.worker_id)
            cells.append(f"{pong.latency_ms:.0f} ms" if pong else "none")
        table.add_row(*cells)
    output.print_parts(table if workers else "No worker is running.")
