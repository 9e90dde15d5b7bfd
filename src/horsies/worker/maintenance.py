"""The worker's regular jobs besides tasks: show that it is alive, renew leases, recover the tasks of
lost workers, publish its state, delete old rows.

The loop calls ``perform`` whenever ``next_at`` has come. A job that fails for a transient reason is
repeated after the reconnect; none is ever switched off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from horsies.config.app import AppConfig
from horsies.db.errors import describe, describe_refusal, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import FindUnheld, find_unheld
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
from horsies.db.statements.workers import FindOwned, find_owned, watch_workers
from horsies.tasks.blocked import Blocked, Change
from horsies.tasks.outcome import locking_steps
from horsies.worker.agenda import NEVER, Timer, lifetime_clock
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import WorkerConnection
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.ledger import RUNNING, WAITING
from horsies.worker.liveness import Identity, Liveness
from horsies.worker.protocol import ProgressReport
from horsies.worker.reaper import (
    expire_paused,
    recover_lost_workers,
    recover_ownerless,
    sweep,
)
from horsies.worker.watch import Watch, WatchLimits

logger = logging.getLogger("horsies.worker")

# A worker with tasks shows itself this often; an idle one at its safety poll, with the same statement.
SEEN_SECONDS = 2.0
# A sign of life goes out this much before its time if another transaction goes out anyway.
EARLY_SECONDS = 0.5
# A sign of life this late goes out before a turn: the turn may be waiting for a lock.
LATE_SECONDS = 1.0
# Three rows a second, and a fourth when the task ends.
PROGRESS_SECONDS = 0.34
SWEEP_SECONDS = 3600.0
NEXT_SWEEP_SECONDS = 1.0


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
        self._identity = identity
        self._pool = dispatcher.pool
        self._dispatcher = dispatcher
        self._connection = connection
        self._blocked = blocked
        self._refused_jobs: dict[str, str] = {}
        # Whether notifications arrive: as found last, and as stored last.
        self.is_receiving = self._stored_is_receiving = True
        self._liveness = Liveness(app_config, config, identity)
        self._limits = limits = WatchLimits.of(app_config)
        self._watch = Watch(limits, identity.sees_gone)
        # Well before silence counts, however rarely the worker polls.
        most_seconds = min(limits.look_seconds, limits.lock_seconds)
        self._busy_seconds = min(SEEN_SECONDS, most_seconds)
        poll_seconds = app_config.resilience.notify_poll_interval_ms / 1000
        self._idle_seconds = min(poll_seconds, most_seconds)
        self._seen_at = -NEVER
        # The start of the last heartbeat that was stored, on the clock that runs through a suspend.
        self.shown_at = lifetime_clock()
        self._asked_at = 0.0
        self._breaks = -1
        # How often the database had to confirm that this worker still owns its tasks, and how often it did.
        self._checks_needed = self._checks_done = 0
        self._must_check_cancels = False
        self._heartbeat = Timer(recovery.runner_heartbeat_interval_ms / 1000)
        self._renewal = Timer(app_config.effective_claimer_heartbeat_interval_ms / 1000)
        self._ownerless = Timer(recovery.check_interval_ms / 1000)
        self._snapshot = Timer(recovery.worker_state_snapshot_interval_ms / 1000)
        self._sweep = Timer(SWEEP_SECONDS)
        self._progress = Timer(PROGRESS_SECONDS)
        self.pings: list[str] = []
        self.is_lost = False

    def check_cancels(self) -> None:
        """Notifications may have been missed: look for cancel requests at once."""
        self._must_check_cancels = True

    def note_cancels(self, task_ids: Iterable[str]) -> None:
        """A notification says that these tasks are cancelled; the table decides."""
        if any(map(self._dispatcher.ledger.has, task_ids)):
            self._must_check_cancels = True

    @property
    def must_show_first(self) -> bool:
        """Whether a heartbeat comes before any other work: other workers may have declared this one
        lost while it was frozen or without a connection.
        """
        return self.was_frozen or self._breaks != self._connection.breaks

    @property
    def was_frozen(self) -> bool:
        """Whether other workers may have recovered tasks since the last check."""
        return self._checks_needed != self._checks_done

    def note_freeze(self) -> None:
        """This process did not run for long: check the ownership of its tasks."""
        self._checks_needed += 1
        self._watch.note_gap()

    def show(self, pipeline: Pipeline, now: float) -> None:
        """Send a heartbeat, and end tasks that belong to another worker by now; again if a freeze has made
        the answers old.
        """
        self._checks_needed = check = self._checks_needed + 1
        self._seen_at = -NEVER
        self.note_signs(pipeline, pipeline.run(self.signs_of_life(now)), now)
        if not self.is_lost and (held := self._dispatcher.ledger.tasks()):
            self._dispatcher.keep_owned(self.owned(pipeline, held))
        self._checks_done = check
        if self.was_frozen:
            self.show(pipeline, time.monotonic())

    def owned(self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]) -> set[str]:
        """The ids of those attempts that the database still lists as this worker's."""
        ids, generations = [task.id for task in tasks], [task.generation for task in tasks]
        find = FindOwned(self._identity.worker_id, ids, generations)
        return {row.id for row in pipeline.run([(find_owned, find)])[0]}

    def show_if_late(self, pipeline: Pipeline, now: float) -> None:
        """Send a heartbeat that failed turns have delayed."""
        if now >= self._seen_due_at() + LATE_SECONDS:
            self.note_signs(pipeline, pipeline.run(self.signs_of_life(now)), now)

    def next_at(self) -> float:
        if self._must_check_cancels:
            return 0.0
        return min(
            self._progress_at(),
            self._seen_due_at(),
            self._heartbeat.at,
            self._renewal.at,
            self._ownerless.at,
            self._snapshot.at,
            self._dispatcher.tally.flush_at,
            self._sweep.at,
        )

    def _progress_at(self) -> float:
        """While tasks run, look at the pages of their children: no statement, and 0.05 % of a core."""
        return self._progress.at if self._pool.busy else NEVER

    def _seen_due_at(self) -> float:
        seconds = self._idle_seconds if self._dispatcher.ledger.is_empty else self._busy_seconds
        if self._watch.has_suspects:
            seconds = min(seconds, self._limits.suspicion_seconds)
        return self._seen_at + seconds

    def perform(self, pipeline: Pipeline, now: float) -> None:
        """Do every job that is due, the sign of life first: the others may take long."""
        recovery = self._app_config.recovery
        if now >= self._seen_due_at():
            self.note_signs(pipeline, pipeline.run(self.signs_of_life(now)), now)
        if self._must_check_cancels or self._heartbeat.is_due(now):
            self._beat(pipeline, now)
        if self._renewal.is_due(now):
            self._renew(pipeline, now)
        if self._progress.is_due(now):
            self._progress.done(now)
            self._store_progress(pipeline, list(self._pool.progress().values()))
        if self._snapshot.is_due(now):
            self._snapshot.done(now)
            with self._isolated("the snapshot of this worker"):
                pipeline.run([self._state()])
        if now >= self._dispatcher.tally.flush_at:
            self._flush_tally(pipeline)
        if self._ownerless.is_due(now):
            self._ownerless.done(now)
            with self._isolated("the recovery of tasks without a worker"):
                recover_ownerless(pipeline, recovery, self._blocked)
                self._find_forgotten(pipeline)
                self._blocked.delete_old(pipeline)
            with self._isolated("the expiry of paused runs"):
                expire_paused(pipeline, recovery, self._blocked)
        if self._sweep.is_due(now):
            has_more = sweep(pipeline, recovery, self._blocked.failures)
            self._sweep.at = now + (NEXT_SWEEP_SECONDS if has_more else SWEEP_SECONDS)

    def store_last_progress(self, pipeline: Pipeline, ended_ids: Iterable[str]) -> None:
        """Store the last reports of tasks whose outcomes are recorded next."""
        unstored = self._pool.unstored_progress
        reports = [unstored[task_id] for task_id in ended_ids if task_id in unstored]
        self._store_progress(pipeline, reports)

    def _store_progress(self, pipeline: Pipeline, reports: Sequence[ProgressReport]) -> None:
        if not reports:
            return
        ids, generations, done, totals, notes = zip(*reports, strict=True)
        values = StoreProgress(self._identity.worker_id, ids, generations, done, totals, notes)
        with self._isolated("storing the progress of tasks"):
            pipeline.run([(store_progress, values)])
        for one in reports:
            self._pool.unstored_progress.pop(one.task_id, None)

    def _find_forgotten(self, pipeline: Pipeline) -> None:
        """Look for tasks that belong to this worker without its knowledge: behind a pooler, a claim of a
        lost connection may commit after the release that followed.
        """
        held = self._dispatcher.ledger.tasks()
        ids, generations = [task.id for task in held], [task.generation for task in held]
        find = FindUnheld(self._identity.worker_id, ids, generations)
        if pipeline.run([(find_unheld, find)])[0]:
            self._dispatcher.ledger.release_again()

    def signs_of_life(self, now: float) -> list[Step]:
        """The statements that show this worker alive and look for lost ones; empty if it is too early.

        Another transaction may carry them along: an idle worker then needs one per poll in all.
        """
        if now < self._seen_due_at() - EARLY_SECONDS:
            return []
        connection = self._connection
        self.is_receiving = connection.check_notifications(now)
        self._notice_breaks()
        self._asked_at = time.monotonic()
        return [
            *self._liveness.steps(receives_notifications=self.is_receiving),
            (watch_workers, WorkerId(self._identity.worker_id)),
        ]

    def _notice_breaks(self) -> bool:
        """Whether the connection has held since the last call; a break is a gap in the observation."""
        self._connection.is_connected()  # notices a break that only the socket shows
        has_held = self._breaks == self._connection.breaks
        if not has_held:
            self._breaks = self._connection.breaks
            self._watch.note_gap()
        return has_held

    def note_signs(self, pipeline: Pipeline, answers: Sequence[list[Any]], now: float) -> None:
        """Take the answers to ``signs_of_life``, and recover the tasks of lost workers."""
        *_, seen, others = answers
        taken_seconds = time.monotonic() - self._asked_at
        self._seen_at = now
        self.shown_at = lifetime_clock() - taken_seconds
        if seen:
            self._dispatcher.tally.note_clock(seen[0].seen_at, taken_seconds)
            self._connection.note_call(now + taken_seconds)
            if self.is_receiving != self._stored_is_receiving:
                self._stored_is_receiving = self.is_receiving
                self._snapshot.at = 0.0  # snapshots should not differ for half a minute
        self.is_lost = not self._liveness.note_seen(seen)
        if self.is_lost:
            self._watch.note_gap()
            return
        # A pooler may have held the query back through an outage that freed the locks of live workers.
        if self._notice_breaks():
            verdicts = self._watch.note_look(others, now, now + taken_seconds)
            with self._isolated("the recovery of lost workers"):
                recover_lost_workers(pipeline, verdicts, self._app_config, self._blocked)

    @contextmanager
    def _isolated(self, job: str) -> Iterator[None]:
        """Leave a job for its next time when the database refuses it; log each reason once."""
        failures = self._blocked.failures
        try:
            yield
        except psycopg.Error as error:
            if not failures.is_isolated(job, error):
                raise
            reason = describe_refusal(error)
            if self._refused_jobs.get(job) != reason:
                logger.error("%s failed, others go on: %s", job, reason)
            self._refused_jobs[job] = reason
        else:
            failures.forget(job)
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
            self._dispatcher.cancel(row.id for row in cancelled[0])
        self._must_check_cancels = False
        if is_due:
            self._heartbeat.done(now)

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
            self._identity.worker_id,
            [task.id for task in waiting],
            [task.generation for task in waiting],
            self._app_config.effective_claim_lease_ms,
            self._app_config.max_claim_renew_age_ms,
        )
        return [*locking_steps(task.workflow_id for task in waiting), (renew_claims, lease)]

    def _state(self) -> Step:
        count = self._dispatcher.ledger.count
        return self._liveness.snapshot(count(RUNNING), count(WAITING), self._pool.summaries())

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
        self._flush_tally(pipeline)

    def _flush_tally(self, pipeline: Pipeline) -> None:
        """Store the counts of attempts, or lose them: they are no reason to stop a worker."""
        steps, failures = self._dispatcher.tally.take_flush(), self._blocked.failures
        try:
            if steps:
                pipeline.run(steps)
                failures.forget("tally")
        except psycopg.Error as error:
            if is_transient(error) and not failures.is_isolated("tally", error):
                raise
            logger.warning("the counts of attempts could not be stored: %s", describe(error))

    def forget_registration(self) -> None:
        """Another worker declared this one lost: register again, as after a start."""
        self._liveness.forget()
        self._seen_at = -NEVER
        self.is_lost = False
