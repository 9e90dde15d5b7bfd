"""Catalogue of how operators intervene: parameters, rows, and one object per statement.

Beside the line producer -> SQL -> turn -> child -> report -> result: these switch queues, put a
request in at the start of the line again, and call the workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from horsies.db.monitor import QueueName, QueueState
from horsies.db.query import StatementFile

STEER = StatementFile("steer.sql")


@dataclass(frozen=True, slots=True)
class ResendTask:
    """Which request to send again, and under which id."""

    id: str
    new_id: str


@dataclass(frozen=True, slots=True)
class ResentTask:
    """The row a resend met; ``new_id`` is None when nothing was sent."""

    was_status: str
    in_workflow: bool
    new_id: str | None


@dataclass(frozen=True, slots=True)
class Notification:
    """A channel and what to say on it."""

    channel: str
    payload: str


@dataclass(frozen=True, slots=True)
class Notified:
    """That a notification was sent."""

    sent: bool


pause_queue = STEER.declare("pause_queue", QueueName, QueueState)
resume_queue = STEER.declare("resume_queue", QueueName, QueueState)
resend_task = STEER.declare("resend_task", ResendTask, ResentTask)
send_notification = STEER.declare("send_notification", Notification, Notified)

STEER.complete()
