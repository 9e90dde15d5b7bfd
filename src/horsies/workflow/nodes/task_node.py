"""NodeFactory: ``task.node(**options)(**parameters)``, a node whose parameters are type-checked.

The first call takes the options of the node in the workflow, the second the parameters of the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar

from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.workflow.nodes.nodes import (
    AnyNode,
    FromNode,
    Join,
    RunnableTask,
    TaskNode,
    is_list,
    unique_by_identity,
)

P = ParamSpec("P")
T = TypeVar("T")


class NodeOptions(TypedDict, total=False):
    """The options of a node beside the parameters of its task; see ``TaskNode``."""

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
    """Makes nodes of one task with the options given to ``task.node(...)``."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: RunnableTask[T], options: NodeOptions) -> None:
        self._task = task
        self._options = options

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskNode[T]:
        """Return the node that calls the task with these parameters, all given by name."""
        if args:
            raise WorkflowValidationError(
                f"The parameters of a node of {self._task.definition.name!r} are given by name.",
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
            return options  # the workflow that takes the node reports the mistake
        twice = [name for name in sources if name in args_from]
        if twice:
            raise WorkflowValidationError(
                f"The parameter {twice[0]!r} of task {self._task.definition.name!r} is taken both "
                "from from_node and from args_from.",
                code=ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP,
                help_text="keep one of the two",
            )
        awaited = unique_by_identity((*options.get("waits_for", ()), *sources.values()))
        return {
            **options,
            "waits_for": list(awaited),
            "args_from": {**args_from, **sources},
        }
