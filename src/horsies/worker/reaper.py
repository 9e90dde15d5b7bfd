"""The reaper: takes over what dead workers left, ends what was paused for too long, and deletes what
is too old to keep.

Any worker may reap; a try-lock elects one at a time and nothing breaks if two did. Who counts as dead
is decided here, what becomes of their tasks in ``recover.py``. Every step is idempotent, bounded, and
simply done again at the next occasion when it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from horsies.config.app import AppConfig, RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement, Step
from horsies.db.statements.workers import (
    Deleted,
    Duty,
    FindAbandoned,
    FindLostWorkers,
    FindOwnerless,
    Leads,
    Retention,
    SeenWorker,
    SignOff,
    delete_old_heartbeats,
    delete_old_tasks,
    delete_old_worker_states,
    delete_old_workers,
    find_abandoned,
    find_lost_workers,
    find_ownerless,
    sign_off_worker,
    try_lead,
)
from horsies.db.statements.workflows import (
    DeleteOldRuns,
    ExpireRun,
    FindPausedRuns,
    PausedRun,
    delete_old_workflows,
    expire_run,
    find_paused_runs,
)
from horsies.error_codes import OutcomeCode
from horsies.events import as_event
from horsies.task_result import TaskError
from horsies.tasks.recovery import RECOVERY_BATCH, recover_found, recover_tasks
from horsies.workflow.run.results import write_error

logger = logging.getLogger("horsies.reaper")

RETENTION_BATCH = 1000
# Whole families of runs, with all of their nodes and tasks.
RETENTION_RUNS = 50
EXPIRE_BATCH = 50
# A worker whose lock is free but that was seen this recently is probably just reconnecting: it shows
# itself every two seconds while it has tasks, and tries again half a second after a lost connection.
SILENT_SECONDS = 4.0
# After its own start the server's free locks prove nothing until everyone has had time to come back.
RETURN_FACTOR = 1.5
# How long PgBouncer, if it has not been told otherwise, keeps a statement for a server that is away.
POOLER_WAIT_MS = 120_000
RESCUE_DUTY = 1
RETENTION_DUTY = 2


@dataclass(frozen=True, slots=True)
class Rescue:
    """What one pass did."""

    lost_workers: int = 0
    tasks: int = 0


def stale_seconds(recovery: RecoveryConfig) -> float:
    """How long a worker must have been silent to count as dead in spite of its lock."""
    stale_ms = max(recovery.claimed_stale_threshold_ms, recovery.running_stale_threshold_ms)
    return stale_ms / 1000


def looking_steps(worker_id: str, config: AppConfig, connected_seconds: float) -> list[Step]:
    """Return the statements that look for dead workers, for any transaction to carry along.

    ``connected_seconds`` is how long our own connection has held without a break.
    """
    looked = FindLostWorkers(
        worker_id,
        connected_seconds,
        SILENT_SECONDS,
        return_seconds(config),
        stale_seconds(config.recovery),
    )
    return [(try_lead, Duty(RESCUE_DUTY)), (find_lost_workers, looked)]


def return_seconds(config: AppConfig) -> float:
    """How long a living worker may take to show itself again after an outage.

    Behind a pooler it may first wait for the answer to what it asked before.
    """
    return_ms = RETURN_FACTOR * config.resilience.db_retry_max_ms
    if config.broker.pgbouncer_transaction_mode:
        return_ms += config.broker.tcp_user_timeout_ms or POOLER_WAIT_MS
    return return_ms / 1000


def rescue(
    pipeline: Pipeline, led: Sequence[Leads], lost: Sequence[SeenWorker], recovery: RecoveryConfig
) -> Rescue:
    """Settle the tasks of the dead, found by ``looking_steps``; nothing to do if another leads."""
    if not led[0].leads or not lost:
        return Rescue()
    worker_ids = [row.worker_id for row in lost]
    logger.warning(
        "lost worker(s): %s",
        ", ".join(worker_ids),
        extra=as_event("workers_lost", worker_ids=worker_ids),
    )
    looked = FindAbandoned(worker_ids, _recoverable_statuses(recovery), RECOVERY_BATCH)
    rescued = recover_found(pipeline, (find_abandoned, looked))
    pipeline.run([(sign_off_worker, SignOff(worker_ids, True))])
    return Rescue(len(worker_ids), rescued)


def _recoverable_statuses(recovery: RecoveryConfig) -> list[str]:
    """The states of abandoned tasks that the configuration lets a reaper end."""
    claimed = ["CLAIMED"] if recovery.auto_requeue_stale_claimed else []
    return claimed + (["RUNNING"] if recovery.auto_fail_stale_running else [])


def recover_ownerless(pipeline: Pipeline, recovery: RecoveryConfig) -> int:
    """Settle tasks whose worker is not even known and that have been silent for their threshold."""
    looked = FindOwnerless(
        recovery.claimed_stale_threshold_ms / 1000,
        recovery.running_stale_threshold_ms / 1000,
        _recoverable_statuses(recovery),
        RECOVERY_BATCH,
    )
    led, ownerless = pipeline.run([(try_lead, Duty(RESCUE_DUTY)), (find_ownerless, looked)])
    if not led[0].leads or not ownerless:
        return 0
    return recover_tasks(pipeline, ownerless)


def expire_paused(pipeline: Pipeline, recovery: RecoveryConfig) -> int:
    """End runs that have been paused for longer than allowed, each in a transaction of its own; one
    that is resumed meanwhile goes on. Return how many ended.
    """
    allowed = recovery.paused_workflow_auto_cancel_after
    if allowed is None:
        return 0
    looked = FindPausedRuns(allowed.total_seconds(), EXPIRE_BATCH)
    led, found = pipeline.run([(try_lead, Duty(RESCUE_DUTY)), (find_paused_runs, looked)])
    expired = 0
    for run in found if led[0].leads else ():
        order = ExpireRun(run.id, looked.max_paused_seconds, _expiry(run, looked))
        ((answer,),) = pipeline.run([(expire_run, order)])
        expired += answer.expired
    if expired:
        logger.warning("%d workflow(s) had been paused for too long", expired)
    return expired


def _expiry(run: PausedRun, looked: FindPausedRuns) -> str:
    policy = "paused_workflow_auto_cancel_after"
    return write_error(
        TaskError(
            error_code=OutcomeCode.WORKFLOW_EXPIRED,
            message=f"Workflow {run.id} was paused for longer than {policy} allows.",
            data={
                "policy": policy,
                "allowed_seconds": looked.max_paused_seconds,
                "paused_seconds": run.paused_seconds,
            },
        )
    )


def sweep(pipeline: Pipeline, recovery: RecoveryConfig) -> bool:
    """Delete one bounded batch of everything past its retention; True when there may be more."""
    statements: tuple[tuple[Statement[Retention, Deleted], int | None], ...] = (
        (delete_old_heartbeats, recovery.heartbeat_retention_hours),
        (delete_old_worker_states, recovery.worker_state_retention_hours),
        (delete_old_workers, recovery.worker_state_retention_hours),
        (delete_old_tasks, recovery.terminal_record_retention_hours),
    )
    steps: list[Step] = [
        (statement, Retention(hours, RETENTION_BATCH))
        for statement, hours in statements
        if hours is not None
    ]
    if not steps or not pipeline.run([(try_lead, Duty(RETENTION_DUTY))])[0][0].leads:
        return False
    counts = [len(rows) for rows in pipeline.run(steps)]
    runs = _delete_runs(pipeline, recovery.terminal_record_retention_hours)
    if total := sum(counts) + runs:
        logger.info("retention: %d old row(s) deleted", total)
    return max(counts) >= RETENTION_BATCH or runs >= RETENTION_RUNS


def _delete_runs(pipeline: Pipeline, hours: int | None) -> int:
    if hours is None:
        return 0
    return len(pipeline.run([(delete_old_workflows, DeleteOldRuns(hours, RETENTION_RUNS))])[0])
