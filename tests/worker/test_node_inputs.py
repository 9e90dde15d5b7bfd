"""The results that nodes take from others: read once, and cached while there is room."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import psycopg
import pytest
from psycopg import Connection

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    FailTasks,
    claim_tasks,
    complete_tasks,
    fail_tasks,
)
from horsies.db.statements.workflows import start_runs
from horsies.ids import new_id
from horsies.task_result import TaskError, TaskResult
from horsies.worker.node_inputs import KeptInputs, NodeInputs, tasks_with_injection
from horsies.worker.protocol import NodeInput, NodePart
from horsies.workflow.build.plan import plan
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.nodes.nodes import AnyNode, MapNode, SubWorkflowNode, TaskNode
from tests.support.statements import named

RUN = "0190f3a1-0000-7000-8000-000000000001"


class Counted:
    """A connection for turns that counts its round trips and statements."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.groups: list[list[str]] = []

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        self.groups.append([statement.name for statement, _ in steps])
        return self._pipeline.run(steps)


@pytest.fixture
def counted(process_url: str, connection: Connection[Any]) -> Iterator[Counted]:
    with psycopg.connect(process_url, autocommit=True) as own:
        yield Counted(Pipeline(own))


@pytest.fixture
def start(app: Horsies, connection: Connection[Any]) -> Callable[..., str]:
    def start(*nodes: AnyNode) -> str:
        spec = app.workflow("run", nodes, definition_key="inputs")
        run_id = new_id()
        start_runs.fetch(connection, f"[{plan(spec, run_id)}]")
        return run_id

    return start


def claim(connection: Connection[Any], count: int = 100) -> list[ClaimedTask]:
    pids = list(range(1, count + 1))
    return claim_tasks.run(connection, ClaimTasks("me", "host", pids, ["default"], [count]))


def complete(connection: Connection[Any], tasks: Sequence[ClaimedTask], result: str) -> None:
    ids, generations = [task.id for task in tasks], [task.generation for task in tasks]
    done = CompleteTasks("me", ids, generations, [result] * len(tasks))
    assert len(complete_tasks.run(connection, done)) == len(tasks)


def fail(connection: Connection[Any], task: ClaimedTask, code: str) -> None:
    error = {"error_code": code, "message": None, "data": None, "exception": None}
    failed = FailTasks(
        "me",
        [task.id],
        [task.generation],
        ["FAILED"],
        [json.dumps({"err": error})],
        ["FAILED"],
        [code],
        [None],
        [None],
    )
    assert fail_tasks.run(connection, failed)


def read(inputs: NodeInputs, counted: Counted, tasks: Sequence[ClaimedTask]) -> dict[str, NodePart]:
    parts, unreadable = inputs.read(cast(Pipeline, counted), tasks)
    assert unreadable == []
    return parts


@pytest.fixture
def produce(app: Horsies) -> Any:
    @app.task("produce")
    def produce() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    return produce


@pytest.fixture
def consume(app: Horsies) -> Any:
    @app.task("consume")
    def consume(
        a: TaskResult[Any, TaskError] | None = None,
        b: TaskResult[Any, TaskError] | None = None,
        workflow_ctx: Any = None,
    ) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    return consume


def test_a_task_that_takes_nothing_needs_no_statement(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any
) -> None:
    run_id = start(TaskNode(produce), TaskNode(produce))
    first, second = claim(connection)
    parts = read(NodeInputs(), counted, [first, second])
    assert parts == {first.id: NodePart(run_id, 0), second.id: NodePart(run_id, 1)}
    assert counted.groups == []


def test_only_tasks_that_take_or_ask_something_have_a_part(app: Horsies, consume: Any) -> None:
    @app.task("plain")
    def plain() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    inputs = NodeInputs(tasks_with_injection(app))

    def has_part(name: str, taken: str | None = None) -> bool:
        return inputs.has_part(node(taken)._replace(task_name=name))

    assert not has_part("plain")
    assert has_part("plain", '{"args":{"a":0},"context":{}}')
    assert has_part("consume")
    assert has_part("horsies.sleep")
    assert has_part("nobody knows")


def test_a_result_that_many_take_is_read_once(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, consume: Any
) -> None:
    source = TaskNode(produce)
    takers = [TaskNode(consume, args_from={"a": source}, waits_for=[source]) for _ in range(50)]
    start(source, *takers)
    complete(connection, claim(connection), '{"ok":"result"}')
    inputs = NodeInputs()
    first, rest = claim(connection, 10), claim(connection)
    for claimed in (first, rest):
        parts = read(inputs, counted, claimed)
        for task in claimed:
            assert [one.result for one in parts[task.id].sources] == ['{"ok":"result"}']
            assert json.loads(parts[task.id].inputs_json or "") == {"args": {"a": 0}, "context": {}}
    assert counted.groups == [["read_results"]]
    texts = {id(part.sources[0].result) for part in parts.values()}
    assert len(texts) == 1


def test_what_this_worker_recorded_itself_is_not_read_again(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, consume: Any
) -> None:
    source = TaskNode(produce)
    start(source, TaskNode(consume, args_from={"a": source}, waits_for=[source]))
    inputs = NodeInputs()
    (first,) = claim(connection)
    complete(connection, [first], '{"ok":1}')
    inputs.note_completed(first, '{"ok":1}')
    (second,) = claim(connection)
    (part,) = read(inputs, counted, [second]).values()
    assert part.sources == (NodeInput(0, "task", "produce", '{"ok":1}'),)
    assert counted.groups == []
    assert read(NodeInputs(), counted, [second]) == {second.id: part}


def test_failed_and_skipped_nodes_are_read_each_time_because_they_may_be_tried_again(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, consume: Any
) -> None:
    failing = TaskNode(produce)
    skipped = TaskNode(produce, waits_for=[failing])
    taker = TaskNode(
        consume,
        args_from={"a": failing, "b": skipped},
        waits_for=[failing, skipped],
        allow_failed_deps=True,
    )
    start(failing, skipped, taker)
    (first,) = claim(connection)
    fail(connection, first, "NO_LUCK")
    (task,) = claim(connection)
    inputs = NodeInputs()
    for _ in range(2):
        (part,) = read(inputs, counted, [task]).values()
        errors = [json.loads(one.result)["err"]["error_code"] for one in part.sources]
        assert errors == ["NO_LUCK", {"__builtin_task_code__": "UPSTREAM_SKIPPED"}]
    assert counted.groups == [["read_results"]] * 2


def test_the_inputs_leave_out_a_source_that_has_not_ended(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, consume: Any
) -> None:
    quick, slow = TaskNode(produce), TaskNode(produce)
    taker = TaskNode(
        consume, args_from={"a": quick, "b": slow}, waits_for=[quick, slow], join="any"
    )
    start(quick, slow, taker)
    first, _ = claim(connection)
    complete(connection, [first], '{"ok":1}')
    (task,) = claim(connection)
    (part,) = read(NodeInputs(), counted, [task]).values()
    assert [source.task_index for source in part.sources] == [0]


def test_items_of_a_map_are_not_taken_for_its_result(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, app: Horsies
) -> None:
    @app.task("produce_list")
    def produce_list() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1, 2])

    @app.task("take_item")
    def take_item(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    @app.task("take_list")
    def take_list(
        items: TaskResult[list[TaskResult[int, TaskError]], TaskError],
    ) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    source = TaskNode(produce_list)
    mapped = MapNode(take_item, over=source, each="number")
    start(source, mapped, TaskNode(take_list, args_from={"items": mapped}, waits_for=[mapped]))
    complete(connection, claim(connection), '{"ok":[1,2]}')
    inputs = NodeInputs()
    for item in claim(connection):
        complete(connection, [item], '{"ok":5}')
        inputs.note_completed(item, '{"ok":5}')
    (task,) = claim(connection)
    (part,) = read(inputs, counted, [task]).values()
    assert [(one.kind, one.task_name, one.result) for one in part.sources] == [
        ("map", "take_item", '{"ok":[{"ok":5},{"ok":5}]}')
    ]


def test_an_expansion_learns_where_its_run_stands(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any
) -> None:
    class Child(WorkflowDefinition[None]):
        name = "child"
        definition_key = "tests.worker.inputs.child"
        only = TaskNode(produce)

    run_id = start(SubWorkflowNode(Child))
    (task,) = claim(connection)
    assert read(NodeInputs(), counted, [task]) == {
        task.id: NodePart(run_id, 0, root_workflow_id=run_id, depth=0)
    }
    assert counted.groups == [["read_places"]]


def node(inputs: str | None) -> ClaimedTask:
    values = ("task-1", 1, "consume", "default", "[]", "{}", 0, 0, None, None, 7)
    return ClaimedTask(*values, RUN, 3, None, inputs)


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", "7", '{"args":{"a":"x"},"context":{}}', '{"args":{"a":Infinity},"context":{}}'],
)
def test_inputs_somebody_broke_are_left_to_the_child(counted: Counted, broken: str) -> None:
    assert read(NodeInputs(), counted, [node(broken)]) == {"task-1": NodePart(RUN, 3, broken)}


class Refusing:
    """A database that cannot answer for one of two nodes, or for none at the moment."""

    def __init__(self, error: psycopg.Error, index: int) -> None:
        self._error = error
        self._index = index

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        if any(self._index in named(step).indexes for step in steps):
            raise self._error
        return [[] for _ in steps]


def test_a_passing_error_is_raised_and_a_lasting_one_costs_only_its_own_node() -> None:
    def taking(task_id: str, index: int) -> ClaimedTask:
        values = (task_id, 1, "consume", "default", "[]", "{}", 0, 0, None, None, 7)
        taken = json.dumps({"args": {"a": index}, "context": {}})
        return ClaimedTask(*values, RUN, 3, None, taken)

    tasks = [taking("good", 0), taking("bad", 1)]
    away = cast(Pipeline, Refusing(psycopg.OperationalError("gone"), 1))
    with pytest.raises(psycopg.OperationalError):
        NodeInputs().read(away, tasks)
    broken = cast(Pipeline, Refusing(psycopg.errors.InternalError_("corrupt"), 1))
    parts, ((refused, outcome),) = NodeInputs().read(broken, tasks)
    assert set(parts) == {"good"}
    assert (refused, outcome.error_code) == (tasks[1], "WORKER_SERIALIZATION_ERROR")


def result(size: int) -> NodeInput:
    return NodeInput(0, "task", "produce", "x" * size)


def test_the_least_recently_used_result_is_forgotten_first() -> None:
    kept = KeptInputs(bytes_max=3 * 1_700)
    for index in range(3):
        kept.keep((RUN, index), result(1_000))
    assert kept.get((RUN, 0)) is not None
    kept.keep((RUN, 3), result(1_000))
    assert [index for index in range(4) if kept.get((RUN, index))] == [0, 2, 3]
    assert kept.bytes_kept <= kept.bytes_max


def test_a_result_larger_than_the_room_is_not_kept_and_drives_nobody_out() -> None:
    kept = KeptInputs(bytes_max=5_000)
    kept.keep((RUN, 0), result(1_000))
    kept.keep((RUN, 1), result(10_000))
    assert kept.get((RUN, 0)) is not None
    assert kept.get((RUN, 1)) is None


def test_a_task_that_takes_too_much_is_refused_and_the_others_are_read_apart(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, consume: Any
) -> None:
    sources = [TaskNode(produce) for _ in range(3)]
    takers = [TaskNode(consume, args_from={"a": one}, waits_for=sources) for one in sources]
    greedy = TaskNode(
        consume, args_from={"a": sources[0], "b": sources[1]}, waits_for=sources, node_id="greedy"
    )
    start(*sources, *takers, greedy)
    text = json.dumps({"ok": "x" * 100})
    complete(connection, claim(connection), text)
    *claimed, too_much = claim(connection)
    parts, ((refused, outcome),) = NodeInputs(size_max=150).read(
        cast(Pipeline, counted), [*claimed, too_much]
    )
    assert [parts[task.id].sources[0].result for task in claimed] == [text] * 3
    assert counted.groups == [["read_results"]] * 3, "none of them reads more than one may take"
    assert (refused, outcome.error_code) == (too_much, "PAYLOAD_TOO_LARGE")
    assert outcome.error_message == (
        "Node 6 (consume) takes results of 220 bytes from other nodes, more than "
        "payload.max_input_bytes (150); return references to the data instead."
    )


def test_the_results_of_a_map_count_together(
    connection: Connection[Any], counted: Counted, start: Any, produce: Any, app: Horsies
) -> None:
    @app.task("numbered")
    def numbered() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1, 2])

    @app.task("item")
    def item(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    @app.task("all_items")
    def all_items(
        items: TaskResult[list[TaskResult[int, TaskError]], TaskError],
    ) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    source = TaskNode(numbered)
    mapped = MapNode(item, over=source, each="number")
    start(source, mapped, TaskNode(all_items, args_from={"items": mapped}, waits_for=[mapped]))
    complete(connection, claim(connection), '{"ok":[1,2,3]}')
    complete(connection, claim(connection), '{"ok":5}')
    (task,) = claim(connection)
    parts, ((refused, outcome),) = NodeInputs(size_max=20).read(cast(Pipeline, counted), [task])
    assert (parts, refused, outcome.error_code) == ({}, task, "PAYLOAD_TOO_LARGE")
    read(NodeInputs(size_max=50), counted, [task])
