"""Draws a run's graph as lines of text for a terminal. Pure functions turn nodes into pieces of text
with style names; the caller chooses the colours. A node is drawn below its dominator, which is the last
node on every path to it. Branches are indented; the node that joins them continues at the left and names
its dependencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from heapq import heappop, heappush
from typing import TypeVar

from horsies.db.statements.workflows import RunRow, TreeNode
from horsies.states import WORKFLOW_TASK_TERMINAL_STATES, WorkflowStatus
from horsies.words import elapsed
from horsies.workflow.run.listing import RunReport

# With more branches than this, or more steps in a row, a node's drawing is folded to the notable
# ones.
FOLD_ABOVE = 12
INDENT_MAX = 12
_NOTABLE_MAX = 5
_NAMED_MAX = 3
_NOTABLE = {"FAILED", "RUNNING", "PAUSED"}
_STATUSES = (
    *("COMPLETED", "FAILED", "SKIPPED", "RUNNING"),
    *("PAUSED", "ENQUEUED", "READY", "PENDING"),
)
_RUN = -1

Part = TypeVar("Part", bound=object)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a line and its style: a status, "name", "note", "error" or "frame"."""

    text: str
    style: str = ""


Line = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Symbols:
    """The characters of a drawing."""

    statuses: Mapping[str, str]
    first_branch: str = "┌─ "
    branch: str = "├─ "
    last_branch: str = "└─ "
    rail: str = "│  "
    nest: str = "┊  "
    gap: str = "⋮"
    arrow: str = "←"


SYMBOLS = Symbols(dict(zip(_STATUSES, "✓✗-▶‖◦◦·", strict=True)))
ASCII_SYMBOLS = Symbols(
    dict(zip(_STATUSES, "+x->=oo.", strict=True)),
    first_branch=",- ",
    branch="|- ",
    last_branch="`- ",
    rail="|  ",
    nest=":  ",
    gap=":",
    arrow="<-",
)


def draw(report: RunReport, *, symbols: Symbols = SYMBOLS, fold: bool = True) -> list[Line]:
    """Return a run's title and the lines of its graph, with long repetitions folded.

    Example:
        for line in draw(report):
            print("".join(piece.text for piece in line))
    """
    runs = {run.id: run for run in (report.run, *report.below)}
    drawing = _Drawing(runs, report.nodes, symbols, fold)
    return [_title(report.run, report.nodes[report.run.id]), *drawing.lines(report.run)]


@dataclass(frozen=True, slots=True)
class _Gap:
    """Branches or steps that are counted instead of drawn."""

    count: int
    statuses: Counter[str]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The runs and settings of a drawing."""

    runs: Mapping[str, RunRow]
    nodes: Mapping[str, Sequence[TreeNode]]
    symbols: Symbols
    fold: bool

    def lines(self, run: RunRow, depth: int = 0) -> Iterator[Line]:
        rows = self.nodes.get(run.id, ())
        tree = _Tree(
            [row._replace(status=shown_status(row, run, self._child(row))) for row in rows]
        )
        yield from self._trunk(tree, tree.below[_RUN], depth)

    def _child(self, node: TreeNode) -> RunRow | None:
        return self.runs.get(node.sub_workflow_id or "")

    def _trunk(self, tree: _Tree, starts: Sequence[int], depth: int) -> Iterator[Line]:
        """Draw everything below a node: its branches, the node that joins them, and so on."""
        steps = list(tree.steps(starts, widest=depth >= INDENT_MAX))
        for step in self._fold(steps, lambda step: step.statuses(tree)):
            if isinstance(step, _Gap):
                yield self._gap_line(step, "steps")
                continue
            yield from self._branches(tree, step, depth)
            if step.then is not None:
                yield from self._node_lines(tree, step, depth)

    def _branches(self, tree: _Tree, step: _Step, depth: int) -> Iterator[Line]:
        shown = self._fold(step.branches, tree.statuses)
        for place, branch in enumerate(shown):
            is_last = place == len(shown) - 1 and step.then is None
            head, rail = self.symbols.branch, self.symbols.rail
            if place == 0 and step.after == _RUN:  # The first root has no node above it.
                head = self.symbols.first_branch
            if is_last:
                head, rail = self.symbols.last_branch, " " * len(rail)
            if isinstance(branch, _Gap):
                yield (Piece(head, "frame"), *self._gap_line(branch, "branches"))
                continue
            inside = self._trunk(tree, [branch], depth + 1)
            for number, line in enumerate(inside):
                yield (Piece(rail if number else head, "frame"), *line)

    def _node_lines(self, tree: _Tree, step: _Step, depth: int) -> Iterator[Line]:
        assert step.then is not None
        node = tree.nodes[step.then]
        yield tuple(self._pieces(tree, node, step))
        child = self._child(node)
        if child is not None:
            for line in self.lines(child, depth + 1):
                yield (Piece(self.symbols.nest, "frame"), *line)

    def _pieces(self, tree: _Tree, node: TreeNode, step: _Step) -> Iterator[Piece]:
        yield Piece(f"{self.symbols.statuses.get(node.status, '?')} ", node.status)
        yield Piece(node.node_id, "name")
        label = node_label(node)
        labels = () if label == node.node_id else (label,)
        for note in (*labels, *_notes(node, self._child(node))):
            yield Piece(f"  {note}", "note")
        if node.error_code is not None:
            yield Piece(f"  {node.error_code}", "error")
        if step.branches or list(node.dependencies) not in ([], [step.after]):
            yield Piece(f"  {self.symbols.arrow} {_sources(tree, node)}", "note")

    def _gap_line(self, gap: _Gap, what: str) -> Line:
        counts = " ".join(
            f"{count:,} {self.symbols.statuses.get(status, '?')}"
            for status, count in sorted(
                gap.statuses.items(), key=lambda item: _STATUSES.index(item[0])
            )
        )
        return (Piece(f"{self.symbols.gap} {gap.count:,} more {what}: {counts}", "note"),)

    def _fold(
        self, parts: Sequence[Part], statuses: Callable[[Part], Counter[str]]
    ) -> list[Part | _Gap]:
        """Replace most of a long row with a count; keep its first, last and notable nodes."""
        if not self.fold or len(parts) <= FOLD_ABOVE:
            return list(parts)
        found = [statuses(part) for part in parts]
        notable = [place for place, counts in enumerate(found) if counts.keys() & _NOTABLE]
        kept = {0, 1, len(parts) - 1, *notable[:_NOTABLE_MAX]}
        shown: list[Part | _Gap] = []
        for place, part in enumerate(parts):
            if place in kept:
                shown.append(part)
            elif shown and isinstance(shown[-1], _Gap):
                shown[-1] = _Gap(shown[-1].count + 1, shown[-1].statuses + found[place])
            else:
                shown.append(_Gap(1, found[place]))
        return shown


@dataclass(frozen=True, slots=True)
class _Step:
    """One step down a trunk: the branches that leave it, then the node that continues it. ``after`` is
    the previous node.
    """

    after: int
    branches: Sequence[int]
    then: int | None

    def statuses(self, tree: _Tree) -> Counter[str]:
        counts: Counter[str] = Counter()
        for branch in self.branches:
            counts += tree.statuses(branch)
        if self.then is not None:
            counts[tree.nodes[self.then].status] += 1
        return counts


class _Tree:
    """A graph as a dominator tree: the parent of a node is the last node on every path to it.

    Nodes are identified by position; the run itself is the root.
    """

    def __init__(self, nodes: Sequence[TreeNode]) -> None:
        self.nodes = nodes
        self.above: dict[int, int] = {}
        self.below: dict[int, list[int]] = {place: [] for place in range(_RUN, len(nodes))}
        self._depth = {_RUN: 0}
        self._order = _topological(nodes)
        for place in self._order:
            above = self._last_common(nodes[place].dependencies)
            self.above[place] = above
            self.below[above].append(place)
            self._depth[place] = self._depth[above] + 1
        self._counts: dict[int, Counter[str]] = {}

    def _last_common(self, places: Sequence[int]) -> int:
        """Return the lowest common ancestor of these nodes; return a single node unchanged."""
        found = places[0] if places else _RUN
        for other in places[1:]:
            while found != other:
                deeper = self._depth[found] >= self._depth[other]
                found, other = (self.above[found], other) if deeper else (found, self.above[other])
        return found

    def statuses(self, place: int) -> Counter[str]:
        """Count the statuses of a node and of all nodes below it."""
        if not self._counts:
            for one in reversed(self._order):
                counts = Counter({self.nodes[one].status: 1})
                for lower in self.below[one]:
                    counts += self._counts[lower]
                self._counts[one] = counts
        return self._counts[place]

    def steps(self, starts: Sequence[int], *, widest: bool) -> Iterator[_Step]:
        """Walk down while a single node continues the trunk and joins all its siblings."""
        after = self.above[starts[0]] if starts else _RUN
        lower: Sequence[int] = starts
        while lower:
            then = self._continuation(lower, widest=widest)
            yield _Step(after, [place for place in lower if place != then], then)
            if then is None:
                return
            after, lower = then, self.below[then]

    def _continuation(self, siblings: Sequence[int], *, widest: bool) -> int | None:
        if len(siblings) == 1:
            return siblings[0]
        last = siblings[-1]
        if self._joined_by(last, set(siblings)) == set(siblings) - {last}:
            return last
        if widest:  # More indentation would exceed the width of the window.
            return max(siblings, key=lambda place: self.statuses(place).total())
        return None

    def _joined_by(self, place: int, siblings: set[int]) -> set[int]:
        """Return the siblings whose branches lead to this node, directly or indirectly."""
        joined: set[int] = set()
        waiting = [place]
        while waiting:
            for source in self.nodes[waiting.pop()].dependencies:
                branch = self._branch_of(source, siblings)
                if branch is not None and branch not in joined:
                    joined.add(branch)
                    waiting.append(branch)
        return joined

    def _branch_of(self, place: int, siblings: set[int]) -> int | None:
        while place != _RUN and place not in siblings:
            place = self.above[place]
        return None if place == _RUN else place


def _topological(nodes: Sequence[TreeNode]) -> list[int]:
    """Order nodes after their dependencies, and otherwise by position."""
    open_counts = [len(node.dependencies) for node in nodes]
    dependents: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for source in node.dependencies:
            dependents[source].append(place)
    ready = [place for place, count in enumerate(open_counts) if count == 0]
    order: list[int] = []
    while ready:
        place = heappop(ready)
        order.append(place)
        for dependent in dependents[place]:
            open_counts[dependent] -= 1
            if open_counts[dependent] == 0:
                heappush(ready, dependent)
    return order


def _sources(tree: _Tree, node: TreeNode) -> str:
    names = [tree.nodes[place].node_id for place in node.dependencies]
    text = ", ".join(names) if len(names) <= _NAMED_MAX else f"{len(names):,} nodes"
    match node.join_type:
        case "any":
            return f"any of {text}"
        case "quorum":
            return f"{node.min_success} of {text}"
        case _:
            return text


def _title(run: RunRow, rows: Sequence[TreeNode]) -> Line:
    ended = sum(row.status in WORKFLOW_TASK_TERMINAL_STATES for row in rows)
    return (
        Piece(run.name, "name"),
        Piece(f"  {run.id}  ", "note"),
        Piece(run.status, run.status),
        Piece(f"  {ended:,} of {run.total_nodes:,} nodes ended", "note"),
        Piece(f"  {elapsed(run.duration_seconds)}", "note"),
    )


def shown_status(row: TreeNode, run: RunRow, child: RunRow | None) -> str:
    """Return the status to show: PAUSED for a node that waits because its run is paused."""
    run_of_task = child if row.status == "RUNNING" else run
    is_paused = run_of_task is not None and run_of_task.status == WorkflowStatus.PAUSED
    return "PAUSED" if is_paused and row.status in ("ENQUEUED", "READY", "RUNNING") else row.status


def node_label(row: TreeNode) -> str:
    """Return a node's task name, or its kind with its most relevant name."""
    match row.kind:
        case "workflow":
            return f"workflow {row.sub_workflow_name}"
        case "map":
            return f"map of {row.task_name}"
        case "signal":
            return f"signal {row.signal_name}"
        case "sleep":
            return "sleep"
        case _:
            return row.task_name


def _notes(row: TreeNode, child: RunRow | None) -> Iterator[str]:
    if row.items_total is not None and row.items_open is not None:
        yield f"{row.items_total - row.items_open:,}/{row.items_total:,}"
        if row.items_bad:
            yield f"{row.items_bad:,} failed"
    if child is not None and child.status == WorkflowStatus.PAUSED:
        yield "paused"
    if row.kind in ("sleep", "signal") and row.due_at is not None:
        yield f"until {row.due_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if row.retry_count:
        yield f"retry {row.retry_count}"
    if row.duration_seconds is not None:
        yield elapsed(row.duration_seconds)
