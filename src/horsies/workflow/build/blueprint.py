"""A blueprint: a workflow that was checked as a whole and will not change any more.

It is made of copies: references lead from copy to copy, arguments are JSON text. The user's own
nodes receive their index and id and nothing else. Everything behind it, from the plan to the run,
reads only this. Stands before the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from horsies.codec.calls import EncodedCall
from horsies.errors import (
    ErrorCode,
    HorsiesError,
    ValidationReport,
    WorkflowValidationError,
    raise_collected,
)
from horsies.tasks.definition import NAME_LENGTH_MAX, is_storable_name
from horsies.tasks.request import size_problem
from horsies.tasks.send import Producer
from horsies.workflow.build.calls import CheckedCall, check_call
from horsies.workflow.build.draft import Draft, distinct, draft
from horsies.workflow.build.graph import find, graph_problems, output_problems, policy_problems
from horsies.workflow.build.options import option_problems
from horsies.workflow.build.routing import Route, Router
from horsies.workflow.nodes.nodes import CALLING_KINDS, AnyNode, MapNode, TaskNode
from horsies.workflow.nodes.policy import NodeReference, OnError, SuccessCase, SuccessPolicy


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A whole workflow: frozen nodes in index order, edges as indexes, arguments as JSON text.

    `internal_route` is where nodes without a task of their own go. It is None, and so are the queues
    of nodes that name none, until an application builds the workflow.
    """

    name: str
    definition_key: str | None
    nodes: tuple[AnyNode, ...]
    dependencies: tuple[tuple[int, ...], ...]
    kwargs_json: tuple[str, ...]
    on_error: OnError
    output_index: int | None
    success_policy: SuccessPolicy | None
    producer: Producer | None = None
    internal_route: Route | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """What a workflow is asked to be, not yet checked."""

    name: str
    tasks: Iterable[object]
    on_error: OnError = OnError.FAIL
    output: object = None
    success_policy: SuccessPolicy | None = None
    definition_key: str | None = None
    producer: Producer | None = None


def assemble(outline: Outline) -> Blueprint:
    """Check everything, then copy; raises all mistakes together and then leaves no trace."""
    plan = draft(outline.name, outline.tasks)
    router = Router(outline.producer.config) if outline.producer else None
    report = ValidationReport(f"workflow {outline.name!r}")
    report.errors.extend(_problems_of_the_whole(outline, plan))
    calls = [_checked(plan, index, report.errors) for index in range(len(plan.nodes))]
    routes = _routes(plan, router, report.errors)
    report.errors.extend(_size_problems(outline, plan, calls))
    raise_collected(report)
    copies = _copies(plan, calls, routes)
    _stamp(plan)
    output = None if outline.output is None else find(plan, outline.output)
    return Blueprint(
        name=plan.name,
        definition_key=outline.definition_key,
        nodes=copies,
        dependencies=tuple(
            tuple(plan.positions[id(other)] for other in others) for others in plan.waits_for
        ),
        kwargs_json=tuple(call.kwargs_json for call in calls),
        on_error=OnError(outline.on_error),
        output_index=output,
        success_policy=_policy_of_copies(plan, outline.success_policy, copies),
        producer=outline.producer,
        internal_route=router.internal if router else None,
    )


def keyed(blueprint: Blueprint, definition_key: str) -> Blueprint:
    """Return the same workflow under a definition key."""
    return replace(blueprint, definition_key=definition_key)


def key_problem(definition_key: object) -> str | None:
    """Say why something cannot be a definition key, or None."""
    if not isinstance(definition_key, str) or not definition_key.strip():
        return "has no definition_key"
    if not is_storable_name(definition_key):
        return f"has a definition_key that is no plain text of 1 to {NAME_LENGTH_MAX} characters"
    return None


def no_key(owner: str, problem: str) -> WorkflowValidationError:
    """Return the error of a workflow that has no usable definition key."""
    return WorkflowValidationError(
        f"{owner} {problem}.",
        code=ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
        help_text='a stable name of this workflow: definition_key="orders.fulfil.v1"',
    )


def _problems_of_the_whole(outline: Outline, plan: Draft) -> Iterable[HorsiesError]:
    yield from graph_problems(plan)
    yield from output_problems(plan, outline.output)
    yield from policy_problems(plan, outline.success_policy)
    if outline.on_error not in list(OnError):
        yield WorkflowValidationError(
            f"Workflow {plan.name!r} has an on_error that is neither OnError.FAIL nor OnError.PAUSE.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
        )
    if outline.definition_key is not None and (problem := key_problem(outline.definition_key)):
        yield no_key(f"Workflow {plan.name!r}", problem)


def _checked(plan: Draft, index: int, problems: list[HorsiesError]) -> CheckedCall:
    node = plan.nodes[index]
    problems.extend(option_problems(plan, index))
    if isinstance(node, CALLING_KINDS):
        return check_call(plan, index, node, problems)
    return CheckedCall()


def _size_problems(
    outline: Outline, plan: Draft, calls: Sequence[CheckedCall]
) -> Iterable[HorsiesError]:
    if outline.producer is None:
        return
    limits = outline.producer.config.payload
    for index, call in enumerate(calls):
        stored = EncodedCall("[]", call.kwargs_json)
        if problem := size_problem(limits, plan.nodes[index].name, stored):
            yield WorkflowValidationError(
                f"{plan.says(index)} cannot be stored: {problem}",
                code=ErrorCode.WORKFLOW_KWARGS_NOT_SERIALIZABLE,
            )


def _routes(plan: Draft, router: Router | None, problems: list[HorsiesError]) -> dict[int, Route]:
    routes: dict[int, Route] = {}
    if router is None:
        return routes
    for index, node in enumerate(plan.nodes):
        if isinstance(node, TaskNode | MapNode):
            route = router.route(node)
            if isinstance(route, Route):
                routes[index] = route
            else:
                route.notes = (f"at node {plan.ids[index]!r} of workflow {plan.name!r}",)
                problems.append(route)
    return routes


def _copies(
    plan: Draft, calls: Sequence[CheckedCall], routes: dict[int, Route]
) -> tuple[AnyNode, ...]:
    """Copy the nodes, each reference leading to the copy of what it led to."""
    copies = tuple(object.__new__(type(node)) for node in plan.nodes)
    by_original = {id(node): copy for node, copy in zip(plan.nodes, copies, strict=True)}
    for index, (node, copy) in enumerate(zip(plan.nodes, copies, strict=True)):
        # Straight into the dictionary: the guard of every attribute would cost a node 4 µs.
        values = vars(copy)
        values.update(vars(node))
        values["waits_for"] = tuple(by_original[id(one)] for one in plan.waits_for[index])
        values["node_id"], values["index"] = plan.ids[index], index
        if isinstance(node, CALLING_KINDS):
            values.update(_call_values(node, calls[index], by_original))
        if index in routes:
            values["queue"] = routes[index].queue_name
            values["priority"] = routes[index].priority
        values["id_derived"] = node.node_id is None or node.id_derived
        values["frozen"] = True
    return copies


def _call_values(
    node: Any, call: CheckedCall, by_original: dict[int, AnyNode]
) -> dict[str, object]:
    context = tuple(by_original[id(one)] for one in distinct(node.workflow_ctx_from))
    values: dict[str, object] = {
        "kwargs": MappingProxyType(dict(call.kwargs)),
        "args_from": MappingProxyType(
            {name: by_original[id(one)] for name, one in node.args_from.items()}
        ),
        "workflow_ctx_from": context or None,
    }
    if isinstance(node, MapNode):
        values["over"] = by_original[id(node.over)]
        values["each"] = call.each
    return values


def _stamp(plan: Draft) -> None:
    """Tell the user's nodes their index and id, so that task code can look results up by them."""
    for index, node in enumerate(plan.nodes):
        if node.frozen:
            continue
        derived = node.node_id is None or node.id_derived
        vars(node).update(node_id=plan.ids[index], index=index, id_derived=derived)


def _policy_of_copies(
    plan: Draft, policy: SuccessPolicy | None, copies: Sequence[AnyNode]
) -> SuccessPolicy | None:
    if policy is None:
        return None

    def copied(references: Sequence[NodeReference] | None) -> tuple[AnyNode, ...]:
        found = (find(plan, one) for one in references or ())
        return distinct([copies[index] for index in found if index is not None])

    return SuccessPolicy(
        cases=tuple(SuccessCase(copied(case.required)) for case in policy.cases),
        optional=copied(policy.optional),
    )
