"""Lifecycle events of workers and schedulers for supervisors and tests: one JSON object per line.

Log texts are for people and may be reworded; the names of events are stable. An event is a log record
that carries `extra=as_event(...)`. The command line writes those records, and no others, to the
descriptor named by HORSIES_EVENTS_FD.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

DESCRIPTOR_VARIABLE = "HORSIES_EVENTS_FD"

EventName: TypeAlias = Literal[
    "children_ready",
    "worker_ready",
    "metrics_served",
    "worker_stopping",
    "tasks_interrupted",
    "worker_stopped",
    "worker_failed",
    "worker_frozen",
    "worker_declared_lost",
    "tasks_stopped",
    "child_died",
    "loop_blocked",
    "database_lost",
    "database_back",
    "notifications_lost",
    "notifications_back",
    "workers_lost",
    "outcome_dropped",
    "claim_lost",
    "blocked",
    "outcomes_lost",
    "unknown_task",
    "scheduler_ready",
    "scheduler_database_lost",
    "scheduler_stopped",
    "slots_sent",
    "slots_dropped",
    "schedule_taken",
]

logger = logging.getLogger("horsies.events")


def as_event(name: EventName, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log call that makes its record an event."""
    return {"event": {"event": name, **fields}}


def attach_event_handler() -> None:
    """Write events to the descriptor that the environment names, if it names one.

    The variable is removed: a process that a task starts does not inherit the descriptor.
    """
    named = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if named is None:
        return
    try:
        handler = EventHandler(int(named))
    except (OSError, ValueError) as error:
        logger.warning("%s=%r is ignored: %s", DESCRIPTOR_VARIABLE, named, error)
        return
    root = logging.getLogger("horsies")
    # Events do not depend on the log level, so the level moves from the logger to the log's own handlers.
    level = root.getEffectiveLevel()
    for known in root.handlers:
        known.setLevel(max(known.level, level))
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO))
    os.register_at_fork(after_in_child=handler.detach)


def event_descriptors() -> tuple[int, ...]:
    """Return the descriptor that the environment names, for a process that is to write the events instead.

    An unusable one is left out: that process warns about it.
    """
    try:
        descriptor = int(os.environ[DESCRIPTOR_VARIABLE])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):
        return ()
    return (descriptor,) if descriptor > 2 else ()


class EventHandler(logging.Handler):
    """Writes events to a descriptor; a full pipe loses events instead of stopping the worker."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        if 0 <= descriptor <= 2:
            # Children write to them: they would lose the stream, or fail when its reader is slow.
            raise ValueError("a standard stream is shared with child processes")
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's event, if it carries one."""
        event = getattr(record, "event", None)
        if not isinstance(event, dict):
            return
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "pid": record.process, **event}, default=str)
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())

    def detach(self) -> None:
        """Leave a forked child without the handler and the descriptor, which are its parent's."""
        root = logging.getLogger("horsies")
        if self in root.handlers:
            root.removeHandler(self)
            os.close(self._descriptor)
