"""The worker: one loop that serves children, takes turns with the database, and sleeps in between.

Where the line turns around: claimed tasks go down to children, reports come up and are recorded. The
loop decides when a turn is worth taking; ``turn.py`` takes it, ``pool.py`` runs the children,
``settle.py`` says what an end means, ``agenda.py`` how long to sleep, ``farewell.py`` how to stop.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from enum import IntEnum

import psycopg

from horsies.app import Horsies
from horsies.config.app import QUEUE_CHANNEL_PREFIX
from horsies.db.database import Database
from horsies.db.listen import hears_itself
from horsies.db.migrate import apply_migrations
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import (
    ClaimedTask,
    ExpireTasks,
    Limit,
    LookAhead,
    expire_tasks,
    release_lapsed,
    seconds_until_due,
)
from horsies.events import as_event
from horsies.ids import new_id
from horsies.tasks.outcome import STOPPED_BY_SHUTDOWN
from horsies.tasks.recovery import EXPIRED_RESULT, EXPIRY_BATCH
from horsies.worker.agenda import Agenda
from horsies.worker.bookmarks import Bookmarks
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import make_sessions
from horsies.worker.in_flight import InFlight
from horsies.worker.liveness import PING_CHANNEL, Identity, echo_channel
from horsies.worker.maintenance import Maintenance
from horsies.worker.node_inputs import Inputs, asking_tasks
from horsies.worker.notifications import CANCEL_CHANNEL, Notifications
from horsies.worker.pool.events import PoolEvent
from horsies.worker.pool.pool import ChildPool
from horsies.worker.shutdown import Shutdown
from horsies.worker.turn import Wanted, give_back, make_claimer, take_turn

logger = logging.getLogger("horsies.worker")

# A pooler would keep the goodbye, and the worker with it, for as long as the database is away.
GOODBYE_SECONDS = 1.0
_LIFETIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ExitCode(IntEnum):
    """How a worker ended."""

    CLEAN = 0
    FAILED = 1
    FORCED = 3


class NotificationsLostError(Exception):
    """LISTEN is accepted but delivers nothing, as behind a pooler in transaction mode."""


class LeftWaiting(BaseException):
    """The last request to stop came while the database kept us waiting; nothing may catch it on the way."""


class Worker:
    """One worker process; ``run`` returns its exit code.

    ``request_stop`` may be called from a signal handler: once for an orderly stop, again to interrupt
    the running tasks, a third time to leave at once.
    """

    def __init__(
        self,
        app: Horsies,
        config: WorkerConfig,
        pool: ChildPool,
        selector: selectors.BaseSelector,
    ) -> None:
        identity = Identity.of(new_id())
        self.worker_id = identity.worker_id
        self._config = config
        self._pool = pool
        self._app_config = app.config
        self._database = Database(app.config.broker, "worker")
        self._in_flight = InFlight(pool, Inputs(asking_tasks(app)))
        poll_seconds = app.config.resilience.notify_poll_interval_ms / 1000
        channels = [*self._channels(), echo_channel(identity.worker_id)]
        self._link, listener = make_sessions(
            self._database,
            app.config.resilience,
            channels,
            lambda session: self._maintenance.lock(session),
        )
        self._notifications = Notifications(listener, selector, poll_seconds)
        self._link.on_close = self._notifications.follow_socket
        self._maintenance = Maintenance(
            app.config, config, identity, pool, self._in_flight, self._notifications
        )
        self._claimer = make_claimer(app.config, config, identity.worker_id, identity.hostname)
        self._bookmarks = Bookmarks(config.queues)
        self._agenda = Agenda(poll_seconds)
        self._last_look: datetime | None = None
        # Whether a claim of ours came after everything our own transactions may have notified of.
        self._claimed_last = False
        self._pings: list[str] = []
        # What children did while the database kept us waiting.
        self._met_waiting: list[PoolEvent] = []
        self._awake_at = _lifetime_seconds()
        self._shutdown = Shutdown(config.shutdown_grace_seconds)
        self._failure: str | None = None
        # Called with every request to stop, in a signal handler too.
        self.on_stop: Callable[[], None] | None = None

    def _channels(self) -> list[str]:
        queues = (f"{QUEUE_CHANNEL_PREFIX}{queue}" for queue in self._config.queues)
        return [*queues, CANCEL_CHANNEL, PING_CHANNEL]

    # Life

    def request_stop(self) -> None:
        """Ask for an orderly stop; the second time, interrupt running tasks; the third, leave."""
        self._shutdown.ask()
        if self.on_stop is not None:
            self.on_stop()

    def fail(self, reason: str) -> None:
        """Ask for an orderly stop that ends in failure; the first reason is the one that is told."""
        if self._failure is None:
            self._failure = reason
            logger.critical(
                "%s The worker stops.", reason, extra=as_event("worker_failed", reason=reason)
            )
            self.request_stop()

    def run(self) -> ExitCode:
        """Serve until asked to stop and everything that runs has been recorded."""
        try:
            self._open()
            while not self._is_done():
                self._step()
        except LeftWaiting:
            self._in_flight.needs_release = True
            self._link.close()
        except BaseException:
            self._in_flight.needs_release = True  # a claim may not have come as far as the desk
            raise
        finally:
            self._close()
        if self._failure is not None:
            return ExitCode.FAILED
        is_clean = self._in_flight.is_cleared and not self._shutdown.has_interrupted
        return ExitCode.CLEAN if is_clean else ExitCode.FORCED

    def _open(self) -> None:
        """Wait for the database, bring its schema up to date, prove that LISTEN works."""
        while not self._shutdown.is_asked:
            try:
                self._prepare_database()
                return
            except psycopg.Error as error:
                self._link.lose(error)
                pause_seconds = max(0.0, self._link.retry_at - time.monotonic())
                self._in_flight.absorb(self._pool.collect(pause_seconds))

    def _prepare_database(self) -> None:
        with self._database.connect("schema", session=True) as connection:
            apply_migrations(connection)
        if not hears_itself(lambda: self._database.connect("listener", session=True)):
            raise NotificationsLostError(
                "LISTEN is accepted but nothing is delivered: a pooler in transaction mode stands in "
                "between; set session_database_url to a direct connection."
            )
        self._notifications.open()
        logger.info("listening on %s", ", ".join(self._channels()), extra=as_event("worker_ready"))

    def _is_done(self) -> bool:
        shutdown = self._shutdown
        if not shutdown.is_asked or shutdown.is_immediate:
            return shutdown.is_immediate
        if not self._in_flight.is_empty:
            return False
        return not self._in_flight.needs_release or time.monotonic() >= shutdown.release_ends_at()

    def _close(self) -> None:
        self._pool.shutdown()
        # Without a goodbye the others take over what is left as quickly as after a sudden death.
        if (pipeline := self._link.pipeline) is not None and self._in_flight.is_cleared:
            pipeline.meanwhile = None  # nobody is left to serve, and the wait is short
            pipeline.patience_seconds = GOODBYE_SECONDS
            with suppress(psycopg.Error):  # others find out by themselves
                self._maintenance.sign_off(pipeline)
        self._notifications.close()
        self._link.close()

    # The loop

    def _step(self) -> None:
        events = self._pool.collect(self._seconds_to_sleep())
        self._take_wake_up_calls()
        self._fence_if_late()
        self._in_flight.absorb([*self._met_waiting, *events])
        self._met_waiting = []
        self._listen()
        self._linger()
        self._agenda.tick(time.monotonic())
        self._obey_stop()
        pipeline = self._link.open()
        if pipeline is None:
            self._maintenance.note_break()
            return
        pipeline.meanwhile = self._serve_waiting
        round_trips = pipeline.round_trips
        try:
            self._work(pipeline)
        except psycopg.Error as error:
            self._link.lose(error)
            self._maintenance.note_break()
        else:
            if pipeline.round_trips > round_trips:
                self._link.confirm()
            self._notifications.follow_socket()  # what nobody minds may have cost the session

    def _serve_waiting(self) -> None:
        """While the database keeps us waiting: time limits are kept, and the last request to stop obeyed."""
        self._awake_at = _lifetime_seconds()
        self._met_waiting += self._pool.collect(0.0)
        if self._shutdown.is_immediate:
            raise LeftWaiting

    def _take_wake_up_calls(self) -> None:
        """Signals call through a socket in the selector; one left unanswered would never let us sleep."""
        for key, _ in self._pool.foreign_keys:
            if callable(key.data):
                key.data()

    def _linger(self) -> None:
        """Wait a moment for the rest of a batch of very short tasks, so that one turn carries them all."""
        while self._in_flight.outcomes:
            seconds = self._in_flight.pace.linger_seconds(time.monotonic())
            if not seconds:
                return
            # Empty-handed is no reason to stop: a child that was ready or left woke us.
            self._in_flight.absorb(self._pool.collect(seconds))

    def _seconds_to_sleep(self) -> float:
        now = time.monotonic()
        if self._met_waiting or (self._link.is_up and self._has_work()):
            return 0.0
        planned = min(self._agenda.next_at(), self._maintenance.next_at())
        wake_at = planned if self._link.is_up else self._link.retry_at
        wake_at = min(wake_at, self._shutdown.next_at())
        if self._in_flight.needs_release:
            wake_at = min(wake_at, self._shutdown.release_ends_at())
        retry_seconds = self._notifications.seconds_until_retry()
        if retry_seconds is not None:
            wake_at = min(wake_at, now + retry_seconds)
        return max(0.0, wake_at - now)

    def _has_work(self) -> bool:
        in_flight = self._in_flight
        if in_flight.outcomes or in_flight.needs_release or self._pings:
            return True
        if self._shutdown.is_asked or not self._pool.idle_count + self._prefetch_room():
            return False
        return bool(in_flight.waiting_count and self._pool.idle_count) or (
            self._agenda.may_have_work and in_flight.held_count < self._config.effective_claims
        )

    def _prefetch_room(self) -> int:
        return max(0, self._app_config.prefetch_buffer - self._in_flight.waiting_count)

    def _work(self, pipeline: Pipeline) -> None:
        if self._in_flight.needs_release:
            self._claimed_last = False
            give_back(pipeline, self.worker_id, self._in_flight.held())
            self._in_flight.needs_release = False
        wanted = self._wanted()
        if self._in_flight.outcomes or wanted.starting or wanted.claims:
            self._turn(pipeline, wanted)
        now = time.monotonic()
        if not self._in_flight.outcomes and self._agenda.wants_look_ahead(now):
            self._look_ahead(pipeline)
        if now >= self._maintenance.next_at():
            self._claimed_last = False
            self._maintenance.perform(pipeline, now)
            self._fence_if_lost()
        if self._pings:
            self._maintenance.pong(pipeline, self._pings)
            self._pings = []

    def _wanted(self) -> Wanted:
        """What the next turn should start and claim: idle children first, then ahead of them."""
        freed = self._in_flight.freed_by_queue() if self._claimer.is_capped else {}
        if self._shutdown.is_asked:
            return Wanted(freed=freed)
        pids = self._pool.next_idle_pids(self._pool.idle_count)
        waiting = self._in_flight.waiting(len(pids))
        starting = list(zip(waiting, pids, strict=False))
        if not (self._agenda.may_have_work or self._in_flight.ends_nodes):
            return Wanted(starting, freed=freed)
        ahead = self._in_flight.waiting_count - len(starting)
        room = max(0, self._config.effective_claims - self._in_flight.held_count)
        free_pids = pids[len(starting) :][:room]
        prefetch = min(self._app_config.prefetch_buffer - ahead, room - len(free_pids))
        marks = self._bookmarks.marks(time.monotonic())
        return Wanted(starting, free_pids, max(0, prefetch), freed, marks)

    def _turn(self, pipeline: Pipeline, wanted: Wanted) -> None:
        outcomes = self._in_flight.outcomes
        # Until the answer is here the COMMIT of a claim is in doubt: what no child has goes back.
        self._in_flight.needs_release = wanted.claims > 0
        started = time.monotonic()
        turned = take_turn(pipeline, self._claimer, outcomes, wanted)
        self._in_flight.needs_release = False
        if turned.as_decided:
            self._in_flight.keep_results(outcomes, turned.recorded)
        asked = (task for task, _ in wanted.starting)
        tasks = [*self._in_flight.take_started(asked, turned.started), *turned.claimed]
        nodes = self._nodes_with_parts(tasks)
        if not nodes:  # children first: they work while the books are closed
            self._in_flight.hand_out(tasks)
        self._in_flight.close_recorded(outcomes, turned.recorded)
        self._claimed_last = wanted.claims > 0 and self._note_claim(wanted, turned.claimed, started)
        if nodes:
            self._hand_out_nodes(pipeline, nodes, tasks)

    def _note_claim(self, wanted: Wanted, claimed: Sequence[ClaimedTask], started: float) -> bool:
        """Remember how far the claim came; tell whether it saw everything there was."""
        possible = min(wanted.claims, self._config.max_claim_batch or wanted.claims)
        was_short = len(claimed) < possible
        self._agenda.note_claim(possible, len(claimed))
        if was_short and not wanted.marks.looks_everywhere:
            self._agenda.plan(self._bookmarks.rested_at)
        span = (started, time.monotonic())
        return self._bookmarks.note_claim(wanted.marks, claimed, was_short=was_short, span=span)

    def _nodes_with_parts(self, tasks: Sequence[ClaimedTask]) -> list[ClaimedTask]:
        started = (task for task in tasks if task.workflow_id is not None and task.worker_pid)
        return [task for task in started if self._in_flight.inputs.has_part(task)]

    def _hand_out_nodes(
        self, pipeline: Pipeline, nodes: Sequence[ClaimedTask], tasks: Sequence[ClaimedTask]
    ) -> None:
        """Give tasks to children, these nodes of workflows with what they take from others."""
        # If the database goes away now, no child has seen any of these: they go back.
        needs_release, self._in_flight.needs_release = self._in_flight.needs_release, True
        parts, unreadable = self._in_flight.inputs.read(pipeline, nodes)
        self._in_flight.needs_release = needs_release
        self._in_flight.refuse(unreadable)
        self._in_flight.hand_out([task for task in tasks if task not in unreadable], parts)

    def _look_ahead(self, pipeline: Pipeline) -> None:
        """Expire what is past its deadline, free lapsed claims, learn when the next task is due."""
        now = time.monotonic()
        last_look = None if self._agenda.needs_full_look else self._last_look
        signs = self._maintenance.signs_of_life(now)
        expired, lapsed, (due,), *answers = pipeline.run(
            [
                (expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH)),
                (release_lapsed, Limit(EXPIRY_BATCH)),
                (seconds_until_due, LookAhead(self._config.queues, last_look)),
                *signs,
            ]
        )
        if expired or lapsed:
            self._claimed_last = False
            logger.info("%d task(s) expired, %d lapsed claim(s) freed", len(expired), len(lapsed))
        self._last_look = due.looked_at
        ended = time.monotonic()
        self._agenda.note_look_ahead(ended, due.seconds, ended - now)
        if signs:
            # A rescue may follow, and what it frees is news to us as well.
            self._claimed_last = False
            self._maintenance.note_signs(pipeline, answers, now)
            self._fence_if_lost()

    # What the database says

    def _listen(self) -> None:
        if not self._pool.foreign_keys and self._notifications.seconds_until_retry() is None:
            return
        pipeline = self._link.pipeline
        is_known = self._claimed_last and pipeline is not None
        news = self._notifications.receive(pipeline.sender_pid if pipeline and is_known else None)
        if news.gap:
            self._maintenance.hurry()
        if news.work or news.gap:
            self._agenda.wake()
            self._bookmarks.note_news()
        self._maintenance.note_cancels(news.cancelled)
        self._pings += news.pings

    # Stopping, and waking up too late

    def _obey_stop(self) -> None:
        if self._in_flight.failed_hook is not None and self._failure is None:
            self.fail(self._in_flight.failed_hook)
        if not self._shutdown.is_asked:
            return
        now = time.monotonic()
        if self._shutdown.begin(now):
            self._in_flight.put_back()
            logger.info(
                "stopping: %d task(s) still running",
                self._in_flight.running_count,
                extra=as_event("worker_stopping", running=self._in_flight.running_count),
            )
        if self._shutdown.wants_interruption(now):
            self._interrupt_everything()

    def _interrupt_everything(self) -> None:
        running = list(self._pool.busy())
        self._shutdown.note_interruption(len(running))
        if running:
            logger.warning(
                "the grace period is over: %d task(s) are interrupted",
                len(running),
                extra=as_event("tasks_interrupted", count=len(running)),
            )
        for task_id in running:
            self._pool.stop_task(task_id, STOPPED_BY_SHUTDOWN)

    def _fence_if_late(self) -> None:
        """Kill the children of a worker that was frozen for so long that its tasks may have been given away.

        Before talking to anyone: the database may already run them elsewhere. What they wrote meanwhile
        is refused by the generation.
        """
        now = _lifetime_seconds()
        late_seconds = now - self._awake_at
        self._awake_at = now
        allowed_seconds = self._app_config.recovery.running_stale_threshold_ms / 1000
        if late_seconds > allowed_seconds and not self._in_flight.is_empty:
            logger.critical(
                "this worker was frozen for %.1f s: its children are killed",
                late_seconds,
                extra=as_event("worker_frozen", seconds=late_seconds),
            )
            self._pool.kill_all()

    def _fence_if_lost(self) -> None:
        """Others took this worker for dead and gave its tasks away: what still runs here must end."""
        if self._maintenance.is_lost:
            logger.critical(
                "others declared this worker lost: its children are killed",
                extra=as_event("worker_declared_lost"),
            )
            self._pool.kill_all()
            self._maintenance.forget_registration()


def _lifetime_seconds() -> float:
    """A clock that also runs while the machine is suspended, where there is one."""
    return time.clock_gettime(_LIFETIME_CLOCK)
