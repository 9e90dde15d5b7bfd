"""Log records of a child process: every line written while a task runs names the task.

A child runs one task at a time, so a plain module value serves all of its threads.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from horsies.worker.wire import Assignment

_TEXT_FORMAT = "%(asctime)s %(levelname)-8s %(name)s [%(process)d]%(task_label)s %(message)s"

_current: Assignment | None = None


def configure_logging(log_level: str, log_format: str) -> None:
    """Send everything of `log_level` and above to standard error, unless the app set up logging.

    Whatever handlers exist, records carry ``task_id``, ``task_name``, ``task_attempt``.
    """
    label_records()
    logging.getLogger("horsies").setLevel(log_level.upper())
    root = logging.getLogger()
    if root.handlers or logging.getLogger("horsies").handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT_FORMAT)
    )
    root.addHandler(handler)
    root.setLevel(log_level.upper())


def label_records() -> None:
    """Have every record carry the current task, on top of what the app's record factory does."""
    make_plain_record = logging.getLogRecordFactory()
    if getattr(make_plain_record, "labels_tasks", False):
        return

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        return _label(make_plain_record(*args, **kwargs))

    make_record.labels_tasks = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_record)


def set_current_assignment(assignment: Assignment | None) -> None:
    """From now on records name this task; None ends it."""
    global _current
    _current = assignment


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON text."""
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        for name in ("task_id", "task_name", "task_attempt"):
            value = getattr(record, name, None)
            if value is not None:
                entry[name] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _label(record: logging.LogRecord) -> logging.LogRecord:
    assignment = _current
    if assignment is None:
        record.task_id = record.task_name = record.task_attempt = None
        record.task_label = ""
        return record
    record.task_id = assignment.task_id
    record.task_name = assignment.task_name
    record.task_attempt = assignment.attempt
    record.task_label = f" [{assignment.task_name} {assignment.task_id} #{assignment.attempt}]"
    return record
