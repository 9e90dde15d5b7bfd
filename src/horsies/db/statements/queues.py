"""Catalogue of operator actions: pause and resume queues, resend tasks, notify workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName, QueueState

QUEUES = StatementFile("queues.sql")


class ResendTasks(NamedTuple):
    """``once`` leaves tasks alone that were sent again before."""

    ids: Sequence[str]
    new_ids: Sequence[str]
    once: bool


class ResentTask(NamedTuple):
    """The row found by a resend; ``new_id`` is None when nothing was sent."""

    was_status: str
    in_workflow: bool
    was_resent: bool
    new_id: str | None


class Notification(NamedTuple):
    channel: str
    payload: str


class Notified(NamedTuple):
    sent: bool


pause_queue = QUEUES.declare("pause_queue", QueueName, QueueState)
resume_queue = QUEUES.declare("resume_queue", QueueName, QueueState)
resend_tasks = QUEUES.declare("resend_tasks", ResendTasks, ResentTask)
send_notification = QUEUES.declare("send_notification", Notification, Notified)

QUEUES.complete()
