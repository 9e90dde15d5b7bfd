"""Tasks and runs that leave personal data in every place where a task can store something."""

from __future__ import annotations

import logging
import os
from typing import Any

from horsies import (
    Batch,
    Durable,
    Horsies,
    Rate,
    RetryPolicy,
    TableStore,
    TaskFailed,
    current_task,
    tracing,
)
from horsies.workflow.nodes.nodes import SignalNode, TaskNode
from horsies.workflow.spec import WorkflowSpec
from tests.support.apps.programs import read_config
from tests.support.span_file import SPANS_VARIABLE, file_provider

config = read_config()
kept_outside = {"store": TableStore(), "store_above_bytes": 1_000}
app = Horsies(config.model_copy(update={"broker": config.broker.model_copy(update=kept_outside)}))
logger = logging.getLogger("personal")


def make_provider() -> Any:
    """Return a provider that exports each span as soon as it ends."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    return file_provider(SimpleSpanProcessor)


if os.environ.get(SPANS_VARIABLE):
    tracing.install(make_provider)


@app.task("greet", key="customer")
def greet(customer: str) -> str:
    logger.info("greeting %s", customer)
    current_task().progress(1, 2, note=f"half of {customer}")
    return f"hello {customer}"


@app.task(
    "refuse",
    retry_policy=RetryPolicy.fixed([0.01], auto_retry_for=["NOT_NOW"], jitter=False),
)
def refuse(customer: str) -> str:
    logger.warning("refusing %s", customer)
    raise TaskFailed("NOT_NOW", f"not {customer}", data={"customer": customer})


@app.task("crash")
def crash(customer: str) -> str:
    raise ValueError(customer)


@app.task("length")
def length(text: str) -> int:
    return len(text)


@app.task("repeat")
def repeat(text: str) -> str:
    """Return a result as large as the argument."""
    return text


@app.task("remind", rate=Rate(count=1, per_seconds=3_600))
def remind(customer: str) -> None:
    """Send one reminder per hour for all recipients together."""


@app.task("write", rate=Rate(count=1_000, burst=1_000))
def write(customer: str) -> None:
    """The rate never delays a task."""


@app.task("collect", batch=Batch(size=10))
def collect(customers: list[str]) -> None:
    """Handle the tasks of several customers in one call."""


@app.durable("visit")
def visit(ctx: Durable, customer: str) -> str:
    ctx.step(greet_person, customer)
    child = ctx.start(greet, customer)
    word = ctx.wait_signal("word", str)
    return f"{ctx.result(child)} {word}"


def greet_person(customer: str) -> str:
    return f"hello {customer}"


@app.workflow_builder(cases=[{"customer": "bert"}])
def journey(customer: str) -> WorkflowSpec[Any]:
    """Build a run with a signal, a failure and a node that never runs."""
    first = TaskNode(greet, kwargs={"customer": customer})
    word = SignalNode("word", value_type=str, node_id="word")
    broken = TaskNode(refuse, kwargs={"customer": customer}, waits_for=[first])
    never = TaskNode(length, kwargs={"text": customer}, waits_for=[broken])
    return app.workflow("journey", [first, word, broken, never], definition_key="journey.v1")
