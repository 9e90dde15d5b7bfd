"""Catalogue of how operators intervene: parameters, rows, and one object per statement.

Beside the line producer -> SQL -> turn -> child -> report -> result: these switch queues and put a
request in at the start of the line again.
"""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName, QueueState

STEER = StatementFile("queues.sql")


class ResendTask(NamedTuple):
    """Which request to send again, and under which id."""

    id: str
    new_id: str


class ResentTask(NamedTuple):
    """The row a resend met; ``new_id`` is None when nothing was sent."""

    was_status: str
    in_workflow: bool
    new_id: str | None


pause_queue = STEER.declare("pause_queue", QueueName, QueueState)
resume_queue = STEER.declare("resume_queue", QueueName, QueueState)
resend_task = STEER.declare("resend_task", ResendTask, ResentTask)

STEER.complete()
