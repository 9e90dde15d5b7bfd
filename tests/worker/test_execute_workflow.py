"""Tasks of workflows inside a child: results of other nodes arrive typed, and bad ones never break
the child.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from horsies import (
    Horsies,
    SubWorkflowNode,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
)
from horsies.worker.child.execute import execute
from horsies.worker.pool.events import Reported
from horsies.worker.protocol import Assignment, ChildReport, NodeInput, NodePart
from horsies.workflow.build.shape import NESTING_DEPTH_MAX
from tests.support.apps.shop import app as shop
from tests.support.apps.shop import number, word, workflow
from tests.support.apps.workflow_app import app
from tests.support.pool import BOOT, MakePool, next_event
from tests.support.runs import execute_node

RUN = "0190f3a1-0000-7000-8000-000000000001"
ROOT = "0190f3a1-0000-7000-8000-000000000002"
SKIPPED = json.dumps(
    {
        "err": {
            "error_code": {"__builtin_task_code__": "UPSTREAM_SKIPPED"},
            "message": "Node a was skipped.",
            "data": {"dependency_index": 0},
            "exception": None,
        }
    }
)


def upstream(result: str, index: int = 0, **more: Any) -> NodeInput:
    return NodeInput(
        index, more.pop("kind", "task"), more.pop("task_name", "price"), result, **more
    )


def part(
    *sources: NodeInput,
    args: dict[str, int] | None = None,
    context: dict[str, int] | None = None,
    **more: Any,
) -> NodePart:
    inputs = None
    if args or context:
        inputs = json.dumps({"args": args or {}, "context": context or {}})
    return NodePart(RUN, 4, inputs, sources, **more)


def run(name: str, node: NodePart | None, **kwargs: Any) -> ChildReport:
    given = Assignment("task-1", 3, name, 1, "[]", json.dumps(kwargs), None, node)
    return execute(app, given)


def value(report: ChildReport) -> Any:
    assert report.ok, report.error_message
    return json.loads(report.result_json)["ok"]


def test_a_result_of_another_node_arrives_whole() -> None:
    node = part(upstream('{"ok":21}'), args={"of": 0})
    assert value(run("double", node)) == 42
    assert value(run("double", node, plus=1)) == 43


def test_the_same_task_runs_outside_of_workflows() -> None:
    assert value(run("double", None, of={"ok": 4})) == 8
    assert value(run("where", None)) is None
    assert value(run("look_up", None, node_id="a")) is None


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        (SKIPPED, "UPSTREAM_SKIPPED"),
        (
            '{"err":{"error_code":"NO_STOCK","message":"none","data":null,"exception":null}}',
            "NO_STOCK",
        ),
        (
            '{"err":{"error_code":"LOST","message":"","data":null,"exception":null,"shelf":3}}',
            "LOST",
        ),
        ('{"ok":"many"}', "RESULT_DESERIALIZATION_ERROR"),
        ("not a result", "RESULT_DESERIALIZATION_ERROR"),
        ('{"neither":1}', "RESULT_DESERIALIZATION_ERROR"),
    ],
)
def test_what_another_node_did_not_return_arrives_as_an_error(stored: str, code: str) -> None:
    report = run("double", part(upstream(stored), args={"of": 0}))
    assert not report.ok
    assert report.error_code == code


def test_values_come_back_as_their_types_in_lists_and_results_too() -> None:
    sources = (
        upstream('{"ok":{"amount":3,"currency":"EUR"}}', 0),
        upstream('{"ok":{"place":"Rome","at":"2024-05-01T10:00:00Z"}}', 1),
        upstream('{"ok":[{"ok":1},' + SKIPPED + "]}", 2, kind="map"),
        upstream('{"ok":{"a":[1]}}', 3),
    )
    node = part(*sources, args={"money": 0, "visit": 1, "many": 2, "anything": 3})
    money, visit, many, anything = value(run("describe", node))
    assert money == "Money(amount=3, currency='EUR')"
    assert "place='Rome'" in visit
    assert "datetime.datetime(2024, 5, 1" in visit
    assert many.startswith("[1, TaskError(error_code='UPSTREAM_SKIPPED'")
    assert anything == "{'a': [1]}"


def test_a_source_that_has_not_ended_is_left_out() -> None:
    node = part(upstream('{"ok":{"amount":1,"currency":"EUR"}}', 0), args={"money": 0, "visit": 1})
    assert value(run("describe", node))[1] == "None"


def test_a_source_that_the_function_needs_and_that_is_tried_again_now_is_an_error_result() -> None:
    report = run("double", part(args={"of": 0}))
    assert report.error_code == "RESULT_NOT_READY"


def test_a_missing_parameter_is_said_and_not_guessed() -> None:
    report = run("double", part(args={"plus": 0}))
    assert report.error_code == "WORKER_SERIALIZATION_ERROR"
    assert "'of' is missing" in (report.error_message or "")


@pytest.mark.parametrize("inputs", ["{", "[]", "{}", '{"args":[],"context":{}}', "7"])
def test_inputs_somebody_broke_fail_the_task_and_nothing_else(inputs: str) -> None:
    report = run("describe", NodePart(RUN, 4, inputs, (upstream('{"ok":1}'),)))
    assert report.error_code == "WORKER_SERIALIZATION_ERROR"


def test_a_task_that_asks_is_told_where_it_stands() -> None:
    assert value(run("where", part())) == [RUN, 4, "where"]


def test_the_context_covers_the_listed_nodes_and_reads_them_by_their_tasks() -> None:
    sources = (
        upstream('{"ok":{"amount":3,"currency":"EUR"}}', 0),
        upstream('{"ok":[{"ok":{"amount":1,"currency":"EUR"}}]}', 1, kind="map"),
        upstream(SKIPPED, 2),
        upstream(
            '{"ok":{"amount":9,"currency":"EUR"}}', 3, sub_definition_key="tests.worker.plain"
        ),
        upstream('{"ok":{"amount":9}}', 4, task_name="horsies.signal"),
        upstream('{"ok":{"amount":9}}', 5, sub_definition_key="nobody knows"),
    )
    listed = {"one": 0, "many": 1, "gone": 2, "child": 3, "signal": 4, "unknown": 5}

    def found(node_id: str) -> str:
        return str(value(run("look_up", part(*sources, context=listed), node_id=node_id)))

    assert found("one") == "Money(amount=3, currency='EUR')"
    assert found("many") == "[Money(amount=1, currency='EUR')]"
    assert found("gone").startswith("TaskError(error_code='UPSTREAM_SKIPPED'")
    assert found("child") == "Money(amount=9, currency='EUR')"
    assert found("signal") == found("unknown") == "{'amount': 9}"


def test_without_listed_nodes_there_is_no_context() -> None:
    assert value(run("look_up", part(), node_id="one")) is None


def test_a_node_that_is_not_listed_is_a_key_error() -> None:
    node = part(upstream('{"ok":1}'), context={"one": 0})
    report = run("look_up", node, node_id="other")
    assert report.error_code == "UNHANDLED_EXCEPTION"
    assert "KeyError" in (report.error_message or "")


def test_a_look_up_of_a_node_without_an_id_has_a_code_of_its_own() -> None:
    node = part(upstream('{"ok":1}'), context={"one": 0})
    assert run("look_up_nothing", node).error_code == "WORKFLOW_CTX_MISSING_ID"


@pytest.mark.parametrize(
    ("status", "output"), [("COMPLETED", "Money(amount=9, currency='EUR')"), ("FAILED", "None")]
)
def test_the_summary_of_a_sub_workflow_is_in_the_context_with_its_output(
    status: str, output: str
) -> None:
    summary = json.dumps({"status": status, "total_tasks": 2, "completed_tasks": 2})
    source = upstream(
        '{"ok":{"amount":9,"currency":"EUR"}}',
        sub_definition_key="tests.worker.plain",
        sub_workflow_summary=summary,
    )
    assert value(run("summarise", part(source, context={"child": 0}))) == [status, 2, output]


def test_a_sleep_that_is_over_has_no_value() -> None:
    assert run("horsies.sleep", part()).result_json == '{"ok":null}'


def test_a_signal_hands_its_value_on_as_it_was_written() -> None:
    given = Assignment("t", 1, "horsies.signal", 1, "[]", '{"value":{"a":1.50}}', None, part())
    assert execute(app, given).result_json == '{"ok":{"a":1.50}}'
    assert run("horsies.signal", part(), value=None).result_json == '{"ok": null}'


def test_a_signal_without_a_value_came_too_late() -> None:
    assert run("horsies.signal", part()).error_code == "SIGNAL_TIMEOUT"


def expansion(key: str, kwargs_json: str = "{}", node: NodePart | None = None) -> ChildReport:
    request = f'{{"definition_key":{json.dumps(key)},"kwargs":{kwargs_json}}}'
    node = node or part(root_workflow_id=ROOT, depth=1)
    return execute(app, Assignment("t", 1, "horsies.expand", 1, "[]", request, None, node))


def test_an_expansion_plans_a_run_below_its_own() -> None:
    plan = value(expansion("tests.worker.plain"))
    assert (plan["parent_workflow_id"], plan["parent_task_index"]) == (RUN, 4)
    assert (plan["root_workflow_id"], plan["depth"]) == (ROOT, 2)
    assert plan["id"] not in (RUN, ROOT)
    assert plan["definition_key"] == "tests.worker.plain"
    assert [node["task_name"] for node in plan["nodes"]] == ["price"]


def test_an_expansion_gives_parameters_and_results_to_build_with() -> None:
    node = part(upstream('{"ok":5}'), args={"of": 0}, root_workflow_id=ROOT)
    plan = value(expansion("tests.worker.doubling", '{"plus":2}', node))
    assert json.loads(plan["nodes"][0]["task_kwargs"]) == {"of": {"ok": 5}, "plus": 2}


def test_a_sub_workflow_in_a_sub_workflow_is_planned_as_another_expansion() -> None:
    plan = value(expansion("tests.worker.nested"))
    assert [node["task_name"] for node in plan["nodes"]] == ["horsies.expand"]


@pytest.mark.parametrize(
    ("key", "kwargs_json", "code"),
    [
        ("nobody knows", "{}", "SUBWORKFLOW_LOAD_FAILED"),
        ("tests.worker.doubling", '{"plus":-1}', "WORKFLOW_ENQUEUE_FAILED"),
        ("tests.worker.doubling", '{"plus":"two"}', "WORKER_SERIALIZATION_ERROR"),
        ("tests.worker.doubling", "{}", "WORKER_SERIALIZATION_ERROR"),
        ("tests.worker.doubling", '{"plus":1,"minus":1}', "WORKER_SERIALIZATION_ERROR"),
    ],
)
def test_a_sub_workflow_that_cannot_be_built_fails_its_node(
    key: str, kwargs_json: str, code: str
) -> None:
    report = expansion(key, kwargs_json)
    assert not report.ok
    assert report.error_code == code


def test_nesting_has_an_end() -> None:
    deepest = part(root_workflow_id=ROOT, depth=NESTING_DEPTH_MAX)
    report = expansion("tests.worker.plain", node=deepest)
    assert report.error_code == "WORKFLOW_ENQUEUE_FAILED"
    assert "nest at most" in report.result_json


@pytest.mark.parametrize("request_json", ["{}", '{"definition_key":', '{"kwargs":{}}', "[1]"])
def test_an_expansion_somebody_broke_fails_its_node(request_json: str) -> None:
    given = Assignment("t", 1, "horsies.expand", 1, "[]", request_json, None, part())
    assert execute(app, given).error_code == "WORKER_SERIALIZATION_ERROR"


def test_a_task_of_the_library_that_this_worker_does_not_know_is_a_resolution_error() -> None:
    assert run("horsies.teleport", part()).error_code == "WORKER_RESOLUTION_ERROR"
    assert run("horsies.sleep", None).error_code == "WORKER_RESOLUTION_ERROR"


def test_inputs_of_many_megabytes_reach_a_child(make_pool: MakePool) -> None:
    boot = replace(
        BOOT,
        app_locator="tests.support.apps.workflow_app:app",
        program="horsies.worker.child.execute:load_program",
    )
    pool = make_pool(1, boot=boot)
    text = "é" * 5_000_000
    node = part(
        upstream(json.dumps({"ok": {"text": text}}, ensure_ascii=False)), args={"anything": 0}
    )
    pool.dispatch(Assignment("task-1", 1, "describe", 1, "[]", "{}", None, node))
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert len(value(event.report)[3]) > len(text)


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
