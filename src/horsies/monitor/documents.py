"""JSON documents for queues, workers, tasks, schedules and pages, for the command line's ``--json`` and
the JSON API. A run's document is in ``horsies.workflow.run.listing``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.keys import KeyState
from horsies.db.statements.monitor import WorkerSummary
from horsies.db.statements.schedules import ScheduleState
from horsies.logs import escape_json
from horsies.monitor.health import WorkerPong
from horsies.monitor.overview import Overview, QueueOverview, TaskReport, health_of
from horsies.monitor.paging import Page

_PAYLOAD_FIELDS = ("args", "kwargs", "result")


def json_text(value: Any, *, ascii_only: bool = False) -> str:
    """Return a JSON document: stable keys, times in UTC, numbers rounded to thousandths."""
    return escape_json(json.dumps(json_value(value), indent=2, ensure_ascii=ascii_only))


def json_value(value: Any) -> Any:
    """Return plain JSON values: times as text in UTC, enum members by value."""
    match value:
        case Enum():
            return value.value
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case float():
            return round(value, 3)
        case dict():
            return {name: json_value(part) for name, part in value.items()}
        case list() | tuple():
            return [json_value(part) for part in value]
        case _:
            return value


def stored_json(text: str | None) -> Any:
    """Parse stored JSON; return any other text unchanged."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def page_document(page: Page[Any], key: str) -> dict[str, Any]:
    """Return a page of a list as a JSON object, without ages, which would differ in every response."""
    rows = [asdict(row) for row in page.rows]
    for row in rows:
        del row["age_seconds"]
    return {key: rows, "next_before": page.next_cursor, "looked_at_all": page.looked_at_all}


def overview_document(overview: Overview) -> dict[str, Any]:
    first = [blocked_document(row) for row in overview.blocked]
    return {
        "queues": [queue_document(queue) for queue in overview.queues],
        "workers": [worker_document(worker) for worker in overview.workers],
        "blocked": {"count": overview.blocked_count, "first": first},
    }


def queue_document(queue: QueueOverview) -> dict[str, Any]:
    # Without `asdict`, which would copy every value of thousands of queues.
    document = {name: getattr(queue, name) for name in QueueOverview.__dataclass_fields__}
    return {"name": queue.name, "paused": queue.paused_at is not None, **document}


def key_document(state: KeyState) -> dict[str, Any]:
    document = state._asdict()
    fifo = {"order": "fifo" if document.pop("is_fifo") else "parallel"}
    after = {"on_failure": "halt" if document.pop("halts") else "go_on"}
    return document | fifo | after | {"paused": state.is_paused}


def worker_document(worker: WorkerSummary, pong: WorkerPong | None = None) -> dict[str, Any]:
    document = snapshot_document(worker._asdict())
    document = {"id": document.pop("worker_id"), "state": health_of(worker), **document}
    return document | {"memory_mb": worker.memory_mb, "ping_ms": pong.latency_ms if pong else None}


def snapshot_document(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"receives_notifications": facts.pop("hears")}


def blocked_document(row: BlockedRow) -> dict[str, Any]:
    document = asdict(row)
    del document["blocked_seconds"], document["total"]
    return document


def task_document(report: TaskReport, payload: bool) -> dict[str, Any]:
    """Return one task with its attempts; ``payload`` adds the arguments and the result."""
    document = report.task._asdict()
    del document["age_seconds"]  # The age changes with every call.
    document["options"] = stored_json(document.pop("task_options"))
    for name in _PAYLOAD_FIELDS:
        stored = stored_json(document.pop(name))
        if payload:
            document[name] = stored
    attempts = [asdict(attempt) for attempt in report.attempts]
    document["progress"] = None if report.progress is None else asdict(report.progress)
    reasons = {"waits_because": report.waits_because, "transaction": report.transaction}
    return document | {"attempts": attempts} | reasons


def schedule_document(state: ScheduleState) -> dict[str, Any]:
    document = {"name": state.name, "paused": state.is_paused, **state._asdict()}
    timings = {name: stored_json(document[name]) for name in ("timing", "original_timing")}
    return document | timings
