"""The shape of a workflow: edges, cycles, joins, outputs and success cases.

Pure questions to a draft, answered with every mistake they find. Stands before the line producer ->
SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.workflow.build.draft import Draft, distinct
from horsies.workflow.nodes.nodes import (
    CALLING_KINDS,
    NODE_KINDS,
    AnyNode,
    CallingNode,
    Join,
    MapNode,
    NodeKey,
    SubWorkflowNode,
)
from horsies.workflow.nodes.policy import NodeReference, SuccessPolicy

NESTING_DEPTH_MAX = 32

_JOINS = get_args(Join)
_CYCLE_NODES_SHOWN = 8


def graph_problems(plan: Draft) -> Iterator[WorkflowValidationError]:
    """Find foreign dependencies, missing roots, cycles, bad joins and sources outside waits_for."""
    for index, node in enumerate(plan.nodes):
        yield from _dependency_problems(plan, index)
        yield from _join_problems(plan, index)
        if isinstance(node, CALLING_KINDS):
            yield from _source_problems(plan, index, node)
    if all(plan.waits_for):
        yield WorkflowValidationError(
            f"Every node of workflow {plan.name!r} waits for another; none can start.",
            code=ErrorCode.WORKFLOW_NO_ROOT_TASKS,
            help_text="leave waits_for out of at least one node",
        )
    yield from _cycle_problems(plan)
    yield from _nesting_problems(plan)


def _dependency_problems(plan: Draft, index: int) -> Iterator[WorkflowValidationError]:
    for other in plan.waits_for[index]:
        if plan.position(other) is None:
            yield WorkflowValidationError(
                f"{plan.says(index)} waits for {_shown(other)}, which is not in the workflow.",
                code=ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
                help_text="add that node to the workflow, or remove it from waits_for",
            )


def _source_problems(
    plan: Draft, index: int, node: CallingNode
) -> Iterator[WorkflowValidationError]:
    if not node.args_from and not node.workflow_ctx_from:
        return
    awaited = {id(other) for other in plan.waits_for[index]}
    for name, source in node.args_from.items():
        if id(source) not in awaited:
            yield WorkflowValidationError(
                f"{plan.says(index)} takes its parameter {name!r} from {_shown(source)}, "
                "which is not in its waits_for.",
                code=ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
                help_text="add that node to waits_for, or write from_node(...) in the call",
            )
    for source in distinct(node.workflow_ctx_from):
        if id(source) not in awaited:
            yield WorkflowValidationError(
                f"{plan.says(index)} lists {_shown(source)} in workflow_ctx_from, "
                "which is not in its waits_for.",
                code=ErrorCode.WORKFLOW_INVALID_CTX_FROM,
                help_text="add that node to waits_for",
            )


def _join_problems(plan: Draft, index: int) -> Iterator[WorkflowValidationError]:
    node = plan.nodes[index]
    problem = _join_problem(node, len(plan.waits_for[index]))
    if problem is not None:
        yield WorkflowValidationError(
            f"{plan.says(index)} {problem}.", code=ErrorCode.WORKFLOW_INVALID_JOIN
        )


def _join_problem(node: AnyNode, dependencies: int) -> str | None:
    if node.join == "all" and node.min_success is None:
        return None
    if node.join not in _JOINS:
        return f"has join={node.join!r}; it is 'all', 'any' or 'quorum'"
    if isinstance(node, MapNode) and node.join != "all":
        return "needs the list it runs over, so it waits for all its dependencies: leave join out"
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


def _cycle_problems(plan: Draft) -> Iterator[WorkflowValidationError]:
    waiting = _unreachable(plan)
    if not waiting:
        return
    cycle = _some_cycle(plan, waiting)
    shown = [plan.ids[index] for index in cycle[:_CYCLE_NODES_SHOWN]]
    more = [f"{len(cycle) - len(shown)} more"] if len(cycle) > len(shown) else []
    yield WorkflowValidationError(
        f"The nodes of workflow {plan.name!r} wait for each other in a circle.",
        code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
        notes=[" waits for ".join([*shown, *more, shown[0]])],
        help_text="remove one of these dependencies",
    )


def _unreachable(plan: Draft) -> set[int]:
    """Return the nodes that can never start: all that lie on a cycle or behind one."""
    open_count = [0] * len(plan.nodes)
    dependents: list[list[int]] = [[] for _ in plan.nodes]
    for index, others in enumerate(plan.waits_for):
        for position in map(plan.position, others):
            if position is not None:
                open_count[index] += 1
                dependents[position].append(index)
    ready = [index for index, count in enumerate(open_count) if count == 0]
    for done in ready:
        for index in dependents[done]:
            open_count[index] -= 1
            if open_count[index] == 0:
                ready.append(index)
    return set(range(len(plan.nodes))) - set(ready)


def _some_cycle(plan: Draft, waiting: set[int]) -> list[int]:
    """Walk from dependency to dependency; among nodes that never start this leads into a circle."""
    path: dict[int, int] = {}
    index = min(waiting)
    while index not in path:
        path[index] = len(path)
        positions = (plan.position(other) for other in plan.waits_for[index])
        index = next(one for one in positions if one is not None and one in waiting)
    return list(path)[path[index] :]


def _nesting_problems(plan: Draft) -> Iterator[WorkflowValidationError]:
    sound: set[type] = set()
    for index, node in enumerate(plan.nodes):
        if isinstance(node, SubWorkflowNode):
            chain = _endless_chain(node.workflow_def, (), sound)
            if chain:
                yield _nested_too_deep(plan, index, chain)


def _endless_chain(definition: type, above: tuple[type, ...], sound: set[type]) -> tuple[type, ...]:
    """Return a path of definitions that contains itself or is too long; empty when all is well."""
    path = (*above, definition)
    if definition in above or len(path) > NESTING_DEPTH_MAX:
        return path
    if definition in sound:
        return ()
    collect = getattr(definition, "get_workflow_nodes", list)
    for _, node in collect():
        if isinstance(node, SubWorkflowNode):
            chain = _endless_chain(node.workflow_def, path, sound)
            if chain:
                return chain
    sound.add(definition)
    return ()


def _nested_too_deep(plan: Draft, index: int, chain: tuple[type, ...]) -> WorkflowValidationError:
    circle = chain[-1] in chain[:-1]
    problem = "contain each other in a circle" if circle else "are nested too deeply"
    return WorkflowValidationError(
        f"{plan.says(index)} runs definitions that {problem}.",
        code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
        notes=[" contains ".join(one.__name__ for one in chain[-_CYCLE_NODES_SHOWN:])],
        help_text=f"nest at most {NESTING_DEPTH_MAX} definitions, none within itself",
    )


def output_problems(plan: Draft, output: object) -> Iterator[WorkflowValidationError]:
    """Find an output that is not one of the nodes."""
    if output is not None and find(plan, output) is None:
        yield WorkflowValidationError(
            f"The output of workflow {plan.name!r} is {_shown(output)}, "
            "which is not one of its nodes.",
            code=ErrorCode.WORKFLOW_INVALID_OUTPUT,
            help_text="name one of the nodes of this workflow",
        )


def policy_problems(plan: Draft, policy: SuccessPolicy | None) -> Iterator[WorkflowValidationError]:
    """Find success cases that can never be asked: empty ones, and ones with foreign nodes."""
    if policy is None:
        return
    if not policy.cases:
        yield _policy_problem(plan, "has no cases", "give at least one SuccessCase")
    for number, case in enumerate(policy.cases):
        where = f"has a case (number {number})"
        if not case.required:
            yield _policy_problem(plan, f"{where} that requires no node", "remove it, or fill it")
        yield from _foreign_nodes(plan, case.required, f"{where} that requires")
    yield from _foreign_nodes(plan, policy.optional or (), "calls optional")


def _foreign_nodes(
    plan: Draft, references: Sequence[NodeReference], clause: str
) -> Iterator[WorkflowValidationError]:
    for one in references:
        if find(plan, one) is None:
            problem = f"{clause} {_shown(one)}, which is not one of its nodes"
            yield _policy_problem(plan, problem, "name nodes of this workflow only")


def _policy_problem(plan: Draft, problem: str, help_text: str) -> WorkflowValidationError:
    return WorkflowValidationError(
        f"The success policy of workflow {plan.name!r} {problem}.",
        code=ErrorCode.WORKFLOW_INVALID_SUCCESS_POLICY,
        help_text=help_text,
    )


def find(plan: Draft, reference: object) -> int | None:
    """Return the index of a node named by itself, by its key or by its id."""
    match reference:
        case NodeKey(node_id) | str(node_id):
            return plan.ids.index(node_id) if node_id in plan.ids else None
        case _:
            return plan.position(reference)


def _shown(reference: object) -> str:
    match reference:
        case NodeKey(node_id) | str(node_id):
            return f"node {node_id!r}"
        case _ if isinstance(reference, NODE_KINDS):
            return f"node {reference.node_id or reference.name!r}"
        case _:
            return f"a {type(reference).__name__}"
