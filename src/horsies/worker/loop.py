"""The worker: one loop that serves children, takes turns with the database, and sleeps in between.

``Worker._step`` is the loop's body, and the methods below it follow in the order in which it calls
them. ``agenda.py`` says when something is due; this module does it.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from enum import IntEnum

import psycopg

from horsies.app import Horsies
from horsies.db.database import Database
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    NOTHING,
    ClaimedTask,
    ExpireTasks,
    LookAhead,
    ReleaseLapsed,
    claim_unresolvable,
    expire_tasks,
    find_takers,
    release_lapsed,
    seconds_until_due,
)
from horsies.events import as_event
from horsies.ids import new_id
from horsies.tasks.blocked import Blocked, is_isolated
from horsies.tasks.outcome import STOPPED_BY_SHUTDOWN, Outcome
from horsies.tasks.recovery import (
    EXPIRED_RESULT,
    EXPIRY_BATCH,
    expire_one_by_one,
    release_one_by_one,
)
from horsies.worker.agenda import NEVER, Agenda, Shutdown, lifetime_clock
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import WorkerConnection
from horsies.worker.in_flight import InFlight
from horsies.worker.known_tasks import KnownTasks, UnknownTasks
from horsies.worker.liveness import Identity, lock_key
from horsies.worker.maintenance import Maintenance
from horsies.worker.node_inputs import NodeInputs, tasks_with_injection
from horsies.worker.notifications import echo_channel, worker_channels
from horsies.worker.pool.children import PoolEvent
from horsies.worker.pool.pool import ChildPool
from horsies.worker.turn import (
    Bookmarks,
    Claimer,
    TurnRequest,
    record_alone,
    release_unheld,
    take_turn,
)
from horsies.worker.watch import WatchLimits

logger = logging.getLogger("horsies.worker")

# While the database is unavailable, a pooler would hold the last statements back, and the worker with them.
RECORD_STOP_SECONDS = 1.0
_NO_CLAIM = nullcontext()


class ExitCode(IntEnum):
    """How a worker ended."""

    CLEAN = 0
    FAILED = 1
    FORCED = 3


class ImmediateShutdown(BaseException):
    """The third shutdown request came during a statement; no handler on the way may catch it."""


class Worker:
    """One worker process; ``run`` returns its exit code.

    ``request_stop`` may be called from a signal handler: once for a graceful shutdown, again to
    interrupt the running tasks, a third time to exit at once.
    """

    def __init__(
        self, app: Horsies, config: WorkerConfig, pool: ChildPool, selector: selectors.BaseSelector
    ) -> None:
        known = KnownTasks.of(app)
        identity = Identity.of(new_id(), known.as_json())
        resilience, recovery = app.config.resilience, app.config.recovery
        self.worker_id = identity.worker_id
        self._config = config
        self._claims_max = config.effective_claims
        self._app_config = app.config
        self._pool = pool
        size_max = app.config.payload.max_input_bytes
        self._in_flight = InFlight(pool, NodeInputs(tasks_with_injection(app), size_max))
        self._connection = WorkerConnection(
            Database(app.config.broker, "worker", migrates=app.migrates),
            resilience,
            [*worker_channels(config.queues), echo_channel(identity.worker_id)],
            lock_key(identity.worker_id),
            selector,
            holds_tasks=lambda: not self._in_flight.is_empty,
            retry_seconds=WatchLimits.of(app.config).suspicion_seconds,
        )
        self._blocked = Blocked(identity.worker_id)
        self._maintenance = Maintenance(
            app.config, config, identity, pool, self._in_flight, self._connection, self._blocked
        )
        self._claimer = Claimer.of(app.config, config, identity.worker_id, identity.hostname)
        self._bookmarks = Bookmarks(config.queues)
        self._unknown = UnknownTasks(
            known, recovery.unknown_task_grace_ms / 1000, recovery.check_interval_ms / 1000
        )
        self._agenda = Agenda(resilience.notify_poll_interval_ms / 1000)
        # Whether the last claim came after every notification that this worker's own transactions sent.
        self._claimed_last = False
        # Events of children that came during a statement.
        self._early_events: list[PoolEvent] = []
        # When this process should run again at the latest, unless it is frozen.
        self._awake_by = lifetime_clock()
        # The last heartbeat before this worker stopped its own tasks.
        self._stopped_after: float | None = None
        self._shutdown = Shutdown(config.shutdown_grace_seconds)
        self._failure: str | None = None
        self._has_given_up = False
        # Called with every shutdown request, in a signal handler too.
        self.on_stop: Callable[[], None] | None = None

    def request_stop(self) -> None:
        self._shutdown.request()
        if self.on_stop is not None:
            self.on_stop()

    def fail(self, reason: str) -> None:
        """Request a graceful shutdown that ends in failure; the first reason is logged."""
        if self._failure is None:
            self._failure = reason
            logger.critical(
                "%s The worker stops.", reason, extra=as_event("worker_failed", reason=reason)
            )
            self.request_stop()

    def run(self) -> ExitCode:
        """Serve until a shutdown is requested and every running task is recorded."""
        try:
            with self._in_flight.claim_in_doubt():
                self._start()
                while not self._is_done():
                    self._step()
        except ImmediateShutdown:
            self._connection.close_turns()
        finally:
            self._close()
        if self._failure is not None:
            return ExitCode.FAILED
        is_clean = self._in_flight.is_cleared and not self._shutdown.has_interrupted
        return ExitCode.CLEAN if is_clean else ExitCode.FORCED

    def _start(self) -> None:
        """Wait for the database and listen; children that die meanwhile are replaced."""
        while not self._shutdown.is_requested:
            try:
                self._connection.start()
            except psycopg.Error as error:
                self._connection.lose(error)
                pause_seconds = max(0.0, self._connection.retry_at - time.monotonic())
                self._in_flight.absorb(self._pool.collect(pause_seconds))
            else:
                channels = ", ".join(worker_channels(self._config.queues))
                logger.info("listening on %s", channels, extra=as_event("worker_ready"))
                return

    def _is_done(self) -> bool:
        shutdown = self._shutdown
        if not shutdown.is_requested or shutdown.is_immediate or self._has_given_up:
            return shutdown.is_immediate or self._has_given_up
        if not self._in_flight.is_empty:
            return False
        return not self._in_flight.needs_release or time.monotonic() >= shutdown.release_ends_at()

    def _close(self) -> None:
        self._pool.shutdown()
        # A worker that may own tasks does not record its stop: the others then recover its tasks as
        # quickly as after a crash.
        if (pipeline := self._connection.pipeline) is not None and self._in_flight.is_cleared:
            pipeline.meanwhile = None  # there are no children left to serve, and the wait is short
            pipeline.timeout_seconds = RECORD_STOP_SECONDS
            with suppress(psycopg.Error):  # the others notice it by themselves
                self._maintenance.record_stop(pipeline)
        self._connection.close()

    # The loop

    def _step(self) -> None:
        self._notice_freeze()
        timeout_seconds = self._next_wakeup()
        self._awake_by = lifetime_clock() + timeout_seconds
        events = self._pool.collect(timeout_seconds)
        self._drain_signals()
        self._notice_freeze()
        self._stop_tasks_if_silent()
        self._in_flight.absorb([*self._early_events, *events])
        self._early_events = []
        self._receive_notifications()
        self._wait_for_batch()
        self._agenda.tick(time.monotonic())
        self._advance_shutdown()
        connection = self._connection
        pipeline = connection.open()
        if pipeline is None:
            return
        pipeline.meanwhile = self._serve_children
        round_trips = pipeline.round_trips
        try:
            self._work(pipeline)
        except psycopg.Error as error:
            connection.lose(error)
        else:
            if pipeline.round_trips > round_trips:
                connection.confirm()
            connection.watch_socket()  # an ignored error may have closed the connection

    def _next_wakeup(self) -> float:
        """How many seconds the loop may sleep if nothing happens."""
        connection = self._connection
        is_up = connection.is_up
        if self._early_events or (is_up and self._has_work()):
            return 0.0
        now = time.monotonic()
        wake_at = self._shutdown.next_at()
        if is_up:
            wake_at = min(wake_at, self._agenda.next_at(), self._maintenance.next_at())
            wake_at = min(wake_at, self._unknown.next_at())
        else:
            wake_at = min(wake_at, connection.retry_at)
        if self._in_flight.needs_release:
            wake_at = min(wake_at, self._shutdown.release_ends_at())
        receive_seconds = connection.seconds_until_receive()
        if receive_seconds is not None:
            wake_at = min(wake_at, now + receive_seconds)
        return max(0.0, min(wake_at - now, self._seconds_until_silent()))

    def _has_work(self) -> bool:
        in_flight = self._in_flight
        if in_flight.outcomes or in_flight.needs_release or in_flight.uncalled:
            return True
        if self._maintenance.pings:
            return True
        idle_count, waiting_count = self._pool.idle_count, in_flight.waiting_count
        can_prefetch = waiting_count < self._app_config.prefetch_buffer
        if self._shutdown.is_requested or not (idle_count or can_prefetch):
            return False
        return bool(waiting_count and idle_count) or (
            self._agenda.may_have_work and self._room() > 0
        )

    def _room(self) -> int:
        """How many tasks this worker may claim."""
        in_flight = self._in_flight
        return 0 if in_flight.is_full else max(0, self._claims_max - in_flight.held_count)

    def _drain_signals(self) -> None:
        """Read the sockets that signals write to; an unread one would never let the loop sleep."""
        for key, _ in self._pool.foreign_keys:
            if callable(key.data):
                key.data()

    def _notice_freeze(self) -> None:
        """After a long freeze, the database must confirm that the tasks are still this worker's.

        A freeze is time beyond the sleep that the loop planned.
        """
        now = lifetime_clock()
        late_seconds, self._awake_by = now - self._awake_by, now
        allowed_seconds = self._app_config.recovery.running_stale_threshold_ms / 1000
        if late_seconds > allowed_seconds and not self._in_flight.is_empty:
            logger.critical(
                "this worker was frozen for %.1f s; checking whether its tasks were recovered",
                late_seconds,
                extra=as_event("worker_frozen", seconds=late_seconds),
            )
            self._maintenance.note_freeze()

    def _seconds_until_silent(self) -> float:
        """How long until this worker must stop its own tasks because it could not send a heartbeat."""
        limit_ms = self._app_config.recovery.stop_tasks_after_silence_ms
        if (
            limit_ms is None
            or not self._pool.busy
            or self._stopped_after == self._maintenance.shown_at
        ):
            return NEVER
        return max(0.0, self._maintenance.shown_at + limit_ms / 1000 - lifetime_clock())

    def _stop_tasks_if_silent(self) -> None:
        if self._seconds_until_silent() > 0.0:
            return
        silent_seconds = lifetime_clock() - self._maintenance.shown_at
        running = list(self._pool.busy)
        self._stopped_after = self._maintenance.shown_at
        logger.critical(
            "no heartbeat for %.1f s (stop_tasks_after_silence_ms); killing %d running task(s)",
            silent_seconds,
            len(running),
            extra=as_event("tasks_stopped", seconds=silent_seconds, count=len(running)),
        )
        for task_id in running:
            self._pool.kill_task(task_id)

    def _receive_notifications(self) -> None:
        connection = self._connection
        if not self._pool.foreign_keys and connection.seconds_until_receive() is None:
            return
        received = connection.receive(ignores_own=self._claimed_last)
        if received.gap:
            self._maintenance.check_cancels()
        if received.work or received.gap:
            self._agenda.wake()
            self._bookmarks.note_news()
        self._maintenance.note_cancels(received.cancelled)
        self._maintenance.pings += received.pings

    def _wait_for_batch(self) -> None:
        """Wait briefly for the rest of a batch of very short tasks, so that one turn carries them all."""
        while self._in_flight.outcomes:
            seconds = self._in_flight.pace.linger_seconds(time.monotonic())
            if not seconds:
                return
            # No event is not a reason to stop: the end or start of a child wakes the selector, too.
            self._in_flight.absorb(self._pool.collect(seconds))

    def _advance_shutdown(self) -> None:
        if self._in_flight.failed_hook is not None and self._failure is None:
            self.fail(self._in_flight.failed_hook)
        shutdown = self._shutdown
        if not shutdown.is_requested:
            return
        now = time.monotonic()
        if shutdown.begin(now):
            self._in_flight.put_back()
            running_count = self._in_flight.running_count
            event = as_event("worker_stopping", running=running_count)
            logger.info("graceful shutdown: %d task(s) still running", running_count, extra=event)
        if shutdown.wants_interruption(now):
            running = list(self._pool.busy)
            shutdown.note_interruption(len(running))
            if running:
                event = as_event("tasks_interrupted", count=len(running))
                logger.warning(
                    "shutdown: interrupting %d running task(s)", len(running), extra=event
                )
            for task_id in running:
                self._pool.stop_task(task_id, STOPPED_BY_SHUTDOWN)

    def _serve_children(self) -> None:
        """While a statement runs: enforce time limits, stay connected, obey the third shutdown request."""
        self._notice_freeze()
        self._early_events += self._pool.collect(0.0)
        self._connection.keep_lock()
        self._stop_tasks_if_silent()
        if self._shutdown.is_immediate:
            raise ImmediateShutdown

    # Work in the database

    def _work(self, pipeline: Pipeline) -> None:
        in_flight = self._in_flight
        if self._maintenance.must_show_first:
            self._claimed_last = False
            self._maintenance.show(pipeline, time.monotonic())
        self._maintenance.show_if_late(pipeline, time.monotonic())
        self._fence_if_lost(pipeline)
        if in_flight.uncalled or time.monotonic() >= self._unknown.next_at():
            self._serve_unknown(pipeline)
        if in_flight.needs_release:
            self._claimed_last = False
            release_unheld(pipeline, self.worker_id, in_flight.held(), self._blocked)
            in_flight.note_released()
        outcomes = in_flight.next_outcomes()
        request = self._turn_request(outcomes)
        if outcomes or request.starting or request.claims:
            self._turn(pipeline, outcomes, request)
        if in_flight.blocked:
            self._retry_blocked(pipeline)
        now = time.monotonic()
        if not in_flight.outcomes and self._agenda.wants_look_ahead(now):
            self._look_ahead(pipeline)
        if now >= self._maintenance.next_at():
            self._claimed_last = False
            self._maintenance.perform(pipeline, now)
            self._fence_if_lost(pipeline)
        if self._maintenance.pings:
            self._maintenance.answer_pings(pipeline)

    def _serve_unknown(self, pipeline: Pipeline) -> None:
        """Leave tasks that this worker cannot run to other workers, or fail them if there are none."""
        in_flight, unknown = self._in_flight, self._unknown
        if in_flight.uncalled:
            tasks = {task.id: task for task, _ in in_flight.uncalled}
            asked = unknown.question(self.worker_id, tasks.values())
            (takers,) = pipeline.run([(find_takers, asked)])
            now = time.monotonic()
            left = {one.id for one in takers if unknown.is_left(tasks[one.id], one, now)}
            in_flight.close_uncalled(left)
        now = time.monotonic()
        if unknown.forget_old(now):
            self._agenda.wake()
            self._bookmarks.note_news()
        claimer = self._claimer
        check = unknown.check(claimer.worker_id, claimer.hostname, claimer.queues, now)
        if check is not None and not self._shutdown.is_requested:
            with in_flight.claim_in_doubt():
                (claimed,) = pipeline.run([(claim_unresolvable, check)])
            for task in claimed:
                in_flight.fail(task, unknown.outcome(task))
            if len(claimed) == check.limit:
                unknown.check_again()

    def _turn_request(self, outcomes: Sequence[Outcome]) -> TurnRequest:
        """The tasks to start and to claim in the next turn: for idle children first, then ahead."""
        in_flight = self._in_flight
        freed = in_flight.freed_by_queue(outcomes) if self._claimer.is_capped else {}
        if self._shutdown.is_requested:
            return TurnRequest(freed=freed)
        pids = self._pool.next_idle_pids(self._pool.idle_count)
        starting = list(zip(in_flight.waiting(len(pids)), pids, strict=False))
        if not (self._agenda.may_have_work or in_flight.ends_nodes):
            return TurnRequest(starting, freed=freed)
        ahead = in_flight.waiting_count - len(starting)
        room = self._room()
        free_pids = pids[len(starting) :][:room]
        prefetch = min(self._app_config.prefetch_buffer - ahead, room - len(free_pids))
        positions = self._bookmarks.positions(time.monotonic())
        return TurnRequest(
            starting, free_pids, max(0, prefetch), freed, positions, *self._unknown.exclusions()
        )

    def _turn(self, pipeline: Pipeline, outcomes: Sequence[Outcome], request: TurnRequest) -> None:
        in_flight = self._in_flight
        started = time.monotonic()
        with in_flight.claim_in_doubt() if request.claims else _NO_CLAIM:
            result = take_turn(pipeline, self._claimer, outcomes, request, self._blocked)
        if result.as_decided:
            in_flight.keep_results(outcomes, result.recorded)
        requested = (task for task, _ in request.starting)
        known = in_flight.sort_out(result.claimed, self._unknown)
        tasks = [*in_flight.take_started(requested, result.started), *known]
        nodes = [
            task
            for task in tasks
            if task.workflow_id is not None and task.worker_pid and in_flight.inputs.has_part(task)
        ]
        if not nodes:  # children first: they work during the bookkeeping
            in_flight.hand_out(tasks)
        in_flight.close_recorded(outcomes, result.recorded, result.refused)
        self._claimed_last = request.claims > 0 and self._note_claim(
            request, result.claimed, started
        )
        if nodes:
            self._hand_out_nodes(pipeline, nodes, tasks)

    def _note_claim(
        self, request: TurnRequest, claimed: Sequence[ClaimedTask], started: float
    ) -> bool:
        """Remember how far the claim came; True if it looked everywhere."""
        possible = min(request.claims, self._config.max_claim_batch or request.claims)
        was_short = len(claimed) < possible
        self._agenda.note_claim(possible, len(claimed))
        if was_short and not request.positions.looks_everywhere:
            self._agenda.wake_at(self._bookmarks.rested_at)
        span = (started, time.monotonic())
        return self._bookmarks.note_claim(
            request.positions, claimed, was_short=was_short, span=span
        )

    def _hand_out_nodes(
        self, pipeline: Pipeline, nodes: Sequence[ClaimedTask], tasks: Sequence[ClaimedTask]
    ) -> None:
        """Give tasks to children, these nodes of workflows with the results they take from others."""
        in_flight = self._in_flight
        with in_flight.claim_in_doubt():
            parts, refused = in_flight.inputs.read(pipeline, nodes)
        in_flight.refuse(refused)
        refused_ids = {task.id for task, _ in refused}
        in_flight.hand_out([task for task in tasks if task.id not in refused_ids], parts)

    def _retry_blocked(self, pipeline: Pipeline) -> None:
        """Try again to record outcomes that the database refused; a worker that stops then gives up."""
        in_flight = self._in_flight
        is_last = self._shutdown.is_requested and in_flight.has_only_blocked
        for outcome in list(in_flight.blocked.values()):
            if is_last or not self._blocked.is_waiting(outcome.task_id):
                freed = in_flight.freed_by_queue([outcome])
                recorded = record_alone(
                    pipeline, self._claimer, outcome, self._blocked, freed, is_last=is_last
                )
                if recorded is not None:
                    self._claimed_last = False
                    in_flight.close_blocked(outcome, recorded)
        if is_last and in_flight.blocked:
            self._has_given_up = True
            event = as_event("outcomes_lost", task_ids=list(in_flight.blocked))
            logger.error(
                "shutdown: the database still refuses the outcome(s) of task(s) %s; they are lost",
                ", ".join(in_flight.blocked),
                extra=event,
            )

    def _look_ahead(self, pipeline: Pipeline) -> None:
        """Expire tasks past their deadline, free lapsed claims, find out when the next task is due."""
        now = time.monotonic()
        signs = self._maintenance.signs_of_life(now)
        excluded = self._blocked.excluded() if self._blocked.delays else NOTHING
        steps: list[Step] = [
            (expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH, excluded)),
            (release_lapsed, ReleaseLapsed(EXPIRY_BATCH, excluded)),
            (seconds_until_due, LookAhead(self._config.queues, self._agenda.last_look)),
            *signs,
        ]
        try:
            expired_rows, lapsed_rows, (due,), *answers = pipeline.run(steps)
            expired, lapsed = len(expired_rows), len(lapsed_rows)
        except psycopg.Error as error:
            if not is_isolated(error):
                raise
            expired = expire_one_by_one(pipeline, self._blocked)
            lapsed = release_one_by_one(pipeline, self._blocked)
            (due,), *answers = pipeline.run(steps[2:])
        if expired or lapsed:
            self._claimed_last = False
            logger.info("%d task(s) expired, %d lapsed claim(s) freed", expired, lapsed)
        ended = time.monotonic()
        self._agenda.note_look_ahead(ended, due.seconds, ended - now, due.looked_at)
        if signs:
            # A recovery may follow, and this worker may claim the tasks it frees.
            self._claimed_last = False
            self._maintenance.note_signs(pipeline, answers, now)
            self._fence_if_lost(pipeline)

    def _fence_if_lost(self, pipeline: Pipeline) -> None:
        """Kill the children when another worker declared this one lost and recovered its tasks; register
        again before anything is claimed.
        """
        if self._maintenance.is_lost:
            logger.critical(
                "another worker declared this one lost; killing its %d running task(s)",
                self._in_flight.running_count,
                extra=as_event("worker_declared_lost"),
            )
            if self._in_flight.running_count:
                self._pool.kill_all()
            self._maintenance.forget_registration()
            self._maintenance.show(pipeline, time.monotonic())
