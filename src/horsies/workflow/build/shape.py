"""The shape of a workflow: node ids, edges, cycles, joins, output and success cases.

Error messages need unique ids to name a node, so errors in ids are raised first and separately. The
other checks are pure functions that yield all mistakes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from horsies.errors import ErrorCode, ValidationReport, WorkflowValidationError, raise_collected
from horsies.tasks.definition import NAME_LENGTH_MAX, is_storable_name
from horsies.workflow.build.options import type_problems
from horsies.workflow.nodes.nodes import (
    NODE_KINDS,
    AnyNode,
    CallingNode,
    Join,
    MapNode,
    NodeKey,
    SubWorkflowNode,
    SuccessCase,
    SuccessPolicy,
    TaskCallingNode,
    is_list,
    own_name,
    unique_by_identity,
)

NESTING_DEPTH_MAX = 32
NODE_ID_LENGTH_MAX = 128

_NODE_ID = re.compile(r"[A-Za-z0-9_\-:.]+")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_\-:.]")
_JOINS = get_args(Join)
_CYCLE_NODES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class NodeIndex:
    """The nodes of a workflow by index, by id and by identity.

    ``waits_for`` holds unique dependencies, including the list that a MapNode runs over. A node with
    attributes of the wrong type is missing from ``readable``: its own mistakes are reported, and other
    checks skip the node.
    """

    workflow_name: str
    members: tuple[AnyNode, ...]
    ids: tuple[str, ...]
    positions: Mapping[int, int]
    waits_for: tuple[tuple[AnyNode, ...], ...]
    readable: frozenset[int]

    def position(self, node: object) -> int | None:
        """Return the index of a node, or None for a node of another workflow."""
        return self.positions.get(id(node))

    def find(self, reference: object) -> int | None:
        """Return the index of a node, passed as the node itself, its key or its id."""
        match reference:
            case NodeKey(node_id) | str(node_id):
                return self.ids.index(node_id) if node_id in self.ids else None
            case _:
                return self.position(reference)

    def id_of(self, node: AnyNode) -> str:
        """Return a node's id in this workflow, or the node's own id or name if it is outside the
        workflow.
        """
        position = self.position(node)
        if position is not None:
            return self.ids[position]
        return node.name if node.node_id is None or node.id_derived else node.node_id

    def error(
        self, index: int, code: ErrorCode, problem: str, help_text: str | None = None
    ) -> WorkflowValidationError:
        message = f"Node {self.ids[index]!r} of workflow {self.workflow_name!r} {problem}."
        return WorkflowValidationError(message, code=code, help_text=help_text)


def slugify(text: str) -> str:
    """Return text that is valid in a node id: spaces become ``_``, other illegal characters are removed.

    Example:
        slugify("Daily report (EU)") == "Daily_report_EU"
    """
    return _ILLEGAL.sub("", text.replace(" ", "_")) or "_"


def index_nodes(name: str, nodes: Sequence[object]) -> NodeIndex:
    """Give every node its index and id. Raise an error if the name, a member or an id is unusable."""
    if not isinstance(name, str) or not is_storable_name(name):
        raise WorkflowValidationError(
            f"A workflow needs a name of 1 to {NAME_LENGTH_MAX} characters.",
            code=ErrorCode.WORKFLOW_NO_NAME,
            help_text='name = "nightly_report"',
        )
    members = _checked_members(name, nodes)
    prefix = slugify(name)
    ids = tuple(
        node.node_id if node.node_id is not None and not node.id_derived else f"{prefix}:{index}"
        for index, node in enumerate(members)
    )
    _raise_all(name, _id_problems(name, members, ids))
    readable = frozenset(
        index for index, node in enumerate(members) if not any(type_problems(node))
    )
    return NodeIndex(
        workflow_name=name,
        members=members,
        ids=ids,
        positions={id(node): index for index, node in enumerate(members)},
        waits_for=tuple(
            _dependencies(node) if index in readable else () for index, node in enumerate(members)
        ),
        readable=readable,
    )


def _checked_members(name: str, nodes: Sequence[object]) -> tuple[AnyNode, ...]:
    if not nodes:
        raise WorkflowValidationError(
            f"Workflow {name!r} has no nodes.",
            code=ErrorCode.WORKFLOW_NO_NODES,
            help_text="list at least one node, made by task.node()(...)",
        )
    _raise_all(name, (problem for node in nodes if (problem := _member_problem(name, node))))
    return tuple(node for node in nodes if isinstance(node, NODE_KINDS))


def _member_problem(name: str, node: object) -> WorkflowValidationError | None:
    if isinstance(node, TaskCallingNode) and not hasattr(node.fn, "definition"):
        return WorkflowValidationError(
            f"A node of workflow {name!r} runs {own_name(node.fn)!r}, which is not a task.",
            code=ErrorCode.TASK_NOT_REGISTERED,
            help_text="decorate the function with @app.task",
        )
    if isinstance(node, NODE_KINDS):
        return None
    return WorkflowValidationError(
        f"Among the nodes of workflow {name!r} is a {type(node).__name__}, which is not a node.",
        code=ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
        help_text="make a node of a task with task.node()(...)",
    )


def _dependencies(node: AnyNode) -> tuple[AnyNode, ...]:
    awaited = (*node.waits_for, node.over) if isinstance(node, MapNode) else node.waits_for
    return unique_by_identity(awaited)


def _id_problems(
    name: str, nodes: Sequence[AnyNode], ids: Sequence[str]
) -> Iterator[WorkflowValidationError]:
    derived = any(node.node_id is None or node.id_derived for node in nodes)
    if derived and len(slugify(name)) + len(f":{len(ids)}") > NODE_ID_LENGTH_MAX:
        yield WorkflowValidationError(
            f"The workflow name {name[:40]!r}... is too long to make node ids of.",
            code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
            help_text=f"shorten the name, or give every node an id of at most {NODE_ID_LENGTH_MAX} "
            "characters",
        )
        return
    yield from _repeated_nodes(name, nodes, ids)
    first_use: dict[str, int] = {}
    for index, node_id in enumerate(ids):
        if problem := _id_problem(node_id):
            yield WorkflowValidationError(
                f"Node {index} of workflow {name!r} has an id that {problem}.",
                code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
                help_text="an id is made of letters A-Z and a-z, digits, '_', '-', ':' and '.'",
            )
            continue
        first = first_use.setdefault(node_id, index)
        if nodes[first] is not nodes[index]:
            yield WorkflowValidationError(
                f"The node id {node_id!r} of workflow {name!r} is used by nodes {first} and {index}.",
                code=ErrorCode.WORKFLOW_DUPLICATE_NODE_ID,
                help_text="give one of the nodes another node_id",
            )


def _repeated_nodes(
    name: str, nodes: Sequence[AnyNode], ids: Sequence[str]
) -> Iterator[WorkflowValidationError]:
    """Find nodes that are listed more than once, each with its first id, because a derived id differs
    per position.
    """
    uses = Counter(map(id, nodes))
    for index, node in enumerate(nodes):
        if (count := uses.pop(id(node), 0)) > 1:
            yield WorkflowValidationError(
                f"The node {ids[index]!r} of workflow {name!r} is listed {count} times.",
                code=ErrorCode.WORKFLOW_DUPLICATE_NODE_ID,
                help_text="list every node once; for a second run of the task, make a second node",
            )


def _id_problem(node_id: object) -> str | None:
    if not isinstance(node_id, str):
        return f"is of type {type(node_id).__name__}, not text"
    if not node_id:
        return "is empty"
    if len(node_id) > NODE_ID_LENGTH_MAX:
        return f"is longer than {NODE_ID_LENGTH_MAX} characters"
    return None if _NODE_ID.fullmatch(node_id) else f"holds other characters: {node_id!r}"


def _raise_all(name: str, errors: Iterable[WorkflowValidationError]) -> None:
    raise_collected(ValidationReport(f"workflow {name!r}", list(errors)))


FOREIGN_NODE = ("in the workflow", "add that node to the workflow, or remove it from waits_for")
NOT_A_NODE = (
    "a node",
    "a MapNode runs over a node that returns a list; for a list that is known now, make one node per element",
)


def shape_problems(nodes: NodeIndex) -> Iterator[WorkflowValidationError]:
    """Find dependencies outside the workflow, cycles, bad joins, and sources that are not in waits_for.

    A workflow without a root has an outside dependency or a cycle, and that mistake is reported.
    """
    yield from _foreign_dependencies(nodes)
    for index in sorted(nodes.readable):
        yield from _edge_problems(nodes, index)
    yield from _cycle_problems(nodes)
    yield from _nesting_problems(nodes)


def _foreign_dependencies(nodes: NodeIndex) -> Iterator[WorkflowValidationError]:
    """Find dependencies outside the workflow. A node that several nodes wait for counts as one mistake."""
    found: dict[int, tuple[AnyNode, list[str]]] = {}
    for index, others in enumerate(nodes.waits_for):
        for other in others:
            if nodes.position(other) is None:
                found.setdefault(id(other), (other, []))[1].append(repr(nodes.ids[index]))
    for other, waiting in found.values():
        several = len(waiting) > 1
        known = isinstance(other, (*NODE_KINDS, NodeKey, str))
        missing, help_text = FOREIGN_NODE if known else NOT_A_NODE
        yield WorkflowValidationError(
            f"Node{'s' * several} {', '.join(waiting)} of workflow {nodes.workflow_name!r} "
            f"wait{'s' * (not several)} for {_shown(nodes, other)}, which is not {missing}.",
            code=ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
            help_text=help_text,
        )


def _edge_problems(nodes: NodeIndex, index: int) -> Iterator[WorkflowValidationError]:
    node = nodes.members[index]
    if problem := _join_problem(node, len(nodes.waits_for[index])):
        yield nodes.error(index, ErrorCode.WORKFLOW_INVALID_JOIN, problem)
    if not isinstance(node, CallingNode):
        return
    awaited = {id(other) for other in nodes.waits_for[index]}
    for name, source in node.args_from.items():
        if id(source) not in awaited:
            yield nodes.error(
                index,
                ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
                f"takes its parameter {name!r} from {_shown(nodes, source)}, "
                "which is not in its waits_for",
                "add that node to waits_for, or write from_node(...) in the call",
            )
    for source in unique_by_identity(node.workflow_ctx_from):
        if id(source) not in awaited:
            yield nodes.error(
                index,
                ErrorCode.WORKFLOW_INVALID_CTX_FROM,
                f"lists {_shown(nodes, source)} in workflow_ctx_from, which is not in its waits_for",
                "add that node to waits_for",
            )


def _join_problem(node: AnyNode, dependencies: int) -> str | None:
    if node.join == "all" and node.min_success is None:
        return None
    if node.join not in _JOINS:
        return f"has join={node.join!r}; it is 'all', 'any' or 'quorum'"
    if isinstance(node, MapNode) and node.join != "all":
        return "needs the list it runs over, so it waits for all its dependencies: leave join out"
    if node.join != "all" and not dependencies:
        return (
            f"has join={node.join!r} but waits for no node, so it has nothing to count: list its "
            "dependencies in waits_for, or leave join out"
        )
    if node.join != "quorum":
        return (
            None if node.min_success is None else "has min_success, which only join='quorum' takes"
        )
    if node.min_success is None:
        return "has join='quorum' and needs min_success"
    if type(node.min_success) is not int or not 1 <= node.min_success <= dependencies:
        return (
            f"has min_success={node.min_success!r}; "
            f"it is a whole number from 1 to its {dependencies} dependencies"
        )
    return None


def _cycle_problems(nodes: NodeIndex) -> Iterator[WorkflowValidationError]:
    waiting = _unreachable(nodes)
    if not waiting:
        return
    cycle = _some_cycle(nodes, waiting)
    shown = [_with_name(nodes, index) for index in cycle[:_CYCLE_NODES_SHOWN]]
    more = [f"{len(cycle) - len(shown)} more"] if len(cycle) > len(shown) else []
    yield WorkflowValidationError(
        f"The nodes of workflow {nodes.workflow_name!r} wait for each other in a circle: "
        f"{' waits for '.join([*shown, *more, shown[0]])}.",
        code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
        help_text="remove one of these dependencies",
    )


def _with_name(nodes: NodeIndex, index: int) -> str:
    """Return a node's id, followed by the name of its task unless the two are the same."""
    node_id, name = nodes.ids[index], nodes.members[index].name
    return node_id if node_id == name else f"{node_id} ({name})"


def _unreachable(nodes: NodeIndex) -> set[int]:
    """Return the nodes that can never start: all nodes on a cycle or downstream of one."""
    open_count = [0] * len(nodes.members)
    dependents: list[list[int]] = [[] for _ in nodes.members]
    for index, others in enumerate(nodes.waits_for):
        for position in map(nodes.position, others):
            if position is not None:
                open_count[index] += 1
                dependents[position].append(index)
    ready = [index for index, count in enumerate(open_count) if count == 0]
    for done in ready:
        for index in dependents[done]:
            open_count[index] -= 1
            if open_count[index] == 0:
                ready.append(index)
    return set(range(len(nodes.members))) - set(ready)


def _some_cycle(nodes: NodeIndex, waiting: set[int]) -> list[int]:
    """Follow dependencies until a node repeats. Among nodes that never start, this always finds a cycle."""
    path: dict[int, int] = {}
    index = min(waiting)
    while index not in path:
        path[index] = len(path)
        positions = (nodes.position(other) for other in nodes.waits_for[index])
        index = next(one for one in positions if one is not None and one in waiting)
    return list(path)[path[index] :]


def _nesting_problems(nodes: NodeIndex) -> Iterator[WorkflowValidationError]:
    sound: set[type] = set()
    for index in sorted(nodes.readable):
        if chain := _endless_chain(nodes.members[index], (), sound):
            circle = chain[-1] in chain[:-1]
            problem = "contain each other in a circle" if circle else "are nested too deeply"
            error = nodes.error(
                index,
                ErrorCode.WORKFLOW_CYCLE_DETECTED,
                f"runs definitions that {problem}",
                f"nest at most {NESTING_DEPTH_MAX} definitions, none within itself",
            )
            error.notes = (" contains ".join(one.__name__ for one in chain[-_CYCLE_NODES_SHOWN:]),)
            yield error


def _endless_chain(node: object, above: tuple[type, ...], sound: set[type]) -> tuple[type, ...]:
    """Return a path of nested definitions that contains itself or is too long, or an empty path."""
    if not isinstance(node, SubWorkflowNode):
        return ()
    definition: type = node.workflow_def
    path = (*above, definition)
    if definition in above or len(path) > NESTING_DEPTH_MAX:
        return path
    if definition in sound:
        return ()
    collect = getattr(definition, "get_workflow_nodes", list)
    for _, inner in collect():
        if chain := _endless_chain(inner, path, sound):
            return chain
    sound.add(definition)
    return ()


def output_problems(nodes: NodeIndex, output: object) -> Iterator[WorkflowValidationError]:
    """Find an output that is not one of the nodes."""
    if output is not None and nodes.find(output) is None:
        yield WorkflowValidationError(
            f"The output of workflow {nodes.workflow_name!r} is {_shown(nodes, output)}, "
            "which is not one of its nodes.",
            code=ErrorCode.WORKFLOW_INVALID_OUTPUT,
            help_text="name one of the nodes of this workflow",
        )


def policy_problems(nodes: NodeIndex, policy: object) -> Iterator[WorkflowValidationError]:
    """Find a success policy with wrong types, without cases, or with nodes outside the workflow."""
    for problem, help_text in _invalid_policy(nodes, policy):
        yield WorkflowValidationError(
            f"The success policy of workflow {nodes.workflow_name!r} {problem}.",
            code=ErrorCode.WORKFLOW_INVALID_SUCCESS_POLICY,
            help_text=help_text,
        )


def _invalid_policy(nodes: NodeIndex, policy: object) -> Iterator[tuple[str, str]]:
    if policy is None:
        return
    if not isinstance(policy, SuccessPolicy):
        yield (
            f"is of type {type(policy).__name__}, not a SuccessPolicy",
            "write SuccessPolicy(cases=[SuccessCase(required=[...])])",
        )
        return
    if not is_list(policy.cases):
        problem = f"has cases of type {type(policy.cases).__name__}, not a list of them"
        yield problem, "write cases=[SuccessCase(...)]"
    elif not policy.cases:
        yield "has no cases", "give at least one SuccessCase"
    else:
        for number, case in enumerate(policy.cases):
            yield from _invalid_case(nodes, f"has a case (number {number})", case)
    if policy.optional is None:
        return
    if is_list(policy.optional):
        yield from _foreign_nodes(nodes, policy.optional, "calls optional")
    else:
        problem = f"has optional of type {type(policy.optional).__name__}, not a list of nodes"
        yield problem, "write optional=[...]"


def _invalid_case(nodes: NodeIndex, where: str, case: object) -> Iterator[tuple[str, str]]:
    if not isinstance(case, SuccessCase):
        problem = f"{where} of type {type(case).__name__}, not a SuccessCase"
        yield problem, "write SuccessCase(required=[...])"
    elif not is_list(case.required):
        kind = type(case.required).__name__
        yield f"{where} with required of type {kind}, not a list of nodes", "write required=[...]"
    elif not case.required:
        yield f"{where} that requires no node", "remove it, or fill it"
    else:
        yield from _foreign_nodes(nodes, case.required, f"{where} that requires")


def _foreign_nodes(
    nodes: NodeIndex, references: Sequence[object], clause: str
) -> Iterator[tuple[str, str]]:
    for one in references:
        if nodes.find(one) is None:
            problem = f"{clause} {_shown(nodes, one)}, which is not one of its nodes"
            yield problem, "name nodes of this workflow only"


def _shown(nodes: NodeIndex, reference: object) -> str:
    match reference:
        case NodeKey(node_id) | str(node_id):
            return f"node {node_id!r}"
        case _ if isinstance(reference, NODE_KINDS):
            return f"node {nodes.id_of(reference)!r}"
        case _:
            return f"a {type(reference).__name__}"
