"""What needs attention: rules over facts that the overview reads, each with a sentence and a link.

The rules are pure. A line names its subject, the page that shows more, and the action that helps if
there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import IntEnum
from urllib.parse import quote

from horsies.db.statement import Nothing, Script
from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.dashboard import (
    FailedPause,
    Limit,
    OpenRuns,
    Overdue,
    OverdueSchedule,
    OverlongTask,
    RowEstimate,
    count_open_runs,
    estimate_rows,
    find_failed_pauses,
    find_overdue_schedules,
    find_overlong_tasks,
)
from horsies.db.statements.measures import FailingTask
from horsies.db.statements.monitor import CountMost, WorkerSummary
from horsies.monitor.action_log import last_action_script
from horsies.monitor.defaults import OVERDUE_SECONDS
from horsies.monitor.overview import (
    Overview,
    QueueOverview,
    WorkerHealth,
    arrivals_script,
    health_of,
    misses_notifications,
    overview_script,
)
from horsies.words import lasting

SHOWN_MAX = 12
RUNS_MOST = 1_000
# The oldest due task may wait this long before idle children are suspicious.
_PATIENCE_SECONDS = 300.0
# A task name fails unusually often from this many failures in ten minutes, at this many times its usual rate.
_FAILURES_MIN = 10
_FAILURES_TIMES = 5.0


class Urgency(IntEnum):
    """How bad it is; work that stands still comes first."""

    STOPPED = 0
    FAILING = 1
    SUSPICIOUS = 2


@dataclass(frozen=True, slots=True)
class Attention:
    """One line: ``link`` is the path of a page, ``verb`` the right that the action at the subject needs."""

    urgency: Urgency
    code: str
    subject: str
    sentence: str
    link: str
    verb: str | None = None
    # How long it has lasted; of two lines with one urgency, the older one is worse.
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The overview and the exceptions that rules look at. ``paused_by`` names who paused a queue."""

    overview: Overview
    arrivals: Mapping[str, float] = field(default_factory=dict)
    open_runs: Mapping[str, int] = field(default_factory=dict)
    failed_pauses: Sequence[FailedPause] = ()
    overdue: Sequence[OverdueSchedule] = ()
    overlong: Sequence[OverlongTask] = ()
    failing: Sequence[FailingTask] = ()
    paused_by: Mapping[str, str] = field(default_factory=dict)
    # Sentences about the server that `horsies doctor` marks red.
    findings: Sequence[str] = ()
    estimate: RowEstimate | None = None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))


def facts_script(configured: Mapping[str, int | None]) -> Script[Facts]:
    """Read the overview and its exceptions, all by bounded statements."""
    found = yield from overview_script(configured)
    arrivals = yield from arrivals_script()
    runs: list[OpenRuns] = yield count_open_runs, CountMost(RUNS_MOST)
    pauses: list[FailedPause] = yield find_failed_pauses, Limit(SHOWN_MAX + 1)
    overdue: list[OverdueSchedule] = yield (
        find_overdue_schedules,
        Overdue(OVERDUE_SECONDS, SHOWN_MAX + 1),
    )
    overlong: list[OverlongTask] = yield find_overlong_tasks, Limit(SHOWN_MAX + 1)
    (estimate,) = yield estimate_rows, Nothing()
    paused_by = yield from _paused_by_script(found.queues)
    return Facts(
        overview=found,
        arrivals=arrivals,
        open_runs=dict(runs),
        failed_pauses=pauses,
        overdue=overdue,
        overlong=overlong,
        paused_by=paused_by,
        estimate=estimate,
    )


def _paused_by_script(queues: Sequence[QueueOverview]) -> Script[dict[str, str]]:
    """Read who paused the queues that the list names."""
    paused = [queue.name for queue in queues if queue.paused_at is not None and queue.due]
    actors = {}
    for name in paused[:SHOWN_MAX]:
        action = yield from last_action_script(f"queue {name}", "pause_queue")
        if action is not None:
            actors[name] = action.actor
    return actors


def needs_attention(facts: Facts) -> list[Attention]:
    """Return the lines of all rules, worst first; a page shows the first ``SHOWN_MAX``."""
    found = (
        *_queues(facts),
        *_workers(facts.overview.workers),
        *_failing(facts.failing),
        *_schedules(facts.overdue),
        *_runs(facts.failed_pauses),
        *_overlong(facts.overlong),
        *_blocked(facts.overview),
        *_findings(facts.findings),
    )
    return sorted(found, key=lambda line: (line.urgency, -line.seconds, line.subject))


def seconds_to_empty(queue: QueueOverview, arrivals: float) -> float | None:
    """Estimate when no task is due any more; None while at least as many arrive as end."""
    if not queue.due:
        return 0.0
    rate = queue.done_per_minute + queue.failed_per_minute - arrivals
    return None if rate <= 0 else queue.due / rate * 60


def _queues(facts: Facts) -> Iterator[Attention]:
    idle = _idle_children(facts.overview.workers)
    for queue in facts.overview.queues:
        line = _stopped_queue(queue, facts) or _suspicious_queue(queue, idle.get(queue.name, 0))
        if line is not None:
            yield line


def _stopped_queue(queue: QueueOverview, facts: Facts) -> Attention | None:
    """Describe a queue whose due tasks cannot start."""
    waiting = _counted(queue.due, "task", at_least=queue.is_at_least(queue.due))
    oldest = queue.oldest_waiting_seconds or 0.0
    if not queue.due:
        return None
    if queue.paused_at is not None:
        by = f" by {name}" if (name := facts.paused_by.get(queue.name)) else ""
        paused = lasting((facts.now - queue.paused_at).total_seconds())
        sentence = f"paused for {paused}{by}; {waiting} due, the oldest for {lasting(oldest)}"
        return _queue(queue, "QUEUE_PAUSED", sentence, verb="pause_queue")
    if not queue.workers:
        sentence = f"{waiting} due for up to {lasting(oldest)}, and no live worker serves the queue"
        return _queue(queue, "QUEUE_UNSERVED", sentence)
    if set(queue.caps) == {0}:
        return _queue(queue, "QUEUE_CAPPED", f"{waiting} due, and the cap of the queue is 0")
    return None


def _suspicious_queue(queue: QueueOverview, idle: int) -> Attention | None:
    oldest = queue.oldest_waiting_seconds or 0.0
    in_flight, caps = queue.claimed + queue.running, [cap for cap in queue.caps if cap is not None]
    is_full = bool(caps) and in_flight >= max(caps)
    if (
        queue.due
        and queue.paused_at is None
        and oldest > _PATIENCE_SECONDS
        and idle
        and not is_full
    ):
        children = _counted(idle, "child", "children")
        sentence = (
            f"the oldest task is due for {lasting(oldest)}, and {children} of its workers idle"
        )
        stuck = _queue(queue, "QUEUE_STUCK", sentence, urgency=Urgency.SUSPICIOUS)
        return replace(stuck, link=f"{stuck.link}/explain")
    if len(queue.caps) > 1:
        named = " and ".join("no cap" if cap is None else f"{cap:,}" for cap in queue.caps)
        sentence = f"its workers disagree about the cap: {named}"
        return _queue(queue, "CAPS_DIFFER", sentence, urgency=Urgency.SUSPICIOUS)
    return None


def _queue(
    queue: QueueOverview,
    code: str,
    sentence: str,
    *,
    verb: str | None = None,
    urgency: Urgency = Urgency.STOPPED,
) -> Attention:
    link = f"/queues/{quote(queue.name, safe='')}"
    seconds = queue.oldest_waiting_seconds or 0.0
    return Attention(urgency, code, f"queue {queue.name}", sentence, link, verb, seconds)


def _idle_children(workers: Iterable[WorkerSummary]) -> dict[str, int]:
    """Count the children without a task, by queue that their worker serves.

    A worker with async children counts only while both kinds of its places have room: the oldest task of the
    queue may be of either kind.
    """
    idle: dict[str, int] = {}
    for worker in workers:
        if health_of(worker) is WorkerHealth.ALIVE:
            room = [worker.free_places(kind) for kind in (False, True)]
            free = sum(room) if worker.async_places and all(room) else min(room)
            free = max(free - worker.tasks_claimed, 0)
            for name in worker.queues:
                idle[name] = idle.get(name, 0) + free
    return idle


def _workers(workers: Iterable[WorkerSummary]) -> Iterator[Attention]:
    for worker in workers:
        health, seen = health_of(worker), lasting(worker.seen_seconds_ago)
        count = worker.tasks_running + worker.tasks_claimed
        held = _counted(count, "task")
        if health is WorkerHealth.LOST:
            sentence = f"lost, seen {seen} ago"
            sentence += f" with {held} that another worker has to take over" if count else ""
            yield _worker(worker, "WORKER_LOST", Urgency.FAILING, sentence)
        elif health is WorkerHealth.SILENT:
            sentence = f"connected, but without a sign of life for {seen}; it holds {held}"
            yield _worker(worker, "WORKER_SILENT", Urgency.FAILING, sentence)
        elif misses_notifications(worker):
            sentence = "receives no notifications and finds work by polling"
            yield _worker(worker, "WORKER_POLLING", Urgency.SUSPICIOUS, sentence)


def _worker(worker: WorkerSummary, code: str, urgency: Urgency, sentence: str) -> Attention:
    link = f"/workers/{quote(worker.worker_id, safe='')}"
    subject, seen = f"worker {worker.label}", worker.seen_seconds_ago
    return Attention(urgency, code, subject, sentence, link, None, seen)


def _failing(tasks: Iterable[FailingTask]) -> Iterator[Attention]:
    for task in tasks:
        if task.failures >= _FAILURES_MIN and task.failures >= _FAILURES_TIMES * task.usual:
            name = task.name or "other tasks"
            sentence = f"{task.failures:,} failures in 10 minutes; usually {task.usual:.0f}"
            link = f"/failures?task_name={quote(name, safe='')}"
            yield Attention(Urgency.FAILING, "TASK_FAILING", f"task {name}", sentence, link)


def _schedules(overdue: Iterable[OverdueSchedule]) -> Iterator[Attention]:
    for schedule in overdue:
        late = lasting(schedule.overdue_seconds)
        urgency, reason = Urgency.FAILING, "no scheduler has taken its slot"
        if schedule.is_unfinished:
            urgency, reason = Urgency.SUSPICIOUS, "its last task or run has not ended"
        link = f"/schedules/{quote(schedule.name, safe='')}"
        yield Attention(
            urgency=urgency,
            code="SCHEDULE_OVERDUE",
            subject=f"schedule {schedule.name}",
            sentence=f"overdue for {late}: {reason}",
            link=link,
            seconds=schedule.overdue_seconds,
        )


def _runs(pauses: Iterable[FailedPause]) -> Iterator[Attention]:
    for run in pauses:
        paused_seconds = run.paused_seconds or 0.0
        sentence = f"paused by a failure {lasting(paused_seconds)} ago"
        yield Attention(
            urgency=Urgency.FAILING,
            code="RUN_PAUSED",
            subject=f"run {run.name}",
            sentence=sentence,
            link=f"/workflows/{run.id}",
            seconds=paused_seconds,
        )


def _overlong(tasks: Iterable[OverlongTask]) -> Iterator[Attention]:
    for task in tasks:
        running = lasting(task.running_seconds)
        reason = f"without a heartbeat for {lasting(task.silent_seconds)}"
        if task.timeout_ms is not None and task.running_seconds * 1000 > task.timeout_ms:
            reason = f"past its time limit of {lasting(task.timeout_ms / 1000)}"
        yield Attention(
            urgency=Urgency.SUSPICIOUS,
            code="TASK_OVERLONG",
            subject=f"task {task.task_name}",
            sentence=f"runs for {running}, {reason}",
            link=f"/tasks/{task.id}",
            seconds=task.running_seconds,
        )


def _blocked(overview: Overview) -> Iterator[Attention]:
    if overview.blocked:
        first: BlockedRow = overview.blocked[0]
        page = "tasks" if first.kind == "task" else "workflows"
        yield Attention(
            urgency=Urgency.STOPPED,
            code="BLOCKED",
            subject=f"{first.kind} {first.id}",
            sentence=f"the database refuses to {first.action} it: {first.error}"
            + (f"; {overview.blocked_count:,} are blocked" if overview.blocked_count > 1 else ""),
            link=f"/{page}/{first.id}",
            seconds=first.blocked_seconds,
        )


def _findings(sentences: Iterable[str]) -> Iterator[Attention]:
    for sentence in sentences:
        words = sentence[:1].lower() + sentence[1:].removesuffix(".")
        yield Attention(Urgency.FAILING, "DOCTOR", "the database server", words, "/doctor")


def _counted(count: int, noun: str, plural: str | None = None, *, at_least: bool = False) -> str:
    word = noun if count == 1 else plural or f"{noun}s"
    return f"{count:,}{'+' if at_least else ''} {word}"
