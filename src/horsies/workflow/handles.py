"""Handles for runs that were started elsewhere.

The stored nodes name their tasks and sub-workflows; the result types come from the tasks and
definitions registered in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from horsies.codec.results import ResultCodec
from horsies.db.statements.workflows import NodeRow
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import PostgresBroker
from horsies.tasks.definition import TaskDefinition
from horsies.workflow.definition import definition_by_key
from horsies.workflow.nodes.nodes import codec_for
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.results import DeclaredTypes


class DefinedTask(Protocol):
    @property
    def definition(self) -> TaskDefinition: ...


FindTask = Callable[[str], DefinedTask | None]


class WorkflowHandles:
    """``app.workflow_handle``: creates a handle from a run's id, and finds the types of the run's
    results.

    Example:
        handle = app.workflow_handle(workflow_id)
        print(handle.get(timeout_ms=0))
    """

    __slots__ = ("_find_task", "_get_broker")

    def __init__(self, get_broker: Callable[[], PostgresBroker], find_task: FindTask) -> None:
        self._get_broker = get_broker
        self._find_task = find_task

    def __call__(self, workflow_id: str) -> WorkflowHandle[Any]:
        """Return a handle for a run, without querying the database yet."""
        broker = self._get_broker()
        find_types = partial(RegisteredTypes, find_task=self._find_task)
        return WorkflowHandle(workflow_id, broker, find_types=find_types)


class RegisteredTypes:
    """The result types of a run, if its tasks and definitions are registered in this process."""

    __slots__ = ("_declared", "_find_task", "_rows")

    def __init__(self, rows: Sequence[NodeRow], find_task: FindTask) -> None:
        self._rows: Mapping[str, NodeRow] = {row.node_id: row for row in rows}
        self._find_task = find_task
        definition = definition_by_key(rows[0].definition_key) if rows else None
        nodes = [] if definition is None else definition.get_workflow_nodes()
        self._declared = DeclaredTypes([node for _, node in nodes])

    def codec(self, node_id: str) -> ResultCodec | None:
        row = self._rows.get(node_id)
        if row is None:
            return self._declared.codec(node_id)
        match row.kind:
            case "task" | "map":
                task = self._find_task(row.task_name)
                results = None if task is None else task.definition.results
                if results is None or row.kind == "task":
                    return results
                item: Any = results.ok_type
                return codec_for(list[TaskResult[item, TaskError]])
            case "workflow":
                definition = definition_by_key(row.sub_definition_key or "")
                declared = UNKNOWN_TYPE if definition is None else definition.output_type()
                return None if declared is UNKNOWN_TYPE else codec_for(declared)
            case "sleep":
                return codec_for(None)
            case _:
                return self._declared.codec(node_id)

    def signal_type(self, name: str) -> Any:
        return self._declared.signal_type(name)
