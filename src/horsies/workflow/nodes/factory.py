"""The node factory: ``task.node(**options)(**parameters)``.

The first call takes the node's options in the workflow; the second takes the task's parameters, which
are type-checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, ParamSpec, TypedDict

from typing_extensions import TypeVar

from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.workflow.nodes.nodes import (
    BELONGS_IN_A_WORKFLOW,
    NODE_KINDS,
    AnyNode,
    ItemValues,
    Join,
    OptionalItemValues,
    RunnableTask,
    TaskNode,
    ValueNode,
    WholeResult,
    is_list,
    unique_by_identity,
)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", default=Any)


@dataclass(frozen=True, slots=True)
class FromNode:
    """A placeholder for a node's result in a ``task.node(...)`` call."""

    no_argument: ClassVar[str] = BELONGS_IN_A_WORKFLOW

    node: AnyNode


def from_node(
    upstream: ValueNode[R] | WholeResult[R] | ItemValues[R] | OptionalItemValues[R],
) -> R | Any:
    """Pass the result of another node as a task parameter.

    A parameter annotated ``T`` takes the node's value; one annotated ``TaskResult[T, TaskError]`` takes
    its whole result, errors included. For a map, ``list[T]`` takes the items' values. Valid only in the
    second call of ``task.node(...)(...)``; the other node becomes a dependency.

    Example:
        total = add.node()(a=from_node(first), b=from_node(second))
    """
    # R is inferred from the parameter; "| Any" lets mypy infer it even if the parameter is not
    # generic.
    if isinstance(upstream, NODE_KINDS):
        return FromNode(upstream)
    raise WorkflowValidationError(
        f"from_node takes a node, not {type(upstream).__name__}.",
        code=ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
        help_text="make a node first: first = fetch.node()(url=...), then from_node(first)",
    )


class NodeOptions(TypedDict, total=False):
    """The options of a node, without its task's parameters; see ``TaskNode``."""

    waits_for: Sequence[AnyNode]
    args_from: Mapping[str, AnyNode]
    workflow_ctx_from: Sequence[AnyNode] | None
    node_id: str | None
    queue: str | None
    priority: int | None
    allow_failed_deps: bool
    join: Join
    min_success: int | None
    good_until: datetime | None
    expires_in: timedelta | None
    timeout_ms: int | None
    retry_policy: RetryPolicy | None


class NodeFactory(Generic[P, T]):
    """Creates nodes of one task, with the options passed to ``task.node(...)``."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: RunnableTask[T], options: NodeOptions) -> None:
        if unknown := [name for name in options if name not in NodeOptions.__annotations__]:
            name = task.definition.name
            raise WorkflowValidationError(
                f"A node of task {name!r} has no option {unknown[0]!r}.",
                code=ErrorCode.TASK_INVALID_OPTIONS,
                help_text=f"the options are {', '.join(NodeOptions.__annotations__)}; the parameters "
                "of the task belong in the second call: task.node(...)(url=...)",
            )
        self._task = task
        self._options = options

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskNode[T]:
        """Return the node that calls the task with these parameters, all passed by name."""
        if args:
            raise WorkflowValidationError(
                f"The parameters of a node of {self._task.definition.name!r} must be passed by name.",
                code=ErrorCode.WORKFLOW_POSITIONAL_ARGS_NOT_SUPPORTED,
                help_text="write the name of each parameter: task.node()(order_id=7)",
            )
        sources = {name: value.node for name, value in kwargs.items() if type(value) is FromNode}
        fixed = {name: value for name, value in kwargs.items() if name not in sources}
        return TaskNode(self._task, kwargs=fixed, **self._with_sources(sources))

    def _with_sources(self, sources: dict[str, AnyNode]) -> NodeOptions:
        options = self._options
        args_from: Mapping[str, Any] = options.get("args_from") or {}
        if not is_list(options.get("waits_for", ())) or not isinstance(args_from, Mapping):
            return options  # The workflow that uses the node reports the mistake.
        twice = [name for name in sources if name in args_from]
        if twice:
            raise WorkflowValidationError(
                f"The parameter {twice[0]!r} of task {self._task.definition.name!r} is taken "
                "from both from_node and args_from.",
                code=ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP,
                help_text="keep only one of them",
            )
        awaited = unique_by_identity((*options.get("waits_for", ()), *sources.values()))
        return {**options, "waits_for": list(awaited), "args_from": {**args_from, **sources}}
