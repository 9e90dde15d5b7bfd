"""The turn: one transaction, in one round trip, that records finished attempts and claims new tasks.

While one turn commits, reports collect for the next turn. So batches grow with the load, and the number
of commits per task falls; an idle worker still reacts within one round trip.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import psycopg

from horsies.config.app import AppConfig, Rate
from horsies.db.errors import describe_refusal, is_of_text, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement, Step
from horsies.db.statements.blocked import DueTask, find_due, find_unheld
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    LookAhead,
    ReleaseUnstarted,
    StartTasks,
    claim_behind_mark,
    claim_tasks,
    find_completed,
    release_unstarted,
    seconds_until_due,
    seconds_until_rated,
    start_tasks,
)
from horsies.tasks.blocked import Action, Blocked, Change, is_of_one
from horsies.tasks.outcome import (
    ENDINGS,
    RUN_OF,
    Outcome,
    locking_steps,
    logging_steps,
    recording_steps,
    without_result,
)
from horsies.worker.agenda import REST_FACTOR
from horsies.worker.busy_lanes import NO_MARKS, LaneMarks
from horsies.worker.config import WorkerConfig

logger = logging.getLogger("horsies.turn")

# How long claims may rely on bookmarks alone.
EVERYWHERE_SECONDS = 0.1
# A search everywhere counts as costly if the whole turn takes longer than this.
COSTLY_SECONDS = 0.01
# How many refused claims one turn tolerates; the next turn continues behind the refused tasks.
REFUSALS_MAX = 100


class Positions(NamedTuple):
    """The positions where a claim searches: for each queue the task behind which it searches first, and
    whether it then searches everywhere for more tasks. ``has_backlog`` is set if the last search behind such
    tasks found enough.
    """

    priorities: Sequence[int | None] = ()
    enqueued_at: Sequence[str | None] = ()
    ids: Sequence[str | None] = ()
    looks_everywhere: bool = True
    has_backlog: bool = False


EVERYWHERE = Positions()
_NO_TASK = (None, None, None)


class Bookmarks:
    """The last task claimed from each queue, behind which the next claim searches first.

    Claimed tasks leave dead entries in the claim index until vacuum removes them, which an open transaction
    prevents. A claim that starts at the front of the queue scans all dead entries; a claim that starts behind
    the last claimed task scans none. A claim that searches behind a bookmark does not find a task before the
    bookmark. Such tasks are claimed nevertheless, because claims search everywhere

    * when they find too few tasks: the same call then searches everywhere;
    * after a notification: every event that puts a task before a bookmark sends one (a better priority,
      a slow transaction's commit, a release, a retry, a queue resumed);
    * every ``EVERYWHERE_SECONDS``: no notification announces a scheduled task of a better priority that
      is due now, or the rollback of another worker's claim.

    So a worker with more work than children may take a task a tenth of a second too late; the order behind
    the bookmark is exact. If a search everywhere is slow, the next one is delayed by ten times its duration.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        self._last: dict[str, tuple[int, str, str]] = {}
        self._has_news = True
        self._everywhere_at = 0.0
        self._has_backlog = False
        # The time from which claims may search everywhere again.
        self.rested_at = 0.0

    def note_news(self) -> None:
        """Note that a task may have been added before a bookmark."""
        self._has_news = True

    def step_back(self, returned: Iterable[ClaimedTask]) -> None:
        """Start the next claim with these tasks, which were returned to their queues."""
        for task in returned:
            last = self._last.get(task.queue_name)
            is_plain = task.lane is None
            if is_plain and last and (task.priority, task.enqueued_at, task.id) < last:
                before = task.priority, task.enqueued_at, _id_before(task.id)
                self._last[task.queue_name] = before

    def positions(self, now: float, *, has_lane_marks: bool = False) -> Positions:
        """Return where the next claim searches first.

        Marks of lanes count as bookmarks: only a claim that does not search everywhere uses them.
        """
        is_rested = now >= self.rested_at
        is_time = self._has_news or now >= self._everywhere_at
        if not (self._last or has_lane_marks) or (is_rested and is_time):
            return EVERYWHERE
        if not self._last:
            return Positions(looks_everywhere=is_rested)
        last = [self._last.get(queue, _NO_TASK) for queue in self._queues]
        # The values are lists, because the encoder would cache tuples, although these values change with
        # every claim.
        priorities, times, ids = map(list, zip(*last, strict=True))
        return Positions(priorities, times, ids, is_rested, self._has_backlog)

    def note_claim(
        self,
        positions: Positions,
        claimed: Sequence[ClaimedTask],
        *,
        was_short: bool,
        span: tuple[float, float],
    ) -> bool:
        """Update the bookmarks after a claim that started from these positions and took this long; return
        True if it searched everywhere.
        """
        for task in claimed:
            if task.lane is None:
                self._last[task.queue_name] = task.priority, task.enqueued_at, task.id
        is_behind = self._has_backlog or positions is not EVERYWHERE
        self._has_backlog = is_behind and not was_short
        if not (positions is EVERYWHERE or (was_short and positions.looks_everywhere)):
            return False
        started, ended = span
        taken = ended - started
        self._has_news = False
        self._everywhere_at = ended + EVERYWHERE_SECONDS
        self.rested_at = ended + (REST_FACTOR * taken if taken > COSTLY_SECONDS else 0.0)
        return True


# The parameters that differ between a worker's claims for its idle children: the children, and
# ``Positions``. For tasks with keys also the places on the rings, the freed lanes, and ``LaneMarks``.
_MARKS = ("marked_priorities", "marked_moments", "marked_ids", "looks_everywhere")
_VARYING = {"pids", "queue_limits", *_MARKS}
_LANE_MARKS = ("marked_lanes", "lane_priorities", "lane_moments", "lane_ids")
_VARYING_WITH_KEYS = {*_VARYING, "cursors", "freed_queues", "freed_lanes"}


class TurnRequest(NamedTuple):
    """What a turn does besides recording outcomes.

    ``starting`` are prefetched tasks with the idle children that take them. ``pids`` are the idle children to
    claim for. ``ahead`` are the children that may take short tasks behind other tasks, and ``short_names``
    are the names of these tasks. ``prefetch`` is how many tasks to claim ahead of time. ``freed`` are the
    places that the outcomes free in each queue. ``positions`` is where the claim searches first.
    ``unknown_names``, ``refused_ids`` and ``refused_by`` (fingerprints) are the tasks that it excludes.
    ``is_async`` restricts the claim to tasks of ``async def`` functions (True) or to all other tasks (False);
    None claims both. ``cursors`` are the places on the rings of lanes where the claim by keys continues, per
    queue; empty if no queue has keys. ``freed_lanes`` are the queues and lanes of the tasks with keys whose
    outcomes are recorded. ``lane_marks`` is where the claim searches first in busy lanes.
    """

    starting: Sequence[tuple[ClaimedTask, int]] = ()
    pids: Sequence[int] = ()
    prefetch: int = 0
    freed: Mapping[str, int] = MappingProxyType({})
    positions: Positions = EVERYWHERE
    unknown_names: Sequence[str] = ()
    refused_ids: Sequence[str] = ()
    ahead: Sequence[int] = ()
    short_names: Sequence[str] = ()
    is_async: bool | None = None
    refused_by: Sequence[str] = ()
    cursors: Sequence[int | None] = ()
    freed_lanes: Sequence[tuple[str, int]] = ()
    lane_marks: LaneMarks = NO_MARKS

    @property
    def claims(self) -> int:
        return len(self.pids) + len(self.ahead) + self.prefetch

    def without_claims(self) -> TurnRequest:
        return self._replace(pids=(), ahead=(), prefetch=0)


NO_REQUEST = TurnRequest()
# The fields that only unusual claims have.
_UNUSUAL = attrgetter("prefetch", "ahead", "freed", "unknown_names", "refused_ids", "refused_by")


class TurnResult(NamedTuple):
    """The result of a turn: the ids of recorded outcomes, the children of prefetched tasks that started,
    and the claimed tasks.

    `refused` are the outcomes that the database refused and the worker keeps. `as_decided` is False if an
    outcome other than the worker's may have been recorded. `failed` are recorded outcomes that are final
    although the worker may have decided to retry. `cancelled` are outcomes that an accepted cancellation has
    replaced; `cleaning` are runs that continue with their clean-up after a cancellation. `instead` are the
    outcomes recorded in place of outcomes whose texts the database rejects. `by_child` are tasks whose child
    had already recorded a success.
    """

    recorded: set[str]
    started: Mapping[str, int]
    claimed: Sequence[ClaimedTask]
    refused: Set[str] = frozenset()
    as_decided: bool = True
    failed: Set[str] = frozenset()
    cancelled: Set[str] = frozenset()
    cleaning: Set[str] = frozenset()
    instead: Mapping[str, Outcome] = MappingProxyType({})
    by_child: Set[str] = frozenset()
    # One row per queue: how the claim by keys ended there.
    lanes: Sequence[ClaimedTask] = ()


NOTHING_DONE = TurnResult(set(), MappingProxyType({}), ())


@dataclass(frozen=True)
class Claimer:
    """The values that all claims of a worker share: its identity, its queues in order, and the caps."""

    worker_id: str
    hostname: str
    queues: Sequence[str]
    queue_caps: Sequence[int | None]
    cluster_cap: int | None = None
    max_claim_batch: int = 0
    counts_claimed: bool = True
    lease_ms: int = 60_000
    # The rate of each queue; empty if no queue has a rate.
    rates: Sequence[Rate | None] = ()
    # Without prepared statements, only short statements are cheap.
    is_prepared: bool = True

    @classmethod
    def of(
        cls, app_config: AppConfig, config: WorkerConfig, worker_id: str, hostname: str
    ) -> Claimer:
        caps = {queue.name: queue.max_concurrency for queue in app_config.queues()}
        rates = {queue.name: queue.rate for queue in app_config.queues()}
        served = tuple(rates.get(queue) for queue in config.queues)
        return cls(
            worker_id,
            hostname,
            tuple(config.queues),
            tuple(caps.get(queue) for queue in config.queues),
            app_config.cluster_wide_cap,
            config.max_claim_batch,
            app_config.hard_cap_mode,
            app_config.effective_claim_lease_ms,
            served if any(served) else (),
            not config.pgbouncer_transaction_mode,
        )

    @cached_property
    def is_capped(self) -> bool:
        """Whether a place that this worker frees may let another worker claim."""
        return self.cluster_cap is not None or any(cap is not None for cap in self.queue_caps)

    @cached_property
    def rate_seconds(self) -> Sequence[float | None]:
        """For each queue, the seconds between two starts."""
        return tuple(None if one is None else one.seconds_per_start for one in self.rates)

    @cached_property
    def rate_bursts(self) -> Sequence[int | None]:
        """For each queue, how many tasks may start immediately one after another."""
        return tuple(None if one is None else one.burst for one in self.rates)

    def only(self, queue: str) -> Claimer:
        """Return a claimer for the same worker that claims from one queue only."""
        place = self.queues.index(queue)
        rates = self.rates[place : place + 1]
        return replace(self, queues=(queue,), queue_caps=(self.queue_caps[place],), rates=rates)

    def look_ahead(self, last_look: datetime | None) -> Step:
        """Return the statement that finds out when the next task is due, or may start under a rate."""
        statement = seconds_until_rated if self.rates else seconds_until_due
        return statement, LookAhead(self.queues, last_look)

    def seconds_between_starts(self, claimed: Iterable[ClaimedTask]) -> float | None:
        """Return the shortest time after which a rate allows the next start in the queues of these tasks."""
        if not self.rates:
            return None
        rates = dict(zip(self.queues, self.rates, strict=True))
        found = [rate for task in claimed if (rate := rates.get(task.queue_name)) is not None]
        return min((rate.seconds_per_start for rate in found), default=None)

    @cached_property
    def _usual_claim(self) -> Statement[Any, ClaimedTask]:
        """Return the usual claim, for idle children only, with its constant parameters inlined."""
        return self._bound_claim(_VARYING)

    @cached_property
    def _has_plain_queue(self) -> bool:
        """Whether the worker serves a single queue whose claims nothing restricts."""
        is_free = not (self.is_capped or self.rates or self.max_claim_batch)
        return is_free and self.is_prepared and len(self.queues) == 1

    @cached_property
    def _claim_behind_mark(self) -> Statement[Any, ClaimedTask]:
        return claim_behind_mark.bound(
            worker_id=self.worker_id, hostname=self.hostname, queue=self.queues[0]
        )

    @cached_property
    def _usual_keyed_claim(self) -> Statement[Any, ClaimedTask]:
        """Return the usual claim of a worker that has met tasks with keys."""
        return self._bound_claim(_VARYING_WITH_KEYS)

    @cached_property
    def _marked_claim(self) -> Statement[Any, ClaimedTask]:
        """Return the usual claim of a worker that searches lanes behind marks."""
        return self._bound_claim({*_VARYING_WITH_KEYS, *_LANE_MARKS})

    def _bound_claim(self, varying: Set[str]) -> Statement[Any, ClaimedTask]:
        usual = self.claim(TurnRequest())._replace(idle=None)._asdict()
        return claim_tasks.bound(**{name: usual[name] for name in usual.keys() - varying})

    def claim_step(self, request: TurnRequest) -> Step:
        """Return the statement that claims.

        Most claims are for idle children and exclude no tasks; they send only 6 of the 30 parameters, or
        9 if there are tasks with keys.
        """
        if not _is_usual(request):
            return claim_tasks, self.claim(request)
        pids, positions = request.pids, request.positions
        if self.is_behind_mark(request):
            return self._claim_behind_mark, (pids, *[marks[0] for marks in positions[:3]])
        limits = (self.max_claim_batch or len(pids),) * len(self.queues)
        usual = pids, limits, *positions[:4]
        if not (request.cursors or request.freed_lanes):
            return self._usual_claim, usual
        freed = (
            [queue for queue, _ in request.freed_lanes],
            [lane for _, lane in request.freed_lanes],
        )
        keyed = *usual, request.cursors, *freed
        if request.lane_marks is NO_MARKS:
            return self._usual_keyed_claim, keyed
        return self._marked_claim, (*keyed, *request.lane_marks)

    def is_behind_mark(self, request: TurnRequest) -> bool:
        """Return whether the claim searches only behind the mark, because it probably finds all its tasks
        there. If it does not, ``take_turn`` claims the others.
        """
        is_wanted = request.positions.has_backlog and bool(request.pids) and self._has_plain_queue
        return is_wanted and _is_usual(request) and not (request.cursors or request.freed_lanes)

    def claim(self, request: TurnRequest) -> ClaimTasks:
        idle, positions = len(request.pids) + request.prefetch, request.positions
        limit = self.max_claim_batch or idle + len(request.ahead)
        return ClaimTasks(
            worker_id=self.worker_id,
            hostname=self.hostname,
            pids=[*request.pids, *request.ahead] if request.ahead else request.pids,
            queues=self.queues,
            queue_limits=(limit,) * len(self.queues),
            prefetch=request.prefetch,
            lease_ms=self.lease_ms,
            queue_caps=self.queue_caps,
            cluster_cap=self.cluster_cap,
            counts_claimed=self.counts_claimed,
            freed=[request.freed.get(queue, 0) for queue in self.queues] if request.freed else (),
            marked_priorities=positions.priorities,
            marked_moments=positions.enqueued_at,
            marked_ids=positions.ids,
            looks_everywhere=positions.looks_everywhere,
            idle=idle,
            short_names=request.short_names,
            is_async=request.is_async,
            unknown_names=request.unknown_names,
            refused_ids=request.refused_ids,
            refused_by=request.refused_by,
            rate_seconds=self.rate_seconds,
            rate_bursts=self.rate_bursts,
            cursors=request.cursors,
            freed_queues=[queue for queue, _ in request.freed_lanes],
            freed_lanes=[lane for _, lane in request.freed_lanes],
            marked_lanes=request.lane_marks.lanes,
            lane_priorities=request.lane_marks.priorities,
            lane_moments=request.lane_marks.enqueued_at,
            lane_ids=request.lane_marks.ids,
        )


def _is_usual(request: TurnRequest) -> bool:
    """Return whether the turn claims only for idle children, and excludes no tasks."""
    return request.is_async is None and not any(_UNUSUAL(request))


def take_turn(
    pipeline: Pipeline,
    claimer: Claimer,
    outcomes: Sequence[Outcome],
    request: TurnRequest,
    blocked: Blocked | None = None,
) -> TurnResult:
    """Record the outcomes, start prefetched tasks and claim new ones, in one transaction.

    Raises transient errors and errors of the installation. After such an error the COMMIT may have taken
    effect, but recording the outcomes again is harmless. If single tasks cause an error, every task gets its
    own transaction, and a task whose change the database refuses is left to ``blocked``.
    """
    blocked = blocked or Blocked(claimer.worker_id)
    if _has_extras(outcomes):
        if waiting := [one for one in outcomes if one.park is not None]:
            return _turn_beside_parks(pipeline, claimer, outcomes, waiting, request, blocked)
        if any(one.is_recorded for one in outcomes):
            return _turn_beside_children(pipeline, claimer, outcomes, request, blocked)
    if blocked.delays and request.claims:
        if blocked.has_next("claim"):
            turned = take_turn(pipeline, claimer, outcomes, request.without_claims(), blocked)
            return turned._replace(claimed=_claim_one_by_one(pipeline, claimer, request, blocked))
        request = request._replace(refused_ids=[*request.refused_ids, *blocked.excluded()])
    wanted = outcomes
    if blocked.delays:  # an earlier search for the cause of an error was interrupted
        wanted = [one for one in outcomes if not blocked.is_waiting(one.task_id, "record")]
    action: Action = "record" if wanted else "start" if request.starting else "claim"
    turned = blocked.isolated(
        pipeline,
        action,
        lambda: _run(pipeline, _steps(claimer, wanted, request)),
        lambda: _one_by_one(pipeline, claimer, wanted, request, blocked),
        "turn" if wanted else action,
    )
    if len(turned.claimed) < len(request.pids) and claimer.is_behind_mark(request):
        turned = _with_rest(pipeline, claimer, turned, request, blocked)
    if len(wanted) < len(outcomes):
        left = {one.task_id for one in outcomes}.difference(one.task_id for one in wanted)
        turned = turned._replace(refused=turned.refused | left, as_decided=False)
    return turned


def _with_rest(
    pipeline: Pipeline,
    claimer: Claimer,
    turned: TurnResult,
    request: TurnRequest,
    blocked: Blocked,
) -> TurnResult:
    """Search everywhere for the tasks that a claim behind the mark has not found there, in a second
    transaction. This happens once at the end of a backlog.
    """
    if not request.positions.looks_everywhere:
        return turned
    busy = {task.worker_pid for task in turned.claimed}
    idle = [pid for pid in request.pids if pid not in busy]
    rest = request._replace(starting=(), pids=idle, positions=EVERYWHERE)
    claimed = _claim_apart(pipeline, claimer, rest, blocked)
    return turned._replace(claimed=[*turned.claimed, *claimed])


def _turn_beside_children(
    pipeline: Pipeline,
    claimer: Claimer,
    outcomes: Sequence[Outcome],
    request: TurnRequest,
    blocked: Blocked,
) -> TurnResult:
    """Take a turn for outcomes, some of which children have already recorded in their tasks' transactions."""
    rest = [one for one in outcomes if not one.is_recorded]
    needs_turn = rest or request.starting or _needs_claim(claimer, request)
    turned = NOTHING_DONE
    if needs_turn:
        turned = take_turn(pipeline, claimer, rest, request, blocked)
    done = {one.task_id for one in outcomes if one.is_recorded}
    if logs := logging_steps([one for one in outcomes if one.is_recorded]):
        _store_logs(pipeline, logs)
    return turned._replace(recorded=turned.recorded | done)


def _store_logs(pipeline: Pipeline, logs: Sequence[Step]) -> None:
    """Store the logs of attempts whose outcomes children have recorded; logs that the database rejects
    are lost.
    """
    try:
        pipeline.run(logs)
    except psycopg.Error as error:
        if is_transient(error):
            raise
        logger.error("the logs of tasks cannot be stored: %s", describe_refusal(error))


def _turn_beside_parks(
    pipeline: Pipeline,
    claimer: Claimer,
    outcomes: Sequence[Outcome],
    waiting: Sequence[Outcome],
    request: TurnRequest,
    blocked: Blocked,
) -> TurnResult:
    """Park the runs that wait, then take the turn.

    Parks have their own transaction. If the same transaction also recorded outcomes, two workers could
    deadlock: each would have locked the row of a run that it parks, and would end a task that wakes the other
    worker's run.
    """
    none = TurnRequest()
    parked = blocked.isolated(
        pipeline,
        "record",
        lambda: _run(pipeline, _steps(claimer, waiting, none)),
        lambda: _one_by_one(pipeline, claimer, waiting, none, blocked),
        "park",
    )
    rest = [one for one in outcomes if one.park is None]
    turned = NOTHING_DONE
    if rest or request.starting or _needs_claim(claimer, request):
        turned = take_turn(pipeline, claimer, rest, request, blocked)
    return turned._replace(
        recorded=turned.recorded | parked.recorded,
        refused=turned.refused | parked.refused,
        cancelled=turned.cancelled | parked.cancelled,
        cleaning=turned.cleaning | parked.cleaning,
        instead={**turned.instead, **parked.instead},
        as_decided=turned.as_decided and parked.as_decided,
    )


def _one_by_one(
    pipeline: Pipeline,
    claimer: Claimer,
    outcomes: Sequence[Outcome],
    request: TurnRequest,
    blocked: Blocked,
) -> TurnResult:
    """Take a turn with one transaction per task.

    Blocked outcomes do not occupy a place under a cap, so they are reported before the claim.
    """
    with blocked.search(pipeline):
        each = {one.task_id: record_alone(pipeline, claimer, one, blocked) for one in outcomes}
    started = _start_one_by_one(pipeline, claimer, request, blocked)
    claimed = _claim_apart(pipeline, claimer, request._replace(starting=()), blocked)
    turns = [turned for turned in each.values() if turned is not None]
    return TurnResult(
        {task_id for turned in turns for task_id in turned.recorded},
        started,
        claimed,
        {task_id for task_id, turned in each.items() if turned is None},
        as_decided=False,
        failed={task_id for turned in turns for task_id in turned.failed},
        cancelled={task_id for turned in turns for task_id in turned.cancelled},
        cleaning={task_id for turned in turns for task_id in turned.cleaning},
        instead={task_id: one for turned in turns for task_id, one in turned.instead.items()},
        by_child={task_id for turned in turns for task_id in turned.by_child},
    )


# The statements of one transaction, in order, by the names of their results.
Steps: TypeAlias = dict[str, Step]
_NO_IDS: Set[str] = frozenset()
# The statements that return the attempts that are now recorded.
_RECORDED = frozenset((*ENDINGS, "by_child"))
# The statements of nearly every turn.
_USUAL = frozenset(("completed", "claim"))
# A turn reads fields of all its outcomes; attrgetter avoids a Python call for each of them.
# The fields that need further statements; the outcomes of plain tasks have none of them.
_EXTRAS = attrgetter("workflow_id", "park", "is_recorded", "is_in_doubt", "log")
_LOG, _IS_IN_DOUBT = attrgetter("log"), attrgetter("is_in_doubt")
_TASK_ID, _ID = attrgetter("task_id"), attrgetter("id")


def _has_extras(outcomes: Sequence[Outcome]) -> bool:
    """Return whether an outcome belongs to a run, parks one, has a log, or may have been recorded already."""
    return any(map(any, map(_EXTRAS, outcomes)))


def _steps(claimer: Claimer, outcomes: Sequence[Outcome], request: TurnRequest) -> Steps:
    """Return the statements that record, start and claim, in this order: recording frees places under a
    cap, which the claim can use.
    """
    starting, has_extras = request.starting, _has_extras(outcomes)
    steps: Steps = {}
    if starting or has_extras:
        runs = [*map(RUN_OF, outcomes), *(task.workflow_id for task, _ in starting)]
        if any(runs):
            (steps["lock"],) = locking_steps(runs)
    if outcomes:
        steps |= recording_steps(claimer.worker_id, outcomes)
    if has_extras:
        if any(map(_LOG, outcomes)):
            (steps["logs"],) = logging_steps(outcomes)
        if any(map(_IS_IN_DOUBT, outcomes)):
            doubtful = [(one.task_id, one.generation) for one in outcomes if one.is_in_doubt]
            steps["by_child"] = find_completed(*zip(*doubtful, strict=True))
    if starting:
        start = StartTasks(
            claimer.worker_id,
            [task.id for task, _ in starting],
            [task.generation for task, _ in starting],
            [pid for _, pid in starting],
        )
        steps["start"] = start_tasks, start
    if _needs_claim(claimer, request):
        steps["claim"] = claimer.claim_step(request)
    return steps


def _needs_claim(claimer: Claimer, request: TurnRequest) -> bool:
    """Return whether the claim statement is needed, to claim tasks or to notify other workers of places that
    this turn frees.
    """
    if request.claims > 0:
        return True
    return bool((claimer.is_capped and request.freed) or request.freed_lanes)


def _result(steps: Steps, answers: Sequence[Sequence[Any]]) -> TurnResult:
    rows = dict(zip(steps, answers, strict=True))
    claimed = rows.get("claim", ())
    if len(claimed) > 1 and steps["claim"][0].name == claim_behind_mark.name:
        pids, *_ = steps["claim"][1]
        claimed = sorted(claimed, key=lambda task: pids.index(task.worker_pid))
    lanes: Sequence[ClaimedTask] = ()
    if "" in map(_ID, claimed):
        lanes = [task for task in claimed if not task.id]
        claimed = [task for task in claimed if task.id]
    if steps.keys() <= _USUAL:
        return TurnResult(set(map(_TASK_ID, rows.get("completed", ()))), {}, claimed, lanes=lanes)
    ids = {name: set(map(_TASK_ID, rows[name])) for name in steps if name in _RECORDED}
    by_child = ids.get("by_child", _NO_IDS)
    recorded: set[str] = set()
    recorded.update(*ids.values())
    return TurnResult(
        recorded,
        {row.id: row.worker_pid for row in rows["start"]} if "start" in rows else {},
        claimed,
        failed=ids.get("failed", _NO_IDS),
        cancelled=ids.get("cancelled", _NO_IDS),
        cleaning=ids.get("cleaning", _NO_IDS),
        as_decided=not by_child,
        by_child=by_child,
        lanes=lanes,
    )


def _run(pipeline: Pipeline, steps: Steps, timeout_seconds: float | None = None) -> TurnResult:
    return _result(steps, pipeline.run([*steps.values()], timeout_seconds))


def _attempt(
    pipeline: Pipeline, steps: Steps, change: Change, blocked: Blocked
) -> TurnResult | None:
    """Run the statements that change one task; return None if the database refuses the change."""
    answers = blocked.attempt(pipeline, change, [*steps.values()])
    return None if answers is None else _result(steps, answers)


def record_alone(
    pipeline: Pipeline,
    claimer: Claimer,
    outcome: Outcome,
    blocked: Blocked,
    freed: TurnRequest = NO_REQUEST,
    last_seconds: float | None = None,
    *,
    waits: bool = False,
) -> TurnResult | None:
    """Record one outcome in a transaction, and offer the places that it frees to other workers; return None
    if the database refuses the outcome.

    If the database rejects an outcome's own texts, the outcome is recorded as a failure without them. In all
    other cases the outcome is kept unchanged: a trigger or a constraint refuses it, for example because of
    its run's progress, or the error is temporary, such as another session's lock.

    The last attempt of a stopping worker may take `last_seconds`; with `waits` it waits longer for a lock.
    """
    change = Change("record", outcome.task_id, outcome.workflow_id)
    limits: Steps = {} if waits else {"limits": blocked.lock_wait()}
    started = time.monotonic()
    seconds = blocked.seconds_alone(outcome.task_id) if last_seconds is None else last_seconds
    try:
        turned = _run(pipeline, limits | _steps(claimer, [outcome], freed), seconds)
    except psycopg.Error as error:
        if not is_of_one(error):
            raise
        if is_of_text(error) and outcome.log is not None:
            reason = describe_refusal(error)
            text, extra = "the log of task %s cannot be stored: %s", {"task_id": outcome.task_id}
            logger.error(text, outcome.task_id, reason, extra=extra)
            without = outcome._replace(log=None)
            return record_alone(
                pipeline, claimer, without, blocked, freed, last_seconds, waits=waits
            )
        instead = None
        if is_of_text(error):
            instead = _record_without_result(pipeline, claimer, outcome, freed, seconds)
        if instead is None:
            blocked.note(pipeline, change, error, time.monotonic() - started)
            return None
        turned, reason = instead, describe_refusal(error)
        extra = {"task_id": outcome.task_id}
        logger.error(
            "the result of task %s cannot be stored: %s", outcome.task_id, reason, extra=extra
        )
    blocked.forget(change)
    return turned


def _record_without_result(
    pipeline: Pipeline, claimer: Claimer, outcome: Outcome, request: TurnRequest, seconds: float
) -> TurnResult | None:
    plain = without_result(outcome)
    try:
        turned = _run(pipeline, _steps(claimer, [plain], request), seconds)
    except psycopg.Error as error:
        if not is_of_one(error):
            raise
        return None
    return turned._replace(instead={outcome.task_id: plain})


def _start_one_by_one(
    pipeline: Pipeline, claimer: Claimer, request: TurnRequest, blocked: Blocked
) -> dict[str, int]:
    started: dict[str, int] = {}
    for task, pid in request.starting:
        steps = _steps(claimer, (), TurnRequest(starting=[(task, pid)]))
        turned = _attempt(pipeline, steps, Change("start", task.id, task.workflow_id), blocked)
        started.update(turned.started if turned else {})
    return started


def _claim_apart(
    pipeline: Pipeline, claimer: Claimer, request: TurnRequest, blocked: Blocked
) -> Sequence[ClaimedTask]:
    return blocked.isolated(
        pipeline,
        "claim",
        lambda: _run(pipeline, _steps(claimer, (), request)).claimed,
        lambda: _claim_one_by_one(pipeline, claimer, request, blocked),
        waits=False,
    )


def _claim_one_by_one(
    pipeline: Pipeline, claimer: Claimer, request: TurnRequest, blocked: Blocked
) -> list[ClaimedTask]:
    """Claim each task in its own transaction, from the position just before the task, or from its lane. If
    another worker has taken the task, the claim finds a different one, so it also excludes tasks that this
    worker cannot run or change.
    """
    request = request._replace(ahead=())
    limit = request.claims + REFUSALS_MAX
    left_out = [*request.refused_ids, *blocked.excluded()]
    refused_by = list(request.refused_by)
    find = find_due(claimer.queues, left_out, request.unknown_names, limit, refused_by)
    (found,) = pipeline.run([find])
    claimed: list[ClaimedTask] = []
    refusals = 0
    for due in found:
        if len(claimed) == request.claims or refusals == REFUSALS_MAX:
            break
        pids = request.pids[len(claimed) :][:1]
        one = TurnRequest(
            pids=pids,
            prefetch=1 - len(pids),
            positions=_just_before(due) if due.lane is None else EVERYWHERE,
            cursors=() if due.lane is None else (due.lane - 1,),
            unknown_names=request.unknown_names,
            refused_ids=[*request.refused_ids, *blocked.excluded()],
            is_async=request.is_async,
            refused_by=refused_by,
        )
        steps = _steps(claimer.only(due.queue_name), (), one)
        turned = _attempt(pipeline, steps, Change("claim", due.id, due.workflow_id), blocked)
        refusals += turned is None
        claimed += turned.claimed if turned else ()
    return claimed


def _just_before(due: DueTask) -> Positions:
    before = _id_before(due.id)
    return Positions([due.priority], [due.enqueued_at], [before], looks_everywhere=False)


def _id_before(task_id: str) -> str:
    return str(UUID(int=max(0, UUID(task_id).int - 1)))


def release_unheld(
    pipeline: Pipeline,
    worker_id: str,
    held: Sequence[ClaimedTask],
    blocked: Blocked | None = None,
) -> int:
    """Release the tasks that this worker owns according to the database but does not hold, and that no child
    has received. A retry of a held task may be among them; only the generation distinguishes it from the held
    attempt.
    """
    blocked = blocked or Blocked(worker_id)
    ids, generations = [task.id for task in held], [task.generation for task in held]
    release = ReleaseUnstarted(worker_id, ids, generations)
    return blocked.isolated(
        pipeline,
        "release",
        lambda: len(pipeline.run([(release_unstarted, release)])[0]),
        lambda: _release_one_by_one(pipeline, release, blocked),
    )


def _release_one_by_one(pipeline: Pipeline, release: ReleaseUnstarted, blocked: Blocked) -> int:
    worker_id, ids, generations = release
    (unheld,) = pipeline.run([find_unheld(worker_id, ids, generations)])
    count = 0
    for task in unheld:
        others = [other for other in unheld if other is not task]
        alone = ReleaseUnstarted(
            worker_id,
            [*ids, *(other.id for other in others)],
            [*generations, *(other.generation for other in others)],
        )
        change = Change("release", task.id, task.workflow_id)
        if not blocked.is_waiting(task.id):
            answers = blocked.attempt(pipeline, change, [(release_unstarted, alone)])
            count += len(answers[0]) if answers else 0
    return count
