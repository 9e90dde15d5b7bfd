"""Steps: recorded once, returned by every later call, whatever ended the call before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from horsies import (
    Durable,
    DurableMisuse,
    Horsies,
    HorsiesError,
    RetryPolicy,
    StepFailed,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskStatus,
    TaskTransaction,
)
from horsies.durable import past
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.durable_runs import Effects, info_of


class Account(BaseModel):
    id: int
    opened: datetime


def steps_of(connection: Database, task_id: str) -> list[tuple[str, str]]:
    rows = connection.execute(
        "SELECT name, kind FROM horsies_steps WHERE task_id = %s ORDER BY position", (task_id,)
    )
    return [(name, kind) for name, kind in rows]


def test_a_step_is_called_once_and_its_value_survives_a_wait(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    def open_account(user_id: int) -> Account:
        effects.note("open")
        return Account(id=user_id, opened=datetime(2026, 1, 1))

    seen: list[Any] = []

    @app.durable("onboard")
    def onboard(ctx: Durable, user_id: int, *, greeting: str = "hi") -> str:
        account = ctx.step(open_account, user_id)
        seen.append((account, ctx.now(), ctx.random(), ctx.uuid()))
        ctx.sleep(timedelta(days=3))
        return f"{greeting} {account.id}"

    sent = onboard.enqueue(7, greeting="hello")
    assert run_pending(app).attempts == []
    info = info_of(sent)
    assert (info.status, info.retry_count) == (TaskStatus.PENDING, 0)
    assert info.worker_pid is None
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    clock_of(app).advance(timedelta(days=1, seconds=1))
    assert run_pending(app).completed == 1
    assert sent.result(timeout_ms=0) == "hello 7"
    assert effects == {"open": 1}
    first, *others = seen
    assert others == [first] * 1
    assert isinstance(first[0], Account)
    assert isinstance(first[3], UUID)
    assert steps_of(connection, sent.task_id) == [
        ("open_account", "step"),
        ("now", "value"),
        ("random", "value"),
        ("uuid", "value"),
        ("sleep", "sleep"),
    ]


def test_occurrences_of_one_name_are_kept_apart(app: Horsies, connection: Database) -> None:
    @app.durable("loop")
    def loop(ctx: Durable, count: int) -> list[int]:
        found = [ctx.step(abs, -number) for number in range(count)]
        ctx.sleep(2)
        return found

    sent = loop.enqueue(3)
    run_pending(app)
    clock_of(app).advance(timedelta(seconds=3))
    run_pending(app)
    assert sent.result(timeout_ms=0) == [0, 1, 2]
    assert [name for name, _ in steps_of(connection, sent.task_id)] == [
        "abs",
        "abs#2",
        "abs#3",
        "sleep",
    ]


def test_a_failed_step_is_recorded_and_raised_again(app: Horsies, effects: Effects) -> None:
    def charge() -> None:
        effects.note("charge")
        raise TaskFailed("CARD_REFUSED", "the bank said no", data={"n": 1})

    raised: list[tuple[str, str, str, Any]] = []

    @app.durable("pay")
    def pay(ctx: Durable) -> str:
        try:
            ctx.step(charge)
        except StepFailed as failed:
            raised.append((failed.step, failed.code, failed.message, failed.data))
        ctx.sleep(5)
        return "unpaid"

    sent = pay.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(seconds=6))
    run_pending(app)
    assert sent.result(timeout_ms=0) == "unpaid"
    assert effects == {"charge": 1}
    assert raised == [("charge", "CARD_REFUSED", "the bank said no", {"n": 1})] * 2


def test_an_uncaught_failure_of_a_step_fails_the_run_with_its_code(app: Horsies) -> None:
    def charge() -> TaskResult[int, TaskError]:
        return TaskResult(err=TaskError(error_code="CARD_REFUSED", message="no"))

    @app.durable("pay")
    def pay(ctx: Durable) -> int:
        return ctx.step(charge)

    sent = pay.enqueue()
    run_pending(app)
    error = sent.get(timeout_ms=0).err_value
    assert error.error_code == "CARD_REFUSED"
    assert "step 'charge' failed" in (error.message or "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_with_the_task_result_that_its_function_returns(
    app: Horsies, fails: bool
) -> None:
    @app.durable("pay")
    def pay(ctx: Durable, fails: bool) -> TaskResult[int, TaskError]:
        ctx.step(int)
        ctx.sleep(5)
        if fails:
            return TaskResult(err=TaskError(error_code="CARD_REFUSED", message="no"))
        return TaskResult(ok=7)

    sent = pay.enqueue(fails)
    run_pending(app)
    clock_of(app).advance(timedelta(seconds=6))
    run_pending(app)
    returned = sent.get(timeout_ms=0)
    if fails:
        assert (returned.err_value.error_code, returned.err_value.message) == ("CARD_REFUSED", "no")
    else:
        assert returned.ok_value == 7


def test_an_attempt_by_the_policy_of_the_decorator_replays_the_steps_of_the_one_before(
    app: Horsies, effects: Effects
) -> None:
    again = RetryPolicy.fixed([60], auto_retry_for=["WORKER_CRASHED", OSError], jitter=False)

    @app.durable("patient", retry_policy=again)
    def patient(ctx: Durable) -> list[str]:
        first = ctx.step(effects.note, "before")
        if effects.note("call") and effects["call"] == 1:
            raise OSError("down")
        return [first, ctx.with_options(name="after").step(effects.note, "after")]

    sent = patient.enqueue()
    assert run_pending(app).retried == 1
    assert info_of(sent).retry_count == 1
    clock_of(app).advance(timedelta(seconds=61))
    run_pending(app)
    assert sent.result(timeout_ms=0) == ["before", "after"]
    assert effects == {"before": 1, "call": 2, "after": 1}


def flaky_call(effects: Effects) -> Callable[[], int]:
    """Return a function that fails twice, then succeeds."""

    def flaky() -> int:
        effects.note("try")
        if effects["try"] < 3:
            raise OSError("down")
        return effects["try"]

    return flaky


def test_a_step_is_tried_again_by_its_policy(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    flaky = flaky_call(effects)
    again = RetryPolicy.fixed([0.01, 60], auto_retry_for=[OSError], jitter=False)

    @app.durable("patient")
    def patient(ctx: Durable) -> int:
        return ctx.with_options(name="fetch", retry=again).step(flaky)

    sent = patient.enqueue()
    run_pending(app)
    assert effects == {"try": 2}
    assert info_of(sent).status is TaskStatus.PENDING
    clock_of(app).advance(timedelta(seconds=61))
    run_pending(app)
    assert sent.result(timeout_ms=0) == 3
    assert steps_of(connection, sent.task_id) == [
        ("fetch!try1", "try"),
        ("fetch!try2", "try"),
        ("fetch", "step"),
    ]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_tries_of_a_recorded_step_do_not_hold_its_run(
    app: Horsies, effects: Effects, side_by_side: bool
) -> None:
    flaky = flaky_call(effects)
    again = RetryPolicy.fixed([0.01, 0.01], auto_retry_for=[OSError], jitter=False)

    @app.durable("patient")
    def patient(ctx: Durable) -> list[int]:
        again_and_again = ctx.with_options(retry=again)
        beside = [again_and_again.call(flaky), ctx.call(int)]
        first: int = ctx.gather(*beside)[0] if side_by_side else again_and_again.step(flaky)
        ctx.sleep(timedelta(days=1))
        return [first, ctx.step(int)]

    sent = patient.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    assert sent.result(timeout_ms=0) == [3, 0]
    assert effects == {"try": 3}


def test_a_time_limit_in_a_tx_step_is_a_failure_of_the_step(app: Horsies) -> None:
    def slow(tx: TaskTransaction) -> None:
        tx.connection.execute("SET LOCAL statement_timeout = 10")
        tx.connection.execute("SELECT pg_sleep(10)")

    @app.durable("slow")
    def run_slow(ctx: Durable) -> str:
        with pytest.raises(StepFailed):
            ctx.tx_step(slow)
        return "failed"

    sent = run_slow.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "failed"


def test_effects_of_a_tx_step_commit_with_its_record(app: Horsies, connection: Database) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS durable_effects (number integer)")

    def write(tx: TaskTransaction, number: int) -> int:
        tx.connection.execute("INSERT INTO durable_effects VALUES (%s)", (number,))
        if number < 0:
            raise TaskFailed("NEGATIVE", "no")
        return number

    @app.durable("writer")
    def writer(ctx: Durable) -> list[int]:
        found = [ctx.tx_step(write, 1), ctx.tx_step(write, 2)]
        with pytest.raises(StepFailed, match="NEGATIVE"):
            ctx.tx_step(write, -1)
        ctx.sleep(5)
        return found

    sent = writer.enqueue()
    try:
        run_pending(app)
        clock_of(app).advance(timedelta(seconds=6))
        run_pending(app)
        assert sent.result(timeout_ms=0) == [1, 2]
        rows = connection.execute("SELECT number FROM durable_effects ORDER BY 1").fetchall()
        assert rows == [(1,), (2,)]
    finally:
        connection.execute("DROP TABLE durable_effects")


def test_steps_side_by_side_are_recorded_each_by_its_name(
    app: Horsies, connection: Database, effects: Effects
) -> None:
    def make(text: str) -> str:
        return effects.note(text)

    def count(text: str) -> int:
        effects.note("count")
        return len(text)

    @app.durable("wide")
    def wide(ctx: Durable) -> tuple[str, str, int]:
        found = ctx.gather(ctx.call(make, "a"), ctx.call(make, "b"), ctx.call(count, "ccc"))
        ctx.sleep(5)
        return found

    sent = wide.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(seconds=6))
    run_pending(app)
    assert sent.result(timeout_ms=0) == ("a", "b", 3)
    assert effects == {"a": 1, "b": 1, "count": 1}
    names = {name for name, _ in steps_of(connection, sent.task_id)}
    assert names == {"make", "make#2", "count", "sleep"}


def test_all_steps_side_by_side_end_before_the_first_failure_is_raised(
    app: Horsies, effects: Effects
) -> None:
    def fail() -> None:
        raise ValueError("no")

    @app.durable("wide")
    def wide(ctx: Durable) -> str:
        with pytest.raises(StepFailed, match="'fail'"):
            ctx.gather(ctx.call(fail), ctx.call(effects.note, "late"))
        return "done"

    sent = wide.enqueue()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "done"
    assert effects == {"late": 1}


def test_a_key_is_the_same_in_every_try_of_a_step(app: Horsies) -> None:
    keys: list[str] = []

    @app.durable("keyed")
    def keyed(ctx: Durable) -> None:
        def charge() -> None:
            keys.append(ctx.step_key)
            if len(keys) < 2:
                raise OSError

        again = RetryPolicy.fixed([0.01], auto_retry_for=[OSError], jitter=False)
        ctx.with_options(retry=again).step(charge)

    sent = keyed.enqueue()
    run_pending(app)
    assert keys == [f"{sent.task_id}/charge"] * 2


def in_another_thread(ctx: Durable) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ctx.step, int).result()


def fails_with(app: Horsies, body: Any) -> TaskError:
    """The error of a run that calls `body` with its context."""

    @app.durable("wrong")
    def wrong(ctx: Durable) -> None:
        body(ctx)

    sent = wrong.enqueue()
    run_pending(app)
    return sent.get(timeout_ms=0).err_value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda ctx: ctx.step(lambda: 1), "has no name"),
        (lambda ctx: ctx.step(7), "takes a function, not int"),
        (lambda ctx: ctx.with_options(name="a#2").step(int), "without '#'"),
        (lambda ctx: ctx.with_options(name="a!try1").step(int), "and '!'"),
        (lambda ctx: ctx.with_options(name="").step(int), "1 to 128 characters"),
        (lambda ctx: ctx.with_options(name="x" * 129).step(int), "1 to 128 characters"),
        (lambda ctx: ctx.sleep(-1), "from 0 to 3,650 days"),
        (lambda ctx: ctx.sleep("a day"), "timedelta or a number"),
        (lambda ctx: ctx.step_key, "read it inside one"),
        (lambda ctx: ctx.start(print), "takes a task"),
        (lambda ctx: ctx.patched("#"), "without '#'"),
        (
            lambda ctx: ctx.with_options(name="outer").step(lambda: ctx.step(int)),
            "used inside step 'outer'",
        ),
        (lambda ctx: ctx.gather(*[ctx.call(int)] * 257), "at most 256 steps"),
        (in_another_thread, "used in another thread than its function"),
        (
            lambda ctx: [ctx.step(int) for _ in range(5)],
            "4 recorded steps, the most that a run may",
        ),
        (
            lambda ctx: [ctx.step(str, "x" * 600) for _ in range(3)],
            "has more than 0 MB; store the data",
        ),
        (
            lambda ctx: [ctx.step(str, "é" * 400) for _ in range(3)],
            "has more than 0 MB; store the data",
        ),
    ],
)
def test_a_misuse_of_the_context_fails_the_run_with_one_sentence(
    app: Horsies, body: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "STEPS_MAX", 4)
    monkeypatch.setattr(past, "RECORD_BYTES_MAX", 1000)
    error = fails_with(app, body)
    assert message in (error.message or "")
    assert (error.data or {}).get("exception_type") == "DurableMisuse"


def test_the_limits_of_a_record_are_those_of_the_documentation() -> None:
    assert (past.STEPS_MAX, past.RECORD_BYTES_MAX) == (10_000, 32 * 1024**2)


def test_a_policy_that_does_not_survive_a_crash_is_refused(app: Horsies) -> None:
    policy = RetryPolicy.fixed([1], auto_retry_for=[OSError])
    with pytest.raises(HorsiesError, match="does not list WORKER_CRASHED, so a crash would end"):

        @app.durable("frail", retry_policy=policy)
        def frail(ctx: Durable) -> None: ...


def test_a_version_is_part_of_the_name_that_workers_register(app: Horsies) -> None:
    @app.durable("onboard", version=1)
    def old(ctx: Durable) -> int:
        ctx.sleep(timedelta(days=1))
        return 1

    @app.durable("onboard", version=2)
    def new(ctx: Durable) -> int:
        return 2

    first, second = old.enqueue(), new.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    assert (first.result(timeout_ms=0), second.result(timeout_ms=0)) == (1, 2)
    assert [info_of(one).task_name for one in (first, second)] == ["onboard@1", "onboard@2"]


def test_a_value_that_cannot_be_recorded_fails_its_step(app: Horsies) -> None:
    def make() -> int:
        return "a text"  # type: ignore[return-value]

    assert "The result of step 'make' cannot be recorded" in (
        fails_with(app, lambda ctx: ctx.step(make)).message or ""
    )


def test_a_value_above_a_megabyte_fails_its_step(app: Horsies) -> None:
    def large() -> str:
        return "x" * 1_100_000

    error = fails_with(app, lambda ctx: ctx.step(large))
    assert error.error_code == "PAYLOAD_TOO_LARGE"
    assert "1,048,576" in (error.message or "")


def test_the_context_cannot_be_used_after_the_end(app: Horsies) -> None:
    kept: list[Durable] = []

    @app.durable("keeper")
    def keeper(ctx: Durable) -> None:
        kept.append(ctx)

    keeper.enqueue()
    run_pending(app)
    with pytest.raises(DurableMisuse, match="has ended"):
        kept[0].step(int)


def test_a_wait_cannot_be_caught(app: Horsies) -> None:
    leaves: list[bool] = []

    @app.durable("stubborn")
    def stubborn(ctx: Durable) -> str:
        try:
            ctx.sleep(timedelta(days=1))
        except BaseException:
            leaves.append(ctx.is_parking)
            return "not yet"
        return "slept"

    sent = stubborn.enqueue()
    run_pending(app)
    assert info_of(sent).status is TaskStatus.PENDING
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    assert sent.result(timeout_ms=0) == "slept"
    assert leaves == [True]
