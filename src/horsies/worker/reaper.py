"""The reaper: recovers lost workers' tasks, ends runs that were paused for too long, and deletes rows
past their retention.

Any worker may do this, even two workers at the same time. ``watch.py`` decides which workers are lost,
and ``tasks/recovery.py`` decides how their tasks end. Every step is idempotent, bounded, and repeated in
the next pass if it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from horsies.config.app import AppConfig, RecoveryConfig
from horsies.db.errors import lacks_right_on
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement, Step
from horsies.db.statements.actions import delete_old_actions
from horsies.db.statements.blocked import delete_unblocked
from horsies.db.statements.measures import compact_measures, delete_old_measures
from horsies.db.statements.refusals import REFUSALS_TABLE, delete_refusals
from horsies.db.statements.workers import (
    Deleted,
    close_lost_workers,
    delete_kept_tasks,
    delete_old_heartbeats,
    delete_old_logs,
    delete_old_meters,
    delete_old_tasks,
    delete_old_untimed_tasks,
    delete_old_worker_states,
    delete_old_workers,
    find_abandoned,
    find_active_sessions,
    find_ownerless,
    try_lead,
)
from horsies.db.statements.workflows import (
    delete_old_workflows,
    expire_run,
    find_paused_runs,
)
from horsies.error_codes import OutcomeCode
from horsies.logs import as_event
from horsies.task_result import TaskError
from horsies.tasks.blocked import Blocked, Change, Failures, is_of_one
from horsies.tasks.recovery import RECOVERY_BATCH, recover_found, recover_tasks
from horsies.worker.watch import Verdict, WatchLimits
from horsies.workflow.run.results import write_error

logger = logging.getLogger("horsies.reaper")

RETENTION_BATCH = 1000
# The records of changes that people made are kept for 90 days.
ACTION_RETENTION_HOURS = 90 * 24
# A key with a rate has a meter, which is no longer needed once it allows the next start immediately.
METER_RETENTION_HOURS = 1
# The maximum number of whole trees of runs, with all their nodes and tasks, that one statement deletes.
RETENTION_RUNS = 50
EXPIRE_BATCH = 50
# The name under which failures to close the rows of lost workers are counted.
CLOSING = "close lost workers"
RECOVERY = try_lead(1)
RETENTION = try_lead(2)


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many workers one pass found lost, and how many tasks it recovered."""

    lost_workers: int = 0
    tasks: int = 0


def recover_lost_workers(
    pipeline: Pipeline, verdicts: Sequence[Verdict], config: AppConfig, blocked: Blocked
) -> Recovered:
    """Close the rows of lost workers and recover their tasks.

    The rows are closed first, so that a returning worker sees that it was declared lost. If this worker dies
    after closing the rows, ``recover_ownerless`` in another worker finds the tasks, including those that the
    database refused to recover. If the database refuses to close a row, the error is raised at the end, when
    the tasks of the other lost workers have been recovered.
    """
    verdicts = _without_active(pipeline, verdicts, WatchLimits.of(config).held)
    if not verdicts:
        return Recovered()
    worker_ids, refusal = _close(pipeline, verdicts, blocked)
    recovered = Recovered()
    if worker_ids:
        reason_of = {verdict.worker_id: verdict.reason for verdict in verdicts}
        lost = ", ".join(f"{worker_id} ({reason_of[worker_id]})" for worker_id in worker_ids)
        event = as_event("workers_lost", worker_ids=worker_ids)
        logger.warning("recovering the tasks of lost worker(s): %s", lost, extra=event)
        statuses = _recoverable_statuses(config.recovery)
        find = partial(find_abandoned, worker_ids, statuses, RECOVERY_BATCH)
        tasks = recover_found(pipeline, find, blocked)
        recovered = Recovered(len(worker_ids), tasks)
    if refusal is not None:
        raise refusal
    return recovered


def _close(
    pipeline: Pipeline, verdicts: Sequence[Verdict], blocked: Blocked
) -> tuple[list[str], psycopg.Error | None]:
    """Close the rows of lost workers, one by one if the database refuses them together.

    Return the workers whose rows were closed, and a refusal if there was one.
    """
    return blocked.failures.isolated(
        CLOSING,
        lambda: (_close_rows(pipeline, verdicts), None),
        lambda: _close_one_by_one(pipeline, verdicts),
    )


def _close_one_by_one(
    pipeline: Pipeline, verdicts: Sequence[Verdict]
) -> tuple[list[str], psycopg.Error | None]:
    closed: list[str] = []
    refusal: psycopg.Error | None = None
    for verdict in verdicts:
        try:
            closed += _close_rows(pipeline, [verdict])
        except psycopg.Error as error:
            if not is_of_one(error):
                raise
            refusal = refusal or error
    return closed, refusal


def _close_rows(pipeline: Pipeline, verdicts: Sequence[Verdict]) -> list[str]:
    ids, signs, needs_free_lock, needs_tasks, _ = zip(*verdicts, strict=True)
    close = close_lost_workers(ids, signs, needs_free_lock, needs_tasks)
    return [row.worker_id for row in pipeline.run([close])[0]]


def _without_active(
    pipeline: Pipeline, verdicts: Sequence[Verdict], seconds: float
) -> Sequence[Verdict]:
    """Return the workers without those whose lock is held by a session that is still active."""
    held = [verdict.worker_id for verdict in verdicts if not verdict.needs_free_lock]
    if not held:
        return verdicts
    (active,) = pipeline.run([find_active_sessions(held, seconds)])
    ids = {row.worker_id for row in active}
    return [verdict for verdict in verdicts if verdict.worker_id not in ids]


def _recoverable_statuses(recovery: RecoveryConfig) -> list[str]:
    """Return the states in which the configuration allows a reaper to recover an abandoned task."""
    claimed = ["CLAIMED"] if recovery.auto_requeue_stale_claimed else []
    return claimed + (["RUNNING"] if recovery.auto_fail_stale_running else [])


def recover_ownerless(pipeline: Pipeline, recovery: RecoveryConfig, blocked: Blocked) -> int:
    """Recover tasks whose worker's row is closed. Also recover tasks whose worker has no row, if their
    last heartbeat is older than the threshold for their state.
    """
    find = find_ownerless(
        recovery.claimed_stale_threshold_ms / 1000,
        recovery.running_stale_threshold_ms / 1000,
        _recoverable_statuses(recovery),
        RECOVERY_BATCH,
        blocked.excluded(),
    )
    leads, ownerless = pipeline.run([RECOVERY, find])
    return recover_tasks(pipeline, ownerless, blocked) if leads[0].leads else 0


def expire_paused(pipeline: Pipeline, recovery: RecoveryConfig, blocked: Blocked) -> int:
    """End runs that have been paused for longer than allowed and return how many ended.

    Each run ends in its own transaction; a run that is resumed before its transaction continues.
    """
    policy = "paused_workflow_auto_cancel_after"
    allowed = recovery.paused_workflow_auto_cancel_after
    if allowed is None:
        return 0
    seconds = allowed.total_seconds()
    find = find_paused_runs(seconds, EXPIRE_BATCH, blocked.excluded())
    leads, found = pipeline.run([RECOVERY, find])
    expired = 0
    for run in found if leads[0].leads else ():
        error = TaskError(
            error_code=OutcomeCode.WORKFLOW_EXPIRED,
            message=f"Workflow {run.id} was paused for longer than {policy} allows.",
            data={
                "policy": policy,
                "allowed_seconds": seconds,
                "paused_seconds": run.paused_seconds,
            },
        )
        order = expire_run(run.id, seconds, write_error(error))
        change = Change("expire", run.id, run.id, is_run=True)
        answers = blocked.attempt(pipeline, change, [order])
        expired += answers[0][0].expired if answers else 0
    if expired:
        logger.warning("%d workflow(s) expired: paused for too long", expired)
    return expired


def sweep(pipeline: Pipeline, recovery: RecoveryConfig, failures: Failures | None = None) -> bool:
    """Delete one bounded batch of each kind of old rows; return True if there may be more old rows."""
    failures = failures or Failures()
    statements: tuple[tuple[Statement[[float, int], Deleted], int | None], ...] = (
        (delete_old_heartbeats, recovery.heartbeat_retention_hours),
        (delete_old_worker_states, recovery.worker_state_retention_hours),
        (delete_old_workers, recovery.worker_state_retention_hours),
        (delete_old_actions, ACTION_RETENTION_HOURS),
        (delete_old_meters, METER_RETENTION_HOURS),
        (delete_old_logs, recovery.log_retention_hours),
        (delete_old_tasks, recovery.terminal_record_retention_hours),
        (delete_old_untimed_tasks, recovery.terminal_record_retention_hours),
        (delete_old_measures, recovery.measure_retention_hours),
    )
    steps: list[Step] = [
        statement(hours, RETENTION_BATCH) for statement, hours in statements if hours is not None
    ]
    steps.append(delete_kept_tasks(RETENTION_BATCH))
    steps.append(compact_measures(RETENTION_BATCH))
    if not pipeline.run([RETENTION])[0][0].leads:
        return False
    counts = [_delete(pipeline, step, failures) for step in steps]
    runs = 0
    if (hours := recovery.terminal_record_retention_hours) is not None:
        old = delete_old_workflows(hours, RETENTION_RUNS)
        runs = _delete(pipeline, old, failures)
    _delete(pipeline, delete_unblocked(), failures)
    _delete(pipeline, delete_refusals(), failures)
    if total := sum(counts) + runs:
        logger.info("retention: %d old row(s) deleted", total)
    return max(counts) >= RETENTION_BATCH or runs >= RETENTION_RUNS


def _delete(pipeline: Pipeline, step: Step, failures: Failures) -> int:
    return len(delete_rows(pipeline, step, failures))


def delete_rows(pipeline: Pipeline, step: Step, failures: Failures) -> list[Any]:
    """Delete a batch of rows. If a row cannot be deleted because of a foreign key or another session's
    lock, its whole batch is kept and the reason is logged. A missing privilege on the refusals table is
    only logged, because a worker can run without it.
    """
    rows: list[Any] = []
    may_fail = partial(lacks_right_on, table=REFUSALS_TABLE)
    with failures.job(f"retention: {step[0].name}", may_fail=may_fail):
        (rows,) = pipeline.run([step])
    return rows
