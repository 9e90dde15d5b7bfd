"""Random runs of all kinds: a specification for the workers and a shape for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any

from horsies.workflow.nodes.nodes import (
    AnyNode,
    MapNode,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskNode,
)
from horsies.workflow.spec import WorkflowSpec
from tests.support.oracle.shapes import NodeShape, RunShape, node_id

KINDS = ("task",) * 6 + ("list", "map", "workflow", "sleep", "signal")
CHILD = RunShape((NodeShape(), NodeShape(after=(0,))), output=1)
SIGNAL = "go"


@dataclass(frozen=True, slots=True)
class Mixed:
    """One workflow, described once for the oracle and once for the database."""

    spec: WorkflowSpec[Any]
    shape: RunShape
    signals: int


def mixed(chance: Random, flows: ModuleType) -> Mixed:
    """Draw a workflow of up to twelve nodes."""
    nodes: list[AnyNode] = []
    shapes: list[NodeShape] = []
    for index in range(chance.randint(1, 12)):
        shape = _shape(chance, shapes)
        shapes.append(shape)
        nodes.append(_node(chance, flows, index, shape, nodes))
    spec = flows.app.workflow("mixed", nodes, definition_key="e2e.mixed")
    signals = sum(shape.kind == "signal" for shape in shapes)
    return Mixed(spec, RunShape(tuple(shapes)), signals)


def _shape(chance: Random, before: list[NodeShape]) -> NodeShape:
    after = tuple(sorted(chance.sample(range(len(before)), min(len(before), chance.randint(0, 3)))))
    kind = chance.choice(KINDS)
    lists = [index for index, shape in enumerate(before) if shape.kind == "list"]
    if kind == "map":
        if not lists:
            return NodeShape(after=after)
        over = chance.choice(lists)
        after = tuple(sorted({*after, over}))
        return NodeShape(
            "map",
            after,
            over=over,
            max_parallel=chance.choice([None, 1, 2]),
            allow_failed_items=chance.random() < 0.5,
        )
    join = chance.choice(["all", "all", "any", "quorum"]) if after else "all"
    return NodeShape(
        kind,
        after,
        join=join,
        min_success=chance.randint(1, len(after)) if join == "quorum" else None,
        allow_failed_deps=join == "all" and chance.random() < 0.4,
        signal=SIGNAL if kind == "signal" else None,
        child=CHILD if kind == "workflow" else None,
    )


def _node(
    chance: Random, flows: ModuleType, index: int, shape: NodeShape, nodes: list[AnyNode]
) -> AnyNode:
    fails = chance.random() < 0.2
    around: dict[str, Any] = {
        "waits_for": [nodes[one] for one in shape.after],
        "node_id": node_id(index),
        "join": shape.join,
        "min_success": shape.min_success,
        "allow_failed_deps": shape.allow_failed_deps,
    }
    match shape.kind:
        case "list":
            return TaskNode(flows.maybe_list, kwargs={"count": chance.randint(0, 5)}, **around)
        case "map":
            assert shape.over is not None
            return MapNode(
                flows.maybe_item,
                over=nodes[shape.over],
                each="number",
                kwargs={"fails_at": 1 if fails else -1},
                max_parallel=shape.max_parallel,
                allow_failed_items=shape.allow_failed_items,
                **around,
            )
        case "workflow":
            return SubWorkflowNode(flows.Risky, kwargs={"fails": fails}, **around)
        case "sleep":
            return SleepNode(0.05, **around)
        case "signal":
            return SignalNode(SIGNAL, **around)
        case _:
            sources = dict(zip(("a", "b"), (nodes[one] for one in shape.after), strict=False))
            return TaskNode(flows.maybe, kwargs={"fails": fails}, args_from=sources, **around)
