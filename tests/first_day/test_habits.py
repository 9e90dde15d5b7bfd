"""Habits of users of other task queues: each test is one of them, and works here as they expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horsies import (
    ErrorCode,
    Horsies,
    MapNode,
    SubWorkflowNode,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowTaskStatus,
    WorkflowValidationError,
    from_node,
)
from tests.support.apps.shop import app as shop
from tests.support.apps.shop import double, errors_of, number, square, word, workflow
from tests.support.database import Database
from tests.support.runs import execute_node
from tests.support.turns import Hands, define_tasks


@pytest.mark.parametrize("key", [None, "habits.keyed"], ids=["left out", "given"])
def test_a_workflow_made_in_build_with_takes_the_key_of_its_class(key: str | None) -> None:
    class Keyed(WorkflowDefinition[int]):
        name = "keyed"
        definition_key = "habits.keyed"

        @classmethod
        def build_with(cls, app: Horsies, *, n: int) -> WorkflowSpec[int]:
            only = number.node(node_id="only")(n=n)
            return app.workflow(cls.name, [only], output=only, definition_key=key)

    assert Keyed.build_with(shop, n=3).definition_key == "habits.keyed"
    with pytest.raises(WorkflowValidationError, match="has no definition_key"):
        shop.workflow("keyed", [number.node()()])


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


@shop.task("habits.unannotated")
def unannotated(**results) -> TaskResult[str, TaskError]:  # type: ignore[no-untyped-def]
    return TaskResult(ok=f"{results['count'].ok_value} pieces")


@shop.task("habits.any")
def anything_named(**results: Any) -> TaskResult[str, TaskError]:
    return TaskResult(ok=f"{results['count'].ok_value} pieces")


class Open(WorkflowDefinition[str]):
    name = "open"
    definition_key = "habits.open"

    @classmethod
    def build_with(cls, app: Horsies, **results: Any) -> WorkflowSpec[str]:
        only = word.node()(text=f"{results['count'].ok_value} pieces")
        return app.workflow(cls.name, [only], output=only)


@pytest.mark.parametrize("called", [unannotated, anything_named, Open])
def test_results_go_into_keyword_arguments_of_any_name(called: Any) -> None:
    source: Any = number.node(node_id="source")()
    make: Any = SubWorkflowNode if called is Open else TaskNode
    taker = make(called, node_id="taker", args_from={"count": source}, waits_for=[source])
    report = execute_node(shop, workflow([source, taker]), "taker", {"source": '{"ok":3}'})
    assert report.ok, report.error_message
    assert "3 pieces" in report.result_json


@pytest.mark.parametrize("way", ["failed dependency", "cancelled run", "counted after a resume"])
def test_a_skipped_node_has_no_completed_at(app: Horsies, connection: Database, way: str) -> None:
    tasks, hands = define_tasks(app), Hands(connection)
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    later = tasks.add.node(node_id="later")(first=from_node(last))
    spec = app.workflow("skipping", [first, last, later], definition_key="habits.skipping")
    handle = spec.start().unwrap()
    if way == "cancelled run":
        handle.cancel().unwrap()
    else:
        taken = hands.take(handle.workflow_id, "first")
        if way == "counted after a resume":
            handle.pause().unwrap()
        hands.end(handle.workflow_id, taken, {"err": {"error_code": "BOOM"}})
        handle.resume().unwrap()
    nodes = {node.node_id: node for node in handle.tasks().unwrap()}
    assert nodes["last"].status is nodes["later"].status is WorkflowTaskStatus.SKIPPED
    assert nodes["last"].completed_at is nodes["later"].completed_at is None


@pytest.mark.parametrize("discovered", [True, False], ids=["discovered", "own module"])
def test_the_check_builds_the_children_of_a_specification_at_module_level(
    module: Callable[[str], Horsies], discovered: bool
) -> None:
    app = module("""
        class Child(WorkflowDefinition[int]):
            name = "child"
            definition_key = f"{__name__}.child"

            @classmethod
            def build_with(cls, app: Any, *, n: int) -> WorkflowSpec[int]:
                raise ArithmeticError("n is negative")

        inner = SubWorkflowNode(Child, kwargs={"n": -1})
        spec = app.workflow("outer", [inner], definition_key="habits.outer")
    """)
    if discovered:
        app.discover_tasks([app.definitions()["work"].function.__module__])
    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION
    assert "n is negative" in error.message
