"""Runs that wait in lanes of keys and in maps keep their places, and take none of others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from horsies import AnyNode, Durable, Horsies, MapNode, TaskHandle, TaskStatus
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of
from tests.support.keys import limit

DAY = timedelta(days=1)


def test_a_parked_run_keeps_its_place_in_a_fifo_lane(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    limit(connection, is_fifo=True)

    @app.durable("talk")
    def talk(ctx: Durable, name: str) -> str:
        ctx.step(effects.note, name)
        ctx.sleep(DAY)
        return str(ctx.wait_signal("go"))

    first = talk.with_options(key="acme").enqueue("first")
    second = talk.with_options(key="acme").enqueue("second")
    other = talk.with_options(key="other").enqueue("other")
    run_pending(app)
    assert effects == {"first": 1, "other": 1}, "the second waits behind the first one of its key"
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert effects == {"first": 1, "other": 1}, "it waits for a signal now"
    app.signal(first.task_id, "go", "gone").unwrap()
    run_pending(app)
    assert first.result(timeout_ms=0) == "gone"
    assert effects["second"] == 1
    second.cancel().unwrap()
    assert [info_of(one).status for one in (second, other)] == [
        TaskStatus.CANCELLED,
        TaskStatus.PENDING,
    ]


def test_a_parked_run_keeps_its_place_when_the_clock_has_stepped_back(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    limit(connection, is_fifo=True)

    @app.durable("talk")
    def talk(ctx: Durable, name: str) -> str:
        ctx.step(effects.note, name)
        return str(ctx.wait_signal("go"))

    for name in ("first", "second"):
        talk.with_options(key="acme").enqueue(name)
    sent_before = "enqueued_at + interval '1 minute', updated_at + interval '1 minute'"
    connection.execute(
        f"UPDATE horsies_tasks SET (enqueued_at, updated_at) = ({sent_before})".encode()
    )
    run_pending(app)
    assert effects == {"first": 1}, "the first one has parked, and the second waits behind it"


def test_a_held_run_keeps_its_place_in_a_fifo_lane(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    limit(connection, is_fifo=True)
    names = ["old"]

    @app.durable("talk")
    def talk(ctx: Durable, name: str) -> str:
        ctx.with_options(name=names[0]).step(effects.note, name)
        ctx.sleep(DAY)
        return ctx.with_options(name="last").step(effects.note, f"{name} ends")

    first = talk.with_options(key="acme").enqueue("first")
    talk.with_options(key="acme").enqueue("second")
    run_pending(app)
    names[0] = "new"
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert app.durable_handle(first.task_id).info().unwrap().problem is not None
    assert effects == {"first": 1}
    names[0] = "old"
    app.durable_handle(first.task_id).resume().unwrap()
    run_pending(app)
    assert first.result(timeout_ms=0) == "first ends"
    assert effects == {"first": 1, "first ends": 1, "second": 1}


def reasons(app: Horsies, sent: TaskHandle[Any]) -> dict[str, str]:
    """The reasons why a task waits, apart from that no worker serves its queue."""
    found = app.explain(sent.task_id).unwrap().reasons
    return {one.code: one.sentence for one in found if one.code != "QUEUE_UNSERVED"}


def test_the_wait_of_a_run_in_a_fifo_lane_is_explained(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    limit(connection, is_fifo=True)
    names = ["old"]

    @app.durable("talk")
    def talk(ctx: Durable, name: str) -> str:
        ctx.with_options(name=names[0]).step(effects.note, name)
        ctx.sleep(DAY)
        ctx.wait_signal("go")
        return ctx.with_options(name="last").step(effects.note, f"{name} ends")

    first = talk.with_options(key="acme").enqueue("first")
    second = talk.with_options(key="acme").enqueue("second")
    run_pending(app)
    found = reasons(app, first)
    assert list(found) == ["PARKED_RUN"]
    assert "the end of its wait in 23 h" in found["PARKED_RUN"]
    assert list(reasons(app, second)) == ["KEY_ORDER"]
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert reasons(app, first) == {"PARKED_RUN": "It is parked and waits for signal 'go'."}
    app.signal(first.task_id, "go", 1).unwrap()
    names[0] = "new"
    run_pending(app)
    found = reasons(app, first)
    assert list(found) == ["HELD_BY_RECORD"]
    assert "the code asks for step 'new'" in found["HELD_BY_RECORD"]
    assert list(reasons(app, second)) == ["KEY_ORDER"]


def test_a_held_node_is_not_said_to_be_held_by_its_run(app: Horsies, effects: Effects) -> None:
    names = ["old"]

    @app.durable("ask")
    def ask(ctx: Durable) -> str:
        ctx.with_options(name=names[0]).step(effects.note, "asked")
        ctx.sleep(DAY)
        return ctx.with_options(name="last").step(effects.note, "ended")

    node: AnyNode = ask.node()()
    run = app.workflow("flow", [node], output=node, definition_key="durable.node").start().unwrap()
    run_pending(app)
    names[0] = "new"
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    found = app.explain(run.workflow_id, node.node_id).unwrap().reasons
    assert [one.code for one in found if one.code != "QUEUE_UNSERVED"] == ["HELD_BY_RECORD"]


def test_items_of_a_map_that_wait_do_not_take_the_turns_of_others(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    @app.durable("ask")
    def ask(ctx: Durable, number: int) -> int:
        ctx.step(effects.note, str(number))
        ctx.wait_signal("go")
        return number

    @app.task("numbers")
    def numbers() -> list[int]:
        return [0, 1, 2, 3]

    first = numbers.node()()
    many = MapNode(ask, over=first, node_id="many", max_parallel=2)
    nodes: list[AnyNode] = [first, many]
    run = app.workflow("flow", nodes, output=many, definition_key="durable.map").start().unwrap()
    run_pending(app)
    assert effects == {"0": 1, "1": 1}
    found = connection.execute(
        "SELECT id::text FROM horsies_tasks WHERE workflow_item_index IS NOT NULL "
        "ORDER BY workflow_item_index"
    ).fetchall()
    for place, (item,) in enumerate(found):
        app.signal(item, "go", 1).unwrap()
        run_pending(app)
        begun = {str(number) for number in range(min(4, place + 3))}
        assert set(effects) == begun, "the end of an item starts the next one"
        problems = connection.execute(
            "SELECT horsies_problems_v1(id) FROM horsies_workflows"
        ).fetchall()
        assert problems == []
    assert [one.ok_value for one in run.get(timeout_ms=0).ok_value] == [0, 1, 2, 3]
