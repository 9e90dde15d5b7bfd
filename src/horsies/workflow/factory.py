"""NodeFactory: ``task.node(**options)(**parameters)``, a node whose parameters are type-checked.

The first call takes what the workflow wants of the node, the second what the task wants of its
caller. Stands before the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, TypeVar

from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.workflow.nodes import AnyNode, FromNode, Join, RunnableTask, TaskNode

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node takes beside the parameters of its task; see ``TaskNode``."""

    waits_for: Sequence[AnyNode] = ()
    args_from: Mapping[str, AnyNode] = field(default_factory=dict)
    workflow_ctx_from: Sequence[AnyNode] | None = None
    node_id: str | None = None
    queue: str | None = None
    priority: int | None = None
    allow_failed_deps: bool = False
    join: Join = "all"
    min_success: int | None = None
    good_until: datetime | None = None
    expires_in: timedelta | None = None
    timeout_ms: int | None = None
    retry_policy: RetryPolicy | None = None


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
        return self._node(sources, fixed)

    def _node(self, sources: Mapping[str, AnyNode], fixed: Mapping[str, Any]) -> TaskNode[T]:
        options = self._options
        self._refuse_overlap(sources)
        return TaskNode(
            self._task,
            kwargs=fixed,
            waits_for=_with_sources(options.waits_for, sources),
            args_from={**options.args_from, **sources},
            workflow_ctx_from=options.workflow_ctx_from,
            queue=options.queue,
            priority=options.priority,
            allow_failed_deps=options.allow_failed_deps,
            join=options.join,
            min_success=options.min_success,
            good_until=options.good_until,
            expires_in=options.expires_in,
            timeout_ms=options.timeout_ms,
            retry_policy=options.retry_policy,
            node_id=options.node_id,
        )

    def _refuse_overlap(self, sources: Mapping[str, AnyNode]) -> None:
        twice = [name for name in sources if name in self._options.args_from]
        if twice:
            raise WorkflowValidationError(
                f"The parameter {twice[0]!r} of task {self._task.definition.name!r} is taken both "
                "from from_node and from args_from.",
                code=ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP,
                help_text="keep one of the two",
            )


def _with_sources(waits_for: Sequence[AnyNode], sources: Mapping[str, AnyNode]) -> list[AnyNode]:
    # By identity: equal-looking nodes are different nodes.
    return list({id(node): node for node in (*waits_for, *sources.values())}.values())
