"""Maps: results that are never one value, lists that become tasks in steps, and limits with an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from psycopg import Connection

from horsies import (
    AppConfig,
    Horsies,
    MapNode,
    NodeKey,
    OnError,
    OperationalErrorCode,
    OutcomeCode,
    PayloadConfig,
    PostgresConfig,
    RetrievalCode,
    SubWorkflowNode,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowHandle,
    WorkflowStatus,
)
from horsies.ids import new_id
from horsies.tasks import waiters
from horsies.workflow.run import handle as handle_module
from horsies.workflow.run import results as results_module
from tests.support.applications import Call
from tests.support.database import Database, function_replaced, steps_of
from tests.support.runs import problems
from tests.support.turns import Hands, Tasks, define_tasks

Mapped = WorkflowHandle[list[TaskResult[int, TaskError]]]

ITEMS = """
SELECT workflow_item_index, status, held, good_until, kwargs FROM horsies_tasks
WHERE workflow_id = %s AND workflow_item_index IS NOT NULL ORDER BY workflow_item_index, id
"""
NODE = """
SELECT status, result, items_total, items_open, items_bad FROM horsies_workflow_tasks
WHERE workflow_id = %s AND node_id = 'squares'
"""


def start(app: Horsies, tasks: Tasks, **options: Any) -> Mapped:
    """Start a list of numbers and a map over it."""
    on_error = options.pop("on_error", OnError.FAIL)
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares", **options)
    return (
        app.workflow(
            "map", [source, squares], output=squares, definition_key="maps.map", on_error=on_error
        )
        .start()
        .unwrap()
    )


def items(connection: Connection[Any], run_id: str) -> list[tuple[Any, ...]]:
    return connection.execute(ITEMS, (run_id,)).fetchall()


def node(connection: Connection[Any], run_id: str) -> tuple[Any, ...]:
    found = connection.execute(NODE, (run_id,)).fetchone()
    assert found is not None
    return tuple(found)


def error_code(text: str) -> str:
    return str(json.loads(text)["err"]["error_code"]["__builtin_task_code__"])


# Results by reference


@pytest.mark.parametrize("allow_failed_items", [False, True])
def test_the_end_of_a_map_stores_nothing_but_the_end(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, allow_failed_items: bool
) -> None:
    handle = start(app, tasks, allow_failed_items=allow_failed_items)
    hands.complete(handle.workflow_id, "source", [1, 2, 3])
    for item in range(3):
        hands.complete(handle.workflow_id, "squares", "x" * 100_000, item=item)
    status, result, *_ = node(connection, handle.workflow_id)
    assert (status, result) == ("COMPLETED", None)
    (largest,) = connection.execute(
        "SELECT max(length(node::text)) FROM horsies_workflow_tasks AS node"
    ).fetchone() or (0,)
    assert largest < 2_000


class Squares(WorkflowDefinition[list[TaskResult[int, TaskError]]]):
    """A sub-workflow whose output is a map."""

    name = "squares"
    definition_key = "maps.squares"


def test_a_map_is_read_through_every_door(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = start(app, tasks, allow_failed_items=True)
    hands.complete(handle.workflow_id, "source", [1, 2])
    hands.fail(handle.workflow_id, "squares", item=1)
    hands.complete(handle.workflow_id, "squares", 1, item=0)
    for reader in (handle, app.workflow_handle(handle.workflow_id)):
        good, bad = call(app, reader, "get", timeout_ms=30_000).ok_value
        assert (good.ok_value, bad.err_value.error_code) == (1, "BOOM")
        assert call(app, reader, "result_for", NodeKey[Any]("squares")).ok_value == [good, bad]
        assert call(app, reader, "results").unwrap()["squares"].ok_value == [good, bad]
        shown = [(info.item_index, info.result) for info in call(app, reader, "tasks").unwrap()]
        assert shown[1:] == [(None, TaskResult(ok=[good, bad])), (0, good), (1, bad)]


def test_the_output_of_nested_runs_may_be_a_map_and_be_mapped_over_again(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    @app.task("again")
    def again(item: TaskResult[int, TaskError]) -> TaskResult[int, TaskError]:
        return item

    inner = app.workflow(
        "inner",
        [
            source := tasks.numbers.node(node_id="source")(),
            squares := MapNode(tasks.square, over=source, node_id="squares"),
        ],
        output=squares,
        definition_key="maps.inner",
    )
    child = SubWorkflowNode(Squares, node_id="child")
    middle = app.workflow("middle", [child], output=child, definition_key="maps.middle")
    below = SubWorkflowNode(Squares, node_id="below")
    mapped = MapNode(again, over=below, node_id="again")
    outer = app.workflow("outer", [below, mapped], output=mapped, definition_key="maps.outer")
    handle = outer.start().unwrap()
    middle_id, inner_id = new_id(), new_id()
    hands.expand(handle.workflow_id, "below", middle, middle_id)
    hands.expand(middle_id, "child", inner, inner_id)
    hands.complete(inner_id, "source", [1, 2])
    for item, value in enumerate((1, 4)):
        hands.complete(inner_id, "squares", value, item=item)
    expected: list[Any] = [TaskResult(ok=1), TaskResult(ok=4)]
    assert handle.result_for(below).ok_value == expected
    assert app.workflow_handle(middle_id).get(timeout_ms=0).ok_value is not None
    given = [json.loads(row[4])["item"] for row in items(connection, handle.workflow_id)]
    assert given == [{"ok": 1}, {"ok": 4}]
    for item in range(2):
        hands.complete(handle.workflow_id, "again", item, item=item)
    assert handle.get(timeout_ms=30_000).ok_value == [TaskResult(ok=0), TaskResult(ok=1)]
    stored = connection.execute(
        "SELECT count(*) FROM horsies_workflow_tasks WHERE kind IN ('map', 'workflow')"
        " AND (result IS NOT NULL OR status <> 'COMPLETED')"
    ).fetchone()
    assert stored == (0,)


def test_a_map_that_an_earlier_release_began_or_ended_is_read_and_ends(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks)
    hands.complete(handle.workflow_id, "source", [1, 2])
    connection.execute("UPDATE horsies_workflow_tasks SET items_waiting = NULL, items_next = NULL")
    hands.complete(handle.workflow_id, "squares", 1, item=0)
    assert problems(connection) == []
    hands.complete(handle.workflow_id, "squares", 4, item=1)
    assert handle.get(timeout_ms=30_000).ok_value == [TaskResult(ok=1), TaskResult(ok=4)]
    connection.execute(
        "UPDATE horsies_workflow_tasks SET result = %s WHERE node_id = 'squares'",
        ('{"ok":[{"ok":7}]}',),
    )
    fresh = app.workflow_handle(handle.workflow_id)
    assert fresh.get(timeout_ms=30_000).ok_value == [TaskResult(ok=7)]


# Sizes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle reads results of up to 1,000 bytes, those above 100 with a statement of their own."""
    monkeypatch.setattr(waiters, "SMALL_RESULT_BYTES", 100)
    monkeypatch.setattr(handle_module, "SMALL_RESULT_BYTES", 100)
    monkeypatch.setattr(handle_module, "READ_BYTES_MAX", 1_000)
    monkeypatch.setattr(results_module, "READ_BYTES_MAX", 1_000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("with_output", [True, False])
@pytest.mark.parametrize(("length", "is_read"), [(30, True), (200, True), (800, False)])
def test_a_result_is_read_in_parts_or_refused_with_its_size(
    app: Horsies, hands: Hands, call: Call, with_output: bool, length: int, is_read: bool
) -> None:
    @app.task("texts")
    def texts() -> TaskResult[list[str], TaskError]:
        return TaskResult(ok=[])

    @app.task("text")
    def text(item: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=item)

    source = texts.node(node_id="source")()
    mapped = MapNode(text, over=source, node_id="mapped")
    last = text.node(waits_for=[source], node_id="last")(item="")
    output: Any = mapped if with_output else None
    nodes: list[Any] = [source, mapped, last]
    spec = app.workflow("texts", nodes, output=output, definition_key="maps.texts")
    run_id = spec.start().unwrap().workflow_id
    hands.complete(run_id, "source", ["a", "b"])
    for item in range(2):
        hands.complete(run_id, "mapped", "x" * length, item=item)
    hands.complete(run_id, "last", "end")
    handle = app.workflow_handle(run_id)
    got = call(app, handle, "get", timeout_ms=30_000)
    one = call(app, handle, "result_for", mapped)
    every = call(app, handle, "results").unwrap()
    infos = call(app, handle, "tasks").unwrap()
    assert every["source"].ok_value == ["a", "b"]
    assert call(app, handle, "result_for", last).ok_value == every["last"].ok_value == "end"
    if is_read:
        whole: list[Any] = [TaskResult(ok="x" * length)] * 2
        ends: dict[str, Any] = {"mapped": TaskResult(ok=whole), "last": TaskResult(ok="end")}
        assert got.ok_value == (whole if with_output else ends)
        assert one.ok_value == every["mapped"].ok_value == infos[1].result.ok_value == whole
        assert [info.result for info in infos[2:4]] == whole
        return
    for refused in (got, one, every["mapped"], infos[1].result):
        assert refused.err_value.error_code is RetrievalCode.RESULT_TOO_LARGE
        assert refused.err_value.data["bytes"] in {1_620, 1_632}
        assert f"is {refused.err_value.data['bytes']:,} bytes" in refused.err_value.message
    first, second = infos[2:4]
    assert first.result == TaskResult(ok="x" * length)
    assert second.result.err_value.error_code is RetrievalCode.RESULT_TOO_LARGE
    assert all(info.result is None for info in handle.tasks(include_results=False).unwrap())


def test_the_result_of_a_map_as_one_text_is_an_error_when_it_would_be_too_large(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks)
    hands.complete(handle.workflow_id, "source", [1, 2])
    for item in range(2):
        hands.complete(handle.workflow_id, "squares", 1, item=item)
    limit = "() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 10::bigint $$"
    read = (
        "SELECT horsies_node_result_v1(node) FROM horsies_workflow_tasks AS node "
        "WHERE node.kind = 'map'"
    )
    assert connection.execute(read).fetchone() == ('{"ok":[{"ok":1},{"ok":1}]}',)
    with function_replaced(connection, "horsies_text_bytes_max", limit):
        ((text,),) = connection.execute(read).fetchall()
    assert error_code(text) == "PAYLOAD_TOO_LARGE"


# Limits


@pytest.fixture
def limited(process_url: str, connection: Database) -> Iterator[Horsies]:
    """An application whose maps have at most two items."""
    config = AppConfig(
        broker=PostgresConfig(database_url=process_url), payload=PayloadConfig(max_map_items=2)
    )
    application = Horsies(config)
    yield application
    application.close()


def test_a_map_over_too_many_elements_fails_with_the_setting_in_its_error(
    limited: Horsies, hands: Hands, connection: Database
) -> None:
    tasks = define_tasks(limited)
    handle = start(limited, tasks)
    hands.complete(handle.workflow_id, "source", [1, 2, 3])
    error = handle.get(timeout_ms=30_000).err_value
    assert error.error_code is OperationalErrorCode.PAYLOAD_TOO_LARGE
    assert error.message == (
        "Map node squares would have 3 items, more than 2 (payload.max_map_items); map over batches, "
        "or start the run with a higher limit."
    )
    assert items(connection, handle.workflow_id) == []
    handle.retry().unwrap()
    assert handle.get(timeout_ms=30_000).err_value == error
    enough = start(limited, tasks)
    hands.complete(enough.workflow_id, "source", [1, 2])
    assert len(items(connection, enough.workflow_id)) == 2


# Steps


def test_a_long_list_becomes_tasks_a_thousand_at_a_time(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks)
    hands.complete(handle.workflow_id, "source", list(range(3_500)))
    stored = []
    for item in range(4):
        stored.append(len(items(connection, handle.workflow_id)))
        hands.complete(handle.workflow_id, "squares", item, item=item)
        assert problems(connection) == []
    assert stored == [1_000, 2_000, 3_000, 3_000]
    assert node(connection, handle.workflow_id)[2:] == (3_500, 3_496, 0)
    kwargs = [json.loads(row[4])["item"] for row in items(connection, handle.workflow_id)]
    assert kwargs == list(range(3_000))
    connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', result = '{\"ok\":0}' "
        "WHERE workflow_item_index > 3"
    )
    assert len(items(connection, handle.workflow_id)) == 3_500
    connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', result = '{\"ok\":0}' "
        "WHERE workflow_item_index > 2999"
    )
    assert len(handle.get(timeout_ms=30_000).ok_value) == 3_500


def test_items_added_later_expire_with_the_first_and_wait_while_the_run_is_paused(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks, expires_in=timedelta(hours=1), max_parallel=1)
    run_id = handle.workflow_id
    with steps_of(connection, 1):
        hands.complete(run_id, "source", [1, 2, 3, 4])
        taken = hands.take(run_id, "squares", item=0)
        handle.pause().unwrap()
        hands.end(run_id, taken, {"ok": 1})
        assert [row[1:3] for row in items(connection, run_id)][1:] == [("PENDING", True)]
        assert problems(connection) == []
        handle.resume().unwrap()
        for item in range(1, 4):
            hands.complete(run_id, "squares", item, item=item)
    assert len({row[3] for row in items(connection, run_id)}) == 1
    assert handle.get(timeout_ms=30_000).is_ok()


def test_large_elements_of_a_map_over_a_map_become_tasks_a_few_bytes_at_a_time(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    @app.task("length")
    def length(item: TaskResult[int, TaskError]) -> TaskResult[int, TaskError]:
        return item

    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares")
    lengths = MapNode(length, over=squares, node_id="lengths")
    spec = app.workflow("maps", [source, squares, lengths], definition_key="maps.maps")
    run_id = spec.start().unwrap().workflow_id
    hands.complete(run_id, "source", [1, 2, 3, 4])
    with steps_of(connection, 1_000, 250):
        for item in range(4):
            hands.complete(run_id, "squares", "x" * 100, item=item)
        added = connection.execute(
            "SELECT count(*) FROM horsies_tasks WHERE workflow_node_index = 2"
        ).fetchone()
        assert added == (3,), "the first two, and the one that exceeds the limit"
        hands.complete(run_id, "lengths", 1, item=0)
        assert hands.task_id(run_id, "lengths", 3)


@pytest.mark.parametrize("large", ["elements", "arguments"])
def test_items_of_any_size_run_side_by_side(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, large: str
) -> None:
    @app.task("measure")
    def measure(item: TaskResult[int, TaskError], text: str) -> TaskResult[int, TaskError]:
        return item

    text = "x" * 100
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares")
    kwargs = {"text": text if large == "arguments" else ""}
    measured = MapNode(measure, over=squares, node_id="measured", kwargs=kwargs)
    spec = app.workflow("maps", [source, squares, measured], definition_key="maps.large")
    run_id = spec.start().unwrap().workflow_id
    hands.complete(run_id, "source", list(range(20)))
    waiting = (
        "SELECT count(*) FROM horsies_tasks WHERE task_name = 'measure' AND status = 'PENDING'"
    )
    counts = []
    with steps_of(connection, 1_000, 50):
        for item in range(20):
            value = text if large == "elements" else 1
            hands.complete(run_id, "squares", value, item=item)
        for item in range(3):
            counts += connection.execute(waiting).fetchall()
            hands.complete(run_id, "measured", 1, item=item)
        # Several items that end in one transaction make room for as many, and one more.
        connection.execute(
            "UPDATE horsies_tasks SET status = 'COMPLETED', result = '{\"ok\":0}' "
            "WHERE task_name = 'measure' AND workflow_item_index BETWEEN 3 AND 6"
        )
        counts += connection.execute(waiting).fetchall()
    assert counts == [(2,), (3,), (4,), (6,)]
    assert problems(connection) == []


def test_a_retry_tries_failed_items_again_in_steps(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks)
    run_id = handle.workflow_id
    hands.complete(run_id, "source", list(range(8)))
    for item in range(8):
        (hands.complete if item % 2 else hands.fail)(run_id, "squares", item=item)
    with steps_of(connection, 1):
        handle.retry().unwrap()
        assert [row[0] for row in items(connection, run_id) if row[1] == "PENDING"] == [0]
        assert node(connection, run_id)[2:] == (8, 4, 0)
        assert problems(connection) == []
        for item in (0, 2, 4, 6):
            hands.complete(run_id, "squares", item, item=item)
    assert [one.ok_value for one in handle.get(timeout_ms=30_000).ok_value] == [
        *(0, 1, 2, 1, 4, 1, 6, 1)
    ]
    assert len(items(connection, run_id)) == 12


# Runs that end early


@pytest.mark.parametrize("ending", ["cancel", "expire"])
def test_a_run_that_ends_early_ends_its_maps_at_once(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, ending: str
) -> None:
    handle = start(app, tasks, allow_failed_items=True)
    run_id = handle.workflow_id
    with steps_of(connection, 2):
        hands.complete(run_id, "source", [1, 2, 3, 4, 5])
        taken = hands.take(run_id, "squares", item=0)
        if ending == "cancel":
            handle.cancel().unwrap()
        else:
            handle.pause().unwrap()
            connection.execute("SELECT horsies_expire_v1(%s, 0, '{}')", (run_id,))
        status, result, *counts = node(connection, run_id)
        assert (status, counts) == ("FAILED", [5, 1, 4])
        word = {"cancel": "WORKFLOW_CANCELLED", "expire": "WORKFLOW_EXPIRED"}[ending]
        assert error_code(result) == word
        hands.end(run_id, taken, {"ok": 1})
    assert node(connection, run_id) == (status, result, 5, 0, 4)
    assert len(items(connection, run_id)) == 2, "nothing is added to a run that has ended"


def test_a_map_left_running_in_a_cancelled_run_is_found_and_cancelled(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks, allow_failed_items=True)
    run_id = handle.workflow_id
    hands.complete(run_id, "source", [1, 2])
    hands.complete(run_id, "squares", 1, item=0)
    taken = hands.take(run_id, "squares", item=1)
    with connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute(
            "UPDATE horsies_workflows SET status = 'CANCELLED', completed_at = now()"
        )
    assert problems(connection) == [
        "map node squares is RUNNING although the run is CANCELLED; cancel the run once more"
    ]
    handle.cancel().unwrap()
    assert problems(connection) == []
    status, result, *_ = node(connection, run_id)
    assert (status, error_code(result)) == ("FAILED", OutcomeCode.WORKFLOW_CANCELLED)
    hands.end(run_id, taken, {"ok": 1})
    assert node(connection, run_id)[:2] == (status, result)
    assert handle.status().unwrap() is WorkflowStatus.CANCELLED


def test_a_map_whose_list_was_deleted_is_reported(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = start(app, tasks)
    run_id = handle.workflow_id
    with steps_of(connection, 1):
        hands.complete(run_id, "source", [1, 2, 3])
        connection.execute("DELETE FROM horsies_tasks WHERE workflow_item_index IS NULL")
        hands.complete(run_id, "squares", 1, item=0)
    assert "map node squares has not ended although it has no open items" in problems(connection)
    handle.cancel().unwrap()
    assert problems(connection) == []
