"""Statements for tasks that a worker cannot call and that wait for a worker that can."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

REFUSALS = StatementFile("refusals.sql")
REFUSALS_TABLE = "horsies_refusals"
# Before the id of a key, in place of a fingerprint: the payload is encrypted with a key that a worker lacks.
KEY_REFUSAL = "key:"
# After the id, if the key does not decrypt the payload. No worker lists such a key, so none counts as able to
# run it.
DAMAGED = ":damaged"
# After the id of a store that does not answer.
UNREACHABLE = ":unreachable"


class RefusedTask(NamedTuple):
    """A task, and for how many seconds workers with this fingerprint skip it."""

    id: str
    fingerprint: str
    seconds: float


class Taker(NamedTuple):
    """Whether another worker may run a task, whether it is too early to fail it, and whether it is the run of
    a durable function with recorded steps, which waits without a limit.
    """

    id: str
    is_known: bool
    is_recent: bool
    has_record: bool = False


class RefusedCalls(NamedTuple):
    """Due tasks of one name that no worker on their queue can call, and the newest message from one of
    them.

    ``is_known`` says whether one of the queue's workers has the task or sub-workflow; ``missing_key`` is
    the key of its payload, if none of them has it, or with ``DAMAGED`` if it does not decrypt it.
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
