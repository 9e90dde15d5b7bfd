"""The heartbeat: shows that a worker is alive, and finds workers that are not. A heartbeat renews the
worker's row and reads the rows of other workers. After a freeze or a lost connection, the worker sends a
heartbeat before any other work, because other workers may have recovered its tasks. While the database
refuses heartbeats, the worker reads from its row whether other workers have declared it lost.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from horsies.config.app import AppConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import ClaimedTask
from horsies.db.statements.workers import find_owned, read_own_row, watch_workers
from horsies.tasks.blocked import Blocked, is_of_one
from horsies.worker.agenda import NEVER, REST_FACTOR, lifetime_clock
from horsies.worker.connection import WorkerConnection
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.liveness import Liveness
from horsies.worker.notifications import WakeUps
from horsies.worker.reaper import recover_lost_workers
from horsies.worker.watch import Watch, WatchLimits

logger = logging.getLogger("horsies.worker")

# The interval of heartbeats of a worker with tasks. An idle worker sends a heartbeat with its safety poll.
SEEN_SECONDS = 2.0
# An idle worker sends its heartbeat early, by a random time of up to this fraction of the interval. Otherwise
# workers that reconnect together after an outage would keep sending their heartbeats at the same time.
SPREAD = 0.1
# A heartbeat that is due within this time is added to a transaction that is sent anyway.
EARLY_SECONDS = 0.5
# A heartbeat that is overdue by this time is sent before the next turn, because the turn may wait for a lock.
LATE_SECONDS = 1.0

_JOB = "the heartbeat of this worker"
_REMEDY = (
    "; look for a session that locks horsies_workers, for a trigger on this table, and at the rights of the "
    "role"
)


@dataclass(slots=True)
class HeartbeatClock:
    """Tracks when the next heartbeat is due."""

    busy_seconds: float
    idle_seconds: float
    suspicion_seconds: float
    sent_at: float = -NEVER
    # The time before which no heartbeat is sent, because the database refused the last heartbeat.
    refused_until: float = 0.0
    # When the last heartbeat was sent; its response may arrive much later.
    asked_at: float = 0.0
    # Whether the last heartbeat notified this worker, and whether it stored that this worker waits for
    # tasks.
    calls: bool = False
    waits: bool = False
    # By how much the next heartbeat of an idle worker is sent early.
    early_seconds: float = 0.0

    @classmethod
    def of(cls, config: AppConfig, limits: WatchLimits) -> HeartbeatClock:
        """A heartbeat is due well before other workers count this worker as silent, regardless of its polling
        interval.
        """
        most_seconds = min(limits.look_seconds, limits.lock_seconds)
        poll_seconds = config.resilience.notify_poll_interval_ms / 1000
        return cls(
            min(SEEN_SECONDS, most_seconds),
            min(poll_seconds, most_seconds),
            limits.suspicion_seconds,
        )

    def due_at(self, *, is_idle: bool, has_suspects: bool) -> float:
        seconds = self.idle_seconds - self.early_seconds if is_idle else self.busy_seconds
        if has_suspects:
            seconds = min(seconds, self.suspicion_seconds)
        return max(self.sent_at + seconds, self.refused_until)

    def note_accepted(self, now: float) -> None:
        self.sent_at, self.refused_until = now, 0.0
        self.early_seconds = random.uniform(0, SPREAD * self.idle_seconds)

    def note_refusal(self, now: float) -> None:
        taken_seconds = time.monotonic() - self.asked_at
        self.refused_until = now + max(self.busy_seconds, REST_FACTOR * taken_seconds)


class Heartbeat:
    """Sends one worker's heartbeats and evaluates the results."""

    def __init__(
        self,
        app_config: AppConfig,
        liveness: Liveness,
        dispatcher: Dispatcher,
        connection: WorkerConnection,
        blocked: Blocked,
    ) -> None:
        self._app_config = app_config
        self._liveness = liveness
        self._dispatcher = dispatcher
        self._connection = connection
        self._blocked = blocked
        limits = WatchLimits.of(app_config)
        self._watch = Watch(limits, liveness.identity.sees_gone)
        self._clock = HeartbeatClock.of(app_config, limits)
        # When the last stored heartbeat started, on the clock that keeps running while the machine is
        # suspended.
        self.shown_at = lifetime_clock()
        # How many times the connection had broken before the last accepted heartbeat, and before the last
        # heartbeat that was sent.
        self._breaks = self._breaks_asked = -1
        # How many times the worker needed a confirmation from the database that it still owns its tasks, and
        # how many times it got one.
        self._checks_needed = self._checks_done = 0
        self.is_lost = False
        # Whether notifications arrive.
        self.is_receiving = True
        self.wake_ups = WakeUps()

    def due_at(self) -> float:
        is_idle = self._dispatcher.ledger.is_empty
        return self._clock.due_at(is_idle=is_idle, has_suspects=self._watch.has_suspects)

    def poll_early_seconds(self, now: float) -> float:
        """Return how much earlier an idle worker polls, so that the poll and a due heartbeat share a
        transaction.
        """
        return self._clock.early_seconds + EARLY_SECONDS if now >= self.due_at() else 0.0

    @property
    def must_come_first(self) -> bool:
        """Return whether a heartbeat must precede any other work, because other workers may have declared
        this worker lost while it was frozen or without a connection.
        """
        return self.was_frozen or self._breaks != self._connection.breaks

    @property
    def was_frozen(self) -> bool:
        """Whether other workers may have recovered tasks since the last check."""
        return self._checks_needed != self._checks_done

    def note_freeze(self) -> None:
        """Note that this process did not run for a long time, so the ownership of its tasks must be
        checked.
        """
        self._checks_needed += 1
        self._watch.note_gap()

    def show(self, pipeline: Pipeline, now: float) -> None:
        """Send a heartbeat, and stop the tasks that now belong to another worker.

        If a freeze has made its results outdated, the heartbeat is repeated. A refused heartbeat raises an
        error, unless this worker was declared lost.
        """
        self._checks_needed = check = self._checks_needed + 1
        self._clock.sent_at = -NEVER
        try:
            answers = pipeline.run(self._signs_of_life(now))
        except psycopg.Error as error:
            if not is_of_one(error):
                raise
            self._note_refusal(pipeline, now)
            if self.is_lost:
                return
            raise
        self.note_signs(pipeline, answers, now)
        if not self.is_lost and (held := self._dispatcher.ledger.tasks()):
            self._dispatcher.keep_owned(self.owned(pipeline, held))
        self._checks_done = check
        if self.was_frozen:
            self.show(pipeline, time.monotonic())

    def owned(self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]) -> set[str]:
        """Return the ids of the attempts that the database still lists as this worker's."""
        ids, generations = [task.id for task in tasks], [task.generation for task in tasks]
        find = find_owned(self._liveness.identity.worker_id, ids, generations)
        return {row.id for row in pipeline.run([find])[0]}

    def send_if_late(self, pipeline: Pipeline, now: float) -> None:
        """Send a heartbeat that is late because turns have failed."""
        if now >= self.due_at() + LATE_SECONDS:
            self.send(pipeline, now)

    def send(self, pipeline: Pipeline, now: float) -> None:
        """Send a heartbeat. If the database refuses to change this worker's row, tasks continue, because
        other workers see that its session holds the lock and executes statements. An unregistered worker must
        wait, because other workers would not know that it owns its tasks.
        """
        answers: list[list[Any]] | None = None
        steps = [self._blocked.lock_wait(), *self._signs_of_life(now)]
        if not self._liveness.is_registered:
            answers = pipeline.run(steps)
        else:
            with self._blocked.failures.job(_JOB, "heartbeat_refused", _REMEDY):
                answers = pipeline.run(steps)
        if answers is None:
            self._note_refusal(pipeline, now)
        else:
            self.note_signs(pipeline, answers, now)

    def _note_refusal(self, pipeline: Pipeline, now: float) -> None:
        """After a refused heartbeat, read without a lock whether this worker was declared lost.

        Neither a refused read nor a deleted row proves anything.
        """
        self._clock.note_refusal(now)
        if not self._liveness.is_registered:
            return
        find = read_own_row(self._liveness.identity.worker_id)
        try:
            _, rows = pipeline.run([self._blocked.lock_wait(), find])
        except psycopg.Error as error:
            if not is_of_one(error):
                raise
        else:
            self.is_lost = any(row.was_stopped for row in rows)

    def carried_signs(self, now: float) -> list[Step]:
        """Return a heartbeat's statements for use in another transaction, so that an idle worker needs
        only one transaction per poll.

        There are none if it is too early for a heartbeat, or while the database refuses heartbeats.
        """
        if now < self.due_at() - EARLY_SECONDS or _JOB in self._blocked.failures.refused_jobs:
            return []
        return [self._blocked.lock_wait(), *self._signs_of_life(now)]

    def _signs_of_life(self, now: float) -> list[Step]:
        """Return the statements that show that this worker is alive, and the statements that search for lost
        workers.
        """
        self.is_receiving = self._connection.check_notifications(now)
        self._has_broken()
        self._breaks_asked = self._connection.breaks
        self._clock.asked_at = time.monotonic()
        self._clock.calls = self._connection.deliveries.check.wants_call
        self._clock.waits = waits = self.wake_ups.waits
        identity = self._liveness.identity
        return [
            *self._liveness.steps(
                receives_notifications=self.is_receiving, waits=waits, calls=self._clock.calls
            ),
            watch_workers(identity.worker_id, identity.process_space, self._watch.late_seconds),
        ]

    def _has_broken(self) -> bool:
        """Return whether the connection broke after the last accepted heartbeat, which interrupts the
        observation of other workers.
        """
        self._connection.is_connected()  # this call notices a lost connection that only the socket shows
        has_broken = self._breaks != self._connection.breaks
        if has_broken:
            self._watch.note_gap()
        return has_broken

    def note_signs(self, pipeline: Pipeline, answers: Sequence[list[Any]], now: float) -> None:
        """Evaluate the results of a heartbeat's statements, and recover lost workers' tasks."""
        *_, seen, others = answers
        taken_seconds = time.monotonic() - self._clock.asked_at
        self._clock.note_accepted(now)
        self._breaks = self._breaks_asked
        self.shown_at = lifetime_clock() - taken_seconds
        self.wake_ups.is_stored = self._clock.waits
        if seen:
            self._dispatcher.tally.note_clock(seen[0].seen_at, taken_seconds)
            self._connection.note_heartbeat(now + taken_seconds, called=self._clock.calls)
        self.is_lost = not self._liveness.note_seen(seen)
        if self.is_lost:
            self._watch.note_gap()
            return
        # A pooler may have delayed the query during an outage that freed the locks of live workers.
        if self._has_broken():
            self._breaks = self._connection.breaks
            return
        verdicts = self._watch.note_look(others, now, now + taken_seconds)
        with self._blocked.failures.job("the recovery of lost workers"):
            recover_lost_workers(pipeline, verdicts, self._app_config, self._blocked)

    def register_again(self, pipeline: Pipeline) -> None:
        """Register this worker again, as after a start, because another worker declared it lost."""
        self._liveness.forget()
        self.is_lost = False
        self.show(pipeline, time.monotonic())
