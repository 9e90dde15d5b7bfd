"""The spans of a worker's attempts: spans that children report, and spans that the worker creates for
children that died.

A retry links to the previous attempt, so the spans are stored with the attempts. Only a worker whose
application uses tracing has this object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

import psycopg

from horsies.config.tracing import TracingConfig
from horsies.current_task import CurrentTask
from horsies.db.errors import describe, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statements.traces import read_traces, store_traces
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.outcome import Outcome
from horsies.tracing import killed_span, with_previous
from horsies.worker.protocol import Assignment

logger = logging.getLogger("horsies.worker")


class Traces:
    """Collects the spans of ended attempts until their outcomes are recorded."""

    def __init__(self, settings: TracingConfig, worker_id: str) -> None:
        self._settings = settings
        self._attributes = {"messaging.client.id": worker_id}
        # For each task, the number of the attempt and its span.
        self._ended: dict[str, tuple[int, str]] = {}

    def note(self, task: ClaimedTask, traceparent: str) -> None:
        """Note the span that a child reported for an attempt."""
        self._ended[task.id] = task.retry_count + 1, traceparent

    def close(self, assignment: Assignment, outcome: Outcome, seconds: float | None) -> None:
        """Create the span of an attempt whose child died, or that was stopped."""
        task = CurrentTask(assignment, time.time() - (seconds or 0.0))
        try:
            traceparent = killed_span(
                self._settings,
                task,
                self._attributes,
                outcome.error_code or "",
                outcome.error_message or "",
                will_retry=outcome.delay_seconds is not None,
            )
        except Exception:  # the application's sampler or span processor may raise
            about = {"task_id": assignment.task_id}
            logger.exception(
                "the span of task %s could not be created", about["task_id"], extra=about
            )
            return
        self._ended[assignment.task_id] = assignment.attempt, traceparent

    def store(self, pipeline: Pipeline, recorded: Collection[str]) -> None:
        """Store the spans of the attempts whose outcomes are recorded."""
        found = [(task_id, *self._ended.pop(task_id)) for task_id in recorded & self._ended.keys()]
        if not found:
            return
        ids, attempts, traceparents = map(list, zip(*found, strict=True))
        try:
            pipeline.run([store_traces(ids, attempts, traceparents)])
        except psycopg.Error as error:  # only the links between spans are lost
            if is_transient(error):
                raise
            logger.warning(
                "the spans of %d attempt(s) are not stored: %s", len(ids), describe(error)
            )

    def linked(self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]) -> list[ClaimedTask]:
        """Return the tasks, with the span of the previous attempt in the options of each retried task."""
        retried = [task for task in tasks if task.retry_count]
        if not retried:
            return list(tasks)
        ids, attempts = [one.id for one in retried], [one.retry_count for one in retried]
        (rows,) = pipeline.run([read_traces(ids, attempts)])
        spans = {row.id: row.traceparent for row in rows}
        return [
            task._replace(task_options=with_previous(task.task_options, spans[task.id]))
            if task.id in spans
            else task
            for task in tasks
        ]
