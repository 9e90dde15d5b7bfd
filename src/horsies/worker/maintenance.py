"""What a worker does besides tasks, each at its own interval: say that it lives and whether it hears,
renew leases, look for dead colleagues, describe itself, delete what is too old.

The loop calls ``perform`` whenever ``next_at`` has come. A duty that fails for a passing reason is done
again after the reconnect; none is ever switched off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import Connection

from horsies.config.app import AppConfig
from horsies.db.errors import describe, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    RenewClaims,
    SendHeartbeats,
    WorkerId,
    find_cancel_requests,
    renew_claims,
    send_heartbeats,
)
from horsies.tasks.outcome import locking_steps
from horsies.worker.agenda import NEVER
from horsies.worker.config import WorkerConfig
from horsies.worker.in_flight import InFlight
from horsies.worker.liveness import Identity, Liveness
from horsies.worker.notifications import Notifications
from horsies.worker.pool.pool import ChildPool
from horsies.worker.reaper import (
    expire_paused,
    looking_steps,
    recover_ownerless,
    rescue,
    stale_seconds,
    sweep,
)

logger = logging.getLogger("horsies.worker")

# A worker with tasks shows itself this often; an idle one at its safety poll, with the same statement.
SEEN_SECONDS = 2.0
# A sign of life goes out this much before its time if something else goes out anyway.
EARLY_SECONDS = 0.5
SWEEP_SECONDS = 3600.0
NEXT_SWEEP_SECONDS = 1.0
# Longer than any break matters, and small enough for an interval.
LONG_SECONDS = 1e6


class Timer:
    """Something to do again after so many seconds; the first time at once."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time."""
        return now >= self.at

    def done(self, now: float) -> None:
        """It was done now."""
        self.at = now + self.seconds


class Maintenance:
    """The worker's services, run inside its loop."""

    def __init__(
        self,
        app_config: AppConfig,
        config: WorkerConfig,
        identity: Identity,
        pool: ChildPool,
        in_flight: InFlight,
        notifications: Notifications,
    ) -> None:
        recovery = app_config.recovery
        self._app_config = app_config
        self._identity = identity
        self._pool = pool
        self._in_flight = in_flight
        self._notifications = notifications
        # Whether notifications arrive: as we say it next, and as it was stored last.
        self._hears = self._stored_hears = True
        self._liveness = Liveness(app_config, config, identity)
        # Well before silence alone would mean that we are dead, however rarely we poll.
        most_seconds = stale_seconds(recovery) / 3
        self._busy_seconds = min(SEEN_SECONDS, most_seconds)
        poll_seconds = app_config.resilience.notify_poll_interval_ms / 1000
        self._idle_seconds = min(poll_seconds, most_seconds)
        self._seen_at = -NEVER
        self._is_open = False
        # When we last were without a connection.
        self._connected_at = -NEVER
        self._hurries = False
        self._heartbeat = Timer(recovery.runner_heartbeat_interval_ms / 1000)
        self._renewal = Timer(app_config.effective_claimer_heartbeat_interval_ms / 1000)
        self._ownerless = Timer(recovery.check_interval_ms / 1000)
        self._snapshot = Timer(recovery.worker_state_snapshot_interval_ms / 1000)
        self._sweep = Timer(SWEEP_SECONDS)
        self.is_lost = False

    def lock(self, connection: Connection[Any]) -> None:
        """Take the worker's session lock on a fresh listening connection."""
        if self._is_open:
            self.note_break()
        self._is_open = True
        self._liveness.lock(connection)

    def note_break(self) -> None:
        """A connection of ours broke: the same fault may have cut others, who are no more dead than we."""
        self._connected_at = time.monotonic()

    def hurry(self) -> None:
        """Notifications may have been missed: look for cancels at once."""
        self._hurries = True

    def note_cancels(self, task_ids: Iterable[str]) -> None:
        """Somebody says that these tasks should be cancelled. Anybody may: the table is asked first."""
        if self._in_flight.holds_any(task_ids):
            self.hurry()

    def next_at(self) -> float:
        """When the next duty is due."""
        if self._hurries:
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
        """Do what is due. The sign of life comes first: everything else may take its time."""
        if now >= self._seen_due_at():
            self.note_signs(pipeline, pipeline.run(self.signs_of_life(now)), now)
        if self._hurries or self._heartbeat.is_due(now):
            self._beat(pipeline, now)
        if self._renewal.is_due(now):
            self._renew(pipeline, now)
        if self._snapshot.is_due(now):
            self._snapshot.done(now)
            pipeline.run([self._state()])
        if self._ownerless.is_due(now):
            self._ownerless.done(now)
            recover_ownerless(pipeline, self._app_config.recovery)
            expire_paused(pipeline, self._app_config.recovery)
        if self._sweep.is_due(now):
            more = sweep(pipeline, self._app_config.recovery)
            self._sweep.at = now + (NEXT_SWEEP_SECONDS if more else SWEEP_SECONDS)

    def signs_of_life(self, now: float) -> list[Step]:
        """Return the statements by which we show life and look for the dead, if it is about time.

        Another transaction may carry them along: an idle worker then needs one per poll in all.
        """
        if now < self._seen_due_at() - EARLY_SECONDS:
            return []
        worker_id = self._identity.worker_id
        self._hears = self._notifications.check(now)
        if not self._notifications.is_connected():
            self.note_break()
        return self._liveness.steps(self._hears) + looking_steps(
            worker_id, self._app_config, self._connected(now)
        )

    def note_signs(self, pipeline: Pipeline, answers: Sequence[list[Any]], now: float) -> None:
        """Take the answers to ``signs_of_life``: are we alive to others, and who is not?"""
        *_, seen, led, lost = answers
        self._seen_at = now
        if seen:
            self._note_call(now)
        self.is_lost = not self._liveness.note_seen(seen)
        if not self.is_lost:
            self._liveness.lock_if_missing()
            # A pooler may have kept our question through an outage that freed the locks of the living.
            if self._notifications.is_connected():
                rescue(pipeline, led, lost, self._app_config.recovery)

    def _note_call(self, now: float) -> None:
        self._notifications.note_call(now)
        if self._hears != self._stored_hears:
            self._stored_hears = self._hears
            self._snapshot.at = 0.0  # snapshots should not show otherwise for half a minute

    def _connected(self, now: float) -> float:
        """Seconds since our own connection last broke; as good as ever if it never did."""
        return min(now - self._connected_at, LONG_SECONDS)

    def _beat(self, pipeline: Pipeline, now: float) -> None:
        """Ask which tasks should not be alive, and say at its time which long-running ones are."""
        if self._pool.busy():
            steps: list[Step] = [(find_cancel_requests, WorkerId(self._identity.worker_id))]
            if self._heartbeat.is_due(now):
                steps += self._heartbeats(now)
            self._in_flight.cancel(row.id for row in pipeline.run(steps)[0])
        self._hurries = False
        if self._heartbeat.is_due(now):
            self._heartbeat.done(now)

    def _heartbeats(self, now: float) -> list[Step]:
        busy = self._pool.busy().values()
        long = [one.assignment for one in busy if now - one.since >= self._heartbeat.seconds]
        if not long:
            return []
        ids = [assignment.task_id for assignment in long]
        generations = [assignment.generation for assignment in long]
        identity = self._identity
        beats = SendHeartbeats(identity.worker_id, identity.hostname, ids, generations)
        return [(send_heartbeats, beats)]

    def _renew(self, pipeline: Pipeline, now: float) -> None:
        self._renewal.done(now)
        waiting = self._in_flight.waiting(self._in_flight.waiting_count)
        if not waiting:
            return
        lease = RenewClaims(
            self._identity.worker_id,
            [task.id for task in waiting],
            [task.generation for task in waiting],
            self._app_config.effective_claim_lease_ms,
            self._app_config.max_claim_renew_age_ms,
        )
        locking = locking_steps(task.workflow_id for task in waiting)
        pipeline.run([*locking, (renew_claims, lease)])

    def _state(self) -> Step:
        memory_mb = self._pool.children_memory_mb()
        return self._liveness.snapshot(
            self._in_flight.running_count, self._in_flight.waiting_count, memory_mb
        )

    def pong(self, pipeline: Pipeline, pings: Iterable[str]) -> None:
        """Answer whoever asks which workers are there; no question is worth a worker."""
        if not (steps := self._liveness.pongs(pings)):
            return
        try:
            pipeline.run(steps)
        except Exception as error:
            if is_transient(error):
                raise
            logger.warning("a ping could not be answered: %s", describe(error))

    def sign_off(self, pipeline: Pipeline) -> None:
        """Say goodbye with a last snapshot."""
        pipeline.run([self._state()])
        self._liveness.sign_off(pipeline)

    def forget_registration(self) -> None:
        """Others declared this worker lost: it comes back as if it had just started."""
        self._liveness.forget()
        self._seen_at = -NEVER
        self.is_lost = False
