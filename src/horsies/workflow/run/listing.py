"""Read-only views of workflow runs: a run with its whole tree, one run for a page, and an audit. The
cost does not depend on the number of stored runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from horsies.db.statement import Script, read_rows
from horsies.db.statements.workflows import (
    BrokenRun,
    MapItem,
    NodeCount,
    RetriedAttempt,
    RunRow,
    TreeNode,
    count_nodes_by_status,
    find_broken_runs,
    find_run_problems,
    list_map_items,
    list_retried_attempts,
    read_tree,
    read_tree_nodes,
)
from horsies.error_codes import error_code_text
from horsies.ids import stored_form
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker
from horsies.workflow.run.results import read_error

# The maximum number of runs of a tree to show.
FAMILY_MAX = 200
# The nodes of larger runs are counted instead of read: reading 5,000 nodes and their tasks takes
# about 50 ms.
NODES_MAX = 10_000
ITEMS_PER_PAGE = 100
PROBLEMS_MAX = 20
_RETRIED_MAX = 300
_NOTCHES_MAX = 2_000

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, the runs below it (parents first), and the nodes of all these runs by run id.

    ``is_whole`` is False if the tree is too large to show.
    """

    run: RunRow
    below: list[RunRow]
    nodes: dict[str, list[TreeNode]]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class CloseUp:
    """A run with its nodes in order; ``children`` are the runs below it by id, without their nodes.

    ``retries`` has the times of failed attempts by task id. For a run with too many nodes, ``nodes`` is
    empty and ``counts`` has the number of nodes by status.
    """

    run: RunRow
    children: Mapping[str, RunRow]
    nodes: Sequence[TreeNode] = ()
    retries: Mapping[str, Sequence[datetime]] = field(default_factory=dict)
    counts: Sequence[NodeCount] = ()

    @property
    def is_too_large(self) -> bool:
        return self.run.total_nodes > NODES_MAX


def read_run(broker: PostgresBroker, workflow_id: str) -> BrokerResult[RunReport | None]:
    """Describe one run with its nodes and the runs below it, or return None if it does not exist."""
    return broker.perform(_READING, report_script(workflow_id))


def report_script(workflow_id: str) -> Script[RunReport | None]:
    found = yield from _tree_script(workflow_id)
    if found is None:
        return None
    run, family = found
    shown = family[:FAMILY_MAX]
    rows: list[TreeNode] = yield read_tree_nodes([one.id for one in shown])
    nodes: dict[str, list[TreeNode]] = {one.id: [] for one in shown}
    for row in rows:
        nodes[row.workflow_id].append(row)
    below = [one for one in shown if one is not run]
    return RunReport(run, below, nodes, is_whole=len(family) <= FAMILY_MAX)


def close_up_script(workflow_id: str, *, with_retries: bool = False) -> Script[CloseUp | None]:
    """Read one run; return None if it does not exist."""
    found = yield from _tree_script(workflow_id)
    if found is None:
        return None
    run, family = found
    children = {one.id: one for one in family if one is not run}
    if run.total_nodes > NODES_MAX:
        counts: list[NodeCount] = yield count_nodes_by_status(run.id)
        return CloseUp(run, children, counts=counts)
    nodes: list[TreeNode] = yield read_tree_nodes([run.id])
    retries: dict[str, list[datetime]] = {}
    retried = [node.task_id for node in nodes if node.task_id and node.retry_count]
    if with_retries and retried:
        wanted = list_retried_attempts(retried[:_RETRIED_MAX], _NOTCHES_MAX)
        attempts: list[RetriedAttempt] = yield wanted
        for attempt in attempts:
            retries.setdefault(attempt.task_id, []).append(attempt.finished_at)
    return CloseUp(run, children, nodes, retries)


def _tree_script(workflow_id: str) -> Script[tuple[RunRow, list[RunRow]] | None]:
    """Read a run and its tree, including one run beyond the limit; return None if the run does not
    exist.
    """
    if (stored := stored_form(workflow_id)) is None:
        return None
    family: list[RunRow] = yield read_tree(stored, FAMILY_MAX + 1)
    run = next((one for one in family if one.id == stored), None)
    return None if run is None else (run, family)


def items_script(
    workflow_id: str, task_index: int, after: tuple[bool, int] | None
) -> Script[list[MapItem]]:
    """Read one page of a map's items, plus the first item of the next page."""
    is_well, item_index = after or (False, -1)
    page = list_map_items(workflow_id, task_index, is_well, item_index, ITEMS_PER_PAGE + 1)
    return read_rows(page)


def problems_script(workflow_id: str) -> Script[list[BrokenRun]]:
    """Compare the rows of one open run, as the audit does for all runs."""
    return read_rows(find_run_problems(workflow_id, PROBLEMS_MAX))


def audit(broker: PostgresBroker, limit: int) -> BrokerResult[list[BrokenRun]]:
    """Return the blocked tasks of open runs, and the inconsistencies that only manual edits can cause."""
    return broker.perform(_READING, read_rows(find_broken_runs(limit)))


def report_document(report: RunReport) -> dict[str, Any]:
    """Return a run, its nodes and the runs below it as a JSON object."""
    return {
        **_run_document(report.run, report),
        "below": [_run_document(run, report) for run in report.below],
        "is_whole": report.is_whole,
    }


def _run_document(run: RunRow, report: RunReport) -> dict[str, Any]:
    document = run._asdict()
    error = read_error(document.pop("error"))
    document["error_code"] = None if error is None else error_code_text(error.error_code)
    document["error_message"] = None if error is None else error.message
    return document | {"nodes": [node._asdict() for node in report.nodes[run.id]]}


def problems_document(problems: Iterable[BrokenRun]) -> list[dict[str, Any]]:
    """Return an audit's findings as JSON objects."""
    return [{"workflow_id": one.id, "problem": one.problem} for one in problems]
