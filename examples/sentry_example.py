"""Sentry around tasks: errors, traces that continue from the sender, and the figures of its Queues page.

``watch(app)`` registers two hooks. ``sentry_sdk.init`` belongs where the processes of the application start;
its background worker survives the fork of a child.
"""

from __future__ import annotations

from collections.abc import Iterator

import sentry_sdk

from horsies import CurrentTask, Horsies, OutgoingTask


def watch(app: Horsies) -> None:
    """Report sends, attempts and final errors of this application to Sentry."""
    app.on_send(publish)
    app.around_task(process)


def publish(outgoing: OutgoingTask) -> None:
    """Record the send, and give its trace to the task as headers."""
    with sentry_sdk.start_span(op="queue.publish", name=outgoing.task_name) as span:
        span.set_data("messaging.destination.name", outgoing.queue_name)
        outgoing.headers["sentry-trace"] = sentry_sdk.get_traceparent() or ""
        outgoing.headers["baggage"] = sentry_sdk.get_baggage() or ""


def process(task: CurrentTask) -> Iterator[None]:
    """Continue the trace of the sender around the task; report an exception once no attempt is left."""
    with sentry_sdk.isolation_scope() as scope:
        scope.set_tag("task", task.name)
        scope.set_tag("task_id", task.id)
        transaction = sentry_sdk.continue_trace(
            dict(task.headers), op="queue.task.horsies", name=task.name
        )
        with (
            sentry_sdk.start_transaction(transaction),
            sentry_sdk.start_span(op="queue.process", name=task.name) as span,
        ):
            span.set_data("messaging.message.id", task.id)
            span.set_data("messaging.destination.name", task.queue)
            span.set_data("messaging.message.retry.count", task.attempt - 1)
            if task.enqueued_at is not None:
                waited = task.started_at - task.enqueued_at
                span.set_data("messaging.message.receive.latency", waited.total_seconds() * 1000)
            try:
                yield
            except Exception as error:
                if task.is_last_attempt:
                    sentry_sdk.capture_exception(error)
                raise
