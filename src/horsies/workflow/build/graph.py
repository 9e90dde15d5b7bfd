"""A graph: a workflow that has been checked as a whole and never changes again.

It consists of copies of the user's nodes: copies refer to copies, and arguments are JSON text. The
user's own nodes only get their index and id. Plans and runs are built from graphs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from horsies.codec.calls import EncodedCall
from horsies.codec.shape import type_text
from horsies.config.app import AppConfig, QueueMode
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    ValidationReport,
    WorkflowValidationError,
    raise_collected,
)
from horsies.tasks.definition import NAME_LENGTH_MAX, choose_queue, is_storable_name
from horsies.tasks.keys import lane_key_problem
from horsies.tasks.request import size_problem
from horsies.tasks.send import Producer
from horsies.workflow.build.calls import EncodedArguments, check_call
from horsies.workflow.build.keys import node_key
from horsies.workflow.build.options import option_problems, type_problems
from horsies.workflow.build.shape import (
    NodeIndex,
    index_nodes,
    output_problems,
    policy_problems,
    shape_problems,
)
from horsies.workflow.nodes.nodes import (
    AnyNode,
    CallingNode,
    MapNode,
    NodeReference,
    OnError,
    SignalNode,
    SuccessCase,
    SuccessPolicy,
    TaskCallingNode,
    unique_by_identity,
)


class Route(NamedTuple):
    """A queue, and the priority in that queue."""

    queue_name: str
    priority: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """A whole workflow: frozen nodes in index order, edges as indexes, arguments as JSON text.

    ``internal_route`` is the route for nodes without their own task. Until an application builds the
    workflow it is None, and nodes without an explicit queue have no route.
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
    # The keys of the nodes' tasks, and the key for tasks that declare none.
    keys: tuple[str | None, ...] = ()
    key: str | None = None


def build_graph(
    name: str,
    tasks: Iterable[object],
    on_error: OnError = OnError.FAIL,
    output: object = None,
    success_policy: SuccessPolicy | None = None,
    definition_key: str | None = None,
    producer: Producer | None = None,
    key: str | None = None,
) -> Graph:
    """Check the whole workflow, then copy its nodes. If there are mistakes, raise all of them and leave
    the nodes unchanged.
    """
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | bytes | Mapping):
        raise WorkflowValidationError(
            f"Workflow {name!r} has tasks of type {type(tasks).__name__}, not a list of nodes.",
            code=ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
            help_text="write app.workflow(name, [...])",
        )
    nodes = index_nodes(name, list(tasks))
    report = ValidationReport(f"workflow {name!r}")
    report.errors.extend(_node_problems(nodes))
    report.errors.extend(shape_problems(nodes))
    report.errors.extend(output_problems(nodes, output))
    report.errors.extend(policy_problems(nodes, success_policy))
    report.errors.extend(_option_problems(name, on_error, definition_key))
    arguments = [
        check_call(nodes, index, report.errors) if index in nodes.readable else EncodedArguments()
        for index in range(len(nodes.members))
    ]
    keys = tuple(
        node_key(nodes, index, arguments[index].kwargs, report.errors)
        for index in range(len(nodes.members))
    )
    if key is not None and (problem := lane_key_problem(key)):
        report.add(_bad_key(name, problem))
    router = _Router(producer.config) if producer else None
    routes = router.routes(nodes, report.errors) if router else {}
    if producer:
        report.errors.extend(_size_problems(producer, nodes, arguments))
    raise_collected(report)
    copies = _copies(nodes, arguments, routes)
    _stamp(nodes)
    return Graph(
        name=name,
        definition_key=definition_key,
        nodes=copies,
        dependencies=tuple(
            tuple(nodes.positions[id(other)] for other in others) for others in nodes.waits_for
        ),
        kwargs_json=tuple(one.kwargs_json for one in arguments),
        on_error=OnError(on_error),
        output_index=None if output is None else nodes.find(output),
        success_policy=_policy_of_copies(nodes, success_policy, copies),
        producer=producer,
        internal_route=router.internal(routes.values()) if router else None,
        keys=keys,
        key=key,
    )


def _bad_key(name: str, problem: str) -> WorkflowValidationError:
    return WorkflowValidationError(
        f"Workflow {name!r} has a key that cannot be stored: {problem}.",
        code=ErrorCode.TASK_INVALID_OPTIONS,
    )


def key_problem(definition_key: object) -> str | None:
    """Explain why a value cannot be a definition key, or return None."""
    if not isinstance(definition_key, str) or not definition_key.strip():
        return "has no definition_key"
    if not is_storable_name(definition_key):
        return f"has a definition_key that is not plain text of 1 to {NAME_LENGTH_MAX} characters"
    return None


def no_key(owner: str, problem: str) -> WorkflowValidationError:
    """Return the error for a workflow without a usable definition key."""
    return WorkflowValidationError(
        f"{owner} {problem}.",
        code=ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
        help_text='give the workflow a stable name: definition_key="orders.fulfil.v1"',
    )


def _node_problems(nodes: NodeIndex) -> Iterator[HorsiesError]:
    for index, node in enumerate(nodes.members):
        for problem in chain(type_problems(node), option_problems(node)):
            yield nodes.error(index, *problem)
    yield from _conflicting_signals(nodes)


def _conflicting_signals(nodes: NodeIndex) -> Iterator[HorsiesError]:
    """Find signals that several nodes wait for with different value types.

    A signal may reach any of these nodes, so they must all accept the same type.
    """
    first_use: dict[str, tuple[str, Any]] = {}
    for node_id, node in zip(nodes.ids, nodes.members, strict=True):
        if not isinstance(node, SignalNode) or not isinstance(node.name, str):
            continue
        first_id, declared = first_use.setdefault(node.name, (node_id, node.value_type))
        if declared != node.value_type:
            yield WorkflowValidationError(
                f"Nodes {first_id!r} and {node_id!r} of workflow {nodes.workflow_name!r} wait for "
                f"the same signal {node.name!r} with values of different types, "
                f"{type_text(declared)} and {type_text(node.value_type)}.",
                code=ErrorCode.TASK_INVALID_OPTIONS,
                help_text="give both nodes the same value_type, or give one node another signal "
                "name",
            )


def _option_problems(
    name: str, on_error: OnError, definition_key: str | None
) -> Iterator[HorsiesError]:
    if on_error not in list(OnError):
        yield WorkflowValidationError(
            f"Workflow {name!r} has an on_error that is neither OnError.FAIL nor OnError.PAUSE.",
            code=ErrorCode.TASK_INVALID_OPTIONS,
        )
    if definition_key is not None and (problem := key_problem(definition_key)):
        yield no_key(f"Workflow {name!r}", problem)


def _size_problems(
    producer: Producer, nodes: NodeIndex, arguments: Sequence[EncodedArguments]
) -> Iterator[HorsiesError]:
    for index, one in enumerate(arguments):
        stored = EncodedCall("[]", one.kwargs_json)
        if problem := size_problem(producer.config.payload, nodes.members[index].name, stored):
            text = f"cannot be stored: {problem.rstrip('.')}"
            yield nodes.error(index, ErrorCode.WORKFLOW_KWARGS_NOT_SERIALIZABLE, text)


class _Router:
    """The queues of one application, looked up once for all nodes."""

    __slots__ = ("_config", "_open", "_queues")

    def __init__(self, config: AppConfig) -> None:
        queues = config.queues()
        self._config = config
        self._queues = {queue.name: Route(queue.name, queue.priority) for queue in queues}
        # A cap of 0 pauses the queue.
        self._open = [queue.name for queue in queues if queue.max_concurrency != 0]

    def internal(self, routes: Iterable[Route]) -> Route:
        """Return the route for sub-workflows, sleeps and signals: the first queue of the workflow's
        tasks, because workers must serve it anyway, or else the application's first queue.
        """
        used = {route.queue_name for route in routes}
        names = [name for name in self._open if name in used] or self._open or [*self._queues]
        return self._queues[names[0]]

    def routes(self, nodes: NodeIndex, problems: list[HorsiesError]) -> dict[int, Route]:
        """Return the routes of the nodes that have tasks; mistakes are added to the problems."""
        routes: dict[int, Route] = {}
        for index, node in enumerate(nodes.members):
            if not isinstance(node, TaskCallingNode):
                continue
            route = self._route(node)
            if isinstance(route, Route):
                priority = route.priority if node.priority is None else node.priority
                routes[index] = Route(route.queue_name, priority)
            else:
                where = f"at node {nodes.ids[index]!r} of workflow {nodes.workflow_name!r}"
                route.notes = (where,)
                problems.append(route)
        return routes

    def _route(self, node: TaskCallingNode[Any, Any]) -> Route | ConfigurationError:
        name = node.queue or node.fn.definition.queue_name
        known = self._queues.get(name)
        if known is not None:
            return known
        if node.queue is not None:
            try:
                return self._queues[choose_queue(self._config, node.queue, None).name]
            except ConfigurationError as error:
                return error
        custom = self._config.queue_mode is QueueMode.CUSTOM
        return ConfigurationError(
            f"Task {node.name!r} belongs to queue {name!r}, which this application does not have.",
            code=ErrorCode.TASK_INVALID_QUEUE if custom else ErrorCode.CONFIG_INVALID_QUEUE_MODE,
            help_text=f"give the node one of: {', '.join(self._queues)}",
        )


def _copies(
    nodes: NodeIndex, arguments: Sequence[EncodedArguments], routes: Mapping[int, Route]
) -> tuple[AnyNode, ...]:
    """Copy the nodes; the copies refer to each other, not to the originals."""
    copies = tuple(object.__new__(type(node)) for node in nodes.members)
    by_original = {id(node): copy for node, copy in zip(nodes.members, copies, strict=True)}
    for index, (node, copy) in enumerate(zip(nodes.members, copies, strict=True)):
        # Write the attributes directly into the dictionary, because the guard would cost 4 µs per
        # node.
        values = vars(copy)
        values.update(vars(node))
        values["waits_for"] = tuple(by_original[id(one)] for one in nodes.waits_for[index])
        values["node_id"], values["index"] = nodes.ids[index], index
        if isinstance(node, CallingNode):
            values.update(_call_values(node, arguments[index], by_original))
        if index in routes:
            values["queue"], values["priority"] = routes[index]
        values["id_derived"] = node.node_id is None or node.id_derived
        values["frozen"] = True
    return copies


def _call_values(
    node: CallingNode[Any], arguments: EncodedArguments, by_original: Mapping[int, AnyNode]
) -> dict[str, object]:
    context = tuple(by_original[id(one)] for one in unique_by_identity(node.workflow_ctx_from))
    values: dict[str, object] = {
        "kwargs": MappingProxyType(dict(arguments.kwargs)),
        "args_from": MappingProxyType(
            {name: by_original[id(one)] for name, one in node.args_from.items()}
        ),
        "workflow_ctx_from": context or None,
    }
    if isinstance(node, MapNode):
        values["over"] = by_original[id(node.over)]
        values["each"] = arguments.each
    return values


def _stamp(nodes: NodeIndex) -> None:
    """Set index and id on the user's nodes, so that task code can look up results by node."""
    for index, node in enumerate(nodes.members):
        if not node.frozen:
            derived = node.node_id is None or node.id_derived
            vars(node).update(node_id=nodes.ids[index], index=index, id_derived=derived)


def _policy_of_copies(
    nodes: NodeIndex, policy: SuccessPolicy | None, copies: Sequence[AnyNode]
) -> SuccessPolicy | None:
    if policy is None:
        return None

    def copied(references: Collection[NodeReference] | None) -> tuple[AnyNode, ...]:
        found = (nodes.find(one) for one in references or ())
        return unique_by_identity([copies[index] for index in found if index is not None])

    return SuccessPolicy(
        cases=tuple(SuccessCase(copied(case.required)) for case in policy.cases),
        optional=copied(policy.optional),
    )
