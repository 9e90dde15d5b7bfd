"""Statements on workflows: start, control, read, audit.

This module declares the parameters and rows of ``workflows.sql``. The functions in the database advance a
run, in the transaction that ends a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.turn import NOTHING
from horsies.encryption import Owner, Payload, ShownPayload
from horsies.states import WorkflowStatus
from horsies.task_result import json_object

WORKFLOWS = StatementFile("workflows.sql")


class StartedRun(NamedTuple):
    """A run that was created, or the existing run with this id or key. The name is None if the existing
    run has just ended.
    """

    id: str
    created: bool
    name: str | None
    fingerprint: str | None


class RunId(NamedTuple):
    id: str


class ControlAnswer(NamedTuple):
    """The return value of a control function: the previous status of the run, a word for the result, or None
    if the run does not exist.
    """

    answer: str | None


class SignalName(NamedTuple):
    name: str


class RunStatus(NamedTuple):
    status: str


class RunOutcome(NamedTuple):
    """A run and its outcome. A completed run has ``result_bytes`` even if its result is omitted."""

    id: str
    name: str
    definition_key: str
    status: str
    error: ShownPayload | None
    result_bytes: int | None
    result: Payload | None
    output_node_id: str | None


class ResultNode(NamedTuple):
    """A node whose result is the result of the run, or part of that result."""

    task_index: int
    node_id: str


class NodeRow(NamedTuple):
    definition_key: str
    task_index: int
    node_id: str
    kind: str
    task_name: str
    dependencies: Sequence[int]
    status: str
    task_id: str | None
    retry_count: int | None
    items_total: int | None
    items_open: int | None
    items_bad: int | None
    sub_workflow_id: str | None
    sub_workflow_name: str | None
    sub_definition_key: str | None
    sub_workflow_summary: str | None
    sub_workflow_status: str | None
    enqueued_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None


class ItemRow(NamedTuple):
    """One item of a map node, with the task that runs it."""

    task_index: int
    item_index: int
    id: str
    status: str
    retry_count: int
    enqueued_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    failed_reason: str | None
    error_code: str | None
    result_bytes: int | None
    result: Payload | None


class NodeOutcome(NamedTuple):
    """A node's result; the status is None if the node does not exist."""

    run_status: str
    definition_key: str
    task_index: int | None
    status: str | None
    task_name: str | None
    kind: str | None
    result_bytes: int | None
    result: Payload | None


class ResultPart(NamedTuple):
    """The result of an ended node, or of one of its items.

    ``result_bytes`` is the size of the node's whole result; ``result`` is None if the size exceeds the limit.
    """

    workflow_id: str
    task_index: int
    item_index: int | None
    status: str
    kind: str
    task_name: str
    sub_definition_key: str | None
    sub_workflow_summary: str | None
    result_bytes: int
    result: Payload | None


class RunPlace(NamedTuple):
    """The position of a run in its tree of runs."""

    id: str
    root_workflow_id: str
    depth: int


class RunRow(NamedTuple):
    """A run for display; ``duration_seconds`` grows until the run ends."""

    id: str
    name: str
    status: str
    definition_key: str
    workflow_key: str | None
    on_error: str
    error: ShownPayload | None
    matched_case: int | None
    parent_workflow_id: str | None
    parent_task_index: int | None
    root_workflow_id: str
    depth: int
    total_nodes: int
    open_nodes: int
    failed_nodes: int
    schedule_name: str | None
    scheduled_for: datetime | None
    sent_at: datetime | None
    created_at: datetime
    started_at: datetime
    paused_at: datetime | None
    completed_at: datetime | None
    duration_seconds: float


class TreeNode(NamedTuple):
    """A node for display; ``due_at`` is the time in the future at which a sleep, or the wait for a signal,
    ends.
    """

    workflow_id: str
    task_index: int
    node_id: str
    kind: str
    task_name: str
    dependencies: Sequence[int]
    join_type: str
    min_success: int | None
    status: str
    task_id: str | None
    retry_count: int | None
    items_total: int | None
    items_open: int | None
    items_bad: int | None
    signal_name: str | None
    sub_workflow_id: str | None
    sub_workflow_name: str | None
    error_code: str | None
    due_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    duration_seconds: float | None
    enqueued_at: datetime | None


class NodeCount(NamedTuple):
    """How many nodes of a run have a certain status."""

    status: str
    nodes: int


class RetriedAttempt(NamedTuple):
    task_id: str
    finished_at: datetime


class MapItem(NamedTuple):
    """One item of a map. ``is_well`` is False if the item failed, expired or was cancelled."""

    id: str
    item_index: int
    status: str
    is_well: bool
    retry_count: int
    error_code: str | None
    started_at: datetime | None
    duration_seconds: float | None


class ListRuns(NamedTuple):
    """The filters for listing runs; an empty filter matches every run."""

    before_at: datetime
    before_id: str
    since: datetime
    statuses: Sequence[str]
    names: Sequence[str]
    workflow_keys: Sequence[str]
    include_children: bool
    limit: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One workflow run in a list. ``completed_at`` is None until the run has ended."""

    id: str
    name: str
    status: WorkflowStatus
    definition_key: str
    workflow_key: str | None
    parent_workflow_id: str | None
    total_nodes: int
    open_nodes: int
    failed_nodes: int
    error_code: str | None
    created_at: datetime
    completed_at: datetime | None
    age_seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", WorkflowStatus(self.status))

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain JSON values."""
        return json_object(self)


class RunPosition(NamedTuple):
    """A run and its position in the list."""

    id: str
    created_at: datetime


class BrokenRun(NamedTuple):
    """One inconsistency in an open run."""

    id: str
    problem: str


class PausedRun(NamedTuple):
    id: str
    paused_seconds: float


class ExpiredRun(NamedTuple):
    """The result of expiring a paused run; ``expired`` is False if the run has been resumed before."""

    expired: bool


@WORKFLOWS.statement
def start_runs(runs: str) -> StartedRun: ...
@WORKFLOWS.statement
def lock_runs(workflow_ids: Sequence[str]) -> RunId: ...
@WORKFLOWS.statement
def pause_run(id: str) -> ControlAnswer: ...
@WORKFLOWS.statement
def resume_run(id: str) -> ControlAnswer: ...
@WORKFLOWS.statement
def resume_retrying_run(id: str) -> ControlAnswer: ...
@WORKFLOWS.statement
def cancel_run(id: str, reason: str, interrupt: bool) -> ControlAnswer: ...
@WORKFLOWS.statement
def retry_run(id: str, node_ids: Sequence[str] | None) -> ControlAnswer: ...
@WORKFLOWS.statement
def signal_run(id: Owner, name: str, value: Payload) -> ControlAnswer: ...
@WORKFLOWS.statement
def list_signal_names(id: str) -> SignalName: ...
@WORKFLOWS.statement
def read_run_status(id: str) -> RunStatus: ...
@WORKFLOWS.statement
def read_runs(ids: Sequence[str], max_bytes: int) -> RunOutcome: ...
@WORKFLOWS.statement
def read_result_nodes(id: str) -> ResultNode: ...
@WORKFLOWS.statement
def read_nodes(id: str) -> NodeRow: ...
@WORKFLOWS.statement
def read_items(id: str, max_bytes: int) -> ItemRow: ...
@WORKFLOWS.statement
def read_node(id: str, node_id: str, max_bytes: int) -> NodeOutcome: ...
@WORKFLOWS.statement
def read_results(
    workflow_ids: Sequence[str], indexes: Sequence[int], max_bytes: int
) -> ResultPart: ...
@WORKFLOWS.statement
def read_places(ids: Sequence[str]) -> RunPlace: ...
@WORKFLOWS.statement
def read_tree(id: str, limit: int) -> RunRow: ...
@WORKFLOWS.statement
def read_tree_nodes(ids: Sequence[str]) -> TreeNode: ...
@WORKFLOWS.statement
def count_nodes_by_status(id: str) -> NodeCount: ...
@WORKFLOWS.statement
def list_retried_attempts(ids: Sequence[str], limit: int) -> RetriedAttempt: ...
@WORKFLOWS.statement
def list_map_items(
    id: str, task_index: int, after_well: bool, after_index: int, limit: int
) -> MapItem: ...
@WORKFLOWS.statement
def find_run_problems(id: str, limit: int) -> BrokenRun: ...
@WORKFLOWS.statement
def list_newest_runs(
    before_at: datetime,
    before_id: str,
    since: datetime,
    statuses: Sequence[str],
    names: Sequence[str],
    workflow_keys: Sequence[str],
    include_children: bool,
    limit: int,
    window: int,
) -> RunSummary: ...


list_open_runs = WORKFLOWS.declare("list_open_runs", ListRuns, RunSummary)


@WORKFLOWS.statement
def end_of_run_window(
    before_at: datetime, before_id: str, since: datetime, window: int
) -> RunPosition: ...
@WORKFLOWS.statement
def read_run_position(id: str) -> RunPosition: ...
@WORKFLOWS.statement
def find_broken_runs(limit: int) -> BrokenRun: ...
@WORKFLOWS.statement
def find_paused_runs(
    max_paused_seconds: float, limit: int, excluded: Sequence[str] = NOTHING
) -> PausedRun: ...
@WORKFLOWS.statement
def expire_run(id: str, max_paused_seconds: float, reason: str) -> ExpiredRun: ...
@WORKFLOWS.statement
def delete_old_workflows(hours: float, limit: int) -> RunId: ...


WORKFLOWS.complete()
