"""Read-only statements for operators: queues, workers, tasks and the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.encryption import ShownPayload
from horsies.modules import Deferred
from horsies.states import TaskStatus

if TYPE_CHECKING:
    from horsies import task_result
else:
    task_result = Deferred("horsies.task_result")

MONITOR = StatementFile("monitor.sql")


class WaitingCount(NamedTuple):
    """The number of waiting tasks in one queue, counted up to one more than the bound, and the age of the
    oldest due task.
    """

    queue_name: str
    due: int
    delayed: int
    oldest_waiting_seconds: float | None


class InFlightCount(NamedTuple):
    queue_name: str
    claimed: int
    running: int


class RecentAttempts(NamedTuple):
    """The number of attempts in one queue that ended within the covered seconds."""

    queue_name: str
    covered_seconds: float
    done: int
    failed: int
    retried: int


class QueueState(NamedTuple):
    """A queue; ``paused_at`` is None while the queue is not paused."""

    name: str
    """The name of the queue."""
    paused_at: datetime | None
    """When the queue was paused; None if it is not paused."""

    @property
    def is_paused(self) -> bool:
        """Whether the queue is paused."""
        return self.paused_at is not None


class QueueName(NamedTuple):
    name: str


class WorkerSummary(NamedTuple):
    """One worker, with the number of its tasks in flight and its newest snapshot."""

    worker_id: str
    hostname: str
    pid: int
    processes: int
    queues: Sequence[str]
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    was_lost: bool
    hears: bool
    seen_seconds_ago: float
    holds_lock: bool
    tasks_running: int
    tasks_claimed: int
    memory_usage_mb: float | None
    children_memory_mb: float | None
    cpu_percent: float | None
    cluster_wide_cap: int | None = None
    # The caps by queue name, for queues that have a cap; None before the first snapshot.
    queue_caps: dict[str, int] | None = None
    name: str | None = None
    # How many of the worker's slots are reserved for `async def` tasks, and how many of its running tasks
    # use them.
    async_places: int = 0
    async_running: int = 0
    # The memory that children share with no other process, summed over the children; None for workers
    # that do not report it.
    children_private_mb: float | None = None

    @property
    def label(self) -> str:
        """The name of the worker or, if it has none, its host and process."""
        return self.name or f"{self.hostname} pid {self.pid}"

    def places(self, is_async: bool) -> int:
        """How many tasks of this kind the worker can run at the same time. Without async children, its
        slots are for both kinds.
        """
        if not self.async_places:
            return self.processes
        return self.async_places if is_async else self.processes - self.async_places

    def free_places(self, is_async: bool) -> int:
        """The number of free slots for tasks of this kind."""
        running = self.tasks_running
        if self.async_places:
            running = self.async_running if is_async else running - self.async_running
        return max(self.places(is_async) - running, 0)

    @property
    def memory_mb(self) -> float | None:
        """The memory of the parent process and its children, in which shared pages count once if that is
        known. None before the first snapshot.
        """
        private = self.children_private_mb
        children = self.children_memory_mb if private is None else private
        known = [mb for mb in (self.memory_usage_mb, children) if mb is not None]
        return sum(known) if known else None


class ListTasks(NamedTuple):
    """The filters of a list of tasks, with ids from ``since`` up to but not including ``before``. An
    empty list matches anything.
    """

    before: str
    since: str
    statuses: Sequence[str]
    queues: Sequence[str]
    names: Sequence[str]
    error_codes: Sequence[str]
    workers: Sequence[str]
    retried_only: bool
    limit: int


class WindowEdge(NamedTuple):
    id: str


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """One task in a list. ``finished_at`` is None until the task has ended."""

    id: str
    task_name: str
    queue_name: str
    status: TaskStatus
    retry_count: int
    max_retries: int
    error_code: str | None
    created_at: datetime
    enqueued_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker_hostname: str | None
    worker_pid: int | None
    age_seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", TaskStatus(self.status))

    def to_dict(self) -> dict[str, Any]:
        """Return the task as plain JSON values."""
        return task_result.json_object(self)


class TaskDetail(NamedTuple):
    """All stored values of one task; ``args``, ``kwargs`` and ``result`` only on request."""

    id: str
    task_name: str
    queue_name: str
    status: str
    priority: int
    retry_count: int
    max_retries: int
    next_retry_at: datetime | None
    timeout_ms: int | None
    good_until: datetime | None
    held: bool
    sent_at: datetime | None
    created_at: datetime
    enqueued_at: datetime
    claimed_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    cancel_requested_at: datetime | None
    error_code: str | None
    failed_reason: str | None
    generation: int
    claimed_by_worker_id: str | None
    worker_hostname: str | None
    worker_pid: int | None
    worker_process_name: str | None
    idempotency_key: str | None
    retried_from_task_id: str | None
    workflow_id: str | None
    schedule_name: str | None
    scheduled_for: datetime | None
    task_options: str | None
    args: ShownPayload | None
    kwargs: ShownPayload | None
    result: ShownPayload | None
    age_seconds: float
    redacted_at: datetime | None = None


class Rights(NamedTuple):
    """The privileges of the session's role; ``missing`` lists the table privileges that it lacks, in
    GRANT syntax.
    """

    role_name: str
    has_schema: bool
    can_use: bool
    can_create: bool
    is_owner: bool
    missing: list[str]


@dataclass(frozen=True, slots=True)
class WorkerStateSnapshot:
    """A worker's state at ``snapshot_at``, as the worker reported it.

    ``memory_usage_mb`` is the resident memory of the parent process alone. ``children_memory_mb`` is the
    sum over its children; a page that they share counts once per child. ``hears`` is False while the
    worker receives no notifications and relies on polling.
    """

    id: int
    """The number of this snapshot."""
    worker_id: str
    """The id of the worker."""
    snapshot_at: datetime
    """When the worker reported this state."""
    hostname: str
    """The worker's host."""
    pid: int
    """The process id of the worker's parent process."""
    processes: int
    """How many child processes the worker has."""
    queues: list[str]
    """The queues that the worker serves."""
    tasks_running: int
    """How many tasks the worker's children are running."""
    tasks_claimed: int
    """How many claimed tasks the worker has that have not started."""
    memory_usage_mb: float | None
    """The resident memory of the parent process."""
    cpu_percent: float | None
    """The processor use of the parent process."""
    memory_percent: float | None
    """The share of the host's memory that the parent process uses."""
    children_memory_mb: float | None
    """The resident memory of all of the worker's children."""
    max_claim_batch: int
    """The maximum number of tasks that the worker claims from one queue in a turn; 0 means no limit."""
    max_claim_per_worker: int
    """The maximum number of tasks that the worker may have in flight."""
    cluster_wide_cap: int | None
    """The maximum number of tasks in flight in the whole cluster, or None if there is no cap."""
    queue_priorities: dict[str, Any] | None
    """The priority of each queue that the worker serves."""
    queue_max_concurrency: dict[str, Any] | None
    """The caps of queues that have one, by queue name."""
    recovery_config: dict[str, Any] | None
    """Its recovery settings."""
    hears: bool
    """Whether notifications reach the worker."""
    worker_started_at: datetime
    """When the worker started."""


class StaleTask(NamedTuple):
    """A RUNNING task without a recent heartbeat."""

    id: str
    """The id of the task."""
    worker_hostname: str | None
    """The host of the worker that runs the task."""
    worker_pid: int | None
    """The process id of the child that runs the task."""
    worker_process_name: str | None
    """The name of the child process that runs the task."""
    last_heartbeat: datetime | None
    """When the worker last confirmed that the task is running."""
    started_at: datetime | None
    """When the current attempt started."""
    task_name: str
    """The name of the task."""


class WorkerStats(NamedTuple):
    """The running tasks of one child process."""

    worker_hostname: str | None
    """The host of the child's worker."""
    worker_pid: int | None
    """The process id of the child."""
    worker_process_name: str | None
    """The name of the child process."""
    active_tasks: int
    """How many tasks the child process runs."""
    oldest_task_start: datetime | None
    """When the oldest of the child's running tasks started."""
    latest_heartbeat: datetime | None
    """The latest heartbeat for one of the child's running tasks."""


class ExpiredTask(NamedTuple):
    """A PENDING task past its ``good_until``."""

    id: str
    """The id of the task."""
    task_name: str
    """The name of the task."""
    queue_name: str
    """The queue in which the task waits."""
    priority: int
    """The task's priority within its queue."""
    sent_at: datetime | None
    """When the task was sent."""
    enqueued_at: datetime
    """When the task became due."""
    good_until: datetime
    """The time by which the task must have started."""
    expired_for_seconds: float
    """How much time has passed since ``good_until``."""


class ServerVersion(NamedTuple):
    server_version: str


@MONITOR.statement
def count_waiting(most: int) -> WaitingCount: ...
@MONITOR.statement
def count_in_flight() -> InFlightCount: ...
@MONITOR.statement
def count_recent_attempts(sample: int) -> RecentAttempts: ...
@MONITOR.statement
def list_queue_states() -> QueueState: ...
@MONITOR.statement
def list_known_queues() -> QueueName: ...
@MONITOR.statement
def list_workers(include_stopped: bool, worker_id: str | None = None) -> WorkerSummary: ...
@MONITOR.statement
def list_newest_tasks(
    before: str,
    since: str,
    statuses: Sequence[str],
    queues: Sequence[str],
    names: Sequence[str],
    error_codes: Sequence[str],
    workers: Sequence[str],
    retried_only: bool,
    limit: int,
    window: int,
) -> TaskSummary: ...
@MONITOR.statement
def end_of_window(before: str, since: str, window: int) -> WindowEdge: ...


list_live_tasks = MONITOR.declare("list_live_tasks", ListTasks, TaskSummary)
list_tasks_by_error = MONITOR.declare("list_tasks_by_error", ListTasks, TaskSummary)


@MONITOR.statement
def list_tasks_by_fingerprint(
    before: str,
    since: str,
    statuses: Sequence[str],
    queues: Sequence[str],
    names: Sequence[str],
    error_codes: Sequence[str],
    workers: Sequence[str],
    retried_only: bool,
    limit: int,
    fingerprint: str,
) -> TaskSummary: ...


@MONITOR.statement
def read_task_detail(id: str, payload: bool) -> TaskDetail: ...
@MONITOR.statement
def read_rights(schema: str) -> Rights: ...
@MONITOR.statement
def newest_worker_states() -> WorkerStateSnapshot: ...
@MONITOR.statement
def worker_state_history(worker_id: str, limit: int | None) -> WorkerStateSnapshot: ...
@MONITOR.statement
def find_stale_tasks(threshold_seconds: float) -> StaleTask: ...
@MONITOR.statement
def count_worker_tasks() -> WorkerStats: ...
@MONITOR.statement
def find_expired_tasks() -> ExpiredTask: ...
@MONITOR.statement
def read_server() -> ServerVersion: ...


MONITOR.complete()
