"""Tasks and definitions that take values from a workflow, without a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.task_result import TaskError, TaskResult
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.nodes.context import WorkflowContext, WorkflowMeta
from horsies.workflow.nodes.nodes import NodeKey, SubWorkflowNode, TaskNode
from horsies.workflow.spec import WorkflowSpec

app = Horsies(
    AppConfig(broker=PostgresConfig(database_url="postgresql://nobody@127.0.0.1:1/nothing"))
)


class Money(BaseModel):
    """A model that must be decoded as a model."""

    amount: int
    currency: str = "EUR"


@dataclass
class Visit:
    """A dataclass that contains a time."""

    place: str
    at: datetime


class StrangeError(TaskError):
    """An error with an additional field."""

    shelf: int = 0


@app.task("price")
def price() -> TaskResult[Money, TaskError]:
    return TaskResult(ok=Money(amount=3))


@app.task("double")
def double(of: TaskResult[int, TaskError], plus: int = 0) -> TaskResult[int, TaskError]:
    if of.is_err():
        return TaskResult(err=of.err_value)
    return TaskResult(ok=of.ok_value * 2 + plus)


@app.task("describe")
def describe(
    money: TaskResult[Money, TaskError] | None = None,
    visit: TaskResult[Visit, TaskError] | None = None,
    many: TaskResult[list[TaskResult[int, TaskError]], TaskError] | None = None,
    anything: Any = None,
) -> TaskResult[list[str], TaskError]:
    return TaskResult(ok=[repr(_inside(one)) for one in (money, visit, many, anything)])


def _inside(result: Any) -> Any:
    if not isinstance(result, TaskResult):
        return result
    inside = result.ok_value if result.is_ok() else result.err_value
    return [_inside(one) for one in inside] if isinstance(inside, list) else inside


@app.task("where")
def where(workflow_meta: WorkflowMeta | None = None) -> TaskResult[list[Any] | None, TaskError]:
    if workflow_meta is None:
        return TaskResult(ok=None)
    return TaskResult(
        ok=[workflow_meta.workflow_id, workflow_meta.task_index, workflow_meta.task_name]
    )


@app.task("look_up")
def look_up(
    node_id: str, workflow_ctx: WorkflowContext | None = None
) -> TaskResult[str | None, TaskError]:
    if workflow_ctx is None:
        return TaskResult(ok=None)
    return TaskResult(ok=repr(_inside(workflow_ctx.result_for(NodeKey[Any](node_id)))))


@app.task("look_up_nothing")
def look_up_nothing(workflow_ctx: WorkflowContext) -> TaskResult[int, TaskError]:
    return workflow_ctx.result_for(TaskNode(double))


@app.task("summarise")
def summarise(workflow_ctx: WorkflowContext) -> TaskResult[list[Any], TaskError]:
    summary = workflow_ctx.summary_for(NodeKey[Any]("child"))
    return TaskResult(ok=[summary.status.value, summary.completed_tasks, repr(summary.output)])


class Doubling(WorkflowDefinition[int]):
    """A sub-workflow with its own parameters, passed directly or taken from another node."""

    name = "doubling"
    definition_key = "tests.worker.doubling"

    @classmethod
    def build_with(
        cls, app: Horsies, *, plus: int, of: TaskResult[int, TaskError] | None = None
    ) -> WorkflowSpec[int]:
        if plus < 0:
            raise ValueError("nothing can be less than nothing")
        start = of.ok_value if of is not None and of.is_ok() else 1
        last = TaskNode(double, kwargs={"of": TaskResult(ok=start), "plus": plus})
        return app.workflow(cls.name, [last], output=last, definition_key=cls.definition_key)


class Plain(WorkflowDefinition[Money]):
    """No parameters."""

    name = "plain"
    definition_key = "tests.worker.plain"
    first = TaskNode(price)

    class Meta:
        """Its output."""

        output = "first"


class Nested(WorkflowDefinition[Money]):
    """A sub-workflow inside a sub-workflow."""

    name = "nested"
    definition_key = "tests.worker.nested"
    inner = SubWorkflowNode(Plain)

    class Meta:
        """Its output."""

        output = "inner"
