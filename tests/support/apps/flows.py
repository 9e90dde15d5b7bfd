"""Tasks and definitions for workflows, in addition to the tasks of the other tests."""

from __future__ import annotations

import json
import os
import random
from datetime import timedelta
from typing import Any

from horsies import RetryPolicy, TaskError, TaskFailed, TaskResult
from horsies.app import Horsies
from horsies.current_task import current_task
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.nodes.context import WorkflowContext, WorkflowMeta
from horsies.workflow.nodes.nodes import MapNode, NodeKey, SignalNode, SubWorkflowNode, TaskNode
from horsies.workflow.spec import WorkflowSpec
from tests.support.apps.programs import app, refuse, rest, write_down

Number = TaskResult[int, TaskError]

__all__ = ["app", "refuse"]


@app.task("one")
def one() -> Number:
    return TaskResult(ok=1)


@app.task("next_step")
def next_step(before: Number) -> Number:
    return TaskResult(ok=before.ok_value + 1)


@app.task
def plain_numbers(count: int) -> list[int]:
    return list(range(count))


@app.task()
async def plain_square(number: int) -> int:
    return number * number


@app.task(retry_policy=RetryPolicy.fixed([1], auto_retry_for=["BUSY"]))
def always_busy() -> None:
    raise TaskFailed("BUSY", "no line is free", data={"lines": 3})


@app.task("random_text")
def random_text(length: int) -> TaskResult[str, TaskError]:
    # The text is hard to compress, so that sizes in the database show how often it is stored.
    return TaskResult(ok=random.randbytes(length // 2).hex())


@app.task("length_of")
def length_of(text: TaskResult[str, TaskError]) -> Number:
    return TaskResult(ok=len(text.ok_value))


@app.task("total_of")
def total_of(nodes: list[str], workflow_ctx: WorkflowContext | None = None) -> Number:
    assert workflow_ctx is not None
    results = [workflow_ctx.result_for(NodeKey[int](node)) for node in nodes]
    return TaskResult(ok=sum(result.ok_value for result in results))


@app.task("numbers_up_to")
def numbers_up_to(count: int) -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=list(range(count)))


@app.task("square_slowly")
def square_slowly(number: int, seconds: float = 0.0) -> Number:
    rest(seconds, str(number))
    return TaskResult(ok=number * number)


@app.task("text_for")
def text_for(number: int, length: int) -> TaskResult[str, TaskError]:
    return TaskResult(ok=str(number) * length)


@app.task("sum_of")
def sum_of(numbers: TaskResult[list[Number], TaskError]) -> Number:
    return TaskResult(ok=sum(number.ok_value for number in numbers.ok_value))


@app.task("tell")
def tell(value: TaskResult[Any, TaskError]) -> TaskResult[Any, TaskError]:
    return value


@app.task("whereabouts")
def whereabouts(workflow_meta: WorkflowMeta | None = None) -> TaskResult[int | None, TaskError]:
    return TaskResult(ok=None if workflow_meta is None else workflow_meta.task_index)


@app.task("linger")
def linger(seconds: float, label: str, before: Number | None = None) -> TaskResult[str, TaskError]:
    return rest(seconds, label)


@app.task("flaky_step", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["FLAKY"], jitter=False))
def flaky_step() -> Number:
    task = current_task()
    write_down("start")
    if task.attempt == 1:
        return TaskResult(err=TaskError(error_code="FLAKY", message="not yet"))
    return TaskResult(ok=task.attempt)


CRASHES = RetryPolicy.fixed([1] * 20, auto_retry_for=["WORKER_CRASHED"], jitter=False)


@app.task("exit_then_work", retry_policy=CRASHES)
def exit_then_work() -> Number:
    task = current_task()
    if task.attempt == 1:
        os._exit(7)
    return TaskResult(ok=task.attempt)


@app.task("maybe", retry_policy=CRASHES)
def maybe(
    fails: bool,
    a: TaskResult[Any, TaskError] | None = None,
    b: TaskResult[Any, TaskError] | None = None,
) -> TaskResult[str, TaskError]:
    """Return the received value as text, or fail."""
    if fails:
        return TaskResult(err=TaskError(error_code="NO_LUCK", message="as told"))
    seen = ["none" if one is None else "ok" if one.is_ok() else "err" for one in (a, b)]
    return TaskResult(ok=json.dumps(seen))


@app.task("maybe_list", retry_policy=CRASHES)
def maybe_list(count: int) -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=list(range(count)))


@app.task("maybe_item", retry_policy=CRASHES)
def maybe_item(number: int, fails_at: int) -> Number:
    if number == fails_at:
        return TaskResult(err=TaskError(error_code="NO_LUCK", message="as told"))
    return TaskResult(ok=number)


class Inner(WorkflowDefinition[int]):
    """A run that continues its parent's count."""

    name = "inner"
    definition_key = "e2e.inner"

    @classmethod
    def build_with(cls, app: Horsies, *, before: Number, steps: int) -> WorkflowSpec[int]:
        nodes = [TaskNode(next_step, kwargs={"before": before})]
        for _ in range(steps - 1):
            last = nodes[-1]
            nodes.append(TaskNode(next_step, args_from={"before": last}, waits_for=[last]))
        return app.workflow(cls.name, nodes, output=nodes[-1], definition_key=cls.definition_key)


class Outer(WorkflowDefinition[int]):
    """A sub-workflow between two tasks."""

    name = "outer"
    definition_key = "e2e.outer"

    @classmethod
    def build_with(cls, app: Horsies, *, steps: int) -> WorkflowSpec[int]:
        first = TaskNode(one)
        inner = SubWorkflowNode(
            Inner, kwargs={"steps": steps}, args_from={"before": first}, waits_for=[first]
        )
        last = TaskNode(next_step, args_from={"before": inner}, waits_for=[inner])
        return app.workflow(
            cls.name, [first, inner, last], output=last, definition_key=cls.definition_key
        )


class Risky(WorkflowDefinition[str]):
    """A run that succeeds or fails, as requested."""

    name = "risky"
    definition_key = "e2e.risky"

    @classmethod
    def build_with(cls, app: Horsies, *, fails: bool) -> WorkflowSpec[str]:
        first = TaskNode(maybe, kwargs={"fails": False})
        last = TaskNode(maybe, kwargs={"fails": fails}, args_from={"a": first}, waits_for=[first])
        return app.workflow(cls.name, [first, last], output=last, definition_key=cls.definition_key)


def chain(length: int) -> WorkflowSpec[int]:
    """Build a chain in which each node takes the previous node's result."""
    nodes = [TaskNode(one)]
    for _ in range(length - 1):
        nodes.append(TaskNode(next_step, args_from={"before": nodes[-1]}, waits_for=[nodes[-1]]))
    return app.workflow("chain", nodes, output=nodes[-1], definition_key="e2e.chain")


def fan(width: int) -> WorkflowSpec[int]:
    """Build one node, then many nodes, then one node that takes all results."""
    first = TaskNode(one, node_id="first")
    middle = [
        TaskNode(next_step, args_from={"before": first}, waits_for=[first], node_id=f"m{number}")
        for number in range(width)
    ]
    last = TaskNode(
        total_of,
        kwargs={"nodes": [f"m{number}" for number in range(width)]},
        waits_for=middle,
        workflow_ctx_from=middle,
        node_id="last",
    )
    return app.workflow("fan", [first, *middle, last], output=last, definition_key="e2e.fan")


def readers(length: int, width: int) -> WorkflowSpec[Any]:
    """Build one node with a large text and many nodes that take the text."""
    text = TaskNode(random_text, kwargs={"length": length})
    nodes = [TaskNode(length_of, args_from={"text": text}, waits_for=[text]) for _ in range(width)]
    return app.workflow("readers", [text, *nodes], definition_key="e2e.readers")


def squares(count: int, max_parallel: int | None, seconds: float = 0.0) -> WorkflowSpec[int]:
    """Build a map over a list that the run computes, and the sum of its results."""
    source = TaskNode(numbers_up_to, kwargs={"count": count})
    mapped = MapNode(
        square_slowly,
        over=source,
        each="number",
        kwargs={"seconds": seconds},
        max_parallel=max_parallel,
        node_id="squares",
    )
    last = TaskNode(sum_of, args_from={"numbers": mapped}, waits_for=[mapped])
    return app.workflow(
        "squares", [source, mapped, last], output=last, definition_key="e2e.squares"
    )


def signalled(timeout: timedelta | None = None) -> Any:
    first = TaskNode(one)
    signal = SignalNode("go", timeout=timeout, waits_for=[first], node_id="signal")
    last = TaskNode(tell, args_from={"value": signal}, waits_for=[signal])
    return app.workflow("wait", [first, signal, last], output=last, definition_key="e2e.wait")


@app.task("plus_one")
def plus_one(value: int) -> Number:
    return TaskResult(ok=value + 1)


@app.task("sum_values")
def sum_values(values: list[int], more: int | None = None) -> Number:
    return TaskResult(ok=sum(values) + (more or 0))
