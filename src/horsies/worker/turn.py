"""The turn: one transaction, one round trip, that records everything that ended and claims what
fits.

The heart of the line. While one turn commits, reports pile up for the next, so batches grow with
load and commits per task fall; an idle worker still answers in one round trip. The statements
travel in a pipeline without BEGIN and COMMIT: its implicit transaction saves two messages per turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection, Cursor

from horsies.db.connect import is_transient
from horsies.db.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    FailTasks,
    FinishedTask,
    ReleaseUnstarted,
    RetryTasks,
    claim_tasks,
    complete_tasks,
    fail_tasks,
    release_unstarted,
    retry_tasks,
)
from horsies.worker.settle import Completed, Failed, Settlement, without_result

logger = logging.getLogger("horsies.turn")


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who claims: the worker's identity and its queues in the order they are served."""

    worker_id: str
    hostname: str
    queues: Sequence[str]
    max_claim_batch: int = 0

    def wants(self, pids: Sequence[int]) -> ClaimTasks:
        """Return the claim for these idle children."""
        limit = self.max_claim_batch or len(pids)
        return ClaimTasks(
            self.worker_id, self.hostname, pids, self.queues, [limit] * len(self.queues)
        )


@dataclass(frozen=True, slots=True)
class Turned:
    """What a turn did: which outcomes it recorded, and which tasks it claimed."""

    recorded: set[str]
    claimed: Sequence[ClaimedTask]


def take_turn(
    connection: Connection[Any],
    claimer: Claimer,
    settlements: Sequence[Settlement],
    pids: Sequence[int],
) -> Turned:
    """Record the settlements and claim for the idle children, in one transaction.

    Raises what is transient, with nothing assumed about the COMMIT: recording again is harmless. A
    lasting error in one half must not block the other, so then each half runs in a transaction of
    its own.
    """
    try:
        return _one_transaction(connection, claimer, settlements, pids)
    except psycopg.Error as error:
        if is_transient(error) or connection.closed:
            raise
        logger.exception("a turn failed; recording and claiming are tried apart")
    recorded = record_apart(connection, claimer, settlements)
    claimed = _one_transaction(connection, claimer, (), pids).claimed
    return Turned(recorded, claimed)


def _one_transaction(
    connection: Connection[Any],
    claimer: Claimer,
    settlements: Sequence[Settlement],
    pids: Sequence[int],
) -> Turned:
    with connection.pipeline():
        finishing = start_recording(connection, claimer.worker_id, settlements)
        claiming = claim_tasks.start(connection, claimer.wants(pids)) if pids else None
    recorded = {row.task_id for cursor in finishing for row in cursor.fetchall()}
    return Turned(recorded, claiming.fetchall() if claiming else ())


def start_recording(
    connection: Connection[Any], worker_id: str, settlements: Sequence[Settlement]
) -> Sequence[Cursor[FinishedTask]]:
    """Send the statements that record these settlements; one per kind, whatever their number."""
    completed = [one for one in settlements if isinstance(one, Completed)]
    failed = [one for one in settlements if isinstance(one, Failed)]
    cursors = []
    if completed:
        cursors.append(complete_tasks.start(connection, _completions(worker_id, completed)))
    if retried := [one for one in failed if one.delay_seconds is not None]:
        cursors.append(retry_tasks.start(connection, _retries(worker_id, retried)))
    if failed:
        cursors.append(fail_tasks.start(connection, _failures(worker_id, failed)))
    return cursors


def record_apart(
    connection: Connection[Any], claimer: Claimer, settlements: Iterable[Settlement]
) -> set[str]:
    """Record one by one, so that an outcome the database refuses costs only its own text."""
    recorded: set[str] = set()
    for settlement in settlements:
        try:
            recorded |= _one_transaction(connection, claimer, [settlement], ()).recorded
        except psycopg.Error as error:
            if is_transient(error) or connection.closed:
                raise
            logger.exception("the outcome of task %s cannot be stored", settlement.task_id)
            plain = without_result(settlement)
            recorded |= _one_transaction(connection, claimer, [plain], ()).recorded
    return recorded


def give_back(connection: Connection[Any], worker_id: str, held_ids: Sequence[str]) -> int:
    """Release what the database says is ours and no child has: user code never saw it."""
    return len(release_unstarted.run(connection, ReleaseUnstarted(worker_id, held_ids)))


def _column(rows: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    return [read(row) for row in rows]


def _completions(worker_id: str, rows: Sequence[Completed]) -> CompleteTasks:
    return CompleteTasks(
        worker_id,
        _column(rows, lambda row: row.task_id),
        _column(rows, lambda row: row.generation),
        _column(rows, lambda row: row.result),
    )


def _retries(worker_id: str, rows: Sequence[Failed]) -> RetryTasks:
    return RetryTasks(
        worker_id,
        _column(rows, lambda row: row.task_id),
        _column(rows, lambda row: row.generation),
        _column(rows, lambda row: row.delay_seconds),
        _column(rows, lambda row: row.outcome.value),
        _column(rows, lambda row: row.error_code),
        _column(rows, lambda row: row.error_message),
        _column(rows, lambda row: row.failed_reason),
    )


def _failures(worker_id: str, rows: Sequence[Failed]) -> FailTasks:
    return FailTasks(
        worker_id,
        _column(rows, lambda row: row.task_id),
        _column(rows, lambda row: row.generation),
        _column(rows, lambda row: row.status.value),
        _column(rows, lambda row: row.result),
        _column(rows, lambda row: row.outcome.value),
        _column(rows, lambda row: row.error_code),
        _column(rows, lambda row: row.error_message),
        _column(rows, lambda row: row.failed_reason),
    )
