"""Catalogue of the statements on the workers' own records and on what dead workers left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile

FLEET = StatementFile("workers.sql")


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


class SignOff(NamedTuple):
    """Workers that have ended, in order or not."""

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


class FindOrphans(NamedTuple):
    """Whose tasks to look for, in which states, and how many at most."""

    worker_ids: Sequence[str]
    statuses: Sequence[str]
    limit: int


class FindStrays(NamedTuple):
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


class Orphan(NamedTuple):
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


class Duty(NamedTuple):
    """Which of the reaper's duties to lead."""

    duty: int


class Leads(NamedTuple):
    """Whether this worker leads the duty in this transaction."""

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


class Notification(NamedTuple):
    """A payload and the channel it goes to."""

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


register_worker = FLEET.declare("register_worker", RegisterWorker, Nothing)
take_worker_lock = FLEET.declare("take_worker_lock", LockKey, Held)
see_worker = FLEET.declare("see_worker", SeeWorker, Presence)
sign_off_worker = FLEET.declare("sign_off_worker", SignOff, SeenWorker)
find_lost_workers = FLEET.declare("find_lost_workers", FindLostWorkers, SeenWorker)
find_orphans = FLEET.declare("find_orphans", FindOrphans, Orphan)
find_strays = FLEET.declare("find_strays", FindStrays, Orphan)
find_stale = FLEET.declare("find_stale", FindStale, Orphan)
wake_queues = FLEET.declare("wake_queues", WakeQueues, Woken)
try_lead = FLEET.declare("try_lead", Duty, Leads)
store_worker_state = FLEET.declare("store_worker_state", WorkerState, Nothing)
send_notification = FLEET.declare("send_notification", Notification, Sent)
delete_old_heartbeats = FLEET.declare("delete_old_heartbeats", Retention, Deleted)
delete_old_worker_states = FLEET.declare("delete_old_worker_states", Retention, Deleted)
delete_old_workers = FLEET.declare("delete_old_workers", Retention, Deleted)
delete_old_tasks = FLEET.declare("delete_old_tasks", Retention, Deleted)

FLEET.complete()
