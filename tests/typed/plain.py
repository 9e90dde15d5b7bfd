"""What the type checker knows about plain functions as tasks: both forms have the same types.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

from horsies import (
    AppConfig,
    Err,
    Horsies,
    MapNode,
    Ok,
    PostgresConfig,
    TaskCall,
    TaskError,
    TaskFailed,
    TaskFunction,
    TaskHandle,
    TaskNode,
    TaskResult,
    TaskSendError,
    TaskSendFailed,
)

app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/shop")))


@app.task
def add(a: int, b: int = 0) -> int:
    return a + b


@app.task()
async def fetch(url: str, *, retries: int) -> bytes:
    raise TaskFailed("NO_ANSWER", "the server is away", data={"url": url})


@app.task("tidy", timeout_ms=500)
def tidy() -> None: ...


@app.task
def pages() -> list[str]:
    return []


@app.task
def long_add(a: int, b: int = 0) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b)


@app.task()
async def long_fetch(url: str, *, retries: int) -> TaskResult[bytes, TaskError]:
    return TaskResult(ok=b"")


def plan(adding: TaskFunction[[int, int], int], fetching: TaskFunction[..., bytes]) -> None:
    assert_type(adding.enqueue(1, 2).result(), int)
    assert_type(fetching.send("https://").unwrap(), TaskHandle[bytes])


def both_forms_are_task_functions() -> None:
    plan(long_add, long_fetch)
    plan(fetching=fetch, adding=add)
    plan(fetch, fetch)  # type: ignore[arg-type]
    plan(add, tidy)  # type: ignore[arg-type]


def call_directly() -> None:
    assert_type(add(1, 2), int)
    assert_type(fetch("https://", retries=1), Coroutine[Any, Any, bytes]).close()
    tidy()
    assert_type(long_add(1, 2), TaskResult[int, TaskError])
    assert_type(long_fetch("https://", retries=1), TaskResult[bytes, TaskError])
    add("x")  # type: ignore[arg-type]
    fetch(1, retries=1).close()  # type: ignore[arg-type]
    fetch("https://").close()  # type: ignore[call-arg]
    tidy(1)  # type: ignore[call-arg]


async def call_directly_async() -> None:
    assert_type(await fetch("https://", retries=1), bytes)


def send() -> None:
    assert_type(add.send(1), Ok[TaskHandle[int]] | Err[TaskSendError])
    assert_type(add.send(1).unwrap().get(), TaskResult[int, TaskError])
    assert_type(fetch.send("https://", retries=1).unwrap(), TaskHandle[bytes])
    assert_type(tidy.send().unwrap(), TaskHandle[None])
    assert_type(add.bind(1, b=2), TaskCall[int])
    add.send("x")  # type: ignore[arg-type]
    fetch.send("https://")  # type: ignore[call-arg]


def enqueue() -> None:
    assert_type(add.enqueue(1, b=2), TaskHandle[int])
    assert_type(long_add.enqueue(1), TaskHandle[int])
    assert_type(add.enqueue(1).result(timeout_ms=5), int)
    assert_type(long_fetch.enqueue("https://", retries=1).result(), bytes)
    assert_type(add.with_options(priority=1).enqueue(1).result(), int)
    add.enqueue("x")  # type: ignore[arg-type]
    add.enqueue(1, 2, 3)  # type: ignore[call-arg]
    add.with_options(priority=1).enqueue("x")  # type: ignore[arg-type]
    add.enqueue(1).result(timeout_ms="soon")  # type: ignore[arg-type]
    add.enqueue(1).result().upper()  # type: ignore[attr-defined]


async def enqueue_async() -> None:
    handle = await fetch.enqueue_async("https://", retries=1)
    assert_type(await handle.result_async(timeout_ms=5), bytes)
    await add.enqueue_async("x")  # type: ignore[arg-type]


def failures() -> None:
    try:
        add.enqueue(1).result()
    except TaskSendFailed as error:
        assert_type(error.error, TaskSendError)
    except TaskFailed as error:
        assert_type(error.code, str | None)
        assert_type(error.traceback, str | None)


def nodes() -> None:
    assert_type(add.node()(a=1), TaskNode[int])
    assert_type(fetch.node()(url="https://", retries=1), TaskNode[bytes])
    assert_type(TaskNode(add, kwargs={"a": 1}), TaskNode[int])
    assert_type(MapNode(fetch, over=pages.node()(), each="url"), MapNode[bytes])
    assert_type(MapNode(long_fetch, over=pages.node()(), each="url"), MapNode[bytes])
    add.node()(a="x")  # type: ignore[arg-type]
    add.node()(c=1)  # type: ignore[call-arg]
    MapNode(len, over=pages.node()())  # type: ignore[arg-type]


async def calling() -> None:
    assert_type(await add.call_async(1, b=2), int)
    assert_type(await fetch.call_async("url", retries=1), bytes)
    assert_type(await long_add.call_async(1), TaskResult[int, TaskError])
    assert_type(await long_fetch.call_async("url", retries=1), TaskResult[bytes, TaskError])
    await add.call_async("x")  # type: ignore[arg-type]
