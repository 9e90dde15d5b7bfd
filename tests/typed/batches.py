"""What the type checker knows about batched tasks.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from horsies import (
    Batch,
    CurrentTask,
    Horsies,
    TaskError,
    TaskHandle,
    TaskResult,
    current_batch,
)

app = Horsies("postgresql://localhost/shop")


@app.task("insert", batch=Batch(size=100))
def insert(rows: list[tuple[int, str]]) -> None: ...


@app.task("double", batch=Batch(size=100), key=lambda number: str(number))
def double(numbers: Sequence[int]) -> list[int]:
    return [2 * number for number in numbers]


@app.task("check", batch=Batch(size=10), timeout_ms=1_000)
def check(words: list[str]) -> list[TaskResult[bool, TaskError]]:
    return [TaskResult(ok=bool(word)) for word in words]


@app.task("check_async", batch=Batch(size=10))
async def check_async(words: list[str]) -> list[TaskResult[bool, TaskError]]:
    return [TaskResult(ok=bool(word)) for word in words]


@app.task("double_async", batch=Batch(size=10))
async def double_async(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def use() -> None:
    assert_type(insert.enqueue((1, "a")), TaskHandle[None])
    assert_type(double.enqueue(1), TaskHandle[int])
    assert_type(double(1), int)
    assert_type(check.enqueue("a"), TaskHandle[bool])
    assert_type(check("a"), TaskResult[bool, TaskError])
    assert_type(check_async.enqueue("a").result(), bool)
    assert_type(current_batch(), tuple[CurrentTask, ...])
    double.send_many([double.bind(1), double.bind(2)])


async def use_async() -> None:
    assert_type(await double_async(1), int)
    assert_type(await check_async.call_async("a"), TaskResult[bool, TaskError])


def mistakes() -> None:
    double.enqueue([1, 2])  # type: ignore[arg-type]
    double.enqueue("a")  # type: ignore[arg-type]
    insert.enqueue(1, "a")  # type: ignore[call-arg, arg-type]
    app.task("both", batch=Batch(size=2), burst=True)  # type: ignore[call-overload]
    Batch(size="2")  # type: ignore[arg-type]
