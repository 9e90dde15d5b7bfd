"""Catalogue of how operators intervene: parameters, rows, and one object per statement.

Beside the line producer -> SQL -> turn -> child -> report -> result: these switch queues, put a
request in at the start of the line again, and call the workers.
"""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName, QueueState

QUEUES = StatementFile("queues.sql")


class ResendTask(NamedTuple):
    """Which request to send again, and under which id."""

    id: str
    new_id: str


class ResentTask(NamedTuple):
    """The row a resend met; ``new_id`` is None when nothing was sent."""

    was_status: str
    in_workflow: bool
    new_id: str | None


class Notification(NamedTuple):
    """A channel and what to say on it."""

    channel: str
    payload: str


class Notified(NamedTuple):
    """That a notification was sent."""

    sent: bool


pause_queue = QUEUES.declare("pause_queue", QueueName, QueueState)
resume_queue = QUEUES.declare("resume_queue", QueueName, QueueState)
resend_task = QUEUES.declare("resend_task", ResendTask, ResentTask)
send_notification = QUEUES.declare("send_notification", Notification, Notified)

QUEUES.complete()
