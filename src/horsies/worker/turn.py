"""The turn: one transaction, one round trip, that records everything that ended and claims what
fits.

The heart of the line. While one turn commits, reports pile up for the next, so batches grow with
load and commits per task fall; an idle worker still answers in one round trip.
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
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    ReleaseUnstarted,
    StartTasks,
    claim_tasks,
    release_unstarted,
    start_tasks,
)
from horsies.tasks.outcome import Outcome, locking_steps, recording_steps, without_result
from horsies.worker.bookmarks import EVERYWHERE, Marks
from horsies.worker.config import WorkerConfig

logger = logging.getLogger("horsies.turn")


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who claims, from which queues in which order, and within which caps."""

    worker_id: str
    hostname: str
    queues: Sequence[str]
    queue_caps: Sequence[int | None]
    cluster_cap: int | None = None
    max_claim_batch: int = 0
    counts_claimed: bool = True
    lease_ms: int = 60_000

    @property
    def is_capped(self) -> bool:
        """Whether freeing a place may let another worker go on."""
        return self.cluster_cap is not None or any(cap is not None for cap in self.queue_caps)

    def claim(self, wanted: Wanted) -> ClaimTasks:
        """Return the parameters of the claim."""
        limit = self.max_claim_batch or len(wanted.pids) + wanted.prefetch
        marks = wanted.marks
        return ClaimTasks(
            self.worker_id,
            self.hostname,
            wanted.pids,
            self.queues,
            (limit,) * len(self.queues),
            wanted.prefetch,
            self.lease_ms,
            self.queue_caps,
            self.cluster_cap,
            self.counts_claimed,
            [wanted.freed.get(queue, 0) for queue in self.queues] if wanted.freed else (),
            marks.priorities,
            marks.moments,
            marks.ids,
            marks.looks_everywhere,
        )


def make_claimer(
    app_config: AppConfig, config: WorkerConfig, worker_id: str, hostname: str
) -> Claimer:
    """Return who claims, with the caps of the application's configuration."""
    caps = {queue.name: queue.max_concurrency for queue in app_config.queues()}
    return Claimer(
        worker_id,
        hostname,
        tuple(config.queues),
        tuple(caps.get(queue) for queue in config.queues),
        app_config.cluster_wide_cap,
        config.max_claim_batch,
        app_config.hard_cap_mode,
        app_config.effective_claim_lease_ms,
    )


class Wanted(NamedTuple):
    """What a turn should do besides recording.

    ``starting`` are prefetched tasks with the idle children that take them, ``pids`` the idle children
    to claim for, ``prefetch`` how many to claim ahead, ``freed`` the places the settlements give back,
    ``marks`` where the claim looks first.
    """

    starting: Sequence[tuple[ClaimedTask, int]] = ()
    pids: Sequence[int] = ()
    prefetch: int = 0
    freed: Mapping[str, int] = MappingProxyType({})
    marks: Marks = EVERYWHERE

    @property
    def claims(self) -> int:
        """How many tasks the claim may bring."""
        return len(self.pids) + self.prefetch


class Turned(NamedTuple):
    """What a turn did: outcomes recorded, prefetched tasks started, tasks claimed.

    An outcome the database refused was recorded otherwise; then not all are ``as_settled``.
    """

    recorded: set[str]
    started: Mapping[str, int]
    claimed: Sequence[ClaimedTask]
    as_decided: bool = True


def take_turn(
    pipeline: Pipeline, claimer: Claimer, outcomes: Sequence[Outcome], wanted: Wanted
) -> Turned:
    """Record the settlements, start what waits and claim what fits, in one transaction.

    Raises what is transient, with nothing assumed about the COMMIT: recording again is harmless. A
    lasting error in one half must not block the other, so then each half runs in a transaction of
    its own.
    """
    try:
        return _one_transaction(pipeline, claimer, outcomes, wanted)
    except psycopg.Error as error:
        if is_transient(error):
            raise
        logger.exception("a turn failed; recording and claiming are tried apart")
    recorded = _record_apart(pipeline, claimer, outcomes)
    turned = _one_transaction(pipeline, claimer, (), wanted)
    return Turned(recorded, turned.started, turned.claimed, as_decided=False)


def _one_transaction(
    pipeline: Pipeline, claimer: Claimer, outcomes: Sequence[Outcome], wanted: Wanted
) -> Turned:
    runs = {one.workflow_id for one in outcomes}
    runs.update(task.workflow_id for task, _ in wanted.starting)
    steps = locking_steps(runs)
    locking = len(steps)
    steps += recording_steps(claimer.worker_id, outcomes)
    recording = len(steps)
    if wanted.starting:
        steps.append((start_tasks, _starts(claimer.worker_id, wanted.starting)))
    claims = wanted.claims > 0 or (claimer.is_capped and bool(wanted.freed))
    if claims:
        steps.append((claim_tasks, claimer.claim(wanted)))
    answers = pipeline.run(steps)
    claimed = answers.pop() if claims else ()
    started = {row.id: row.worker_pid for row in answers.pop()} if wanted.starting else {}
    recorded = {row.task_id for rows in answers[locking:recording] for row in rows}
    return Turned(recorded, started, claimed)


def _record_apart(pipeline: Pipeline, claimer: Claimer, outcomes: Iterable[Outcome]) -> set[str]:
    """Record one by one, so that an outcome the database refuses costs only its own text."""
    recorded: set[str] = set()
    for outcome in outcomes:
        try:
            recorded |= _one_transaction(pipeline, claimer, [outcome], Wanted()).recorded
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.exception("the outcome of task %s cannot be stored", outcome.task_id)
            plain = without_result(outcome)
            recorded |= _one_transaction(pipeline, claimer, [plain], Wanted()).recorded
    return recorded


def give_back(pipeline: Pipeline, worker_id: str, held: Sequence[ClaimedTask]) -> int:
    """Release what the database says is ours and no child has: user code never saw it.

    A retry of something held may be among it: only the generation tells them apart.
    """
    ids, generations = [task.id for task in held], [task.generation for task in held]
    in_hand = ReleaseUnstarted(worker_id, ids, generations)
    (released,) = pipeline.run([(release_unstarted, in_hand)])
    return len(released)


def _starts(worker_id: str, starting: Sequence[tuple[ClaimedTask, int]]) -> StartTasks:
    return StartTasks(
        worker_id,
        [pair[0].id for pair in starting],
        [pair[0].generation for pair in starting],
        [pair[1] for pair in starting],
    )
