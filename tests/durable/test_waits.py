"""Waits: parked runs, signals, children, and code that no longer fits the record of its run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import (
    AnyNode,
    Durable,
    Horsies,
    MapNode,
    SignalDelivery,
    StepFailed,
    TaskActionErrorCode,
    TaskFailed,
    TaskHandle,
    TaskStatus,
    from_node,
)
from horsies.db.statements.workers import delete_old_tasks
from horsies.durable.steps import RESULT_BYTES_MAX
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of

DAY = timedelta(days=1)


class Approval(BaseModel):
    by: str


def problem_of(app: Horsies, sent: TaskHandle[Any]) -> str:
    info = app.durable_handle(sent.task_id).info().unwrap()
    return info.problem or ""


def test_a_signal_wakes_the_run_that_waits_for_it(app: Horsies, connection: Database) -> None:
    @app.durable("release", signals={"approve": Approval})
    def release(ctx: Durable) -> str:
        return ctx.wait_signal("approve", Approval, timeout=30 * DAY).by

    sent = release.enqueue()
    run_pending(app)
    waiting = app.durable_handle(sent.task_id).info().unwrap()
    assert (waiting.signals, waiting.status) == (["approve"], TaskStatus.PENDING)
    assert waiting.parked_until is not None
    delivered = app.signal(sent.task_id, "approve", Approval(by="ada")).unwrap()
    assert delivered is SignalDelivery.DELIVERED
    run_pending(app)
    assert sent.result(timeout_ms=0) == "ada"
    assert connection.execute("SELECT count(*) FROM horsies_task_signals").fetchone() == (0,)


def test_signals_are_taken_in_their_order_even_if_they_came_early(app: Horsies) -> None:
    @app.durable("chat")
    def chat(ctx: Durable) -> list[int]:
        return [ctx.wait_signal("word", int) for _ in range(3)]

    sent = chat.enqueue()
    for number in range(2):
        assert app.signal(sent.task_id, "word", number).unwrap() is SignalDelivery.STORED
    run_pending(app)
    assert app.signal(sent.task_id, "other", 9).unwrap() is SignalDelivery.STORED
    assert run_pending(app).attempts == []
    app.signal(sent.task_id, "word", 2).unwrap()
    run_pending(app)
    assert sent.result(timeout_ms=0) == [0, 1, 2]


def test_a_wait_for_a_signal_ends_with_its_limit(app: Horsies) -> None:
    codes: list[str] = []

    @app.durable("release")
    def release(ctx: Durable) -> str:
        try:
            ctx.wait_signal("approve", timeout=DAY)
        except StepFailed as failed:
            codes.append(failed.code)
        return str(ctx.wait_signal("approve"))

    sent = release.enqueue()
    run_pending(app)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert app.signal(sent.task_id, "approve", "late").unwrap() is SignalDelivery.DELIVERED
    run_pending(app)
    assert sent.result(timeout_ms=0) == "late"
    assert codes == ["SIGNAL_TIMEOUT"] * 2


def test_a_signal_that_no_run_can_take_is_refused(app: Horsies) -> None:
    @app.durable("release", signals={"approve": Approval})
    def release(ctx: Durable) -> str:
        return ctx.wait_signal("approve", Approval).by

    @app.task("plain")
    def plain() -> None: ...

    def refused(task_id: str, name: str, value: object) -> TaskActionErrorCode:
        return app.signal(task_id, name, value).unwrap_err().code

    sent, other = release.enqueue(), plain.enqueue()
    codes = TaskActionErrorCode
    assert refused(sent.task_id, "reject", 1) is codes.SIGNAL_NOT_FOUND
    assert refused(sent.task_id, "approve", 1) is codes.VALIDATION_FAILED
    assert refused(other.task_id, "approve", 1) is codes.TASK_NOT_DURABLE
    assert refused("01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a", "approve", 1) is codes.TASK_NOT_FOUND
    assert refused("nonsense", "approve", 1) is codes.TASK_NOT_FOUND
    sent.cancel().unwrap()
    assert refused(sent.task_id, "approve", Approval(by="ada")) is codes.TASK_ENDED


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [float("nan"), {"amount": float("inf")}, "a\0b", {"a\0b": 1}, "\ud800", {"\ud800": 1}, nested(300)],
    ids=["NaN", "1e999", "NUL", "NUL in a key", "surrogate", "surrogate in a key", "nested"],
)  # fmt: skip
@pytest.mark.parametrize("declared", [None, {"approve": Any}], ids=["undeclared", "any"])
def test_a_json_value_that_cannot_be_stored_is_refused(
    app: Horsies, connection: Database, declared: dict[str, Any] | None, value: object
) -> None:
    @app.durable("release", signals=declared)
    def release(ctx: Durable) -> object:
        return ctx.wait_signal("approve")

    sent = release.enqueue()
    refused = app.durable_handle(sent.task_id).signal_json("approve", value).unwrap_err()
    assert refused.code is TaskActionErrorCode.VALIDATION_FAILED
    assert refused.message.startswith("The signal 'approve' was not sent: ")
    assert connection.execute("SELECT count(*) FROM horsies_task_signals").fetchone() == (0,)


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_signal_above_a_megabyte_is_refused(
    app: Horsies, connection: Database, letter: str
) -> None:
    @app.durable("chat")
    def chat(ctx: Durable) -> int:
        return len(ctx.wait_signal("word", str))

    fits = "x" * (RESULT_BYTES_MAX - 2)
    large = letter * (RESULT_BYTES_MAX // len(letter.encode()))
    sent = chat.enqueue()
    handle = app.durable_handle(sent.task_id)
    for refused in (handle.signal("word", large), handle.signal_json("word", large)):
        error = refused.unwrap_err()
        assert error.code is TaskActionErrorCode.VALIDATION_FAILED
        assert "1,048,578 bytes of JSON, more than 1,048,576" in error.message
    assert connection.execute("SELECT count(*) FROM horsies_task_signals").fetchone() == (0,)
    handle.signal("word", fits).unwrap()
    run_pending(app)
    assert sent.result(timeout_ms=0) == len(fits)


def test_a_result_above_a_megabyte_of_a_child_is_not_recorded(
    app: Horsies, connection: Database
) -> None:
    @app.task("render")
    def render(size: int) -> str:
        return "é" * (size // 2)

    @app.durable("outer")
    def outer(ctx: Durable) -> str:
        fits = ctx.result(ctx.start(render, RESULT_BYTES_MAX - 2))
        assert len(fits.encode()) == RESULT_BYTES_MAX - 2
        return ctx.result(ctx.start(render, RESULT_BYTES_MAX))

    sent = outer.enqueue()
    run_pending(app)
    error = sent.get(timeout_ms=0).err_value
    assert error.error_code == "PAYLOAD_TOO_LARGE"
    assert "1,048,578 bytes of JSON, more than 1,048,576" in (error.message or "")
    sizes = connection.execute("SELECT max(octet_length(result)) FROM horsies_steps").fetchone()
    assert sizes == (RESULT_BYTES_MAX,)


def test_a_run_is_woken_by_the_end_of_its_child(app: Horsies, effects: Effects) -> None:
    @app.task("render")
    def render(number: int) -> list[int]:
        effects.note("render")
        return [number]

    @app.task("break")
    def broken() -> None:
        raise TaskFailed("NO_PAPER", "the printer is empty")

    @app.durable("inner")
    def inner(ctx: Durable) -> str:
        ctx.sleep(DAY)
        return "inner"

    @app.durable("outer")
    def outer(ctx: Durable) -> tuple[list[int], str, str]:
        one, two, three = ctx.start(render, 7), ctx.start(inner), ctx.start(broken)
        text = ctx.result(two)
        with pytest.raises(StepFailed) as failed:
            ctx.result(three)
        return ctx.result(one), text, failed.value.code

    sent = outer.enqueue()
    run_pending(app)
    assert info_of(sent).status is TaskStatus.PENDING
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert sent.result(timeout_ms=0) == ([7], "inner", "NO_PAPER")
    assert effects == {"render": 1}


def test_results_of_two_children_of_one_name_are_kept_apart(app: Horsies) -> None:
    @app.task("render")
    def render(number: int) -> int:
        return number

    @app.durable("outer")
    def outer(ctx: Durable) -> list[int]:
        one, two = ctx.start(render, 1), ctx.start(render, 2)
        return [ctx.result(one), ctx.result(one), ctx.result(two)]

    sent = outer.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == [1, 1, 2]


def test_a_child_with_an_idempotency_key_is_refused(app: Horsies) -> None:
    @app.task("render")
    def render() -> None: ...

    @app.durable("outer")
    def outer(ctx: Durable) -> None:
        ctx.start(render.with_options(idempotency_key="once"))

    sent = outer.enqueue()
    run_pending(app)
    with pytest.raises(TaskFailed, match="without idempotency_key="):
        sent.result(timeout_ms=0)


def test_a_durable_function_is_a_node_and_an_item_of_a_map(app: Horsies) -> None:
    @app.durable("slow_double")
    def slow_double(ctx: Durable, number: int) -> int:
        ctx.sleep(DAY)
        return 2 * number

    @app.task("numbers")
    def numbers() -> list[int]:
        return [1, 2, 3]

    @app.task("total")
    def total(one: int, many: list[int]) -> int:
        return one + sum(many)

    first = numbers.node()()
    one_node = slow_double.node(node_id="one")(number=21)
    many = MapNode(slow_double, over=first, node_id="many")
    last = total.node()(one=from_node(one_node), many=from_node(many))
    nodes: list[AnyNode] = [first, one_node, many, last]
    spec = app.workflow("flow", nodes, output=last, definition_key="durable.flow")
    handle = spec.start().unwrap()
    run_pending(app)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert handle.get(timeout_ms=0).ok_value == 54


def run_again(
    app: Horsies, old: Callable[[Durable], Any], new: Callable[[Durable], Any]
) -> TaskHandle[Any]:
    """Run the old code up to its wait, and then the new code under the same name."""
    holder = [old]

    @app.durable("changing")
    def changing(ctx: Durable) -> int:
        value = holder[0](ctx)
        return value if isinstance(value, int) else 0

    sent = changing.enqueue()
    run_pending(app)
    holder[0] = new
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    return sent


def one() -> int:
    return 1


def two() -> int:
    return 2


def three() -> int:
    return 3


def old_code(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def renamed(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.with_options(name="zwei").step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def test_a_new_step_before_recorded_ones_holds_the_run_until_it_is_resumed(app: Horsies) -> None:
    codes = [old_code, renamed, old_code]

    @app.durable("changing")
    def changing(ctx: Durable) -> int:
        return codes[0](ctx)

    sent = changing.enqueue()
    run_pending(app)
    codes.pop(0)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    info = info_of(sent)
    assert (info.status, info.retry_count) == (TaskStatus.PENDING, 0)
    assert "the code asks for step 'zwei', the record goes on with 'two'" in problem_of(app, sent)
    assert run_pending(app).attempts == []
    handle = app.durable_handle(sent.task_id)
    assert handle.resume().is_ok()
    run_pending(app)
    assert "'zwei'" in problem_of(app, sent), "the same code is held again"
    codes.pop(0)
    handle.resume().unwrap()
    run_pending(app)
    assert sent.result(timeout_ms=0) == 6
    assert handle.resume().unwrap_err().code is TaskActionErrorCode.TASK_ENDED


def test_a_held_run_leaves_its_lane_and_returns_to_it(app: Horsies, connection: Database) -> None:
    codes = [old_code, renamed, old_code]

    @app.durable("changing")
    def changing(ctx: Durable) -> int:
        return codes[0](ctx)

    def place() -> tuple[object, ...] | None:
        found = connection.execute(
            "SELECT held, lane IS NOT NULL FROM horsies_tasks WHERE id = %s", (sent.task_id,)
        )
        return found.fetchone()

    sent = changing.with_options(key="acme").enqueue()
    run_pending(app)
    codes.pop(0)
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert "'zwei'" in problem_of(app, sent)
    assert place() == (True, False)
    assert run_pending(app).attempts == []
    codes.pop(0)
    app.durable_handle(sent.task_id).resume().unwrap()
    assert place() == (True, True)
    run_pending(app)
    assert sent.result(timeout_ms=0) == 6


def test_a_reset_forgets_the_limit_of_a_wait(app: Horsies) -> None:
    @app.durable("release")
    def release(ctx: Durable) -> int:
        ctx.wait_signal("approve", int, timeout=DAY)
        ctx.sleep(DAY)
        return 1

    sent = release.enqueue()
    handle = app.durable_handle(sent.task_id)
    run_pending(app)
    app.signal(sent.task_id, "approve", 1).unwrap()
    run_pending(app)
    assert handle.reset("signal:approve").unwrap() == 3
    clock_of(app).advance(timedelta(hours=36))
    run_pending(app)
    waiting = handle.info().unwrap()
    assert waiting.signals == ["approve"], "its wait has begun again"


def test_patched_answers_the_same_in_every_round_of_a_loop(app: Horsies) -> None:
    answers: list[bool] = []
    is_new = [False]

    @app.durable("rounds")
    def rounds(ctx: Durable) -> int:
        for _ in range(3):
            if is_new[0]:
                answers.append(ctx.patched("second mail"))
            ctx.step(int)
            ctx.sleep(DAY)
        return 1

    sent = rounds.enqueue()
    run_pending(app)
    is_new[0] = True
    for _ in range(4):
        clock_of(app).advance(2 * DAY)
        run_pending(app)
    assert sent.result(timeout_ms=0) == 1
    assert answers
    assert not any(answers)


def test_a_run_is_reset_to_a_step(app: Horsies, effects: Effects) -> None:
    def note_one() -> str:
        return effects.note("one")

    def note_two() -> str:
        return effects.note("two")

    @app.durable("resettable")
    def resettable(ctx: Durable) -> str:
        ctx.step(note_one)
        ctx.step(note_two)
        ctx.sleep(DAY)
        return "done"

    sent = resettable.enqueue()
    handle = app.durable_handle(sent.task_id)
    run_pending(app)
    assert handle.reset("three").unwrap_err().code is TaskActionErrorCode.STEP_NOT_FOUND
    assert handle.reset("note_two").unwrap() == 2
    run_pending(app)
    assert effects == {"one": 1, "two": 2}
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert sent.result(timeout_ms=0) == "done"
    assert handle.reset("note_one").unwrap_err().code is TaskActionErrorCode.TASK_ENDED


def test_a_running_run_is_not_reset(app: Horsies) -> None:
    refusals: list[str] = []

    @app.durable("busy")
    def busy(ctx: Durable) -> int:
        def reset_itself() -> None:
            refused = app.durable_handle(ctx.task_id).reset("one").unwrap_err()
            refusals.append(f"{refused.code} {refused.message}")

        ctx.step(one)
        ctx.step(reset_itself)
        return 1

    sent = busy.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == 1
    (refused,) = refusals
    assert refused.startswith("TASK_RUNNING")
    assert f"wait until it is parked, or end it with `horsies cancel {sent.task_id}`" in refused


def test_two_signals_at_once_are_both_taken(app: Horsies) -> None:
    @app.durable("chat")
    def chat(ctx: Durable) -> list[int]:
        return sorted(ctx.wait_signal("word", int) for _ in range(8))

    sent = chat.enqueue()
    run_pending(app)
    with ThreadPoolExecutor(4) as pool:
        sends = [pool.submit(app.signal, sent.task_id, "word", number) for number in range(8)]
        assert {one.result().unwrap() for one in sends} == {SignalDelivery.DELIVERED}
    run_pending(app)
    assert sent.result(timeout_ms=0) == list(range(8))


def test_records_are_deleted_with_their_task(app: Horsies, connection: Database) -> None:
    @app.durable("forgotten")
    def forgotten(ctx: Durable) -> None:
        ctx.step(one)
        ctx.wait_signal("never")

    sent = forgotten.enqueue()
    run_pending(app)
    app.signal(sent.task_id, "other", 1).unwrap()
    tables = ("horsies_steps", "horsies_task_signals", "horsies_parked")
    counts = [connection.execute(f"SELECT count(*) FROM {one}").fetchone() for one in tables]
    assert counts == [(1,)] * 3
    connection.execute("DELETE FROM horsies_tasks")
    counts = [connection.execute(f"SELECT count(*) FROM {one}").fetchone() for one in tables]
    assert counts == [(0,)] * 3


def test_retention_deletes_the_record_of_an_ended_run_and_none_of_a_parked_one(
    app: Horsies, connection: Database
) -> None:
    @app.task("part")
    def part() -> int:
        return 1

    @app.durable("parent")
    def parent(ctx: Durable, waits: bool) -> int:
        child = ctx.start(part)
        if waits:
            ctx.wait_signal("go")
        return ctx.result(child)

    parked, ended = parent.enqueue(True), parent.enqueue(False)
    run_pending(app)
    assert ended.result(timeout_ms=0) == 1
    while delete_old_tasks.fetch(connection, 0, 7):
        pass
    left = connection.execute("SELECT id::text FROM horsies_tasks").fetchall()
    assert left == [(parked.task_id,)], "its child has ended and is deleted as well"
    owners = connection.execute("SELECT DISTINCT task_id::text FROM horsies_steps").fetchall()
    assert owners == [(parked.task_id,)]
    app.signal(parked.task_id, "go", 1).unwrap()
    run_pending(app)
    error = parked.get(timeout_ms=0).err_value
    assert error.error_code == "TASK_NOT_FOUND", "the result of a deleted child"


def test_good_until_limits_the_start_of_a_run_and_ends_with_its_first_wait(app: Horsies) -> None:
    @app.durable("onboard")
    def onboard(ctx: Durable) -> str:
        ctx.sleep(timedelta(days=3))
        return "done"

    soon = datetime.now(UTC) + timedelta(hours=1)
    begun = onboard.with_options(good_until=soon).enqueue()
    run_pending(app)
    late = onboard.with_options(good_until=soon).enqueue()
    clock_of(app).advance(timedelta(days=4))
    run_pending(app)
    assert begun.result(timeout_ms=0) == "done"
    assert info_of(late).status is TaskStatus.EXPIRED
