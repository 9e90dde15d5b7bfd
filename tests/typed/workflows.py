"""What the type checker knows about workflows: parameters of nodes, results handed on, outputs.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, assert_type

from horsies import (
    AppConfig,
    Horsies,
    MapNode,
    NodeKey,
    OnError,
    PostgresConfig,
    RetryPolicy,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    SubWorkflowSummary,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowContext,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowTerminalResults,
    from_node,
)

app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/shop")))


@app.task("count")
def count(page: str, limit: int = 10) -> TaskResult[int, TaskError]:
    return TaskResult(ok=len(page))


@app.task("double")
async def double(value: TaskResult[int, TaskError]) -> TaskResult[float, TaskError]:
    return TaskResult(ok=0.0)


@app.task("sum_up")
def sum_up(
    results: TaskResult[list[TaskResult[int, TaskError]], TaskError],
    workflow_ctx: WorkflowContext | None = None,
) -> TaskResult[int, TaskError]:
    return TaskResult(ok=0)


@app.task("pages")
def pages() -> TaskResult[list[str], TaskError]:
    return TaskResult(ok=[])


@app.task("nothing")
def nothing(done: TaskResult[None, TaskError]) -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


class Counting(WorkflowDefinition[int]):
    name = "counting"
    definition_key = "counting.v1"
    first = count.node()(page="x")

    class Meta:
        output = "first"
        on_error = OnError.PAUSE


class Parametric(WorkflowDefinition[str]):
    name = "parametric"
    definition_key = "parametric.v1"

    @classmethod
    def build_with(cls, app: Horsies, *, order_id: int) -> WorkflowSpec[str]:
        approval = SignalNode("approve", value_type=str)
        return app.workflow(cls.name, [approval], output=approval)


def nodes(moment: datetime) -> None:
    assert_type(count.node()(page="x"), TaskNode[int])
    assert_type(count.node()(page="x", limit=3), TaskNode[int])
    assert_type(TaskNode(count, kwargs={"page": "x"}), TaskNode[int])
    count.node()(page=3)  # type: ignore[arg-type]
    count.node()()  # type: ignore[call-arg]
    count.node()(page="x", size=3)  # type: ignore[call-arg]
    count.node(
        waits_for=[count.node()(page="x"), SleepNode(1)],
        queue="q",
        priority=1,
        join="quorum",
        min_success=1,
        allow_failed_deps=True,
        good_until=moment,
        expires_in=timedelta(hours=1),
        timeout_ms=500,
        retry_policy=RetryPolicy.fixed([1], auto_retry_for=["BUSY"]),
    )
    count.node(join="some")  # type: ignore[arg-type]
    count.node(que="q")  # type: ignore[call-arg]
    count.node(waits_for=[count])  # type: ignore[list-item]


def results_handed_on() -> None:
    first = count.node()(page="x")
    assert_type(double.node()(value=from_node(first)), TaskNode[float])
    count.node()(page=from_node(first))  # type: ignore[arg-type]
    doubled = double.node()(value=from_node(first))
    double.node()(value=from_node(doubled))  # type: ignore[arg-type]
    count.node()(page="x", limit=from_node(count))  # type: ignore[arg-type]


@app.task("ship")
def ship(order: int, note: str | None = None, weight: float = 0.0) -> str:
    return ""


@app.task("pack")
def pack(
    sizes: list[int],
    maybe: list[int | None] | None = None,
    results: list[TaskResult[int, TaskError]] | None = None,
    first: TaskResult[int, TaskError] | None = None,
) -> None:
    return None


def values_handed_on() -> None:
    first = count.node()(page="x")
    assert_type(ship.node()(order=from_node(first)), TaskNode[str])
    ship.node()(order=from_node(first), weight=from_node(first))
    ship.node()(order=from_node(pages.node()()))  # type: ignore[arg-type]
    ship.node()(order=from_node(SleepNode(3)))  # type: ignore[arg-type]
    ship.node()(order=1, note=from_node(first))  # type: ignore[arg-type]
    shipped = ship.node()(order=from_node(first))
    ship.node()(order=1, note=from_node(shipped))
    ship.node()(order=from_node(SubWorkflowNode(Counting)))
    ship.node()(order=from_node(SubWorkflowNode(Parametric)))  # type: ignore[arg-type]
    ship.node()(order=from_node(SignalNode("go")))

    mapped = MapNode(count, over=pages.node()(), each="page")
    pack.node()(sizes=from_node(mapped), maybe=from_node(mapped), results=from_node(mapped))
    pack.node()(sizes=[], first=from_node(first))
    pack.node()(sizes=from_node(first))  # type: ignore[arg-type]
    pack.node()(sizes=[], first=from_node(shipped))  # type: ignore[arg-type]
    pack.node()(sizes=[], results=from_node(first))  # type: ignore[arg-type]
    ship.node()(order=from_node(mapped))  # type: ignore[arg-type]


def other_kinds(first: TaskNode[int]) -> None:
    mapped = MapNode(count, over=pages.node()(), each="page", max_parallel=3)
    assert_type(mapped, MapNode[int])
    sum_up.node()(results=from_node(mapped))
    sum_up.node()(results=from_node(first))  # type: ignore[arg-type]
    double.node()(value=from_node(mapped))  # type: ignore[arg-type]

    nothing.node()(done=from_node(SleepNode(3)))
    double.node()(value=from_node(SleepNode(3)))  # type: ignore[arg-type]

    approval = SignalNode("approve", value_type=bool, timeout=timedelta(days=1))
    assert_type(approval, SignalNode[bool])
    assert_type(SignalNode("go"), SignalNode[Any])
    sum_up.node()(results=from_node(approval))  # type: ignore[arg-type]

    child = SubWorkflowNode(Counting)
    assert_type(child, SubWorkflowNode[int])
    double.node()(value=from_node(SubWorkflowNode(Parametric)))  # type: ignore[arg-type]
    SubWorkflowNode(count)  # type: ignore[arg-type]
    MapNode(count)  # type: ignore[call-arg]


def specifications(first: TaskNode[int]) -> None:
    spec = app.workflow("w", [first, SleepNode(1)], output=first, definition_key="w.v1")
    assert_type(spec, WorkflowSpec[int])
    assert_type(
        app.workflow("w", [first], definition_key="w"), WorkflowSpec[WorkflowTerminalResults]
    )
    mapped = MapNode(count, over=pages.node()())
    lists = app.workflow("w", [mapped], output=mapped, definition_key="w")
    assert_type(lists, WorkflowSpec[list[TaskResult[int, TaskError]]])
    policy = SuccessPolicy([SuccessCase([first, "other", NodeKey("third")])], optional=[first])
    app.workflow("w", [first], OnError.PAUSE, success_policy=policy, definition_key="w")
    app.workflow("w", [first], definition_key=1)  # type: ignore[call-overload]
    app.workflow("w", [count], definition_key="w")  # type: ignore[list-item]
    spec.name = "v"  # type: ignore[misc]


def definitions() -> None:
    assert_type(Counting.build(app), WorkflowSpec[int])
    assert_type(Parametric.build_with(app, order_id=1), WorkflowSpec[str])
    Parametric.build_with(app, order_id="x")  # type: ignore[arg-type]
    Parametric.build_with(app)  # type: ignore[call-arg]


@app.workflow_builder(cases=[{"order_id": 7}])
def build(order_id: int) -> WorkflowSpec[str]:
    return Parametric.build_with(app, order_id=order_id)


@app.workflow_builder
def build_bare() -> WorkflowSpec[int]:
    return Counting.build(app)


@app.workflow_builder()  # type: ignore[type-var]
def build_nothing() -> None: ...


def builders() -> None:
    assert_type(build(7), WorkflowSpec[str])
    assert_type(build_bare(), WorkflowSpec[int])


def contexts(ctx: WorkflowContext, first: TaskNode[int], mapped: MapNode[int]) -> None:
    assert_type(ctx.result_for(first), TaskResult[int, TaskError])
    assert_type(ctx.result_for(first.key()), TaskResult[int, TaskError])
    assert_type(ctx.result_for(NodeKey("n")), TaskResult[Any, TaskError])
    assert_type(ctx.result_for(mapped).ok_value, list[TaskResult[int, TaskError]])
    assert_type(ctx.summary_for(SubWorkflowNode(Counting)), SubWorkflowSummary[int])
    ctx.result_for("n")  # type: ignore[arg-type]
