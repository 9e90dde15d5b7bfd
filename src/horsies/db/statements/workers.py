"""Catalogue of the statements on worker rows and on lost workers' tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName
from horsies.db.statements.tasks import TaskId
from horsies.db.statements.turn import NOTHING, WorkerId

WORKERS = StatementFile("workers.sql")


class LockKey(NamedTuple):
    lock_key: int


class ClientProbes(NamedTuple):
    """The server's limits for detecting a lost client: the idle seconds before the first probe, the seconds
    between probes, the number of probes, and the milliseconds for which sent data may stay unacknowledged.
    """

    idle_seconds: str
    interval_seconds: str
    probes: str
    user_timeout_ms: str


class Held(NamedTuple):
    held: bool


class Presence(NamedTuple):
    """A worker's row after its heartbeat; ``was_stopped`` is set if other workers have declared this worker
    lost.
    """

    worker_id: str
    was_stopped: bool
    # The time on the database's clock.
    seen_at: datetime


class OwnRow(NamedTuple):
    """A worker's row as the worker itself reads it; ``was_stopped`` is set if other workers have declared
    this worker lost.
    """

    was_stopped: bool


class WatchedWorker(NamedTuple):
    """The state of another worker for an observer: its last heartbeat, its session lock and its process."""

    worker_id: str
    sign: str
    hostname: str
    pid: int
    process_space: str | None
    process_started: int | None
    lock_is_free: bool


class FindOwned(NamedTuple):
    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]


class AbandonedTask(NamedTuple):
    """A task whose worker is dead, with all values that the decision about a retry needs. The worker is None
    if a manual edit removed its id from the task.
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


class Leads(NamedTuple):
    """Whether this worker has the lock of the job in this transaction."""

    leads: bool


class Deleted(NamedTuple):
    id: str


@WORKERS.statement
def register_worker(
    worker_id: str,
    lock_key: int,
    hostname: str,
    pid: int,
    processes: int,
    queues: Sequence[str],
    process_space: str | None,
    process_started: int | None,
    # The worker's tasks as JSON; None if they are not known.
    known_tasks: str | None = None,
    name: str | None = None,
    version: str | None = None,
    release: str | None = None,
) -> None: ...


@WORKERS.statement
def register_defaults(defaults: str) -> None: ...
@WORKERS.statement
def store_lane_limits(limits: str, queues: Sequence[str]) -> None: ...
@WORKERS.statement
def store_task_rates(rates: str, queues: Sequence[str]) -> None: ...


take_worker_lock = WORKERS.declare("take_worker_lock", LockKey, Held)


class TriggerMode(NamedTuple):
    is_silent: bool


class Woken(NamedTuple):
    woken: int


@WORKERS.statement
def read_trigger_mode() -> TriggerMode: ...
@WORKERS.statement
def notice_lost_client(
    idle_seconds: str, interval_seconds: str, probes: str, user_timeout_ms: str
) -> ClientProbes: ...


end_earlier_session = WORKERS.declare("end_earlier_session", LockKey, Held)


@WORKERS.statement
def see_worker(worker_id: str, hears: bool, waits: bool, calls: bool) -> Presence: ...
@WORKERS.statement
def wait_for_tasks(worker_id: str) -> None: ...
@WORKERS.statement
def pass_wake_up(worker_id: str, queues: Sequence[str]) -> Woken: ...
@WORKERS.statement
def read_own_row(worker_id: str) -> OwnRow: ...
@WORKERS.statement
def record_worker_stop(worker_id: str) -> WorkerId: ...
@WORKERS.statement
def watch_workers(
    worker_id: str, process_space: str | None, late_seconds: float
) -> WatchedWorker: ...
@WORKERS.statement
def find_active_sessions(worker_ids: Sequence[str], seconds: float) -> WorkerId: ...
@WORKERS.statement
def close_lost_workers(
    worker_ids: Sequence[str],
    signs: Sequence[str],
    needs_free_lock: Sequence[bool],
    needs_tasks: Sequence[bool],
) -> WorkerId: ...
@WORKERS.statement
def find_abandoned(
    worker_ids: Sequence[str],
    statuses: Sequence[str],
    limit: int,
    excluded: Sequence[str] = NOTHING,
) -> AbandonedTask: ...
@WORKERS.statement
def find_ownerless(
    claimed_seconds: float,
    running_seconds: float,
    statuses: Sequence[str],
    limit: int,
    excluded: Sequence[str] = NOTHING,
) -> AbandonedTask: ...
@WORKERS.statement
def find_stale(
    stale_seconds: float, statuses: Sequence[str], limit: int, excluded: Sequence[str] = NOTHING
) -> AbandonedTask: ...


find_owned = WORKERS.declare("find_owned", FindOwned, TaskId)


@WORKERS.statement
def wake_queues(queues: Sequence[str]) -> QueueName: ...
@WORKERS.statement
def try_lead(job: int) -> Leads: ...
@WORKERS.statement
def store_worker_state(
    worker_id: str,
    tasks_running: int,
    tasks_claimed: int,
    memory_usage_mb: float | None,
    cpu_percent: float | None,
    memory_percent: float | None,
    children_memory_mb: float,
    max_claim_batch: int,
    max_claim_per_worker: int,
    cluster_wide_cap: int | None,
    queue_priorities: str,
    queue_max_concurrency: str,
    recovery_config: str,
    # A JSON list with one entry for each child.
    children: str,
) -> None: ...
@WORKERS.statement
def delete_old_heartbeats(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_worker_states(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_workers(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_meters(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_logs(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_tasks(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_old_untimed_tasks(hours: float, limit: int) -> Deleted: ...
@WORKERS.statement
def delete_kept_tasks(limit: int) -> Deleted: ...


WORKERS.complete()
