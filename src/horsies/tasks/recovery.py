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
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    ExpireTasks,
    ReleaseClaimed,
    expire_tasks,
    release_claimed,
)
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
    """End running tasks that show no life: retried or failed by their policy. Return how many."""
    return recover_found(
        pipeline, (find_stale, FindStale(stale_seconds, ["RUNNING"], RECOVERY_BATCH))
    )


def requeue_stale(pipeline: Pipeline, stale_seconds: float) -> int:
    """Give back claimed tasks that show no life. Return how many."""
    return recover_found(
        pipeline, (find_stale, FindStale(stale_seconds, ["CLAIMED"], RECOVERY_BATCH))
    )


def expire_pending(pipeline: Pipeline) -> int:
    """End the tasks that wait past their ``good_until``. Return how many."""
    expired = 0
    while rows := pipeline.run([(expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH))])[0]:
        expired += len(rows)
    return expired


def recover_found(pipeline: Pipeline, look: Step) -> int:
    """Settle all orphans that a look finds, bite by bite. Return how many."""
    settled = 0
    while abandoned := pipeline.run([look])[0]:
        changed = recover_tasks(pipeline, abandoned)
        if not changed:  # whoever was faster has them; what is left will be found another time
            break
        settled += changed
    return settled


def recover_tasks(pipeline: Pipeline, abandoned: Sequence[AbandonedTask]) -> int:
    """Give back what had not started, and end what had as a crash. Return how many were still ours
    to settle.

    The queues are woken in the same transaction: each task held a place that a cap may have kept
    others from.
    """
    steps: list[Step] = []
    by_worker = sorted(abandoned, key=attrgetter("worker_id"))
    for worker_id, group in groupby(by_worker, key=attrgetter("worker_id")):
        steps += _recovering_steps(worker_id, list(group))
    if not steps:
        return 0
    locking = locking_steps(task.workflow_id for task in abandoned)
    queues = sorted({task.queue_name for task in abandoned})
    answers = pipeline.run([*locking, *steps, (wake_queues, WakeQueues(queues))])
    for task in abandoned:
        logger.warning("task %s %s was in dead hands", task.task_name, task.id)
    return sum(len(rows) for rows in answers[len(locking) : -1])


def _recovering_steps(worker_id: str, abandoned: Sequence[AbandonedTask]) -> list[Step]:
    claimed = [task for task in abandoned if task.status == "CLAIMED"]
    running = [task for task in abandoned if task.status == "RUNNING"]
    outcomes = [outcome_of_loss(_as_claimed(task), worker_id) for task in running]
    steps = recording_steps(worker_id, outcomes)
    if claimed:
        ids = [task.id for task in claimed]
        generations = [task.generation for task in claimed]
        steps.append((release_claimed, ReleaseClaimed(worker_id, ids, generations)))
    return steps


def _as_claimed(task: AbandonedTask) -> ClaimedTask:
    return ClaimedTask(
        task.id,
        task.generation,
        task.task_name,
        task.queue_name,
        task.args,
        task.kwargs,
        task.retry_count,
        task.max_retries,
        task.task_options,
        task.timeout_ms,
        task.worker_pid,
        task.workflow_id,
    )
