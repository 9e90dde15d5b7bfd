"""The workflows of a soak run: one function per shape, each with the result its run must have.

Every task is retried after a crash of its worker, so no fault excuses a run that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from horsies import Horsies, TaskError, TaskResult
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.nodes.context import WorkflowContext
from horsies.workflow.nodes.nodes import (
    MapNode,
    NodeKey,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskNode,
)
from horsies.workflow.spec import WorkflowSpec
from tests.soak.application import AGAIN, Number, accounted, app, finish

__all__ = ["app"]

STEP_SECONDS = 0.1
WIDTH = 3
ITEMS = 6
SIGNAL = "go"


@app.task("begin_at", queue_name="open", retry_policy=AGAIN)
def begin_at(number: int) -> Number:
    with accounted("open"):
        time.sleep(STEP_SECONDS)
        return finish(number)


@app.task("plus_one", queue_name="open", retry_policy=AGAIN)
def plus_one(before: Number) -> Number:
    with accounted("open"):
        time.sleep(STEP_SECONDS)
        return finish(before.ok_value + 1)


@app.task("total", queue_name="open", retry_policy=AGAIN)
def total(nodes: list[str], workflow_ctx: WorkflowContext | None = None) -> Number:
    assert workflow_ctx is not None
    with accounted("open"):
        results = [workflow_ctx.result_for(NodeKey[int](node)) for node in nodes]
        return finish(sum(result.ok_value for result in results))


@app.task("up_to", queue_name="open", retry_policy=AGAIN)
def up_to(count: int) -> TaskResult[list[int], TaskError]:
    with accounted("open"):
        return finish(list(range(count)))


@app.task("square", queue_name="wide", retry_policy=AGAIN)
def square(number: int) -> Number:
    with accounted("wide"):
        time.sleep(STEP_SECONDS)
        return finish(number * number)


@app.task("sum_of", queue_name="open", retry_policy=AGAIN)
def sum_of(numbers: TaskResult[list[Number], TaskError]) -> Number:
    with accounted("open"):
        return finish(sum(number.ok_value for number in numbers.ok_value))


class Order(NamedTuple):
    """A workflow to start, the result of its run, and the value of the signal it waits for."""

    spec: WorkflowSpec[int]
    expected: int
    signal: int | None = None


def chain(number: int) -> Order:
    """One step after the other."""
    nodes: list[TaskNode[Any]] = [TaskNode(begin_at, kwargs={"number": number})]
    for _ in range(3):
        nodes.append(TaskNode(plus_one, args_from={"before": nodes[-1]}, waits_for=[nodes[-1]]))
    spec = app.workflow("chain", nodes, output=nodes[-1], definition_key="soak.chain")
    return Order(spec, number + 3)


def join(number: int) -> Order:
    """One node, then several, then one that takes the results of all."""
    first = TaskNode(begin_at, kwargs={"number": number}, node_id="first")
    middle = [
        TaskNode(plus_one, args_from={"before": first}, waits_for=[first], node_id=f"m{place}")
        for place in range(WIDTH)
    ]
    names = [f"m{place}" for place in range(WIDTH)]
    last = TaskNode(total, kwargs={"nodes": names}, waits_for=middle, workflow_ctx_from=middle)
    spec = app.workflow("join", [first, *middle, last], output=last, definition_key="soak.join")
    return Order(spec, WIDTH * (number + 1))


def squares(_number: int) -> Order:
    """A map over a list that another node returns."""
    source = TaskNode(up_to, kwargs={"count": ITEMS})
    mapped = MapNode(square, over=source, each="number", max_parallel=2)
    last = TaskNode(sum_of, args_from={"numbers": mapped}, waits_for=[mapped])
    spec = app.workflow("map", [source, mapped, last], output=last, definition_key="soak.map")
    return Order(spec, sum(number * number for number in range(ITEMS)))


class Inner(WorkflowDefinition[int]):
    """Two steps after the result of the parent's node."""

    name = "inner"
    definition_key = "soak.inner"

    @classmethod
    def build_with(cls, app: Horsies, *, before: Number) -> WorkflowSpec[int]:
        first = TaskNode(plus_one, kwargs={"before": before})
        last = TaskNode(plus_one, args_from={"before": first}, waits_for=[first])
        return app.workflow(cls.name, [first, last], output=last, definition_key=cls.definition_key)


def nested(number: int) -> Order:
    """A sub-workflow between two tasks."""
    first = TaskNode(begin_at, kwargs={"number": number})
    inner = SubWorkflowNode(Inner, args_from={"before": first}, waits_for=[first])
    last = TaskNode(plus_one, args_from={"before": inner}, waits_for=[inner])
    spec = app.workflow("nest", [first, inner, last], output=last, definition_key="soak.nest")
    return Order(spec, number + 3)


def waiting(number: int) -> Order:
    """A sleep, then a signal, then a task with the value of the signal."""
    pause = SleepNode(1)
    signal = SignalNode(SIGNAL, value_type=int, waits_for=[pause])
    last = TaskNode(plus_one, args_from={"before": signal}, waits_for=[signal])
    spec = app.workflow("wait", [pause, signal, last], output=last, definition_key="soak.wait")
    return Order(spec, number + 1, number)


SHAPES: tuple[Callable[[int], Order], ...] = (chain, join, squares, nested, waiting)
