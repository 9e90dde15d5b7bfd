"""Nodes and policies: the building blocks of a workflow.

A node names the task or definition to run, its arguments and its dependencies. Users may change nodes
until a specification copies them; the copies are immutable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    assert_never,
    get_origin,
)

from typing_extensions import TypeVar

from horsies.codec.calls import CallSignature
from horsies.codec.results import ResultCodec
from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.send import TaskCall
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE, cached_by_annotation

T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
# An undeclared signal type accepts any value; a key given as text may name any node.
V_co = TypeVar("V_co", covariant=True, default=Any)

_ANYTHING: Any = Any
_DEFINITION_METHODS = ("own_key", "output_type", "build_signature", "build_with")

Join: TypeAlias = Literal["all", "any", "quorum"]


class RunnableTask(Protocol[T_co]):
    """What a node needs from a task: its definition, and the type of its value."""

    @property
    def definition(self) -> TaskDefinition: ...

    def bind(self, /, *args: Any, **kwargs: Any) -> TaskCall[T_co]: ...


class YieldsValue(Protocol[T_co]):
    """A specification for the type checker: it has a result of this type."""

    def output_key(self) -> NodeKey[T_co] | None: ...


class BuildsWorkflow(Protocol[T_co]):
    """What a node needs from a workflow definition."""

    @property
    def name(self) -> str: ...

    @classmethod
    def build(cls, app: Any) -> YieldsValue[T_co]: ...

    @classmethod
    def own_key(cls) -> str | None: ...

    @classmethod
    def output_type(cls) -> Any: ...

    @classmethod
    def build_signature(cls) -> CallSignature | None: ...

    @classmethod
    def get_workflow_nodes(cls) -> list[tuple[str, Any]]: ...


# Without slots, because before Python 3.12 a frozen class with slots cannot be called as
# NodeKey[int]("fetch").
@dataclass(frozen=True)
class NodeKey(Generic[V_co]):
    """The key of a node's result in a run.

    Example:
        ctx.result_for(NodeKey("fetch"))
    """

    node_id: str
    """The id of the node."""


# The hint in the error if a node or from_node(...) is among the arguments of a send.
BELONGS_IN_A_WORKFLOW = "nodes and from_node(...) belong in task.node()(...)"


class ValueNode(Protocol[T_co]):
    """Any node, for the type checker: it has a value of this type."""

    def key(self) -> NodeKey[T_co]:
        """Return the key of the node's result."""


class WholeResult(Protocol[R_co]):
    """Any node, for the type checker: a parameter may take its whole result."""

    def _whole(self) -> R_co: ...


class ItemValues(Protocol[R_co]):
    """A map, for the type checker: a parameter can take the list of its items' values."""

    def _values(self) -> R_co: ...


class OptionalItemValues(Protocol[R_co]):
    """A map whose items may fail, for the type checker: a failed item's value is None."""

    def _optional_values(self) -> R_co: ...


@dataclass(eq=False, repr=False, kw_only=True)
class Node(Generic[R_co]):
    """The attributes common to all kinds of nodes; ``R_co`` is the type of the node's value.

    ``waits_for`` lists the dependencies. ``join`` sets how many of them must succeed: all, any, or at
    least ``min_success`` (quorum). With ``allow_failed_deps`` the node runs even if dependencies fail.
    """

    no_argument: ClassVar[str] = BELONGS_IN_A_WORKFLOW

    waits_for: Sequence[AnyNode] = field(default_factory=list)
    """The nodes that must end before this one starts."""
    allow_failed_deps: bool = False
    """Whether the node runs even if dependencies fail."""
    join: Join = "all"
    """How many dependencies must succeed: ``"all"``, ``"any"`` or ``"quorum"``."""
    min_success: int | None = None
    """How many successes a quorum needs."""
    node_id: str | None = None
    """The id in the run; if omitted, it is derived from the workflow's name and the index."""
    index: int | None = None
    """The position in the workflow, set when the workflow is built."""
    frozen: bool = field(default=False, init=False)
    id_derived: bool = field(default=False, init=False)

    if TYPE_CHECKING:

        def _whole(self) -> TaskResult[R_co, TaskError]: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if self.frozen:
            raise AttributeError(f"a node of a specification is immutable; {name!r} cannot be set")
        if name == "node_id":
            object.__setattr__(self, "id_derived", False)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self.frozen:
            raise AttributeError(
                f"a node of a specification is immutable; {name!r} cannot be deleted"
            )
        object.__delattr__(self, name)

    def __repr__(self: Any) -> str:
        # Omit the arguments, because they may be secret.
        return f"{type(self).__name__}({self.name!r}, node_id={self.node_id!r})"

    def key(self: Any) -> NodeKey[R_co]:
        """Return the key of the node's result; raise HRS-003 while the node has no id."""
        if self.node_id is None:
            raise WorkflowValidationError(
                f"The node {self.name!r} has no id yet.",
                code=ErrorCode.WORKFLOW_INVALID_NODE_ID,
                help_text="give it a node_id, or read the key after the workflow is built",
            )
        return NodeKey(self.node_id)


@dataclass(eq=False, repr=False, kw_only=True)
class CallingNode(Node[R_co]):
    """The attributes of nodes that call a task or a definition.

    ``args_from`` passes a node's value or ``TaskResult``, depending on the annotation, as the parameter
    of that name; ``workflow_ctx_from`` provides results through ``workflow_ctx``.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The arguments, by parameter name."""
    args_from: Mapping[str, AnyNode] = field(default_factory=dict)
    """The nodes whose results are passed, by parameter name."""
    workflow_ctx_from: Sequence[AnyNode] | None = None
    """The nodes whose results ``workflow_ctx`` provides."""


@dataclass(eq=False, repr=False)
class TaskCallingNode(CallingNode[R_co], Generic[T_co, R_co]):
    """The attributes of nodes that call a task, once or for each element of a list.

    ``expires_in`` counts from when the node is enqueued; ``good_until`` is a fixed time.
    """

    fn: RunnableTask[T_co]
    """The task to run."""
    _: KW_ONLY
    queue: str | None = None
    """The queue, instead of the task's own."""
    priority: int | None = None
    """The priority, instead of the queue's."""
    good_until: datetime | None = None
    """The latest time at which the node's task may start."""
    expires_in: timedelta | None = None
    """How long the node's task may wait, once enqueued, before it starts."""
    timeout_ms: int | None = None
    """The time limit of each attempt, instead of the task's own."""
    retry_policy: RetryPolicy | None = None
    """The retry policy, instead of the task's own."""

    @property
    def name(self) -> str:
        """The name of the task."""
        # Until a workflow rejects it, a node may contain a value that is not a task, and repr()
        # must still work.
        definition: TaskDefinition | None = getattr(self.fn, "definition", None)
        return own_name(self.fn) if definition is None else definition.name


@dataclass(eq=False, repr=False)
class TaskNode(TaskCallingNode[T_co, T_co]):
    """One task in a workflow; usually created by ``task.node(...)(...)``.

    Example:
        total = TaskNode(add, kwargs={"b": 1}, args_from={"a": first}, waits_for=[first])
    """


@dataclass(eq=False, repr=False)
class MapNode(TaskCallingNode[T_co, list[TaskResult[T_co, TaskError]]]):
    """Runs one task per element of another node's list; the results have the order of the list.

    ``each`` names the parameter that takes the element; by default, it is the only required parameter
    without another source. At most ``max_parallel`` tasks run at the same time. A failed task fails the
    node, unless ``allow_failed_items`` is set.

    Example:
        pages = MapNode(fetch, over=urls, each="url", max_parallel=10)
    """

    _: KW_ONLY
    over: AnyNode
    """The node whose list is mapped."""
    each: str | None = None
    """The parameter that takes the element."""
    max_parallel: int | None = None
    """How many items may run at the same time; None sets no limit."""
    allow_failed_items: bool = False
    """Whether the node completes even if items fail."""

    if TYPE_CHECKING:

        def _values(self) -> list[T_co]: ...

        def _optional_values(self) -> list[T_co | None]: ...


@dataclass(eq=False, repr=False)
class SubWorkflowNode(CallingNode[T_co]):
    """A whole workflow as one node; its value is the child run's output.

    Parameters in ``kwargs`` and ``args_from`` go to the definition's own ``build_with``.

    Example:
        billing = SubWorkflowNode(Billing, kwargs={"order_id": 7}, waits_for=[order])
    """

    workflow_def: type[BuildsWorkflow[T_co]]
    """The definition of the child workflow."""

    @property
    def name(self) -> str:
        """The name of the child workflow."""
        return getattr(self.workflow_def, "name", None) or own_name(self.workflow_def)


@dataclass(eq=False, repr=False)
class SleepNode(Node[None]):
    """A pause in the graph, for some seconds or until a given time, without occupying a worker.

    Example:
        pause = SleepNode(3600, waits_for=[reminder])
    """

    seconds: float | None = None
    """How long to sleep."""
    _: KW_ONLY
    until: datetime | None = None
    """The time at which the sleep ends."""

    @property
    def name(self) -> str:
        """Always ``sleep``."""
        return "sleep"


@dataclass(eq=False, repr=False)
class SignalNode(Node[V_co]):
    """Waits for ``handle.signal(name, value)``; the sent value becomes the node's value. An early signal
    is stored. ``timeout`` starts when the node's dependencies are met; after it, the node fails with
    SIGNAL_TIMEOUT.

    Example:
        approval = SignalNode("approve", value_type=bool, timeout=timedelta(days=2))
    """

    name: str
    """The name of the signal."""
    _: KW_ONLY
    timeout: timedelta | None = None
    """How long to wait once the dependencies are met; None waits forever."""
    value_type: type[V_co] = _ANYTHING
    """The type that the signal's value must have."""


AnyNode: TypeAlias = (
    TaskNode[Any] | SubWorkflowNode[Any] | MapNode[Any] | SleepNode | SignalNode[Any]
)
"""A node of any kind."""
NODE_KINDS = (TaskNode, SubWorkflowNode, MapNode, SleepNode, SignalNode)


NodeReference: TypeAlias = AnyNode | NodeKey[object] | str


class OnError(StrEnum):
    """How a failed node affects its run. FAIL runs all nodes that can still run and then fails the run;
    PAUSE pauses the run immediately until it is resumed.
    """

    FAIL = "fail"
    """All nodes that can still run do so; then the run fails."""
    PAUSE = "pause"
    """The run is paused immediately and waits to be resumed."""


@dataclass(frozen=True, slots=True)
class SuccessCase:
    """Nodes that make a run a success if they all complete, given as nodes, keys or node ids.

    Example:
        SuccessCase(required=[charge, ship])
    """

    required: Sequence[NodeReference]
    """The nodes that must complete."""


@dataclass(frozen=True, slots=True)
class SuccessPolicy:
    """A run succeeds if all required nodes of at least one case completed.

    ``optional`` nodes may fail without pausing a run whose ``on_error`` is PAUSE.

    Example:
        SuccessPolicy(cases=[SuccessCase([card]), SuccessCase([invoice])], optional=[newsletter])
    """

    cases: Sequence[SuccessCase]
    """The cases; one met case makes the run a success."""
    optional: Sequence[NodeReference] | None = None
    """Nodes whose failure does not pause the run."""


def own_name(thing: object) -> str:
    """Return the name of a function or class, or the type name of any other value."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def node_id_of(node: object) -> str | None:
    """Return the id of a node or key, or None without an id; raise TypeError for any other value."""
    if isinstance(node, (NodeKey, *NODE_KINDS)):
        return node.node_id
    raise TypeError(f"expected a node or a NodeKey, not {type(node).__name__}")


# The error for looking up a node that was not built into a workflow.
NODE_WITHOUT_ID = (
    "A node without an id was looked up: build the workflow that holds it first, or look it up with "
    "NodeKey('its id')."
)


def unique_by_identity(nodes: Collection[AnyNode] | None) -> tuple[AnyNode, ...]:
    """Return the nodes in order without duplicates; equal nodes that are distinct objects all stay."""
    return tuple({id(node): node for node in nodes or ()}.values())


def is_list(value: object) -> bool:
    """Accept any container that can be iterated repeatedly; reject a node, text or generator."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def is_definition(candidate: object) -> bool:
    """Return whether this is a class that builds workflows, with or without its type parameters."""
    owner = get_origin(candidate) or candidate
    return isinstance(owner, type) and all(
        callable(getattr(owner, method, None)) for method in _DEFINITION_METHODS
    )


def value_type(node: AnyNode) -> Any:
    """Return the declared type of a node's value, or UNKNOWN_TYPE."""
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
    """Return the codec for a node's result, or None if its type is not declared."""
    if isinstance(node, TaskNode):
        return node.fn.definition.results
    declared = value_type(node)
    return None if declared is UNKNOWN_TYPE else codec_for(declared)


@cached_by_annotation(512)  # Building a codec takes milliseconds, so codecs are cached.
def codec_for(declared: Any) -> ResultCodec:
    """Return the codec for results with values of this type; raise ValueError if JSON cannot represent
    them.
    """
    return ResultCodec.of(declared, TaskError)
