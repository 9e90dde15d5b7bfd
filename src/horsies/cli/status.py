"""`horsies status`: all queues, a summary of the workers, and blocked tasks and runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from horsies.cli import output
from horsies.cli.options import EXIT_FAILED, DatabaseUrlsOption, LocatorsArgument, ModuleOption
from horsies.cli.session import (
    JsonOption,
    Session,
    open_sessions,
    read_each,
    report_unread,
    require_one,
)
from horsies.cli.streams import has_reader
from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.monitor import WorkerSummary
from horsies.modules import Deferred
from horsies.monitor.overview import (
    HELD_KEYS_MOST,
    Overview,
    QueueOverview,
    WorkerHealth,
    counted_places,
    health_of,
    misses_notifications,
    read_overview,
)
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerResult
from horsies.words import counted

if TYPE_CHECKING:
    from horsies.monitor import documents
else:
    documents = Deferred("horsies.monitor.documents")

_QUEUE_COUNTS = ("CAP", "DUE", "DELAYED", "CLAIMED", "RUNNING", "OLDEST", "DONE/MIN", "FAILED/MIN")
# The maximum number of workers that `status` names per set of queues.
_NAMES_SHOWN = 5
Found: TypeAlias = Sequence[tuple[Session, BrokerResult[Overview]]]

CLEAR_SCREEN = "\x1b[H\x1b[2J"


def status(
    locators: LocatorsArgument = None,
    module: ModuleOption = None,
    database_urls: DatabaseUrlsOption = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the status until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two refreshes of --watch.")
    ] = 2.0,
) -> None:
    """Show all queues, a summary of the workers, and blocked tasks and runs.

    CAP is a queue's max_concurrency in its workers' configuration, or in the application's if no worker
    serves it. DUE tasks can be claimed now; DELAYED tasks are due later. Both are counted up to 10,000
    per queue, and shown as "10,000+" beyond that. OLDEST is the waiting time of the oldest due task.
    DONE/MIN and FAILED/MIN count the attempts that ended within the last minute; FAILED/MIN leaves out
    attempts that will be retried. Lines below a queue's name show what holds its tasks back: a pause, a
    missing worker, its rate, or the pauses and rates of its keys. A task or run is BLOCKED if the
    database refuses its next change; workers try again.

    With --watch, a terminal is redrawn, while other output gets one report after another. Each of
    several databases has its own report; those that cannot be read are named on standard error.

    Exit codes: 0 done, 1 failure, even if only one database failed.

    Example:
        horsies status
        horsies status --watch
        horsies status shop.orders:app shop.media:app
    """
    named = [module] if module else locators
    with open_sessions("status", named, database_urls) as sessions:
        found = read_each(sessions, _read)
        require_one(found)
        if watch:
            with suppress(KeyboardInterrupt):
                _watch_status(sessions, found, as_json, every)
        elif not _print_all(found, as_json):
            raise typer.Exit(EXIT_FAILED)


def _read(session: Session) -> BrokerResult[Overview]:
    return read_overview(session.broker, session.queue_caps)


def _watch_status(sessions: Sequence[Session], found: Found, as_json: bool, every: float) -> None:
    """Print the status repeatedly, until an interrupt or until the reader of the output is gone. Wait
    while the database is unreachable.
    """
    while True:
        if sys.stdout.isatty() and any(isinstance(done, Ok) for _, done in found):
            sys.stdout.write(CLEAR_SCREEN)
        _print_all(found, as_json)
        sys.stdout.flush()
        if not has_reader():
            return
        time.sleep(every)
        found = read_each(sessions, _read)


def _print_all(found: Found, as_json: bool) -> bool:
    """Print the readable databases and name the unreadable ones; return whether all could be read."""
    read = report_unread(found)
    if as_json and len(found) > 1:
        output.print_json({"databases": [_document(session, done) for session, done in found]})
        return len(read) == len(found)
    for session, overview in read:
        if session.name:
            output.print_parts(output.safe_text(f"database {session.name}", "bold"))
        _print_status(session, overview, as_json)
    return len(read) == len(found)


def _document(session: Session, done: BrokerResult[Overview]) -> dict[str, Any]:
    if isinstance(done, Err):
        return {"database": session.name, "error": done.err_value.message}
    return {"database": session.name, **documents.overview_document(done.ok_value)}


def _print_status(session: Session, found: Overview, as_json: bool) -> None:
    if as_json:
        output.print_json(documents.overview_document(found))
        return
    print_queues(found.queues)
    summary = _worker_summary(found.workers, session.cluster_wide_cap)
    lines = [summary, *_serving_lines(found.workers)]
    output.print_parts(output.safe_text("\n".join(lines)))
    _print_blocked(found.blocked, found.blocked_count)


def _print_blocked(blocked: Sequence[BlockedRow], count: int) -> None:
    if not blocked:
        return
    lines = [f"{count} blocked task(s) or run(s): the database refuses their next change."]
    for row in blocked:
        run = f" of run {row.workflow_id}" if row.kind == "task" and row.workflow_id else ""
        since = output.age(row.blocked_seconds)
        lines.append(f"  {row.kind} {row.id}{run}, {row.action}, for {since}: {row.error}")
    if count > len(blocked):
        lines.append(f"  and {count - len(blocked)} more")
    output.print_parts(output.safe_text("\n".join(lines), "yellow"))


def print_queues(queues: Sequence[QueueOverview]) -> None:
    nothing = "No queue is in use: no tasks are waiting or running, and no worker is alive."
    table = output.plain_table("QUEUE", *_QUEUE_COUNTS, flexible="QUEUE")
    for queue in queues:
        name = output.safe_text(queue.name)
        for mark in _marks(queue):
            name.append(f"\n{mark}", "yellow")
        rates = (queue.done_per_minute, queue.failed_per_minute)
        table.add_row(
            name,
            _cap_text(queue.caps),
            _waiting_text(queue, queue.due),
            _waiting_text(queue, queue.delayed),
            f"{queue.claimed:,}",
            f"{queue.running:,}",
            output.age(queue.oldest_waiting_seconds),
            *(f"{rate:,.0f}" for rate in rates),
        )
    output.print_parts(table if queues else nothing)


def _marks(queue: QueueOverview) -> Iterator[str]:
    """Yield why due tasks of a queue may not start: its pause, its workers, its rate and its keys."""
    if queue.paused_at is not None:
        yield "paused"
    if not queue.workers:
        yield "no worker"
    if queue.rate_wait_seconds is not None:
        yield "at its rate"
    if queue.paused_keys:
        yield f"{_keys(queue.paused_keys)} paused"
    if queue.rated_keys:
        yield f"{_keys(queue.rated_keys)} at {'its' if queue.rated_keys == 1 else 'their'} rate"


def _keys(count: int) -> str:
    return f"{count:,}+ keys" if count == HELD_KEYS_MOST else counted(count, "key")


def _waiting_text(queue: QueueOverview, count: int) -> str:
    return f"{count:,}+" if queue.is_at_least(count) else f"{count:,}"


def _cap_text(caps: Iterable[int | None]) -> str:
    """Format the caps of all workers; they differ during a change of the configuration."""
    return ", ".join("-" if cap is None else f"{cap:,}" for cap in caps) or "-"


def _worker_summary(workers: Sequence[WorkerSummary], configured_cap: int | None) -> str:
    """Describe the workers in one line: their number, their load and their shared cap."""
    if not workers:
        cap = "" if configured_cap is None else f"; cluster-wide cap {configured_cap:,}"
        return f"No worker is running{cap}."
    healths = [health_of(worker) for worker in workers]
    alive = [worker for worker in workers if health_of(worker) is WorkerHealth.ALIVE]
    busy = sum(worker.tasks_running for worker in alive)
    noun = "worker" if len(alive) == 1 else "workers"
    line = f"{len(alive)} {noun} alive, {busy} of {counted_places(alive)} busy"
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
    """Name the live workers for each set of queues."""
    by_queues: dict[str, list[str]] = {}
    for worker in workers:
        if health_of(worker) is WorkerHealth.ALIVE:
            name = worker.name or f"{worker.hostname} pid {worker.pid}"
            by_queues.setdefault(", ".join(worker.queues), []).append(name)
    for queues, names in sorted(by_queues.items()):
        more = len(names) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        yield f"  {queues}: {', '.join(sorted(names)[:_NAMES_SHOWN])}{rest}"
