"""The first of several events, workflows as children, and runs that continue with an empty record."""

from __future__ import annotations

from datetime import timedelta

import pytest

from horsies import (
    AnyNode,
    AsyncDurable,
    Child,
    Durable,
    Horsies,
    SleepNode,
    StepFailed,
    TaskFailed,
    TaskStatus,
    WorkflowSpec,
    WorkflowStatus,
    from_node,
)
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of

DAY = timedelta(days=1)


def test_the_first_child_that_ends_wakes_the_run(app: Horsies) -> None:
    @app.task("render")
    def render(page: int) -> int:
        return page

    @app.durable("race")
    def race(ctx: Durable) -> list[int]:
        slow = ctx.start(render.with_options(delay=2 * DAY), 1)
        fast = ctx.start(render.with_options(delay=DAY), 2)
        first = ctx.wait_any(slow, fast)
        other = ctx.wait_any(*(one for one in (slow, fast) if one is not first))
        return [ctx.result(first), ctx.result(other)]

    sent = race.enqueue()
    run_pending(app)
    info = app.durable_handle(sent.task_id).info().unwrap()
    assert len(info.children) == 2
    for _ in range(2):
        clock_of(app).advance(1.5 * DAY)
        run_pending(app)
    assert sent.result(timeout_ms=0) == [2, 1]


def test_a_signal_or_a_child_whichever_comes_first(app: Horsies) -> None:
    @app.task("render")
    def render() -> str:
        return "rendered"

    @app.durable("race", signals={"stop": str})
    def race(ctx: Durable) -> str:
        child = ctx.start(render.with_options(delay=DAY))
        first = ctx.wait_any("stop", child)
        return ctx.result(first) if isinstance(first, Child) else ctx.wait_signal("stop", str)

    stopped, rendered = race.enqueue(), race.enqueue()
    run_pending(app)
    app.signal(stopped.task_id, "stop", "enough").unwrap()
    run_pending(app)
    assert stopped.result(timeout_ms=0) == "enough"
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert rendered.result(timeout_ms=0) == "rendered"


def test_a_wait_for_any_event_ends_with_its_limit(app: Horsies) -> None:
    @app.durable("race")
    def race(ctx: Durable) -> str:
        with pytest.raises(StepFailed) as failed:
            ctx.wait_any("one", "two", timeout=DAY)
        return failed.value.code

    sent = race.enqueue()
    run_pending(app)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert sent.result(timeout_ms=0) == "WAIT_TIMEOUT"


def test_events_that_the_record_does_not_have_hold_the_run(app: Horsies) -> None:
    names = ["one"]

    @app.durable("race")
    def race(ctx: Durable) -> None:
        ctx.wait_any(*names)
        ctx.sleep(DAY)

    sent = race.enqueue()
    app.signal(sent.task_id, "one", 1).unwrap()
    run_pending(app)
    names[0] = "other"
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    problem = app.durable_handle(sent.task_id).info().unwrap().problem or ""
    assert "the code asks for one of 'signal:other'" in problem


@pytest.mark.parametrize("events", [(), (7,)])
def test_a_wait_for_something_else_is_refused(app: Horsies, events: tuple[str, ...]) -> None:
    @app.durable("race")
    def race(ctx: Durable) -> None:
        ctx.wait_any(*events)

    sent = race.enqueue()
    run_pending(app)
    with pytest.raises(TaskFailed, match=r"takes children of ctx\.start and names of signals"):
        sent.result(timeout_ms=0)


def flow(app: Horsies, *, fails: bool = False) -> WorkflowSpec[int]:
    @app.task("number")
    def number() -> int:
        if fails:
            raise TaskFailed("NO_NUMBER", "there is none")
        return 20

    @app.task("double")
    def double(value: int) -> int:
        return 2 * value

    first = number.node()()
    last = double.node()(value=from_node(first))
    nodes: list[AnyNode] = [first, last]
    return app.workflow("flow", nodes, output=last, definition_key="durable.child")


def test_a_workflow_is_a_child(app: Horsies, connection: Database) -> None:
    spec = flow(app)

    @app.durable("outer")
    def outer(ctx: Durable) -> int:
        child = ctx.start(spec)
        return ctx.result(child) + ctx.result(child) + 2

    sent = outer.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == 82
    assert connection.execute("SELECT count(*) FROM horsies_workflows").fetchone() == (1,)


def test_a_failed_workflow_raises_with_its_code(app: Horsies) -> None:
    spec = flow(app, fails=True)

    @app.durable("outer")
    async def outer(ctx: AsyncDurable) -> str:
        with pytest.raises(StepFailed) as failed:
            await ctx.result(await ctx.start(spec))
        return failed.value.code

    sent = outer.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "NO_NUMBER"


def test_a_workflow_is_cancelled_with_its_run(app: Horsies, effects: Effects) -> None:
    @app.task("later")
    def later() -> str:
        return effects.note("later")

    nap = SleepNode(DAY.total_seconds())
    node = later.node(waits_for=[nap])()
    nodes: list[AnyNode] = [nap, node]
    spec = app.workflow("slow", nodes, output=node, definition_key="durable.slow")
    ids: list[str] = []

    @app.durable("outer")
    def outer(ctx: Durable) -> str:
        child = ctx.start(spec)
        ids[:] = [child.task_id]
        return ctx.result(child)

    sent = outer.enqueue()
    run_pending(app)
    sent.cancel().unwrap()
    assert app.workflow_handle(ids[0]).status().unwrap() is WorkflowStatus.CANCELLED


def test_a_workflow_without_an_output_is_refused(app: Horsies) -> None:
    @app.task("later")
    def later() -> str:
        return ""

    spec = app.workflow("open", [later.node()()], definition_key="durable.open")

    @app.durable("outer")
    def outer(ctx: Durable) -> None:
        ctx.start(spec)

    sent = outer.enqueue()
    run_pending(app)
    with pytest.raises(TaskFailed, match="takes a workflow with an output"):
        sent.result(timeout_ms=0)


def test_a_run_continues_with_new_arguments_and_an_empty_record(
    app: Horsies, effects: Effects
) -> None:
    @app.durable("poll")
    def poll(ctx: Durable, page: int, *, rounds: int = 3) -> list[str]:
        seen = [ctx.step(effects.note, f"page {page}")]
        if page == rounds:
            return [*seen, ctx.wait_signal("last", str)]
        ctx.sleep(DAY)
        return ctx.continue_as(page + 1, rounds=rounds)

    sent = poll.enqueue(1)
    handle = app.durable_handle(sent.task_id)
    app.signal(sent.task_id, "last", "kept").unwrap()
    for page in range(1, 3):
        run_pending(app)
        assert effects[f"page {page}"] == 1
        assert [step.name for step in handle.info().unwrap().steps] == ["note", "sleep"]
        clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert sent.result(timeout_ms=0) == ["page 3", "kept"]
    assert info_of(sent).status is TaskStatus.COMPLETED
    assert effects == {"page 1": 1, "page 2": 1, "page 3": 1}


def test_arguments_that_do_not_fit_are_refused(app: Horsies) -> None:
    @app.durable("poll")
    def poll(ctx: Durable, page: int) -> None:
        ctx.continue_as("one")

    sent = poll.enqueue(1)
    run_pending(app)
    with pytest.raises(TaskFailed, match="The run cannot continue"):
        sent.result(timeout_ms=0)


def test_a_node_cannot_continue_as_another_call(app: Horsies) -> None:
    @app.durable("poll")
    def poll(ctx: Durable, page: int) -> None:
        ctx.continue_as(page + 1)

    node = poll.node()(page=1)
    run = app.workflow("flow", [node], output=node, definition_key="durable.node").start().unwrap()
    run_pending(app)
    assert "not for nodes" in (run.get(timeout_ms=0).err_value.message or "")
