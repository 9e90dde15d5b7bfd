"""Workflow pages: the list of runs, and one run as a graph, a timeline or a table of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

from horsies.db.statements.workflows import BrokenRun, MapItem, TreeNode
from horsies.error_codes import error_code_text
from horsies.monitor.action_log import list_actions_script
from horsies.monitor.queries import RunFilters, run_filters, runs_script
from horsies.result import Err
from horsies.states import WorkflowStatus
from horsies.web.filters import texts_of, time_of
from horsies.web.folding import FOLD_ABOVE
from horsies.web.reading import BadRequest, NotFound, TookTooLong
from horsies.web.rendering import Page, Route, View
from horsies.web.run_graph import progress_bar
from horsies.web.run_view import UNFOLD_MAX, RunView, nodes_by_need
from horsies.workflow.run.draw import node_label
from horsies.workflow.run.listing import (
    ITEMS_PER_PAGE,
    close_up_script,
    items_script,
    problems_script,
)
from horsies.workflow.run.results import read_error

RUNS_PER_PAGE = 50
NODES_PER_PAGE = 100
CHANGES_SHOWN = 10
# The number of boxes above which a graph is first scaled to the page.
FIT_ABOVE = 60
TABS = ("graph", "timeline", "nodes")
PERIODS = ("1h", "1d", "7d")
OPEN = tuple(status.value for status in WorkflowStatus if not status.is_terminal)


# The list of runs


async def runs_page(view: View) -> Page:
    filters = _filters(view)
    page = await view.read(runs_script(filters))
    if page is None:
        raise NotFound(f"No workflow run has the id {filters.after}; go back to the first page.")
    context = {
        "runs": page,
        "statuses": [status.value for status in WorkflowStatus],
        "chosen": view.query.getlist("status"),
        "periods": PERIODS,
        "progress_bar": progress_bar,
        "next_url": link_to(view, after=page.next_cursor) if page.next_cursor else None,
        "has_filter": any(value for name, value in view.query.items() if name != "after"),
    }
    return Page("runs.html", "Workflows", context)


def _filters(view: View) -> RunFilters:
    query = view.query
    statuses = [
        one for name in texts_of(view, "status") for one in (OPEN if name == "open" else (name,))
    ]
    checked = run_filters(
        status=statuses or None,
        name=query.get("name") or None,
        workflow_key=query.get("key") or None,
        since=time_of(view, "since"),
        include_children=bool(query.get("parts")),
        limit=RUNS_PER_PAGE,
        after=query.get("after") or None,
    )
    if isinstance(checked, Err):
        raise BadRequest(checked.err_value.message)
    return checked.value


def link_to(view: View, **changes: object) -> str:
    """Return this page's relative address with other query parameters; None removes a parameter. A
    drawing has hundreds of such addresses, so short ones matter.
    """
    kept = [(name, value) for name, value in view.query.multi_items() if name not in changes]
    added = [(name, str(value)) for name, value in changes.items() if value is not None]
    return f"?{urlencode(kept + added)}"


# One run


async def run_page(view: View) -> Page:
    run_id, tab = view.params["id"], view.query.get("tab", "graph")
    if tab not in TABS:
        raise BadRequest(f"tab must be one of {', '.join(TABS)}, not {tab!r}.")
    facts = await view.read(close_up_script(run_id, with_retries=tab == "timeline"))
    if facts is None:
        link = f"/workflows/{run_id}/explain"
        raise NotFound(f"There is no workflow run {run_id}.", explained_at=link)
    now = facts.run.started_at + timedelta(seconds=facts.run.duration_seconds)
    shown = RunView(
        facts,
        now,
        lambda **changes: link_to(view, items=None, **changes),
        lambda other: view.url(f"/workflows/{quote(other)}"),
    )
    selected = _selected(view, shown.nodes)
    context = {
        "view": shown,
        "run": facts.run,
        "error": _error(facts.run.error),
        "bar": progress_bar(
            facts.run.total_nodes,
            facts.run.total_nodes - facts.run.open_nodes,
            facts.run.failed_nodes,
        ),
        "problems": await _problems(view, shown),
        "changes": await view.read(list_actions_script(f"run {facts.run.id}", limit=CHANGES_SHOWN)),
        "tab": tab,
        "tabs": [(name, link_to(view, tab=name, page=None, box=None)) for name in TABS],
        "selected": selected,
        "close_url": link_to(view, node=None, items=None),
        "node_url": None if selected is None else _node_url(view, facts.run.id, selected.node_id),
        "label": None if selected is None else node_label(selected),
        **await _items(view, facts.run.id, selected),
        **_tab_context(view, shown, tab, selected),
    }
    return Page("run.html", f"Workflow {facts.run.name}", context, 1.0 if shown.is_open else None)


def _tab_context(view: View, shown: RunView, tab: str, selected: TreeNode | None) -> dict[str, Any]:
    if shown.facts.is_too_large or tab == "timeline":
        return {}
    if tab == "nodes":
        return _nodes_context(view, shown)
    is_folded = shown.is_folded(view.query.get("boxes"))
    place = None if selected is None else shown.nodes.index(selected)
    return {
        "drawing": shown.drawing(place, folded=is_folded),
        "is_folded": is_folded,
        "fold_url": link_to(view, boxes="folded" if len(shown.graph) <= FOLD_ABOVE else None),
        "unfold_url": link_to(view, boxes="all" if len(shown.graph) > FOLD_ABOVE else None),
        "can_unfold": len(shown.graph) <= UNFOLD_MAX,
        "can_fold": 12 < len(shown.graph) <= UNFOLD_MAX,
        **_zoom_context(view, shown, len(shown.groups) if is_folded else len(shown.nodes)),
    }


def _zoom_context(view: View, shown: RunView, boxes: int) -> dict[str, Any]:
    """Return the zoom of the drawing: from the query, or scaled to the page for a large drawing."""
    is_large = boxes > FIT_ABOVE
    is_fit = view.query.get("zoom", "fit" if is_large else "full") == "fit"
    failed = next((node for node in shown.nodes if node.status == "FAILED"), None)
    return {
        "is_fit": is_fit,
        "fit_url": link_to(view, zoom=None if is_large else "fit"),
        "full_url": link_to(view, zoom="full" if is_large else None),
        "failed_url": None if failed is None else link_to(view, node=failed.task_index, items=None),
    }


def _nodes_context(view: View, shown: RunView) -> dict[str, Any]:
    nodes: Sequence[TreeNode] = shown.nodes
    box = _whole_number(view, "box")
    if box is not None and box < len(shown.groups):
        nodes = [shown.nodes[place] for place in shown.groups[box]]
    nodes = nodes_by_need(nodes)
    number = _whole_number(view, "page") or 0
    first = number * NODES_PER_PAGE
    return {
        "rows": nodes[first : first + NODES_PER_PAGE],
        "row_total": len(nodes),
        "row_first": first,
        "box": box,
        "label_of": node_label,
        "row_previous": link_to(view, page=number - 1) if number else None,
        "row_next": link_to(view, page=number + 1) if first + NODES_PER_PAGE < len(nodes) else None,
        "all_url": link_to(view, box=None, page=None),
    }


def _whole_number(view: View, name: str) -> int | None:
    value = view.query.get(name)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise BadRequest(f"{name} must be a whole number, not {value!r}.")
    return int(value)


def _selected(view: View, nodes: Sequence[TreeNode]) -> TreeNode | None:
    index = _whole_number(view, "node")
    if index is None:
        return None
    found = next((node for node in nodes if node.task_index == index), None)
    if found is None and nodes:
        raise NotFound(f"This run has no node {index}; its nodes are 0 to {len(nodes) - 1}.")
    return found


def _node_url(view: View, run_id: str, node_id: str) -> str:
    return view.url(f"/workflows/{run_id}/nodes/{quote(node_id, safe='')}/explain")


def _error(stored: str | None) -> tuple[str, str] | None:
    """Return the code and the message of a run's error."""
    error = read_error(stored)
    return None if error is None else (error_code_text(error.error_code) or "", error.message or "")


async def _problems(view: View, shown: RunView) -> list[BrokenRun]:
    """Return the audit's findings; a run that is too large for a page is audited only by the command
    line.
    """
    if not shown.is_open:
        return []
    try:
        return await view.read(problems_script(shown.run.id))
    except TookTooLong:
        return []


async def _items(view: View, run_id: str, selected: TreeNode | None) -> dict[str, Any]:
    if selected is None or selected.kind != "map":
        return {"items": None}
    try:
        found = await view.read(items_script(run_id, selected.task_index, _item_position(view)))
    except TookTooLong as problem:
        return {"items": [], "items_note": problem.sentence, "items_next": None}
    shown, more = found[:ITEMS_PER_PAGE], len(found) > ITEMS_PER_PAGE
    following = link_to(view, items=_item_cursor(shown[-1])) if more else None
    return {"items": shown, "items_note": None, "items_next": following}


def _item_cursor(item: MapItem) -> str:
    return f"{'well' if item.is_well else 'bad'}-{item.item_index}"


def _item_position(view: View) -> tuple[bool, int] | None:
    cursor = view.query.get("items")
    if not cursor:
        return None
    kind, _, number = cursor.partition("-")
    if kind not in ("well", "bad") or not number.isdigit() or len(number) > 9:
        raise BadRequest(f"items must come from the link to the next items, not {cursor!r}.")
    return kind == "well", int(number)


ROUTES: tuple[Route, ...] = (
    Route("GET", "/workflows", None, runs_page),
    Route("GET", "/workflows/{id}", None, run_page),
)
