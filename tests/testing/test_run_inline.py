"""run_inline: a send runs its task at once in the test's process."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import (
    INJECTED,
    AsyncDurable,
    CurrentTask,
    Durable,
    Horsies,
    OutcomeCode,
    RetryLater,
    RetryPolicy,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskTransaction,
    WorkflowStartErrorCode,
    current_task,
)
from horsies.testing import run_inline
from horsies.worker.child.durable_run import NO_WORKER
from tests.support.applications import NOWHERE, Call


class Order(BaseModel):
    number: int
    lines: tuple[str, ...] = ()


@pytest.fixture
def app() -> Horsies:
    """An application whose database does not exist."""
    return Horsies(NOWHERE)


def test_arguments_and_results_pass_through_the_codec(app: Horsies, call: Call) -> None:
    @app.task("read")
    def read(order: Order) -> Order:
        received.append(order)
        return order

    received: list[Order] = []
    order = Order(number=7, lines=("a",))
    with run_inline(app):
        handle = call(app, read, "enqueue", order)
        returned = call(app, handle, "result")
    assert received == [order]
    assert received[0] is not order
    assert returned == order
    assert returned is not received[0]


def test_a_value_that_does_not_fit_its_annotation_is_an_error(app: Horsies) -> None:
    @app.task("wrong")
    def wrong() -> int:
        return "seven"  # type: ignore[return-value]

    with run_inline(app):
        error = wrong.enqueue().get().err_value
    assert error.error_code == "RETURN_TYPE_MISMATCH"


def test_retries_follow_the_policy_without_waiting(app: Horsies, call: Call) -> None:
    attempts: list[int] = []

    @app.task("flaky", retry_policy=RetryPolicy.fixed([3_600, 7_200], auto_retry_for=[OSError]))
    def flaky(fails: int) -> int:
        attempts.append(current_task().attempt)
        if len(attempts) <= fails:
            raise ConnectionError
        return len(attempts)

    with run_inline(app) as ran:
        assert call(app, call(app, flaky, "enqueue", 2), "result") == 3
        assert attempts == [1, 2, 3]
        assert (ran.retried, ran.completed, ran.failed) == (2, 1, 0)
        attempts.clear()
        handle = call(app, flaky, "enqueue", 9)
        assert "ConnectionError" in str(call(app, handle, "get").err_value.message)
        assert attempts == [1, 2, 3]
        assert (ran.retried, ran.completed, ran.failed) == (4, 1, 1)


def test_a_retry_that_would_come_after_good_until_does_not_run(app: Horsies) -> None:
    @app.task("late", retry_policy=RetryPolicy.fixed([60, 600], auto_retry_for=[OSError]))
    def late() -> None:
        raise OSError

    with run_inline(app) as ran:
        late.with_options(good_until=datetime.now(UTC) + timedelta(minutes=5)).enqueue()
        expired = late.with_options(good_until=datetime.now(UTC) - timedelta(minutes=5)).enqueue()
        assert expired.get().err_value.error_code is OutcomeCode.TASK_EXPIRED
    assert [(one.number, one.outcome) for one in ran.attempts] == [(1, "retried"), (2, "failed")]


def test_a_retry_without_end_is_refused(app: Horsies) -> None:
    @app.task("forever", retry_policy=RetryPolicy.forever(1, auto_retry_for=[OSError]))
    def forever() -> None:
        raise OSError

    with run_inline(app), pytest.raises(RuntimeError, match=r"failed 100 times in run_inline"):
        forever.send()


def test_tasks_send_others_and_get_their_results(app: Horsies, call: Call) -> None:
    @app.task("inner")
    def inner(number: int) -> tuple[str, int]:
        return current_task().name, number

    @app.task("outer")
    def outer() -> list[tuple[str, int]]:
        before = current_task().id
        values = [inner.enqueue(number).result() for number in range(2)]
        assert current_task().id == before
        return values

    @app.task("async_outer")
    async def async_outer() -> list[tuple[str, int]]:
        before = current_task().id
        handles = [await inner.enqueue_async(number) for number in range(2)]
        assert current_task().id == before
        return [await handle.result_async() for handle in handles]

    with run_inline(app):
        for task in (outer, async_outer):
            handle = call(app, task, "enqueue")
            assert call(app, handle, "result") == [("inner", 0), ("inner", 1)]


def test_async_tasks_run_from_sync_and_async_tests(app: Horsies) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    @app.task("double")
    async def double(number: int) -> int:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        assert current_task().name == "double"
        return 2 * number

    async def main() -> int:
        first = await double.enqueue_async(3)
        second = double.enqueue(4)  # a blocking send inside of an event loop
        assert loops[-2] is asyncio.get_running_loop()
        results = await asyncio.gather(first.result_async(), second.result_async())
        return sum(results)

    with run_inline(app):
        assert [double.enqueue(1).result(), double.enqueue(2).result()] == [2, 4]
        assert loops[0] is loops[1]
        assert asyncio.run(main()) == 14


def test_concurrent_coroutines_know_their_own_tasks(app: Horsies) -> None:
    @app.task("who")
    async def who(number: int) -> tuple[str, int]:
        await asyncio.sleep(0)
        return current_task().id, number

    async def main() -> None:
        handles = await asyncio.gather(*(who.enqueue_async(number) for number in range(5)))
        for number, handle in enumerate(handles):
            assert await handle.result_async() == (handle.task_id, number)

    with run_inline(app):
        asyncio.run(main())


def test_a_plain_function_sees_no_event_loop_in_an_async_test(app: Horsies) -> None:
    @app.task("plain")
    def plain() -> int:
        return asyncio.run(asyncio.sleep(0, 5))

    async def main() -> int:
        return await (await plain.enqueue_async()).result_async()

    with run_inline(app):
        assert asyncio.run(main()) == 5


def test_current_task_has_the_fields_of_the_send(app: Horsies) -> None:
    seen: list[Any] = []

    @app.task("look", timeout_ms=60_000)
    def look() -> None:
        task = current_task()
        in_thread = threading.Thread(target=lambda: seen.append(current_task().id))
        in_thread.start()
        in_thread.join()
        seen.extend([task.id, task.queue, task.priority, dict(task.headers), task.max_attempts])
        assert task.sent_at is not None
        assert task.sent_at <= task.started_at < task.deadline  # type: ignore[operator]
        assert (task.workflow_id, task.schedule_name, task.slot) == (None, None, None)

    with run_inline(app):
        handle = look.with_options(headers={"tenant": "acme"}, priority=4).enqueue()
        assert handle.get().is_ok()
    assert seen == [handle.task_id, handle.task_id, "default", 4, {"tenant": "acme"}, 1]
    with pytest.raises(LookupError):
        current_task()


def test_nested_sends_inherit_headers_and_leave_none_behind(app: Horsies) -> None:
    seen: list[dict[str, str]] = []

    @app.task("leaf")
    def leaf() -> None:
        seen.append(dict(current_task().headers))

    @app.task("branch")
    def branch() -> None:
        leaf.with_options(headers={"b": "2"}).enqueue()
        leaf.enqueue()

    with run_inline(app):
        branch.with_options(headers={"a": "1"}).enqueue()
        leaf.enqueue()
    assert seen == [{"a": "1", "b": "2"}, {"a": "1"}, {}]


def test_around_hooks_run_as_in_a_worker(app: Horsies) -> None:
    events: list[str] = []

    @app.around_task
    def session(task: CurrentTask) -> Iterator[None]:
        events.append(f"enter {task.name}")
        yield
        events.append("leave")

    @app.task("work")
    def work() -> None:
        events.append("work")

    with run_inline(app):
        work.enqueue()
    assert events == ["enter work", "work", "leave"]
    assert app.hooks.around == [session]


def test_reraise_raises_the_exception_with_its_traceback(app: Horsies, call: Call) -> None:
    @app.task("broken", retry_policy=RetryPolicy.fixed([1], auto_retry_for=[OSError]))
    def broken() -> None:
        raise ConnectionError("gone")

    with (
        run_inline(app, reraise=True) as ran,
        pytest.raises(ConnectionError, match="gone") as caught,
    ):
        call(app, broken, "send")
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert [one.outcome for one in ran.attempts] == ["retried", "failed"]


def test_without_reraise_the_error_is_in_the_result(app: Horsies) -> None:
    @app.task("refuse")
    def refuse() -> None:
        raise TaskFailed("CARD_REFUSED", "no money")

    with run_inline(app) as ran:
        handle = refuse.enqueue()
        with pytest.raises(TaskFailed, match="no money"):
            handle.result()
    assert [(one.task, one.error_code) for one in ran.attempts] == [("refuse", "CARD_REFUSED")]


def test_retry_later_counts_as_a_retry(app: Horsies) -> None:
    @app.task("poll")
    def poll() -> int:
        if current_task().attempt < 3:
            raise RetryLater(3_600)
        return current_task().attempt

    with run_inline(app):
        assert poll.enqueue().result() == 3


def test_outcomes_of_pytest_leave_the_send(app: Horsies, call: Call) -> None:
    @app.task("check")
    def check() -> None:
        pytest.fail("found in a task")

    with run_inline(app), pytest.raises(pytest.fail.Exception, match="found in a task"):
        call(app, check, "send")


def test_a_cancelled_test_is_cancelled(app: Horsies) -> None:
    @app.task("hang")
    async def hang() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        sending = asyncio.create_task(hang.send_async())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    with run_inline(app):
        asyncio.run(main())


def test_keys_are_free_again_when_their_task_has_ended(app: Horsies) -> None:
    @app.task("once")
    def once() -> str:
        return current_task().id

    with run_inline(app) as ran:
        keyed = once.with_options(idempotency_key="a")
        assert keyed.enqueue().result() == keyed.enqueue().result()
        while_open = once.with_options(idempotency_key="b", unique="while_open")
        assert while_open.enqueue().result() != while_open.enqueue().result()
    assert ran.completed == 3


def test_a_workflow_is_refused_with_the_way_out(app: Horsies) -> None:
    @app.task("node")
    def node() -> int:
        return 1

    only = node.node()()
    spec = app.workflow("single", [only], output=only, definition_key="single.v1")
    with run_inline(app):
        refused = spec.start().unwrap_err()
    assert refused.code is WorkflowStartErrorCode.ENQUEUE_FAILED
    assert "use run_pending" in refused.message


def test_a_direct_call_raises_from_the_exception_of_the_task(app: Horsies) -> None:
    @app.task("direct")
    def direct() -> TaskResult[int, TaskError]:
        raise LookupError("original")

    with pytest.raises(ValueError, match="no value") as caught:
        direct().unwrap()
    cause = caught.value.__cause__
    assert isinstance(cause, LookupError)
    assert "direct" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    with pytest.raises(LookupError, match="original"):
        direct.function()


def test_a_task_is_called_on_the_event_loop_of_the_test(app: Horsies) -> None:
    @app.task("plain_async")
    async def plain_async(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    @app.task("plain")
    def plain(number: int) -> int:
        return number

    @app.task("result_async")
    async def result_async(number: int) -> TaskResult[int, TaskError]:
        if number < 0:
            raise ValueError("negative")
        return TaskResult(ok=number)

    async def main() -> None:
        assert await plain_async.call_async(1) == 1
        assert await plain.call_async(2) == 2
        assert (await result_async.call_async(3)).unwrap() == 3
        with pytest.raises(ValueError, match="negative"):
            await plain_async.call_async(-1)
        failed = await result_async.call_async(-1)
        assert isinstance(failed.err_value.exception, ValueError)
        with pytest.raises(TypeError, match="number must be int"):
            await plain_async.call_async("x")  # type: ignore[arg-type]
        refused = await result_async.call_async("x")  # type: ignore[call-overload]
        assert refused.err_value.error_code == "WORKER_SERIALIZATION_ERROR"
        with pytest.raises(RuntimeError, match=r"await task\.call_async"):
            result_async(1)

    asyncio.run(main())


def test_a_cancel_passes_a_direct_call(app: Horsies) -> None:
    @app.task("hang")
    async def hang() -> TaskResult[None, TaskError]:
        await asyncio.Event().wait()
        return TaskResult(ok=None)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hang.call_async(), 0.01)

    asyncio.run(main())


def test_a_transaction_has_no_row_to_record_in(app: Horsies) -> None:
    @app.task("book")
    def book(tx: TaskTransaction = INJECTED) -> int:
        tx.connection.execute("SELECT 1")
        return tx.attempt

    with run_inline(app):
        error = book.send().unwrap().get().err_value
    assert error.error_code == "TRANSACTION_NOT_COMMITTED"
    assert "does not run in a worker" in (error.message or "")


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_durable_function_has_no_record(app: Horsies, is_async: bool) -> None:
    def plain(ctx: Durable) -> int:
        return ctx.step(int)

    async def coroutine(ctx: AsyncDurable) -> int:
        return await ctx.step(int)

    onboard = app.durable("onboard")(coroutine) if is_async else app.durable("onboard")(plain)
    with run_inline(app):
        error = onboard.send().unwrap().get().err_value
    assert error.message == NO_WORKER
