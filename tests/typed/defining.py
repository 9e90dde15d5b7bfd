"""What the type checker knows about defining tasks: return types, options, hooks.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import assert_type

from horsies import (
    INJECTED,
    CurrentTask,
    Horsies,
    QueueMode,
    RetryLater,
    RetryPolicy,
    TaskError,
    TaskFunction,
    TaskHandle,
    TaskResult,
    TaskTransaction,
    current_task,
)


class PaymentError(TaskError):
    gateway: str


def tasks(app: Horsies, moment: datetime) -> None:
    @app.task(
        "good",
        queue_name="mail",
        retry_policy=RetryPolicy.fixed([0.5], auto_retry_for=[OSError, "GATEWAY_DOWN"]),
        exception_mapper={ConnectionError: "GATEWAY_DOWN", TimeoutError: "GATEWAY_DOWN"},
        default_unhandled_error_code="BROKEN",
        timeout_ms=1_000,
    )
    def good(a: int, /, *rest: str, flag: bool = False) -> TaskResult[str, TaskError]:
        return TaskResult(ok="")

    assert_type(good.send(1, "x", "y", flag=True).unwrap(), TaskHandle[str])
    good.send(1, 2)  # type: ignore[arg-type]
    good.send(a=1)  # type: ignore[call-arg]

    @app.task("own_error")
    def own_error() -> TaskResult[int, PaymentError]:
        return TaskResult(err=PaymentError(gateway="x"))

    @app.task("pay")
    def pay(order: int, tx: TaskTransaction = INJECTED) -> int:
        assert_type(tx.fencing_token, int)
        tx.commit()  # type: ignore[attr-defined]
        return order

    pay.send(1)
    pay.send("1")  # type: ignore[arg-type]

    assert_type(own_error, TaskFunction[[], int, TaskResult[int, TaskError]])

    @app.task("nothing")
    async def nothing() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    assert_type(nothing, TaskFunction[[], None, TaskResult[None, TaskError]])


def wrong_options(app: Horsies, moment: datetime) -> None:
    app.task("x", "mail")  # type: ignore[call-overload]
    app.task("x", good_until=moment)  # type: ignore[call-overload]
    app.task("x", auto_retry_for=["X"])  # type: ignore[call-overload]
    app.task("x", que_name="mail")  # type: ignore[call-overload]
    app.task("x", queue_name=QueueMode)  # type: ignore[call-overload]
    app.task("x", retry_policy=3)  # type: ignore[call-overload]
    app.task("x", exception_mapper={int: "CODE"})  # type: ignore[dict-item]
    app.task("x", timeout_ms="1s")  # type: ignore[call-overload]


def inside_a_task() -> None:
    task = current_task()
    assert_type(task.max_attempts, int | None)
    assert_type(task.deadline, datetime | None)
    task.progress(0.5, note="half")
    task.progress("half")  # type: ignore[arg-type]
    task.headers["tenant"] = "a"  # type: ignore[index]
    raise RetryLater(seconds="1.5")  # type: ignore[arg-type]


def hooks(app: Horsies) -> None:
    @app.on_child_process_start
    def plain() -> None: ...

    plain()

    @app.on_child_process_start  # type: ignore[type-var]
    def needs_something(a: int) -> None: ...

    @app.on_child_process_stop
    async def waits() -> None: ...

    @app.around_task
    def around(task: CurrentTask) -> Iterator[None]:
        yield

    @app.around_task
    async def around_async(task: CurrentTask) -> AsyncIterator[None]:
        yield

    @app.around_task  # type: ignore[type-var]
    def without_task() -> Iterator[None]:
        yield
