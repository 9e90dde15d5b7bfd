"""Spans of sends and starts, and the carrier that they store with tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from horsies import AppConfig, Horsies, PostgresConfig, TaskNode, TracingConfig, tracing
from horsies.current_task import CurrentTask
from horsies.errors import ConfigurationError
from horsies.worker.protocol import Assignment
from horsies.workflow.build.plan import fingerprints, plan, with_trace
from tests.support.applications import add_task
from tests.support.database import Database
from tests.support.rows import finish, row_of, stored
from tests.support.spans import provider as provider
from tests.support.spans import spans as spans

UNREACHABLE = "postgresql://app@127.0.0.1:1/shop"


@pytest.fixture
def traced(process_url: str, connection: Database) -> Iterator[Horsies]:
    broker = PostgresConfig(database_url=process_url, pool_size=1)
    app = Horsies(AppConfig(broker=broker, tracing=TracingConfig()))
    yield app
    app.close()


def carrier_of(connection: Database, task_id: str) -> Any:
    return json.loads(row_of(connection, task_id)["task_options"]).get("trace")


def test_a_send_stores_its_span(
    traced: Horsies, connection: Database, spans: InMemorySpanExporter
) -> None:
    add = add_task(traced)
    with trace.get_tracer("shop").start_as_current_span("request") as request:
        now, later = add.send(1, b=2).unwrap(), add.schedule(60, 1).unwrap()
    first, _, _ = spans.get_finished_spans()
    assert [first.name, first.kind, first.status.status_code] == [
        "send add",
        trace.SpanKind.PRODUCER,
        StatusCode.UNSET,
    ]
    assert first.parent == request.get_span_context()
    assert dict(first.attributes or {}) == {
        "messaging.system": "horsies",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "default",
        "messaging.message.body.size": 10,
        "messaging.message.id": now.task_id,
        "horsies.task.name": "add",
    }
    assert f"{first.context.span_id:016x}" in carrier_of(connection, now.task_id)["traceparent"]
    assert "later" not in carrier_of(connection, now.task_id)
    assert carrier_of(connection, later.task_id)["later"] == "1"


def test_a_repeated_request_is_recognised_in_another_trace(
    traced: Horsies, spans: InMemorySpanExporter
) -> None:
    add = add_task(traced).with_options(idempotency_key="order-1")
    with trace.get_tracer("shop").start_as_current_span("first"):
        first = add.send(1).unwrap()
    with trace.get_tracer("shop").start_as_current_span("second"):
        assert add.send(1).unwrap().task_id == first.task_id


def test_a_send_that_stores_nothing_is_an_error(spans: InMemorySpanExporter) -> None:
    app = Horsies(
        AppConfig(broker=PostgresConfig(database_url=UNREACHABLE), tracing=TracingConfig())
    )
    error = add_task(app).send(1).unwrap_err()
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == error.code.value
    assert error.payload is not None
    assert '"trace"' in error.payload.task_options, "a retry of the send stays in the trace"
    app.close()


def test_without_tracing_a_send_stores_no_carrier(
    app: Horsies, connection: Database, spans: InMemorySpanExporter
) -> None:
    with trace.get_tracer("shop").start_as_current_span("request"):
        sent = add_task(app).send(1).unwrap()
    assert carrier_of(connection, sent.task_id) is None
    assert [span.name for span in spans.get_finished_spans()] == ["request"]


def test_a_task_that_is_sent_again_begins_a_trace_of_its_own(
    traced: Horsies, connection: Database, spans: InMemorySpanExporter
) -> None:
    task_id = add_task(traced).send(1).unwrap().task_id
    finish(connection, task_id)
    again = traced.retry_task(task_id).unwrap().task_id
    assert carrier_of(connection, again) == {**carrier_of(connection, task_id), "later": "1"}


def test_every_task_of_a_run_carries_the_span_of_its_start(
    traced: Horsies, connection: Database, spans: InMemorySpanExporter
) -> None:
    add = add_task(traced)
    first = TaskNode(fn=add, kwargs={"a": 1}, node_id="first")
    second = TaskNode(fn=add, kwargs={"a": 2}, node_id="second", waits_for=[first])
    spec = traced.workflow(name="pair", definition_key="pair", tasks=[first, second])
    run = spec.start().unwrap()
    (span,) = spans.get_finished_spans()
    assert span.name == "start pair"
    rows = connection.execute("SELECT task_options FROM horsies_workflow_tasks")
    carriers = [json.loads(options)["trace"]["traceparent"] for (options,) in rows]
    assert carriers == [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-03"] * 2
    assert spec.start(workflow_id=run.workflow_id).is_ok(), "another trace is the same run"
    text = with_trace(plan(spec, run.workflow_id), {"traceparent": "x"})
    assert json.loads(text)["fingerprint"] == fingerprints(spec)[0]
    assert len(stored(connection)) == 1


def test_large_carriers_lose_their_baggage_then_their_state() -> None:
    parent = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    state, baggage = {"tracestate": "s" * 600}, {"baggage": "b" * 600}
    kept = tracing.stored_carrier
    assert kept(parent | state | baggage, keeps_baggage=True) == parent | state
    assert kept(parent | baggage, keeps_baggage=True) == parent | baggage
    assert kept(parent | baggage, keeps_baggage=False) == parent
    assert kept(parent | {"tracestate": "s" * 2_000}, keeps_baggage=False) == parent
    assert kept({"other": "o" * 2_000}, keeps_baggage=False) == {}


def test_options_that_were_edited_by_hand_do_not_stop_a_retry() -> None:
    linked = tracing.with_previous
    assert linked(None, "span") == '{"trace":{"previous":"span"}}'
    for carrier in ('"text"', "null", "[1]"):
        assert linked(f'{{"trace":{carrier}}}', "span") == '{"trace":{"previous":"span"}}'
    for options in ("null", "[]", "no JSON", "[" * 100_000):
        assert linked(options, "span") == options


@pytest.mark.parametrize(
    ("parent", "attempt", "carrier", "schedule", "expected"),
    [
        ("auto", 1, {}, "", True),
        ("auto", 2, {}, "", False),
        ("auto", 1, {"later": "1"}, "", False),
        ("auto", 1, {}, "nightly", False),
        ("always", 2, {"later": "1"}, "nightly", True),
        ("never", 1, {}, "", False),
    ],
)
def test_first_attempts_of_plain_sends_are_children(
    parent: str, attempt: int, carrier: dict[str, str], schedule: str, expected: bool
) -> None:
    details = "\n".join(["", "", "", "", "", "", "", schedule])
    assigned = Assignment(
        "id", 1, "add", attempt, "[]", "{}", None, None, f"1\0000\0q\0{{}}\0{details}"
    )
    assert tracing.is_child(parent, CurrentTask(assigned, 0.0), carrier) is expected


def test_tracing_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        return None if name.startswith("opentelemetry") else find_spec(name)

    monkeypatch.setattr("horsies.config.tracing.find_spec", find)
    with pytest.raises(ConfigurationError) as refused:
        TracingConfig()
    assert "horsies[otel]" in str(refused.value)
