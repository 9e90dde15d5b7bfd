"""Batched tasks as they are defined, sent, called directly and run in tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from horsies import (
    AppConfig,
    Batch,
    CustomQueueConfig,
    Horsies,
    PerKey,
    PostgresConfig,
    QueueMode,
    Rate,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskTransaction,
    current_batch,
)
from horsies.db.statements.workers import register_defaults
from horsies.errors import TaskDefinitionError
from horsies.tasks.keys import lane_of
from horsies.testing import run_inline
from horsies.worker.batches import Batches
from horsies.worker.known_tasks import task_defaults
from tests.support.applications import Task
from tests.support.database import Database

TEN = Batch(size=10)


@pytest.fixture
def half(app: Horsies) -> Any:
    @app.task("half", batch=TEN)
    def half(numbers: list[int]) -> list[TaskResult[int, TaskError]]:
        return [
            TaskResult(err=TaskError(error_code="ODD"))
            if number % 2
            else TaskResult(ok=number // 2)
            for number in numbers
        ]

    return half


def many(numbers: list[int], more: int = 0) -> None: ...
def no_list(numbers: int) -> None: ...
def no_outcomes(numbers: list[int]) -> int:
    return len(numbers)


def no_annotation(numbers) -> None: ...  # type: ignore[no-untyped-def]
def no_return(numbers: list[int]): ...  # type: ignore[no-untyped-def]
def in_transaction(numbers: list[int], tx: TaskTransaction) -> None: ...
def fine(numbers: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fine, {"batch": 10}, r"batch must be a Batch, not int"),
        (fine, {"batch": Batch(size=0)}, "size of batch must be a whole number from 1 to 1,000"),
        (fine, {"batch": Batch(size=1_001)}, "whole number from 1 to 1,000"),
        (fine, {"batch": Batch(size=True)}, "whole number from 1 to 1,000"),
        (fine, {"batch": TEN, "burst": True}, "batch= and burst=True exclude each other"),
        (fine, {"batch": TEN, "name": "x" * 251}, "has at most 250 characters, not 251"),
        (many, {"batch": TEN}, "it must take one parameter"),
        (no_list, {"batch": TEN}, "'numbers' must be annotated as a list"),
        (no_annotation, {"batch": TEN}, "'numbers' must be annotated as a list"),
        (no_outcomes, {"batch": TEN}, "must return a list with one outcome for each task, or None"),
        (no_return, {"batch": TEN}, "it has no return annotation"),
        (in_transaction, {"batch": TEN}, "it takes a transaction"),
    ],
)
def test_a_bad_batch_is_refused_at_definition(
    app: Horsies, function: Any, options: dict[str, Any], message: str
) -> None:
    name = options.pop("name", "bad")
    with pytest.raises(TaskDefinitionError, match=message):
        app.task(name, **options)(function)


def test_a_queue_that_keeps_an_order_takes_no_batches() -> None:
    orders = CustomQueueConfig(name="orders", per_key=PerKey(order="fifo"))
    broker = PostgresConfig(database_url="postgresql://nowhere/none")
    app = Horsies(AppConfig(broker=broker, queue_mode=QueueMode.CUSTOM, custom_queues=[orders]))
    with pytest.raises(TaskDefinitionError, match="starts the tasks of a key one after another"):
        app.task("bad", queue_name="orders", batch=TEN)(fine)


def test_a_direct_call_takes_one_item_and_the_function_a_list(half: Any) -> None:
    assert half(4) == TaskResult(ok=2)
    assert half(3).err_value.error_code == "ODD"
    assert half(numbers=4).ok_value == 2
    assert [one.is_ok() for one in half.function([2, 3])] == [True, False]


def test_a_function_without_outcomes_succeeds_for_all(app: Horsies) -> None:
    seen = []

    @app.task("note", batch=TEN)
    async def note(words: list[str]) -> None:
        seen.append(words)

    assert asyncio.run(note("a")) is None
    assert seen == [["a"]]


@pytest.mark.parametrize("returned", [[], [1, 2], 7, "x", {1: 1}, None])
def test_a_wrong_list_is_an_error_of_its_own_code(app: Horsies, returned: Any) -> None:
    @app.task("wrong", batch=TEN)
    def wrong(numbers: list[int]) -> list[int]:
        return returned  # type: ignore[no-any-return]

    with run_inline(app):
        outcome = wrong.enqueue(1).get()
    assert outcome.err_value.error_code == "BATCH_RESULT_MISMATCH"


def test_run_inline_runs_each_send_as_a_batch_of_one(app: Horsies, half: Any) -> None:
    sizes = []

    @app.task("count", batch=TEN, key=lambda word: word)
    def count(words: list[str]) -> list[int]:
        sizes.append((len(words), len(current_batch())))
        if words == ["bad"]:
            raise TaskFailed("BAD_WORD")
        return [len(word) for word in words]

    with run_inline(app) as ran:
        handles = count.send_many([count.bind(word) for word in ("a", "bb", "bad")]).unwrap()
        assert [handle.get().ok for handle in handles] == [1, 2, None]
        assert half.enqueue(3).get().err_value.error_code == "ODD"
    assert (ran.completed, ran.failed) == (2, 2)
    assert sizes == [(1, 1)] * 3


def test_tasks_without_a_key_share_that_of_their_name(
    app: Horsies, half: Task, connection: Database
) -> None:
    half.send(4).unwrap()
    statement, values = register_defaults(task_defaults(app))
    statement.run(connection, values)
    connection.execute("SELECT horsies_send_v1('half', '{\"numbers\": 6}')")
    rows = connection.execute("SELECT lane_key, lane, held FROM horsies_tasks").fetchall()
    assert rows == [("task:half", lane_of("default", "task:half").number, True)] * 2


def test_a_rate_and_a_batch_share_the_key_and_an_application_without_batches_has_none(
    app: Horsies,
) -> None:
    assert Batches.of(app.definitions()) is None
    app.task("slow", batch=TEN, rate=Rate(count=1))(fine)
    assert app.definitions()["slow"].key is not None
    assert Batches.of(app.definitions()) is not None
