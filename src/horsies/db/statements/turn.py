"""Catalogue of the worker's statements: everything that a turn records, claims and reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId
from horsies.encryption import Payload

TURN = StatementFile("turn.sql")

# An empty array; psycopg would treat a tuple as a row.
NOTHING: Sequence[Any] = []


class ClaimTasks(NamedTuple):
    """The claiming worker and its idle children, and the queues in order of preference."""

    worker_id: str
    hostname: str
    pids: Sequence[int]
    queues: Sequence[str]
    queue_limits: Sequence[int]
    prefetch: int = 0
    lease_ms: int = 60_000
    # Per queue, None for no cap; an empty list means no caps.
    queue_caps: Sequence[int | None] = NOTHING
    cluster_cap: int | None = None
    counts_claimed: bool = True
    # Per queue, how many places this transaction has given back.
    freed: Sequence[int] = NOTHING
    # Per queue, the task after which to start the search, or None; an empty list sets no marks.
    marked_priorities: Sequence[int | None] = NOTHING
    marked_moments: Sequence[str | None] = NOTHING
    marked_ids: Sequence[str | None] = NOTHING
    # Whether to search from the start of the queue for the tasks still missing.
    looks_everywhere: bool = True
    # How many tasks may be of any kind; the others wait behind them and must be short. None means all.
    idle: int | None = None
    short_names: Sequence[str] = NOTHING
    # True for tasks of "async def" functions only, False for all others, None for both.
    is_async: bool | None = None
    # Excluded: tasks with these names, these tasks, and tasks refused for these parameter fingerprints.
    unknown_names: Sequence[str] = NOTHING
    refused_ids: Sequence[str] = NOTHING
    refused_by: Sequence[str] = NOTHING
    # Per queue, the seconds per start and how many may start at once, or None; empty if no queue has a rate.
    rate_seconds: Sequence[float | None] = NOTHING
    rate_bursts: Sequence[int | None] = NOTHING
    # Per queue, the lane behind which the claim by keys continues, or None; empty if no queue has keys.
    cursors: Sequence[int | None] = NOTHING
    # The lanes of the tasks with keys that this transaction has ended, and their queues.
    freed_queues: Sequence[str] = NOTHING
    freed_lanes: Sequence[int] = NOTHING
    # Lanes in order, and for each of them the task after which to search first.
    marked_lanes: Sequence[int] = NOTHING
    lane_priorities: Sequence[int] = NOTHING
    lane_moments: Sequence[str] = NOTHING
    lane_ids: Sequence[str] = NOTHING


class ClaimBatch(NamedTuple):
    """Batched tasks that this worker's children were given, all of one name and lane, and how many more
    may join them, in batches of `size`. The position of the last one is where the search begins.
    """

    worker_id: str
    hostname: str
    heads: Sequence[str]
    pids: Sequence[int]
    size: int
    queue: str
    lane: int
    task_name: str
    wanted: int
    after_priority: int
    after_at: str
    queue_cap: int | None = None
    cluster_cap: int | None = None
    counts_claimed: bool = True
    rate_seconds: float | None = None
    rate_burst: int | None = None
    refused_ids: Sequence[str] = NOTHING
    refused_by: Sequence[str] = NOTHING


class ClaimUnresolvable(NamedTuple):
    """The worker and its queues, the names that it has not known for the grace period, how many tasks
    to claim, and tasks to skip; ``only`` restricts the claim to these tasks.
    """

    worker_id: str
    hostname: str
    queues: Sequence[str]
    names: Sequence[str]
    grace_seconds: float
    limit: int
    excluded: Sequence[str] = NOTHING
    only: Sequence[str] | None = None


class ClaimedTask(NamedTuple):
    """A task that this worker now owns, with everything that a child and a retry decision need."""

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
    # The child it was started for; None while it is CLAIMED.
    worker_pid: int | None
    # The workflow and node, the item of a map node, and the results taken from other nodes.
    workflow_id: str | None = None
    workflow_node_index: int | None = None
    workflow_item_index: int | None = None
    workflow_inputs: str | None = None
    # Its position in the queue; the time is kept as PostgreSQL writes it, because it must be sent back
    # unchanged.
    priority: int = 0
    enqueued_at: str = ""
    # The columns that only the task's own code may read; see horsies_claim_v1.
    details: str = ""
    # Whether the task may wait behind others in a child.
    burst: bool = False
    # The number of its key in its queue; None without a key.
    lane: int | None = None

    def stored(self) -> str:
        """The fields for ``CurrentTask``, in the order in which it reads them."""
        options = self.task_options or ""
        return f"{self.priority}\0{self.max_retries}\0{self.queue_name}\0{options}\0{self.details}"


class StartTasks(NamedTuple):
    """Prefetched tasks and the idle children that take them, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    pids: Sequence[int]


class StartedTask(NamedTuple):
    id: str
    worker_pid: int


class RenewClaims(NamedTuple):
    """Prefetched tasks whose lease to extend, unless they are too old."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    lease_ms: int
    max_age_ms: int


class ReleaseClaimed(NamedTuple):
    """A lost worker's tasks that were claimed but never started."""

    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]


class ReleaseLapsed(NamedTuple):
    """How many claims to release, and tasks to skip; ``only`` restricts the release to these tasks."""

    limit: int
    excluded: Sequence[str] = NOTHING
    only: Sequence[str] | None = None


class CompleteTasks(NamedTuple):
    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]
    results: Sequence[str]
    # How many microseconds each attempt ran; None keeps the stored start.
    runs_us: Sequence[int | None] = NOTHING


class RetryTasks(NamedTuple):
    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]
    delays_seconds: Sequence[float]
    outcomes: Sequence[str]
    error_codes: Sequence[str | None]
    error_messages: Sequence[str | None]
    failed_reasons: Sequence[str | None]
    retry_reasons: Sequence[str | None] = NOTHING
    max_retries: Sequence[int] = NOTHING
    runs_us: Sequence[int | None] = NOTHING
    fingerprints: Sequence[str | None] = NOTHING
    exception_types: Sequence[str | None] = NOTHING
    raised_in: Sequence[str | None] = NOTHING


class FailTasks(NamedTuple):
    """Final failures and cancellations, as columns."""

    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]
    statuses: Sequence[str]
    results: Sequence[str | None]
    outcomes: Sequence[str]
    error_codes: Sequence[str | None]
    error_messages: Sequence[str | None]
    failed_reasons: Sequence[str | None]
    retry_reasons: Sequence[str | None] = NOTHING
    runs_us: Sequence[int | None] = NOTHING
    fingerprints: Sequence[str | None] = NOTHING
    exception_types: Sequence[str | None] = NOTHING
    raised_in: Sequence[str | None] = NOTHING
    only_cancelled: bool = False


class FinishedTask(NamedTuple):
    task_id: str


class RetriedTask(NamedTuple):
    """A failed attempt that will be followed by another."""

    task_id: str


class ReleaseUnstarted(NamedTuple):
    """A worker, and the attempts it actually holds."""

    worker_id: str
    held_ids: Sequence[str]
    held_generations: Sequence[int]


class ExpireTasks(NamedTuple):
    """The result to store, how many tasks to expire, and tasks to skip; ``only`` restricts the
    expiry to these tasks.
    """

    result: str
    limit: int
    excluded: Sequence[str] = NOTHING
    only: Sequence[str] | None = None


class LookAhead(NamedTuple):
    """Queues, and when they were last checked, on the database's clock."""

    queues: Sequence[str]
    last_look: datetime | None


class SecondsUntilDue(NamedTuple):
    """Seconds until the next task is due or expires, or None if there is none; the time of the check;
    whether a deadline or the lease of a claim has passed; and seconds until a queue that its rate holds
    back may start a task again. Without an earlier check, also the queues whose tasks have keys.
    """

    seconds: float | None
    looked_at: datetime
    overdue: bool
    start_seconds: float | None
    keyed: Sequence[str] | None = None


class LookAtKeys(NamedTuple):
    """Queues whose tasks may have keys, and how many of their due tasks to move to their lanes."""

    queues: Sequence[str]
    limit: int


class KeyedQueues(NamedTuple):
    """Seconds until the next task with a key is due, None without one; the queues that have tasks with
    keys; and how many have just become due.
    """

    seconds: float | None
    queues: Sequence[str]
    promoted: int


class SendHeartbeats(NamedTuple):
    worker_id: str
    hostname: str
    ids: Sequence[str]
    generations: Sequence[int]


class StoreProgress(NamedTuple):
    """The latest progress of running attempts, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    done: Sequence[float]
    totals: Sequence[float | None]
    notes: Sequence[Payload | None]


class FindCompleted(NamedTuple):
    """Attempts whose outcome their child may have recorded, as columns."""

    ids: Sequence[str]
    generations: Sequence[int]


class StoreLogs(NamedTuple):
    """What attempts have logged, as columns."""

    ids: Sequence[str]
    generations: Sequence[int]
    attempts: Sequence[int]
    bodies: Sequence[Payload]
    dropped: Sequence[int]
    cut_after: Sequence[int]


class WorkerId(NamedTuple):
    worker_id: str


claim_tasks = TURN.declare("claim_tasks", ClaimTasks, ClaimedTask)
claim_batch = TURN.declare("claim_batch", ClaimBatch, ClaimedTask)
claim_unresolvable = TURN.declare("claim_unresolvable", ClaimUnresolvable, ClaimedTask)
start_tasks = TURN.declare("start_tasks", StartTasks, StartedTask)
renew_claims = TURN.declare("renew_claims", RenewClaims, TaskId)
release_claimed = TURN.declare("release_claimed", ReleaseClaimed, TaskId)
release_lapsed = TURN.declare("release_lapsed", ReleaseLapsed, TaskId)
complete_tasks = TURN.declare("complete_tasks", CompleteTasks, FinishedTask)
find_completed = TURN.declare("find_completed", FindCompleted, FinishedTask)
retry_tasks = TURN.declare("retry_tasks", RetryTasks, RetriedTask)
fail_tasks = TURN.declare("fail_tasks", FailTasks, FinishedTask)
release_unstarted = TURN.declare("release_unstarted", ReleaseUnstarted, TaskId)
expire_tasks = TURN.declare("expire_tasks", ExpireTasks, TaskId)
seconds_until_due = TURN.declare("seconds_until_due", LookAhead, SecondsUntilDue)
seconds_until_rated = TURN.declare("seconds_until_rated", LookAhead, SecondsUntilDue)
look_at_keys = TURN.declare("look_at_keys", LookAtKeys, KeyedQueues)
find_cancel_requests = TURN.declare("find_cancel_requests", WorkerId, TaskId)
send_heartbeats = TURN.declare("send_heartbeats", SendHeartbeats, FinishedTask)
store_logs = TURN.declare("store_logs", StoreLogs, FinishedTask)
store_progress = TURN.declare("store_progress", StoreProgress, FinishedTask)

TURN.complete()
