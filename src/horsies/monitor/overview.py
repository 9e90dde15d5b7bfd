"""The survey: what waits, what runs, who works, and which tasks there are.

Beside the line producer -> SQL -> turn -> child -> report -> result, and only reading it. A script
asks a few cheap questions; pure functions put the answers together for the command line and whatever
else shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from horsies.db.statement import Nothing, Script, one_or_none
from horsies.db.statements.monitor import (
    InFlightCount,
    ListNewestTasks,
    ListTasks,
    ListWorkers,
    QueueState,
    ReadTaskDetail,
    RecentAttempts,
    Sample,
    TaskDetail,
    TaskSummary,
    WaitingCount,
    Window,
    WindowEdge,
    WorkerRow,
    count_in_flight,
    count_recent_attempts,
    count_waiting,
    end_of_window,
    list_live_tasks,
    list_newest_tasks,
    list_queue_states,
    list_tasks_by_error,
    list_workers,
    read_task_detail,
)
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.ids import first_id_at, stored_form
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker
from horsies.tasks.info import attempts_script

# A worker with tasks shows itself every two seconds, an idle one every notify_poll_interval_ms, five
# seconds unless configured otherwise and never more than 300.
SILENT_AFTER_SECONDS = 15.0
IDLE_SILENT_AFTER_SECONDS = 330.0
# How many of the newest attempts rates are taken from, and how many of the newest tasks a list looks at:
# each bounds its statement to about 50 ms.
RATE_SAMPLE = 10_000
LIST_WINDOW = 50_000

_FIRST_ID = "00000000-0000-0000-0000-000000000000"
_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """One queue: what waits on it, what of it is in flight, what ended within a minute."""

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


class WorkerStanding(StrEnum):
    """What is known of a worker's life."""

    ALIVE = "alive"
    SILENT = "silent"
    LOST = "lost"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """One worker and how it stands."""

    standing: WorkerStanding
    worker: WorkerRow

    @property
    def is_deaf(self) -> bool:
        """Whether it lives, but no notification reaches it: it finds work by polling."""
        return self.standing is WorkerStanding.ALIVE and not self.worker.hears

    @property
    def memory_mb(self) -> float | None:
        """The memory of the parent and its children together, None before the first snapshot."""
        parts = (self.worker.memory_usage_mb, self.worker.children_memory_mb)
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues by name, and all workers that have not said goodbye."""

    queues: list[QueueOverview]
    workers: list[WorkerOverview]


@dataclass(frozen=True, slots=True)
class TaskFilters:
    """Which tasks to list: one of the values in each dimension that has any, and since when."""

    statuses: Sequence[TaskStatus] = ()
    queues: Sequence[str] = ()
    names: Sequence[str] = ()
    error_codes: Sequence[str] = ()
    since: datetime | None = None
    before: str | None = None
    limit: int = 20


@dataclass(frozen=True, slots=True)
class TaskPage:
    """Tasks, newest first.

    ``next_before`` is where to go on, None at the end. ``looked_at_all`` is False when the look ended
    before as many tasks were found as asked for.
    """

    tasks: list[TaskSummary]
    next_before: str | None = None
    looked_at_all: bool = True


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task and its finished attempts, newest first."""

    task: TaskDetail
    attempts: list[TaskAttemptInfo]


def read_overview(broker: PostgresBroker, configured: Iterable[str] = ()) -> BrokerResult[Overview]:
    """Describe all queues, those of an application even when nothing happens there, and all workers."""
    return broker.perform(_READING, _overview_script(configured))


def _overview_script(configured: Iterable[str]) -> Script[Overview]:
    waiting = yield count_waiting, Nothing()
    in_flight = yield count_in_flight, Nothing()
    recent = yield count_recent_attempts, Sample(RATE_SAMPLE)
    states = yield list_queue_states, Nothing()
    rows = yield list_workers, ListWorkers(include_stopped=False)
    served = {name for row in rows for name in row.queues}
    queues = merge_queues(served | set(configured), waiting, in_flight, recent, states)
    return Overview(queues, [_worker_overview(row) for row in rows])


def merge_queues(
    names: Iterable[str],
    waiting: Iterable[WaitingCount],
    in_flight: Iterable[InFlightCount],
    recent: Iterable[RecentAttempts],
    states: Iterable[QueueState],
) -> list[QueueOverview]:
    """Put together what is known of every queue that is mentioned anywhere."""
    waits = {count.queue_name: count for count in waiting}
    flights = {count.queue_name: count for count in in_flight}
    ended = {count.queue_name: count for count in recent}
    paused = {state.name: state.paused_at for state in states}
    return [
        _queue_overview(name, paused.get(name), waits.get(name), flights.get(name), ended.get(name))
        for name in sorted({*names, *waits, *flights, *ended, *paused})
    ]


def _queue_overview(
    name: str,
    paused_at: datetime | None,
    waiting: WaitingCount | None,
    in_flight: InFlightCount | None,
    recent: RecentAttempts | None,
) -> QueueOverview:
    per_minute = 60 / recent.covered_seconds if recent else 0.0
    return QueueOverview(
        name=name,
        paused_at=paused_at,
        due=waiting.due if waiting else 0,
        delayed=waiting.delayed if waiting else 0,
        claimed=in_flight.claimed if in_flight else 0,
        running=in_flight.running if in_flight else 0,
        oldest_waiting_seconds=waiting.oldest_waiting_seconds if waiting else None,
        done_per_minute=recent.done * per_minute if recent else 0.0,
        failed_per_minute=recent.failed * per_minute if recent else 0.0,
        retried_per_minute=recent.retried * per_minute if recent else 0.0,
    )


def read_workers(
    broker: PostgresBroker, *, include_stopped: bool = False
) -> BrokerResult[list[WorkerOverview]]:
    """Describe the workers, the most recently seen first; those that stopped last, if at all."""
    return broker.perform(_READING, _workers_script(include_stopped))


def _workers_script(include_stopped: bool) -> Script[list[WorkerOverview]]:
    rows = yield list_workers, ListWorkers(include_stopped)
    return [_worker_overview(row) for row in rows]


def _worker_overview(row: WorkerRow) -> WorkerOverview:
    return WorkerOverview(standing_of(row), row)


def standing_of(row: WorkerRow) -> WorkerStanding:
    """Tell how a worker stands from its goodbye, its last sign of life and its lock.

    The server frees the lock when the worker's connection ends, so a worker that is neither seen nor
    holds its lock is gone, also before the others have noticed.
    """
    if row.stopped_at is not None:
        return WorkerStanding.LOST if row.was_lost else WorkerStanding.STOPPED
    is_idle = row.tasks_running + row.tasks_claimed == 0
    patience = IDLE_SILENT_AFTER_SECONDS if is_idle and row.holds_lock else SILENT_AFTER_SECONDS
    if row.seen_seconds_ago <= patience:
        return WorkerStanding.ALIVE
    return WorkerStanding.SILENT if row.holds_lock else WorkerStanding.LOST


def list_tasks(broker: PostgresBroker, filters: TaskFilters) -> BrokerResult[TaskPage]:
    """List tasks, newest first.

    Tasks that wait or run are found however old they are, and so is an error code. Other filters look
    at the newest 50,000 tasks; ``next_before`` leads further back.
    """
    return broker.perform(_READING, _list_script(filters))


def _list_script(filters: TaskFilters) -> Script[TaskPage]:
    live = [status.value for status in filters.statuses if not status.is_terminal]
    ended = [status.value for status in filters.statuses if status.is_terminal]
    found: list[TaskSummary] = []
    looked_until: str | None = None
    if live:
        found += yield list_live_tasks, _list_parameters(filters, live)
    if ended or not live:
        newest, looked_until = yield from _newest_script(filters, ended)
        found += newest
    return _page(found, filters.limit, looked_until)


def _newest_script(
    filters: TaskFilters, statuses: list[str]
) -> Script[tuple[list[TaskSummary], str | None]]:
    """Look through the newest tasks; return what was found and where the look ended too early."""
    asked = _list_parameters(filters, statuses)
    bounded = ListNewestTasks(
        asked.before,
        asked.since,
        asked.statuses,
        asked.queues,
        asked.names,
        asked.error_codes,
        asked.limit,
        LIST_WINDOW,
    )
    newest: list[TaskSummary] = yield list_newest_tasks, bounded
    if len(newest) == filters.limit:
        return newest, None
    edge: list[WindowEdge] = yield end_of_window, Window(asked.before, asked.since, LIST_WINDOW)
    if len(edge) < 2:
        return newest, None
    if filters.error_codes:
        newest = yield list_tasks_by_error, asked
        return newest, None
    return newest, edge[0].id


def _list_parameters(filters: TaskFilters, statuses: Sequence[str]) -> ListTasks:
    return ListTasks(
        before=filters.before or _LAST_ID,
        since=first_id_at(filters.since) if filters.since else _FIRST_ID,
        statuses=list(statuses),
        queues=list(filters.queues),
        names=list(filters.names),
        error_codes=list(filters.error_codes),
        limit=filters.limit,
    )


def _page(found: list[TaskSummary], limit: int, looked_until: str | None) -> TaskPage:
    # What lies beyond the end of the look belongs to a later page, or that page would repeat it.
    within = [task for task in found if looked_until is None or task.id >= looked_until]
    tasks = sorted(within, key=lambda task: task.id, reverse=True)[:limit]
    if len(tasks) == limit:
        return TaskPage(tasks, tasks[-1].id)
    return TaskPage(tasks, looked_until, looked_until is None)


def read_task(
    broker: PostgresBroker, task_id: str, *, payload: bool = False
) -> BrokerResult[TaskReport | None]:
    """Describe one task; its arguments and its result only with ``payload``. None: no such task."""
    return broker.perform(_READING, _task_script(task_id, payload))


def _task_script(task_id: str, payload: bool) -> Script[TaskReport | None]:
    if (stored := stored_form(task_id)) is None:
        return None
    task = one_or_none((yield read_task_detail, ReadTaskDetail(stored, payload)))
    if task is None:
        return None
    return TaskReport(task, (yield from attempts_script(stored)))
