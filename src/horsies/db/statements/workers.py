"""Catalogue of the statements on the workers' own records and on what dead workers left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile

WORKERS = StatementFile("workers.sql")


class RegisterWorker(NamedTuple):
    """Who this worker is."""

    worker_id: str
    lock_key: int
    hostname: str
    pid: int
    processes: int
    queues: Sequence[str]


class LockKey(NamedTuple):
    """The advisory lock of one worker."""

    lock_key: int


class Held(NamedTuple):
    """Whether we hold the lock now."""

    held: bool


class Nothing(NamedTuple):
    """A statement without rows, or without parameters."""


class SeeWorker(NamedTuple):
    """A worker, whether it hears notifications, and the channel to call it on."""

    worker_id: str
    hears: bool
    echo_channel: str


class SeenWorker(NamedTuple):
    """A worker by its id."""

    worker_id: str


class Presence(NamedTuple):
    """A worker's row, just renewed; stopped when others have declared it lost."""

    worker_id: str
    was_stopped: bool


class WorkerStop(NamedTuple):
    """Workers that have stopped, gracefully or not."""

    worker_ids: Sequence[str]
    was_lost: bool


class FindLostWorkers(NamedTuple):
    """Who asks and for how long it has been connected, how long a silence must last, how long free locks
    prove nothing after a break, and when silence alone is enough.
    """

    worker_id: str
    connected_seconds: float
    silent_seconds: float
    restart_seconds: float
    stale_seconds: float


class FindAbandoned(NamedTuple):
    """Whose tasks to look for, in which states, and how many at most."""

    worker_ids: Sequence[str]
    statuses: Sequence[str]
    limit: int


class FindOwnerless(NamedTuple):
    """How long without a sign of life, by state, which states, and how many at most."""

    claimed_seconds: float
    running_seconds: float
    statuses: Sequence[str]
    limit: int


class FindStale(NamedTuple):
    """How long without any sign of life, which states, and how many at most."""

    stale_seconds: float
    statuses: Sequence[str]
    limit: int


class WakeQueues(NamedTuple):
    """Queues whose workers should look again."""

    queues: Sequence[str]


class Woken(NamedTuple):
    """A queue whose workers were told."""

    name: str


class AbandonedTask(NamedTuple):
    """A task in dead hands, with everything a retry decision needs."""

    id: str
    generation: int
    task_name: str
    queue_name: str
    args: str | None
    kwargs: str | None
    retry_count: int
    max_retries: int
    task_options: str | None
    timeout_ms: int | None
    worker_pid: int | None
    status: str
    worker_id: str
    workflow_id: str | None = None


class LeadershipKey(NamedTuple):
    """A job that one worker does for all, by the key of its advisory lock."""

    job: int


class Leads(NamedTuple):
    """Whether this worker does the job in this transaction."""

    leads: bool


class WorkerState(NamedTuple):
    """One snapshot of a worker."""

    worker_id: str
    tasks_running: int
    tasks_claimed: int
    memory_usage_mb: float
    cpu_percent: float
    memory_percent: float
    children_memory_mb: float
    max_claim_batch: int
    max_claim_per_worker: int
    cluster_wide_cap: int | None
    queue_priorities: str
    queue_max_concurrency: str
    recovery_config: str


class Pong(NamedTuple):
    """An answer and the channel it goes to."""

    channel: str
    payload: str


class Sent(NamedTuple):
    """Whether a notification was sent."""

    sent: bool


class Retention(NamedTuple):
    """How old is too old, and how many rows to delete at most."""

    hours: float
    limit: int


class Deleted(NamedTuple):
    """A row that is gone."""

    id: str


register_worker = WORKERS.declare("register_worker", RegisterWorker, Nothing)
take_worker_lock = WORKERS.declare("take_worker_lock", LockKey, Held)
see_worker = WORKERS.declare("see_worker", SeeWorker, Presence)
record_worker_stop = WORKERS.declare("record_worker_stop", WorkerStop, SeenWorker)
find_lost_workers = WORKERS.declare("find_lost_workers", FindLostWorkers, SeenWorker)
find_abandoned = WORKERS.declare("find_abandoned", FindAbandoned, AbandonedTask)
find_ownerless = WORKERS.declare("find_ownerless", FindOwnerless, AbandonedTask)
find_stale = WORKERS.declare("find_stale", FindStale, AbandonedTask)
wake_queues = WORKERS.declare("wake_queues", WakeQueues, Woken)
try_lead = WORKERS.declare("try_lead", LeadershipKey, Leads)
store_worker_state = WORKERS.declare("store_worker_state", WorkerState, Nothing)
answer_ping = WORKERS.declare("answer_ping", Pong, Sent)
delete_old_heartbeats = WORKERS.declare("delete_old_heartbeats", Retention, Deleted)
delete_old_worker_states = WORKERS.declare("delete_old_worker_states", Retention, Deleted)
delete_old_workers = WORKERS.declare("delete_old_workers", Retention, Deleted)
delete_old_tasks = WORKERS.declare("delete_old_tasks", Retention, Deleted)

WORKERS.complete()
