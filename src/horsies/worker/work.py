"""A worker's work in its database: record, release, start and claim tasks, look ahead, send heartbeats.

``Work.perform`` does one round of this work; the methods below it are in the order of its calls. ``loop.py``
decides when a round is due and does the work between two rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, TypeAlias

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    NOTHING,
    ClaimedTask,
    ExpireTasks,
    ReleaseLapsed,
    expire_tasks,
    release_lapsed,
)
from horsies.db.statements.workers import pass_wake_up, wait_for_tasks
from horsies.logs import as_event
from horsies.tasks.blocked import Blocked
from horsies.tasks.outcome import RUN_OF, Outcome
from horsies.tasks.recovery import (
    EXPIRED_RESULT,
    EXPIRY_BATCH,
    end_late,
    expire_one_by_one,
    release_one_by_one,
)
from horsies.worker.agenda import NEVER, Shutdown, burst_step
from horsies.worker.busy_lanes import NO_MARKS
from horsies.worker.config import WorkerConfig
from horsies.worker.dispatcher import NO_PARTS, Dispatcher, Parts
from horsies.worker.keyed import LimitsOfKeys
from horsies.worker.kinds import TaskKind, kinds_of, look_at_keyed, shared_room
from horsies.worker.known_tasks import NO_EXCLUSIONS, KnownTasks, UnknownTasks, claim_unknown
from horsies.worker.ledger import (
    ENDED,
    REFUSED,
    RUNNING,
    UNCALLED,
    WAITING,
    freed_by_queue,
    freed_lanes,
)
from horsies.worker.liveness import Identity
from horsies.worker.maintenance import Maintenance
from horsies.worker.refusals import Refusals
from horsies.worker.tally import log_ends
from horsies.worker.turn import (
    EVERYWHERE,
    Claimer,
    TurnRequest,
    record_alone,
    release_unheld,
    take_turn,
)

logger = logging.getLogger("horsies.worker")

# How long the last attempts of a stopping worker to record refused outcomes may wait for locks in total.
LAST_WAIT_SECONDS = 5.0
# How long all last attempts of a stopping worker may take in total.
LAST_PASS_SECONDS = 30.0
# The minimum time for each of the last attempts, regardless of their number.
LAST_SHARE_SECONDS = 3.0
_NO_CLAIM = nullcontext()
_NAME = attrgetter("task_name")


def _expire(pipeline: Pipeline, blocked: Blocked) -> bool:
    """Expire tasks and end runs that are past their deadline, and free lapsed claims; return True if there
    were any.
    """
    expired, lapsed = blocked.isolated(
        pipeline,
        "expire",
        lambda: _expire_batch(pipeline, blocked),
        lambda: _expire_each(pipeline, blocked),
    )
    late = end_late(pipeline, blocked)
    if expired or lapsed or late:
        logger.info(
            "%d task(s) expired, %d lapsed claim(s) freed, %d deadline(s) of runs passed",
            expired,
            lapsed,
            late,
        )
    return bool(expired or lapsed or late)


def _expire_batch(pipeline: Pipeline, blocked: Blocked) -> tuple[int, int]:
    """Expire tasks and free lapsed claims; return both numbers."""
    excluded = blocked.excluded() if blocked.delays else NOTHING
    expired, lapsed = pipeline.run(
        [
            (expire_tasks, ExpireTasks(EXPIRED_RESULT, EXPIRY_BATCH, excluded)),
            (release_lapsed, ReleaseLapsed(EXPIRY_BATCH, excluded)),
        ]
    )
    return len(expired), len(lapsed)


def _expire_each(pipeline: Pipeline, blocked: Blocked) -> tuple[int, int]:
    return expire_one_by_one(pipeline, blocked), release_one_by_one(pipeline, blocked)


# An attempt to record an outcome: the outcome, the seconds that the attempt may take if it is the last
# attempt, and whether it waits for locks.
_Attempt: TypeAlias = tuple[Outcome, float | None, bool]


def _attempts(refused: Sequence[Outcome]) -> Iterator[_Attempt]:
    return ((outcome, None, False) for outcome in refused)


def _last_attempts(refused: Sequence[Outcome]) -> Iterator[_Attempt]:
    """Yield the last attempts while there is time; each attempt gets its share of the remaining time."""
    started = time.monotonic()
    for count, outcome in zip(range(len(refused), 0, -1), refused, strict=True):
        now = time.monotonic()
        left_seconds = started + LAST_PASS_SECONDS - now
        if left_seconds <= 0:
            return
        share_seconds = max(LAST_SHARE_SECONDS, left_seconds / count)
        yield outcome, min(share_seconds, left_seconds), now < started + LAST_WAIT_SECONDS


def _ends_nodes(outcomes: Iterable[Outcome]) -> bool:
    """Return whether the outcomes may advance workflows, and so create tasks."""
    return any(map(RUN_OF, outcomes))


def _starting_nodes(
    tasks: Iterable[ClaimedTask], has_part: Callable[[ClaimedTask], bool]
) -> list[ClaimedTask]:
    """Return the nodes that start now, and whose assignments need data of their workflows."""
    starting = [task for task in tasks if task.workflow_id is not None and task.worker_pid]
    return [task for task in starting if has_part(task)]


class Work:
    """Runs one worker's turns."""

    def __init__(
        self,
        app: Horsies,
        config: WorkerConfig,
        identity: Identity,
        known: KnownTasks,
        dispatcher: Dispatcher,
        maintenance: Maintenance,
        blocked: Blocked,
        shutdown: Shutdown,
        notice_freeze: Callable[[], None],
    ) -> None:
        recovery = app.config.recovery
        self._config = config
        self._held_max = config.held_max
        self._pool = pool = dispatcher.pool
        self._dispatcher = dispatcher
        self._maintenance = maintenance
        self._blocked = blocked
        self._shutdown = shutdown
        self._notice_freeze = notice_freeze
        self._claimer = Claimer.of(app.config, config, identity.worker_id, identity.hostname)
        self._unknown = UnknownTasks(
            known, recovery.unknown_task_grace_ms / 1000, recovery.check_interval_ms / 1000
        )
        self._refusals = Refusals(identity.worker_id, self._unknown, blocked)
        poll_seconds = app.config.resilience.notify_poll_interval_ms / 1000
        self._kinds = kinds_of(
            config.queues, poll_seconds, pool.places, dispatcher.windows, app.config.prefetch_buffer
        )
        limits = LimitsOfKeys(app.config, app.definitions())
        for kind in self._kinds:
            kind.rings.limits = limits
        # Whether the last claim was later than every notification that this worker's own transactions sent.
        self.claimed_last = False
        # With --burst, the number of attempts that had ended before the last check of every queue.
        self._looked_after: int | None = None
        # Whether a shutdown has given up outcomes that the database refuses.
        self.has_given_up = False

    def note_news(
        self, woken: frozenset[str] = frozenset(), keyed: Collection[str] = frozenset()
    ) -> None:
        """Note that there may be new tasks anywhere in the queues.

        For the queues in `woken`, only a few workers were woken; the queues in `keyed` have tasks with
        keys.
        """
        self._maintenance.heartbeat.wake_ups.note_wake(
            woken.intersection(self._config.queues), time.monotonic()
        )
        for kind in self._kinds:
            kind.note_news()
            if keyed:
                kind.rings.note_keyed(keyed)

    def has_run_all(self) -> bool:
        """Return whether every due task has run, for a worker with --burst. Every queue is checked again
        before the result is True.
        """
        ended = self._dispatcher.tally.ended
        step = burst_step(is_calm=self._is_calm(), ended=ended, looked_after=self._looked_after)
        if step == "look_again":
            self._looked_after = ended
            self.note_news()
            for kind in self._kinds:
                kind.agenda.look_everywhere()
        return step == "stop"

    def _is_calm(self) -> bool:
        """Return whether this worker owns no task, except tasks with refused outcomes, and knows of no due
        task.
        """
        ledger = self._dispatcher.ledger
        if ledger.count() > ledger.count(REFUSED) or self.has_turn():
            return False
        return all(kind.agenda.is_calm for kind in self._kinds)

    def tick(self, now: float) -> None:
        early_seconds = 0.0
        if self._dispatcher.ledger.is_empty:
            early_seconds = self._maintenance.heartbeat.poll_early_seconds(now)
        for kind in self._kinds:
            kind.agenda.tick(now, early_seconds)

    def next_at(self) -> float:
        """Return when the next round is due without further events."""
        claim_at = min([kind.agenda.next_at() for kind in self._kinds])
        maintenance, unknown = self._maintenance, self._unknown
        others_at = min(maintenance.next_at(), maintenance.heartbeat.wake_ups.pass_at)
        unknown_at = unknown.next_at() if unknown.warned else NEVER
        return min(claim_at, others_at, unknown_at)

    def has_turn(self) -> bool:
        """Return whether there is a task to record, release, start or claim now."""
        ledger = self._dispatcher.ledger
        by_state = ledger.by_state
        if by_state[ENDED] or by_state[UNCALLED] or ledger.needs_release or self._maintenance.pings:
            return True
        if self._shutdown.is_requested:
            return False
        prefetched = len(by_state[WAITING])
        if prefetched and self._pool.places.idle_count:
            return True
        for kind in self._kinds:
            if kind.wants_tasks(prefetched):
                return self._room() > 0
        return False

    def _room(self) -> int:
        """Return how many tasks this worker may claim."""
        ledger = self._dispatcher.ledger
        by_state = ledger.by_state
        if by_state[REFUSED] and ledger.is_full:
            return 0
        held = len(by_state[WAITING]) + len(by_state[RUNNING]) + len(by_state[UNCALLED])
        if self._dispatcher.batches is not None and not self._config.max_claim_per_worker:
            held -= self._pool.places.companions
        return max(0, self._held_max - held)

    def perform(self, pipeline: Pipeline) -> None:
        """Do all work that is due; a late heartbeat is sent before a turn."""
        ledger = self._dispatcher.ledger
        by_state = ledger.by_state
        if self._shutdown.is_requested:
            self._blocked.failures.patience = 1
        self._notice_freeze()
        if self._maintenance.heartbeat.must_come_first:
            self.claimed_last = False
            self._maintenance.heartbeat.show(pipeline, time.monotonic())
        self._maintenance.heartbeat.send_if_late(pipeline, time.monotonic())
        self._fence_if_lost(pipeline)
        unknown = self._unknown
        has_unknown = bool(unknown.warned) and time.monotonic() >= unknown.next_at()
        if by_state[UNCALLED] or has_unknown:
            self._serve_unknown(pipeline)
        if ledger.needs_release:
            self._release(pipeline)
        outcomes = ledger.to_record()
        if outcomes and self._pool.unstored_progress:
            self._maintenance.store_last_progress(pipeline, [one.task_id for one in outcomes])
        self._take_turns(pipeline, outcomes)
        self._serve_wake_ups(pipeline)
        if by_state[REFUSED]:
            self._retry_refused(pipeline)
        now = time.monotonic()
        if not by_state[ENDED] and any(kind.agenda.wants_look_ahead(now) for kind in self._kinds):
            self._look_ahead(pipeline)
        if now >= self._maintenance.next_at():
            self.claimed_last = False
            self._maintenance.perform(pipeline, now)
            self._fence_if_lost(pipeline)
        if self._maintenance.pings:
            self._maintenance.answer_pings(pipeline)

    def _release(self, pipeline: Pipeline) -> None:
        """Return tasks to their queues that the database assigns to this worker but the worker
        does not hold.
        """
        ledger = self._dispatcher.ledger
        self.claimed_last = False
        release_unheld(pipeline, self._claimer.worker_id, ledger.tasks(), self._blocked)
        returned = ledger.note_released()
        for kind in self._kinds:
            kind.step_back(returned)

    def _serve_unknown(self, pipeline: Pipeline) -> None:
        """Leave tasks that this worker cannot run to other workers, or fail them if no other worker can
        run them.
        """
        ledger, unknown = self._dispatcher.ledger, self._unknown
        # Do not wait for the locked table, because another worker will claim the tasks.
        if self._shutdown.is_requested:
            ledger.give_back(ledger.tasks(UNCALLED))
        elif uncalled := ledger.outcomes(UNCALLED):
            left = self._refusals.store(pipeline, uncalled)
            ledger.give_back([task for task, _ in uncalled if task.id in left])
            for task, outcome in ledger.outcomes(UNCALLED):
                about = {"task_id": task.id, "task_name": task.task_name}
                logger.error("%s", outcome.error_message, extra=about)
                ledger.put(task, ENDED, outcome)
        now = time.monotonic()
        if unknown.forget_old(now):
            self.note_news()
        claimer = self._claimer
        check = unknown.check(claimer.worker_id, claimer.hostname, claimer.queues, now)
        if check is not None and not self._shutdown.is_requested:
            with ledger.claim_in_doubt():
                claimed = claim_unknown(pipeline, check, self._blocked)
            for task in claimed:
                ledger.put(task, ENDED, unknown.outcome(task))
            if len(claimed) == check.limit:
                unknown.check_again()

    def _take_turns(self, pipeline: Pipeline, outcomes: Sequence[Outcome]) -> None:
        """Record outcomes and claim; each kind of tasks has its own turn."""
        owned = self._dispatcher.ledger.owned
        freed = freed_by_queue(owned, outcomes) if self._claimer.is_capped else {}
        ends_nodes = _ends_nodes(outcomes)
        wanted = [] if self._shutdown.is_requested else self._requests(ends_nodes)
        if not wanted and outcomes:
            wanted = [(self._kinds[0], TurnRequest())]
        lanes = freed_lanes(owned, outcomes) if self._kinds[0].rings.by_queue else ()
        for number, (kind, request) in enumerate(wanted):
            if number == 0 and (freed or lanes):
                request = request._replace(freed=freed, freed_lanes=lanes)
            self._turn(pipeline, outcomes if number == 0 else (), request, kind)

    def _serve_wake_ups(self, pipeline: Pipeline) -> None:
        """Note whether this worker waits for tasks, and pass on wake-ups that it did not serve."""
        wake_ups, now = self._maintenance.heartbeat.wake_ups, time.monotonic()
        excludes_any = self._unknown.warned and self._unknown.has_exclusions
        may_take_any = not self._shutdown.is_requested and not excludes_any
        wake_ups.waits = (
            may_take_any
            and all(kind.places.are_free() for kind in self._kinds)
            and self._room() > 0
        )
        if wake_ups.owed and may_take_any and all(kind.agenda.is_drained for kind in self._kinds):
            wake_ups.note_served()
        if now >= wake_ups.pass_at:
            step = pass_wake_up(self._claimer.worker_id, sorted(wake_ups.owed))
            wake_ups.note_passed(0, now)
            with self._blocked.failures.job("passing on wake-ups"):
                ((passed,),) = pipeline.run([step])
                wake_ups.note_passed(passed.woken, now)

    def _requests(self, ends_nodes: bool) -> list[tuple[TaskKind, TurnRequest]]:
        """Return the kinds that have tasks to start or claim, each with its request.

        With `ends_nodes`, all kinds may claim, because the end of a node may create tasks.
        """
        room = self._room()
        found: list[tuple[TaskKind, TurnRequest]] = []
        # Without a limit, the kinds do not share anything: each has its own places.
        has_to_share = len(self._kinds) > 1 and self._config.max_claim_per_worker and room
        shares = self._shares(ends_nodes, room) if has_to_share else {}
        for kind in self._kinds:
            share = shares.get(kind, room)
            request = self._request(kind, share, may_claim=ends_nodes or kind.agenda.may_have_work)
            claims = request.claims
            if claims or request.starting:
                found.append((kind, request))
                room -= claims
        return found

    def _shares(self, ends_nodes: bool, room: int) -> dict[TaskKind, int]:
        """Return how many tasks each kind may claim; kinds with tasks to claim share the worker's limit."""
        kinds = [kind for kind in self._kinds if ends_nodes or kind.agenda.may_have_work]
        if len(kinds) < 2:
            return {}
        ledger = self._dispatcher.ledger
        held = [*ledger.tasks(WAITING), *ledger.tasks(RUNNING), *ledger.tasks(UNCALLED)]
        prefetched = ledger.count(WAITING)
        space = [kind.space(room, prefetched if kind.prefetch_max else 0) for kind in kinds]
        shares = shared_room(room, space, [sum(map(kind.takes, held)) for kind in kinds])
        self._kinds.reverse()  # next time, a different kind is the first of several equal kinds
        return dict(zip(kinds, shares, strict=True))

    def _request(self, kind: TaskKind, room: int, *, may_claim: bool) -> TurnRequest:
        """Return the tasks that a kind can start and claim: for free children first, then ahead of time."""
        ledger, windows = self._dispatcher.ledger, self._dispatcher.windows
        unknown, rings = self._unknown, kind.rings
        pids, ahead = kind.places.take(room)
        if may_claim and not (ahead or kind.prefetch_max or unknown.warned or rings.by_queue):
            # Nearly every claim is for idle children only, without exclusions and keys.
            positions = kind.bookmarks.positions(time.monotonic())
            return TurnRequest((), pids[:room], positions=positions, is_async=kind.is_async)
        waiting = ledger.tasks(WAITING) if kind.prefetch_max else []
        starting = list(zip(waiting, pids, strict=False))
        if not may_claim:
            return TurnRequest(starting)
        pids = pids[len(starting) :][:room]
        prefetch = min(kind.prefetch_max - len(waiting) + len(starting), room - len(pids))
        ahead = ahead[: room - len(pids)]
        exclusions = unknown.exclusions() if unknown.warned else NO_EXCLUSIONS
        marks = rings.marks() if rings.by_queue else NO_MARKS
        positions = kind.bookmarks.positions(time.monotonic(), has_lane_marks=bool(marks.lanes))
        return TurnRequest(
            starting=starting,
            pids=pids,
            prefetch=max(0, prefetch),
            positions=positions,
            unknown_names=exclusions.names,
            refused_by=exclusions.refused_by,
            ahead=ahead,
            short_names=windows.short_names() if ahead else (),
            is_async=kind.is_async,
            cursors=rings.cursors() if rings.by_queue else (),
            lane_marks=NO_MARKS if positions is EVERYWHERE else marks,
        )

    def _turn(
        self, pipeline: Pipeline, outcomes: Sequence[Outcome], request: TurnRequest, kind: TaskKind
    ) -> None:
        dispatcher = self._dispatcher
        ledger = dispatcher.ledger
        started, claims = time.monotonic(), request.claims
        with ledger.claim_in_doubt() if claims else _NO_CLAIM:
            turned = take_turn(pipeline, self._claimer, outcomes, request, self._blocked)
        ends = ledger.close(outcomes, turned)
        if turned.as_decided and _ends_nodes(outcomes):
            dispatcher.inputs.note_ends(ends)
        tasks = self._sort_out(turned.claimed)
        if request.starting:
            requested = [task for task, _ in request.starting]
            tasks = [*dispatcher.take_started(requested, turned.started), *tasks]
        if dispatcher.batches is not None:
            limit = self._config.max_claim_per_worker
            room = self._room() - len(tasks) if limit else None
            with ledger.claim_in_doubt():
                tasks = dispatcher.batches.filled(
                    pipeline, self._claimer, tasks, self._blocked, request.refused_by, room
                )
        if dispatcher.traces is not None:
            with ledger.claim_in_doubt():
                tasks = dispatcher.traces.linked(pipeline, tasks)
        has_part = dispatcher.inputs.has_part
        nodes = _starting_nodes(tasks, has_part) if any(map(RUN_OF, tasks)) else ()
        if not nodes:  # children get their tasks first, so that they work during the bookkeeping
            self._hand_out(pipeline, tasks, NO_PARTS)
        dispatcher.tally.note_ends(ends)
        log_ends(ends)
        ended = time.monotonic()
        dispatcher.tally.note_turn(ended - started, len(outcomes) + len(turned.claimed))
        looked_everywhere = claims > 0 and self._note_claim(
            kind, request, claims, turned.claimed, (started, ended)
        )
        if kind.rings.by_queue:
            kind.note_retries(ends, ended)
        if turned.lanes:
            kind.note_lanes(turned.lanes, turned.claimed, ended)
        # A claim of one kind of tasks does not see tasks of the other kind.
        self.claimed_last = looked_everywhere and request.is_async is None
        if nodes:
            self._hand_out_nodes(pipeline, nodes, tasks)
        # Spans are stored last, because the statement may lose the connection; every task is in the ledger.
        if dispatcher.traces is not None:
            dispatcher.traces.store(pipeline, turned.recorded)

    def _sort_out(self, claimed: Sequence[ClaimedTask]) -> Sequence[ClaimedTask]:
        """Return the claimed tasks that this worker knows; all other tasks are left to workers that know
        them.
        """
        unknown = self._unknown
        if unknown.knows_names(map(_NAME, claimed)):
            return claimed
        known: list[ClaimedTask] = []
        for task in claimed:
            if not unknown.is_unknown(task):
                known.append(task)
            elif (outcome := unknown.note_unknown(task, time.monotonic())) is None:
                self._dispatcher.ledger.give_back([task])
            else:
                self._dispatcher.ledger.put(task, UNCALLED, outcome)
        return known

    def _note_claim(
        self,
        kind: TaskKind,
        request: TurnRequest,
        claims: int,
        claimed: Sequence[ClaimedTask],
        span: tuple[float, float],
    ) -> bool:
        """Note how far a claim searched and how many tasks it found; return True if it searched
        everywhere.
        """
        windows = self._dispatcher.windows
        batch = self._config.max_claim_batch or claims
        # Unfilled windows do not mean that the queue is empty: the next task may be one that must not
        # wait in a window.
        possible = min(len(request.pids) + request.prefetch, batch)
        was_short = len(claimed) < possible
        if windows.is_on and not request.is_async:
            names = [task.task_name for task in claimed if task.burst]
            if names or windows.is_open:
                windows.note_claim(min(claims, batch), names, is_drained=was_short)
        kind.agenda.note_claim(possible, len(claimed))
        if was_short and not request.positions.looks_everywhere:
            kind.agenda.wake_at(kind.bookmarks.rested_at)
        # A look-ahead would find the next start under a rate as well, but only ten times a second.
        pause_seconds = self._claimer.seconds_between_starts(claimed)
        if was_short and pause_seconds is not None:
            kind.agenda.wake_at(span[1] + pause_seconds)
        return kind.bookmarks.note_claim(request.positions, claimed, was_short=was_short, span=span)

    def _hand_out_nodes(
        self, pipeline: Pipeline, nodes: Sequence[ClaimedTask], tasks: Sequence[ClaimedTask]
    ) -> None:
        """Give tasks to children; workflow nodes also get the results that they take from other nodes."""
        with self._dispatcher.ledger.claim_in_doubt():
            parts, refused = self._dispatcher.inputs.read(pipeline, nodes)
        for task, outcome in refused:  # the inputs of these tasks' nodes cannot be read
            self._dispatcher.ledger.put(task, ENDED, outcome)
        refused_ids = {task.id for task, _ in refused}
        tasks = [task for task in tasks if task.id not in refused_ids]
        self._hand_out(pipeline, tasks, parts)

    def _hand_out(self, pipeline: Pipeline, tasks: Sequence[ClaimedTask], parts: Parts) -> None:
        """Give tasks to children; after a freeze, give only tasks that no other worker has recovered."""
        self._notice_freeze()
        if tasks and self._maintenance.heartbeat.was_frozen:
            with self._dispatcher.ledger.claim_in_doubt():
                owned = self._maintenance.heartbeat.owned(pipeline, tasks)
            tasks = [task for task in tasks if task.id in owned]
        self._dispatcher.hand_out(tasks, parts)

    def _retry_refused(self, pipeline: Pipeline) -> None:
        """Try again to record the outcomes that the database has refused; a stopping worker then gives up
        outcomes that are refused again.
        """
        ledger, blocked = self._dispatcher.ledger, self._blocked
        refused = [outcome for _, outcome in ledger.outcomes(REFUSED)]
        is_last = self._shutdown.is_requested and ledger.count() == len(refused)
        if is_last:
            refused.sort(key=lambda one: blocked.seconds_taken(one.task_id))
        for outcome, seconds, waits in _last_attempts(refused) if is_last else _attempts(refused):
            if not is_last and blocked.is_waiting(outcome.task_id):
                continue
            freed = TurnRequest(
                freed=freed_by_queue(ledger.owned, [outcome]),
                freed_lanes=freed_lanes(ledger.owned, [outcome]),
            )
            turned = record_alone(
                pipeline, self._claimer, outcome, blocked, freed, seconds, waits=waits
            )
            if turned is not None:
                self.claimed_last = False
                ends = ledger.close([outcome], turned)
                self._dispatcher.tally.note_ends(ends)
                log_ends(ends)
        if is_last and ledger.count(REFUSED):
            self.give_up()

    def give_up(self) -> None:
        """Complete a shutdown although the database refuses the outcomes of tasks, unless a task is still
        running.
        """
        ledger = self._dispatcher.ledger
        ledger.give_back(ledger.tasks(UNCALLED))
        lost = [*ledger.tasks(REFUSED), *ledger.tasks(ENDED)]
        if not lost or ledger.count(RUNNING):
            return
        self.has_given_up = True
        logger.error(
            "shutdown: the database still refuses the outcomes of %d task(s)",
            len(lost),
            extra=as_event("outcomes_lost", task_ids=[task.id for task in lost]),
        )
        for task in lost:
            about = {"task_id": task.id, "task_name": task.task_name}
            logger.error("the outcome of %s %s is lost", task.task_name, task.id, extra=about)

    def _look_ahead(self, pipeline: Pipeline) -> None:
        """Look ahead: find out when the next task is due, expire tasks past their deadline, and free
        lapsed claims.
        """
        now = time.monotonic()
        signs = self._maintenance.heartbeat.carried_signs(now)
        if self._maintenance.heartbeat.wake_ups.must_store and not signs:
            # The change is committed before the look-ahead, so that the look-ahead finds tasks whose send did
            # not see it.
            with self._blocked.failures.job("the note that this worker waits for tasks"):
                pipeline.run([wait_for_tasks(self._claimer.worker_id)])
                self._maintenance.heartbeat.wake_ups.is_stored = True
        looks = [kind.agenda.last_look for kind in self._kinds]
        look: Step = self._claimer.look_ahead(None if None in looks else looks[0])
        found: list[list[Any]] = []
        if signs:
            with self._blocked.failures.job(
                "a look at the queues with the heartbeat of this worker"
            ):
                found = pipeline.run([look, *signs])
        # If the heartbeat in this transaction is refused, it is repeated in its own transaction.
        (due,), *answers = found or pipeline.run([look])
        if due.overdue and _expire(pipeline, self._blocked):
            self.claimed_last = False
            ((due,),) = pipeline.run([look])
        ended = time.monotonic()
        for kind in self._kinds:
            kind.agenda.note_look_ahead(ended, due.seconds, ended - now, due.looked_at)
            if due.start_seconds is not None:
                kind.agenda.wake_at(ended + due.start_seconds)
        if due.keyed:
            self.note_news(keyed=due.keyed)
        look_at_keyed(pipeline, self._kinds, self._blocked)
        if answers:
            # A recovery may follow, and this worker may claim the tasks that the recovery frees.
            self.claimed_last = False
            self._maintenance.heartbeat.note_signs(pipeline, answers, now)
            self._fence_if_lost(pipeline)

    def _fence_if_lost(self, pipeline: Pipeline) -> None:
        """Kill the children if another worker has declared this worker lost and recovered its tasks;
        register again before the next claim.
        """
        if self._maintenance.heartbeat.is_lost:
            running_count = self._dispatcher.ledger.count(RUNNING)
            logger.critical(
                "another worker declared this worker lost; killing its %d running task(s)",
                running_count,
                extra=as_event("worker_declared_lost"),
            )
            if running_count:
                self._pool.kill_all()
            self._maintenance.heartbeat.register_again(pipeline)
