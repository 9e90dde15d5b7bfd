"""Recovery: ends or releases tasks whose worker is lost, and expires tasks past their deadline.

Every worker's reaper calls these functions, and operators can call them through the broker. A recovered task
ends as if its process had crashed, with the same statements and the same outcome, which names the lost
worker. Every batch is one transaction, and repeating a batch changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from horsies.codec.results import encode_task_error
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement, Step
from horsies.db.statements.blocked import FoundTask, find_lapsed, find_late, find_late_runs
from horsies.db.statements.durable import CleanedRun, end_late_runs
from horsies.db.statements.tasks import TaskId
from horsies.db.statements.turn import (
    ExpireTasks,
    FinishedTask,
    ReleaseClaimed,
    ReleaseLapsed,
    RetriedTask,
    expire_tasks,
    release_claimed,
    release_lapsed,
)
from horsies.db.statements.workers import (
    AbandonedTask,
    find_stale,
    wake_queues,
)
from horsies.error_codes import OperationalErrorCode, OutcomeCode
from horsies.logs import headers_to_log
from horsies.task_result import TaskError
from horsies.tasks.blocked import Blocked, Change
from horsies.tasks.outcome import locking_steps, outcome_of_loss, recording_steps

logger = logging.getLogger("horsies.recover")

# The outcome of a recovered task, by the kind of row that the statement returned.
_OUTCOMES: dict[type, str] = {
    TaskId: "it is back in its queue",
    CleanedRun: "it was cancelled and continues with its clean-up",
    RetriedTask: "it is retried",
    FinishedTask: f"it failed with {OperationalErrorCode.WORKER_CRASHED.value}",
}

RECOVERY_BATCH = 200
EXPIRY_BATCH = 500
EXPIRED_RESULT = encode_task_error(
    TaskError(
        error_code=OutcomeCode.TASK_EXPIRED, message="The task did not start before its good_until."
    )
)


def refuse_running_loop() -> None:
    """Reject manual recovery inside an event loop, because awaiting its result would fail after the change
    was made.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "No task was changed: inside an event loop, await the async version of this method, such as "
        "`await broker.requeue_stale_claimed_async()`."
    )


def recover_stale(pipeline: Pipeline, stale_seconds: float, status: str) -> int:
    """Retry or fail stale RUNNING tasks according to their policy, or return stale CLAIMED tasks to their
    queues.

    Return the number of tasks.
    """
    find = partial(find_stale, stale_seconds, [status], RECOVERY_BATCH)
    return recover_found(pipeline, find, Blocked())


def expire_pending(pipeline: Pipeline) -> int:
    """Expire PENDING tasks that are past their ``good_until``, and return how many."""
    blocked = Blocked()
    total = 0
    while True:
        before = blocked.excluded()
        known = {one: delay.seconds for one, delay in blocked.delays.items()}
        expired = blocked.isolated(
            pipeline,
            "expire",
            partial(_expire_batch, pipeline, before),
            lambda: expire_one_by_one(pipeline, blocked),
            waits=False,
        )
        total += expired
        # The delay after a refusal may already be over, although it grows with every refusal.
        if not expired and {one: delay.seconds for one, delay in blocked.delays.items()} == known:
            return total


def end_late(pipeline: Pipeline, blocked: Blocked) -> int:
    """Cancel runs that are past their deadline: all in one transaction or, after a refusal, each in its own
    transaction.
    """
    return blocked.isolated(
        pipeline,
        "expire",
        lambda: len(pipeline.run([end_late_runs(EXPIRY_BATCH, blocked.excluded())])[0]),
        lambda: _end_late_one_by_one(pipeline, blocked),
        "deadlines of runs",
    )


def _end_late_one_by_one(pipeline: Pipeline, blocked: Blocked) -> int:
    changed = 0
    for run in _others(pipeline, find_late_runs, blocked):
        change = Change("expire", run.id, run.workflow_id)
        answers = blocked.attempt(pipeline, change, [end_late_runs(1, [], [run.id])])
        changed += len(answers[0]) if answers else 0
    return changed


def _expire_batch(pipeline: Pipeline, excluded: Sequence[str]) -> int:
    return len(pipeline.run([_expiry_step(excluded)])[0])


def expire_one_by_one(pipeline: Pipeline, blocked: Blocked) -> int:
    """Expire a batch of tasks, each in its own transaction, and return how many."""
    changed = 0
    for task in _others(pipeline, find_late, blocked):
        change = Change("expire", task.id, task.workflow_id)
        answers = blocked.attempt(pipeline, change, [_expiry_step([], [task.id])])
        changed += len(answers[0]) if answers else 0
    return changed


def _expiry_step(excluded: Sequence[str], only: Sequence[str] | None = None) -> Step:
    return expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH, excluded, only)


def release_one_by_one(pipeline: Pipeline, blocked: Blocked) -> int:
    """Release a batch of lapsed claims, each in its own transaction, and return how many."""
    changed = 0
    for task in _others(pipeline, find_lapsed, blocked):
        change = Change("release", task.id, task.workflow_id)
        answers = blocked.attempt(
            pipeline, change, [(release_lapsed, ReleaseLapsed(1, [], [task.id]))]
        )
        changed += len(answers[0]) if answers else 0
    return changed


def _others(
    pipeline: Pipeline, find: Statement[[Sequence[str], int], FoundTask], blocked: Blocked
) -> list[FoundTask]:
    (found,) = pipeline.run([find(blocked.excluded(), EXPIRY_BATCH)])
    return found


def recover_found(
    pipeline: Pipeline, find: Callable[[Sequence[str]], Step], blocked: Blocked
) -> int:
    """Recover all abandoned tasks, batch by batch, and return how many.

    ``find`` returns the statement that finds a batch, without tasks that the database has refused.
    """
    recovered = 0
    while True:
        (abandoned,) = pipeline.run([find(blocked.excluded())])
        changed = recover_tasks(pipeline, abandoned, blocked)
        recovered += changed
        # If no task changed, another process was faster, or the database refused some tasks, which the next
        # batch skips.
        if not changed and not any(task.id in blocked.delays for task in abandoned):
            return recovered


def recover_tasks(pipeline: Pipeline, abandoned: Sequence[AbandonedTask], blocked: Blocked) -> int:
    """Release the tasks that had not started, end all other tasks as crashed, and return how many rows
    changed.
    """
    changed = 0
    for answers in blocked.run_each(pipeline, abandoned, _recovery, _recovery_steps):
        outcomes = {
            row[0]: _OUTCOMES[type(row)]
            for rows in answers
            for row in rows
            if type(row) in _OUTCOMES
        }
        changed += len(outcomes)
        for task in abandoned:
            if task.id in outcomes:
                _log_recovered(task, outcomes[task.id])
    return changed


def _log_recovered(task: AbandonedTask, outcome: str) -> None:
    logger.warning(
        "recovered task %s %s, whose worker %s is gone: %s",
        *(task.task_name, task.id, task.worker_id, outcome),
        extra={"task_id": task.id, "task_name": task.task_name} | headers_to_log(task.task_options),
    )


def _recovery(task: AbandonedTask) -> Change:
    return Change("recover", task.id, task.workflow_id)


def _recovery_steps(abandoned: Sequence[AbandonedTask]) -> list[Step]:
    """Return the statements that recover these tasks and notify the workers of their queues in the same
    transaction. Other tasks may be waiting for the places that the recovered tasks occupied under a cap.
    """
    steps = locking_steps(task.workflow_id for task in abandoned)
    by_worker = sorted(abandoned, key=lambda task: task.worker_id or "")
    for worker_id, group in groupby(by_worker, key=attrgetter("worker_id")):
        found = list(group)
        running = [task for task in found if task.status == "RUNNING"]
        steps += recording_steps(worker_id, [outcome_of_loss(task) for task in running]).values()
        if claimed := [task for task in found if task.status == "CLAIMED"]:
            ids = [task.id for task in claimed]
            generations = [task.generation for task in claimed]
            steps.append((release_claimed, ReleaseClaimed(worker_id, ids, generations)))
    queues = sorted({task.queue_name for task in abandoned})
    return [*steps, wake_queues(queues)]
