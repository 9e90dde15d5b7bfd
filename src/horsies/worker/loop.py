"""The worker: one loop that serves children, works in the database, and sleeps in between.

``Worker._step`` is the body of the loop; the methods below it are in the order of its calls. ``work.py`` does
the work in the database.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial

import psycopg

from horsies.app import Horsies
from horsies.config.app import WorkerResilienceConfig
from horsies.db.database import Database
from horsies.db.limits import LOCK_TIMEOUT_MS, Limits
from horsies.db.pipeline import Pipeline
from horsies.logs import as_event, set_log_headers
from horsies.tasks.blocked import Blocked
from horsies.tasks.definition import OnStop, TaskDefinition
from horsies.tasks.outcome import STOPPED_BY_SHUTDOWN, STOPPED_FOR_REQUEUE
from horsies.webhooks.task import asking, subscriptions
from horsies.worker.agenda import NEVER, AwakeClock, Shutdown, Silence, lifetime_clock
from horsies.worker.batches import Batches
from horsies.worker.config import WorkerConfig, served_queues
from horsies.worker.connection import WorkerConnection
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.known_tasks import KnownTasks, task_defaults
from horsies.worker.ledger import ENDED, LATE_SECONDS, REFUSED, RUNNING, Ledger, options_of
from horsies.worker.liveness import Identity, lock_key
from horsies.worker.maintenance import Maintenance
from horsies.worker.node_inputs import NodeInputs, tasks_with_injection
from horsies.worker.notifications import own_channels, worker_channels
from horsies.worker.pool.events import PoolEvent
from horsies.worker.pool.pool import ChildPool
from horsies.worker.pool.window import Windows
from horsies.worker.probe import Vitals
from horsies.worker.tally import Tally
from horsies.worker.traces import Traces
from horsies.worker.watch import WatchLimits
from horsies.worker.work import Work

logger = logging.getLogger("horsies.worker")

# Limits the last statements, because a pooler would hold them back, and block the worker, while the database
# is unavailable.
RECORD_STOP_SECONDS = 1.0
# The maximum number of due tasks per priority that a worker with --burst counts in a paused queue.
LEFT_COUNT_MAX = 1_000_000


class ExitCode(IntEnum):
    """How a worker ended."""

    CLEAN = 0
    FAILED = 1
    FORCED = 3


class ImmediateShutdown(BaseException):
    """The third shutdown request came during a statement. This is a BaseException, so that ``except
    Exception`` does not catch it.
    """


def turn_limits(resilience: WorkerResilienceConfig, watched: WatchLimits) -> Limits:
    """Return the time limits of a worker's statements: for waiting for a lock, and in total.

    They are short because no heartbeat is sent while a statement runs.
    """
    return Limits(
        round(min(LOCK_TIMEOUT_MS, watched.lock_seconds * 1000)),
        round(min(resilience.statement_timeout_ms, watched.statement_seconds * 1000)),
    )


def _never_in_windows(definitions: Mapping[str, TaskDefinition]) -> list[str]:
    """Return the names of the tasks that never wait in a child behind other tasks."""
    return [
        name
        for name, task in definitions.items()
        if task.signature.transaction or task.durable or task.memory_limit_mb or task.batch
    ]


def _identity(app: Horsies, worker_id: str, known: KnownTasks) -> Identity:
    """Return the worker's identity, with the settings of its application that the database needs."""
    return Identity.of(
        worker_id,
        known.as_json(),
        task_defaults(app),
        subscriptions(app.config),
        asking(app.definitions()),
    )


def _owns_nothing(ledger: Ledger) -> bool:
    """Return whether a worker owns no task in memory or in the database."""
    return ledger.is_empty and not ledger.needs_release


class Worker:
    """One worker process; ``run`` returns its exit code.

    ``request_stop`` may be called from a signal handler: once for a graceful shutdown, again to
    interrupt the running tasks, and a third time to exit immediately.
    """

    def __init__(
        self, app: Horsies, config: WorkerConfig, pool: ChildPool, selector: selectors.BaseSelector
    ) -> None:
        known = KnownTasks.of(app)
        self.worker_id = pool.launcher.boot.worker_id
        identity = _identity(app, self.worker_id, known)
        self._config = config
        self._pool = pool
        watched = WatchLimits.of(app.config)
        # Under a cluster-wide cap, the end of a task on any queue may free a place for this worker.
        is_capped = app.config.cluster_wide_cap is not None
        self._channels = worker_channels(served_queues(app) if is_capped else config.queues)
        tracing = app.config.tracing
        traces = None if tracing is None else Traces(tracing, identity.worker_id)
        definitions = app.definitions()
        apart = _never_in_windows(definitions)
        windows = Windows(0 if is_capped else config.window_width, apart)
        ledger = Ledger()
        set_log_headers(app.config.log_headers, partial(options_of, ledger.owned))
        inputs = NodeInputs(tasks_with_injection(app), app.config.payload.max_input_bytes)
        batches = Batches.of(definitions)
        self._dispatcher = Dispatcher(pool, ledger, inputs, traces, windows, batches)
        self._connection = WorkerConnection(
            Database(app.config.broker, "worker", migrates=app.migrates),
            app.config.resilience,
            [*self._channels, *own_channels(identity.worker_id)],
            lock_key(identity.worker_id),
            selector,
            holds_tasks=lambda: not ledger.is_empty,
            retry_seconds=watched.suspicion_seconds,
            limits=turn_limits(app.config.resilience, watched),
        )
        blocked = Blocked(identity.worker_id)
        self._maintenance = Maintenance(
            app.config, config, identity, self._dispatcher, self._connection, blocked
        )
        self._shutdown = Shutdown(config.shutdown_grace_seconds)
        self._on_stop = {name: task.on_stop for name, task in definitions.items()}
        self._work = Work(
            app,
            config,
            identity,
            known,
            self._dispatcher,
            self._maintenance,
            blocked,
            self._shutdown,
            self._notice_freeze,
        )
        # The children's events that arrived during a statement, and the time of their arrival.
        self._early_events: list[tuple[float, Sequence[PoolEvent]]] = []
        self._awake = AwakeClock(watched.gap_seconds)
        self._silence = Silence(app.config.recovery.stop_tasks_after_silence_ms)
        self._has_started = False
        # Called with every shutdown request, even in a signal handler.
        self.on_stop: Callable[[], None] | None = None

    @property
    def tally(self) -> Tally:
        return self._dispatcher.tally

    def vitals(self) -> Vitals:
        """Describe this worker for probes. The method only reads, because another thread calls it."""
        pool, connection = self._pool, self._connection
        pids, idle = pool.pids(), pool.idle_children
        busy = len({held.pid for held in list(pool.busy.values())})
        return Vitals(
            awake_by=self._awake.by,
            has_started=self._has_started,
            is_stopping=self._shutdown.is_requested,
            is_connected=connection.holds_lock,
            is_receiving=self._maintenance.heartbeat.is_receiving,
            reconnects=connection.outages.ended,
            unrecorded=self._dispatcher.ledger.count(ENDED, REFUSED),
            children_busy=busy,
            children_idle=idle,
            children_other=max(0, len(pids) - busy - idle),
            children_started=pool.started,
            child_pids=pids,
            child_deaths=dict(pool.deaths),
        )

    def request_stop(self) -> None:
        self._shutdown.request()
        if self.on_stop is not None:
            self.on_stop()

    def fail(self, reason: str) -> None:
        """Request a graceful shutdown that ends in failure; only the first reason is logged."""
        if self._shutdown.failure is None:
            self._shutdown.failure = reason
            logger.critical(
                "%s The worker stops.", reason, extra=as_event("worker_failed", reason=reason)
            )
            self.request_stop()

    def run(self) -> ExitCode:
        """Serve until a shutdown is requested and every running task's outcome is recorded."""
        try:
            with self._dispatcher.ledger.claim_in_doubt():
                self._start()
                while not self._is_done():
                    self._step()
        except ImmediateShutdown:
            self._connection.close_turns()
        finally:
            self._close()
        if self._shutdown.failure is not None:
            return ExitCode.FAILED
        is_clean = _owns_nothing(self._dispatcher.ledger) and not self._shutdown.has_interrupted
        return ExitCode.CLEAN if is_clean else ExitCode.FORCED

    def _start(self) -> None:
        """Wait for the database and listen; children that die during the wait are replaced."""
        while not self._shutdown.is_requested:
            try:
                self._connection.start()
            except psycopg.Error as error:
                self._connection.lose(error)
                pause_seconds = max(0.0, self._connection.outages.retry_at - time.monotonic())
                self._dispatcher.absorb(self._pool.collect(pause_seconds))
            else:
                self._has_started = True
                event = as_event("worker_ready")
                logger.info("listening on %s", ", ".join(self._channels), extra=event)
                return

    def _is_done(self) -> bool:
        shutdown, ledger = self._shutdown, self._dispatcher.ledger
        if not shutdown.is_requested:
            return False
        if shutdown.is_immediate or self._work.has_given_up:
            return True
        if not ledger.is_empty:
            return False
        has_waited_enough = time.monotonic() >= shutdown.release_ends_at()
        return not ledger.needs_release or has_waited_enough

    def _close(self) -> None:
        self._pool.shutdown()
        if self._shutdown.is_requested and self._dispatcher.ledger.needs_release:
            logger.warning(
                "shutdown: claimed tasks could not be released; other workers will recover them",
                extra=as_event("claims_left"),
            )
        # A worker that may own tasks does not record its stop, so that other workers recover the tasks
        # as quickly as after a crash.
        if (pipeline := self._connection.pipeline) is not None and _owns_nothing(
            self._dispatcher.ledger
        ):
            pipeline.meanwhile = None  # the wait may block, because no children are left to serve
            pipeline.timeout_seconds = RECORD_STOP_SECONDS
            with suppress(
                psycopg.Error
            ):  # other workers notice the end of this worker even without the record
                self._maintenance.record_stop(pipeline)
        self._connection.close()

    # The loop

    def _step(self) -> None:
        self._notice_freeze()
        timeout_seconds = self._next_wakeup()
        self._awake.by += timeout_seconds
        events = self._pool.collect(timeout_seconds)
        if self._pool.foreign_keys:
            self._drain_signals()
        self._notice_freeze()
        self._stop_tasks_if_silent()
        if self._early_events:
            self._absorb_early()
        self._dispatcher.absorb(events)
        self._receive_notifications()
        self._wait_for_batch()
        self._work.tick(time.monotonic())
        self._advance_shutdown()
        connection = self._connection
        pipeline = connection.open()
        if pipeline is None:
            return
        pipeline.meanwhile = self._serve_children
        round_trips = pipeline.round_trips
        try:
            self._work.perform(pipeline)
            if self._config.burst and not self._shutdown.is_requested:
                self._end_burst(pipeline)
        except psycopg.Error as error:
            connection.lose(error)
            is_refused = connection.pipeline is not None  # the session survived the error
            if is_refused and self._shutdown.note_refusal(time.monotonic()):
                self._work.give_up()
        else:
            if pipeline.round_trips > round_trips:
                connection.confirm()
                self._shutdown.note_turn()
            connection.watch_socket()  # an error that was ignored may have closed the connection

    def _end_burst(self, pipeline: Pipeline) -> None:
        """Request a shutdown once every due task has run."""
        if self._work.has_run_all():
            self._report_paused(pipeline)
            logger.info("nothing more is due: %d attempt(s) ran", self.tally.ended)
            self.request_stop()

    def _report_paused(self, pipeline: Pipeline) -> None:
        """With --burst, log on one line which queues are paused and how many due tasks they have."""
        from horsies.db.statements.explain import count_due  # only --burst needs this import

        (queues,) = pipeline.run([count_due(self._config.queues, LEFT_COUNT_MAX)])
        left = {one.name: one.due for one in queues if one.paused_at is not None}
        if left:
            shown = [f"{name} {left[name]:,}" for name in self._config.queues if name in left]
            logger.warning("paused queues were not served; due tasks left: %s", ", ".join(shown))

    def _next_wakeup(self) -> float:
        """Return how many seconds the loop may sleep if no event occurs."""
        connection = self._connection
        is_up = connection.is_up
        if self._early_events or (is_up and self._work.has_turn()):
            return 0.0
        now = time.monotonic()
        work_at = self._work.next_at() if is_up else connection.outages.retry_at
        wake_at = min(self._shutdown.next_at(), work_at)
        if self._dispatcher.ledger.needs_release:
            wake_at = min(wake_at, self._shutdown.release_ends_at())
        receive_seconds = connection.seconds_until_receive()
        if receive_seconds is not None:
            wake_at = min(wake_at, now + receive_seconds)
        return max(0.0, min(wake_at - now, self._seconds_until_silent()))

    def _drain_signals(self) -> None:
        """Read the sockets that signals write to, because unread bytes would keep the loop from sleeping."""
        for key, _ in self._pool.foreign_keys:
            if callable(key.data):
                key.data()

    def _notice_freeze(self) -> None:
        """After a long freeze, make the database confirm that the tasks still belong to this worker."""
        now, awake = lifetime_clock(), self._awake
        late_seconds, awake.by = now - awake.by, now
        if late_seconds <= awake.gap_seconds:
            return
        self._maintenance.heartbeat.note_freeze()
        if not self._dispatcher.ledger.is_empty:
            logger.critical(
                "this worker was frozen for %.1f s; checking whether its tasks were recovered",
                late_seconds,
                extra=as_event("worker_frozen", seconds=late_seconds),
            )
            self._pool.return_unstarted()

    def _seconds_until_silent(self) -> float:
        """Return the seconds until this worker must stop its own tasks, because it could not send a
        heartbeat.
        """
        if self._silence.limit_seconds == NEVER or not self._pool.busy:
            return NEVER
        return self._silence.seconds_left(self._maintenance.heartbeat.shown_at)

    def _stop_tasks_if_silent(self) -> None:
        if self._seconds_until_silent() > 0.0:
            return
        silent_seconds = lifetime_clock() - self._maintenance.heartbeat.shown_at
        self._pool.return_unstarted()
        running = list(self._pool.busy)
        self._silence.note_stop(self._maintenance.heartbeat.shown_at)
        logger.critical(
            "no heartbeat for %.1f s (stop_tasks_after_silence_ms); killing %d running task(s)",
            silent_seconds,
            len(running),
            extra=as_event("tasks_stopped", seconds=silent_seconds, count=len(running)),
        )
        for task_id in running:
            self._pool.kill_task(task_id)

    def _absorb_early(self) -> None:
        """Handle the events that arrived during the last statement.

        The time that the events have waited counts only if the statement took long. After a turn of a
        millisecond, the worker waits for the rest of the batch as if the events had just arrived.
        """
        now = time.monotonic()
        for came_at, events in self._early_events:
            waited_seconds = now - came_at
            self._dispatcher.absorb(
                events, waited_seconds if waited_seconds > LATE_SECONDS else 0.0
            )
        self._early_events = []

    def _receive_notifications(self) -> None:
        connection = self._connection
        if not self._pool.foreign_keys and connection.seconds_until_receive() is None:
            return
        received = connection.receive(ignores_own=self._work.claimed_last)
        if received.gap:
            self._maintenance.check_cancels()
        if received.work or received.gap or received.woken:
            self._work.note_news(received.woken, received.keyed)
        if received.paused:
            # Return all tasks that have not started to their queues; the next claim skips the paused
            # queues.
            self._dispatcher.put_back()
        self._maintenance.note_cancels(received.cancelled)
        self._maintenance.pings += received.pings

    def _wait_for_batch(self) -> None:
        """Wait briefly for the rest of a batch of very short tasks, so that one turn records all of them."""
        ended = self._dispatcher.ledger.by_state[ENDED]
        while ended:
            seconds = self._dispatcher.linger_seconds(time.monotonic())
            if not seconds:
                return
            # An empty list of events is no reason to stop, because a child that ends or starts wakes the
            # selector as well.
            self._dispatcher.absorb(self._pool.collect(seconds))

    def _advance_shutdown(self) -> None:
        if self._dispatcher.failed_hook is not None and self._shutdown.failure is None:
            self.fail(self._dispatcher.failed_hook)
        shutdown = self._shutdown
        if not shutdown.is_requested:
            return
        now = time.monotonic()
        if shutdown.begin(now):
            self._dispatcher.put_back()
            self._pool.announce_stop()
            running_count = self._dispatcher.ledger.count(RUNNING)
            event = as_event("worker_stopping", running=running_count)
            logger.info("graceful shutdown: %d task(s) still running", running_count, extra=event)
            wishes = self._on_stop_of_running()
            self._interrupt({task_id: wish for task_id, wish in wishes.items() if wish == "fail"})
        if shutdown.wants_interruption(now):
            wishes = self._on_stop_of_running()
            forced = sum(wish == "finish" for wish in wishes.values())
            shutdown.note_interruption(len(wishes), forced=forced)
            self._interrupt(wishes)

    def _on_stop_of_running(self) -> dict[str, OnStop]:
        return {
            task_id: self._on_stop.get(held.assignment.task_name, "finish")
            for task_id, held in self._pool.busy.items()
        }

    def _interrupt(self, wishes: Mapping[str, OnStop]) -> None:
        if wishes:
            event = as_event("tasks_interrupted", count=len(wishes))
            logger.warning("shutdown: interrupting %d running task(s)", len(wishes), extra=event)
        for task_id, wish in wishes.items():
            reason = STOPPED_FOR_REQUEUE if wish == "requeue" else STOPPED_BY_SHUTDOWN
            self._pool.stop_task(task_id, reason)

    def _serve_children(self) -> None:
        """Do the work that cannot wait while a statement runs: enforce time limits, stay connected, obey a
        third shutdown request.
        """
        self._notice_freeze()
        if events := self._pool.collect(0.0):
            self._early_events.append((time.monotonic(), events))
        self._connection.keep_lock()
        self._stop_tasks_if_silent()
        if self._shutdown.is_immediate:
            raise ImmediateShutdown
