"""Catalogue of the worker's statements: everything that a turn records, claims and reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId
from horsies.encryption import Payload

TURN = StatementFile("turn.sql")

# An empty array, written as a list because psycopg would treat a tuple as a row.
NOTHING: Sequence[Any] = []


class ClaimTasks(NamedTuple):
    """The parameters of a claim: the worker, its idle children, and the queues in order of preference."""

    worker_id: str
    hostname: str
    pids: Sequence[int]
    queues: Sequence[str]
    queue_limits: Sequence[int]
    prefetch: int = 0
    lease_ms: int = 60_000
    # One value per queue, with None for a queue without a cap; an empty list means that no queue has a
    # cap.
    queue_caps: Sequence[int | None] = NOTHING
    cluster_cap: int | None = None
    counts_claimed: bool = True
    # For each queue, how many places this transaction has freed.
    freed: Sequence[int] = NOTHING
    # For each queue, the task behind which the search starts (the mark), or None; an empty list means no
    # marks.
    marked_priorities: Sequence[int | None] = NOTHING
    marked_moments: Sequence[str | None] = NOTHING
    marked_ids: Sequence[str | None] = NOTHING
    # Whether to search again from the start of the queue if the search behind the marks found too few
    # tasks.
    looks_everywhere: bool = True
    # How many of the claimed tasks may be of any kind. Further tasks wait behind others in a child and must
    # be short. None means that all claimed tasks may be of any kind.
    idle: int | None = None
    short_names: Sequence[str] = NOTHING
    # True for tasks of "async def" functions only, False for all other tasks, None for both kinds.
    is_async: bool | None = None
    # What the claim excludes: tasks with these names, tasks with these ids, and tasks refused for these
    # fingerprints of parameters.
    unknown_names: Sequence[str] = NOTHING
    refused_ids: Sequence[str] = NOTHING
    refused_by: Sequence[str] = NOTHING
    # For each queue, the seconds per start and the size of a burst, or None for a queue without a rate;
    # empty if no queue has a rate.
    rate_seconds: Sequence[float | None] = NOTHING
    rate_bursts: Sequence[int | None] = NOTHING
    # For each queue, the lane behind which the claim by keys continues, or None; empty if no queue has
    # keys.
    cursors: Sequence[int | None] = NOTHING
    # The tasks with keys that this transaction has ended: their queues and their lanes.
    freed_queues: Sequence[str] = NOTHING
    freed_lanes: Sequence[int] = NOTHING
    # The marks of lanes: lanes in order, and for each lane the task behind which the search starts.
    marked_lanes: Sequence[int] = NOTHING
    lane_priorities: Sequence[int] = NOTHING
    lane_moments: Sequence[str] = NOTHING
    lane_ids: Sequence[str] = NOTHING


class ClaimBehindMark(NamedTuple):
    """The parameters of a claim from one queue behind a mark: the worker, its idle children, and the mark."""

    worker_id: str
    hostname: str
    queue: str
    pids: Sequence[int]
    marked_priority: int
    marked_moment: str
    marked_id: str


class ClaimBatch(NamedTuple):
    """Batched tasks that this worker's children have already received, all of one name and lane, and how
    many more tasks may join them, in batches of `size`. The search starts behind the position of the last
    of these tasks.
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
    """The worker and its queues, the task names that this worker has not known for the grace period, how
    many tasks to claim, and which tasks to skip. ``only`` restricts the claim to these tasks.
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
    """A task that this worker now owns, with all values that a child and the decision about a retry need."""

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
    # The process id of the child that runs the task; None while the task is CLAIMED.
    worker_pid: int | None
    # The workflow run and node, the index of a map item, and the references to results of other nodes.
    workflow_id: str | None = None
    workflow_node_index: int | None = None
    workflow_item_index: int | None = None
    workflow_inputs: str | None = None
    # The task's position in its queue. The time is kept as the text that PostgreSQL returned, because it must
    # be sent back unchanged.
    priority: int = 0
    enqueued_at: str = ""
    # The columns that only the task's own code may read; see horsies_claim_v1.
    details: str = ""
    # Whether the task may wait behind others in a child.
    burst: bool = False
    # The number of the task's key in its queue; None for a task without a key.
    lane: int | None = None

    def stored(self) -> str:
        """Return the fields for ``CurrentTask``, in the order in which it reads them."""
        options = self.task_options or ""
        return f"{self.priority}\0{self.max_retries}\0{self.queue_name}\0{options}\0{self.details}"


class StartTasks(NamedTuple):
    """Prefetched tasks to start, and the idle children that run them, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    pids: Sequence[int]


class StartedTask(NamedTuple):
    id: str
    worker_pid: int


class RenewClaims(NamedTuple):
    """Prefetched tasks whose leases are extended, unless their claims are too old."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    lease_ms: int
    max_age_ms: int


class ReleaseClaimed(NamedTuple):
    """Tasks that a lost worker claimed but never started."""

    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]


class ReleaseLapsed(NamedTuple):
    """How many claims to release, and which tasks to skip. ``only`` restricts the release to these tasks."""

    limit: int
    excluded: Sequence[str] = NOTHING
    only: Sequence[str] | None = None


class CompleteTasks(NamedTuple):
    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]
    results: Sequence[str]
    # How many microseconds each attempt ran; None keeps the stored start of the attempt.
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
    """A failed attempt that another attempt will follow."""

    task_id: str


class ReleaseUnstarted(NamedTuple):
    """A worker, and the attempts that it actually holds."""

    worker_id: str
    held_ids: Sequence[str]
    held_generations: Sequence[int]


class ExpireTasks(NamedTuple):
    """The result to store, how many tasks to expire, and which tasks to skip. ``only`` restricts the
    expiry to these tasks.
    """

    result: str
    limit: int
    excluded: Sequence[str] = NOTHING
    only: Sequence[str] | None = None


class LookAhead(NamedTuple):
    """Queues to check for due tasks, and the time of the last check on the database's clock."""

    queues: Sequence[str]
    last_look: datetime | None


class SecondsUntilDue(NamedTuple):
    """When an idle worker has to act next: the seconds until the next task is due or expires, or None if
    there is no such task; and the seconds until a queue that its rate holds back may start a task again.

    ``overdue`` is set if a deadline or the lease of a claim has passed. ``keyed`` lists the queues whose
    tasks have keys, if there was no earlier check.
    """

    seconds: float | None
    looked_at: datetime
    overdue: bool
    start_seconds: float | None
    keyed: Sequence[str] | None = None


class LookAtKeys(NamedTuple):
    """Queues whose tasks may have keys, and the maximum number of due tasks to move to their lanes."""

    queues: Sequence[str]
    limit: int


class KeyedQueues(NamedTuple):
    """The seconds until the next task with a key is due, or None if there is none; the queues with open
    tasks that have keys; and how many such tasks have just become due.
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
    """Attempts whose child may have recorded their outcome already, as columns."""

    ids: Sequence[str]
    generations: Sequence[int]


class StoreLogs(NamedTuple):
    """The lines that attempts have logged, as columns."""

    ids: Sequence[str]
    generations: Sequence[int]
    attempts: Sequence[int]
    bodies: Sequence[Payload]
    dropped: Sequence[int]
    cut_after: Sequence[int]


class WorkerId(NamedTuple):
    worker_id: str


claim_tasks = TURN.declare("claim_tasks", ClaimTasks, ClaimedTask)
claim_behind_mark = TURN.declare("claim_behind_mark", ClaimBehindMark, ClaimedTask)
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
