"""An application without a database; the specification tests make nodes of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from horsies import (
    AnyNode,
    AppConfig,
    CustomQueueConfig,
    ErrorCode,
    Horsies,
    HorsiesError,
    MultipleValidationErrors,
    PostgresConfig,
    QueueMode,
    RetryPolicy,
    TaskError,
    TaskResult,
    WorkflowContext,
    WorkflowMeta,
    WorkflowSpec,
)

BROKER = PostgresConfig(database_url="postgresql://shop@127.0.0.1:1/shop")
app = Horsies(AppConfig(broker=BROKER))


@app.task("number")
def number(n: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=n)


@app.task("word")
def word(text: str = "") -> TaskResult[str, TaskError]:
    return TaskResult(ok=text)


@app.task("numbers")
def numbers() -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=[1, 2, 3])


@app.task("double")
def double(value: TaskResult[int, TaskError], factor: int = 2) -> TaskResult[int, TaskError]:
    return TaskResult(ok=value.ok_value * factor)


@app.task("maybe_double")
def maybe_double(value: TaskResult[int, TaskError] | None = None) -> TaskResult[int, TaskError]:
    return TaskResult(ok=0 if value is None else value.ok_value * 2)


@app.task("square")
def square(item: int, offset: int = 0) -> TaskResult[int, TaskError]:
    return TaskResult(ok=item * item + offset)


@app.task(
    "total", retry_policy=RetryPolicy.fixed([1, 2], auto_retry_for=["BUSY"]), timeout_ms=5_000
)
def total(
    results: TaskResult[list[TaskResult[int, TaskError]], TaskError],
) -> TaskResult[int, TaskError]:
    return TaskResult(ok=sum(result.ok_value for result in results.ok_value))


@app.task("report")
def report(
    title: str,
    workflow_ctx: WorkflowContext | None = None,
    workflow_meta: WorkflowMeta | None = None,
) -> TaskResult[str, TaskError]:
    return TaskResult(ok=title)


@app.task("anything")
def anything(**values: Any) -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


@app.task("picky")
def picky(a: int, b: int, /, c: int) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b + c)


def workflow(tasks: Iterable[AnyNode], name: str = "shop", **options: Any) -> WorkflowSpec[Any]:
    """Build a workflow of these nodes through the application."""
    key = options.pop("definition_key", "shop.v1")
    spec: WorkflowSpec[Any] = app.workflow(name, tasks, definition_key=key, **options)
    return spec


def queued_app(*queues: CustomQueueConfig) -> Horsies:
    """An application with its own queues."""
    return Horsies(
        AppConfig(broker=BROKER, queue_mode=QueueMode.CUSTOM, custom_queues=list(queues))
    )


def errors_of(build: Callable[[], object]) -> list[HorsiesError]:
    """Return the errors that ``build`` raises; there must be at least one."""
    with pytest.raises(HorsiesError) as caught:
        build()
    error = caught.value
    return error.report.errors if isinstance(error, MultipleValidationErrors) else [error]


def codes_of(build: Callable[[], object]) -> list[ErrorCode]:
    """Return the codes of the errors that ``build`` raises."""
    return [error.code for error in errors_of(build)]
