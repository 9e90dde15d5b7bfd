"""The worker's regular jobs besides tasks: show that it is alive, renew leases, recover the tasks of
lost workers, publish its state, delete old rows.

The loop calls ``perform`` whenever ``next_at`` has come. A job that fails for a transient reason is
repeated after the reconnect; none is ever switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from horsies.config.app import AppConfig
from horsies.db.errors import describe, describe_refusal, is_of_data, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    RenewClaims,
    SendHeartbeats,
    WorkerId,
    find_cancel_requests,
    renew_claims,
    send_heartbeats,
)
from horsies.tasks.blocked import Blocked, Change
from horsies.tasks.outcome import locking_steps
from horsies.worker.agenda import NEVER, Timer
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import WorkerConnection
from horsies.worker.in_flight import InFlight
from horsies.worker.liveness import Identity, Liveness
from horsies.worker.pool.pool import ChildPool
from horsies.worker.reaper import (
    expire_paused,
    looking_steps,
    recover_lost_workers,
    recover_ownerless,
    stale_seconds,
    sweep,
)

logger = logging.getLogger("horsies.worker")

# A worker with tasks shows itself this often; an idle one at its safety poll, with the same statement.
SEEN_SECONDS = 2.0
# A sign of life goes out this much before its time if another transaction goes out anyway.
EARLY_SECONDS = 0.5
SWEEP_SECONDS = 3600.0
NEXT_SWEEP_SECONDS = 1.0
# Longer than any break matters, and small enough for an interval.
LONG_SECONDS = 1e6


class Maintenance:
    """The worker's regular jobs, run inside its loop."""

    def __init__(
        self,
        app_config: AppConfig,
        config: WorkerConfig,
        identity: Identity,
        pool: ChildPool,
        in_flight: InFlight,
        connection: WorkerConnection,
        blocked: Blocked,
    ) -> None:
        recovery = app_config.recovery
        self._app_config = app_config
        self._identity = identity
        self._pool = pool
        self._in_flight = in_flight
        self._connection = connection
        self._blocked = blocked
        self._refused_jobs: dict[str, str] = {}
        # Whether notifications arrive: as found last, and as stored last.
        self._is_receiving = self._stored_is_receiving = True
        self._liveness = Liveness(app_config, config, identity)
        # Well before silence alone would count as death, however rarely the worker polls.
        most_seconds = stale_seconds(recovery) / 3
        self._busy_seconds = min(SEEN_SECONDS, most_seconds)
        poll_seconds = app_config.resilience.notify_poll_interval_ms / 1000
        self._idle_seconds = min(poll_seconds, most_seconds)
        self._seen_at = -NEVER
        self._must_check_cancels = False
        self._heartbeat = Timer(recovery.runner_heartbeat_interval_ms / 1000)
        self._renewal = Timer(app_config.effective_claimer_heartbeat_interval_ms / 1000)
        self._ownerless = Timer(recovery.check_interval_ms / 1000)
        self._snapshot = Timer(recovery.worker_state_snapshot_interval_ms / 1000)
        self._sweep = Timer(SWEEP_SECONDS)
        self.pings: list[str] = []
        self.is_lost = False

    def check_cancels(self) -> None:
        """Notifications may have been missed: look for cancel requests at once."""
        self._must_check_cancels = True

    def note_cancels(self, task_ids: Iterable[str]) -> None:
        """A notification says that these tasks are cancelled; the table decides."""
        if self._in_flight.holds_any(task_ids):
            self._must_check_cancels = True

    def next_at(self) -> float:
        if self._must_check_cancels:
            return 0.0
        return min(
            self._seen_due_at(),
            self._heartbeat.at,
            self._renewal.at,
            self._ownerless.at,
            self._snapshot.at,
            self._sweep.at,
        )

    def _seen_due_at(self) -> float:
        return self._seen_at + (
            self._idle_seconds if self._in_flight.is_empty else self._busy_seconds
        )

    def perform(self, pipeline: Pipeline, now: float) -> None:
        """Do every job that is due, the sign of life first: the others may take long."""
        recovery = self._app_config.recovery
        if now >= self._seen_due_at():
            self.note_signs(pipeline, pipeline.run(self.signs_of_life(now)), now)
        if self._must_check_cancels or self._heartbeat.is_due(now):
            self._beat(pipeline, now)
        if self._renewal.is_due(now):
            self._renew(pipeline, now)
        if self._snapshot.is_due(now):
            self._snapshot.done(now)
            with self._isolated("the snapshot of this worker"):
                pipeline.run([self._state()])
        if self._ownerless.is_due(now):
            self._ownerless.done(now)
            with self._isolated("the recovery of tasks without a worker"):
                recover_ownerless(pipeline, recovery, self._blocked)
            with self._isolated("the expiry of paused runs"):
                expire_paused(pipeline, recovery, self._blocked)
        if self._sweep.is_due(now):
            has_more = sweep(pipeline, recovery)
            self._sweep.at = now + (NEXT_SWEEP_SECONDS if has_more else SWEEP_SECONDS)

    def signs_of_life(self, now: float) -> list[Step]:
        """The statements that show this worker alive and look for lost ones; empty if it is too early.

        Another transaction may carry them along: an idle worker then needs one per poll in all.
        """
        if now < self._seen_due_at() - EARLY_SECONDS:
            return []
        connection = self._connection
        self._is_receiving = connection.check_notifications(now)
        connection.is_connected()  # notices a break that only the socket shows
        unbroken_seconds = min(connection.unbroken_seconds(now), LONG_SECONDS)
        return self._liveness.steps(receives_notifications=self._is_receiving) + looking_steps(
            self._identity.worker_id, self._app_config, unbroken_seconds
        )

    def note_signs(self, pipeline: Pipeline, answers: Sequence[list[Any]], now: float) -> None:
        """Take the answers to ``signs_of_life``, and recover the tasks of lost workers."""
        *_, seen, leads, lost = answers
        self._seen_at = now
        if seen:
            self._connection.note_call(now)
            if self._is_receiving != self._stored_is_receiving:
                self._stored_is_receiving = self._is_receiving
                self._snapshot.at = 0.0  # snapshots should not differ for half a minute
        self.is_lost = not self._liveness.note_seen(seen)
        if not self.is_lost:
            self._connection.lock.take_if_missing()
            # A pooler may have held the query back through an outage that freed the locks of live workers.
            if self._connection.is_connected():
                with self._isolated("the recovery of lost workers"):
                    recover_lost_workers(
                        pipeline, leads, lost, self._app_config.recovery, self._blocked
                    )

    @contextmanager
    def _isolated(self, job: str) -> Iterator[None]:
        """Leave a job for its next time when the database refuses it; log each reason once."""
        try:
            yield
        except psycopg.Error as error:
            if not is_of_data(error):
                raise
            reason = describe_refusal(error)
            if self._refused_jobs.get(job) != reason:
                logger.error("%s failed, others go on: %s", job, reason)
            self._refused_jobs[job] = reason
        else:
            self._refused_jobs.pop(job, None)

    def _beat(self, pipeline: Pipeline, now: float) -> None:
        """Stop cancelled tasks and, when it is time, send heartbeats for long-running ones."""
        is_due = self._heartbeat.is_due(now)
        if busy := self._pool.busy:
            steps: list[Step] = [(find_cancel_requests, WorkerId(self._identity.worker_id))]
            long = [
                child.assignment
                for child in busy.values()
                if is_due
                and now - child.assigned_at >= self._heartbeat.seconds
                and child.assignment
            ]
            if long:
                beats = SendHeartbeats(
                    self._identity.worker_id,
                    self._identity.hostname,
                    [assignment.task_id for assignment in long],
                    [assignment.generation for assignment in long],
                )
                steps.append((send_heartbeats, beats))
            answers: list[list[Any]] = []
            with self._isolated("the heartbeats of long-running tasks"):
                answers = pipeline.run(steps)
            cancelled = answers or pipeline.run(steps[:1])
            self._in_flight.cancel(row.id for row in cancelled[0])
        self._must_check_cancels = False
        if is_due:
            self._heartbeat.done(now)

    def _renew(self, pipeline: Pipeline, now: float) -> None:
        self._renewal.done(now)
        if self._blocked.includes("release"):
            self._in_flight.release_again()
        self._blocked.run_each(
            pipeline,
            self._in_flight.waiting(self._in_flight.waiting_count),
            lambda task: Change("renew", task.id, task.workflow_id),
            self._renewing_steps,
        )

    def _renewing_steps(self, waiting: Sequence[ClaimedTask]) -> list[Step]:
        lease = RenewClaims(
            self._identity.worker_id,
            [task.id for task in waiting],
            [task.generation for task in waiting],
            self._app_config.effective_claim_lease_ms,
            self._app_config.max_claim_renew_age_ms,
        )
        return [*locking_steps(task.workflow_id for task in waiting), (renew_claims, lease)]

    def _state(self) -> Step:
        in_flight = self._in_flight
        return self._liveness.snapshot(
            in_flight.running_count, in_flight.waiting_count, self._pool.children_memory_mb()
        )

    def answer_pings(self, pipeline: Pipeline) -> None:
        """Answer pings. A bad ping must never stop the worker."""
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

    def forget_registration(self) -> None:
        """Another worker declared this one lost: register again, as after a start."""
        self._liveness.forget()
        self._seen_at = -NEVER
        self.is_lost = False
