"""Parameters that take the value of a node: which are accepted, and what arrives in the function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import (
    AnyNode,
    AppConfig,
    Horsies,
    MapNode,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
)
from horsies.worker.protocol import ChildReport
from tests.support.apps.shop import BROKER, errors_of
from tests.support.runs import execute_node

app = Horsies(AppConfig(broker=BROKER))


class Order(BaseModel):
    number: int


@app.task("order")
def order() -> TaskResult[Order, TaskError]:
    return TaskResult(ok=Order(number=1))


@app.task("count")
def count(n: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=n)


@app.task("counts")
def counts() -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=[1, 2])


class Sum(WorkflowDefinition[int]):
    name = "sum"
    definition_key = "plain_inputs.sum"

    @classmethod
    def build_with(cls, app: Horsies, *, first: int, second: int | None) -> WorkflowSpec[int]:
        only = count.node(node_id="only")(n=first + (second or 0))
        return app.workflow(cls.name, [only], output=only)


def taking(annotation: Any, *default: Any) -> Any:
    """A task whose parameter x has this annotation, and which returns what it received."""

    def take(**kwargs: Any) -> TaskResult[str, TaskError]:
        return TaskResult(ok=repr(kwargs["x"]))

    def with_default(x: Any) -> TaskResult[str, TaskError]:
        return take(x=x)

    with_default.__annotations__ = {"x": annotation, "return": TaskResult[str, TaskError]}
    with_default.__defaults__ = default or None
    return app.task(f"take_{id(with_default)}_{len(app.definitions())}")(with_default)


def joined(source: AnyNode, task: Any, **options: Any) -> WorkflowSpec[Any]:
    """A workflow in which the task takes the source, beside a dependency that only counts."""
    nodes: list[Any] = [source]
    if isinstance(source, MapNode):
        nodes.insert(0, source.over)
    other = count.node(node_id="other")()
    source.node_id = "source"
    make: Any = SubWorkflowNode if isinstance(task, type) else TaskNode
    args_from = options.pop("args_from", {"x": source})
    options["waits_for"] = [source, other]
    taker = make(task, node_id="taker", args_from=args_from, **options)
    return app.workflow("plain", [*nodes, other, taker], definition_key="plain_inputs")


def run(spec: WorkflowSpec[Any], result: str | None) -> ChildReport:
    return execute_node(app, spec, "taker", {} if result is None else {"source": result})


def map_of(**options: Any) -> MapNode[int]:
    return MapNode(count, over=counts.node(node_id="list")(), each="n", **options)


FAILED = json.dumps(
    {"err": {"error_code": "NO_STOCK", "message": "", "data": None, "exception": None}}
)
WHOLE = TaskResult[int, TaskError]
MISSING = object()

# The source, the annotation, the stored result, and what arrives in the function.
ARRIVALS: dict[str, tuple[Callable[[], AnyNode], Any, str, str]] = {
    "value": (count.node(), int, '{"ok":3}', "3"),
    "wider type": (count.node(), float, '{"ok":3}', "3.0"),
    "model": (order.node(), Order, '{"ok":{"number":7}}', "Order(number=7)"),
    "optional": (count.node(), int | None, '{"ok":3}', "3"),
    "union": (count.node(), str | int, '{"ok":3}', "3"),
    "list": (counts.node(), list[int], '{"ok":[1,2]}', "[1, 2]"),
    "nothing": (lambda: SleepNode(1), None, '{"ok":null}', "None"),
    "signal": (lambda: SignalNode("go", value_type=bool), bool, '{"ok":true}', "True"),
    "any signal": (lambda: SignalNode("go"), int, '{"ok":3}', "3"),
    "values of a map": (map_of, list[int], '{"ok":[{"ok":1},{"ok":2}]}', "[1, 2]"),
    "values as a sequence": (map_of, Sequence[int], '{"ok":[{"ok":1}]}', "[1]"),
    "empty map": (map_of, list[int], '{"ok":[]}', "[]"),
    "map with failed items": (
        lambda: map_of(allow_failed_items=True),
        list[int | None],
        f'{{"ok":[{{"ok":1}},{FAILED}]}}',
        "[1, None]",
    ),
    "reformatted result": (count.node(), int, '{ "ok" : 3 }', "3"),
}


@pytest.mark.parametrize("case", ARRIVALS)
def test_a_parameter_takes_the_value(case: str) -> None:
    make, annotation, stored, expected = ARRIVALS[case]
    report = run(joined(make(), taking(annotation)), stored)
    assert report.ok, report.error_message
    assert json.loads(report.result_json) == {"ok": expected}


def test_items_of_a_map_may_arrive_as_results() -> None:
    annotation = list[TaskResult[int, TaskError]]
    spec = joined(map_of(allow_failed_items=True), taking(annotation))
    report = run(spec, f'{{"ok":[{{"ok":1}},{FAILED}]}}')
    assert report.ok, report.error_message
    assert report.result_json.count("TaskResult(") == 2


def test_the_whole_result_still_arrives_where_it_is_asked_for() -> None:
    report = run(joined(count.node()(), taking(WHOLE | None), allow_failed_deps=True), FAILED)
    assert "TaskResult(err=" in report.result_json


# The annotation, the default, the options of the node, the stored result, and what arrives.
WITHOUT_VALUE: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str | None, str]] = {
    "failed, may fail": (int | None, (), {"allow_failed_deps": True}, FAILED, "None"),
    "failed, None beats the default": (
        int | None,
        (5,),
        {"allow_failed_deps": True},
        FAILED,
        "None",
    ),
    "being retried, may fail": (int | None, (), {"allow_failed_deps": True}, None, "None"),
    "failed, any": (int, (5,), {"join": "any"}, FAILED, "5"),
    "failed, quorum": (
        int | None,
        (None,),
        {"join": "quorum", "min_success": 1},
        FAILED,
        "None",
    ),
    "open, any": (int, (5,), {"join": "any"}, None, "5"),
    "open, quorum": (int | None, (5,), {"join": "quorum", "min_success": 1}, None, "5"),
}


@pytest.mark.parametrize("case", WITHOUT_VALUE)
def test_without_a_value_a_parameter_is_none_or_its_default(case: str) -> None:
    annotation, default, options, stored, expected = WITHOUT_VALUE[case]
    report = run(joined(count.node()(), taking(annotation, *default), **options), stored)
    assert report.ok, report.error_message
    assert json.loads(report.result_json) == {"ok": expected}


# The source, the annotation, the options of the node, the code, and words of the message.
REFUSED: dict[str, tuple[Callable[[], AnyNode], Any, dict[str, Any], str, str]] = {
    "other type": (count.node(), str, {}, "HRS-024", "annotated str, but its value is int"),
    "no value": (lambda: SleepNode(1), int, {}, "HRS-024", "its value is None"),
    "maybe no value": (
        lambda: map_of(allow_failed_items=True),
        list[int],
        {},
        "HRS-024",
        "annotated list[int], but its value is list[int | None]",
    ),
    "items of another type": (map_of, list[str], {}, "HRS-024", "its value is list[int]"),
    "one item": (map_of, int, {}, "HRS-024", "annotated int, but its value is list[int]"),
    "may fail": (
        count.node(),
        int,
        {"allow_failed_deps": True},
        "HRS-024",
        "runs even if 'source' fails (allow_failed_deps), but the parameter 'x'",
    ),
    "may be open": (count.node(), int, {"join": "any"}, "HRS-013", "has no default"),
    "any": (count.node(), Any, {}, "HRS-024", "which is annotated Any"),
    "other errors": (
        count.node(),
        TaskResult[int, int],
        {},
        "HRS-024",
        "annotated TaskResult[int, int]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_parameter_that_cannot_take_the_value_is_one_mistake(case: str) -> None:
    make, annotation, options, code, words = REFUSED[case]
    source, task = make(), taking(annotation)
    (error,) = errors_of(lambda: joined(source, task, **options))
    assert error.code == code
    assert words in error.message
    assert error.help_text is not None


@pytest.mark.parametrize(
    "stored", ['{"ok":"many"}', FAILED, "not a result", '{"neither":1}', '{"ok":null}']
)
def test_a_value_of_another_release_that_does_not_fit_is_not_passed(stored: str) -> None:
    report = run(joined(count.node()(), taking(int)), stored)
    assert not report.ok
    assert not report.was_called  # a worker of the other release may be able to
    assert report.error_code == "WORKER_SERIALIZATION_ERROR"
    assert "x" in (report.error_message or "")


def test_a_sub_workflow_takes_values() -> None:
    source = count.node()()
    options: Mapping[str, Any] = {"args_from": {"first": source}, "kwargs": {"second": 2}}
    report = run(joined(source, Sum, **options), '{"ok":3}')
    assert report.ok, report.error_message
    (node,) = json.loads(report.result_json)["ok"]["nodes"]
    assert json.loads(node["task_kwargs"]) == {"n": 5}


def test_a_sub_workflow_sees_a_failure_only_where_it_may_be_none() -> None:
    source = count.node()()
    options: dict[str, Any] = {"allow_failed_deps": True, "kwargs": {"first": 2}}
    spec = joined(source, Sum, args_from={"second": source}, **options)
    assert run(spec, FAILED).ok
    options["kwargs"] = {"second": 2}
    (error,) = errors_of(lambda: joined(source, Sum, args_from={"first": source}, **options))
    assert "parameter 'first' of Sum.build_with takes the value" in error.message


def test_keyword_arguments_with_a_type_take_values() -> None:
    @app.task("named")
    def named(**values: int) -> TaskResult[dict[str, int], TaskError]:
        return TaskResult(ok=values)

    report = run(joined(count.node()(), named), '{"ok":3}')
    assert json.loads(report.result_json) == {"ok": {"x": 3}}


# The annotation of the element, whether items may fail, the stored element, and what arrives.
ELEMENTS: dict[str, tuple[Any, bool, str, str]] = {
    "value": (int, False, '{"ok":3}', "3"),
    "optional value": (int | None, True, '{"ok":3}', "3"),
    "failed item": (int | None, True, FAILED, "None"),
    "result": (WHOLE, True, '{"ok":3}', "TaskResult("),
}


def over_map(annotation: Any, *, may_fail: bool) -> WorkflowSpec[Any]:
    first = map_of(allow_failed_items=may_fail, node_id="first")
    second = MapNode(taking(annotation), over=first, each="x", node_id="taker")
    return app.workflow("maps", [first.over, first, second], definition_key="plain_inputs.maps")


@pytest.mark.parametrize("case", ELEMENTS)
def test_a_map_over_a_map_takes_values_of_items(case: str) -> None:
    annotation, may_fail, stored, expected = ELEMENTS[case]
    spec = over_map(annotation, may_fail=may_fail)
    report = execute_node(app, spec, "taker", {}, f'{{"x":{stored}}}')
    assert report.ok, report.error_message
    assert json.loads(report.result_json)["ok"].startswith(expected)


def test_elements_that_may_have_no_value_are_refused() -> None:
    (error,) = errors_of(lambda: over_map(int, may_fail=True))
    assert "annotated int, but the elements are int | None" in error.message
    (error,) = errors_of(lambda: over_map(str, may_fail=False))
    assert "annotated str, but the elements are int" in error.message


def test_an_element_of_another_release_that_has_no_value_is_not_passed() -> None:
    spec = over_map(int, may_fail=False)
    report = execute_node(app, spec, "taker", {}, f'{{"x":{FAILED}}}')
    assert not report.was_called
