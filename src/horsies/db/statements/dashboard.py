"""Read-only statements for the panels of the dashboard, each with a bound."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.monitor import CountMost

DASHBOARD = StatementFile("dashboard.sql")


class ArrivalSample(NamedTuple):
    since: str
    sample: int


class RecentArrivals(NamedTuple):
    """Tasks of one queue that were sent within the covered seconds."""

    queue_name: str
    covered_seconds: float
    arrived: int


class OpenRuns(NamedTuple):
    status: str
    runs: int


class NextInQueue(NamedTuple):
    queue: str
    limit: int


class DueTask(NamedTuple):
    id: str
    task_name: str
    priority: int
    due_seconds: float
    retry_count: int


class TasksOfWorker(NamedTuple):
    worker_id: str
    limit: int


class WorkerTask(NamedTuple):
    """A task in flight: seconds since its start or claim, and since its newest heartbeat."""

    id: str
    task_name: str
    queue_name: str
    status: str
    worker_pid: int | None
    seconds: float | None
    heartbeat_seconds: float | None


class WorkerKey(NamedTuple):
    worker_id: str


class WorkerDetail(NamedTuple):
    """``children``: pid, rss_mb, private_mb, done, since, task_id of each; None before the first snapshot."""

    children: list[dict[str, Any]] | None
    tasks_known: int | None
    snapshot_seconds: float | None


class ThinnedHistory(NamedTuple):
    worker_id: str
    since: datetime
    step: timedelta


class HistoryPoint(NamedTuple):
    at: datetime
    memory_mb: float | None
    busy: float
    cpu_percent: float | None


class RowEstimate(NamedTuple):
    tasks: float | None
    server_version: str


count_recent_arrivals = DASHBOARD.declare("count_recent_arrivals", ArrivalSample, RecentArrivals)
count_open_runs = DASHBOARD.declare("count_open_runs", CountMost, OpenRuns)
next_in_queue = DASHBOARD.declare("next_in_queue", NextInQueue, DueTask)
tasks_of_worker = DASHBOARD.declare("tasks_of_worker", TasksOfWorker, WorkerTask)
read_worker_detail = DASHBOARD.declare("read_worker_detail", WorkerKey, WorkerDetail)
thinned_worker_history = DASHBOARD.declare("thinned_worker_history", ThinnedHistory, HistoryPoint)
estimate_rows = DASHBOARD.declare("estimate_rows", Nothing, RowEstimate)

DASHBOARD.complete()
