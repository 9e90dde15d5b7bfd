"""Plans without the library's builder: the JSON from which a run starts, created from a shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.oracle.shapes import NodeShape, RunShape, node_id

TASK_NAMES = {
    "task": "work",
    "map": "work",
    "workflow": "horsies.expand",
    "sleep": "horsies.sleep",
    "signal": "horsies.signal",
}


@dataclass(frozen=True, slots=True)
class Above:
    """The node of the parent run that a run belongs to."""

    run_id: str
    index: int
    root_id: str
    depth: int


def plan(
    run_id: str,
    shape: RunShape,
    above: Above | None = None,
    *,
    name: str = "run",
    key: str | None = None,
    fingerprint: str = "same",
) -> dict[str, Any]:
    """Return the plan of a run of that shape."""
    return {
        "id": run_id,
        "name": name,
        "on_error": shape.on_error,
        "output_index": shape.output,
        "success_policy": _policy(shape),
        "definition_key": "tests.run",
        "fingerprint": fingerprint,
        "workflow_key": key,
        "parent_workflow_id": above.run_id if above else None,
        "parent_task_index": above.index if above else None,
        "depth": above.depth + 1 if above else 0,
        "root_workflow_id": above.root_id if above else run_id,
        "sent_at": "2026-01-01T00:00:00Z",
        "nodes": _nodes(shape),
    }


def _policy(shape: RunShape) -> dict[str, Any] | None:
    if shape.cases is None:
        return None
    optional = [index for index, node in enumerate(shape.nodes) if node.optional]
    return {
        "cases": [{"required_indices": list(case)} for case in shape.cases],
        "optional_indices": optional,
    }


def _nodes(shape: RunShape) -> list[dict[str, Any]]:
    dependents, context_dependents = shape.dependents, shape.context_dependents
    return [
        {
            **_own_values(index, node),
            "pauses": shape.pauses(index),
            "dependents": dependents[index],
            "context_dependents": context_dependents[index],
        }
        for index, node in enumerate(shape.nodes)
    ]


def _own_values(index: int, node: NodeShape) -> dict[str, Any]:
    calls = node.kind in {"task", "map"}
    return {
        "task_index": index,
        "node_id": node_id(index),
        "kind": node.kind,
        "dependencies": node.after,
        "join_type": node.join,
        "min_success": node.min_success,
        "allow_failed_deps": node.allow_failed_deps,
        "task_name": TASK_NAMES[node.kind],
        "task_kwargs": json.dumps({"seed": index}) if calls else "{}",
        "queue_name": "default",
        "priority": 100,
        "task_options": "{}",
        "max_retries": 0,
        "inputs": _inputs(node),
        "delay_ms": 3_600_000 if node.kind == "sleep" else None,
        "signal_name": node.signal,
        "signal_timeout_ms": 3_600_000 if node.kind == "signal" and index % 2 else None,
        "map_over": node.over,
        "map_parameter": "element" if node.kind == "map" else None,
        "max_parallel": node.max_parallel,
        "allow_failed_items": node.allow_failed_items,
        "sub_definition_key": "tests.child" if node.child else None,
        "sub_workflow_name": "child" if node.child else None,
    }


def _inputs(node: NodeShape) -> str | None:
    if not node.context:
        return None
    return json.dumps({"args": {}, "context": {node_id(index): index for index in node.context}})
