"""Catalogue of the statements on worker rows and on the tasks of lost workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.monitor import QueueName
from horsies.db.statements.tasks import TaskId
from horsies.db.statements.turn import NOTHING, WorkerId

WORKERS = StatementFile("workers.sql")


class RegisterWorker(NamedTuple):
    worker_id: str
    lock_key: int
    hostname: str
    pid: int
    processes: int
    queues: Sequence[str]
    process_space: str | None
    process_started: int | None
    # JSON; None when the tasks of the worker are not known.
    known_tasks: str | None = None
    name: str | None = None
    version: str | None = None


class LockKey(NamedTuple):
    lock_key: int


class ClientProbes(NamedTuple):
    """How a server notices that a client is gone: seconds of rest, seconds between probes, their number,
    and milliseconds that sent data may stay unacknowledged.
    """

    idle_seconds: str
    interval_seconds: str
    probes: str
    user_timeout_ms: str


class Held(NamedTuple):
    held: bool


class SeeWorker(NamedTuple):
    """A heartbeat: whether the worker receives notifications, and the channel to test that on."""

    worker_id: str
    hears: bool
    echo_channel: str


class Presence(NamedTuple):
    """A worker's row after its heartbeat; stopped when others have declared it lost."""

    worker_id: str
    was_stopped: bool
    # By the database's clock.
    seen_at: datetime


class WatchedWorker(NamedTuple):
    """Another worker as one look finds it: its last sign of life, its lock, its process."""

    worker_id: str
    sign: str
    hostname: str
    pid: int
    process_space: str | None
    process_started: int | None
    lock_is_free: bool


class FindActiveSessions(NamedTuple):
    """Workers, and the age of the latest statement of an active session."""

    worker_ids: Sequence[str]
    seconds: float


class CloseLostWorkers(NamedTuple):
    """Workers found lost: their last signs of life, and the conditions that must still hold."""

    worker_ids: Sequence[str]
    signs: Sequence[str]
    needs_free_lock: Sequence[bool]
    needs_tasks: Sequence[bool]


class FindOwned(NamedTuple):
    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]


class FindAbandoned(NamedTuple):
    worker_ids: Sequence[str]
    statuses: Sequence[str]
    limit: int
    excluded: Sequence[str] = NOTHING


class FindOwnerless(NamedTuple):
    """The maximum age of the last heartbeat, by state."""

    claimed_seconds: float
    running_seconds: float
    statuses: Sequence[str]
    limit: int
    excluded: Sequence[str] = NOTHING


class FindStale(NamedTuple):
    stale_seconds: float
    statuses: Sequence[str]
    limit: int
    excluded: Sequence[str] = NOTHING


class WakeQueues(NamedTuple):
    queues: Sequence[str]


class AbandonedTask(NamedTuple):
    """A task whose worker is gone, with everything a retry decision needs. A manual edit of the row may
    have named no worker.
    """

    id: str
    generation: int
    task_name: str
    queue_name: str
    retry_count: int
    max_retries: int
    task_options: str | None
    worker_pid: int | None
    status: str
    worker_id: str | None
    workflow_id: str | None = None


class LeadershipKey(NamedTuple):
    """A job that one worker does for all, by the key of its advisory lock."""

    job: int


class Leads(NamedTuple):
    """Whether this worker does the job in this transaction."""

    leads: bool


class WorkerState(NamedTuple):
    worker_id: str
    tasks_running: int
    tasks_claimed: int
    memory_usage_mb: float | None
    cpu_percent: float | None
    memory_percent: float | None
    children_memory_mb: float
    max_claim_batch: int
    max_claim_per_worker: int
    cluster_wide_cap: int | None
    queue_priorities: str
    queue_max_concurrency: str
    recovery_config: str
    # JSON: a list with a row for each child.
    children: str


class Retention(NamedTuple):
    """The maximum age, and how many rows to delete at most."""

    hours: float
    limit: int


class Batch(NamedTuple):
    """How many rows to delete at most."""

    limit: int


class Deleted(NamedTuple):
    id: str


register_worker = WORKERS.declare("register_worker", RegisterWorker, Nothing)
take_worker_lock = WORKERS.declare("take_worker_lock", LockKey, Held)
notice_lost_client = WORKERS.declare("notice_lost_client", ClientProbes, ClientProbes)
end_earlier_session = WORKERS.declare("end_earlier_session", LockKey, Held)
see_worker = WORKERS.declare("see_worker", SeeWorker, Presence)
record_worker_stop = WORKERS.declare("record_worker_stop", WorkerId, WorkerId)
watch_workers = WORKERS.declare("watch_workers", WorkerId, WatchedWorker)
find_active_sessions = WORKERS.declare("find_active_sessions", FindActiveSessions, WorkerId)
close_lost_workers = WORKERS.declare("close_lost_workers", CloseLostWorkers, WorkerId)
find_abandoned = WORKERS.declare("find_abandoned", FindAbandoned, AbandonedTask)
find_ownerless = WORKERS.declare("find_ownerless", FindOwnerless, AbandonedTask)
find_stale = WORKERS.declare("find_stale", FindStale, AbandonedTask)
find_owned = WORKERS.declare("find_owned", FindOwned, TaskId)
wake_queues = WORKERS.declare("wake_queues", WakeQueues, QueueName)
try_lead = WORKERS.declare("try_lead", LeadershipKey, Leads)
store_worker_state = WORKERS.declare("store_worker_state", WorkerState, Nothing)
delete_old_heartbeats = WORKERS.declare("delete_old_heartbeats", Retention, Deleted)
delete_old_worker_states = WORKERS.declare("delete_old_worker_states", Retention, Deleted)
delete_old_workers = WORKERS.declare("delete_old_workers", Retention, Deleted)
delete_old_tasks = WORKERS.declare("delete_old_tasks", Retention, Deleted)
delete_old_untimed_tasks = WORKERS.declare("delete_old_untimed_tasks", Retention, Deleted)
delete_kept_tasks = WORKERS.declare("delete_kept_tasks", Batch, Deleted)

WORKERS.complete()
