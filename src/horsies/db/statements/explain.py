"""Read-only statements that answer why a task, node, run, queue or schedule does not move."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.monitor import QueueName
from horsies.db.statements.tasks import TaskId

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


class WantedTask(NamedTuple):
    """A task name or, for the expansion of a sub-workflow, its definition key; and the task, if it is one."""

    task_name: str | None
    definition_key: str | None
    task_id: str | None = None


class Knowledge(NamedTuple):
    """Whether an open worker knows a task, with which parameters, and why the call does not fit them."""

    worker_id: str
    knows_task: bool
    fingerprint: str | None
    refusal: str | None = None
    refused_since: datetime | None = None


class RecoverySettings(NamedTuple):
    worker_id: str
    recovery: dict[str, Any] | None


class LastServer(NamedTuple):
    """A worker that has ended."""

    worker_id: str
    name: str | None
    hostname: str
    pid: int
    stopped_at: datetime
    was_lost: bool


class Place(NamedTuple):
    """A task that takes a place under the caps, and the number of all such tasks."""

    id: str
    queue_name: str
    claimed_at: datetime | None
    in_queue: int
    in_cluster: int


class CountAhead(NamedTuple):
    name: str
    priority: int
    enqueued_at: datetime
    id: str
    limit: int


class Ahead(NamedTuple):
    """Due tasks before another one, up to the limit of the count."""

    due: int


class CountDue(NamedTuple):
    names: Sequence[str]
    limit: int


class DueCount(NamedTuple):
    """The waiting tasks of a queue, up to the limit of the count."""

    name: str
    due: int
    delayed: int
    first_at: datetime | None
    is_stored: bool
    paused_at: datetime | None


class Names(NamedTuple):
    """Names of queues or schedules."""

    names: Sequence[str]


class UnknownName(NamedTuple):
    """A task that waits in a queue and that none of its workers has."""

    queue_name: str
    name: str


class OpenTransaction(NamedTuple):
    """A transaction of another session; details are None without the right to see them."""

    pid: int | None
    application_name: str | None
    state: str | None
    since: datetime | None


class Clock(NamedTuple):
    now: datetime


class MapNodeKey(NamedTuple):
    workflow_id: str
    node_index: int


class MapPlace(NamedTuple):
    id: str
    status: str


class ExplainRun(NamedTuple):
    id: str
    node_id: str | None


class RunFacts(NamedTuple):
    """One run and, if asked for, one of its nodes; ``task_index`` is None for an unknown node."""

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


class ListOpenNodes(NamedTuple):
    id: str
    indexes: Sequence[int] | None


class NodeFacts(NamedTuple):
    """One node of a run with its task or its sub-run."""

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
    """One schedule, an unfinished task or run of it, and the number of connected schedulers."""

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


explain_task = EXPLAIN.declare("explain_task", TaskId, TaskFacts)
list_knowledge = EXPLAIN.declare("list_knowledge", WantedTask, Knowledge)
list_recovery_settings = EXPLAIN.declare("list_recovery_settings", Nothing, RecoverySettings)
find_last_server = EXPLAIN.declare("find_last_server", QueueName, LastServer)
list_places = EXPLAIN.declare("list_places", QueueName, Place)
count_ahead = EXPLAIN.declare("count_ahead", CountAhead, Ahead)
count_due = EXPLAIN.declare("count_due", CountDue, DueCount)
find_unknown_names = EXPLAIN.declare("find_unknown_names", Names, UnknownName)
find_row_holder = EXPLAIN.declare("find_row_holder", TaskId, OpenTransaction)
find_writers = EXPLAIN.declare("find_writers", Nothing, OpenTransaction)
read_clock = EXPLAIN.declare("read_clock", Nothing, Clock)
list_map_places = EXPLAIN.declare("list_map_places", MapNodeKey, MapPlace)
explain_run = EXPLAIN.declare("explain_run", ExplainRun, RunFacts)
list_open_nodes = EXPLAIN.declare("list_open_nodes", ListOpenNodes, NodeFacts)
explain_schedules = EXPLAIN.declare("explain_schedules", Names, ScheduleFacts)

EXPLAIN.complete()
