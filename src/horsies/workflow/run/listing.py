"""Read-only views of workflow runs: one run with its nodes and child runs, and an audit.

Their cost does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from horsies.db.statement import Script
from horsies.db.statements.workflows import (
    BrokenRun,
    ReadTree,
    RunIds,
    RunLimit,
    RunRow,
    TreeNode,
    find_broken_runs,
    read_tree,
    read_tree_nodes,
)
from horsies.error_codes import error_code_text
from horsies.ids import stored_form
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker
from horsies.workflow.run.results import read_error

# A run is shown with at most this many runs of its tree.
FAMILY_MAX = 200

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, the runs below it (parents first), and the nodes of all of them by run id.

    ``is_whole`` is False when the tree is too large to be shown.
    """

    run: RunRow
    below: list[RunRow]
    nodes: dict[str, list[TreeNode]]
    is_whole: bool = True


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
    """Return the findings of an audit as JSON objects."""
    return [{"workflow_id": one.id, "problem": one.problem} for one in problems]
