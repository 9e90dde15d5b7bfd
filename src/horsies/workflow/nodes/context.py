"""A task's workflow context: its node, and the results of other nodes.

A worker's child process passes ``workflow_ctx`` and ``workflow_meta`` to a task function that declares
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from horsies.codec.results import ResultCodec, decode_untyped
from horsies.error_codes import OperationalErrorCode
from horsies.errors import WorkflowContextMissingIdError
from horsies.states import WorkflowStatus
from horsies.task_result import SubWorkflowSummary, TaskError, TaskResult
from horsies.tasks.handle import error_result
from horsies.workflow.nodes.nodes import (
    NODE_KINDS,
    NODE_WITHOUT_ID,
    NodeKey,
    SubWorkflowNode,
    ValueNode,
    node_id_of,
    result_codec,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkflowMeta:
    """A task's run and node; declare ``workflow_meta: WorkflowMeta | None = None``."""

    workflow_id: str
    """The id of the run."""
    task_index: int
    """The position of the task's node."""
    task_name: str
    """The name of the task."""


@dataclass(frozen=True, slots=True)
class UpstreamResult:
    """A node's stored result, decoded on access.

    ``codec`` is the codec of the node's task, if known; if the user passes a node, the node's codec
    takes precedence.
    """

    result_json: str = field(repr=False)
    summary_json: str | None = field(default=None, repr=False)
    codec: ResultCodec | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """The results of the nodes listed in ``workflow_ctx_from``.

    Example:
        @app.task("report")
        def report(workflow_ctx: WorkflowContext | None = None) -> str:
            total = workflow_ctx.result_for(total_node)
            return f"{total.ok_value} orders" if total.is_ok() else "no orders"
    """

    workflow_id: str
    """The id of the run."""
    task_index: int
    """The position of the task's node."""
    task_name: str
    """The name of the task."""
    results: Mapping[str, UpstreamResult | TaskResult[Any, TaskError]] = field(
        default_factory=dict, repr=False
    )
    """The results of the listed nodes, by node id; use ``result_for`` to read them."""
    summaries: Mapping[str, SubWorkflowSummary[Any]] = field(default_factory=dict, repr=False)
    """The summaries of listed sub-workflows, by node id."""

    def result_for(self, node: ValueNode[T] | NodeKey[T]) -> TaskResult[T, TaskError]:
        """Return the result of a listed node; raise KeyError for any other node. A skipped node's result
        is an error with UPSTREAM_SKIPPED; a failed node's result is the node's own error.
        """
        found = self.results[self._listed(node)]
        return found if isinstance(found, TaskResult) else _read(found, node)

    def has_result(self, node: ValueNode[Any] | NodeKey[Any]) -> bool:
        """Return whether the node is listed."""
        return node_id_of(node) in self.results

    def summary_for(self, node: SubWorkflowNode[T] | NodeKey[T]) -> SubWorkflowSummary[T]:
        """Return the outcome of a listed sub-workflow node's child run; raise KeyError if it has none."""
        node_id = self._listed(node)
        if node_id in self.summaries:
            return self.summaries[node_id]
        found = self.results[node_id]
        if not isinstance(found, UpstreamResult) or found.summary_json is None:
            raise KeyError(f"node {node_id!r} has no child run that ended")
        summary = SubWorkflowSummary[Any].model_validate_json(found.summary_json)
        if summary.status is not WorkflowStatus.COMPLETED:
            return summary
        # The output is stored only as the node's result, so read it from there.
        return summary.model_copy(update={"output": self.result_for(node).ok})

    def has_summary(self, node: SubWorkflowNode[Any] | NodeKey[Any]) -> bool:
        """Return whether the node is listed and had a child run that has ended."""
        node_id = node_id_of(node)
        if node_id is None:
            return False
        found = self.results.get(node_id)
        return node_id in self.summaries or (
            isinstance(found, UpstreamResult) and found.summary_json is not None
        )

    def _listed(self, node: object) -> str:
        node_id = node_id_of(node)
        if node_id is None:
            raise WorkflowContextMissingIdError(NODE_WITHOUT_ID)
        if node_id not in self.results and node_id not in self.summaries:
            raise KeyError(f"node {node_id!r} is not in workflow_ctx_from of this node")
        return node_id


def _read(found: UpstreamResult, node: object) -> TaskResult[Any, TaskError]:
    codec = (result_codec(node) if isinstance(node, NODE_KINDS) else None) or found.codec
    read = decode_untyped(found.result_json) if codec is None else codec.decode(found.result_json)
    code = OperationalErrorCode.RESULT_DESERIALIZATION_ERROR
    return read.unwrap_or_else(lambda problem: error_result(code, problem.message))
