"""Read-only statements for the dashboard's panels; each reads a bounded number of rows."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile

DASHBOARD = StatementFile("dashboard.sql")


class RecentArrivals(NamedTuple):
    """How many tasks were sent to one queue within the covered seconds."""

    queue_name: str
    covered_seconds: float
    arrived: int


class OpenRuns(NamedTuple):
    status: str
    runs: int


class DueTask(NamedTuple):
    id: str
    task_name: str
    priority: int
    due_seconds: float
    retry_count: int
    key: str | None


class WorkerTask(NamedTuple):
    """A task in flight, with the seconds since its start or claim and since its newest heartbeat."""

    id: str
    task_name: str
    queue_name: str
    status: str
    worker_pid: int | None
    seconds: float | None
    heartbeat_seconds: float | None


class WorkerDetail(NamedTuple):
    """``children`` lists pid, rss_mb, private_mb, done, since and task_id of each child; None before the
    first snapshot.
    """

    children: list[dict[str, Any]] | None
    tasks_known: int | None
    snapshot_seconds: float | None


class NameMemory(NamedTuple):
    """The memory of the children that run a task; the figures are None if no child runs it."""

    children: int
    p50_mb: float | None
    most_mb: float | None


class HistoryPoint(NamedTuple):
    at: datetime
    memory_mb: float | None
    busy: float
    cpu_percent: float | None


class RowEstimate(NamedTuple):
    tasks: float | None
    server_version: str


@DASHBOARD.statement
def count_recent_arrivals(since: str, sample: int) -> RecentArrivals: ...
@DASHBOARD.statement
def count_open_runs(most: int) -> OpenRuns: ...
@DASHBOARD.statement
def next_in_queue(queue: str, limit: int) -> DueTask: ...
@DASHBOARD.statement
def tasks_of_worker(worker_id: str, limit: int) -> WorkerTask: ...
@DASHBOARD.statement
def memory_of_name(name: str) -> NameMemory: ...
@DASHBOARD.statement
def read_worker_detail(worker_id: str) -> WorkerDetail: ...
@DASHBOARD.statement
def thinned_worker_history(worker_id: str, since: datetime, step: timedelta) -> HistoryPoint: ...
@DASHBOARD.statement
def estimate_rows() -> RowEstimate: ...


DASHBOARD.complete()
