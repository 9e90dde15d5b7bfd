"""The keys of nodes: the keys that their tasks declare, computed when the workflow is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horsies.errors import ErrorCode, HorsiesError
from horsies.workflow.build.shape import NodeIndex
from horsies.workflow.nodes.nodes import MapNode, TaskCallingNode


def node_key(
    nodes: NodeIndex, index: int, kwargs: Mapping[str, Any], problems: list[HorsiesError]
) -> str | None:
    """Return the key of a node's task, or None if it has no key; add a mistake to the problems."""
    node = nodes.members[index]
    if index not in nodes.readable or not isinstance(node, TaskCallingNode):
        return None
    source = node.fn.definition.key
    if source is None:
        return None
    later = [*node.args_from, *([node.each] if isinstance(node, MapNode) and node.each else [])]
    if source.parameter in later or (source.function is not None and later):
        missing = source.parameter or later[0]
        text = f"has a key that is not known yet: {missing!r} comes from another node"
        problems.append(nodes.error(index, ErrorCode.TASK_INVALID_OPTIONS, text))
        return None
    key, problem = source.of_call((), kwargs)
    if problem is not None:
        text = f"has no usable key: {problem}"
        problems.append(nodes.error(index, ErrorCode.TASK_INVALID_OPTIONS, text))
    return key
