"""Read-only statements that show why a task, node, run, queue or schedule is not making progress."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName

EXPLAIN = StatementFile("explain.sql")


class TaskFacts(NamedTuple):
    """One task with its node, run, queue, worker, newest attempt and newest heartbeat."""

    id: str
    task_name: str
    queue_name: str
    status: str
    priority: int
    retry_count: int
    max_retries: int
    timeout_ms: int | None
    good_until: datetime | None
    held: bool
    enqueued_at: datetime
    is_parked: bool
    claimed_at: datetime | None
    claim_expires_at: datetime | None
    started_at: datetime | None
    ended_at: datetime
    cancel_requested_at: datetime | None
    error_code: str | None
    worker_id: str | None
    worker_pid: int | None
    workflow_id: str | None
    item_index: int | None
    node_id: str | None
    node_kind: str | None
    signal_name: str | None
    node_index: int | None
    max_parallel: int | None
    items_total: int | None
    definition_key: str | None
    run_name: str | None
    run_status: str | None
    run_paused_at: datetime | None
    run_error_code: str | None
    queue_paused_at: datetime | None
    blocked_action: str | None
    blocked_error: str | None
    blocked_since: datetime | None
    owner_is_known: bool
    owner_stopped_at: datetime | None
    last_outcome: str | None
    last_error_code: str | None
    retry_reason: str | None
    last_finished_at: datetime | None
    will_retry: bool | None
    last_hostname: str | None
    heartbeat_at: datetime | None
    progress_done: float | None
    progress_total: float | None
    looked_at: datetime
    is_async: bool = False
    # What a parked run of a durable function waits for.
    parked_since: datetime | None = None
    parked_signals: Sequence[str] | None = None
    parked_children: Sequence[str] | None = None
    parked_problem: str | None = None
    lane_key: str | None = None
    # The lane of the task's key. None while the task's run is paused, even if the task has a key.
    lane: int | None = None
    next_retry_at: datetime | None = None
    # Whether the task is a run of a durable function, and whether that run has recorded steps.
    is_durable: bool = False
    has_record: bool = False
    # The deadline of a run that has not ended, and whether the run was cancelled because of the deadline.
    deadline: datetime | None = None
    is_late: bool = False

    @property
    def due_at(self) -> datetime:
        """When the task may start. A task with a key may keep its place in its lane while it waits for
        its retry; then the time of the retry counts.
        """
        if self.lane is None or self.next_retry_at is None:
            return self.enqueued_at
        return max(self.enqueued_at, self.next_retry_at)

    @property
    def is_held_back(self) -> bool:
        """Whether a paused run or a problem with recorded steps holds the task back. A task with a key is
        always stored as held, which does not count here.
        """
        return self.held and (self.lane is None or self.parked_problem is not None)


class WantedTask(NamedTuple):
    """The name of a task, or the definition key of the sub-workflow that an expansion needs; and the id
    of the task, if the task exists.
    """

    task_name: str | None
    definition_key: str | None
    task_id: str | None = None


class Knowledge(NamedTuple):
    """Whether an open worker knows a task, with which parameters, and why the call does not fit these
    parameters.
    """

    worker_id: str
    knows_task: bool
    fingerprint: str | None
    refusal: str | None = None
    refused_since: datetime | None = None
    missing_key: str | None = None


class RecoverySettings(NamedTuple):
    worker_id: str
    recovery: dict[str, Any] | None


class LastServer(NamedTuple):
    """A worker that has stopped."""

    worker_id: str
    name: str | None
    hostname: str
    pid: int
    stopped_at: datetime
    was_lost: bool


class Place(NamedTuple):
    """A task that occupies a place under the caps, and the number of such tasks."""

    id: str
    queue_name: str
    claimed_at: datetime | None
    in_queue: int
    in_cluster: int


class NewestStart(NamedTuple):
    """When a worker last started one of its running tasks, and its oldest running task."""

    worker_id: str
    newest_at: datetime
    oldest_at: datetime
    oldest_id: str


class Ahead(NamedTuple):
    """How many due tasks with the same key (or, for a task without a key, without one) start before a task,
    up to the limit; and how many keys of the queue have due tasks, up to 100.
    """

    due: int
    keys: int = 0


class Meter(NamedTuple):
    """When a queue's rate allows the next start, and the seconds between two starts."""

    starts_at: datetime
    start_seconds: float


class DueCount(NamedTuple):
    """The number of waiting tasks in a queue, counted up to the limit."""

    name: str
    due: int
    delayed: int
    first_at: datetime | None
    is_stored: bool
    paused_at: datetime | None


class DueName(NamedTuple):
    """The name of a task that is due in a queue."""

    queue_name: str
    name: str


class TaskSet(NamedTuple):
    """The task names that one or more workers have registered; None for workers without registered names."""

    worker_ids: Sequence[str]
    task_names: Sequence[str] | None


class OpenTransaction(NamedTuple):
    """Another session's transaction; details are None if this role may not see them."""

    pid: int | None
    application_name: str | None
    state: str | None
    since: datetime | None


class Clock(NamedTuple):
    now: datetime


class MapPlace(NamedTuple):
    id: str
    status: str


class RunFacts(NamedTuple):
    """One run and, if requested, one of its nodes; ``task_index`` is None if the run has no such node."""

    id: str
    name: str
    status: str
    paused_at: datetime | None
    completed_at: datetime | None
    open_nodes: int
    total_nodes: int
    failed_nodes: int
    error_code: str | None
    failed_node: str | None
    blocked_action: str | None
    blocked_error: str | None
    blocked_since: datetime | None
    task_index: int | None
    node_status: str | None
    dependencies: Sequence[int] | None
    join_type: str | None
    min_success: int | None
    looked_at: datetime


class NodeFacts(NamedTuple):
    """One node of a run with its task or its sub-workflow's run."""

    task_index: int
    node_id: str
    kind: str
    status: str
    task_id: str | None
    task_status: str | None
    items_total: int | None
    items_open: int | None
    items_bad: int | None
    sub_run_id: str | None
    sub_run_status: str | None
    completed_at: datetime | None
    begun_at: datetime | None
    error_code: str | None


class ScheduleFacts(NamedTuple):
    """One schedule, its unfinished task or run, and the number of connected schedulers."""

    name: str
    task_name: str | None
    definition_key: str | None
    owner: str | None
    next_run_at: datetime | None
    last_run_at: datetime | None
    last_task_id: str | None
    paused_at: datetime | None
    skipped_at: datetime | None
    skip_reason: str | None
    is_disabled: bool
    created_at: datetime
    unfinished_id: str | None
    schedulers: int
    looked_at: datetime


@EXPLAIN.statement
def explain_task(id: str) -> TaskFacts: ...


list_knowledge = EXPLAIN.declare("list_knowledge", WantedTask, Knowledge)


@EXPLAIN.statement
def list_recovery_settings() -> RecoverySettings: ...
@EXPLAIN.statement
def find_last_server(name: str) -> LastServer: ...
@EXPLAIN.statement
def list_places(name: str) -> Place: ...
@EXPLAIN.statement
def read_meter(name: str) -> Meter: ...
@EXPLAIN.statement
def list_rated_queues(names: Sequence[str]) -> QueueName: ...
@EXPLAIN.statement
def list_newest_starts(worker_ids: Sequence[str]) -> NewestStart: ...
@EXPLAIN.statement
def count_ahead(name: str, priority: int, enqueued_at: datetime, id: str, limit: int) -> Ahead: ...
@EXPLAIN.statement
def count_ahead_in_lane(
    name: str, lane: int, priority: int, enqueued_at: datetime, id: str, limit: int
) -> Ahead: ...
@EXPLAIN.statement
def count_due(names: Sequence[str], limit: int) -> DueCount: ...
@EXPLAIN.statement
def list_due_names(names: Sequence[str]) -> DueName: ...
@EXPLAIN.statement
def list_task_sets() -> TaskSet: ...
@EXPLAIN.statement
def find_row_holder(id: str) -> OpenTransaction: ...
@EXPLAIN.statement
def find_task_transaction(id: str) -> OpenTransaction: ...
@EXPLAIN.statement
def find_writers() -> OpenTransaction: ...
@EXPLAIN.statement
def read_clock() -> Clock: ...
@EXPLAIN.statement
def list_map_places(workflow_id: str, node_index: int) -> MapPlace: ...
@EXPLAIN.statement
def explain_run(id: str, node_id: str | None) -> RunFacts: ...
@EXPLAIN.statement
def list_open_nodes(id: str, indexes: Sequence[int] | None) -> NodeFacts: ...
@EXPLAIN.statement
def explain_schedules(names: Sequence[str]) -> ScheduleFacts: ...


EXPLAIN.complete()
