"""Nodes: what a workflow is made of, before it has a shape.

A node says what to run, with which arguments, and after which other nodes. The user builds nodes and
may change them until a specification takes copies of them; the copies never change again. Stands
before the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    assert_never,
    cast,
    get_origin,
)

from typing_extensions import TypeVar

from horsies.codec.calls import CallSignature
from horsies.codec.results import ResultCodec
from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import TaskDefinition
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
# A signal whose values nobody described may carry anything; a key made of text may name any node.
V_co = TypeVar("V_co", covariant=True, default=Any)

_ANYTHING: Any = Any
_DEFINITION_METHODS = ("own_key", "output_type", "build_signature", "build_with")

Join: TypeAlias = Literal["all", "any", "quorum"]


class RunnableTask(Protocol[T_co]):
    """What a node needs of a task: its definition, and the type of its value."""

    @property
    def definition(self) -> TaskDefinition:
        """The task as it was defined."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> TaskResult[T_co, TaskError]:
        """Run the task here and now."""


class YieldsValue(Protocol[T_co]):
    """What a specification tells the type checker: the type of its result."""

    def output_key(self) -> NodeKey[T_co] | None:
        """The key of the output node."""


class BuildsWorkflow(Protocol[T_co]):
    """What a node needs of a workflow definition."""

    name: ClassVar[str]

    @classmethod
    def build(cls, app: Any) -> YieldsValue[T_co]:
        """Return the specification made of the class's nodes."""

    @classmethod
    def own_key(cls) -> str | None:
        """Return the definition key of this very class."""

    @classmethod
    def output_type(cls) -> Any:
        """Return the type of the result, or UNKNOWN_TYPE."""

    @classmethod
    def build_signature(cls) -> CallSignature | None:
        """Return what the author's own ``build_with`` takes, or None when there is none."""

    @classmethod
    def get_workflow_nodes(cls) -> list[tuple[str, Any]]:
        """Return the nodes declared by the class, with their attribute names."""


# Without slots: a frozen class with slots cannot be called as NodeKey[int]("fetch") before Python 3.12.
@dataclass(frozen=True)
class NodeKey(Generic[V_co]):
    """The name under which a node's result is found in a run.

    Example:
        ctx.result_for(NodeKey("fetch"))
    """

    node_id: str


class ValueNode(Protocol[T_co]):
    """Any node, as far as the type checker is concerned: what has a value of this type."""

    def key(self) -> NodeKey[T_co]:
        """Return the name its result is found under."""


def _guarded_set(node: Any, name: str, value: Any) -> None:
    if node.frozen:
        raise AttributeError(f"a node of a specification is immutable; {name!r} cannot be set")
    if name == "node_id":
        object.__setattr__(node, "id_derived", False)
    object.__setattr__(node, name, value)


def _guarded_delete(node: Any, name: str) -> None:
    if node.frozen:
        raise AttributeError(f"a node of a specification is immutable; {name!r} cannot be deleted")
    object.__delattr__(node, name)


def _shown(node: Any) -> str:
    """Show which node it is; arguments stay out of sight."""
    return f"{type(node).__name__}({node.name!r}, node_id={node.node_id!r})"


def own_name(thing: object) -> str:
    """Name a function or class, or the type of anything else."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def _task_name(task: object) -> str:
    # A node may hold what is no task until a workflow refuses it, and is shown all the same.
    definition: TaskDefinition | None = getattr(task, "definition", None)
    return own_name(task) if definition is None else definition.name


def _key_of(node: Any) -> NodeKey[Any]:
    if node.node_id is None:
        raise WorkflowValidationError(
            f"The node {node.name!r} has no id yet.",
            code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
            help_text="give it a node_id, or ask after the workflow was built",
        )
    return NodeKey(node.node_id)


@dataclass(eq=False, repr=False)
class TaskNode(Generic[T_co]):
    """One task of a workflow; usually made by ``task.node(...)(...)``.

    ``waits_for`` are the nodes it depends on. ``args_from`` hands the ``TaskResult`` of a node over
    as the parameter of that name; ``workflow_ctx_from`` offers results through ``workflow_ctx``.
    ``join`` says how many dependencies must succeed: all, any, or ``min_success`` of them (quorum).
    ``expires_in`` counts from the moment the node is enqueued, ``good_until`` is a fixed time.

    Example:
        total = TaskNode(add, kwargs={"b": 1}, args_from={"a": first}, waits_for=[first])
    """

    fn: RunnableTask[T_co]
    _: KW_ONLY
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    waits_for: Sequence[AnyNode] = field(default_factory=list)
    args_from: Mapping[str, AnyNode] = field(default_factory=dict)
    workflow_ctx_from: Sequence[AnyNode] | None = None
    queue: str | None = None
    priority: int | None = None
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    good_until: datetime | None = None
    expires_in: timedelta | None = None
    timeout_ms: int | None = None
    retry_policy: RetryPolicy | None = None
    node_id: str | None = None
    index: int | None = None
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    __setattr__ = _guarded_set
    __delattr__ = _guarded_delete
    __repr__ = _shown

    @property
    def name(self) -> str:
        """The name of the task."""
        return _task_name(self.fn)

    def key(self) -> NodeKey[T_co]:
        """Return the name its result is found under; HRS-003 while it has none."""
        return _key_of(self)


@dataclass(eq=False, repr=False)
class SubWorkflowNode(Generic[T_co]):
    """A whole workflow as one node; its value is the output of the child run.

    Parameters in ``kwargs`` and ``args_from`` go to the definition's own ``build_with``.

    Example:
        billing = SubWorkflowNode(Billing, kwargs={"order_id": 7}, waits_for=[order])
    """

    workflow_def: type[BuildsWorkflow[T_co]]
    _: KW_ONLY
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    waits_for: Sequence[AnyNode] = field(default_factory=list)
    args_from: Mapping[str, AnyNode] = field(default_factory=dict)
    workflow_ctx_from: Sequence[AnyNode] | None = None
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    node_id: str | None = None
    index: int | None = None
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    __setattr__ = _guarded_set
    __delattr__ = _guarded_delete
    __repr__ = _shown

    @property
    def name(self) -> str:
        """The name of the child workflow."""
        return getattr(self.workflow_def, "name", None) or own_name(self.workflow_def)

    def key(self) -> NodeKey[T_co]:
        """Return the name its result is found under; HRS-003 while it has none."""
        return _key_of(self)


@dataclass(eq=False, repr=False)
class MapNode(Generic[T_co]):
    """One task per element of the list that another node returns; the results come in its order.

    ``each`` names the parameter that takes the element; without it, the only required parameter not
    supplied otherwise. At most ``max_parallel`` run at once. With ``allow_failed_items`` the node
    succeeds whatever its tasks return; otherwise one failed task makes it fail.

    Example:
        pages = MapNode(fetch, over=urls, each="url", max_parallel=10)
    """

    fn: RunnableTask[T_co]
    _: KW_ONLY
    over: AnyNode
    each: str | None = None
    max_parallel: int | None = None
    allow_failed_items: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    waits_for: Sequence[AnyNode] = field(default_factory=list)
    args_from: Mapping[str, AnyNode] = field(default_factory=dict)
    workflow_ctx_from: Sequence[AnyNode] | None = None
    queue: str | None = None
    priority: int | None = None
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    good_until: datetime | None = None
    expires_in: timedelta | None = None
    timeout_ms: int | None = None
    retry_policy: RetryPolicy | None = None
    node_id: str | None = None
    index: int | None = None
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    __setattr__ = _guarded_set
    __delattr__ = _guarded_delete
    __repr__ = _shown

    @property
    def name(self) -> str:
        """The name of the task."""
        return _task_name(self.fn)

    def key(self) -> NodeKey[list[TaskResult[T_co, TaskError]]]:
        """Return the name its result is found under; HRS-003 while it has none."""
        return _key_of(self)


@dataclass(eq=False, repr=False)
class SleepNode:
    """A pause in the graph: a number of seconds, or until a moment; no worker waits meanwhile.

    Example:
        pause = SleepNode(3600, waits_for=[reminder])
    """

    seconds: float | None = None
    _: KW_ONLY
    until: datetime | None = None
    waits_for: Sequence[AnyNode] = field(default_factory=list)
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    node_id: str | None = None
    index: int | None = None
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    __setattr__ = _guarded_set
    __delattr__ = _guarded_delete
    __repr__ = _shown

    @property
    def name(self) -> str:
        """The word sleep."""
        return "sleep"

    def key(self) -> NodeKey[None]:
        """Return the name its result is found under; HRS-003 while it has none."""
        return _key_of(self)


@dataclass(eq=False, repr=False)
class SignalNode(Generic[V_co]):
    """A wait for ``handle.signal(name, value)``; the value sent is the node's value.

    A signal that comes early is kept. ``timeout`` counts from the moment the node's dependencies are
    met; after it the node fails with SIGNAL_TIMEOUT.

    Example:
        approval = SignalNode("approve", value_type=bool, timeout=timedelta(days=2))
    """

    name: str
    _: KW_ONLY
    timeout: timedelta | None = None
    value_type: type[V_co] = _ANYTHING
    waits_for: Sequence[AnyNode] = field(default_factory=list)
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    node_id: str | None = None
    index: int | None = None
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    __setattr__ = _guarded_set
    __delattr__ = _guarded_delete
    __repr__ = _shown

    def key(self) -> NodeKey[V_co]:
        """Return the name its result is found under; HRS-003 while it has none."""
        return _key_of(self)


CallingNode: TypeAlias = TaskNode[Any] | SubWorkflowNode[Any] | MapNode[Any]
AnyNode: TypeAlias = CallingNode | SleepNode | SignalNode[Any]
CALLING_KINDS = (TaskNode, SubWorkflowNode, MapNode)
NODE_KINDS = (*CALLING_KINDS, SleepNode, SignalNode)


def is_list(value: object) -> bool:
    """Tell what holds any number of nodes, as often as it is read: no node, text or generator."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def is_definition(candidate: object) -> bool:
    """Tell a class that builds workflows, with or without its type parameters, from all else."""
    owner = get_origin(candidate) or candidate
    return isinstance(owner, type) and all(
        callable(getattr(owner, method, None)) for method in _DEFINITION_METHODS
    )


def value_type(node: AnyNode) -> Any:
    """Return the type of a node's value as declared; UNKNOWN_TYPE where nobody declared it."""
    match node:
        case TaskNode():
            return node.fn.definition.results.ok_type
        case SubWorkflowNode():
            return node.workflow_def.output_type()
        case MapNode():
            item = node.fn.definition.results.ok_type
            return list[TaskResult[item, TaskError]]  # type: ignore[valid-type]
        case SleepNode():
            return None
        case SignalNode():
            return node.value_type
        case _:
            assert_never(node)


def result_codec(node: AnyNode) -> ResultCodec | None:
    """Return what reads a node's stored result; None where nobody declared its type."""
    if isinstance(node, TaskNode):
        return node.fn.definition.results
    declared = value_type(node)
    return None if declared is UNKNOWN_TYPE else codec_for(declared)


def codec_for(declared: Any) -> ResultCodec:
    """Return what reads results with values of this type; ValueError when no JSON can hold it."""
    try:
        return _kept_codec(declared)
    except TypeError:
        # An annotation may hold what has no hash.
        return ResultCodec.of(declared, TaskError)


@functools.lru_cache(maxsize=512)
def _kept_codec(declared: Any) -> ResultCodec:
    # Building one takes milliseconds.
    return ResultCodec.of(declared, TaskError)


@dataclass(frozen=True, slots=True)
class FromNode:
    """Stands for the result of a node until the call it is written in becomes a node."""

    node: AnyNode


def from_node(upstream: ValueNode[T]) -> TaskResult[T, TaskError]:
    """Stand for the result of another node where a parameter takes a ``TaskResult``.

    Only for the second call of ``task.node(...)(...)``; the other node becomes a dependency.

    Example:
        total = add.node()(a=from_node(first), b=from_node(second))
    """
    if isinstance(upstream, NODE_KINDS):
        return cast("TaskResult[T, TaskError]", FromNode(upstream))
    raise WorkflowValidationError(
        f"from_node takes a node, not {type(upstream).__name__}.",
        code=ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
        help_text="make a node first: first = fetch.node()(url=...), then from_node(first)",
    )
