"""The turn: one transaction, one round trip, that records everything that ended and claims what
fits.

The heart of the line. While one turn commits, reports pile up for the next, so batches grow with
load and commits per task fall; an idle worker still answers in one round trip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from horsies.db.connect import is_transient
from horsies.db.query import Step
from horsies.db.together import Together
from horsies.db.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    FailTasks,
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
    together: Together,
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
        return _one_transaction(together, claimer, settlements, pids)
    except psycopg.Error as error:
        if is_transient(error):
            raise
        logger.exception("a turn failed; recording and claiming are tried apart")
    recorded = _record_apart(together, claimer, settlements)
    claimed = _one_transaction(together, claimer, (), pids).claimed
    return Turned(recorded, claimed)


def _one_transaction(
    together: Together,
    claimer: Claimer,
    settlements: Sequence[Settlement],
    pids: Sequence[int],
) -> Turned:
    steps = recording_steps(claimer.worker_id, settlements)
    if pids:
        steps.append((claim_tasks, claimer.wants(pids)))
    answers = together.run(steps)
    claimed = answers.pop() if pids else ()
    return Turned({row.task_id for rows in answers for row in rows}, claimed)


def recording_steps(worker_id: str, settlements: Sequence[Settlement]) -> list[Step]:
    """Return the statements that record these settlements; one per kind, whatever their number."""
    completed = [one for one in settlements if isinstance(one, Completed)]
    failed = [one for one in settlements if isinstance(one, Failed)]
    retried = [one for one in failed if one.delay_seconds is not None]
    steps: list[Step] = []
    if completed:
        steps.append((complete_tasks, _completions(worker_id, completed)))
    if retried:
        steps.append((retry_tasks, _retries(worker_id, retried)))
    if failed:
        steps.append((fail_tasks, _failures(worker_id, failed)))
    return steps


def _record_apart(
    together: Together, claimer: Claimer, settlements: Iterable[Settlement]
) -> set[str]:
    """Record one by one, so that an outcome the database refuses costs only its own text."""
    recorded: set[str] = set()
    for settlement in settlements:
        try:
            recorded |= _one_transaction(together, claimer, [settlement], ()).recorded
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.exception("the outcome of task %s cannot be stored", settlement.task_id)
            plain = without_result(settlement)
            recorded |= _one_transaction(together, claimer, [plain], ()).recorded
    return recorded


def give_back(together: Together, worker_id: str, held_ids: Sequence[str]) -> int:
    """Release what the database says is ours and no child has: user code never saw it."""
    (released,) = together.run([(release_unstarted, ReleaseUnstarted(worker_id, held_ids))])
    return len(released)


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
