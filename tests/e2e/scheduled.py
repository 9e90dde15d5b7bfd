"""The application of the schedulers in these tests: that of the workers, and a task that knows its slot."""

from __future__ import annotations

from datetime import datetime

from horsies import TaskError, TaskResult
from tests.e2e.programs import app, write_down

__all__ = ["app"]


@app.task("note_slot")
def note_slot(label: str, scheduled_for: datetime | None = None) -> TaskResult[None, TaskError]:
    shown = "" if scheduled_for is None else scheduled_for.isoformat()
    write_down("slot", f"{label} {shown}")
    return TaskResult(ok=None)
