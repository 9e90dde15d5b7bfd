"""The worker: one loop that serves children, takes turns with the database, and sleeps in between.

Where the line turns around: claimed tasks go down to children, reports come up and are recorded. The
loop decides when a turn is worth taking; ``turn.py`` takes it, ``pool.py`` runs the children,
``settle.py`` says what an end means, ``agenda.py`` how long to sleep.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Iterable
from datetime import datetime
from enum import IntEnum
from typing import Any, assert_never

import psycopg
from psycopg import Connection

from horsies.app import Horsies
from horsies.codec import encode_task_error
from horsies.config import QUEUE_CHANNEL_PREFIX
from horsies.db.connect import Database
from horsies.db.listen import Listener, hears_itself
from horsies.db.migrate import apply_migrations
from horsies.db.query import Step
from horsies.db.together import Together
from horsies.db.turn import (
    ClaimedTask,
    ExpireTasks,
    LookAhead,
    SendHeartbeats,
    WorkerId,
    expire_tasks,
    find_cancel_requests,
    seconds_until_due,
    send_heartbeats,
)
from horsies.ids import new_id
from horsies.outcome import OutcomeCode, TaskError
from horsies.worker.agenda import NEVER, Agenda
from horsies.worker.ear import CANCEL_CHANNEL, Ear
from horsies.worker.link import Link, turn_connector
from horsies.worker.pace import LINGER_SECONDS, Pace
from horsies.worker.pool import (
    Assignment,
    ChildPool,
    Died,
    HookFailed,
    NoIdleChildError,
    PoolEvent,
    Reported,
    Stopped,
)
from horsies.worker.settings import WorkerConfig
from horsies.worker.settle import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    STOPPED_BY_SHUTDOWN,
    Settlement,
    settle_death,
    settle_report,
    settle_stop,
)
from horsies.worker.turn import Claimer, give_back, take_turn

logger = logging.getLogger("horsies.worker")

EXPIRY_BATCH = 500
# How long a stopping worker waits for a lost database to take back a claim that was in doubt.
RELEASE_PATIENCE_SECONDS = 5.0
EXPIRED_RESULT = encode_task_error(
    TaskError(
        error_code=OutcomeCode.TASK_EXPIRED, message="The task did not start before its good_until."
    )
)


class ExitCode(IntEnum):
    """How a worker ended."""

    CLEAN = 0
    FAILED = 1
    FORCED = 3


class DeafError(Exception):
    """LISTEN is accepted but delivers nothing, as behind a pooler in transaction mode."""


class Worker:
    """One worker process; ``run`` returns its exit code.

    ``request_stop`` may be called from a signal handler: once for an orderly stop, again to interrupt
    the running tasks, a third time to leave at once.
    """

    def __init__(
        self, app: Horsies, config: WorkerConfig, pool: ChildPool, selector: selectors.BaseSelector
    ) -> None:
        self.worker_id = new_id()
        self._config = config
        self._pool = pool
        self._recovery = app.config.recovery
        self._database = Database(app.config.broker, "worker")
        self._link = Link(turn_connector(self._database), app.config.resilience)
        self._ear = Ear(Listener(self._connect_listener, self._channels()), selector)
        self._claimer = Claimer(
            self.worker_id, socket.gethostname(), config.queues, config.max_claim_batch
        )
        self._agenda = Agenda(
            app.config.resilience.notify_poll_interval_ms / 1000,
            self._recovery.runner_heartbeat_interval_ms / 1000,
        )
        # Every task this worker owns, from its claim until its outcome is recorded or lost.
        self._held: dict[str, ClaimedTask] = {}
        self._settlements: list[Settlement] = []
        self._pace = Pace()
        self._needs_release = False
        self._last_look: datetime | None = None
        self._awake_at = _lifetime_seconds()
        self._stop_requests = 0
        self._stopping_since: float | None = None
        self._grace_ends_at = NEVER
        self._interrupted = False
        self._failure: str | None = None

    def _connect_listener(self) -> Connection[Any]:
        return self._database.connect("listener", session=True)

    def _channels(self) -> list[str]:
        return [
            *(f"{QUEUE_CHANNEL_PREFIX}{queue}" for queue in self._config.queues),
            CANCEL_CHANNEL,
        ]

    # Life

    def request_stop(self) -> None:
        """Ask for an orderly stop; the second time, interrupt running tasks; the third, leave."""
        self._stop_requests += 1

    def run(self) -> ExitCode:
        """Serve until asked to stop and everything that runs has been recorded."""
        try:
            self._open()
            while not self._is_done():
                self._step()
        finally:
            self._close()
        if self._failure is not None:
            return ExitCode.FAILED
        is_clean = not (self._interrupted or self._held or self._needs_release)
        return ExitCode.CLEAN if is_clean else ExitCode.FORCED

    def _open(self) -> None:
        """Wait for the database, bring its schema up to date, prove that LISTEN works."""
        while self._stop_requests == 0:
            try:
                self._prepare_database()
                return
            except psycopg.Error as error:
                self._link.lose(error)
                self._absorb(self._pool.collect(max(0.0, self._link.retry_at - time.monotonic())))

    def _prepare_database(self) -> None:
        with self._database.connect("schema", session=True) as connection:
            apply_migrations(connection)
        if not hears_itself(self._connect_listener):
            raise DeafError(
                "LISTEN is accepted but nothing is delivered: a pooler in transaction mode stands in "
                "between; set session_database_url to a direct connection."
            )
        self._ear.open()
        logger.info("listening on %s", ", ".join(self._channels()))

    def _is_done(self) -> bool:
        if self._stop_requests == 0 or self._stop_requests >= 3:
            return self._stop_requests >= 3
        if self._held or self._settlements:
            return False
        return not self._needs_release or time.monotonic() >= self._release_ends_at()

    def _close(self) -> None:
        self._pool.shutdown()
        self._ear.close()
        self._link.close()

    # The loop

    def _step(self) -> None:
        events = self._pool.collect(self._seconds_to_sleep())
        self._take_wake_up_calls()
        self._fence_if_late()
        self._absorb(events)
        self._listen()
        self._linger()
        self._agenda.tick(time.monotonic())
        self._obey_stop()
        together = self._link.open()
        if together is None:
            return
        try:
            self._work(together)
        except psycopg.Error as error:
            self._link.lose(error)
        else:
            self._link.confirm()

    def _take_wake_up_calls(self) -> None:
        """Signals call through a socket in the selector; one left unanswered would never let us sleep."""
        for key, _ in self._pool.foreign_keys:
            if callable(key.data):
                key.data()

    def _linger(self) -> None:
        """Wait a moment for the rest of a batch of very short tasks, so that one turn carries them all."""
        while self._settlements and self._pace.linger_seconds(time.monotonic()):
            events = self._pool.collect(LINGER_SECONDS)
            self._absorb(events)
            if not events:
                break

    def _seconds_to_sleep(self) -> float:
        now = time.monotonic()
        has_work = self._settlements or self._needs_release or self._claimable()
        if self._link.is_up and has_work:
            return 0.0
        wake_at = self._agenda.next_at() if self._link.is_up else self._link.retry_at
        wake_at = min(wake_at, self._grace_ends_at)
        if self._needs_release:
            wake_at = min(wake_at, self._release_ends_at())
        retry_seconds = self._ear.seconds_until_retry()
        if retry_seconds is not None:
            wake_at = min(wake_at, now + retry_seconds)
        return max(0.0, wake_at - now)

    def _work(self, together: Together) -> None:
        if self._needs_release:
            give_back(together, self.worker_id, list(self._held))
            self._needs_release = False
        wanted = self._claimable()
        if self._settlements or wanted:
            self._turn(together, wanted)
        now = time.monotonic()
        if not self._settlements and self._agenda.wants_look_ahead(now):
            self._look_ahead(together)
        if self._agenda.wants_heartbeat(now):
            self._beat(together, now)

    def _claimable(self) -> int:
        """How many tasks to claim now: idle children, within the limits, if there may be work."""
        if self._stop_requests or not self._agenda.may_have_work:
            return 0
        running = len(self._held) - len(self._settlements)
        return max(0, min(self._pool.idle_count, self._config.effective_claims - running))

    def _turn(self, together: Together, wanted: int) -> None:
        settlements = self._settlements
        # Until the answer is here the COMMIT of a claim is in doubt: what no child has goes back.
        self._needs_release = wanted > 0
        turned = take_turn(together, self._claimer, settlements, self._pool.next_idle_pids(wanted))
        self._needs_release = False
        self._settlements = []
        for settlement in settlements:
            del self._held[settlement.task_id]
            if settlement.task_id not in turned.recorded:
                logger.warning(
                    "task %s belongs to somebody else now; its outcome is dropped",
                    settlement.task_id,
                )
        if wanted:
            possible = min(wanted, self._config.max_claim_batch or wanted)
            self._agenda.note_claim(possible, len(turned.claimed))
            self._hand_out(turned.claimed)
            self._pace.note_hand_out((task.id for task in turned.claimed), time.monotonic())

    def _hand_out(self, claimed: Iterable[ClaimedTask]) -> None:
        for task in claimed:
            if task.id in self._held:
                # Somebody took it from us and gave it back to the queue; the old attempt is void.
                self._pool.stop_task(task.id, STOPPED_BY_LOSS)
            assignment = Assignment(
                task.id,
                task.generation,
                task.task_name,
                task.retry_count + 1,
                task.args or "[]",
                task.kwargs or "{}",
                task.timeout_ms,
            )
            try:
                self._pool.dispatch(assignment, task.worker_pid)
            except NoIdleChildError:
                self._needs_release = True
            else:
                self._held[task.id] = task

    # What children say

    def _absorb(self, events: Iterable[PoolEvent]) -> None:
        now = time.monotonic()
        for event in events:
            match event:
                case Reported(report=report):
                    self._pace.note_end(report.task_id, now)
                    if task := self._owned(report.task_id, report.generation):
                        self._settlements.append(settle_report(task, report))
                case Died():
                    self._absorb_death(event)
                case Stopped(assignment=assignment, reason=reason):
                    if task := self._owned(assignment.task_id, assignment.generation):
                        self._settlements.append(settle_stop(task, reason))
                case HookFailed(name=name, description=description):
                    self._fail(f"Child process start hook {name} {description}.")
                case _:
                    assert_never(event)

    def _owned(self, task_id: str, generation: int) -> ClaimedTask | None:
        """The task, unless it was lost and claimed again since that attempt began."""
        task = self._held.get(task_id)
        return task if task is not None and task.generation == generation else None

    def _absorb_death(self, event: Died) -> None:
        if event.assignment is None:
            logger.error(
                "child %s ended while idle (%s); it is replaced", event.pid, event.description
            )
            return
        task = self._owned(event.assignment.task_id, event.assignment.generation)
        if task is None:
            return
        if not event.started:
            del self._held[task.id]
            self._needs_release = True
            return
        logger.error(
            "child %s died (%s) while running %s %s",
            event.pid,
            event.description,
            task.task_name,
            task.id,
        )
        self._settlements.append(settle_death(task, event.description))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            logger.critical("%s The worker stops.", reason)
            self._failure = reason
            self.request_stop()

    # What the database says

    def _listen(self) -> None:
        if not self._pool.foreign_keys and self._ear.seconds_until_retry() is None:
            return
        news = self._ear.hear()
        if news.gap:
            self._agenda.note_gap()
        elif news.work:
            self._agenda.wake()
        self._cancel(news.cancelled)

    def _cancel(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self._pool.stop_task(task_id, STOPPED_BY_CANCEL)

    def _look_ahead(self, together: Together) -> None:
        """Expire what is past its deadline and learn when the next task is due."""
        expired, (due,) = together.run(
            [
                (expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH)),
                (seconds_until_due, LookAhead(self._config.queues, self._last_look)),
            ]
        )
        if expired:
            logger.info("%d task(s) expired", len(expired))
        self._last_look = due.looked_at
        self._agenda.note_look_ahead(time.monotonic(), due.seconds)

    def _beat(self, together: Together, now: float) -> None:
        """Say which long-running tasks are alive, and ask which tasks should not be."""
        self._agenda.note_heartbeat(now)
        busy = self._pool.busy().values()
        if not busy:
            return
        interval = self._agenda.heartbeat_seconds
        long = [one.assignment for one in busy if now - one.since >= interval]
        steps: list[Step] = [(find_cancel_requests, WorkerId(self.worker_id))]
        if long:
            ids = [assignment.task_id for assignment in long]
            generations = [assignment.generation for assignment in long]
            heartbeat = SendHeartbeats(self.worker_id, self._claimer.hostname, ids, generations)
            steps.append((send_heartbeats, heartbeat))
        self._cancel(row.id for row in together.run(steps)[0])

    # Stopping, and waking up too late

    def _obey_stop(self) -> None:
        if self._stop_requests == 0:
            return
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
            grace_seconds = self._config.shutdown_grace_seconds
            self._grace_ends_at = NEVER if grace_seconds is None else now + grace_seconds
            logger.info("stopping: %d task(s) still running", len(self._held))
        if self._stop_requests >= 2 or now >= self._grace_ends_at:
            self._interrupt_everything()

    def _interrupt_everything(self) -> None:
        self._grace_ends_at = NEVER
        running = list(self._pool.busy())
        if self._interrupted or not running:
            return
        self._interrupted = True
        logger.warning("the grace period is over: %d task(s) are interrupted", len(running))
        for task_id in running:
            self._pool.stop_task(task_id, STOPPED_BY_SHUTDOWN)

    def _release_ends_at(self) -> float:
        if self._stopping_since is None:
            return NEVER
        is_pressed = self._stop_requests >= 2
        return self._stopping_since + (0.0 if is_pressed else RELEASE_PATIENCE_SECONDS)

    def _fence_if_late(self) -> None:
        """Kill the children of a worker that was frozen for so long that its tasks may have been given away.

        Before talking to anyone: the database may already run them elsewhere. What they wrote meanwhile
        is refused by the generation.
        """
        now = _lifetime_seconds()
        late_seconds = now - self._awake_at
        self._awake_at = now
        allowed_seconds = self._recovery.running_stale_threshold_ms / 1000
        if late_seconds > allowed_seconds and self._held:
            logger.critical(
                "this worker was frozen for %.1f s: its children are killed", late_seconds
            )
            self._pool.kill_all()


def _lifetime_seconds() -> float:
    """A clock that also runs while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
