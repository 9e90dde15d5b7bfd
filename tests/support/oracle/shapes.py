"""The shape of a run: its graph, described in the same way for the oracle and the database."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class NodeShape:
    """One node; its index is its position in the run's tuple."""

    kind: str = "task"
    after: tuple[int, ...] = ()
    join: str = "all"
    min_success: int | None = None
    allow_failed_deps: bool = False
    # The nodes in ``after`` whose results the context provides.
    context: tuple[int, ...] = ()
    # A failure of an optional node does not pause the run.
    optional: bool = False
    over: int | None = None
    max_parallel: int | None = None
    allow_failed_items: bool = False
    signal: str | None = None
    child: RunShape | None = None

    def __repr__(self) -> str:
        return _shown(self)


@dataclass(frozen=True, slots=True, repr=False)
class RunShape:
    """One run: its nodes in order, and the conditions of its success."""

    nodes: tuple[NodeShape, ...]
    on_error: str = "fail"
    output: int | None = None
    cases: tuple[tuple[int, ...], ...] | None = None

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """Return the dependents of each node."""
        return self._followers("after")

    @property
    def context_dependents(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that read each node's result through the context."""
        return self._followers("context")

    def _followers(self, edge: str) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(later for later, node in enumerate(self.nodes) if index in getattr(node, edge))
            for index in range(len(self.nodes))
        )

    def pauses(self, index: int) -> bool:
        """Return whether a failure of this node pauses the run."""
        return self.on_error == "pause" and not self.nodes[index].optional


def _shown(shape: Any) -> str:
    """Show only unusual properties, to keep failing examples readable."""
    unusual = [
        f"{one.name}={value!r}"
        for one in fields(shape)
        if (value := getattr(shape, one.name)) != one.default
    ]
    return f"{type(shape).__name__}({', '.join(unusual)})"


def node_id(index: int) -> str:
    """Name a node."""
    return f"n{index}"


def chain(length: int, **settings: object) -> RunShape:
    """Return a chain of tasks."""
    nodes = tuple(NodeShape(after=(index - 1,) if index else ()) for index in range(length))
    return RunShape(nodes, **settings)  # type: ignore[arg-type]


def fan(width: int, **settings: object) -> RunShape:
    """Return one task, ``width`` tasks after it, and one task after all of these."""
    middle = tuple(NodeShape(after=(0,)) for _ in range(width))
    last = NodeShape(after=tuple(range(1, width + 1)))
    return RunShape((NodeShape(), *middle, last), **settings)  # type: ignore[arg-type]
