"""The plan is the contract with the database: its every field is written down here."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from horsies import (
    AnyNode,
    MapNode,
    OnError,
    RetryPolicy,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
    from_node,
)
from horsies.ids import new_id
from horsies.retry import policy_from_options
from horsies.workflow.build import plan as plan_module
from horsies.workflow.build.plan import Parent, fingerprints, plan
from tests.support.apps.shop import (
    codes_of,
    double,
    number,
    numbers,
    report,
    square,
    total,
    workflow,
)
from tests.support.running import running_with_headers

ID = "01900000-0000-7000-8000-000000000001"
MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone(timedelta(hours=2)))
WRITTEN = "2026-05-04T01:02:01+00:00"


class Child(WorkflowDefinition[int]):
    name = "child"
    definition_key = "plan.child"

    @classmethod
    def build_with(
        cls, app: Any, *, count: int, before: TaskResult[int, TaskError] | None = None
    ) -> WorkflowSpec[int]:
        node = number.node(node_id="only")(n=count)
        return WorkflowSpec(cls.name, [node], output=node)


def planned(spec: WorkflowSpec[Any], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(spec, ID, **options))
    return found


def planned_nodes(*nodes: Any, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = planned(workflow(nodes, **options))["nodes"]
    return found


def test_a_run_is_described_as_a_whole() -> None:
    first, second = number.node()(), number.node()()
    spec = workflow([first, second], output=second)
    described = planned(spec, workflow_key="order-7", sent_at=MOMENT)
    nodes = described.pop("nodes")
    assert described == {
        "id": ID,
        "name": "shop",
        "definition_key": "shop.v1",
        "fingerprint": fingerprints(spec)[0],
        "workflow_key": "order-7",
        "on_error": "fail",
        "output_index": 1,
        "success_policy": None,
        "sent_at": WRITTEN,
        "parent_workflow_id": None,
        "parent_task_index": None,
        "depth": 0,
        "root_workflow_id": ID,
    }
    assert [node["task_index"] for node in nodes] == [0, 1]


def test_a_child_run_knows_its_parent_and_its_root() -> None:
    parent_id, root_id = new_id(), new_id()
    parent = Parent(workflow_id=parent_id, task_index=3, root_workflow_id=root_id, depth=1)
    described = planned(workflow([number.node()()]), parent=parent)
    assert described["parent_workflow_id"] == parent_id
    assert described["parent_task_index"] == 3
    assert described["root_workflow_id"] == root_id
    assert described["depth"] == 2


def test_runs_are_not_nested_without_end() -> None:
    parent = Parent(workflow_id=ID, task_index=0, root_workflow_id=ID, depth=32)
    assert codes_of(lambda: plan(workflow([number.node()()]), ID, parent=parent)) == ["HRS-007"]


def test_a_run_that_a_task_starts_takes_over_the_headers_of_the_task() -> None:
    listed = numbers.node()()
    child = SubWorkflowNode(Child, kwargs={"count": 1})
    spec = workflow([listed, MapNode(square, over=listed), child])
    outside = planned(spec)
    with running_with_headers({"tenant": "red"}):
        inside = planned(spec)
    for node in inside["nodes"]:
        options = json.loads(node["task_options"])
        assert options.pop("headers") == {"tenant": "red"}
        assert options == json.loads(outside["nodes"][node["task_index"]]["task_options"])
    assert inside["fingerprint"] == outside["fingerprint"]
    assert planned(spec)["nodes"] == outside["nodes"], "later runs have no headers again"


def test_the_runs_of_a_specification_share_all_but_their_own_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = workflow([number.node()()])
    first = planned(spec, workflow_key="one")
    monkeypatch.setattr(plan_module, "_node_plans", lambda _: pytest.fail("written again"))
    second = planned(spec, workflow_key="two")
    own = {"workflow_key": "two", "sent_at": second["sent_at"]}
    assert second == first | own


def test_nodes_that_run_no_code_store_no_headers() -> None:
    spec = workflow([SleepNode(1), SignalNode("go")])
    outside = planned(spec)
    with running_with_headers({"tenant": "red"}):
        assert planned(spec)["nodes"] == outside["nodes"]


def test_an_id_is_written_as_the_database_writes_it() -> None:
    spec = workflow([number.node()()])
    assert json.loads(plan(spec, ID.upper().replace("-", "")))["id"] == ID


def test_the_moment_of_sending_is_now_unless_told() -> None:
    before = datetime.now(UTC)
    sent_at = datetime.fromisoformat(planned(workflow([number.node()()]))["sent_at"])
    assert before <= sent_at <= datetime.now(UTC)


def test_a_task_node_has_all_fields_but_those_without_a_value() -> None:
    node = number.node(
        node_id="n",
        priority=7,
        good_until=MOMENT,
        expires_in=timedelta(seconds=1.5),
        timeout_ms=250,
        retry_policy=RetryPolicy.fixed([0.3], auto_retry_for=[OSError, "BUSY"]),
    )(n=5)
    (described,) = planned_nodes(node)
    options = described.pop("task_options")
    assert policy_from_options(options) == RetryPolicy.fixed(
        [0.3], auto_retry_for=["builtins.OSError", "BUSY"]
    )
    assert json.loads(options)["good_until"] == MOMENT.isoformat()
    assert described == {
        "task_index": 0,
        "node_id": "n",
        "kind": "task",
        "task_name": "number",
        "task_kwargs": '{"n":5}',
        "queue_name": "default",
        "priority": 7,
        "max_retries": 1,
        "timeout_ms": 250,
        "good_until": WRITTEN,
        "expires_in_ms": 1500,
        "dependencies": [],
        "dependents": [],
        "context_dependents": [],
        "join_type": "all",
        "allow_failed_deps": False,
        "pauses": False,
        "allow_failed_items": False,
    }


def test_what_a_task_declares_holds_where_its_node_says_nothing() -> None:
    source = numbers.node()()
    mapped = MapNode(square, over=source)
    described = planned_nodes(source, mapped, total.node()(results=from_node(mapped)))[2]
    assert described["max_retries"] == 2
    assert described["timeout_ms"] == 5_000
    policy = policy_from_options(described["task_options"])
    assert policy == RetryPolicy.fixed([1, 2], auto_retry_for=["BUSY"])


def test_edges_are_written_in_both_directions() -> None:
    first, second = number.node()(), number.node()()
    third = report.node(waits_for=[second, first], workflow_ctx_from=[first], join="any")(title="")
    fourth = double.node(waits_for=[third], allow_failed_deps=True)(value=from_node(first))
    nodes = planned_nodes(first, second, third, fourth)
    assert [node["dependencies"] for node in nodes] == [[], [], [1, 0], [2, 0]]
    assert [node["dependents"] for node in nodes] == [[2, 3], [2], [3], []]
    assert [node["context_dependents"] for node in nodes] == [[2], [], [], []]
    assert [node["join_type"] for node in nodes] == ["all", "all", "any", "all"]
    assert [node["allow_failed_deps"] for node in nodes] == [False, False, False, True]
    assert json.loads(nodes[2]["inputs"]) == {"args": {}, "context": {"shop:0": 0}}
    assert json.loads(nodes[3]["inputs"]) == {"args": {"value": 0}, "context": {}}


def test_a_quorum_is_written_with_its_number() -> None:
    first, second = number.node()(), number.node()()
    last = number.node(waits_for=[first, second, first], join="quorum", min_success=2)()
    described = planned_nodes(first, second, last)[2]
    assert (described["join_type"], described["min_success"]) == ("quorum", 2)
    assert described["dependencies"] == [0, 1]


def test_a_map_is_written_with_its_source_and_its_parameter() -> None:
    source = numbers.node()()
    mapped = MapNode(
        square, over=source, kwargs={"offset": 3}, max_parallel=4, allow_failed_items=True
    )
    described = planned_nodes(source, mapped)[1]
    assert described["kind"] == "map"
    assert described["task_name"] == "square"
    assert described["task_kwargs"] == '{"offset":3}'
    assert (described["map_over"], described["map_parameter"]) == (0, "item")
    assert (described["max_parallel"], described["allow_failed_items"]) == (4, True)
    assert described["dependencies"] == [0]
    assert "inputs" not in described


def test_a_sleep_is_a_delay_or_a_moment() -> None:
    nodes = planned_nodes(SleepNode(1.5), SleepNode(until=MOMENT))
    assert [node["kind"] for node in nodes] == ["sleep", "sleep"]
    assert [node["task_name"] for node in nodes] == ["horsies.sleep"] * 2
    assert [node.get("delay_ms") for node in nodes] == [1500, None]
    assert [node.get("not_before") for node in nodes] == [None, WRITTEN]


def test_a_signal_has_a_name_and_perhaps_a_time() -> None:
    nodes = planned_nodes(SignalNode("go", timeout=timedelta(minutes=1)), SignalNode("stop"))
    assert [node["kind"] for node in nodes] == ["signal", "signal"]
    assert [node["task_name"] for node in nodes] == ["horsies.signal"] * 2
    assert [node["signal_name"] for node in nodes] == ["go", "stop"]
    assert [node.get("signal_timeout_ms") for node in nodes] == [60_000, None]


def test_a_sub_workflow_is_expanded_by_a_task_of_its_own() -> None:
    first = number.node()()
    child = SubWorkflowNode(
        Child, kwargs={"count": 3}, args_from={"before": first}, waits_for=[first]
    )
    described = planned_nodes(first, child)[1]
    assert described["kind"] == "workflow"
    assert described["task_name"] == "horsies.expand"
    assert json.loads(described["task_kwargs"]) == {
        "definition_key": "plan.child",
        "kwargs": {"count": 3},
    }
    assert json.loads(described["inputs"]) == {"args": {"before": 0}, "context": {}}
    assert (described["sub_definition_key"], described["sub_workflow_name"]) == (
        "plan.child",
        "child",
    )
    assert described["max_retries"] == 3
    policy = policy_from_options(described["task_options"])
    assert policy is not None
    assert list(policy.auto_retry_for) == ["WORKER_CRASHED", "WORKER_STOPPED"]


@pytest.mark.parametrize("node", [SleepNode(1), SignalNode("go")])
def test_the_library_s_own_tasks_outlive_a_lost_worker(node: AnyNode) -> None:
    described = planned_nodes(node)[0]
    assert described["max_retries"] == 3
    policy = policy_from_options(described["task_options"])
    assert policy is not None
    assert list(policy.auto_retry_for) == ["WORKER_CRASHED", "WORKER_STOPPED"]
    assert (described["queue_name"], described["priority"]) == ("default", 100)


def test_success_cases_are_written_as_indexes() -> None:
    first, second, third = (number.node()() for _ in range(3))
    policy = SuccessPolicy(
        [SuccessCase([third, first, third]), SuccessCase([second])], optional=[second]
    )
    described = planned(workflow([first, second, third], success_policy=policy))
    assert described["success_policy"] == {
        "cases": [{"required_indices": [0, 2]}, {"required_indices": [1]}],
        "optional_indices": [1],
    }


def test_optional_nodes_do_not_pause_a_run() -> None:
    first, second = number.node()(), number.node()()
    policy = SuccessPolicy([SuccessCase([first])], optional=[second])
    nodes = planned_nodes(first, second, on_error=OnError.PAUSE, success_policy=policy)
    assert [node["pauses"] for node in nodes] == [True, False]


def build(**changes: Any) -> WorkflowSpec[Any]:
    """A workflow of which the tests change one thing at a time."""
    first = number.node(node_id="first")(n=changes.get("n", 1))
    second = double.node(
        node_id="second",
        **{
            name: changes[name]
            for name in ("priority", "good_until", "timeout_ms", "allow_failed_deps")
            if name in changes
        },
    )(value=from_node(first))
    others = changes.get("others", [])
    return workflow(
        [first, second, *others],
        name=changes.get("name", "shop"),
        definition_key=changes.get("key", "shop.v1"),
        on_error=changes.get("on_error", OnError.FAIL),
        output=changes.get("output"),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2},
        {"key": "shop.v2"},
        {"on_error": OnError.PAUSE},
        {"output": "second"},
        {"allow_failed_deps": True},
        {"others": [SleepNode(1, node_id="pause")]},
    ],
    ids=str,
)
def test_another_request_has_another_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprints(build(**changes)) != fingerprints(build())


@pytest.mark.parametrize(
    "changes", [{}, {"priority": 3}, {"good_until": MOMENT}, {"timeout_ms": 900}], ids=str
)
def test_the_same_request_has_the_same_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprints(build(**changes)) == fingerprints(build())
    assert [len(one) for one in fingerprints(build())] == [64]


def test_a_sleep_of_another_length_is_another_request() -> None:
    one, two = workflow([SleepNode(1)]), workflow([SleepNode(2)])
    assert fingerprints(one) != fingerprints(two)
