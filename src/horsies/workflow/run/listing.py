"""Lists of runs, and the report of one run with all runs below it.

Reads only, at a price that does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

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

# How many of the newest runs a list looks at, and how many of one family are shown.
LIST_WINDOW = 50_000
FAMILY_MAX = 200

_FIRST_MOMENT = datetime(1, 1, 2, tzinfo=UTC)
_LAST = RunPosition("ffffffff-ffff-ffff-ffff-ffffffffffff", datetime(9999, 12, 30, tzinfo=UTC))
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class RunFilters:
    """Which runs to list: one of the values in each dimension that has any, and since when."""

    statuses: Sequence[WorkflowStatus] = ()
    names: Sequence[str] = ()
    workflow_keys: Sequence[str] = ()
    since: datetime | None = None
    before: str | None = None
    include_children: bool = False
    limit: int = 20


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, newest first.

    ``next_before`` is where to go on, None at the end. ``looked_at_all`` is False when the look ended
    before as many runs were found as asked for. ``unknown_before`` says that there is no run to go on
    behind.
    """

    runs: list[RunSummary]
    next_before: str | None = None
    looked_at_all: bool = True
    unknown_before: bool = False


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, the runs below it parents first, and the nodes of them all by the id of their run.

    ``is_whole`` is False when the family is too large to be shown.
    """

    run: RunRow
    below: list[RunRow]
    nodes: dict[str, list[TreeNode]]
    is_whole: bool = True


def list_runs(broker: PostgresBroker, filters: RunFilters) -> BrokerResult[RunPage]:
    """List runs, newest first; those below others only with ``include_children``.

    Runs that have not ended are found however old they are. Other filters look at the newest 50,000
    runs; ``next_before`` leads further back.
    """
    return broker.perform(_READING, _list_script(filters))


def _list_script(filters: RunFilters) -> Script[RunPage]:
    before = yield from _place_script(filters.before)
    if before is None:
        return RunPage([], unknown_before=True)
    opened = [status.value for status in filters.statuses if not status.is_terminal]
    ended = [status.value for status in filters.statuses if status.is_terminal]
    found: list[RunSummary] = []
    edge: RunPosition | None = None
    if opened:
        found += yield list_open_runs, _asked(filters, before, opened)
    if ended or not opened:
        newest, edge = yield from _newest_script(filters, before, ended)
        found += newest
    return _page(found, filters.limit, edge)


def _place_script(before: str | None) -> Script[RunPosition | None]:
    """Find the place in the list that a page begins behind."""
    if before is None:
        return _LAST
    if (stored := stored_form(before)) is None:
        return None
    return one_or_none((yield read_run_position, RunId(stored)))


def _newest_script(
    filters: RunFilters, before: RunPosition, statuses: Sequence[str]
) -> Script[tuple[list[RunSummary], RunPosition | None]]:
    """Look through the newest runs; return what was found and where the look ended too early."""
    asked = _asked(filters, before, statuses)
    bounded = ListNewestRuns(
        asked.before_at,
        asked.before_id,
        asked.since,
        asked.statuses,
        asked.names,
        asked.workflow_keys,
        asked.include_children,
        asked.limit,
        LIST_WINDOW,
    )
    newest: list[RunSummary] = yield list_newest_runs, bounded
    if len(newest) == filters.limit:
        return newest, None
    window = RunWindow(asked.before_at, asked.before_id, asked.since, LIST_WINDOW)
    edge: list[RunPosition] = yield end_of_run_window, window
    return newest, edge[0] if len(edge) == 2 else None


def _asked(filters: RunFilters, before: RunPosition, statuses: Sequence[str]) -> ListRuns:
    return ListRuns(
        before_at=before.created_at,
        before_id=before.id,
        since=filters.since or _FIRST_MOMENT,
        statuses=list(statuses),
        names=list(filters.names),
        workflow_keys=list(filters.workflow_keys),
        include_children=filters.include_children,
        limit=filters.limit,
    )


def _page(found: list[RunSummary], limit: int, edge: RunPosition | None) -> RunPage:
    # What lies beyond the end of the look belongs to a later page, or that page would repeat it.
    within = [
        run
        for run in found
        if edge is None or (run.created_at, run.id) >= (edge.created_at, edge.id)
    ]
    runs = sorted(within, key=lambda run: (run.created_at, run.id), reverse=True)[:limit]
    if len(runs) == limit:
        return RunPage(runs, runs[-1].id)
    return RunPage(runs, None if edge is None else edge.id, edge is None)


def read_run(broker: PostgresBroker, workflow_id: str) -> BrokerResult[RunReport | None]:
    """Describe one run with its nodes and all that is below it; None: no such run."""
    return broker.perform(_READING, report_script(workflow_id))


def report_script(workflow_id: str) -> Script[RunReport | None]:
    """Read a run, its family and all of their nodes."""
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
    """Return what does not add up in open runs; it never happens by itself."""
    return broker.perform(_READING, _audit_script(limit))


def _audit_script(limit: int) -> Script[list[BrokenRun]]:
    rows: list[BrokenRun] = yield find_broken_runs, RunLimit(limit)
    return rows
