"""The worker's regular jobs besides running tasks: show that the worker is alive, renew leases, recover
lost workers' tasks, publish the worker's state, delete old rows.

The loop calls ``perform`` at the time ``next_at``. A job that fails for a transient reason is repeated after
the worker has reconnected; jobs are never switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from horsies.config.app import AppConfig
from horsies.db.errors import describe, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import find_unheld
from horsies.db.statements.turn import (
    ClaimedTask,
    RenewClaims,
    SendHeartbeats,
    StoreProgress,
    WorkerId,
    find_cancel_requests,
    renew_claims,
    send_heartbeats,
    store_progress,
)
from horsies.db.statements.webhooks import store_webhooks
from horsies.db.statements.workers import register_defaults
from horsies.tasks.blocked import Blocked, Change, Failures
from horsies.tasks.outcome import locking_steps
from horsies.worker.agenda import NEVER, Timer
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import WorkerConnection
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.heartbeat import Heartbeat
from horsies.worker.ledger import RUNNING, WAITING
from horsies.worker.liveness import Identity, Liveness
from horsies.worker.payload_sweep import PayloadSweep
from horsies.worker.protocol import ProgressReport
from horsies.worker.reaper import (
    expire_paused,
    recover_ownerless,
    sweep,
)

logger = logging.getLogger("horsies.worker")

# How often a task's progress is stored: three times a second, and again when the task ends.
PROGRESS_SECONDS = 0.34
SWEEP_SECONDS = 3600.0
NEXT_SWEEP_SECONDS = 1.0

_REMEDY = (
    "; until it works, {users} use those that another worker has registered; look at the rights of the role "
    "on {table}"
)


class _Registration(NamedTuple):
    """A statement that stores settings of the application in the database."""

    what: str
    step: Step
    remedy: str = ""
    # Whether the statement is repeated with every snapshot.
    is_regular: bool = False


def _registrations(config: AppConfig, identity: Identity) -> list[_Registration]:
    queues = [queue.name for queue in config.queues()]
    found = [
        _Registration(
            "the webhooks",
            store_webhooks(identity.webhooks, queues),
            _REMEDY.format(users="ends of tasks", table="horsies_webhooks"),
        )
    ]
    if identity.task_defaults is not None:
        found.append(
            _Registration(
                "the defaults of tasks",
                register_defaults(identity.task_defaults),
                _REMEDY.format(users="sends from SQL", table="horsies_task_defaults"),
            )
        )
    if identity.findings is not None:
        found.append(_Registration("the check for findings", identity.findings, is_regular=True))
    return found


class _Sweep:
    """Deletes old rows, and large payloads that no row needs any more."""

    def __init__(self, config: AppConfig) -> None:
        self.at = 0.0
        self._recovery = config.recovery
        self._payloads = PayloadSweep(config.broker)

    def perform(self, pipeline: Pipeline, now: float, failures: Failures) -> None:
        has_more = sweep(pipeline, self._recovery, failures)
        has_more |= self._payloads.sweep(pipeline, failures)
        self.at = now + (NEXT_SWEEP_SECONDS if has_more else SWEEP_SECONDS)


class Maintenance:
    """The worker's regular jobs, run inside its loop."""

    def __init__(
        self,
        app_config: AppConfig,
        config: WorkerConfig,
        identity: Identity,
        dispatcher: Dispatcher,
        connection: WorkerConnection,
        blocked: Blocked,
    ) -> None:
        recovery = app_config.recovery
        self._app_config = app_config
        self._dispatcher = dispatcher
        self._blocked = blocked
        self._liveness = Liveness(app_config, config, identity)
        self.heartbeat = Heartbeat(app_config, self._liveness, dispatcher, connection, blocked)
        self._snapshot_is_receiving = True
        self._must_check_cancels = False
        self._beats = Timer(recovery.runner_heartbeat_interval_ms / 1000)
        self._renewal = Timer(app_config.effective_claimer_heartbeat_interval_ms / 1000)
        self._ownerless = Timer(recovery.check_interval_ms / 1000)
        self._snapshot = Timer(recovery.worker_state_snapshot_interval_ms / 1000)
        self._sweep = _Sweep(app_config)
        self._progress = Timer(PROGRESS_SECONDS)
        self.pings: list[str] = []
        # The settings of the application that are not stored yet.
        self._unregistered = _registrations(app_config, identity)

    def check_cancels(self) -> None:
        """Check for cancel requests immediately, because notifications may have been missed."""
        self._must_check_cancels = True

    def note_cancels(self, task_ids: Iterable[str]) -> None:
        """Check the table for cancel requests for these tasks, because a notification named them."""
        if any(map(self._dispatcher.ledger.has, task_ids)):
            self._must_check_cancels = True

    def next_at(self) -> float:
        if self._must_check_cancels:
            return 0.0
        return min(
            self._progress_at(),
            self.heartbeat.due_at(),
            self._beats.at,
            self._renewal.at,
            self._ownerless.at,
            self._snapshot.at,
            self._dispatcher.tally.flush_at,
            self._sweep.at,
        )

    def _progress_at(self) -> float:
        """While tasks run, read the shared pages of their children. This takes no statement and 0.05 % of
        a core.
        """
        return self._progress.at if self._dispatcher.pool.busy else NEVER

    def perform(self, pipeline: Pipeline, now: float) -> None:
        """Do every job that is due. The heartbeat comes first, because the other jobs may take long."""
        recovery = self._app_config.recovery
        if now >= self.heartbeat.due_at():
            self.heartbeat.send(pipeline, now)
        if self._must_check_cancels or self._beats.is_due(now):
            self._beat(pipeline, now)
        if self._renewal.is_due(now):
            self._renew(pipeline, now)
        if self._progress.is_due(now):
            self._progress.done(now)
            self._store_progress(pipeline, list(self._dispatcher.pool.progress().values()))
        is_receiving = self.heartbeat.is_receiving
        # A snapshot is stored immediately; otherwise the latest snapshot would contradict the worker's row
        # for half a minute.
        if self._snapshot.is_due(now) or is_receiving != self._snapshot_is_receiving:
            self._snapshot.done(now)
            self._snapshot_is_receiving = is_receiving
            self._register(pipeline)
            with self._blocked.failures.job("the snapshot of this worker"):
                pipeline.run([self._blocked.lock_wait(), self._state()])
        if now >= self._dispatcher.tally.flush_at:
            self._flush_tally(pipeline)
        if self._ownerless.is_due(now):
            self._ownerless.done(now)
            with self._blocked.failures.job("the recovery of tasks without a worker"):
                recover_ownerless(pipeline, recovery, self._blocked)
                self._find_forgotten(pipeline)
                self._blocked.update_record(pipeline)
            with self._blocked.failures.job("the expiry of paused runs"):
                expire_paused(pipeline, recovery, self._blocked)
        if now >= self._sweep.at:
            self._sweep.perform(pipeline, now, self._blocked.failures)

    def _register(self, pipeline: Pipeline) -> None:
        """Store the application's settings until the database has accepted them once, and repeat the
        regular statements.
        """
        for one in list(self._unregistered):
            with self._blocked.failures.job(f"registering {one.what}", remedy=one.remedy):
                pipeline.run([self._blocked.lock_wait(), one.step])
                if not one.is_regular:
                    self._unregistered.remove(one)

    def store_last_progress(self, pipeline: Pipeline, ended_ids: Iterable[str]) -> None:
        """Store the last progress of tasks whose outcomes are about to be recorded."""
        unstored = self._dispatcher.pool.unstored_progress
        reports = [unstored[task_id] for task_id in ended_ids if task_id in unstored]
        self._store_progress(pipeline, reports)

    def _store_progress(self, pipeline: Pipeline, reports: Sequence[ProgressReport]) -> None:
        if not reports:
            return
        ids, generations, done, totals, notes = zip(*reports, strict=True)
        values = StoreProgress(
            self._liveness.identity.worker_id, ids, generations, done, totals, notes
        )
        with self._blocked.failures.job("storing the progress of tasks"):
            pipeline.run([(store_progress, values)])
        for one in reports:
            self._dispatcher.pool.unstored_progress.pop(one.task_id, None)

    def _find_forgotten(self, pipeline: Pipeline) -> None:
        """Find tasks that the database assigns to this worker although the worker does not hold them.

        Behind a pooler, the claim of a lost connection may be committed after the release that should
        have undone it.
        """
        held = self._dispatcher.ledger.tasks()
        ids, generations = [task.id for task in held], [task.generation for task in held]
        find = find_unheld(self._liveness.identity.worker_id, ids, generations)
        if pipeline.run([find])[0]:
            self._dispatcher.ledger.release_again()

    def _beat(self, pipeline: Pipeline, now: float) -> None:
        """Stop cancelled tasks and, if it is time, send heartbeats for long-running ones."""
        is_due = self._beats.is_due(now)
        if busy := self._dispatcher.pool.busy:
            steps: list[Step] = [
                (find_cancel_requests, WorkerId(self._liveness.identity.worker_id))
            ]
            long = [
                held.assignment
                for held in busy.values()
                if is_due and now - held.assigned_at >= self._beats.seconds
            ]
            if long:
                beats = SendHeartbeats(
                    self._liveness.identity.worker_id,
                    self._liveness.identity.hostname,
                    [assignment.task_id for assignment in long],
                    [assignment.generation for assignment in long],
                )
                steps.append((send_heartbeats, beats))
            answers: list[list[Any]] = []
            with self._blocked.failures.job("the heartbeats of long-running tasks"):
                answers = pipeline.run(steps)
            cancelled = answers or pipeline.run(steps[:1])
            self._dispatcher.cancel(row.id for row in cancelled[0])
        self._must_check_cancels = False
        if is_due:
            self._beats.done(now)

    def _renew(self, pipeline: Pipeline, now: float) -> None:
        self._renewal.done(now)
        if self._blocked.includes("release"):
            self._dispatcher.ledger.release_again()
        self._blocked.run_each(
            pipeline,
            self._dispatcher.ledger.tasks(WAITING),
            lambda task: Change("renew", task.id, task.workflow_id),
            self._renewing_steps,
        )

    def _renewing_steps(self, waiting: Sequence[ClaimedTask]) -> list[Step]:
        lease = RenewClaims(
            self._liveness.identity.worker_id,
            [task.id for task in waiting],
            [task.generation for task in waiting],
            self._app_config.effective_claim_lease_ms,
            self._app_config.max_claim_renew_age_ms,
        )
        return [*locking_steps(task.workflow_id for task in waiting), (renew_claims, lease)]

    def _state(self) -> Step:
        count = self._dispatcher.ledger.count
        return self._liveness.snapshot(
            count(RUNNING), count(WAITING), self._dispatcher.pool.summaries()
        )

    def answer_pings(self, pipeline: Pipeline) -> None:
        """Respond to pings. An invalid ping must never stop the worker."""
        steps = self._liveness.pongs(self.pings)
        try:
            if steps:
                pipeline.run(steps)
        except Exception as error:
            if is_transient(error):
                raise
            logger.warning("a ping could not be answered: %s", describe(error))
        self.pings = []

    def record_stop(self, pipeline: Pipeline) -> None:
        pipeline.run([self._state()])
        pipeline.run([self._liveness.stop()])
        self._flush_tally(pipeline)

    def _flush_tally(self, pipeline: Pipeline) -> None:
        """Store the attempt counts. If this fails, the counts are lost: a worker does not stop because of
        them.
        """
        if steps := self._dispatcher.tally.take_flush():
            name = "storing the counts of attempts"
            with self._blocked.failures.job(name, may_fail=lambda one: not is_transient(one)):
                pipeline.run(steps)
