"""The turn: one transaction, one round trip, that records finished attempts and claims new tasks.

While one turn commits, reports pile up for the next, so batches grow with load and commits per task
fall; an idle worker still reacts within one round trip.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import psycopg

from horsies.config.app import AppConfig
from horsies.db.errors import is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimKnownTasks,
    ClaimTasks,
    ReleaseUnstarted,
    StartTasks,
    claim_known_tasks,
    claim_tasks,
    release_unstarted,
    start_tasks,
)
from horsies.tasks.outcome import Outcome, locking_steps, recording_steps, without_result
from horsies.worker.agenda import REST_FACTOR
from horsies.worker.config import WorkerConfig

logger = logging.getLogger("horsies.turn")

# How long claims may rely on bookmarks alone.
EVERYWHERE_SECONDS = 0.1
# Looking everywhere is costly when the whole turn takes longer than this.
COSTLY_SECONDS = 0.01


class Positions(NamedTuple):
    """Per queue, the task behind which to look first; and whether to look everywhere for the rest."""

    priorities: Sequence[int | None] = ()
    enqueued_at: Sequence[str | None] = ()
    ids: Sequence[str | None] = ()
    looks_everywhere: bool = True


EVERYWHERE = Positions()


class Bookmarks:
    """The last task claimed from each queue, behind which the next claim looks first.

    Claimed tasks leave entries in the claim index that lead nowhere until vacuum removes them, which it
    cannot do while any transaction is kept open. A claim that starts at the front of the queue walks
    over all of them, one that starts behind the last task it got over none.

    A claim that looks behind a bookmark does not see a task before it. That task is claimed all the
    same, because claims look everywhere

    * when they are short: they look in the same call for the tasks they did not find behind the
      bookmarks;
    * after a notification: every event that puts a task before a bookmark sends one (a better priority,
      a slow transaction's commit, a release, a retry, a queue resumed);
    * every ``EVERYWHERE_SECONDS``: no notification announces a scheduled task of a better priority that
      is due now, or the rollback of another worker's claim.

    So a worker with more work than children may take a task too late by a tenth of a second; the order
    behind the bookmark is exact. Only while looking everywhere is itself slow does the next such look
    wait for ten times as long as the last one took.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        self._last: dict[str, ClaimedTask] = {}
        self._has_news = True
        self._everywhere_at = 0.0
        # From then on claims may look everywhere again.
        self.rested_at = 0.0

    def note_news(self) -> None:
        """There may be a task before a bookmark now."""
        self._has_news = True

    def positions(self, now: float) -> Positions:
        is_rested = now >= self.rested_at
        is_time = self._has_news or now >= self._everywhere_at
        if not self._last or (is_rested and is_time):
            return EVERYWHERE
        last = [self._last.get(queue) for queue in self._queues]
        return Positions(
            [None if task is None else task.priority for task in last],
            [None if task is None else task.enqueued_at for task in last],
            [None if task is None else task.id for task in last],
            is_rested,
        )

    def note_claim(
        self,
        positions: Positions,
        claimed: Sequence[ClaimedTask],
        *,
        was_short: bool,
        span: tuple[float, float],
    ) -> bool:
        """A claim from these positions, within that span of time, got these tasks; True if it looked
        everywhere.
        """
        for task in claimed:
            self._last[task.queue_name] = task
        if not (positions is EVERYWHERE or (was_short and positions.looks_everywhere)):
            return False
        started, ended = span
        taken = ended - started
        self._has_news = False
        self._everywhere_at = ended + EVERYWHERE_SECONDS
        self.rested_at = ended + (REST_FACTOR * taken if taken > COSTLY_SECONDS else 0.0)
        return True


class TurnRequest(NamedTuple):
    """The work of a turn besides recording.

    ``starting`` are prefetched tasks with the idle children that take them, ``pids`` the idle children
    to claim for, ``prefetch`` how many tasks to claim ahead, ``freed`` the places that the outcomes
    free in each queue, ``positions`` where the claim looks first, ``unknown_names`` and ``refused_ids``
    the tasks that it leaves out.
    """

    starting: Sequence[tuple[ClaimedTask, int]] = ()
    pids: Sequence[int] = ()
    prefetch: int = 0
    freed: Mapping[str, int] = MappingProxyType({})
    positions: Positions = EVERYWHERE
    unknown_names: Sequence[str] = ()
    refused_ids: Sequence[str] = ()

    @property
    def claims(self) -> int:
        return len(self.pids) + self.prefetch


class TurnResult(NamedTuple):
    """The ids of recorded outcomes, the children of prefetched tasks that started, and the claimed tasks.

    `as_decided` is False when the database refused an outcome, so that another one was recorded.
    """

    recorded: set[str]
    started: Mapping[str, int]
    claimed: Sequence[ClaimedTask]
    as_decided: bool = True


@dataclass(frozen=True, slots=True)
class Claimer:
    """A worker's side of every claim: its identity, its queues in order, and the caps."""

    worker_id: str
    hostname: str
    queues: Sequence[str]
    queue_caps: Sequence[int | None]
    cluster_cap: int | None = None
    max_claim_batch: int = 0
    counts_claimed: bool = True
    lease_ms: int = 60_000

    @classmethod
    def of(
        cls, app_config: AppConfig, config: WorkerConfig, worker_id: str, hostname: str
    ) -> Claimer:
        caps = {queue.name: queue.max_concurrency for queue in app_config.queues()}
        return cls(
            worker_id,
            hostname,
            tuple(config.queues),
            tuple(caps.get(queue) for queue in config.queues),
            app_config.cluster_wide_cap,
            config.max_claim_batch,
            app_config.hard_cap_mode,
            app_config.effective_claim_lease_ms,
        )

    @property
    def is_capped(self) -> bool:
        """Whether a freed place may let another worker claim."""
        return self.cluster_cap is not None or any(cap is not None for cap in self.queue_caps)

    def claim(self, request: TurnRequest) -> ClaimTasks:
        limit = self.max_claim_batch or len(request.pids) + request.prefetch
        positions = request.positions
        return ClaimTasks(
            self.worker_id,
            self.hostname,
            request.pids,
            self.queues,
            (limit,) * len(self.queues),
            request.prefetch,
            self.lease_ms,
            self.queue_caps,
            self.cluster_cap,
            self.counts_claimed,
            [request.freed.get(queue, 0) for queue in self.queues] if request.freed else (),
            positions.priorities,
            positions.enqueued_at,
            positions.ids,
            positions.looks_everywhere,
        )

    def claim_step(self, request: TurnRequest) -> Step:
        """The statement that claims; one of its own if tasks are to be left out."""
        claim, names, ids = self.claim(request), request.unknown_names, request.refused_ids
        if names or ids:
            return claim_known_tasks, ClaimKnownTasks(*claim, names, ids)
        return claim_tasks, claim


def take_turn(
    pipeline: Pipeline, claimer: Claimer, outcomes: Sequence[Outcome], request: TurnRequest
) -> TurnResult:
    """Record the outcomes, start prefetched tasks and claim new ones, in one transaction.

    Raises transient errors, with nothing assumed about the COMMIT: recording again is harmless. A
    lasting error in one half must not block the other, so then each half runs in a transaction of
    its own.
    """
    try:
        return _one_transaction(pipeline, claimer, outcomes, request)
    except psycopg.Error as error:
        if is_transient(error):
            raise
        logger.exception("turn failed; recording outcomes and claiming tasks separately")
    recorded = _record_one_by_one(pipeline, claimer, outcomes)
    result = _one_transaction(pipeline, claimer, (), request)
    return TurnResult(recorded, result.started, result.claimed, as_decided=False)


def _one_transaction(
    pipeline: Pipeline, claimer: Claimer, outcomes: Sequence[Outcome], request: TurnRequest
) -> TurnResult:
    starting = request.starting
    runs = {one.workflow_id for one in outcomes}
    runs.update(task.workflow_id for task, _ in starting)
    steps = locking_steps(runs)
    locking = len(steps)
    steps += recording_steps(claimer.worker_id, outcomes)
    recording = len(steps)
    if starting:
        start = StartTasks(
            claimer.worker_id,
            [task.id for task, _ in starting],
            [task.generation for task, _ in starting],
            [pid for _, pid in starting],
        )
        steps.append((start_tasks, start))
    claims = request.claims > 0 or (claimer.is_capped and bool(request.freed))
    if claims:
        steps.append(claimer.claim_step(request))
    answers = pipeline.run(steps)
    claimed = answers.pop() if claims else ()
    started = {row.id: row.worker_pid for row in answers.pop()} if starting else {}
    recorded = {row.task_id for rows in answers[locking:recording] for row in rows}
    return TurnResult(recorded, started, claimed)


def _record_one_by_one(
    pipeline: Pipeline, claimer: Claimer, outcomes: Iterable[Outcome]
) -> set[str]:
    """An outcome that the database refuses is recorded without its texts; the others keep theirs."""
    recorded: set[str] = set()
    for outcome in outcomes:
        try:
            recorded |= _one_transaction(pipeline, claimer, [outcome], TurnRequest()).recorded
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.exception("the outcome of task %s cannot be stored", outcome.task_id)
            plain = without_result(outcome)
            recorded |= _one_transaction(pipeline, claimer, [plain], TurnRequest()).recorded
    return recorded


def release_unheld(pipeline: Pipeline, worker_id: str, held: Sequence[ClaimedTask]) -> int:
    """Release the tasks that this worker owns in the database but does not hold: no child has seen them.

    A retry of a held task may be among them: only the generation tells the two apart.
    """
    ids, generations = [task.id for task in held], [task.generation for task in held]
    (released,) = pipeline.run([(release_unstarted, ReleaseUnstarted(worker_id, ids, generations))])
    return len(released)
