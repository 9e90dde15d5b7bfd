"""Spans of slots: roots, which the tasks and runs of a schedule link to."""

from __future__ import annotations

import json

from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from horsies import TracingConfig
from tests.support.database import Database
from tests.support.scheduling import (
    MakeApp,
    ago,
    enter,
    make_due,
    schedule,
    tasks,
    tick,
    workflow_schedule,
)
from tests.support.spans import provider as provider
from tests.support.spans import spans as spans


def test_a_slot_has_a_span_of_its_own(
    connection: Database, make_app: MakeApp, spans: InMemorySpanExporter
) -> None:
    app = make_app(schedule(kwargs={"text": "hello"}), tracing=TracingConfig())
    registry = enter(connection, app)
    assert spans.get_finished_spans() == (), "checks make no span"
    make_due(connection, ago(connection, 0))
    with trace.get_tracer("shop").start_as_current_span("unrelated"):
        tick(connection, registry)
    send, _ = spans.get_finished_spans()
    (task,) = tasks(connection)
    assert (send.name, send.parent) == ("send note", None)
    assert dict(send.attributes or {})["horsies.schedule.name"] == "report"
    carrier = json.loads(task["task_options"])["trace"]
    assert f"{send.context.span_id:016x}" in carrier["traceparent"]
    assert carrier["later"] == "1"


def test_the_run_of_a_slot_carries_the_span_to_its_nodes(
    connection: Database, make_app: MakeApp, spans: InMemorySpanExporter
) -> None:
    registry = enter(connection, make_app(workflow_schedule(), tracing=TracingConfig()))
    make_due(connection, ago(connection, 0))
    tick(connection, registry)
    (start,) = spans.get_finished_spans()
    assert (start.name, start.parent) == ("start books", None)
    rows = connection.execute(
        "SELECT task_options FROM horsies_workflow_tasks WHERE kind NOT IN ('sleep', 'signal')"
    )
    carriers = [json.loads(options)["trace"] for (options,) in rows]
    assert carriers
    assert all(f"{start.context.span_id:016x}" in one["traceparent"] for one in carriers)
