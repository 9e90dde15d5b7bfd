"""Catalogue of the worker's statements: what one turn finishes, claims and looks at.

Parameters and rows for ``sql/turn.sql``. ``ClaimedTask`` is the second of the four values that
cross a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

TURN = StatementFile("turn.sql")

# An empty array; psycopg takes a tuple for a row.
NOTHING: Sequence[Any] = []


class ClaimTasks(NamedTuple):
    """Who claims, for which idle children, from which queues in which order."""

    worker_id: str
    hostname: str
    pids: Sequence[int]
    queues: Sequence[str]
    queue_limits: Sequence[int]
    prefetch: int = 0
    lease_ms: int = 60_000
    # Per queue, None for no cap; an empty list caps nothing.
    queue_caps: Sequence[int | None] = NOTHING
    cluster_cap: int | None = None
    counts_claimed: bool = True
    # Per queue, how many places this transaction has given back.
    freed: Sequence[int] = NOTHING
    # Per queue, behind which task to look first, None for none; an empty list marks nothing.
    marked_priorities: Sequence[int | None] = NOTHING
    marked_moments: Sequence[str | None] = NOTHING
    marked_ids: Sequence[str | None] = NOTHING
    # Whether to look everywhere for what is still wanted then.
    looks_everywhere: bool = True


class ClaimedTask(NamedTuple):
    """A task this worker owns now, with everything a child and a retry decision need."""

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
    # The child it was started for; None while it rests as CLAIMED.
    worker_pid: int | None
    # Which node of which workflow, which element of a map's list, and what it takes from other nodes.
    workflow_id: str | None = None
    workflow_node_index: int | None = None
    workflow_item_index: int | None = None
    workflow_inputs: str | None = None
    # Its place in the queue; the moment as PostgreSQL writes it, because it must come back unchanged.
    priority: int = 0
    enqueued_at: str = ""


class StartTasks(NamedTuple):
    """Prefetched tasks and the idle children that take them, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    pids: Sequence[int]


class StartedTask(NamedTuple):
    """A prefetched task that runs now."""

    id: str
    worker_pid: int


class RenewClaims(NamedTuple):
    """Which prefetched tasks to keep, for how long, unless they are too old."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    lease_ms: int
    max_age_ms: int


class ReleaseClaimed(NamedTuple):
    """Tasks claimed but never started, by a worker that is gone."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]


class Limit(NamedTuple):
    """How many rows to touch at most."""

    limit: int


class CompleteTasks(NamedTuple):
    """Successes, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    results: Sequence[str]


class RetryTasks(NamedTuple):
    """Failures that run again, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    delays_seconds: Sequence[float]
    outcomes: Sequence[str]
    error_codes: Sequence[str | None]
    error_messages: Sequence[str | None]
    failed_reasons: Sequence[str | None]


class FailTasks(NamedTuple):
    """Final failures and cancellations, as columns."""

    worker_id: str
    ids: Sequence[str]
    generations: Sequence[int]
    statuses: Sequence[str]
    results: Sequence[str | None]
    outcomes: Sequence[str]
    error_codes: Sequence[str | None]
    error_messages: Sequence[str | None]
    failed_reasons: Sequence[str | None]


class FinishedTask(NamedTuple):
    """A task whose outcome this statement recorded."""

    task_id: str


class ReleaseUnstarted(NamedTuple):
    """Which worker, and the attempts it really holds."""

    worker_id: str
    held_ids: Sequence[str]
    held_generations: Sequence[int]


class ExpireTasks(NamedTuple):
    """The stored result of an expired task, and how many to expire at most."""

    result: str
    limit: int


class LookAhead(NamedTuple):
    """Which queues, and when they were looked at last, on the database's clock."""

    queues: Sequence[str]
    last_look: datetime | None


class SecondsUntilDue(NamedTuple):
    """Seconds until the next task is due or expires, None when none will; and when that was true."""

    seconds: float | None
    looked_at: datetime


class WorkerId(NamedTuple):
    """A worker by its id."""

    worker_id: str


class SendHeartbeats(NamedTuple):
    """Which running attempts are alive."""

    worker_id: str
    hostname: str
    ids: Sequence[str]
    generations: Sequence[int]


claim_tasks = TURN.declare("claim_tasks", ClaimTasks, ClaimedTask)
start_tasks = TURN.declare("start_tasks", StartTasks, StartedTask)
renew_claims = TURN.declare("renew_claims", RenewClaims, TaskId)
release_claimed = TURN.declare("release_claimed", ReleaseClaimed, TaskId)
release_lapsed = TURN.declare("release_lapsed", Limit, TaskId)
complete_tasks = TURN.declare("complete_tasks", CompleteTasks, FinishedTask)
retry_tasks = TURN.declare("retry_tasks", RetryTasks, FinishedTask)
fail_tasks = TURN.declare("fail_tasks", FailTasks, FinishedTask)
release_unstarted = TURN.declare("release_unstarted", ReleaseUnstarted, TaskId)
expire_tasks = TURN.declare("expire_tasks", ExpireTasks, TaskId)
seconds_until_due = TURN.declare("seconds_until_due", LookAhead, SecondsUntilDue)
find_cancel_requests = TURN.declare("find_cancel_requests", WorkerId, TaskId)
send_heartbeats = TURN.declare("send_heartbeats", SendHeartbeats, FinishedTask)

TURN.complete()
