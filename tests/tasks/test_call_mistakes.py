"""Mistakes in configurations, calls and waits, each with the sentence that answers it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import pytest

from horsies.current_task import CurrentTask, set_running_task
from horsies.tasks import waiters
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment
from tests.support.applications import app_at

WRONG_VALUES: dict[str, tuple[str, str]] = {
    "misspelt field": (
        "AppConfig(broker=BROKER, brokr=1)",
        "AppConfig has no field 'brokr'; did you mean broker?",
    ),
    "unknown field": (
        "CustomQueueConfig(name='mail', colour=1)",
        "CustomQueueConfig has no field 'colour'; the fields are name, priority, max_concurrency",
    ),
    "field left out": (
        "PostgresConfig()",
        "PostgresConfig needs the field 'database_url'.",
    ),
    "field without its name": (
        "PostgresConfig('postgresql://u:hunter2@h/x')",
        "PostgresConfig takes its fields by name; write PostgresConfig(database_url=...).",
    ),
    "address for a configuration": (
        "AppConfig(broker='postgresql://u:hunter2@h/x')",
        "AppConfig.broker must be a PostgresConfig.",
    ),
    "names for queues": (
        "AppConfig(broker=BROKER, queue_mode=QueueMode.CUSTOM, custom_queues=['mail'])",
        "AppConfig.custom_queues[0] must be a CustomQueueConfig.",
    ),
    "negative wait": (
        "RetryPolicy.fixed([-1], auto_retry_for=['X'])",
        "RetryPolicy.intervals[0]: input should be greater than or equal to 0.001.",
    ),
    "other database": ("Horsies('mysql://localhost/x')", "must start with postgresql://"),
    "result without a name": (
        "TaskResult(3)",
        "write TaskResult(ok=value) or TaskResult(err=error)",
    ),
    "Celery's delay": ("add.delay(1, 2)", "has no attribute 'delay'; write add_two.send(...)"),
    "Celery's apply_async": (
        "add.apply_async((1, 2))",
        "write add_two.with_options(...).send(...)",
    ),
    "Celery's eta": ("add.with_options(eta=1)", "A send has no option 'eta'; write at=;"),
    "truth of a send": ("bool(add.send('one', 2))", "Err is neither true nor false; call is_ok()"),
    "get without unwrap": (
        "add.send(1, 2).get()",
        "'Ok' object has no attribute 'get'; call .unwrap() first",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_VALUES)
def test_a_wrong_value_is_refused_at_once(mistake: str, process_url: str) -> None:
    expression, answer = WRONG_VALUES[mistake]
    names: dict[str, Any] = {}
    exec("from horsies import *", names)
    app = app_at(process_url)
    names.update(add=app.task("add")(add_two), BROKER=app.config.broker)
    with pytest.raises(Exception) as refused:  # noqa: PT011
        eval(expression, names)
    assert answer in str(refused.value)
    assert "errors.pydantic.dev" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
    app.close()


def add_two(a: int, b: int) -> int:
    return a + b


WRONG_CALLS: dict[str, tuple[str, str]] = {
    "wrong type": ("add.send('one', 2)", "a must be int (input should be a valid integer)."),
    "missing": ("add.send(1)", "argument 'b' is missing; the parameters are a, b."),
    "too many": ("add.send(1, 2, 3)", "3 positional arguments are too many"),
    "misspelt": ("add.send(1, bb=2)", "there is no parameter 'bb'; the parameters are a, b."),
    "object": ("keep.send(object())", "holds a value that cannot be written as JSON"),
    "set": ("keep.send({1})", "v is of type set and would come back as list"),
    "Decimal": ("keep.send(Decimal(1))", "v is of type Decimal and would come back as str"),
    "20 MB": ("keep.send('x' * 20_000_000)", "store the data and send a reference to it."),
    "no time zone": (
        "add.with_options(good_until=datetime(2030, 1, 1)).send(1, 2)",
        "write datetime(..., tzinfo=UTC) or call .astimezone()",
    ),
    "other object for a transaction": (
        "add.with_options(transaction=object()).send(1, 2)",
        "transaction= takes an open psycopg, asyncpg, SQLAlchemy or Django connection",
    ),
    "delay until a day": (
        "add.schedule(datetime(2030, 1, 1), 1, 2)",
        "for a point in time write with_options(at=...).send(...)",
    ),
    "delay of a timedelta": (
        "add.schedule(timedelta(1), 1, 2)",
        "write with_options(delay=...).send(...) or pass .total_seconds()",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_CALLS)
def test_a_send_that_cannot_be_stored_is_an_error_and_logged(
    mistake: str, process_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    expression, answer = WRONG_CALLS[mistake]
    app = app_at(process_url)

    @app.task("keep")
    def keep(v: Any) -> int:
        return 1

    names: dict[str, Any] = {"add": app.task("add")(add_two), "keep": keep}
    exec("from datetime import datetime, timedelta\nfrom decimal import Decimal", names)
    with caplog.at_level(logging.WARNING, logger="horsies.send"):
        refused = eval(expression, names).unwrap_err()
    assert answer in refused.message
    assert f"failed with {refused.code.value}" in caplog.text
    app.close()


def test_a_send_inside_an_event_loop_is_reported_once(
    process_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_at(process_url)
    add = app.task(f"add_{uuid.uuid4().hex}")(add_two)

    async def send_twice() -> None:
        add.send(1, 2)
        add.send(3, 4)

    with caplog.at_level(logging.WARNING, logger="horsies.send"):
        asyncio.run(send_twice())
        add.send(5, 6)
    assert caplog.text.count("blocks the running event loop; write `await add_") == 1
    app.close()


@pytest.mark.usefixtures("connection")  # no worker of another test is on record
def test_waits_that_block_are_answered(process_url: str) -> None:
    app = app_at(process_url)
    handle = app.task("add")(add_two).send(1, 2).unwrap()

    async def wait() -> Any:
        return handle.get()

    refused: Any = asyncio.run(wait()).err_value
    assert "would block the running event loop; write `await handle.get_async()`" in refused.message
    unserved: Any = handle.get(timeout_ms=50).err_value
    assert "no live worker serves queue 'default'" in unserved.message
    app.close()


def test_a_wait_inside_a_task_is_reported_once(
    process_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "_reported", set())
    app = app_at(process_url)
    add = app.task("add")(add_two)

    @app.task("outer")
    def outer() -> str:
        handle = add.send(1, 2).unwrap()
        return f"{handle.get(timeout_ms=20)} {handle.get(timeout_ms=20)}"

    with caplog.at_level(logging.WARNING, logger="horsies.wait"):
        assignment = Assignment("task-1", 1, "outer", 1, "[]", "{}", None)
        set_running_task(CurrentTask(assignment, time.time()))
        try:
            execute(app, assignment)
        finally:
            set_running_task(None)
    assert caplog.text.count("task 'outer' waits for task") == 1
    app.close()
