"""Checks of the work: workers, their configuration, queues, tasks, runs and schedules.

Each check reads its facts in a script and judges them in a pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horsies.db.statement import Nothing, Script
from horsies.db.statements.blocked import BlockedLimit, BlockedRow, list_blocked
from horsies.db.statements.doctor import (
    Abandoned,
    Crashes,
    DueQueue,
    DueWindow,
    LongPaused,
    LongRunning,
    OverdueSchedule,
    Seconds,
    TableState,
    WorkerRelease,
    count_abandoned,
    find_long_paused,
    find_long_running,
    find_overdue_schedules,
    list_crashes,
    list_due_queues,
    list_tables,
    list_worker_releases,
    read_oldest_ended,
)
from horsies.db.statements.monitor import (
    ListWorkers,
    SchemaName,
    WorkerSummary,
    list_workers,
    newest_worker_states,
)
from horsies.db.statements.refusals import RefusalLimit, RefusedCalls, list_refused
from horsies.db.statements.workflows import BrokenRun, RunLimit, find_broken_runs
from horsies.monitor.doctor.findings import HOUR, Check, Facts, Finding, Level, Limits
from horsies.monitor.overview import WorkerHealth, health_of, misses_notifications
from horsies.words import counted, first_sentence, lasting

# Due tasks that are read per queue: enough to find the names among them.
DUE_WINDOW = 1_000
# Refused calls that are read, of all queues together.
REFUSED_WINDOW = 10_000
# Attempts among which crashes are counted.
CRASH_WINDOW = 10_000
BROKEN_SHOWN = BLOCKED_SHOWN = 20
_LIVING = (WorkerHealth.ALIVE, WorkerHealth.SILENT)


def _read_workers(facts: Facts) -> Script[list[WorkerSummary]]:
    return (yield from facts.read(list_workers, ListWorkers(include_stopped=False)))


def _living(workers: Iterable[WorkerSummary]) -> list[WorkerSummary]:
    return [worker for worker in workers if health_of(worker) in _LIVING]


def _workers(facts: Facts) -> Script[list[Finding]]:
    return judge_workers((yield from _read_workers(facts)))


def judge_workers(workers: Iterable[WorkerSummary]) -> list[Finding]:
    findings = []
    for worker in workers:
        seen = lasting(worker.seen_seconds_ago)
        match health_of(worker):
            case WorkerHealth.LOST:
                sentence = f"Worker {worker.label} has been gone for {seen} without a shutdown."
                count = worker.tasks_running + worker.tasks_claimed
                evidence = (f"{count} of its tasks wait for recovery",)
                advice = "start a worker: it recovers the tasks of lost workers"
                findings.append(Finding(Level.RED, sentence, evidence, advice))
            case WorkerHealth.SILENT:
                sentence = f"Worker {worker.label} is connected but has been silent for {seen}."
                advice = f"look at the log of pid {worker.pid} on {worker.hostname}"
                findings.append(Finding(Level.YELLOW, sentence, remedy=advice))
            case _ if misses_notifications(worker):
                sentence = f"Worker {worker.label} receives no notifications and polls."
                advice = "set session_database_url to an address that bypasses the pooler"
                findings.append(Finding(Level.YELLOW, sentence, remedy=advice))
    return findings


def _caps(facts: Facts) -> Script[list[Finding]]:
    return judge_caps((yield from _read_workers(facts)))


def judge_caps(workers: Iterable[WorkerSummary]) -> list[Finding]:
    """Compare the caps in the newest snapshots; every worker obeys its own."""
    reported = [worker for worker in _living(workers) if worker.queue_caps is not None]
    findings = []
    cluster = {worker.label: worker.cluster_wide_cap for worker in reported}
    if finding := _differing("cluster_wide_cap", cluster):
        findings.append(finding)
    for queue in sorted({name for worker in reported for name in worker.queues}):
        caps = {
            worker.label: (worker.queue_caps or {}).get(queue)
            for worker in reported
            if queue in worker.queues
        }
        if finding := _differing(f"max_concurrency of queue {queue}", caps):
            findings.append(finding)
    return findings


def _differing(what: str, caps: dict[str, int | None]) -> Finding | None:
    if len(set(caps.values())) < 2:
        return None
    evidence = tuple(f"{name}: {'none' if cap is None else cap}" for name, cap in caps.items())
    advice = "deploy one configuration to all workers"
    return Finding(Level.RED, f"Workers disagree about {what}.", evidence, advice)


def _versions(facts: Facts) -> Script[list[Finding]]:
    workers = yield from _read_workers(facts)
    releases = yield from facts.read(list_worker_releases, Nothing())
    return judge_versions(_living(workers), releases, facts.limits)


def judge_versions(
    workers: Sequence[WorkerSummary], releases: Iterable[WorkerRelease], limits: Limits
) -> list[Finding]:
    """Find workers of different releases, and of different tasks on one queue, after a rollout."""
    by_id = {release.worker_id: release for release in releases}
    known = [(worker, by_id[worker.worker_id]) for worker in workers if worker.worker_id in by_id]
    if any(release.started_seconds_ago < limits.rollout_seconds for _, release in known):
        return []
    findings = []
    if len({release.version for _, release in known}) > 1:
        evidence = tuple(f"{one.label}: {release.version or 'older'}" for one, release in known)
        sentence = "Workers run different releases of horsies."
        findings.append(Finding(Level.YELLOW, sentence, evidence, "finish the rollout"))
    for queue in sorted({name for worker in workers for name in worker.queues}):
        names: list[set[str]] = [
            set(release.task_names)
            for worker, release in known
            if queue in worker.queues and release.task_names is not None
        ]
        if names and (some := names[0].union(*names) - names[0].intersection(*names)):
            sentence = f"Not every worker of queue {queue} has the same tasks."
            evidence = tuple(sorted(some)[:10])
            findings.append(Finding(Level.YELLOW, sentence, evidence, "finish the rollout"))
    return findings


def _read_due(facts: Facts) -> Script[list[DueQueue]]:
    return (yield from facts.read(list_due_queues, DueWindow(DUE_WINDOW)))


def _count(queue: DueQueue) -> str:
    number = f"{queue.due:,}+" if queue.due >= DUE_WINDOW else f"{queue.due:,}"
    return f"{number} due {'task' if queue.due == 1 else 'tasks'}"


def _unserved(facts: Facts) -> Script[list[Finding]]:
    due = yield from _read_due(facts)
    workers = yield from _read_workers(facts)
    return judge_unserved(due, _living(workers))


def judge_unserved(due: Iterable[DueQueue], workers: Sequence[WorkerSummary]) -> list[Finding]:
    served = {name for worker in workers for name in worker.queues}
    return [
        Finding(
            Level.RED,
            f"No running worker serves queue {queue.name}, which has {_count(queue)}.",
            (f"the oldest for {lasting(queue.oldest_seconds)}",),
            f"horsies worker APP --queues {queue.name}",
        )
        for queue in due
        if queue.name not in served
    ]


def _unknown_tasks(facts: Facts) -> Script[list[Finding]]:
    due = yield from _read_due(facts)
    workers = yield from _read_workers(facts)
    releases = yield from facts.read(list_worker_releases, Nothing())
    refused = yield from facts.read(list_refused, RefusalLimit(REFUSED_WINDOW))
    living = _living(workers)
    return [*judge_unknown_tasks(due, living, releases), *judge_refused(refused, living)]


def judge_unknown_tasks(
    due: Iterable[DueQueue], workers: Sequence[WorkerSummary], releases: Iterable[WorkerRelease]
) -> list[Finding]:
    names = {release.worker_id: release.task_names for release in releases}
    findings = []
    for queue in due:
        servers = [worker for worker in workers if queue.name in worker.queues]
        known = [names.get(worker.worker_id) for worker in servers]
        if not servers or None in known:
            continue  # unserved, or a worker that has not registered its tasks
        unknown = set(queue.task_names).difference(*(tasks or () for tasks in known))
        if unknown:
            sentence = f"No running worker of queue {queue.name} has the task "
            sentence += f"{', '.join(sorted(unknown))}."
            advice = "start a worker of the release that defines it"
            findings.append(Finding(Level.RED, sentence, (), advice))
    return findings


def judge_refused(
    refused: Iterable[RefusedCalls], workers: Sequence[WorkerSummary]
) -> list[Finding]:
    served = {name for worker in workers for name in worker.queues}
    return [
        Finding(
            Level.RED,
            f"No running worker of queue {one.queue_name} can run {counted(one.tasks, 'due call')} of task "
            f"{one.name}: {first_sentence(one.message)}.",
            (),
            "start a worker of the release that sent the calls",
        )
        for one in refused
        if one.queue_name in served
    ]


def _paused_queues(facts: Facts) -> Script[list[Finding]]:
    return judge_paused_queues((yield from _read_due(facts)), facts.limits)


def judge_paused_queues(due: Iterable[DueQueue], limits: Limits) -> list[Finding]:
    findings = []
    for queue in due:
        if queue.paused_seconds is not None:
            is_long = queue.paused_seconds >= limits.paused_queue_seconds
            sentence = f"Queue {queue.name} has been paused for {lasting(queue.paused_seconds)}."
            evidence = (_count(queue),)
            level = Level.RED if is_long else Level.YELLOW
            remedy = f"horsies queues resume {queue.name}"
            findings.append(Finding(level, sentence, evidence, remedy))
    return findings


def _blocked(facts: Facts) -> Script[list[Finding]]:
    return judge_blocked((yield from facts.read(list_blocked, BlockedLimit(BLOCKED_SHOWN))))


def judge_blocked(blocked: Sequence[BlockedRow]) -> list[Finding]:
    if not blocked:
        return []
    evidence = tuple(f"{row.kind} {row.id}, {row.action}: {row.error}" for row in blocked)
    sentence = f"The database refuses the next change of {blocked[0].total} task(s) or run(s)."
    advice = "remove the constraint or trigger that the errors name; workers try again"
    if len(blocked) > 1 and len({row.error for row in blocked}) == 1:
        sentence = f"{sentence.removesuffix('.')} with the same error: it is hardly caused by them."
        advice = (
            "look at the triggers on the tables of Horsies, at locks of other sessions, at the settings of "
            "the database and the role, and at memory and disk; workers try again"
        )
    return [Finding(Level.RED, sentence, evidence, advice)]


def _abandoned(facts: Facts) -> Script[list[Finding]]:
    (counts,) = yield from facts.read(count_abandoned, Seconds(facts.limits.recovery_seconds))
    return judge_abandoned(counts)


def judge_abandoned(counts: Abandoned) -> list[Finding]:
    advice = "start a worker, and leave auto_requeue_stale_claimed and auto_fail_stale_running on"
    sentences = (
        (counts.ownerless, "tasks are claimed or running at workers that are gone"),
        (counts.lapsed, "claimed tasks have a lapsed lease"),
        (counts.late, "waiting tasks are past their good_until and not EXPIRED"),
    )
    return [
        Finding(Level.RED, f"{count:,} {text}.", remedy=advice)
        for count, text in sentences
        if count
    ]


def _crashes(facts: Facts) -> Script[list[Finding]]:
    return judge_crashes(
        (yield from facts.read(list_crashes, DueWindow(CRASH_WINDOW))), facts.limits
    )


def judge_crashes(crashes: Iterable[Crashes], limits: Limits) -> list[Finding]:
    advice = "set a memory limit or a timeout, and leave WORKER_CRASHED out of auto_retry_for"
    return [
        Finding(
            Level.RED,
            f"Task {row.task_name} ended its process {row.crashes} times within an hour.",
            (f"{row.most_of_one_task} attempts of one task",),
            advice,
        )
        for row in crashes
        if row.crashes >= limits.crashes_of_name or row.most_of_one_task >= limits.crashes_of_task
    ]


def _long_running(facts: Facts) -> Script[list[Finding]]:
    seconds = Seconds(facts.limits.long_running_seconds)
    return judge_long_running((yield from facts.read(find_long_running, seconds)))


def judge_long_running(tasks: Iterable[LongRunning]) -> list[Finding]:
    return [
        Finding(
            Level.YELLOW,
            f"Task {task.task_name} has been running for {lasting(task.seconds)} without a limit.",
            (f"task {task.id}",),
            f"horsies cancel {task.id}",
        )
        for task in tasks
    ]


def _run_audit(facts: Facts) -> Script[list[Finding]]:
    return judge_run_audit((yield from facts.read(find_broken_runs, RunLimit(BROKEN_SHOWN))))


def judge_run_audit(broken: Sequence[BrokenRun]) -> list[Finding]:
    if not broken:
        return []
    evidence = tuple(f"run {run.id}: {run.problem}" for run in broken)
    sentence = "Rows of workflow runs contradict each other."
    return [Finding(Level.RED, sentence, evidence, "horsies workflow audit")]


def _paused_runs(facts: Facts) -> Script[list[Finding]]:
    seconds = Seconds(facts.limits.long_paused_seconds)
    return judge_paused_runs((yield from facts.read(find_long_paused, seconds)))


def judge_paused_runs(runs: Iterable[LongPaused]) -> list[Finding]:
    return [
        Finding(
            Level.YELLOW,
            f"Run {run.id} of {run.name} has been paused for {lasting(run.seconds)}.",
            (),
            f"horsies workflow resume {run.id}",
        )
        for run in runs
    ]


def _schedules(facts: Facts) -> Script[list[Finding]]:
    seconds = Seconds(facts.limits.overdue_seconds)
    return judge_schedules((yield from facts.read(find_overdue_schedules, seconds)))


def judge_schedules(overdue: Sequence[OverdueSchedule]) -> list[Finding]:
    if not overdue:
        return []
    schedulers = overdue[0].schedulers
    sentence = f"{len(overdue)} schedule(s) overdue, {schedulers} scheduler(s) connected."
    evidence = tuple(f"{one.name} for {lasting(one.seconds)}" for one in overdue)
    advice = "start `horsies scheduler` with the application that defines the schedules"
    return [Finding(Level.RED, sentence, evidence, advice)]


def _retention(facts: Facts) -> Script[list[Finding]]:
    states = yield from facts.read(newest_worker_states, Nothing())
    (oldest,) = yield from facts.read(read_oldest_ended, Nothing())
    tables = yield from facts.read(list_tables, SchemaName(facts.schema))
    hours = (
        (states[0].recovery_config or {}).get("terminal_record_retention_hours", 0) if states else 0
    )
    return judge_retention(hours, oldest.seconds, tables, facts.limits)


def judge_retention(
    hours: int | None, oldest_seconds: float | None, tables: Iterable[TableState], limits: Limits
) -> list[Finding]:
    """``hours`` is the retention of the newest snapshot: None keeps rows, 0 when it is not known."""
    if hours is None:
        rows = next((one.row_estimate for one in tables if one.name == "horsies_tasks"), 0.0)
        sentence = f"Finished tasks are kept forever, about {rows:,.0f} so far."
        advice = "set terminal_record_retention_hours"
        return [Finding(Level.YELLOW, sentence, (), advice)] if rows > limits.unlimited_rows else []
    kept = hours * HOUR + limits.retention_slack_seconds
    if not hours or oldest_seconds is None or oldest_seconds <= kept:
        return []
    sentence = (
        f"The oldest finished task is {lasting(oldest_seconds)} old, the retention is {hours} h."
    )
    advice = "start a worker: it deletes old rows once an hour"
    return [Finding(Level.YELLOW, sentence, (), advice)]


WORK_CHECKS = (
    Check(
        "workers",
        "signs of life of the workers",
        "silent, or without notifications",
        "gone without a shutdown",
        _workers,
        is_cheap=True,
    ),
    Check("caps", "caps of the running workers", "", "they differ", _caps, is_cheap=True),
    Check(
        "versions",
        "releases and tasks of the running workers",
        "they differ for an hour",
        "",
        _versions,
        is_cheap=True,
    ),
    Check("unserved", "queues with due tasks", "", "no running worker", _unserved, is_cheap=True),
    Check(
        "unknown-tasks",
        "names and calls of due tasks",
        "",
        "no running worker of the queue has the task, or parameters that the call fits",
        _unknown_tasks,
        is_cheap=True,
    ),
    Check(
        "paused-queues",
        "paused queues with due tasks",
        "any",
        "for an hour",
        _paused_queues,
        is_cheap=True,
    ),
    Check(
        "blocked",
        "changes that the database refuses",
        "",
        "any",
        _blocked,
        is_cheap=True,
    ),
    Check(
        "abandoned",
        "tasks at workers that are gone, lapsed leases, passed deadlines",
        "",
        "for a minute",
        _abandoned,
    ),
    Check(
        "crashes",
        "attempts that ended their process, of the last hour",
        "",
        "3 of one task, 10 of one name",
        _crashes,
    ),
    Check(
        "long-running",
        "running tasks without a time limit",
        "for 6 hours",
        "",
        _long_running,
    ),
    Check("run-audit", "rows of open runs", "", "they contradict each other", _run_audit),
    Check("paused-runs", "paused runs", "for a day", "", _paused_runs, is_cheap=True),
    Check("schedules", "slots of schedules", "", "15 seconds overdue", _schedules, is_cheap=True),
    Check(
        "retention",
        "the oldest finished task",
        "2 hours past the retention; 10 million rows without a retention",
        "",
        _retention,
    ),
)
