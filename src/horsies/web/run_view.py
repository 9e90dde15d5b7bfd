"""Pure functions that prepare a run for its page: boxes of the graph, bars of the timeline, rows of
nodes. They turn the facts of `workflow.run.listing` into words; `run_graph.py` and `run_timeline.py`
draw them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from markupsafe import Markup

from horsies.db.statements.workflows import RunRow, TreeNode
from horsies.states import WORKFLOW_TASK_TERMINAL_STATES, WorkflowStatus
from horsies.web.folding import FOLD_ABOVE, Groups, fold, folded_graph
from horsies.web.layout import Graph, lay_out
from horsies.web.run_graph import Node, Shares, draw_graph
from horsies.web.run_timeline import Span, critical_path, draw_timeline, seconds_since
from horsies.words import elapsed
from horsies.workflow.run.draw import SYMBOLS, draw, node_label, shown_status
from horsies.workflow.run.listing import CloseUp, RunReport

UNFOLD_MAX = 2_000
TIMELINE_ROWS_MAX = 150
_SHOWN_ORDER = (
    *("COMPLETED", "RUNNING", "FAILED", "PAUSED"),
    *("ENQUEUED", "READY", "PENDING", "SKIPPED"),
)
_GROUP_STATUSES = ("FAILED", "RUNNING", "PAUSED", "ENQUEUED", "READY", "PENDING", "SKIPPED")

# The page's address with other query parameters, such as a tab or a node.
Link = Callable[..., str]


@dataclass
class RunView:
    """One run, read at ``now``; ``link`` returns addresses within the page, ``run_url`` addresses of
    other runs.
    """

    facts: CloseUp
    now: datetime
    link: Link
    run_url: Callable[[str], str]

    @property
    def run(self) -> RunRow:
        return self.facts.run

    @cached_property
    def nodes(self) -> list[TreeNode]:
        """The nodes with the statuses to show: PAUSED for nodes that wait because the run is paused."""
        return [
            node._replace(status=shown_status(node, self.run, self.child(node)))
            for node in self.facts.nodes
        ]

    @property
    def status_counts(self) -> list[tuple[str, int]]:
        """The number of nodes per status, in the order of a node's life."""
        counts = Counter({one.status: one.nodes for one in self.facts.counts})
        counts.update(node.status for node in self.nodes)
        return [(status, counts[status]) for status in _SHOWN_ORDER if counts[status]]

    @property
    def is_open(self) -> bool:
        """Whether the run can continue because it has not ended."""
        return not WorkflowStatus(self.run.status).is_terminal

    @property
    def waiting_signals(self) -> list[str]:
        """The names of the signals that this run can still receive."""
        names = {
            node.signal_name: None
            for node in self.nodes
            if node.signal_name and node.status not in WORKFLOW_TASK_TERMINAL_STATES
        }
        return list(names)

    def child(self, node: TreeNode) -> RunRow | None:
        """Return a sub-workflow node's run, if it has started."""
        return self.facts.children.get(node.sub_workflow_id or "")

    @cached_property
    def graph(self) -> Graph:
        """The positions of each node's dependencies."""
        return tuple(tuple(sorted(set(node.dependencies))) for node in self.facts.nodes)

    @cached_property
    def groups(self) -> Groups:
        """The groups of nodes that share a box in the folded graph."""
        return fold(self.graph, tuple(node_label(node) for node in self.facts.nodes))

    def is_folded(self, wanted: str | None) -> bool:
        """Whether the drawing is folded, by its size or by the page's query."""
        size = len(self.graph)
        if wanted == "all":
            return size > UNFOLD_MAX
        return wanted == "folded" or size > FOLD_ABOVE

    @cached_property
    def spans(self) -> list[Span]:
        return [self._span(node) for node in self.nodes]

    @cached_property
    def path(self) -> list[int]:
        return critical_path(self.spans)

    @property
    def path_seconds(self) -> float | None:
        if not self.path:
            return None
        first, last = self.spans[self.path[0]], self.spans[self.path[-1]]
        return (last.ended or 0.0) - (first.begin or 0.0)

    def _span(self, node: TreeNode) -> Span:
        since = self.run.started_at
        waits = node.kind in ("sleep", "signal")
        started = None if waits else node.started_at
        failures = self.facts.retries.get(node.task_id or "", ())
        ended = node.completed_at if node.status != "SKIPPED" else None
        return Span(
            node.node_id,
            node.status,
            seconds_since(since, node.enqueued_at),
            seconds_since(since, started),
            seconds_since(since, ended),
            tuple(node.dependencies),
            tuple(seconds_since(since, at) or 0.0 for at in failures),
            self.link(node=node.task_index),
        )

    # The graph

    def drawing(self, selected: int | None, *, folded: bool) -> Markup:
        title = f"Graph of {self.run.name}"
        description = "The same graph as text follows below the drawing."
        if folded:
            boxes = [self._group(number) for number in range(len(self.groups))]
            layout = lay_out(folded_graph(self.graph, self.groups))
        else:
            boxes = [
                self._node(place, is_selected=place == selected) for place in range(len(self.nodes))
            ]
            layout = lay_out(self.graph)
        return draw_graph(layout, boxes, title, description)

    @cached_property
    def _sources_on_path(self) -> dict[int, str]:
        """The key of the previous node, for each node on the critical path."""
        keys = ["", *(str(place) for place in self.path)]
        return dict(zip(self.path, keys, strict=False))

    def _node(self, place: int, *, is_selected: bool = False) -> Node:
        node = self.nodes[place]
        child = self.child(node)
        note, took = node_note(node, child), node_time(node, self.now)
        code = node.error_code or ""
        parts = [f"{node.node_id}: {node.status}", node_label(node), code, note, took]
        return Node(
            key=str(node.task_index),
            status=node.status,
            name=node.node_id,
            summary=", ".join(dict.fromkeys(part for part in parts if part)),
            href=self.link(node=node.task_index),
            note=note,
            time=took,
            error=code,
            join=join_words(node),
            shares=_shares(node, child),
            open_href=self.run_url(child.id) if child else "",
            is_selected=is_selected,
            is_critical=place in self._sources_on_path,
            critical_source=self._sources_on_path.get(place, ""),
        )

    def _group(self, number: int) -> Node:
        members = [self.nodes[place] for place in self.groups[number]]
        if len(members) == 1:
            return self._node(self.groups[number][0])
        counts = Counter(node.status for node in members)
        labels = {node_label(node) for node in members}
        what = labels.pop() if len(labels) == 1 else f"{len(labels):,} tasks"
        words = count_signs(counts)
        ended = sum(counts[status] for status in WORKFLOW_TASK_TERMINAL_STATES)
        return Node(
            key=f"g{number}",
            status=next((one for one in _GROUP_STATUSES if counts[one]), "COMPLETED"),
            name=f"{len(members):,} × {what}",  # noqa: RUF001
            summary=f"{len(members):,} nodes, {what}: {words}",
            href=self.link(tab="nodes", box=number, node=None),
            note=words,
            shares=Shares(len(members), ended, counts["FAILED"]),
            is_group=True,
        )

    def as_text(self) -> str:
        """Return the text drawing, for screen readers and narrow screens."""
        children = list(self.facts.children.values())
        report = RunReport(self.run, children, {self.run.id: list(self.facts.nodes)})
        _, *lines = draw(report)
        return "\n".join("".join(piece.text for piece in line) for line in lines)

    # The timeline

    def timeline(self) -> Markup:
        """Return bars for the started nodes, in order of their start."""
        places = self.timeline_places
        shown = {place: number for number, place in enumerate(places)}
        path = frozenset(shown[place] for place in self.path if place in shown)
        until = (self.run.completed_at or self.now) - self.run.started_at
        title = f"Timeline of {self.run.name}"
        spans = [self.spans[place] for place in places]
        return draw_timeline(spans, path, until.total_seconds(), title)

    @cached_property
    def timeline_places(self) -> list[int]:
        """The nodes of the timeline; if there are many, only the critical path, failures and the longest
        nodes.
        """
        begun = [place for place, span in enumerate(self.spans) if span.begin is not None]
        if len(begun) > TIMELINE_ROWS_MAX:
            on_path = frozenset(self.path)
            begun.sort(key=lambda place: self._weight(place, on_path), reverse=True)
            begun = begun[:TIMELINE_ROWS_MAX]
        return sorted(begun, key=lambda place: (self.spans[place].begin or 0.0, place))

    @property
    def is_timeline_cut(self) -> bool:
        """Whether the timeline leaves out some of the started nodes."""
        return len(self.timeline_places) == TIMELINE_ROWS_MAX < len(self.nodes)

    def _weight(self, place: int, on_path: frozenset[int]) -> tuple[bool, bool, float, int]:
        span = self.spans[place]
        length = (span.ended or 0.0) - (span.started or 0.0)
        return place in on_path, span.status in ("FAILED", "RUNNING"), length, -place


def count_signs(counts: Mapping[str, int]) -> str:
    """Format counts with the signs of their statuses: "130 ✓ 4 ▶ 3 ✗"."""
    parts = [f"{counts[one]:,} {SYMBOLS.statuses[one]}" for one in _SHOWN_ORDER if counts.get(one)]
    return " ".join(parts)


def join_words(node: TreeNode) -> str:
    """Describe the rule of a join that does not wait for all dependencies."""
    total = len(node.dependencies)
    match node.join_type:
        case "any":
            return f"any of {total}"
        case "quorum":
            return f"{node.min_success} of {total}"
        case _:
            return ""


def node_note(node: TreeNode, child: RunRow | None) -> str:
    """Return a box's second line: counters of a map or child run, retries, or the task."""
    if node.items_total is not None and node.items_open is not None:
        done = f"{node.items_total - node.items_open:,}/{node.items_total:,} items"
        return f"{done}, {node.items_bad:,} ✗" if node.items_bad else done
    if child is not None:
        return f"{child.total_nodes - child.open_nodes:,}/{child.total_nodes:,} nodes"
    if node.retry_count:
        return f"retry {node.retry_count}"
    label = node_label(node)
    return "" if label == node.node_id else label


def node_time(node: TreeNode, now: datetime) -> str:
    """Return a node's running time, or the remaining wait of a sleep or signal."""
    if node.due_at is not None and node.kind in ("sleep", "signal"):
        left = (node.due_at - now).total_seconds()
        return f"≤ {elapsed(left)}" if node.kind == "signal" else f"{elapsed(left)} left"
    return "" if node.duration_seconds is None else elapsed(node.duration_seconds)


def _shares(node: TreeNode, child: RunRow | None) -> Shares | None:
    if node.items_total is not None and node.items_open is not None:
        done = node.items_total - node.items_open
        return Shares(node.items_total, done, node.items_bad or 0)
    if child is not None:
        return Shares(child.total_nodes, child.total_nodes - child.open_nodes, child.failed_nodes)
    return None


def nodes_by_need(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Order nodes for a list: failed nodes, then running nodes, then all others."""
    rank = {"FAILED": 0, "PAUSED": 1, "RUNNING": 2}
    return sorted(nodes, key=lambda node: (rank.get(node.status, 3), node.task_index))
