"""One run for a page: its nodes, the runs below its nodes, retries, items of a map, and problems.

Unlike the whole tree of `listing.py`, the nodes of child runs are not read: a page shows a child run as
one box and links to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from horsies.db.statement import Script
from horsies.db.statements.workflows import (
    BrokenRun,
    FindProblems,
    ListAttempts,
    ListItems,
    MapItem,
    NodeCount,
    ReadTree,
    RetriedAttempt,
    RunId,
    RunIds,
    RunRow,
    TreeNode,
    count_nodes_by_status,
    find_run_problems,
    list_map_items,
    list_retried_attempts,
    read_tree,
    read_tree_nodes,
)
from horsies.ids import stored_form
from horsies.workflow.run.listing import FAMILY_MAX

# The nodes of larger runs are counted, not read: 5,000 nodes take about 50 ms, their tasks included.
NODES_MAX = 10_000
ITEMS_PER_PAGE = 100
PROBLEMS_MAX = 20
_RETRIED_MAX = 300
_NOTCHES_MAX = 2_000


@dataclass(frozen=True, slots=True)
class CloseUp:
    """A run with its nodes in order; ``children`` are the runs below it by id.

    ``retries`` are the times of failed attempts by task id. A run with too many nodes has none here,
    but ``counts`` of them by status.
    """

    run: RunRow
    children: Mapping[str, RunRow]
    nodes: Sequence[TreeNode] = ()
    retries: Mapping[str, Sequence[datetime]] = field(default_factory=dict)
    counts: Sequence[NodeCount] = ()

    @property
    def is_too_large(self) -> bool:
        return self.run.total_nodes > NODES_MAX


def close_up_script(workflow_id: str, *, with_retries: bool = False) -> Script[CloseUp | None]:
    """Read one run; None if it does not exist."""
    if (stored := stored_form(workflow_id)) is None:
        return None
    family: list[RunRow] = yield read_tree, ReadTree(stored, FAMILY_MAX + 1)
    run = next((one for one in family if one.id == stored), None)
    if run is None:
        return None
    children = {one.id: one for one in family if one is not run}
    if run.total_nodes > NODES_MAX:
        counts: list[NodeCount] = yield count_nodes_by_status, RunId(stored)
        return CloseUp(run, children, counts=counts)
    nodes: list[TreeNode] = yield read_tree_nodes, RunIds([stored])
    retries: dict[str, list[datetime]] = {}
    retried = [node.task_id for node in nodes if node.task_id and node.retry_count]
    if with_retries and retried:
        wanted = ListAttempts(retried[:_RETRIED_MAX], _NOTCHES_MAX)
        attempts: list[RetriedAttempt] = yield list_retried_attempts, wanted
        for attempt in attempts:
            retries.setdefault(attempt.task_id, []).append(attempt.finished_at)
    return CloseUp(run, children, nodes, retries)


def items_script(
    workflow_id: str, task_index: int, after: tuple[bool, int] | None
) -> Script[list[MapItem]]:
    """Read one page of the items of a map, and one item more if there are more."""
    is_well, item_index = after or (False, -1)
    page = ListItems(workflow_id, task_index, is_well, item_index, ITEMS_PER_PAGE + 1)
    items: list[MapItem] = yield list_map_items, page
    return items


def problems_script(workflow_id: str) -> Script[list[BrokenRun]]:
    """Compare the rows of one open run, as the audit of all runs does."""
    problems: list[BrokenRun] = yield find_run_problems, FindProblems(workflow_id, PROBLEMS_MAX)
    return problems
