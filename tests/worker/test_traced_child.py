"""Spans inside a child: around plain and asynchronous tasks, sub-workflows, and broken span processors."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from horsies import AppConfig, Horsies, PostgresConfig, TaskFailed, TracingConfig
from horsies.current_task import CurrentTask, set_running_task, set_running_task_here
from horsies.logs import TaskFilter
from horsies.worker.child.execute import AppProgram
from horsies.worker.protocol import Assignment, ChildReport
from horsies.workflow.build.plan import Parent
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.expand import expand
from horsies.workflow.nodes.nodes import TaskNode
from tests.support.spans import provider as provider
from tests.support.spans import spans as spans

SENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
NOWHERE = PostgresConfig(database_url="postgresql://nobody@127.0.0.1:1/nothing")


def traced_app(**settings: Any) -> Horsies:
    return Horsies(AppConfig(broker=NOWHERE, tracing=TracingConfig(**settings)))


def assigned(name: str, **carrier: str) -> Assignment:
    """A task that was sent with this carrier."""
    details = "\n".join(["", "", "", "", "", "run-1", "node-1", ""])
    stored = f"1\0000\0mail\0{json.dumps({'trace': carrier})}\0{details}"
    return Assignment("id", 1, name, 1, "[]", "{}", None, None, stored)


def run(app: Horsies, name: str, **carrier: str) -> ChildReport:
    """Run a task as a child does, sent with this carrier."""
    assignment = assigned(name, **carrier)
    set_running_task(CurrentTask(assignment, time.time()))
    try:
        return AppProgram(app).execute(assignment)
    finally:
        set_running_task(None)


def test_the_span_is_current_in_plain_and_asynchronous_tasks(spans: InMemorySpanExporter) -> None:
    app = traced_app()

    @app.task("plain")
    def plain() -> int:
        return trace.get_current_span().get_span_context().span_id

    @app.task("coroutine")
    async def coroutine() -> int:
        return trace.get_current_span().get_span_context().span_id

    for name in ("plain", "coroutine"):
        report = run(app, name, traceparent=SENT)
        span = spans.get_finished_spans()[-1]
        assert report.traceparent == f"00-{'a' * 32}-{span.context.span_id:016x}-01"
        assert json.loads(report.result_json)["ok"] == span.context.span_id
        assert dict(span.attributes or {})["horsies.workflow.node"] == "node-1"
    assert not trace.get_current_span().get_span_context().is_valid


class CardDeclined(Exception):
    """An error of the application."""


@pytest.mark.parametrize(
    ("raised", "error_type", "code"),
    [
        (CardDeclined("no"), f"{__name__}.CardDeclined", "UNHANDLED_EXCEPTION"),
        (ZeroDivisionError(), "ZeroDivisionError", "UNHANDLED_EXCEPTION"),
        (TaskFailed("NO_MONEY", "none left"), "NO_MONEY", "NO_MONEY"),
    ],
)
def test_the_error_type_is_the_class_of_the_exception_or_the_code_of_the_task(
    spans: InMemorySpanExporter, raised: Exception, error_type: str, code: str
) -> None:
    app = traced_app()

    @app.task("broken")
    def broken() -> None:
        raise raised

    assert not run(app, "broken", traceparent=SENT).ok
    attributes = dict(spans.get_finished_spans()[-1].attributes or {})
    assert attributes["error.type"] == error_type
    assert attributes["horsies.error_code"] == code


class Stopped:
    """The memory that a task shares with a worker that stops it."""

    stop_requested = True

    def write_progress(self, token: int, done: float, total: float, note: bytes) -> None:
        raise AssertionError("the task reports no progress")


def test_a_stopped_coroutine_leaves_its_span_and_its_log_line_to_the_worker(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    app = traced_app()

    @app.task("waiting")
    async def waiting() -> None:
        await asyncio.Event().wait()

    async def stop() -> bool:
        assignment = assigned("waiting", traceparent=SENT)
        context = contextvars.copy_context()
        context.run(set_running_task_here, CurrentTask(assignment, time.time(), Stopped()))
        coroutine = AppProgram(app).execute_async(assignment)
        running = asyncio.get_running_loop().create_task(coroutine, context=context)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled()

    assert asyncio.run(stop())
    assert not spans.get_finished_spans()
    assert not caplog.records


def test_baggage_is_restored_around_the_task(spans: InMemorySpanExporter) -> None:
    app = traced_app(baggage=True, parent="never")

    @app.task("tenant")
    def tenant() -> str:
        return str(baggage.get_baggage("tenant"))

    report = run(app, "tenant", traceparent=SENT, baggage="tenant=blue")
    assert json.loads(report.result_json)["ok"] == "blue"
    (span,) = spans.get_finished_spans()
    assert span.parent is None


class Broken(SpanProcessor):
    """A span processor that always raises."""

    def on_start(self, span: object, parent_context: object = None) -> None:
        raise RuntimeError("no licence left")


def test_a_broken_span_processor_does_not_keep_a_task_from_running(
    provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.add_span_processor(Broken())
    app = traced_app()

    @app.task("plain")
    def plain() -> int:
        return 1

    report = run(app, "plain")
    assert (report.ok, report.traceparent) == (True, None)
    assert "The span of task 'plain' could not be started." in caplog.text


def test_a_sub_workflow_continues_the_span_of_its_expansion(spans: InMemorySpanExporter) -> None:
    app = traced_app()

    @app.task("plain")
    def plain() -> int:
        return 1

    class Child(WorkflowDefinition[None]):
        name = "child"
        definition_key = "tracing.child"
        only = TaskNode(fn=plain)

    with trace.get_tracer("shop").start_as_current_span("process horsies.expand") as current:
        text = expand(app, Child, {}, Parent(**PARENT)).unwrap()
    (node,) = json.loads(text)["nodes"]
    carrier = json.loads(node["task_options"])["trace"]
    assert f"{current.get_span_context().span_id:016x}" in carrier["traceparent"]


PARENT: dict[str, Any] = {
    "workflow_id": "01a1dd00-0000-7000-8000-000000000000",
    "task_index": 0,
    "root_workflow_id": "01a1dd00-0000-7000-8000-000000000000",
    "depth": 0,
}


@pytest.fixture
def current_span(provider: TracerProvider) -> Iterator[trace.Span]:
    span = trace.get_tracer("shop").start_span("request")
    token = attach(trace.set_span_in_context(span))
    yield span
    detach(token)


def test_log_records_name_the_current_span(current_span: trace.Span) -> None:
    record = logging.makeLogRecord({"msg": "hello"})
    assert TaskFilter().filter(record)
    context = current_span.get_span_context()
    assert vars(record)["trace_id"] == f"{context.trace_id:032x}"
    assert vars(record)["span_id"] == f"{context.span_id:016x}"
