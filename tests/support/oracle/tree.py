"""A tree of runs in memory: the values the oracle's rules work on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.oracle.shapes import NodeShape, RunShape, node_id

OPEN_RUN = frozenset({"RUNNING", "PAUSED"})
ENDED_NODE = frozenset({"COMPLETED", "FAILED", "SKIPPED"})
OPEN_WORK = frozenset({"PENDING", "CLAIMED", "RUNNING"})

Result = dict[str, Any]
# A task: its run, its node, and which item of a map.
Place = tuple[str, int, int | None]
NOTHING_YET: Any = object()


def failure(code: str, **more: Any) -> Result:
    """Return the result for a failure that the library itself reports; its wording is not compared."""
    return {"err": {"error_code": {"__builtin_task_code__": code}, "data": None, **more}}


@dataclass(slots=True, eq=False)
class Work:
    """A task, as far as graphs are concerned."""

    state: str = "PENDING"
    result: Result | None = None
    # The task waits for a place among ``max_parallel``.
    parked: bool = False
    # The value of a signal, once it has arrived.
    value: Any = NOTHING_YET

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_WORK

    def outcome(self) -> Result:
        """Return the result, or the substitute for a missing one."""
        if self.result is not None:
            return self.result
        return failure({"CANCELLED": "TASK_CANCELLED", "EXPIRED": "TASK_EXPIRED"}[self.state])


@dataclass(slots=True, eq=False)
class Node:
    run: Run
    index: int
    shape: NodeShape
    status: str = "PENDING"
    # Whether the node's end has reached its dependents and its run.
    counted: bool = False
    work: Work | None = None
    # Of a map: its length, the items that have had a task, and the places that wait for one.
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
        """Return the result as other nodes see it."""
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
        """Return this run and everything below it."""
        return [self, *(run for child in self.children for run in child.family())]

    def tree(self) -> list[Run]:
        """Return this run and the open runs below it, but not below a run that has ended."""
        going_on = (child for child in self.children if child.is_open)
        return [self, *(run for child in going_on for run in child.tree())]

    def unfailed_tree(self) -> list[Run]:
        """Return ``tree`` without runs that wait for a decision about their own failure."""
        going_on = (child for child in self.children if child.is_open and not child.is_stuck)
        return [self, *(run for child in going_on for run in child.unfailed_tree())]

    @property
    def is_stuck(self) -> bool:
        return any(n.status == "FAILED" and self.shape.pauses(n.index) for n in self.uncounted())

    def works(self) -> Iterable[Work]:
        """Return the tasks of its nodes."""
        for node in self.nodes:
            if node.work is not None:
                yield node.work
            yield from node.items

    def uncounted(self) -> list[Node]:
        return [node for node in self.nodes if not node.counted]

    def result(self) -> Result | None:
        """Return the result that a waiter gets."""
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
    """How one task ended. A successful expansion asks for a run with this id and shape."""

    place: Place
    state: str
    result: Result | None = None
    child_id: str | None = None
    child: RunShape | None = None
