"""Cancelled runs: clean-up steps, children, second cancels, and code that no longer fits."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from horsies import (
    AsyncDurable,
    Durable,
    Horsies,
    RetryPolicy,
    TaskActionErrorCode,
    TaskFailed,
    TaskHandle,
    TaskStatus,
)
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of
from tests.support.rows import add_worker

DAY = timedelta(days=1)


def status_of(sent: TaskHandle[Any]) -> TaskStatus:
    return info_of(sent).status


def reason_of(sent: TaskHandle[Any]) -> str | None:
    info = sent.info(include_failed_reason=True).unwrap()
    return None if info is None else info.failed_reason


def test_a_cancelled_run_without_clean_up_ends_at_once(app: Horsies) -> None:
    @app.durable("endless")
    def endless(ctx: Durable) -> None:
        ctx.wait_signal("never")

    sent = endless.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    assert status_of(sent) is TaskStatus.CANCELLED


def test_the_clean_up_of_a_parked_run_is_called_newest_first(
    app: Horsies, effects: Effects
) -> None:
    order: list[str] = []

    def undo(what: str) -> None:
        order.append(what)

    @app.durable("order")
    def place(ctx: Durable) -> None:
        ctx.on_cancel(undo, "reserve")
        ctx.step(effects.note, "reserve")
        ctx.on_cancel(undo, "charge")
        ctx.step(effects.note, "charge")
        ctx.sleep(DAY)
        ctx.on_cancel(undo, "never")
        ctx.step(effects.note, "never")

    sent = place.enqueue()
    run_pending(app)
    assert sent.cancel().unwrap().was_status is TaskStatus.PENDING
    assert status_of(sent) is TaskStatus.PENDING, "its clean-up is due"
    run_pending(app)
    assert order == ["charge", "reserve"]
    assert effects == {"reserve": 1, "charge": 1}
    assert status_of(sent) is TaskStatus.CANCELLED
    assert reason_of(sent) == "The run was cancelled."
    assert sent.cancel().unwrap_err().code is TaskActionErrorCode.TASK_NOT_CANCELLABLE


def test_a_run_that_completes_calls_no_clean_up(app: Horsies, effects: Effects) -> None:
    @app.durable("order")
    def place(ctx: Durable) -> str:
        ctx.on_cancel(effects.note, "undo")
        return "done"

    sent = place.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "done"
    assert effects == {}


@pytest.mark.parametrize("wait", ["sleep", "signal", "child", "retry"])
def test_every_kind_of_wait_is_left_by_a_cancel(app: Horsies, effects: Effects, wait: str) -> None:
    @app.task("slow")
    def slow() -> None: ...

    def fail() -> None:
        raise OSError("no route")

    @app.durable("waiting")
    def waiting(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        match wait:
            case "sleep":
                ctx.sleep(DAY)
            case "signal":
                ctx.wait_signal("go", timeout=DAY)
            case "child":
                ctx.result(ctx.start(slow.with_options(delay=DAY)))
            case "retry":
                again = RetryPolicy.fixed([3600], auto_retry_for=[OSError], jitter=False)
                ctx.with_options(retry=again).step(fail)
        effects.note("after")

    sent = waiting.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"undo": 1}


def test_code_cannot_swallow_a_cancel(app: Horsies, effects: Effects) -> None:
    @app.durable("stubborn")
    def stubborn(ctx: Durable) -> str:
        ctx.on_cancel(effects.note, "undo")
        try:
            ctx.sleep(DAY)
        except BaseException:
            effects.note("caught")
        return "stubborn"

    sent = stubborn.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"caught": 2, "undo": 1}


def test_a_failing_clean_up_step_does_not_keep_the_others_from_running(
    app: Horsies, effects: Effects
) -> None:
    def refund() -> None:
        raise TaskFailed("NO_ACCOUNT", "closed")

    @app.durable("order")
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.on_cancel(refund)
        ctx.sleep(DAY)

    sent = place.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"undo": 1}
    failed = "clean-up step 'refund' failed with NO_ACCOUNT"
    assert reason_of(sent) == f"The run was cancelled; {failed}."


def test_a_clean_up_step_is_tried_again_and_a_second_cancel_does_not_end_it(
    app: Horsies, effects: Effects
) -> None:
    def refund() -> None:
        effects.note("refund")
        if effects["refund"] < 2:
            raise OSError("no route")

    @app.durable("order")
    def place(ctx: Durable) -> None:
        again = RetryPolicy.fixed([3600], auto_retry_for=[OSError], jitter=False)
        ctx.with_options(retry=again).on_cancel(refund)
        ctx.sleep(DAY)

    sent = place.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    assert status_of(sent) is TaskStatus.PENDING, "parked until the next try"
    for step in ("sleep", "!cancel"):
        refused = app.durable_handle(sent.task_id).reset(step).unwrap_err()
        assert "is being cancelled, and a reset" in refused.message
    sent.cancel().unwrap()
    assert status_of(sent) is TaskStatus.PENDING
    clock_of(app).advance(timedelta(hours=2))
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"refund": 2}


def test_a_clean_up_that_the_code_no_longer_has_holds_the_run_until_a_second_cancel(
    app: Horsies, effects: Effects
) -> None:
    has_clean_up = [True]

    @app.durable("order")
    def place(ctx: Durable) -> None:
        if has_clean_up[0]:
            ctx.on_cancel(effects.note, "undo")
        ctx.sleep(DAY)

    sent = place.enqueue()
    run_pending(app)
    has_clean_up[0] = False
    sent.cancel().unwrap()
    run_pending(app)
    info = app.durable_handle(sent.task_id).info().unwrap()
    assert "the record goes on with 'on_cancel:note'" in (info.problem or "")
    sent.cancel().unwrap()
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {}


@pytest.mark.parametrize(
    ("known", "refused", "ends"),
    [({}, None, True), ({"order": "1"}, None, False), ({"order": "1"}, "1", True)],
    ids=["no code", "a worker that has it", "other parameters"],
)
def test_a_clean_up_that_no_live_worker_can_run_is_left_out_by_a_second_cancel(
    app: Horsies,
    connection: Database,
    effects: Effects,
    known: dict[str, str],
    refused: str | None,
    ends: bool,
) -> None:
    @app.durable("order")
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.sleep(DAY)

    sent = place.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    sent.cancel().unwrap()
    assert status_of(sent) is TaskStatus.PENDING, (
        "no worker serves the queue; one may have the code"
    )
    add_worker(connection, known_tasks=json.dumps({"tasks": known, "workflows": {}}))
    if refused is not None:
        connection.execute(
            "INSERT INTO horsies_refusals (task_id, fingerprint, worker_id, message, until) "
            "VALUES (%s, %s, 'worker', 'no', now())",
            (sent.task_id, refused),
        )
    sent.cancel().unwrap()
    assert status_of(sent) is (TaskStatus.CANCELLED if ends else TaskStatus.PENDING)
    assert effects == {}


def test_open_children_are_cancelled_with_their_run_and_detached_ones_continue(
    app: Horsies, effects: Effects
) -> None:
    @app.task("render")
    def render(what: str) -> None:
        effects.note(what)

    @app.durable("inner")
    def inner(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo inner")
        ctx.start(render.with_options(delay=DAY), "grandchild")
        ctx.sleep(DAY)

    children: list[str] = []

    @app.durable("outer")
    def outer(ctx: Durable) -> None:
        later = render.with_options(delay=DAY)
        started = [
            ctx.start(later, "attached"),
            ctx.with_options(detached=True).start(later, "detached"),
            ctx.start(render, "ended"),
            ctx.start(inner),
        ]
        children[:] = [one.task_id for one in started]
        ctx.wait_signal("never")

    sent = outer.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    statuses = [status_of(app.handle(one)) for one in children]
    ended = TaskStatus.COMPLETED
    assert statuses == [TaskStatus.CANCELLED, ended, ended, TaskStatus.CANCELLED]
    assert effects == {"ended": 1, "detached": 1, "undo inner": 1}


def test_a_cancel_of_a_running_run_is_kept_until_its_park(app: Horsies, effects: Effects) -> None:
    @app.durable("order")
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.step(cancel_this, ctx.task_id)
        ctx.sleep(DAY)

    def cancel_this(task_id: str) -> None:
        app.handle(task_id).cancel(include_running=True).unwrap()

    sent = place.enqueue()
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"undo": 1}


def test_an_async_run_cleans_up(app: Horsies, effects: Effects) -> None:
    async def undo(what: str) -> None:
        effects.note(what)

    @app.durable("order")
    async def place(ctx: AsyncDurable) -> None:
        await ctx.on_cancel(undo, "one")
        await ctx.with_options(name="second").on_cancel(undo, "two")
        await ctx.sleep(DAY)

    sent = place.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    assert status_of(sent) is TaskStatus.CANCELLED
    assert effects == {"one": 1, "two": 1}
    info = app.durable_handle(sent.task_id).info().unwrap()
    names = [step.name for step in info.steps if step.kind in {"on_cancel", "cancel"}]
    assert names == ["on_cancel:undo", "on_cancel:second", "!cancel"]


def test_a_node_of_a_cancelled_workflow_cleans_up(
    app: Horsies, effects: Effects, connection: Database
) -> None:
    @app.durable("order")
    def place(ctx: Durable) -> None:
        ctx.on_cancel(effects.note, "undo")
        ctx.sleep(DAY)

    node = place.node()()
    run = app.workflow("flow", [node], definition_key="durable.cancelled").start().unwrap()
    run_pending(app)
    run.cancel().unwrap()
    run_pending(app)
    assert effects == {"undo": 1}
    found = connection.execute("SELECT status FROM horsies_tasks").fetchall()
    assert found == [("CANCELLED",)]
