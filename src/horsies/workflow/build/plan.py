"""The plan: a workflow as a single JSON text from which the database creates a run.

The text contains all facts about the graph that the engine in the database needs: edges in both
directions, the users of each result, queues, retries and deadlines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol, assert_never
from weakref import WeakKeyDictionary

from pydantic_core import to_json

from horsies.codec.canonical import canonical
from horsies.current_task import inherited_headers
from horsies.encryption import Digests, Payloads
from horsies.error_codes import OperationalErrorCode
from horsies.errors import ErrorCode, ValidationReport, WorkflowValidationError, raise_collected
from horsies.ids import stored_form
from horsies.retry import RetryPolicy
from horsies.tasks.options import TaskOptions, encode_options
from horsies.tasks.request import max_retries
from horsies.tracing import with_carrier
from horsies.workflow.build.graph import Graph, key_problem, no_key
from horsies.workflow.build.shape import NESTING_DEPTH_MAX
from horsies.workflow.nodes.nodes import (
    AnyNode,
    CallingNode,
    MapNode,
    OnError,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskCallingNode,
    TaskNode,
)
from horsies.workflow.nodes.type_compat import takes_value

EXPAND_TASK = "horsies.expand"
SLEEP_TASK = "horsies.sleep"
SIGNAL_TASK = "horsies.signal"

# The built-in tasks are idempotent, so they are retried after a worker's crash or stop.
INTERNAL_POLICY = RetryPolicy.fixed(
    [1, 5, 15],
    auto_retry_for=[OperationalErrorCode.WORKER_CRASHED, OperationalErrorCode.WORKER_STOPPED],
)

# The fields by which two requests differ. Queues, priorities, retries and time limits are excluded
# because they come from configuration; deadlines are excluded because they usually count from now.
_FINGERPRINT_FIELDS = (
    *("node_id", "kind", "task_name", "task_kwargs", "inputs"),
    *("dependencies", "join_type", "min_success", "allow_failed_deps"),
    *("delay_ms", "not_before", "signal_name", "signal_timeout_ms"),
    *("map_over", "map_parameter", "max_parallel", "allow_failed_items", "sub_definition_key"),
)


# Marks the stored arguments of a node if a map may run over its result; see ``_encrypted``.
_MAPPED = '"mapped":true'
_NO_INPUTS = '{"args":{},"context":{}'


class HasGraph(Protocol):
    """What a plan needs from a specification."""

    @property
    def graph(self) -> Graph: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The node of a parent run that started a child run."""

    workflow_id: str
    task_index: int
    root_workflow_id: str
    depth: int


def plan(
    spec: HasGraph,
    workflow_id: str,
    *,
    workflow_key: str | None = None,
    sent_at: datetime | None = None,
    parent: Parent | None = None,
    key: str | None = None,
) -> str:
    """Return the JSON text of a run to start, or raise an error if the workflow cannot be started.

    ``key`` overrides the specification's key. ``workflow_id`` must be a UUID (HRS-032). The workflow
    needs a definition key (HRS-016), and must have been built by an application that has its queues
    (HRS-014, HRS-015).
    """
    graph = spec.graph
    lane_key = graph.key if key is None else key
    run_id = read_workflow_id(workflow_id)
    _refuse_incomplete(graph)
    depth = parent.depth + 1 if parent else 0
    if depth > NESTING_DEPTH_MAX:
        raise WorkflowValidationError(
            f"Workflow {graph.name!r} would be nested {depth} levels deep.",
            code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
            help_text=f"nest at most {NESTING_DEPTH_MAX} levels; does the workflow contain itself?",
        )
    own = to_json(
        {
            "id": run_id,
            "workflow_key": workflow_key,
            "sent_at": _iso(sent_at or datetime.now(UTC)),
            "parent_workflow_id": parent.workflow_id if parent else None,
            "parent_task_index": parent.task_index if parent else None,
            "depth": depth,
            "root_workflow_id": parent.root_workflow_id if parent else run_id,
            **({} if lane_key is None else {"lane_key": lane_key}),
        }
    ).decode()
    return f"{own[:-1]},{_shared(graph).text}"


def with_trace(plan_json: str, carrier: Mapping[str, str]) -> str:
    """Return a plan whose tasks have a span's context; the plan's fingerprint stays the same."""
    if not carrier:
        return plan_json
    run = json.loads(plan_json)
    for node in run["nodes"]:
        if node["task_name"] not in (SLEEP_TASK, SIGNAL_TASK):
            node["task_options"] = with_carrier(node["task_options"], carrier)
    return to_json(run).decode()


def fingerprints(spec: HasGraph) -> tuple[str, ...]:
    """Return the digests of the request: key, nodes, edges, arguments and policies. The first digest is
    stored with a run; an equal request may have been stored with any of them. The digests do not depend
    on the time, the run's id, or the order of edges and dict keys.
    """
    _refuse_incomplete(spec.graph)
    return _shared(spec.graph).fingerprints


def read_workflow_id(workflow_id: object) -> str:
    """Return an id as the database writes it; raise HRS-032 if it is not a UUID."""
    stored = stored_form(workflow_id)
    if stored is None:
        raise WorkflowValidationError(
            "A workflow_id must be a UUID.",
            code=ErrorCode.WORKFLOW_INVALID_ID,
            help_text="leave it out, or use workflow_key for a name of your own",
        )
    return stored


class _Shared(NamedTuple):
    """The parts that the plans of all runs of a graph share: the fingerprints, and the rest of the text."""

    fingerprints: tuple[str, ...]
    text: str


# Cached, because writing this part for five nodes takes as long as a send.
_KNOWN: WeakKeyDictionary[Graph, _Shared] = WeakKeyDictionary()


def _shared(graph: Graph) -> _Shared:
    """Return the shared part of a graph's plans from the cache. A run started by a task gets its own
    part, because its nodes inherit the task's headers.
    """
    if inherited_headers():
        return _write_shared(graph)
    known = _KNOWN.get(graph)
    if known is None:
        known = _KNOWN[graph] = _write_shared(graph)
    return known


def _write_shared(graph: Graph) -> _Shared:
    nodes = list(_node_plans(graph))
    broker = None if graph.producer is None else graph.producer.config.broker
    digests = Digests(None if broker is None else broker.codec).known(_request(graph, nodes))
    if broker is not None and (payloads := Payloads.of(broker)):
        nodes = _encrypted(graph, nodes, payloads)
    # String formatting is four times as fast as the json module, which takes 20 ms for a thousand
    # nodes.
    text = to_json(
        {
            "name": graph.name,
            "fingerprint": digests[0],
            **_whole(graph),
            "nodes": [_without_nulls(node) for node in nodes],
        }
    ).decode()
    return _Shared(digests, text[1:])


def _encrypted(
    graph: Graph, nodes: list[dict[str, Any]], payloads: Payloads
) -> list[dict[str, Any]]:
    """Return the nodes with encrypted arguments. A map's tasks are created in the database, one per
    element of a list. A node that may return such a list is therefore marked, so that its elements are
    encrypted one by one.
    """
    mapped = {node.get("map_over") for node in nodes} | {graph.output_index}
    return [
        node
        | {"task_kwargs": _encrypted_kwargs(node, payloads)}
        | ({"inputs": _marked(node)} if node["kind"] == "task" and index in mapped else {})
        for index, node in enumerate(nodes)
    ]


def _encrypted_kwargs(node: dict[str, Any], payloads: Payloads) -> str:
    text: str = node["task_kwargs"]
    if node["kind"] != "workflow":
        return payloads.encrypt(text)
    # The key stays readable, because a worker uses it to check whether it has the definition.
    head = _expansion_head(node["sub_definition_key"])
    return f"{head}{payloads.encrypt(text[len(head) : -1])}}}"


def _expansion_head(definition_key: str | None) -> str:
    return f'{{"definition_key":{json.dumps(definition_key)},"kwargs":'


def _marked(node: dict[str, Any]) -> str:
    inputs: str | None = node.get("inputs")
    return f"{_NO_INPUTS if inputs is None else inputs[:-1]},{_MAPPED}}}"


def is_mapped(inputs: str | None) -> bool:
    """Return whether a map may run over this node's result."""
    return inputs is not None and _MAPPED in inputs


def _without_nulls(node: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: most nodes leave half of them unset, and the server parses
    each one.
    """
    return {name: value for name, value in node.items() if value is not None}


def _request(graph: Graph, nodes: list[dict[str, Any]]) -> bytes:
    """Return the text of a request from which its digests are computed."""
    parts = []
    for node in nodes:
        kwargs, dependencies = canonical(node["task_kwargs"]), sorted(node["dependencies"])
        ordered = node | {"task_kwargs": kwargs, "dependencies": dependencies}
        parts.append([ordered[name] for name in _FINGERPRINT_FIELDS])
    return to_json([_whole(graph), parts])


def _whole(graph: Graph) -> dict[str, Any]:
    policy = graph.success_policy
    return {
        "definition_key": graph.definition_key,
        "on_error": graph.on_error.value,
        "output_index": graph.output_index,
        "success_policy": None
        if policy is None
        else {
            "cases": [{"required_indices": _indices(case.required)} for case in policy.cases],
            "optional_indices": _indices(policy.optional or ()),
        },
    }


def _indices(nodes: Iterable[Any]) -> list[int]:
    return sorted(node.index for node in nodes)


def _refuse_incomplete(graph: Graph) -> None:
    report = ValidationReport(f"workflow {graph.name!r}")
    if problem := key_problem(graph.definition_key):
        report.add(no_key(f"Workflow {graph.name!r}", problem))
    if graph.internal_route is None and (missing := _unrouted(graph)):
        code, what = missing
        report.add(
            WorkflowValidationError(
                f"The {what} of workflow {graph.name!r} are not known: no application built it.",
                code=code,
                help_text="build it with app.workflow(...) instead of WorkflowSpec(...)",
            )
        )
    raise_collected(report)


def _unrouted(graph: Graph) -> tuple[ErrorCode, str] | None:
    if any(getattr(node, "queue", None) is None for node in graph.nodes):
        return ErrorCode.WORKFLOW_UNRESOLVED_QUEUE, "queues"
    if any(getattr(node, "priority", None) is None for node in graph.nodes):
        return ErrorCode.WORKFLOW_UNRESOLVED_PRIORITY, "priorities"
    return None


def _node_plans(graph: Graph) -> Iterator[dict[str, Any]]:
    dependents: list[list[int]] = [[] for _ in graph.nodes]
    context_dependents: list[list[int]] = [[] for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for source in graph.dependencies[index]:
            dependents[source].append(index)
        if isinstance(node, CallingNode):
            for one in node.workflow_ctx_from or ():
                context_dependents[_index(one)].append(index)
    policy, options = graph.success_policy, _TaskOptions()
    optional = frozenset(_indices((policy.optional if policy else None) or ()))
    for index, node in enumerate(graph.nodes):
        yield {
            "task_index": index,
            "node_id": node.node_id,
            **_NO_KIND_VALUES,
            **_kind_values(graph, index, node, options),
            "dependencies": graph.dependencies[index],
            "dependents": dependents[index],
            "context_dependents": context_dependents[index],
            "join_type": node.join,
            "min_success": node.min_success,
            "allow_failed_deps": node.allow_failed_deps,
            "pauses": graph.on_error is OnError.PAUSE and index not in optional,
        }


# The fields that only some kinds of nodes have.
_NO_KIND_VALUES: dict[str, Any] = {
    **dict.fromkeys(("timeout_ms", "good_until", "expires_in_ms", "inputs", "lane_key")),
    **dict.fromkeys(("delay_ms", "not_before", "signal_name", "signal_timeout_ms")),
    **dict.fromkeys(("map_over", "map_parameter", "max_parallel", "max_items")),
    **dict.fromkeys(("sub_definition_key", "sub_workflow_name")),
    "allow_failed_items": False,
}


@dataclass(slots=True)
class _TaskOptions:
    """The stored task options, encoded once for all nodes that share them."""

    known: dict[tuple[int, int, datetime | None], tuple[str, int]] = field(default_factory=dict)

    def of(self, node: TaskCallingNode[Any, Any]) -> tuple[str, int]:
        """Return the stored options of a node's task, and its number of retries."""
        definition = node.fn.definition
        key = (id(definition), id(node.retry_policy), node.good_until)
        if key not in self.known:
            if node.retry_policy is not None:
                definition = replace(definition, retry_policy=node.retry_policy)
            # A run started by a task inherits the task's headers.
            stored = encode_options(definition, node.good_until, inherited_headers())
            self.known[key] = stored, max_retries(definition)
        return self.known[key]


def _kind_values(graph: Graph, index: int, node: AnyNode, options: _TaskOptions) -> dict[str, Any]:
    producer = graph.producer
    match node:
        case TaskNode():
            return {"kind": "task", **_task_values(graph, index, node, options)}
        case MapNode():
            return {
                "kind": "map",
                **_task_values(graph, index, node, options),
                "map_over": node.over.index,
                "map_parameter": node.each,
                "max_parallel": node.max_parallel,
                "max_items": producer.config.payload.max_map_items if producer else None,
                "allow_failed_items": node.allow_failed_items,
            }
        case SubWorkflowNode():
            key = node.workflow_def.own_key()
            # The arguments are already JSON text and must be kept byte for byte.
            kwargs = f"{_expansion_head(key)}{graph.kwargs_json[index]}}}"
            return {
                "kind": "workflow",
                **_internal_values(graph, EXPAND_TASK),
                "task_kwargs": kwargs,
                "inputs": _inputs(node),
                "sub_definition_key": key,
                "sub_workflow_name": node.name,
            }
        case SleepNode():
            return {
                "kind": "sleep",
                **_internal_values(graph, SLEEP_TASK),
                "delay_ms": None if node.seconds is None else round(node.seconds * 1000),
                "not_before": None if node.until is None else _iso(node.until),
            }
        case SignalNode():
            return {
                "kind": "signal",
                **_internal_values(graph, SIGNAL_TASK),
                "signal_name": node.name,
                "signal_timeout_ms": _milliseconds(node.timeout),
            }
        case _:
            assert_never(node)


def _task_values(
    graph: Graph, index: int, node: TaskCallingNode[Any, Any], options: _TaskOptions
) -> dict[str, Any]:
    definition = node.fn.definition
    task_options, retries = options.of(node)
    return {
        "task_name": definition.name,
        "task_kwargs": graph.kwargs_json[index],
        "queue_name": node.queue,
        "priority": node.priority,
        "task_options": task_options,
        "max_retries": retries,
        "timeout_ms": definition.timeout_ms if node.timeout_ms is None else node.timeout_ms,
        "good_until": None if node.good_until is None else _iso(node.good_until),
        "expires_in_ms": _milliseconds(node.expires_in),
        "inputs": _inputs(node),
        "lane_key": graph.keys[index],
    }


def _internal_values(graph: Graph, task_name: str) -> dict[str, Any]:
    route = graph.internal_route
    assert route is not None
    # The headers are passed on to the sub-workflow.
    headers = inherited_headers() if task_name == EXPAND_TASK else None
    return {
        "task_name": task_name,
        "queue_name": route.queue_name,
        "priority": route.priority,
        "task_kwargs": "{}",
        "task_options": TaskOptions(INTERNAL_POLICY, headers=headers or {}).to_json(),
        "max_retries": INTERNAL_POLICY.max_retries,
    }


def _inputs(node: CallingNode[Any]) -> str | None:
    element = _unwrapped_element(node)
    if not node.args_from and not node.workflow_ctx_from and element is None:
        return None
    context = sorted(node.workflow_ctx_from or (), key=_index)
    # Sort here for the plan and the fingerprint, because parsing the text again costs more.
    return to_json(
        {
            "args": {name: node.args_from[name].index for name in sorted(node.args_from)},
            "context": {one.node_id: one.index for one in context},
            **({} if element is None else {"element": element}),
        }
    ).decode()


def _unwrapped_element(node: CallingNode[Any]) -> str | None:
    """Return the element parameter of a map over another map, if the parameter takes an item's value
    rather than its whole result.
    """
    if not isinstance(node, MapNode) or not isinstance(node.over, MapNode) or node.each is None:
        return None
    annotation = node.fn.definition.signature.annotation_of(node.each)
    return node.each if takes_value(annotation) else None


def _index(node: AnyNode) -> int:
    assert node.index is not None
    return node.index


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat()


def _milliseconds(span: timedelta | None) -> int | None:
    return None if span is None else round(span.total_seconds() * 1000)
