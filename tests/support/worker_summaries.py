"""Rows of workers for unit tests, without a database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from horsies.db.statements.monitor import WorkerSummary

NOW = datetime(2026, 11, 16, 14, 0, tzinfo=UTC)


def worker_summary(**columns: Any) -> WorkerSummary:
    """Return a live worker of the queue mail with two idle children; ``columns`` overrides its columns."""
    live = WorkerSummary(
        worker_id="w/1",
        hostname="vm",
        pid=7,
        processes=2,
        queues=["mail"],
        started_at=NOW,
        seen_at=NOW,
        stopped_at=None,
        was_lost=False,
        hears=True,
        seen_seconds_ago=1.0,
        holds_lock=True,
        tasks_running=0,
        tasks_claimed=0,
        memory_usage_mb=None,
        children_memory_mb=None,
        cpu_percent=None,
    )
    return live._replace(**columns)
