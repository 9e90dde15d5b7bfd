"""Read-only views of workflow runs: lists, and one run with its nodes and child runs.

Their cost does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter

from horsies.db import paging
from horsies.db.paging import ListSteps, Page, page_script
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.workflows import (
    BrokenRun,
    ListNewestRuns,
    ListRuns,
    ReadTree,
    RunId,
    RunIds,
    RunLimit,
    RunPosition,
    RunRow,
    RunSummary,
    RunWindow,
    TreeNode,
    end_of_run_window,
    find_broken_runs,
    list_newest_runs,
    list_open_runs,
    read_run_position,
    read_tree,
    read_tree_nodes,
)
from horsies.ids import stored_form
from horsies.states import WorkflowStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker

# A run is shown with at most this many runs of its tree.
FAMILY_MAX = 200

_FIRST_TIME = datetime(1, 1, 2, tzinfo=UTC)
_LAST = RunPosition("ffffffff-ffff-ffff-ffff-ffffffffffff", datetime(9999, 12, 30, tzinfo=UTC))
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class RunFilters:
    """Which runs to list. An empty dimension matches every run; otherwise any of its values does."""

    statuses: Sequence[WorkflowStatus] = ()
    names: Sequence[str] = ()
    workflow_keys: Sequence[str] = ()
    since: datetime | None = None
    before: str | None = None
    include_children: bool = False
    limit: int = 20


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, the runs below it (parents first), and the nodes of all of them by run id.

    ``is_whole`` is False when the tree is too large to be shown.
    """

    run: RunRow
    below: list[RunRow]
    nodes: dict[str, list[TreeNode]]
    is_whole: bool = True


def list_runs(broker: PostgresBroker, filters: RunFilters) -> BrokerResult[Page[RunSummary] | None]:
    """List runs, newest first; None when there is no run ``before``.

    Unfinished runs are found at any age. Other filters look at the newest 50,000 runs;
    ``next_before`` leads further back.
    """
    return broker.perform(_READING, _list_script(filters))


def _list_script(filters: RunFilters) -> Script[Page[RunSummary] | None]:
    before: RunPosition | None = _LAST
    if filters.before is not None:
        stored = stored_form(filters.before)
        before = one_or_none((yield read_run_position, RunId(stored))) if stored else None
    if before is None:
        return None
    return (yield from page_script(_list_steps(filters, before), filters.statuses, filters.limit))


def _list_steps(filters: RunFilters, before: RunPosition) -> ListSteps:
    since, window = filters.since or _FIRST_TIME, paging.LIST_WINDOW

    def parameters(statuses: list[str]) -> ListRuns:
        return ListRuns(
            before_at=before.created_at,
            before_id=before.id,
            since=since,
            statuses=statuses,
            names=list(filters.names),
            workflow_keys=list(filters.workflow_keys),
            include_children=filters.include_children,
            limit=filters.limit,
        )

    return ListSteps(
        unfinished=lambda statuses: (list_open_runs, parameters(statuses)),
        newest=lambda statuses: (
            list_newest_runs,
            ListNewestRuns(*parameters(statuses), window=window),
        ),
        window_edge=(end_of_run_window, RunWindow(before.created_at, before.id, since, window)),
        position=attrgetter("created_at", "id"),
    )


def read_run(broker: PostgresBroker, workflow_id: str) -> BrokerResult[RunReport | None]:
    """Describe one run with its nodes and the runs below it, or return None if it does not exist."""
    return broker.perform(_READING, report_script(workflow_id))


def report_script(workflow_id: str) -> Script[RunReport | None]:
    if (stored := stored_form(workflow_id)) is None:
        return None
    family: list[RunRow] = yield read_tree, ReadTree(stored, FAMILY_MAX + 1)
    run = next((one for one in family if one.id == stored), None)
    if run is None:
        return None
    shown = family[:FAMILY_MAX]
    rows: list[TreeNode] = yield read_tree_nodes, RunIds([one.id for one in shown])
    nodes: dict[str, list[TreeNode]] = {one.id: [] for one in shown}
    for row in rows:
        nodes[row.workflow_id].append(row)
    below = [one for one in shown if one is not run]
    return RunReport(run, below, nodes, is_whole=len(family) <= FAMILY_MAX)


def audit(broker: PostgresBroker, limit: int) -> BrokerResult[list[BrokenRun]]:
    """Return the inconsistencies of open runs, which only manual edits cause, and their blocked tasks."""
    return broker.perform(_READING, _audit_script(limit))


def _audit_script(limit: int) -> Script[list[BrokenRun]]:
    rows: list[BrokenRun] = yield find_broken_runs, RunLimit(limit)
    return rows
