"""Statements for operator actions: pause and resume queues, resend tasks, ping workers."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName, QueueState

QUEUES = StatementFile("queues.sql")


class ResendTask(NamedTuple):
    id: str
    new_id: str


class ResentTask(NamedTuple):
    """The task to resend; ``new_id`` is None when it was not sent again."""

    was_status: str
    in_workflow: bool
    new_id: str | None


class Notification(NamedTuple):
    channel: str
    payload: str


class Notified(NamedTuple):
    sent: bool


pause_queue = QUEUES.declare("pause_queue", QueueName, QueueState)
resume_queue = QUEUES.declare("resume_queue", QueueName, QueueState)
resend_task = QUEUES.declare("resend_task", ResendTask, ResentTask)
send_notification = QUEUES.declare("send_notification", Notification, Notified)

QUEUES.complete()
