"""The tick: read what is due, decide, and write tasks, runs and standings down in one statement.

Between reading and writing nothing is locked and no transaction is open, so a scheduler that is frozen
or killed at any moment holds nobody up: the statement takes a schedule only as it was read, and puts
in all of its tasks and runs or none. Two schedulers that decide the same leave one set behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg

from horsies.db.errors import describe, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Script
from horsies.db.statements.schedules import (
    DueSchedule,
    FireSlots,
    NextSlot,
    ScheduleName,
    find_due_schedules,
    fire_slots,
    seconds_until_next_slot,
)
from horsies.db.statements.tasks import InsertTask
from horsies.events import as_event
from horsies.result import Err, Ok
from horsies.scheduler.decide import Decision, Dropped, SkipReason, Standing, decide
from horsies.scheduler.entry import Entry
from horsies.scheduler.registry import DUE_MAX, Book
from horsies.scheduler.targets import RunPlan, Work

logger = logging.getLogger("horsies.scheduler")

# Catching up after a long time goes on in the next tick, so that no statement becomes huge: at most so
# many tasks and nodes of workflows, if one schedule alone does not have more.
RUNS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Planned:
    """A due schedule, what was decided, and the tasks or runs that come of it."""

    due: DueSchedule
    decision: Decision
    work: Sequence[Work]

    @property
    def is_behind(self) -> bool:
        """Whether it is due again at once."""
        following = self.decision.next_run_at
        return following is not None and following <= self.due.looked_at


@dataclass(frozen=True, slots=True)
class Ticked:
    """What a tick did, and when the next one is worth its while; None means nothing is planned."""

    fired: Sequence[Planned]
    seconds_until_next: float | None


def tick(pipeline: Pipeline, book: Book) -> Ticked:
    """Send and start everything that is due; psycopg.Error when the database is not up to it."""
    try:
        ticked = pipeline.follow(_tick_script(book))
    except psycopg.Error as error:
        if is_transient(error):
            raise
        logger.error("the due schedules are tried one by one: %s", describe(error))
        ticked = _tick_one_by_one(pipeline, book)
    for planned in ticked.fired:
        _log(planned)
    return ticked


def _tick_script(book: Book) -> Script[Ticked]:
    due: list[DueSchedule] = yield find_due_schedules, book.find_due()
    batch = plan_all(book, due)
    taken: list[ScheduleName] = []
    if batch:
        taken = yield fire_slots, columns(batch)
    looked_at = due[0].looked_at if due else None
    (ahead,) = yield seconds_until_next_slot, book.look_ahead(looked_at)
    names = {one.name for one in taken}
    fired = [planned for planned in batch if planned.due.name in names]
    return Ticked(fired, _seconds(ahead, due, fired))


def _seconds(ahead: NextSlot, due: Sequence[DueSchedule], fired: Sequence[Planned]) -> float | None:
    has_more = len(due) == DUE_MAX and fired
    return 0.0 if has_more or any(one.is_behind for one in fired) else ahead.seconds


def plan_all(book: Book, due: Iterable[DueSchedule]) -> list[Planned]:
    """Decide about every due schedule; one that cannot be decided does not keep the others back."""
    batch: list[Planned] = []
    runs_left = RUNS_MAX
    for one in due:
        if runs_left <= 0:
            break
        try:
            planned = _plan(book.entry_of(one), one, runs_left)
        except Exception:
            logger.exception("schedule %r cannot be planned", one.name)
            continue
        if planned is not None:
            batch.append(planned)
            runs_left -= sum(map(_size, planned.work))
    return batch


def _size(work: Work) -> int:
    return len(work.nodes) if isinstance(work, RunPlan) else 1


def _plan(entry: Entry | None, due: DueSchedule, runs_max: int) -> Planned | None:
    if entry is None:
        return None
    standing = _in_utc(due)
    decision = decide(entry.schedule, entry.timing, standing, runs_max)
    if decision is None:
        return None
    work: list[Work] = []
    for slot in decision.fire:
        match entry.target.for_slot(slot):
            case Ok(one):
                work.append(one)
            case Err(reason):
                logger.error("schedule %r, slot %s: %s", due.name, slot, reason)
                decision = _refused(decision, slot)
    return Planned(due, decision, work)


def _in_utc(due: DueSchedule) -> Standing:
    """What is read comes in the zone of the database session, where an hour may not be an hour."""
    resumed_at = None if due.resumed_at is None else due.resumed_at.astimezone(UTC)
    due_at, now = due.due_at.astimezone(UTC), due.looked_at.astimezone(UTC)
    return Standing(due_at, now, due.is_unfinished, resumed_at)


def _refused(decision: Decision, slot: datetime) -> Decision:
    """A slot whose task or run cannot be is over all the same, or it would be in the way for ever."""
    dropped = Dropped(SkipReason.REFUSED, slot, slot)
    return Decision(decision.fire, decision.next_run_at, dropped)


def columns(batch: Sequence[Planned]) -> FireSlots:
    """Write decisions, tasks and runs as columns, one value for each of them."""
    work = [(planned.due.name, one) for planned in batch for one in planned.work]
    tasks = [(name, one) for name, one in work if isinstance(one, InsertTask)]
    runs = [(name, one) for name, one in work if isinstance(one, RunPlan)]
    dropped = [planned.decision.dropped for planned in batch]
    return FireSlots(
        names=[planned.due.name for planned in batch],
        due_at=[planned.due.due_at for planned in batch],
        hashes=[planned.due.hash for planned in batch],
        next_run_at=[planned.decision.next_run_at for planned in batch],
        last_task_ids=[planned.work[-1].id if planned.work else None for planned in batch],
        run_counts=[len(planned.work) for planned in batch],
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
        enqueue_shas=[row.enqueue_sha for _, row in tasks],
        run_ids=[run.id for _, run in runs],
        plans=[run.text for _, run in runs],
        run_schedule_names=[name for name, _ in runs],
        run_slots=[run.sent_at for _, run in runs],
        run_delay_seconds=[run.delay_seconds for _, run in runs],
    )


def _tick_one_by_one(pipeline: Pipeline, book: Book) -> Ticked:
    """Find out which schedule the database will not take, and serve the others."""
    (due,) = pipeline.run([(find_due_schedules, book.find_due())])
    fired = []
    for planned in plan_all(book, due):
        try:
            (taken,) = pipeline.run([(fire_slots, columns([planned]))])
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.error("schedule %r cannot be stored: %s", planned.due.name, describe(error))
            pipeline.run([(fire_slots, columns([_without_work(planned)]))])
            continue
        fired += [planned] if taken else []
    return Ticked(fired, None)


def _without_work(planned: Planned) -> Planned:
    slot = planned.decision.fire[-1] if planned.decision.fire else planned.due.due_at
    return Planned(planned.due, _refused(planned.decision, slot), ())


def _log(planned: Planned) -> None:
    name, decision = planned.due.name, planned.decision
    if planned.work:
        what = "run(s) started" if isinstance(planned.work[-1], RunPlan) else "task(s) sent"
        slot = decision.fire[-1]
        logger.info(
            "schedule %r: %d %s, slot %s",
            name,
            len(planned.work),
            what,
            slot,
            extra=as_event("slots_sent", schedule=name, count=len(planned.work)),
        )
    if decision.dropped is not None:
        lost = decision.dropped
        logger.warning(
            "schedule %r: slots from %s until %s dropped (%s)",
            name,
            lost.first,
            lost.before,
            lost.reason.value.lower(),
            extra=as_event("slots_dropped", schedule=name, reason=lost.reason.value.lower()),
        )
