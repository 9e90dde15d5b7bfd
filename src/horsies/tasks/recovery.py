"""Recovery: end or release tasks whose worker is gone, and expire tasks past their deadline.

The reaper in every worker calls this, and an operator can through the broker. A recovered task ends
as a crash of its process would, through the same outcome and the same statements, in the name of
the lost worker. Every batch is one transaction, and repeating one changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from horsies.codec.results import encode_task_error
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import ExpireTasks, ReleaseClaimed, expire_tasks, release_claimed
from horsies.db.statements.workers import (
    AbandonedTask,
    FindStale,
    WakeQueues,
    find_stale,
    wake_queues,
)
from horsies.error_codes import OutcomeCode
from horsies.task_result import TaskError
from horsies.tasks.outcome import locking_steps, outcome_of_loss, recording_steps

logger = logging.getLogger("horsies.recover")

RECOVERY_BATCH = 200
EXPIRY_BATCH = 500
EXPIRED_RESULT = encode_task_error(
    TaskError(
        error_code=OutcomeCode.TASK_EXPIRED, message="The task did not start before its good_until."
    )
)


def fail_stale(pipeline: Pipeline, stale_seconds: float) -> int:
    """End stale RUNNING tasks, retried or failed by their policy. Return their number."""
    return recover_found(
        pipeline, (find_stale, FindStale(stale_seconds, ["RUNNING"], RECOVERY_BATCH))
    )


def requeue_stale(pipeline: Pipeline, stale_seconds: float) -> int:
    """Return stale CLAIMED tasks to their queues. Return their number."""
    return recover_found(
        pipeline, (find_stale, FindStale(stale_seconds, ["CLAIMED"], RECOVERY_BATCH))
    )


def expire_pending(pipeline: Pipeline) -> int:
    """Expire PENDING tasks past their ``good_until``. Return their number."""
    expired = 0
    while rows := pipeline.run([(expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH))])[0]:
        expired += len(rows)
    return expired


def recover_found(pipeline: Pipeline, find: Step) -> int:
    """Recover all abandoned tasks that a statement finds, batch by batch. Return their number."""
    recovered = 0
    while abandoned := pipeline.run([find])[0]:
        changed = recover_tasks(pipeline, abandoned)
        if not changed:  # another process recovered them first; the next round finds the rest
            break
        recovered += changed
    return recovered


def recover_tasks(pipeline: Pipeline, abandoned: Sequence[AbandonedTask]) -> int:
    """Release the tasks that had not started and end the others as crashed. Return how many rows
    changed.

    The same transaction wakes the queues: each task held a place that a cap may have denied to
    others.
    """
    steps: list[Step] = []
    by_worker = sorted(abandoned, key=attrgetter("worker_id"))
    for worker_id, group in groupby(by_worker, key=attrgetter("worker_id")):
        found = list(group)
        running = [task for task in found if task.status == "RUNNING"]
        steps += recording_steps(worker_id, [outcome_of_loss(task) for task in running])
        if claimed := [task for task in found if task.status == "CLAIMED"]:
            ids = [task.id for task in claimed]
            generations = [task.generation for task in claimed]
            steps.append((release_claimed, ReleaseClaimed(worker_id, ids, generations)))
    if not steps:
        return 0
    locking = locking_steps(task.workflow_id for task in abandoned)
    queues = sorted({task.queue_name for task in abandoned})
    answers = pipeline.run([*locking, *steps, (wake_queues, WakeQueues(queues))])
    for task in abandoned:
        logger.warning("recovered task %s %s: its worker is gone", task.task_name, task.id)
    return sum(len(rows) for rows in answers[len(locking) : -1])
