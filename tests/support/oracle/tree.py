"""A tree of runs in memory: the values on which the oracle's rules operate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.oracle.shapes import NodeShape, RunShape, node_id

OPEN_RUN = frozenset({"RUNNING", "PAUSED"})
ENDED_NODE = frozenset({"COMPLETED", "FAILED", "SKIPPED"})
OPEN_WORK = frozenset({"PENDING", "CLAIMED", "RUNNING"})

Result = dict[str, Any]
# The key of a task: its run, its node, and the item of a map.
Place = tuple[str, int, int | None]
NOTHING_YET: Any = object()


def failure(code: str, **more: Any) -> Result:
    """Return the result of a failure that the library reports; its wording is not compared."""
    return {"err": {"error_code": {"__builtin_task_code__": code}, "data": None, **more}}


@dataclass(slots=True, eq=False)
class Work:
    """The facts about a task that matter for graphs."""

    state: str = "PENDING"
    result: Result | None = None
    # Whether the task waits for a place among ``max_parallel``.
    parked: bool = False
    # The value of a signal, once it has arrived.
    value: Any = NOTHING_YET

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_WORK

    def outcome(self) -> Result:
        """Return the result, or a substitute for a missing result."""
        if self.result is not None:
            return self.result
        return failure({"CANCELLED": "TASK_CANCELLED", "EXPIRED": "TASK_EXPIRED"}[self.state])


@dataclass(slots=True, eq=False)
class Node:
    run: Run
    index: int
    shape: NodeShape
    status: str = "PENDING"
    # Whether the node's outcome has reached its dependents and its run.
    counted: bool = False
    work: Work | None = None
    # For a map: its length, the items that have a task, and the items that wait for a place.
    total: int = 0
    items: list[Work] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    child: Run | None = None
    summary: dict[str, Any] | None = None
    result: Result | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED_NODE

    def end(self, status: str, result: Result | None) -> None:
        self.status, self.result = status, result

    def shown_result(self) -> Result | None:
        """Return the result that other nodes see."""
        if self.status == "SKIPPED":
            return failure("UPSTREAM_SKIPPED", data={"dependency_index": self.index})
        return self.result if self.has_ended else None


@dataclass(slots=True, eq=False)
class Run:
    id: str
    shape: RunShape
    parent: Node | None = None
    status: str = "RUNNING"
    error: dict[str, Any] | None = None
    matched_case: int | None = None
    nodes: list[Node] = field(default_factory=list)
    children: list[Run] = field(default_factory=list)
    stored_signals: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_RUN

    def family(self) -> list[Run]:
        """Return this run and all runs below it."""
        return [self, *(run for child in self.children for run in child.family())]

    def tree(self) -> list[Run]:
        """Return this run and the open runs below it, without runs below an ended run."""
        going_on = (child for child in self.children if child.is_open)
        return [self, *(run for child in going_on for run in child.tree())]

    def unfailed_tree(self) -> list[Run]:
        """Return ``tree`` without failed runs that wait for a decision."""
        going_on = (child for child in self.children if child.is_open and not child.is_stuck)
        return [self, *(run for child in going_on for run in child.unfailed_tree())]

    @property
    def is_stuck(self) -> bool:
        return any(n.status == "FAILED" and self.shape.pauses(n.index) for n in self.uncounted())

    def works(self) -> Iterable[Work]:
        """Return the tasks of the run's nodes."""
        for node in self.nodes:
            if node.work is not None:
                yield node.work
            yield from node.items

    def uncounted(self) -> list[Node]:
        return [node for node in self.nodes if not node.counted]

    def result(self) -> Result | None:
        """Return the result that a waiter receives."""
        if self.status != "COMPLETED":
            return None
        if self.shape.output is not None:
            return self.nodes[self.shape.output].shown_result()
        sinks = [n for n in self.nodes if not self.shape.dependents[n.index]]
        return {"ok": {node_id(node.index): node.shown_result() for node in sinks}}

    def summary(self) -> dict[str, Any]:
        """Return the result that the parent stores."""
        statuses = [node.status for node in self.nodes]
        return {
            "status": self.status,
            "total_tasks": len(statuses),
            "completed_tasks": statuses.count("COMPLETED"),
            "failed_tasks": statuses.count("FAILED"),
            "skipped_tasks": statuses.count("SKIPPED"),
        }


@dataclass(frozen=True, slots=True)
class End:
    """The outcome of one task. A successful expansion requests a run with this id and shape."""

    place: Place
    state: str
    result: Result | None = None
    child_id: str | None = None
    child: RunShape | None = None
