"""Spans of a real worker: parents, links, retries, killed children, workflows; nothing without tracing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psycopg

from tests.support.rows import add_task, insert_raw, row_of
from tests.support.span_file import SPANS_VARIABLE, Span, read_spans
from tests.support.tables import wait_for_status, wait_until_empty
from tests.support.workers import FORKSERVER, Fleet

APPLICATION = "tests.support.apps.traced:app"

Database = psycopg.Connection[Any]


class Traced(NamedTuple):
    """The spans of one worker after its shutdown, and the ids of the tasks that caused them."""

    spans: list[Span]
    ids: dict[str, str]

    def of(self, name: str, **attributes: object) -> list[Span]:
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [
            span
            for span in self.spans
            if span.name == name and wanted.items() <= span.attributes.items()
        ]

    def attempt(self, task_id: str, number: int = 1) -> Span:
        (span,) = (
            span
            for span in self.spans
            if span.attributes.get("messaging.message.id") == task_id
            and span.attributes.get("horsies.attempt") == number
        )
        return span


def test_spans_of_a_worker(
    fleet: Fleet, programs: ModuleType, connection: Database, tmp_path: Path
) -> None:
    path = tmp_path / "spans"
    worker = fleet.start(
        *FORKSERVER,
        *("--log-format", "json"),
        application=APPLICATION,
        config={"tracing": {}},
        environment={SPANS_VARIABLE: str(path)},
    )
    # First, because its child takes the spans that were not exported along.
    ids = {"die": insert_raw(connection, "die", "[]")}
    wait_for_status(connection, ids["die"], "FAILED")
    policy = {"retry_policy": {"max_retries": 1, "intervals": [0.05], "auto_retry_for": ["AGAIN"]}}
    ids |= {name: insert_raw(connection, name, "[]") for name in ("request", "run_flow")}
    ids["stay"] = add_task(connection, task_name="stay", args="[]", timeout_ms=300)
    ids["again"] = add_task(
        connection, task_name="again", args="[]", max_retries=1, task_options=json.dumps(policy)
    )
    sent = programs.app.get_result(ids["request"], 20_000).ok_value
    run_id = programs.app.get_result(ids["run_flow"], 20_000).ok_value
    wait_until_empty(connection)
    again = programs.app.retry_task(sent[0]).unwrap().task_id
    wait_for_status(connection, again, "COMPLETED")
    results = {one: json.loads(row_of(connection, one)["result"])["ok"] for one in (*sent, again)}
    assert worker.stop() == 0
    traced = Traced(read_spans(path), ids)
    check_one_trace(traced, sent, results)
    check_links(traced, sent, again)
    check_retry(traced, connection)
    check_killed(traced)
    check_workflow(traced, connection, run_id)
    check_log(worker.log(), traced.attempt(sent[0]))


def check_one_trace(traced: Traced, sent: list[str], results: dict[str, str]) -> None:
    request = traced.attempt(traced.ids["request"])
    (own,) = traced.of("request")
    assert (request.kind, own.trace, own.parent) == ("CONSUMER", request.trace, request.id)
    for task_id, name in zip(sent[:2], ("look", "look_async"), strict=True):
        (send,) = traced.of(f"send {name}", messaging__message__id=task_id)
        process = traced.attempt(task_id)
        assert (send.kind, send.parent) == ("PRODUCER", own.id)
        assert (process.name, process.kind) == (f"process {name}", "CONSUMER")
        assert (process.parent, process.links) == (send.id, {"send": send.id})
        assert {send.trace, process.trace, results[task_id]} == {request.trace}
        assert process.attributes["messaging.destination.name"] == "default"
        assert process.attributes["horsies.wait_ms"] >= 0


def check_links(traced: Traced, sent: list[str], again: str) -> None:
    request = traced.attempt(traced.ids["request"])
    for task_id in (sent[2], again):
        process = traced.attempt(task_id)
        (send,) = traced.of("send look", messaging__message__id=sent[2 if task_id != again else 0])
        assert process.parent is None
        assert process.trace != request.trace
        assert process.links == {"send": send.id}
    (batch,) = traced.of("send look", messaging__batch__message_count=2)
    assert {traced.attempt(task_id).parent for task_id in sent[3:]} == {batch.id}


def check_retry(traced: Traced, connection: Database) -> None:
    first, second = (traced.attempt(traced.ids["again"], number) for number in (1, 2))
    assert (first.status, first.events) == ("UNSET", ["exception"])
    assert first.attributes["error.type"] == "AGAIN"
    assert first.attributes["horsies.will_retry"] is True
    assert (second.parent, second.links) == (None, {"attempt": first.id})
    rows = connection.execute(
        "SELECT traceparent FROM horsies_task_attempts WHERE task_id = %s ORDER BY attempt",
        (traced.ids["again"],),
    )
    assert [one[:-3] for (one,) in rows] == [first.traceparent, second.traceparent]


def check_killed(traced: Traced) -> None:
    died, stayed = traced.attempt(traced.ids["die"]), traced.attempt(traced.ids["stay"])
    assert (died.status, died.attributes["error.type"]) == ("ERROR", "WORKER_CRASHED")
    assert "messaging.client.id" in died.attributes
    assert (stayed.status, stayed.attributes["error.type"]) == ("ERROR", "TASK_TIMEOUT")


def check_workflow(traced: Traced, connection: Database, run_id: str) -> None:
    (start,) = traced.of("start pair", horsies__workflow__id=run_id)
    nodes = traced.of("process double", horsies__workflow__id=run_id)
    found = sorted(node.attributes["horsies.workflow.node"] for node in nodes)
    assert found == ["first", "second"]
    assert {(node.trace, node.parent) for node in nodes} == {(start.trace, start.id)}


def check_log(log: str, span: Span) -> None:
    lines = [json.loads(line) for line in log.splitlines() if '"looking"' in line]
    found = [line for line in lines if line["task_id"] == span.attributes["messaging.message.id"]]
    assert [(line["trace_id"], line["span_id"], line["queue"]) for line in found] == [
        (span.trace, span.id, "default")
    ]


def test_a_directly_forked_child_exports_its_spans(
    fleet: Fleet, programs: ModuleType, connection: Database, tmp_path: Path
) -> None:
    path = tmp_path / "spans"
    worker = fleet.start(
        application=APPLICATION,
        processes=1,
        config={"tracing": {}},
        environment={SPANS_VARIABLE: str(path)},
    )
    task_id = insert_raw(connection, "look", "[]")
    found = programs.app.get_result(task_id, 20_000).ok_value
    assert worker.stop() == 0
    (span,) = read_spans(path)
    assert (span.name, span.trace) == ("process look", found)
    assert "Overriding" not in worker.log()


def test_without_tracing_nothing_is_stored_and_nothing_imported(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start(application=APPLICATION)
    task_id = insert_raw(connection, "modules", "[]")
    assert programs.app.get_result(task_id, 20_000).ok_value == []
    flow = insert_raw(connection, "run_flow", "[]")
    assert programs.app.get_result(flow, 20_000).is_ok()
    wait_until_empty(connection)
    stored = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE task_options LIKE '%trace%'"
    )
    assert stored.fetchone() == (0,)
    spans = connection.execute("SELECT count(traceparent) FROM horsies_task_attempts")
    assert spans.fetchone() == (0,)
