"""A draft: the nodes of a workflow in order, each with its id, before anything else is asked.

Without distinct ids nothing sensible can be said about the graph, so their mistakes come alone. The
first step from the user's nodes to a stored run; stands before the line producer -> SQL -> turn ->
child -> report -> result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from horsies.errors import ErrorCode, ValidationReport, WorkflowValidationError, raise_collected
from horsies.tasks.definition import NAME_LENGTH_MAX, is_storable_name
from horsies.workflow.nodes.nodes import NODE_KINDS, AnyNode, MapNode, TaskNode

NODE_ID_LENGTH_MAX = 128

_NODE_ID = re.compile(r"[A-Za-z0-9_\-:.]+")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_\-:.]")


@dataclass(frozen=True, slots=True)
class Draft:
    """Nodes in index order; dependencies are distinct and hold the list a MapNode runs over."""

    name: str
    nodes: tuple[AnyNode, ...]
    ids: tuple[str, ...]
    positions: Mapping[int, int]
    waits_for: tuple[tuple[AnyNode, ...], ...]

    def position(self, node: object) -> int | None:
        """Return the index of a node, or None for one of another workflow."""
        return self.positions.get(id(node))

    def says(self, index: int) -> str:
        """Name a node at the beginning of a sentence."""
        return f"Node {self.ids[index]!r} of workflow {self.name!r}"


def slugify(text: str) -> str:
    """Return text that a node id may hold: spaces become ``_``, other strange characters vanish.

    Example:
        slugify("Daily report (EU)") == "Daily_report_EU"
    """
    return _ILLEGAL.sub("", text.replace(" ", "_")) or "_"


def draft(name: str, nodes: Iterable[object]) -> Draft:
    """Give every node its index and id, or raise what keeps them from having one."""
    _refuse_bad_name(name)
    members = _checked_nodes(name, list(nodes))
    prefix = slugify(name)
    ids = tuple(
        node.node_id if node.node_id is not None and not node.id_derived else f"{prefix}:{index}"
        for index, node in enumerate(members)
    )
    report = ValidationReport(f"workflow {name!r}")
    report.errors.extend(_id_problems(name, members, ids))
    raise_collected(report)
    return Draft(
        name=name,
        nodes=members,
        ids=ids,
        positions={id(node): index for index, node in enumerate(members)},
        waits_for=tuple(_dependencies(node) for node in members),
    )


def distinct(nodes: Sequence[AnyNode] | None) -> tuple[AnyNode, ...]:
    """Return the nodes in order, each once; equal-looking nodes are different nodes."""
    return tuple({id(node): node for node in nodes or ()}.values())


def _refuse_bad_name(name: object) -> None:
    if isinstance(name, str) and is_storable_name(name):
        return
    raise WorkflowValidationError(
        f"A workflow needs a name of 1 to {NAME_LENGTH_MAX} characters.",
        code=ErrorCode.WORKFLOW_NO_NAME,
        help_text='name = "nightly_report"',
    )


def _checked_nodes(name: str, nodes: list[object]) -> tuple[AnyNode, ...]:
    if not nodes:
        raise WorkflowValidationError(
            f"Workflow {name!r} has no nodes.",
            code=ErrorCode.WORKFLOW_NO_NODES,
            help_text="list at least one node, made by task.node()(...)",
        )
    report = ValidationReport(f"workflow {name!r}")
    report.errors.extend(_stranger(name, node) for node in nodes if not _is_node(node))
    raise_collected(report)
    return tuple(node for node in nodes if isinstance(node, NODE_KINDS))


def _is_node(node: object) -> bool:
    if isinstance(node, TaskNode | MapNode):
        return hasattr(node.fn, "definition")
    return isinstance(node, NODE_KINDS)


def _stranger(name: str, node: object) -> WorkflowValidationError:
    if isinstance(node, TaskNode | MapNode):
        what = getattr(node.fn, "__name__", type(node.fn).__name__)
        return WorkflowValidationError(
            f"A node of workflow {name!r} runs {what!r}, which is not a task.",
            code=ErrorCode.TASK_NOT_REGISTERED,
            help_text="decorate the function with @app.task",
        )
    return WorkflowValidationError(
        f"Among the nodes of workflow {name!r} is a {type(node).__name__}, which is not a node.",
        code=ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
        help_text="make a node of a task with task.node()(...)",
    )


def _dependencies(node: AnyNode) -> tuple[AnyNode, ...]:
    if isinstance(node, MapNode):
        return distinct((*node.waits_for, node.over))
    return distinct(node.waits_for)


def _id_problems(
    name: str, nodes: Sequence[AnyNode], ids: Sequence[str]
) -> Iterator[WorkflowValidationError]:
    if len(slugify(name)) + len(f":{len(ids)}") > NODE_ID_LENGTH_MAX and _any_derived(nodes):
        yield WorkflowValidationError(
            f"The workflow name {name[:40]!r}... is too long to make node ids of.",
            code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
            help_text=f"shorten the name, or give every node an id of at most {NODE_ID_LENGTH_MAX} "
            "characters",
        )
        return
    first_use: dict[str, int] = {}
    for index, node_id in enumerate(ids):
        if problem := _id_problem(node_id):
            yield WorkflowValidationError(
                f"Node {index} of workflow {name!r} has an id that {problem}.",
                code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
                help_text="an id is made of letters A-Z and a-z, digits, '_', '-', ':' and '.'",
            )
        elif first_use.setdefault(node_id, index) != index:
            yield _used_twice(name, node_id, nodes, (first_use[node_id], index))


def _any_derived(nodes: Sequence[AnyNode]) -> bool:
    return any(node.node_id is None or node.id_derived for node in nodes)


def _id_problem(node_id: object) -> str | None:
    if not isinstance(node_id, str):
        return f"is of type {type(node_id).__name__}, not text"
    if not node_id:
        return "is empty"
    if len(node_id) > NODE_ID_LENGTH_MAX:
        return f"is longer than {NODE_ID_LENGTH_MAX} characters"
    return None if _NODE_ID.fullmatch(node_id) else f"holds other characters: {node_id!r}"


def _used_twice(
    name: str, node_id: str, nodes: Sequence[AnyNode], pair: tuple[int, int]
) -> WorkflowValidationError:
    first, second = pair
    same = nodes[first] is nodes[second]
    what = "is listed twice" if same else f"is used by nodes {first} and {second}"
    return WorkflowValidationError(
        f"The node id {node_id!r} of workflow {name!r} {what}.",
        code=ErrorCode.WORKFLOW_DUPLICATE_NODE_ID,
        help_text="list every node once" if same else "give one of the two another node_id",
    )
