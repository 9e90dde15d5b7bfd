"""Deadlines of runs: they end parked and held runs with their clean-up, and nothing that has ended before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from horsies import (
    AnyNode,
    AsyncDurable,
    Durable,
    Horsies,
    MapNode,
    TaskDefinitionError,
    TaskHandle,
    TaskStatus,
    WorkflowStatus,
)
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of
from tests.support.explained import Doors, the
from tests.support.poison import poisoned

DAY = timedelta(days=1)
LATE = 2 * DAY


def let_pass(app: Horsies, time: timedelta) -> None:
    clock_of(app).advance(time)
    run_pending(app)


def reason_of(sent: TaskHandle[Any]) -> str | None:
    info = sent.info(include_failed_reason=True).unwrap()
    return None if info is None else info.failed_reason


def deadlines(connection: Database) -> list[tuple[bool]]:
    """For each stored deadline: whether it ended its run."""
    return connection.execute("SELECT reached_at IS NOT NULL FROM horsies_deadlines").fetchall()


@pytest.mark.parametrize(
    "deadline", [0, -1, timedelta(), timedelta(days=3651), float("nan"), True, "1 day"], ids=repr
)
def test_a_deadline_that_cannot_be_stored_is_refused(app: Horsies, deadline: Any) -> None:
    with pytest.raises(TaskDefinitionError) as refused:

        @app.durable("order", deadline=deadline)
        def place(ctx: Durable) -> None: ...

    assert "The deadline of durable function 'place' must be a timedelta or a number" in str(
        refused.value
    )


@pytest.mark.parametrize("wait", ["sleep", "signal", "child"])
def test_a_parked_run_ends_at_its_deadline_with_its_clean_up_and_its_children(
    app: Horsies, effects: Effects, wait: str
) -> None:
    @app.task("slow")
    def slow() -> None: ...

    children: list[str] = []

    @app.durable("order", deadline=LATE)
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        child = ctx.start(slow.with_options(delay=10 * DAY))
        children.append(child.task_id)
        match wait:
            case "sleep":
                ctx.sleep(9 * DAY)
            case "signal":
                ctx.wait_signal("go")
            case "child":
                ctx.result(child)

    sent = place.enqueue()
    run_pending(app)
    let_pass(app, DAY)
    assert (info_of(sent).status, effects) == (TaskStatus.PENDING, {})
    let_pass(app, DAY)
    assert info_of(sent).status is TaskStatus.CANCELLED
    assert reason_of(sent) == "The run reached its deadline."
    assert effects == {"undo": 1}
    child = app.handle(children[0]).info().unwrap()
    assert child is not None
    assert child.status is TaskStatus.CANCELLED


def test_a_run_without_clean_up_ends_at_once_and_says_why(
    app: Horsies, connection: Database
) -> None:
    @app.durable("order", deadline=LATE.total_seconds())
    def place(ctx: Durable) -> None:
        ctx.wait_signal("go")

    sent = place.enqueue()
    run_pending(app)
    doors = Doors(app)
    parked = the(doors.task(sent.task_id), "PARKED_RUN").sentence
    assert parked.startswith("It is parked and waits for signal 'go'; its deadline cancels it in ")
    deadline = app.durable_handle(sent.task_id).info().unwrap().deadline
    assert deadline is not None
    let_pass(app, LATE)
    assert info_of(sent).status is TaskStatus.CANCELLED
    assert reason_of(sent) == "The run reached its deadline."
    ended = the(doors.task(sent.task_id), "ENDED").sentence
    assert ended.endswith(": the run reached its deadline.")
    assert deadlines(connection) == [(True,)]
    connection.execute("DELETE FROM horsies_tasks")
    assert deadlines(connection) == []


def test_a_run_that_ends_in_time_is_left_alone(app: Horsies, connection: Database) -> None:
    @app.durable("order", deadline=LATE)
    def place(ctx: Durable) -> str:
        ctx.sleep(DAY)
        return "done"

    sent = place.enqueue()
    run_pending(app)
    let_pass(app, DAY)
    assert sent.result(timeout_ms=0) == "done"
    assert deadlines(connection) == [(False,)]
    let_pass(app, DAY)
    assert info_of(sent).status is TaskStatus.COMPLETED
    assert deadlines(connection) == []


def test_a_deadline_counts_from_the_first_start_and_outlives_a_new_record(
    app: Horsies, effects: Effects
) -> None:
    @app.durable("order", deadline=LATE)
    def place(ctx: Durable, part: int) -> None:
        ctx.step(effects.note, "begin")
        ctx.sleep(DAY * 3 / 4)
        if part == 1:
            ctx.continue_as(2)
        ctx.sleep(10 * DAY)

    sent = place.with_options(delay=5 * DAY).enqueue(1)
    run_pending(app)
    let_pass(app, 5 * DAY)
    let_pass(app, DAY * 3 / 4)
    assert effects == {"begin": 2}
    app.durable_handle(sent.task_id).reset("note").unwrap()
    let_pass(app, DAY)
    assert info_of(sent).status is TaskStatus.PENDING
    let_pass(app, DAY / 4)
    assert info_of(sent).status is TaskStatus.CANCELLED


def test_a_held_run_ends_at_its_deadline(app: Horsies, effects: Effects) -> None:
    names = ["one"]

    @app.durable("order", deadline=LATE)
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.with_options(name=names[0]).step(effects.note, "one")
        ctx.sleep(DAY)
        ctx.with_options(name="last").step(effects.note, "last")

    sent = place.enqueue()
    run_pending(app)
    names[0] = "other"
    let_pass(app, DAY)
    assert "DURABLE_MISMATCH" in (app.durable_handle(sent.task_id).info().unwrap().problem or "")
    names[0] = "one"
    let_pass(app, DAY)
    assert info_of(sent).status is TaskStatus.CANCELLED
    assert effects == {"one": 1, "undo": 1}


def test_a_run_that_is_cancelled_before_its_deadline_keeps_its_reason(
    app: Horsies, effects: Effects
) -> None:
    @app.durable("order", deadline=LATE)
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.wait_signal("go")

    sent = place.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    let_pass(app, LATE)
    assert reason_of(sent) == "The run was cancelled."
    assert effects == {"undo": 1}


def test_a_node_that_reaches_its_deadline_ends_its_workflow(app: Horsies, effects: Effects) -> None:
    @app.durable("order", deadline=LATE)
    def place(ctx: Durable, number: int) -> int:
        ctx.on_cancel(effects.note, "undo")
        ctx.sleep(DAY if number == 1 else 9 * DAY)
        return number

    @app.task("numbers")
    def numbers() -> list[int]:
        return [1, 2]

    first = numbers.node()()
    nodes: list[AnyNode] = [first, MapNode(place, over=first, node_id="orders")]
    run = app.workflow("flow", nodes, definition_key="durable.late").start().unwrap()
    run_pending(app)
    let_pass(app, DAY)
    let_pass(app, DAY)
    assert run.status().unwrap() is WorkflowStatus.FAILED
    assert effects == {"undo": 1}


def test_a_run_that_cannot_be_ended_does_not_hold_up_the_others(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    @app.durable("order", deadline=LATE)
    def place(ctx: Durable, label: str) -> None:
        ctx.on_cancel(effects.note, label)
        ctx.wait_signal("go")

    bad, good = place.enqueue("bad"), place.enqueue("good")
    run_pending(app)
    clock_of(app).advance(LATE + DAY)
    with poisoned(connection, "NEW.id = {}::uuid", bad.task_id):
        run_pending(app)
        assert info_of(good).status is TaskStatus.CANCELLED
        assert info_of(bad).status is TaskStatus.PENDING
        assert sorted(deadlines(connection)) == [(False,), (True,)]
    run_pending(app)
    assert info_of(bad).status is TaskStatus.CANCELLED
    assert effects == {"good": 1, "bad": 1}


def test_an_async_run_has_a_deadline(app: Horsies, effects: Effects) -> None:
    @app.durable("order", deadline=LATE)
    async def place(ctx: AsyncDurable) -> None:
        await ctx.on_cancel(effects.note, "undo")
        await ctx.wait_signal("go")

    sent = place.enqueue()
    run_pending(app)
    let_pass(app, LATE)
    assert reason_of(sent) == "The run reached its deadline."
    assert effects == {"undo": 1}
