"""Catalogue of the statements behind changes by operators: pause and resume queues, send tasks again,
notify workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueState
from horsies.encryption import Owner, Payload

QUEUES = StatementFile("queues.sql")


class ResentTask(NamedTuple):
    """The original task of a resend; ``new_id`` is None if no new task was sent."""

    was_status: str
    in_workflow: bool
    was_resent: bool
    is_redacted: bool
    new_id: str | None


class Notified(NamedTuple):
    sent: bool


@QUEUES.statement
def pause_queue(name: str) -> QueueState: ...
@QUEUES.statement
def resume_queue(name: str) -> QueueState: ...
@QUEUES.statement
def resend_tasks(ids: Sequence[str], new_ids: Sequence[str], once: bool) -> ResentTask: ...
@QUEUES.statement
def edit_resent(id: Owner, args: Payload, kwargs: Payload) -> None: ...
@QUEUES.statement
def send_notification(channel: str, payload: str) -> Notified: ...


QUEUES.complete()
