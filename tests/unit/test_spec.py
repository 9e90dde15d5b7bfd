from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from horsies import (
    CustomQueueConfig,
    MapNode,
    OnError,
    SleepNode,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowSpec,
    WorkflowValidationError,
    from_node,
)
from tests.support.apps.shop import (
    app,
    codes_of,
    double,
    errors_of,
    number,
    numbers,
    queued_app,
    report,
    square,
    workflow,
)


def test_a_specification_says_what_it_was_built_with() -> None:
    first = number.node(node_id="first")(n=1)
    second = double.node(node_id="second")(value=from_node(first))
    policy = SuccessPolicy([SuccessCase([second])], optional=[first])
    spec = workflow([first, second], on_error=OnError.PAUSE, output=second, success_policy=policy)
    assert (spec.name, spec.definition_key, spec.on_error) == ("shop", "shop.v1", OnError.PAUSE)
    assert [node.node_id for node in spec.tasks] == ["first", "second"]
    assert spec.output is spec.tasks[1]
    assert spec.success_policy is not None
    assert spec.success_policy.cases[0].required == (spec.tasks[1],)
    assert spec.success_policy.optional == (spec.tasks[0],)
    assert spec.broker is app.get_broker()
    assert spec.resend_on_transient_err is False
    assert repr(spec) == "WorkflowSpec('shop', nodes=2)"


def test_a_specification_holds_copies_that_refer_to_each_other() -> None:
    first = number.node()(n=1)
    second = report.node(waits_for=[first, first], workflow_ctx_from=[first, first])(title="x")
    third = double.node(waits_for=[second])(value=from_node(first))
    spec = workflow([first, second, third])
    copies: tuple[Any, ...] = spec.tasks
    assert not {id(node) for node in copies} & {id(first), id(second), id(third)}
    assert copies[1].waits_for == (copies[0],)
    assert copies[1].workflow_ctx_from == (copies[0],)
    assert copies[2].waits_for == (copies[1], copies[0])
    assert dict(copies[2].args_from) == {"value": copies[0]}


def test_an_empty_context_is_no_context() -> None:
    node = report.node(workflow_ctx_from=[])(title="x")
    assert workflow([node]).tasks[0].workflow_ctx_from is None  # type: ignore[union-attr]


def test_a_map_waits_for_the_list_it_runs_over() -> None:
    source = numbers.node()()
    mapped = MapNode(square, over=source)
    spec = workflow([source, mapped])
    copy: Any = spec.tasks[1]
    assert copy.waits_for == (spec.tasks[0],)
    assert copy.over is spec.tasks[0]
    assert copy.each == "item"
    assert list(mapped.waits_for) == []


def test_later_changes_of_the_given_nodes_have_no_effect() -> None:
    values = {"offset": 1}
    node = TaskNode(square, kwargs={"item": 2, **values})
    spec = workflow([node])
    node.kwargs["item"] = 5  # type: ignore[index]
    node.waits_for = [node]
    assert dict(spec.tasks[0].kwargs) == {"item": 2, "offset": 1}  # type: ignore[union-attr]
    assert spec.tasks[0].waits_for == ()


def test_the_given_nodes_receive_their_index_and_id_and_nothing_else() -> None:
    node = report.node(workflow_ctx_from=[])(title="x")
    before = dict(vars(node))
    workflow([node])
    after = dict(vars(node))
    assert {name for name in after if before.get(name, ...) != after[name]} == {
        "node_id",
        "index",
        "id_derived",
    }
    assert node.queue is None
    assert node.priority is None


def test_a_failed_construction_leaves_the_given_nodes_untouched() -> None:
    node, lost = number.node()(n=1), number.node()()
    bad = double.node()(value=from_node(lost))
    before = dict(vars(node))
    codes_of(lambda: workflow([node, bad]))
    assert vars(node) == before


@pytest.mark.parametrize("name", ["queue", "kwargs", "index", "waits_for", "fn", "nonsense"])
def test_a_node_of_a_specification_cannot_be_changed(name: str) -> None:
    spec = workflow([number.node()(n=1)])
    with pytest.raises(AttributeError):
        setattr(spec.tasks[0], name, None)
    with pytest.raises(AttributeError):
        delattr(spec.tasks[0], name)


def test_the_containers_of_a_specification_cannot_be_changed() -> None:
    first = number.node()(n=1)
    policy = SuccessPolicy([SuccessCase([first])])
    spec = workflow([first, double.node()(value=from_node(first))], success_policy=policy)
    node: Any = spec.tasks[1]
    with pytest.raises(TypeError):
        node.kwargs["factor"] = 1
    with pytest.raises(TypeError):
        node.args_from["value"] = node
    with pytest.raises(AttributeError):
        node.waits_for.append(node)
    with pytest.raises(AttributeError):
        spec.success_policy.cases.append(None)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["name", "tasks", "graph", "nonsense"])
def test_a_specification_cannot_be_changed(name: str) -> None:
    spec = workflow([number.node()()])
    with pytest.raises(AttributeError):
        setattr(spec, name, None)
    with pytest.raises(AttributeError):
        delattr(spec, name)


def test_nodes_of_a_specification_may_be_built_into_another() -> None:
    first = number.node()(n=1)
    spec = workflow([first, double.node()(value=from_node(first))])
    again = workflow(spec.tasks, name="again")
    assert [node.node_id for node in again.tasks] == ["again:0", "again:1"]
    assert [node.node_id for node in spec.tasks] == ["shop:0", "shop:1"]
    assert again.tasks[1].waits_for == (again.tasks[0],)


def test_arguments_are_read_back_from_what_is_stored() -> None:
    @app.task("snapshot")
    def snapshot(day: datetime, members: dict[str, list[int]]) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    members = {"a": [1]}
    day = datetime(2026, 1, 1, tzinfo=UTC)
    spec = workflow([snapshot.node()(day=day, members=members)])
    members["a"].append(2)
    assert dict(spec.tasks[0].kwargs) == {"day": day, "members": {"a": [1]}}  # type: ignore[union-attr]


def test_without_an_application_a_specification_has_no_queues() -> None:
    bare: WorkflowSpec[Any] = WorkflowSpec("bare", [number.node()()])
    assert bare.broker is None
    assert bare.definition_key is None
    assert bare.tasks[0].queue is None  # type: ignore[union-attr]


def test_the_application_can_adopt_a_specification_made_without_it() -> None:
    bare: WorkflowSpec[Any] = WorkflowSpec("bare", [number.node()()], definition_key="k")
    adopted = app.workflow.adopt(bare)
    assert adopted.tasks[0].queue == "default"  # type: ignore[union-attr]
    assert adopted.definition_key == "k"
    assert app.workflow.adopt(adopted) is adopted


def test_queues_and_priorities_are_resolved_on_the_copies() -> None:
    fast, slow = (
        CustomQueueConfig(name="fast", priority=2),
        CustomQueueConfig(name="slow", priority=9),
    )
    other = queued_app(slow, fast)

    @other.task("work", queue_name="slow")
    def work() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    nodes = [work.node()(), work.node(queue="fast")(), work.node(priority=50)()]
    spec = other.workflow("queues", nodes, definition_key="queues")
    copies: tuple[Any, ...] = spec.tasks
    assert [(node.queue, node.priority) for node in copies] == [
        ("slow", 9),
        ("fast", 2),
        ("slow", 50),
    ]
    assert [node.queue for node in nodes] == [None, "fast", None]


def test_the_library_s_own_work_goes_to_a_queue_of_the_workflow_s_tasks() -> None:
    queues = [CustomQueueConfig(name=name, priority=at) for at, name in enumerate("abc", start=1)]
    app = queued_app(*queues)

    @app.task("work", queue_name="c")
    def work() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    nodes: list[Any] = [SleepNode(1), work.node()(), work.node(queue="b", priority=90)()]
    route = app.workflow("sleeps", nodes, definition_key="sleeps").graph.internal_route
    assert route is not None
    assert (route.queue_name, route.priority) == ("b", 2)


def test_the_library_s_own_work_alone_goes_where_workers_look_first() -> None:
    best = CustomQueueConfig(name="best", priority=1, max_concurrency=0)
    next_best = CustomQueueConfig(name="next", priority=3)
    last = CustomQueueConfig(name="last", priority=7)
    route = (
        queued_app(last, best, next_best)
        .workflow("sleeps", [SleepNode(1)], definition_key="sleeps")
        .graph.internal_route
    )
    assert route is not None
    assert (route.queue_name, route.priority) == ("next", 3)
    default = workflow([SleepNode(1)]).graph.internal_route
    assert default is not None
    assert (default.queue_name, default.priority) == ("default", 100)


def test_the_output_may_be_named_by_its_id() -> None:
    first = number.node(node_id="first")()
    spec = workflow([first, number.node()()], output="first")
    assert spec.output is spec.tasks[0]
    assert spec.output_key() is not None
    assert spec.output_key().node_id == "first"  # type: ignore[union-attr]


def test_a_thousand_nodes_are_one_specification() -> None:
    root = number.node()(n=1)
    leaves = [double.node()(value=from_node(root)) for _ in range(1_000)]
    last = number.node(waits_for=leaves)()
    spec = workflow([root, *leaves, last])
    assert len(spec.tasks[-1].waits_for) == 1_000
    assert spec.graph.dependencies[500] == (0,)


def circle() -> list[Any]:
    one, two = number.node()(), double.node(node_id="double")
    second = two(value=from_node(one))
    one.waits_for = [second]
    return [one, second]


def awaited_outside() -> list[Any]:
    outside = number.node(node_id="outside")()
    return [double.node(node_id=name)(value=from_node(outside)) for name in ("a", "b")]


def join_of_no_kind() -> list[Any]:
    first = number.node()()
    kind: Any = "some"
    return [first, double.node(join=kind)(value=from_node(first))]


ONE_MISTAKE: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "circle": (circle, "shop:0 (number) waits for double waits for shop:0 (number)"),
    "forgotten node": (
        awaited_outside,
        "Nodes 'a', 'b' of workflow 'shop' wait for node 'outside'",
    ),
    "misspelt parameter": (
        lambda: [TaskNode(square, kwargs={"itme": 1})],
        "gives a parameter 'itme', which task 'square' does not take, and does not give its 'item'",
    ),
    "unknown join": (join_of_no_kind, "has join='some'"),
}


@pytest.mark.parametrize("mistake", ONE_MISTAKE)
def test_one_mistake_in_a_workflow_is_one_error(mistake: str) -> None:
    make, words = ONE_MISTAKE[mistake]
    with pytest.raises(WorkflowValidationError) as refused:
        workflow(make())
    assert words in refused.value.message


def test_several_mistakes_are_all_in_the_message() -> None:
    def build() -> object:
        return workflow([TaskNode(square, node_id="a"), MapNode(square, over=number.node()())])

    with pytest.raises(Exception) as refused:  # noqa: PT011
        build()
    message = getattr(refused.value, "message", "")
    assert message.startswith("workflow 'shop': 2 errors found: (1) ")
    assert all(error.message in message for error in errors_of(build))
