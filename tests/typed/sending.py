"""What the type checker knows about sending: arguments, handles, results.

Nothing here runs. A ``type: ignore`` that is not needed is an error in strict mode, so each of them
proves that its line is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from typing import Any, assert_type

from horsies import (
    AppConfig,
    BrokerOperationError,
    Err,
    Horsies,
    Ok,
    OutgoingTask,
    PostgresConfig,
    RetryPolicy,
    TaskActionError,
    TaskCall,
    TaskCancelled,
    TaskError,
    TaskHandle,
    TaskInfo,
    TaskResult,
    TaskSendError,
)
from horsies.monitoring import RunPage, TaskPage

app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/shop")))


@app.task("add")
def add(a: int, b: int = 0) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b)


@app.task("fetch")
async def fetch(url: str, *, retries: int) -> TaskResult[bytes, TaskError]:
    return TaskResult(ok=b"")


def send() -> None:
    assert_type(add.send(1), Ok[TaskHandle[int]] | Err[TaskSendError])
    assert_type(add.send(1, 2).unwrap(), TaskHandle[int])
    assert_type(add.send(a=1, b=2).unwrap().get(), TaskResult[int, TaskError])
    assert_type(add.send(1).unwrap().get(timeout_ms=5).ok_value, int)
    assert_type(add.schedule(5, 1), Ok[TaskHandle[int]] | Err[TaskSendError])
    assert_type(add.schedule(0.5, 1, b=2).unwrap(), TaskHandle[int])
    add.send("x")  # type: ignore[arg-type]
    add.send()  # type: ignore[call-arg]
    add.send(1, 2, 3)  # type: ignore[call-arg]
    add.send(1, c=2)  # type: ignore[call-arg]
    add.send(None)  # type: ignore[arg-type]
    add.schedule(5, "x")  # type: ignore[arg-type]
    add.schedule("soon", 1)  # type: ignore[arg-type]
    add.schedule(5)  # type: ignore[call-arg]


async def send_async() -> None:
    assert_type(await add.send_async(1), Ok[TaskHandle[int]] | Err[TaskSendError])
    handle = (await add.schedule_async(5, 1)).unwrap()
    assert_type(await handle.get_async(), TaskResult[int, TaskError])
    await add.send_async("x")  # type: ignore[arg-type]
    await add.schedule_async(5, "x")  # type: ignore[arg-type]


def send_async_tasks() -> None:
    assert_type(fetch.send("https://", retries=1).unwrap(), TaskHandle[bytes])
    assert_type(fetch("https://", retries=1), TaskResult[bytes, TaskError])
    fetch.send("https://")  # type: ignore[call-arg]
    fetch.send("https://", 1)  # type: ignore[call-arg]
    fetch.send(1, retries=1)  # type: ignore[arg-type]


def call_directly() -> None:
    assert_type(add(1, 2), TaskResult[int, TaskError])
    add("x")  # type: ignore[arg-type]


def send_many() -> None:
    assert_type(add.bind(1, b=2), TaskCall[int])
    add.bind("x")  # type: ignore[arg-type]
    sent = add.send_many([add.bind(1), add.bind(2)])
    assert_type(sent, Ok[list[TaskHandle[int]]] | Err[TaskSendError])
    assert_type([handle.get().ok for handle in sent.unwrap()], list[int | None])
    add.send_many(add.bind(n) for n in range(3))
    add.send_many([fetch.bind("https://", retries=1)])  # type: ignore[list-item]
    add.send_many([1])  # type: ignore[list-item]


def by_name(error: TaskSendError) -> None:
    sent = app.send_by_name("mail", {"to": "ada"}, queue_name="mail", timeout_ms=500)
    assert_type(sent, Ok[TaskHandle[Any]] | Err[TaskSendError])
    assert_type(app.retry_send(error), Ok[TaskHandle[Any]] | Err[TaskSendError])
    assert_type(app.enqueue_by_name("mail"), TaskHandle[Any])
    app.send_by_name("mail", [1])  # type: ignore[arg-type]
    app.send_by_name("mail", to="ada")  # type: ignore[call-arg]


@app.on_send
def add_tenant(outgoing: OutgoingTask) -> None:
    outgoing.headers["tenant"] = outgoing.task_name
    outgoing.headers["count"] = outgoing.count  # type: ignore[assignment]


@app.on_send  # type: ignore[type-var]
def takes_nothing() -> None: ...


def with_options(moment: datetime, error: TaskSendError) -> None:
    sender = add.with_options(good_until=moment, priority=1, idempotency_key="k", transaction=add)
    assert_type(sender.send(1, 2), Ok[TaskHandle[int]] | Err[TaskSendError])
    assert_type(sender.schedule(5, 1).unwrap(), TaskHandle[int])
    assert_type(sender.send_many([add.bind(1)]).unwrap(), list[TaskHandle[int]])
    sender.send("x")  # type: ignore[arg-type]
    add.with_options(good_until=None).send(1)
    add.with_options(good_until="tomorrow")  # type: ignore[arg-type]
    add.with_options(priority="high")  # type: ignore[arg-type]
    add.with_options(prority=1)  # type: ignore[call-arg]
    full = add.with_options(
        queue_name="mail",
        timeout_ms=500,
        retry_policy=RetryPolicy.fixed([1], auto_retry_for=["BUSY"]),
        delay=timedelta(minutes=1),
        headers={"tenant": "blue"},
        retention=timedelta(days=1),
        unique="while_open",
    )
    assert_type(full.send(1).unwrap(), TaskHandle[int])
    add.with_options(unique="sometimes")  # type: ignore[arg-type]
    add.with_options(delay=5)  # type: ignore[arg-type]
    add.with_options(headers={"tenant": 7})  # type: ignore[dict-item]
    assert_type(add.retry_send(error), Ok[TaskHandle[int]] | Err[TaskSendError])
    assert_type(add.retry_schedule(error).unwrap(), TaskHandle[int])
    add.retry_send("x")  # type: ignore[arg-type]


def read(handle: TaskHandle[int]) -> None:
    assert_type(handle.info(), Ok[TaskInfo | None] | Err[BrokerOperationError])
    assert_type(handle.cancel(), Ok[TaskCancelled] | Err[TaskActionError])
    assert_type(handle.get(timeout_ms=0).err, TaskError | None)
    assert_type(app.get_result("id"), TaskResult[Any, TaskError])
    assert_type(handle.watch(timeout_ms=5), Iterator[TaskInfo])
    assert_type(handle.watch_async(), AsyncIterator[TaskInfo])
    handle.get(timeout_ms="soon")  # type: ignore[arg-type]


async def lists(since: datetime) -> None:
    page = app.tasks_where(status="FAILED", queue=["mail"], since=since, limit=5)
    assert_type(page, Ok[TaskPage] | Err[BrokerOperationError])
    assert_type(page.unwrap().rows[0].error_code, str | None)
    assert_type((await app.runs_where_async(name="w")).unwrap(), RunPage)
    app.tasks_where(state="FAILED")  # type: ignore[call-arg]
    app.tasks_where(since="1h")  # type: ignore[arg-type]


def narrow(handle: TaskHandle[int]) -> int:
    match add.send(1):
        case Ok(sent):
            return sent.get().unwrap()
        case Err(error):
            assert_type(error, TaskSendError)
            return 0
