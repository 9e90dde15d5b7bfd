"""The Sentry example, with a transport that keeps the envelopes: one trace from send to attempt."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from horsies import Horsies
from horsies.current_task import CurrentTask, set_running_task
from horsies.worker.child.execute import AppProgram
from horsies.worker.protocol import Assignment
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.rows import row_of


class KeptEnvelopes(Transport):
    """A transport that sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.headers["type"] in ("event", "transaction"):
                self.events.append(json.loads(item.get_bytes()))


@pytest.fixture
def kept() -> Iterator[KeptEnvelopes]:
    transport = KeptEnvelopes()
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=transport,
        traces_sample_rate=1.0,
        default_integrations=False,
        auto_enabling_integrations=False,
        enable_backpressure_handling=False,  # its thread would sleep ten seconds before it ends
    )
    yield transport
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.get_global_scope().set_client(None)


def test_an_attempt_continues_the_trace_of_its_send_and_reports_its_error(
    app: Horsies, connection: Database, kept: KeptEnvelopes
) -> None:
    runpy.run_path(str(REPOSITORY / "examples" / "sentry_example.py"))["watch"](app)

    @app.task("charge")
    def charge() -> int:
        raise ValueError("no card")

    with sentry_sdk.start_transaction(op="http.server", name="POST /orders") as request:
        task_id = charge.send().unwrap().task_id
    row = row_of(connection, task_id)
    stored = f"100\0000\0default\0{row['task_options']}\0" + "\n" * 7
    assignment = Assignment(task_id, 1, "charge", 1, "[]", "{}", None, None, stored)
    set_running_task(CurrentTask(assignment, time.time()))
    try:
        assert AppProgram(app).execute(assignment).error_code == "UNHANDLED_EXCEPTION"
    finally:
        set_running_task(None)
    by_name = {event.get("transaction"): event for event in kept.events if "spans" in event}
    attempt = by_name["charge"]
    assert by_name["POST /orders"]["spans"][0]["op"] == "queue.publish"
    assert attempt["contexts"]["trace"]["trace_id"] == request.trace_id
    (process,) = (span for span in attempt["spans"] if span["op"] == "queue.process")
    assert process["data"]["messaging.message.id"] == task_id
    (error,) = (event for event in kept.events if "exception" in event)
    assert error["tags"]["task_id"] == task_id
