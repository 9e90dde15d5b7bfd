"""Read-only overview for operators: queues, workers, and single tasks.

Scripts run a few cheap statements; pure functions combine their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from horsies.db.statement import Script, one_or_none, read_rows
from horsies.db.statements.blocked import BlockedRow, list_blocked
from horsies.db.statements.keys import HeldQueue, list_held_queues
from horsies.db.statements.monitor import (
    InFlightCount,
    QueueState,
    RecentAttempts,
    TaskDetail,
    WaitingCount,
    WorkerSummary,
    count_in_flight,
    count_recent_attempts,
    count_waiting,
    list_queue_states,
    list_workers,
    read_task_detail,
)
from horsies.ids import first_id_at, stored_form
from horsies.modules import Deferred
from horsies.monitor.facts import Facts
from horsies.states import SILENT_AFTER_SECONDS
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker

if TYPE_CHECKING:
    from horsies.db.statements import dashboard
    from horsies.db.statements.dashboard import RecentArrivals
    from horsies.db.statements.tasks import TaskAttemptInfo, TaskProgress
    from horsies.tasks import handle
    from horsies.tasks.definition import TaskDefinition
else:
    dashboard = Deferred("horsies.db.statements.dashboard")
    handle = Deferred("horsies.tasks.handle")

# An idle worker updates seen_at every notify_poll_interval_ms: five seconds by default, never more than 300.
IDLE_SILENT_AFTER_SECONDS = 330.0
# The number of newest attempts for rates, which limits the statement to about 50 ms.
RATE_SAMPLE = 10_000
# The number of newest tasks for the arrival rate; each may be in a different block of the table.
ARRIVALS_SAMPLE = 2_500
# The number up to which a queue's waiting tasks are counted exactly, so that a long queue costs no
# more.
WAITING_MOST = 10_000
# The number up to which the keys of a queue that hold due tasks back are counted.
HELD_KEYS_MOST = 1_000
BLOCKED_SHOWN = 5

# The counts of a queue without rows.
_NONE_WAITING = WaitingCount("", 0, 0, None)
_NONE_IN_FLIGHT = InFlightCount("", 0, 0)
_NO_ATTEMPTS = RecentAttempts("", 60.0, 0, 0, 0)

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """One queue: its waiting tasks, its tasks in flight, its attempts per minute, and the live workers
    that serve it, with the caps that they apply (None: no cap). If there are no workers, the configured
    cap is shown.

    ``due`` and ``delayed`` are exact up to 10,000; if ``waiting_at_least`` is set, 10,000 is a lower
    bound. ``paused_keys`` are the paused keys with due tasks, and ``rated_keys`` the other keys with due
    tasks whose rate allows no start at present, up to 1,000 each. ``rate_wait_seconds`` is the time until
    the queue's own rate allows the next start, if due tasks wait for it.
    """

    name: str
    paused_at: datetime | None = None
    due: int = 0
    delayed: int = 0
    claimed: int = 0
    running: int = 0
    oldest_waiting_seconds: float | None = None
    done_per_minute: float = 0.0
    failed_per_minute: float = 0.0
    retried_per_minute: float = 0.0
    workers: int = 0
    caps: Sequence[int | None] = ()
    waiting_at_least: bool = False
    paused_keys: int = 0
    rated_keys: int = 0
    rate_wait_seconds: float | None = None

    def is_at_least(self, count: int) -> bool:
        """Return whether this number of waiting tasks is a lower bound."""
        return self.waiting_at_least and count >= WAITING_MOST


class WorkerHealth(StrEnum):
    """Whether a worker is running, judged by the database."""

    ALIVE = "alive"
    SILENT = "silent"
    LOST = "lost"
    STOPPED = "stopped"


_LIVE = (WorkerHealth.ALIVE, WorkerHealth.SILENT)


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues by name, all workers that have not shut down, and the oldest blocked tasks and runs."""

    queues: list[QueueOverview]
    workers: list[WorkerSummary]
    blocked: list[BlockedRow] = field(default_factory=list)
    blocked_count: int = 0


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task with its finished attempts, newest first, and the obstacles of an unfinished task.
    ``transaction`` describes the open transaction in which the task records its outcome (``tx``).
    """

    task: TaskDetail
    attempts: list[TaskAttemptInfo]
    waits_because: list[str] = field(default_factory=list)
    progress: TaskProgress | None = None
    transaction: str | None = None


def declared_transaction(definition: TaskDefinition | None) -> str | None:
    """Describe the transaction that a task declares (``tx``); return None without one, or for an unknown
    task.
    """
    if definition is None or definition.signature.transaction is None:
        return None
    return "Its rows and its outcome commit together (tx)."


def read_overview(
    broker: PostgresBroker, configured: Mapping[str, int | None] | None = None
) -> BrokerResult[Overview]:
    """Describe all workers and all queues. ``configured`` queues are included even if they are empty;
    while no worker serves them, they have these caps.
    """
    return broker.perform(_READING, overview_script(configured or {}))


def overview_script(
    configured: Mapping[str, int | None], facts: Facts | None = None
) -> Script[Overview]:
    """Describe all workers and queues; reuse the rows in ``facts`` if given."""
    read = (facts or Facts()).read
    waiting = yield from read(count_waiting(WAITING_MOST))
    in_flight = yield from read(count_in_flight())
    recent = yield from read(count_recent_attempts(RATE_SAMPLE))
    states = yield from read(list_queue_states())
    workers = yield from read(list_workers(include_stopped=False))
    # Compute each set of workers once: dozens of them may serve the same thousands of queues.
    lists = {tuple(worker.queues) for worker in workers}
    names = {name for queues in lists for name in queues} | set(configured)
    served = _service_of(workers, configured)
    queues = merge_queues(names, waiting, in_flight, recent, states, served)
    if due := sorted(one.queue_name for one in waiting if one.due):
        queues = _with_holds(queues, (yield from read(list_held_queues(due, HELD_KEYS_MOST))))
    blocked = yield from read(list_blocked(BLOCKED_SHOWN))
    return Overview(queues, workers, blocked, blocked[0].total if blocked else 0)


def _with_holds(queues: Iterable[QueueOverview], held: Iterable[HeldQueue]) -> list[QueueOverview]:
    """Add the keys and rates that hold due tasks back."""
    by_name = {one.name: one._asdict() for one in held}
    return [
        replace(queue, **by_name[queue.name]) if queue.name in by_name else queue
        for queue in queues
    ]


def arrivals_script() -> Script[dict[str, float]]:
    """Read the number of tasks sent to each queue in the last minute."""
    since = first_id_at(datetime.now(UTC) - timedelta(minutes=1))
    sample = dashboard.count_recent_arrivals(since, ARRIVALS_SAMPLE)
    found: list[RecentArrivals] = yield sample
    return {row.queue_name: row.arrived * 60 / row.covered_seconds for row in found}


def merge_queues(
    names: Iterable[str],
    waiting: Iterable[WaitingCount],
    in_flight: Iterable[InFlightCount],
    recent: Iterable[RecentAttempts],
    states: Iterable[QueueState],
    service: Callable[[str], tuple[int, Sequence[int | None]]] = lambda _: (0, ()),
) -> list[QueueOverview]:
    """Combine the counts for all queues. ``service`` returns the number of a
    queue's live workers, and its caps.
    """
    waits = {count.queue_name: count for count in waiting}
    flights = {count.queue_name: count for count in in_flight}
    rates = {count.queue_name: count for count in recent}
    paused = {state.name: state.paused_at for state in states}
    overviews = []
    for name in sorted({*names, *waits, *flights, *rates, *paused}):
        _, due, delayed, oldest = waits.get(name, _NONE_WAITING)
        _, claimed, running = flights.get(name, _NONE_IN_FLIGHT)
        rate = rates.get(name, _NO_ATTEMPTS)
        per_minute = 60 / rate.covered_seconds
        workers, caps = service(name)
        overview = QueueOverview(
            name=name,
            paused_at=paused.get(name),
            due=min(due, WAITING_MOST),
            delayed=min(delayed, WAITING_MOST),
            claimed=claimed,
            running=running,
            oldest_waiting_seconds=oldest,
            done_per_minute=rate.done * per_minute,
            failed_per_minute=rate.failed * per_minute,
            retried_per_minute=rate.retried * per_minute,
            workers=workers,
            caps=caps,
            waiting_at_least=max(due, delayed) > WAITING_MOST,
        )
        overviews.append(overview)
    return overviews


def _service_of(
    workers: Sequence[WorkerSummary], configured: Mapping[str, int | None]
) -> Callable[[str], tuple[int, Sequence[int | None]]]:
    serving, capped = servers_by_queue(workers), capped_names(workers)

    def service(name: str) -> tuple[int, Sequence[int | None]]:
        servers = serving.get(name, ())
        if not servers:
            cap = configured.get(name)
            return 0, [] if cap is None else [cap]
        if name not in capped:
            return len(servers), [None]
        caps = {(one.queue_caps or {}).get(name) for one in servers}
        return len(servers), sorted(caps, key=lambda cap: (cap is None, cap))

    return service


def read_workers(
    broker: PostgresBroker, *, include_stopped: bool = False
) -> BrokerResult[list[WorkerSummary]]:
    """List the workers, most recently seen first; include stopped workers only on request, at the end."""
    return broker.perform(_READING, read_rows(list_workers(include_stopped)))


def health_of(worker: WorkerSummary) -> WorkerHealth:
    """Judge a worker by its shutdown record, its last heartbeat and its advisory lock.

    The server releases the lock when the worker's connection ends. A worker without a recent heartbeat
    and without its lock is therefore lost, even before recovery detects the loss.
    """
    if worker.stopped_at is not None:
        return WorkerHealth.LOST if worker.was_lost else WorkerHealth.STOPPED
    is_idle = worker.tasks_running + worker.tasks_claimed == 0
    limit = IDLE_SILENT_AFTER_SECONDS if is_idle and worker.holds_lock else SILENT_AFTER_SECONDS
    if worker.seen_seconds_ago <= limit:
        return WorkerHealth.ALIVE
    return WorkerHealth.SILENT if worker.holds_lock else WorkerHealth.LOST


def live(workers: Iterable[WorkerSummary]) -> list[WorkerSummary]:
    """Return the workers that are running, judged by the database."""
    return [worker for worker in workers if health_of(worker) in _LIVE]


def servers_of(queue_name: str, workers: Iterable[WorkerSummary]) -> list[WorkerSummary]:
    """Return the live workers that serve a queue."""
    return [worker for worker in live(workers) if queue_name in worker.queues]


def servers_by_queue(workers: Iterable[WorkerSummary]) -> dict[str, Sequence[WorkerSummary]]:
    """Return the live workers of every served queue. Workers with the same queues are handled together,
    because dozens of workers may serve thousands of queues.
    """
    crews: dict[tuple[str, ...], list[WorkerSummary]] = {}
    for worker in live(workers):
        crews.setdefault(tuple(worker.queues), []).append(worker)
    serving: dict[str, Sequence[WorkerSummary]] = {}
    for names, crew in crews.items():
        for name in dict.fromkeys(names):
            serving[name] = [*serving[name], *crew] if name in serving else crew
    return serving


def capped_names(workers: Iterable[WorkerSummary]) -> set[str]:
    """Return the queues for which a worker applies a cap."""
    return {name for worker in workers for name in worker.queue_caps or ()}


def counted_places(workers: Sequence[WorkerSummary]) -> str:
    """Describe these workers' concurrency: 1 child, 8 children, 102 slots with async children."""
    total = sum(worker.processes for worker in workers)
    if any(worker.async_places for worker in workers):
        return f"{total:,} places"
    return f"{total:,} {'child' if total == 1 else 'children'}"


def misses_notifications(worker: WorkerSummary) -> bool:
    """Return whether a live worker receives no notifications and finds tasks only by polling."""
    return health_of(worker) is WorkerHealth.ALIVE and not worker.hears


def task_script(task_id: str, payload: bool = False) -> Script[TaskReport | None]:
    """Describe one task; return None if it does not exist. ``payload`` adds arguments and result."""
    if (stored := stored_form(task_id)) is None:
        return None
    task = one_or_none((yield read_task_detail(stored, payload)))
    if task is None:
        return None
    attempts = yield from handle.attempts_script(stored)
    return TaskReport(task, attempts, progress=(yield from handle.progress_script(stored)))
