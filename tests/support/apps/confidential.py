"""Tasks whose payload is confidential or large; the environment names the keys and the store of their
application.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from horsies import (
    AsyncTaskTransaction,
    Batch,
    Durable,
    FernetCodec,
    Horsies,
    MapNode,
    PayloadStore,
    RetryPolicy,
    S3Store,
    SignalNode,
    SubWorkflowNode,
    TableStore,
    TaskError,
    TaskFailed,
    TaskNode,
    TaskResult,
    TaskTransaction,
    WorkflowSpec,
    current_task,
)
from horsies.workflow.definition import WorkflowDefinition
from tests.support.apps.programs import read_config, write_down
from tests.support.file_store import FileStore
from tests.support.s3_server import PREFIX

KEYS_VARIABLE = "HORSIES_TEST_KEYS"
# The store: "table", a directory, or the URL of a bucket.
STORE_VARIABLE = "HORSIES_TEST_STORE"
# This text is in every argument, value, message, note and log line.
SECRET = "S3CRET"
AGAIN = RetryPolicy.fixed([0.02] * 200, auto_retry_for=["WORKER_CRASHED"], jitter=False)
logger = logging.getLogger("confidential")


def make(keys: Sequence[str], **changes: Any) -> Horsies:
    """Return an application with these keys, or without a codec; ``changes`` override fields of its
    PostgresConfig.
    """
    config = read_config()
    codec = FernetCodec(keys) if keys else None
    broker = config.broker.model_copy(update={"codec": codec, **changes})
    app = Horsies(config.model_copy(update={"broker": broker}))
    for add in (_add_tasks, _add_large_results, _add_failures, _add_nodes, _add_durable):
        add(app)
    return app


def _add_tasks(app: Horsies) -> None:
    @app.task("greet", retry_policy=AGAIN)
    def greet(name: str, *, greeting: str = "Hello") -> str:
        write_down("greet", name)
        current_task().progress(1, 2, note=f"greets {name}")
        logger.warning("greets %s", name)
        return f"{greeting} {name}"

    @app.task("greet_slowly", retry_policy=AGAIN)
    def greet_slowly(name: str) -> str:
        time.sleep(0.02)
        write_down("greet", name)
        return f"Hello {name}"

    @app.task("greet_async")
    async def greet_async(name: str) -> str:
        return f"Hello {name}"

    @app.task("greet_all", batch=Batch(size=10), retry_policy=AGAIN)
    def greet_all(names: list[str]) -> list[str]:
        logger.warning("greets %s", names)
        return [f"Hello {name}" for name in names]

    @app.task("echo")
    def echo(value: dict[str, str]) -> dict[str, str]:
        return value

    @app.task("book", retry_policy=AGAIN)
    def book(name: str, tx: TaskTransaction) -> str:
        tx.connection.execute("SELECT 1")
        return f"booked {name}"


def _add_large_results(app: Horsies) -> None:
    @app.task("repeat")
    def repeat(text: str, times: int) -> str:
        write_down("repeat", text)
        return text * times

    @app.task("repeat_async")
    async def repeat_async(text: str, times: int) -> str:
        write_down("repeat", text)
        return text * times

    @app.task("repeat_tx")
    def repeat_tx(text: str, times: int, tx: TaskTransaction) -> str:
        tx.connection.execute("SELECT 1")
        write_down("repeat", text)
        return text * times

    @app.task("repeat_tx_async")
    async def repeat_tx_async(text: str, times: int, tx: AsyncTaskTransaction) -> str:
        connection = await tx.connection()
        await connection.execute("SELECT 1")
        write_down("repeat", text)
        return text * times


def _add_failures(app: Horsies) -> None:
    @app.task("stumble", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["BUSY"]))
    def stumble(name: str) -> str:
        raise TaskFailed("BUSY", f"no line for {name}", data={"name": name})

    @app.task("fail")
    def fail(name: str) -> str:
        raise ValueError(f"bad name {name}")

    @app.task("refuse")
    def refuse(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(err=TaskError(error_code="REFUSED", message=name, data=[name]))


def _add_nodes(app: Horsies) -> None:
    @app.task("names")
    def names(first: str, count: int) -> list[str]:
        return [f"{first}-{number}" for number in range(count)]

    @app.task("join")
    def join(texts: list[str]) -> str:
        return "+".join(texts)


def described(name: str) -> str:
    return f"described {name}"


def same(value: dict[str, str]) -> dict[str, str]:
    return value


def failing(name: str) -> str:
    raise ValueError(f"bad step {name}")


def _add_durable(app: Horsies) -> None:
    greet: Any = app.get_task("greet")

    @app.durable("tour", retry_policy=AGAIN)
    def tour(ctx: Durable, name: str, rounds: int = 1) -> str:
        text = ctx.step(described, name)
        child = ctx.start(greet, name)
        try:
            ctx.step(failing, name)
        except Exception as error:
            text += str(error)[:3]
        text += str(ctx.result(child))
        text += ctx.wait_signal("word", str)
        if rounds > 1:
            ctx.continue_as(name, rounds - 1)
        return text

    @app.durable("echo_signal", retry_policy=AGAIN)
    def echo_signal(ctx: Durable, value: dict[str, str]) -> list[dict[str, str]]:
        return [ctx.step(same, value), ctx.wait_signal("word", dict[str, str])]

    @app.durable("pair", retry_policy=AGAIN)
    def pair(ctx: Durable, name: str) -> str:
        text = ctx.step(described, name)
        ctx.sleep(timedelta(seconds=1.1))
        return f"{text} {ctx.wait_signal('word', str)}"


def store_of(place: str) -> dict[str, Any]:
    """Return the settings of an application that keeps payload above 1,000 bytes in this store; "" means
    no store.
    """
    if not place:
        return {}
    return {"store": _store(place), "store_above_bytes": 1_000}


def _store(place: str) -> PayloadStore | TableStore:
    if place == "table":
        return TableStore()
    if place.startswith("http:"):
        endpoint_url, _, bucket = place.rpartition("/")
        return S3Store(bucket, prefix=PREFIX, endpoint_url=endpoint_url)
    return FileStore(place)


app = make(
    [key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key],
    **store_of(os.environ.get(STORE_VARIABLE, "")),
)


class Inner(WorkflowDefinition[list[str]]):
    """A sub-workflow whose output is a list of names."""

    name = "confidential-inner"
    definition_key = "e2e.confidential.inner"

    @classmethod
    def build_with(cls, app: Horsies, *, first: str) -> WorkflowSpec[list[str]]:
        nodes = [TaskNode(app.get_task("names"), kwargs={"first": first, "count": 2})]  # type: ignore[arg-type]
        return app.workflow(cls.name, nodes, output=nodes[0], definition_key=cls.definition_key)


def graph(app: Horsies, first: str) -> Any:
    """Map over the lists of a task, a sub-workflow and a signal, and join the results."""
    task: Any = app.get_task
    names = TaskNode(task("names"), kwargs={"first": first, "count": 3})
    inner = SubWorkflowNode(Inner, kwargs={"first": first})
    word = SignalNode("word", value_type=list[str])
    greeted = MapNode(task("greet"), over=names, each="name", kwargs={"greeting": f"Hi {first}"})
    nodes: list[Any] = [names, inner, word, greeted]
    ends = [greeted]
    sources: list[Any] = [inner, word]
    for source in sources:
        mapped = MapNode(task("greet_async"), over=source, each="name")
        nodes.append(mapped)
        ends.append(mapped)
    joined = [
        TaskNode(task("join"), args_from={"texts": one}, waits_for=[one], node_id=f"join-{number}")
        for number, one in enumerate(ends)
    ]
    return app.workflow(
        "confidential", [*nodes, *joined], output=joined[0], definition_key="e2e.confidential"
    )
