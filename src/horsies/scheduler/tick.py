"""One tick: read due schedules, decide, and write tasks, runs and new states in one statement.

Between the read and the write, no row is locked and no transaction is open, so a frozen or killed
scheduler never blocks other schedulers. The statement skips schedules that have changed since the read,
and inserts all tasks and runs of the others. If several schedulers make the same decision, only one set
of rows is stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import psycopg

from horsies.db.errors import describe, is_of_data, may_last
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    DueSchedule,
    FireSlots,
    ScheduleName,
    fire_slots,
)
from horsies.db.statements.tasks import InsertTask
from horsies.logs import as_event
from horsies.result import Err, Ok
from horsies.scheduler.decide import Decision, Dropped, DueState, SkipReason, decide
from horsies.scheduler.entry import Entry
from horsies.scheduler.registry import DUE_MAX, Registry
from horsies.scheduler.targets import RunPlan, Work, traced_work, work_for_slot
from horsies.tasks.blocked import REST_FACTOR, Failures
from horsies.tracing import Sending

logger = logging.getLogger("horsies.scheduler")

# The maximum number of tasks and workflow nodes per tick, unless a single slot has more. A long
# catch-up continues in the next tick instead of one huge statement.
RUNS_MAX = 10_000
# The name under which the tick's refused batches are counted.
TICK = "tick"
# The time limit for the slots of one schedule, and the time for which a schedule is skipped after a
# transient error.
ALONE_SECONDS = 10.0
REST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Decided:
    """A due schedule, the decision about it, and its new tasks or runs."""

    due: DueSchedule
    decision: Decision
    work: Sequence[Work]
    # The spans of the tasks or runs, if the application uses tracing.
    sendings: Sequence[Sending] = ()

    @property
    def is_behind(self) -> bool:
        """Whether the next slot is already due."""
        following = self.decision.next_run_at
        return following is not None and following <= self.due.looked_at


@dataclass(frozen=True, slots=True)
class TickResult:
    """The schedules that fired, and the seconds until the next slot, or None without a further slot."""

    fired: Sequence[Decided]
    seconds_until_next: float | None


@dataclass(slots=True)
class Refused:
    """The scheduler's memory of refused ticks: the number of consecutive refusals, and the schedules to
    skip for now because of transient errors.
    """

    failures: Failures = field(default_factory=Failures)
    resting: dict[str, float] = field(default_factory=dict)

    def rest(self, name: str, seconds: float) -> None:
        self.resting[name] = time.monotonic() + seconds

    def awake(self, due: Iterable[DueSchedule]) -> list[DueSchedule]:
        """The due schedules that are not being skipped."""
        now = time.monotonic()
        self.resting = {name: ends_at for name, ends_at in self.resting.items() if now < ends_at}
        return [one for one in due if one.name not in self.resting]


def tick(pipeline: Pipeline, registry: Registry, refused: Refused | None = None) -> TickResult:
    """Send the tasks and start the runs that are due; raises psycopg.Error if the database is unavailable."""
    known = refused or Refused()
    ticked = known.failures.isolated(
        TICK,
        lambda: pipeline.run_script(_tick_script(registry, known)),
        lambda: _tick_one_by_one(pipeline, registry, known),
        waits=False,
    )
    for decided in ticked.fired:
        _log(decided)
        for sending in decided.sendings:
            sending.end()
    return ticked


def _tick_script(registry: Registry, refused: Refused) -> Script[TickResult]:
    due: list[DueSchedule] = yield registry.find_due()
    batch = decide_all(registry, refused.awake(due))
    taken: list[ScheduleName] = []
    if batch:
        taken = yield fire_slots, columns(batch)
    looked_at = due[0].looked_at if due else None
    (ahead,) = yield registry.look_ahead(looked_at)
    names = {one.name for one in taken}
    fired = [decided for decided in batch if decided.due.name in names]
    has_more = (fired and len(due) == DUE_MAX) or any(one.is_behind for one in fired)
    return TickResult(fired, 0.0 if has_more else ahead.seconds)


def decide_all(registry: Registry, due: Iterable[DueSchedule]) -> list[Decided]:
    """Decide about every due schedule; an error in one schedule does not affect the others."""
    batch: list[Decided] = []
    runs_left = RUNS_MAX
    for one in due:
        if runs_left <= 0:
            break
        try:
            decided = _decide_one(registry.entry_of(one), one, runs_left)
        except Exception:
            logger.exception("schedule %r: no decision is possible", one.name)
            continue
        if decided is not None:
            batch.append(decided)
            runs_left -= sum(
                len(work.nodes) if isinstance(work, RunPlan) else 1 for work in decided.work
            )
    return batch


def _decide_one(entry: Entry | None, due: DueSchedule, runs_max: int) -> Decided | None:
    if entry is None:
        return None
    decision = decide(entry.schedule, entry.timing, _in_utc(due), runs_max)
    if decision is None:
        return None
    work: list[Work] = []
    sendings: list[Sending] = []
    for slot in decision.fire:
        match work_for_slot(entry.target, slot):
            case Ok(one):
                traced, sending = traced_work(entry.target, one)
                work.append(traced)
                sendings += [] if sending is None else [sending]
            case Err(reason):
                logger.error("schedule %r, slot %s: %s", due.name, slot, reason)
                decision = _refused(decision, slot)
    return Decided(due, decision, work, sendings)


def _in_utc(due: DueSchedule) -> DueState:
    """Convert to UTC, because arithmetic in the session's time zone would follow DST changes."""
    resumed_at = None if due.resumed_at is None else due.resumed_at.astimezone(UTC)
    edited_at = None if due.edited_at is None else due.edited_at.astimezone(UTC)
    due_at, now = due.due_at.astimezone(UTC), due.looked_at.astimezone(UTC)
    return DueState(due_at, now, due.is_unfinished, resumed_at, edited_at)


def _refused(decision: Decision, slot: datetime) -> Decision:
    """Drop a slot whose task or run cannot be created; it would otherwise stay due forever."""
    dropped = Dropped(SkipReason.REFUSED, slot, slot)
    return Decision(decision.fire, decision.next_run_at, dropped)


def columns(batch: Sequence[Decided]) -> FireSlots:
    work = [(decided.due.name, one) for decided in batch for one in decided.work]
    tasks = [(name, one) for name, one in work if isinstance(one, InsertTask)]
    runs = [(name, one) for name, one in work if isinstance(one, RunPlan)]
    dropped = [decided.decision.dropped for decided in batch]
    return FireSlots(
        names=[decided.due.name for decided in batch],
        due_at=[decided.due.due_at for decided in batch],
        hashes=[decided.due.hash for decided in batch],
        next_run_at=[decided.decision.next_run_at for decided in batch],
        last_task_ids=[decided.work[-1].id if decided.work else None for decided in batch],
        run_counts=[len(decided.work) for decided in batch],
        skipped_at=[None if one is None else one.before for one in dropped],
        skip_reasons=[None if one is None else one.reason.value for one in dropped],
        ids=[row.id for _, row in tasks],
        schedule_names=[name for name, _ in tasks],
        slots=[row.sent_at for _, row in tasks],
        task_names=[row.task_name for _, row in tasks],
        queue_names=[row.queue_name for _, row in tasks],
        priorities=[row.priority for _, row in tasks],
        kwargs=[row.kwargs for _, row in tasks],
        delay_seconds=[row.delay_seconds for _, row in tasks],
        good_until=[row.good_until for _, row in tasks],
        max_retries=[row.max_retries for _, row in tasks],
        task_options=[row.task_options for _, row in tasks],
        timeouts_ms=[row.timeout_ms for _, row in tasks],
        retention_seconds=[row.retention_seconds for _, row in tasks],
        enqueue_shas=[row.enqueue_sha for _, row in tasks],
        lane_keys=[row.lane_key for _, row in tasks],
        lanes=[row.lane for _, row in tasks],
        run_ids=[run.id for _, run in runs],
        plans=[run.plan for _, run in runs],
        run_schedule_names=[name for name, _ in runs],
        run_slots=[run.sent_at for _, run in runs],
        run_delay_seconds=[run.delay_seconds for _, run in runs],
    )


def _tick_one_by_one(pipeline: Pipeline, registry: Registry, refused: Refused) -> TickResult:
    """Fire the schedules one by one, to isolate the one that the database refuses."""
    (due,) = pipeline.run([registry.find_due()])
    fired = []
    for decided in decide_all(registry, refused.awake(due)):
        started = time.monotonic()
        try:
            (taken,) = pipeline.run([(fire_slots, columns([decided]))], ALONE_SECONDS)
        except psycopg.Error as error:
            if may_last(error):
                name, reason = decided.due.name, describe(error)
                logger.error("schedule %r cannot be stored and stays due: %s", name, reason)
                taken_seconds = time.monotonic() - started
                refused.rest(name, max(REST_SECONDS, REST_FACTOR * taken_seconds))
            elif is_of_data(error):
                _drop_work(pipeline, decided, error)
            else:
                raise
            continue
        fired += [decided] if taken else []
    return TickResult(fired, None)


def _drop_work(pipeline: Pipeline, decided: Decided, error: psycopg.Error) -> None:
    """Advance a schedule without the refused tasks or runs, and log the refusal."""
    name = decided.due.name
    try:
        pipeline.run([(fire_slots, columns([_without_work(decided)]))])
    except psycopg.Error as again:
        if not is_of_data(again):
            raise
        logger.error("schedule %r cannot be stored and stays due: %s", name, describe(again))
    else:
        logger.error("schedule %r cannot be stored: %s", name, describe(error))


def _without_work(decided: Decided) -> Decided:
    slot = decided.decision.fire[-1] if decided.decision.fire else decided.due.due_at
    return Decided(decided.due, _refused(decided.decision, slot), ())


def _log(decided: Decided) -> None:
    name, decision = decided.due.name, decided.decision
    if count := len(decided.work):
        verb = "run(s) started" if isinstance(decided.work[-1], RunPlan) else "task(s) sent"
        event = as_event("slots_sent", schedule=name, count=count)
        slot = decision.fire[-1]
        logger.info("schedule %r: %d %s, slot %s", name, count, verb, slot, extra=event)
    if dropped := decision.dropped:
        reason = dropped.reason.lower()
        logger.warning(
            "schedule %r: slots from %s until %s dropped (%s)",
            name,
            dropped.first,
            dropped.before,
            reason,
            extra=as_event("slots_dropped", schedule=name, reason=reason),
        )
