"""Recovery: what becomes of tasks in dead hands, and of tasks past their deadline.

Beside the line producer -> SQL -> turn -> child -> report -> result. The reaper in every worker does it
unasked, an operator by hand through the broker. There are no verbs of its own here: a task in dead
hands ends as a crash of its process would, through the same settlement and the same statements, in
the name of the worker that died. Every bite is one transaction, and doing it twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from horsies.codec.results import encode_task_error
from horsies.db.pipeline import Together
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    ExpireTasks,
    ReleaseClaimed,
    expire_tasks,
    release_claimed,
)
from horsies.db.statements.workers import FindStale, Orphan, WakeQueues, find_stale, wake_queues
from horsies.error_codes import OutcomeCode
from horsies.task_result import TaskError
from horsies.tasks.outcome import locking_steps, recording_steps, settle_loss

logger = logging.getLogger("horsies.recover")

RESCUE_BATCH = 200
EXPIRY_BATCH = 500
EXPIRED_RESULT = encode_task_error(
    TaskError(
        error_code=OutcomeCode.TASK_EXPIRED, message="The task did not start before its good_until."
    )
)


def fail_stale(together: Together, stale_seconds: float) -> int:
    """End running tasks that show no life: retried or failed by their policy. Return how many."""
    return settle_found(together, (find_stale, FindStale(stale_seconds, ["RUNNING"], RESCUE_BATCH)))


def requeue_stale(together: Together, stale_seconds: float) -> int:
    """Give back claimed tasks that show no life. Return how many."""
    return settle_found(together, (find_stale, FindStale(stale_seconds, ["CLAIMED"], RESCUE_BATCH)))


def expire_pending(together: Together) -> int:
    """End the tasks that wait past their ``good_until``. Return how many."""
    expired = 0
    while rows := together.run([(expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH))])[0]:
        expired += len(rows)
    return expired


def settle_found(together: Together, look: Step) -> int:
    """Settle all orphans that a look finds, bite by bite. Return how many."""
    settled = 0
    while orphans := together.run([look])[0]:
        changed = settle_orphans(together, orphans)
        if not changed:  # whoever was faster has them; what is left will be found another time
            break
        settled += changed
    return settled


def settle_orphans(together: Together, orphans: Sequence[Orphan]) -> int:
    """Give back what had not started, and end what had as a crash. Return how many were still ours
    to settle.

    The queues are woken in the same transaction: each task held a place that a cap may have kept
    others from.
    """
    steps: list[Step] = []
    by_worker = sorted(orphans, key=attrgetter("worker_id"))
    for worker_id, group in groupby(by_worker, key=attrgetter("worker_id")):
        steps += _settling(worker_id, list(group))
    if not steps:
        return 0
    locking = locking_steps(orphan.workflow_id for orphan in orphans)
    queues = sorted({orphan.queue_name for orphan in orphans})
    answers = together.run([*locking, *steps, (wake_queues, WakeQueues(queues))])
    for orphan in orphans:
        logger.warning("task %s %s was in dead hands", orphan.task_name, orphan.id)
    return sum(len(rows) for rows in answers[len(locking) : -1])


def _settling(worker_id: str, orphans: Sequence[Orphan]) -> list[Step]:
    claimed = [orphan for orphan in orphans if orphan.status == "CLAIMED"]
    running = [orphan for orphan in orphans if orphan.status == "RUNNING"]
    settlements = [settle_loss(_as_claimed(orphan), worker_id) for orphan in running]
    steps = recording_steps(worker_id, settlements)
    if claimed:
        ids = [orphan.id for orphan in claimed]
        generations = [orphan.generation for orphan in claimed]
        steps.append((release_claimed, ReleaseClaimed(worker_id, ids, generations)))
    return steps


def _as_claimed(orphan: Orphan) -> ClaimedTask:
    return ClaimedTask(
        orphan.id,
        orphan.generation,
        orphan.task_name,
        orphan.queue_name,
        orphan.args,
        orphan.kwargs,
        orphan.retry_count,
        orphan.max_retries,
        orphan.task_options,
        orphan.timeout_ms,
        orphan.worker_pid,
        orphan.workflow_id,
    )
