"""Statements for tasks that a worker cannot call and that wait for a worker that can."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

REFUSALS = StatementFile("refusals.sql")
REFUSALS_TABLE = "horsies_refusals"
# The prefix of a text that replaces a fingerprint. The id of an encryption key follows: the payload is
# encrypted with that key, and the worker lacks it.
KEY_REFUSAL = "key:"
# The suffix after a key id if that key does not decrypt the payload. No worker registers a key id with this
# suffix, so no worker counts as able to run the task.
DAMAGED = ":damaged"
# The suffix after the id of a payload store that does not respond.
UNREACHABLE = ":unreachable"


class RefusedTask(NamedTuple):
    """A task to refuse, and for how many seconds workers with this fingerprint skip the task."""

    id: str
    fingerprint: str
    seconds: float


class Taker(NamedTuple):
    """Whether another worker may be able to run a task, and whether it is too early to fail the task.
    ``has_record`` is set for a durable run with recorded steps, which waits without a time limit.
    """

    id: str
    is_known: bool
    is_recent: bool
    has_record: bool = False


class RefusedCalls(NamedTuple):
    """Due tasks of one name that no worker on their queue can call, with the newest message about one of
    them.

    ``is_known`` is set if one of the queue's workers has the task or sub-workflow. ``missing_key`` is the
    encryption key of the payload if none of the workers has that key; if the key does not decrypt the
    payload, ``DAMAGED`` follows it.
    """

    queue_name: str
    name: str
    is_known: bool
    tasks: int
    since: datetime
    message: str
    missing_key: str | None = None


@REFUSALS.statement
def refuse_tasks(
    worker_id: str,
    grace_seconds: float,
    pause_seconds: float,
    ids: Sequence[str],
    fingerprints: Sequence[str],
    messages: Sequence[str],
) -> RefusedTask: ...
@REFUSALS.statement
def find_takers(
    grace_seconds: float,
    ids: Sequence[str],
    kinds: Sequence[str],
    names: Sequence[str],
    queues: Sequence[str],
) -> Taker: ...
@REFUSALS.statement
def list_refused(limit: int) -> RefusedCalls: ...
@REFUSALS.statement
def forget_refusals(ids: Sequence[str]) -> TaskId: ...
@REFUSALS.statement
def delete_refusals() -> TaskId: ...
