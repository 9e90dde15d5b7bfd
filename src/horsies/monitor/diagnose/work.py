"""Work checks: workers, their configuration, queues, tasks, runs and schedules.

Each check reads its facts in a script and judges them in a pure function. Findings about single queues,
tasks, runs and schedules come from the rules of ``horsies explain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

from horsies.db.statement import Script
from horsies.db.statements.blocked import BlockedRow, list_blocked
from horsies.db.statements.doctor import (
    Abandoned,
    Crashes,
    Loss,
    OverlongTask,
    TableState,
    WorkerRelease,
    count_abandoned,
    find_long_pauses,
    find_overdue_schedules,
    find_overlong_tasks,
    list_crashes,
    list_losses,
    list_tables,
    list_worker_releases,
    read_oldest_ended,
)
from horsies.db.statements.durable import HeldRun, find_held_runs
from horsies.db.statements.explain import (
    DueCount,
    TaskSet,
    explain_schedules,
    list_newest_starts,
    list_rated_queues,
    list_task_sets,
    read_clock,
)
from horsies.db.statements.keys import find_paused_keys, list_limited_queues
from horsies.db.statements.measures import FailingTask, find_failing_tasks
from horsies.db.statements.monitor import (
    WorkerSummary,
    count_in_flight,
    count_waiting,
    list_queue_states,
    list_workers,
    newest_worker_states,
)
from horsies.db.statements.refusals import list_refused
from horsies.db.statements.workflows import BrokenRun, find_broken_runs
from horsies.findings import Finding, Level, Subject, between, command, finding
from horsies.monitor.action_log import authors_script
from horsies.monitor.defaults import LOSSES_MOST, LOSSES_SECONDS
from horsies.monitor.diagnose.checks import Check, Rule, red, yellow
from horsies.monitor.diagnose.known_names import names_by_worker, unknown_names_script
from horsies.monitor.diagnose.queues import (
    COUNT_MAX,
    QueueSituation,
    capacity_reasons,
    differing_caps,
    is_occupied,
    key_pause,
    misfit_reasons,
    pause_reasons,
    polling_reasons,
    stalled_reasons,
    stuck_reasons,
    unserved_reasons,
)
from horsies.monitor.diagnose.runs import paused_run, schedule_reasons
from horsies.monitor.diagnose.tasks import running_reasons, silent_reasons
from horsies.monitor.facts import HOUR, Facts, Limits
from horsies.monitor.overview import (
    WAITING_MOST,
    WorkerHealth,
    capped_names,
    health_of,
    live,
    servers_by_queue,
)
from horsies.tasks.definition import WEBHOOK_PREFIX
from horsies.words import lasting

# The number of newest attempts to search for crashes.
CRASH_WINDOW = 10_000
# The maximum number of rows of one kind to read.
SHOWN = 20
# A task fails unusually often from this many failures in ten minutes, at this multiple of its usual
# rate.
FAILURES_MIN = 10
FAILURES_TIMES = 5.0
RETRIES_MIN = 50


def _read_workers(facts: Facts) -> Script[list[WorkerSummary]]:
    return (yield from facts.read(list_workers(include_stopped=False)))


def _workers(facts: Facts) -> Script[Iterable[Finding]]:
    workers = yield from _read_workers(facts)
    return (one for worker in workers for one in worker_reasons(worker))


def worker_reasons(worker: WorkerSummary) -> Iterator[Finding]:
    """Yield a finding if a worker is lost, is silent, or receives no notifications."""
    yield from silent_reasons(worker)
    yield from polling_reasons([worker])
    if health_of(worker) is WorkerHealth.LOST:
        count = worker.tasks_running + worker.tasks_claimed
        yield finding(
            "WORKER_LOST",
            f"Worker {worker.label} has been gone for {lasting(worker.seen_seconds_ago)} without a "
            "shutdown.",
            since=worker.seen_at,
            subjects=[worker.label],
            remedy="start a worker: it recovers the tasks of lost workers",
            evidence=[f"{count:,} of its tasks wait for recovery"],
            subject=Subject("worker", worker.worker_id, worker.label),
        )


def _losses(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_losses((yield from facts.read(list_losses(LOSSES_SECONDS, LOSSES_MOST))))


def judge_losses(losses: Sequence[Loss]) -> Iterator[Finding]:
    if not losses:
        return
    newest = losses[0]
    ago = between(newest.lost_at, newest.looked_at)
    sentence = f"Worker {newest.label} was lost {ago} ago; its tasks run again or have failed."
    if len(losses) > 1:
        sentence = (
            f"{len(losses):,} workers were lost within the last hour, the last one {ago} ago; their "
            "tasks run again or have failed."
        )
    yield finding(
        "WORKERS_LOST",
        sentence,
        since=losses[-1].lost_at,
        subjects=[one.label for one in losses[:SHOWN]],
        remedy="look for the end of the process in its log and in that of its host; "
        "`horsies tasks --error-code WORKER_CRASHED` lists the tasks that failed",
        evidence=_lost_queues(losses),
        subject=Subject("worker", newest.worker_id, newest.label),
    )


def _lost_queues(losses: Sequence[Loss]) -> list[str]:
    """Return what the lost workers served; the sentence about a single one has its name and time."""
    served = [", ".join(one.queues[:SHOWN]) for one in losses[:SHOWN]]
    if len(losses) == 1:
        return [f"it served {served[0]}"]
    return [
        f"worker {one.label}, {between(one.lost_at, one.looked_at)} ago, of {queues}"
        for one, queues in zip(losses, served, strict=False)
    ]


def _caps(facts: Facts) -> Script[Iterable[Finding]]:
    queues = yield from read_queues(facts)
    workers = [one for one in live((yield from _read_workers(facts))) if one.queue_caps is not None]
    capped = capped_names(workers)
    zero = [
        one
        for queue in queues
        if queue.due and queue.name in capped
        for one in capacity_reasons(queue, queue.servers)
        if one.code == "QUEUE_CAP_ZERO"
    ]
    serving = servers_by_queue(workers)
    differing = [
        one
        for name in sorted(capped & serving.keys())
        for one in differing_caps(serving[name], name)
    ]
    return [*zero, *differing_caps(workers), *differing]


def _versions(facts: Facts) -> Script[Iterable[Finding]]:
    workers = yield from _read_workers(facts)
    releases = yield from facts.read(list_worker_releases())
    sets = yield from facts.read(list_task_sets())
    return judge_versions(live(workers), releases, sets, facts.limits)


def judge_versions(
    workers: Sequence[WorkerSummary],
    releases: Iterable[WorkerRelease],
    sets: Sequence[TaskSet],
    limits: Limits,
) -> Iterator[Finding]:
    """Find workers that have different releases, or different tasks on one queue, long after a rollout."""
    by_id = {release.worker_id: release for release in releases}
    known = [(worker, by_id[worker.worker_id]) for worker in workers if worker.worker_id in by_id]
    if any(release.started_seconds_ago < limits.rollout_seconds for _, release in known):
        return
    if len({release.version for _, release in known}) > 1:
        evidence = [f"{one.label}: {release.version or 'older'}" for one, release in known]
        sentence = "Workers run different releases of horsies."
        yield yellow(sentence, "finish the rollout", evidence)
    if len(sets) < 2:
        return
    knowledge = {
        worker_id: names for worker_id, names in names_by_worker(sets).items() if names is not None
    }
    serving = servers_by_queue(workers)
    for queue in sorted(serving):
        ids = [worker.worker_id for worker in serving[queue]]
        # Compare each set of workers once: thousands of queues may share their workers.
        names = list({knowledge[one] for one in ids if one in knowledge})
        if len(names) > 1 and (some := names[0].union(*names) - names[0].intersection(*names)):
            sentence = f"The workers of queue {queue} have different tasks."
            yield yellow(sentence, "finish the rollout", sorted(some)[:10])


def read_queues(facts: Facts) -> Script[list[QueueSituation]]:
    """Return every queue with due tasks: its workers, its pause, and the tasks that none of its workers
    can run.
    """
    return (yield from facts.share("queues with due tasks", lambda: _read_queues(facts)))


def _read_queues(facts: Facts) -> Script[list[QueueSituation]]:
    waiting = yield from facts.read(count_waiting(WAITING_MOST))
    due = {one.queue_name: one for one in waiting if one.due}
    if not due:
        return []
    workers = yield from _read_workers(facts)
    states = yield from facts.read(list_queue_states())
    flights = yield from facts.read(count_in_flight())
    strangers = yield from unknown_names_script(sorted(due), workers, facts)
    refused = yield from facts.read(list_refused(COUNT_MAX))
    (clock,) = yield from facts.read(read_clock())
    limited = {one.name for one in (yield from facts.read(list_limited_queues()))}
    rated = {one.name for one in (yield from facts.read(list_rated_queues(sorted(due))))}
    paused = {one.name: one.paused_at for one in states}
    claimed = {one.queue_name: one.claimed + one.running for one in flights}
    serving = servers_by_queue(workers)
    served = sorted(serving)
    authors = yield from _pausers([name for name in sorted(due) if paused.get(name)])
    queues = []
    for name, count in sorted(due.items()):
        first_at = clock.now - timedelta(seconds=count.oldest_waiting_seconds or 0.0)
        paused_at = paused.get(name)
        queues.append(
            QueueSituation(
                name=name,
                looked_at=clock.now,
                paused_at=paused_at,
                paused_by=authors.get(name),
                waiting=DueCount(name, count.due, count.delayed, first_at, True, paused_at),
                unknown_names=strangers.get(name, ()),
                workers=workers,
                refused=refused,
                claimed=claimed.get(name, 0),
                limits_keys=name in limited,
                is_rated=name in rated,
                known_servers=serving.get(name, ()),
                known_names=served,
            )
        )
    return queues


def _pausers(names: Sequence[str]) -> Script[dict[str, str]]:
    """Return the operators who paused these queues."""
    subjects = {f"queue {name}": name for name in names}
    authors = yield from authors_script(list(subjects), "pause_queue")
    return {subjects[subject]: author for subject, author in authors.items()}


def _of_queues(*rules: Callable[[QueueSituation], Iterable[Finding]]) -> Rule:
    """Return a check that applies rules to every queue with due tasks."""

    def find(facts: Facts) -> Script[Iterable[Finding]]:
        queues = yield from read_queues(facts)
        return [one for queue in queues for rule in rules for one in rule(queue)]

    return find


def _stuck_queues(facts: Facts) -> Script[Iterable[Finding]]:
    queues = yield from read_queues(facts)
    stuck = [one for queue in queues for one in stuck_reasons(queue)]
    occupied = [queue for queue in queues if is_occupied(queue)]
    ids = sorted({server.worker_id for queue in occupied for server in queue.servers})
    starts = (yield from facts.read(list_newest_starts(ids))) if ids else []
    by_worker = {one.worker_id: one for one in starts}
    return [*stuck, *(one for queue in occupied for one in stalled_reasons(queue, by_worker))]


def _paused_keys(facts: Facts) -> Script[Iterable[Finding]]:
    paused = yield from facts.read(find_paused_keys(None, SHOWN, COUNT_MAX + 1))
    (clock,) = yield from facts.read(read_clock())
    return [one for key in paused for one in key_pause(key, clock.now)]


def _blocked(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_blocked((yield from facts.read(list_blocked(SHOWN))))


def judge_blocked(blocked: Sequence[BlockedRow]) -> Iterator[Finding]:
    if not blocked:
        return
    first = blocked[0]
    sentence = f"The database refuses the next change of {first.total} task(s) or run(s)."
    advice = "remove the constraint or trigger that the errors name; workers try again"
    if len(blocked) > 1 and len({row.error for row in blocked}) == 1:
        sentence = (
            f"{sentence.removesuffix('.')} with the same error, so probably not because of them."
        )
        advice = (
            "check the triggers on the tables of Horsies, locks of other sessions, the settings of the "
            "database and the role, memory and disk; workers try again"
        )
    yield finding(
        "BLOCKED",
        sentence,
        since=first.since,
        remedy=advice,
        evidence=[f"{row.kind} {row.id}, {row.action}: {row.error}" for row in blocked],
        subject=Subject(first.kind, first.id),
    )


def _held_runs(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_held_runs((yield from facts.read(find_held_runs(SHOWN))))


def judge_held_runs(held: Sequence[HeldRun]) -> Iterator[Finding]:
    if held:
        first = held[0]
        yield finding(
            "HELD_BY_RECORD",
            f"The code of {first.total:,} run(s) of durable functions does not fit their record.",
            since=first.since,
            remedy=command("durable", "show", first.id),
            evidence=[f"{run.task_name} {run.id}: {run.problem}" for run in held],
            subject=Subject("task", first.id),
        )


def _abandoned(facts: Facts) -> Script[Iterable[Finding]]:
    (counts,) = yield from facts.read(count_abandoned(facts.limits.recovery_seconds))
    return judge_abandoned(counts)


def judge_abandoned(counts: Abandoned) -> Iterator[Finding]:
    advice = "start a worker, and leave auto_requeue_stale_claimed and auto_fail_stale_running on"
    sentences = (
        (counts.ownerless, "tasks are claimed or running at workers that are gone"),
        (counts.lapsed, "claimed tasks have a lapsed lease"),
        (counts.late, "waiting tasks are past their good_until and not EXPIRED"),
    )
    return (red(f"{count:,} {text}.", advice) for count, text in sentences if count)


def _crashes(facts: Facts) -> Script[Iterable[Finding]]:
    crashes = yield from facts.read(list_crashes(CRASH_WINDOW))
    return judge_crashes(crashes, facts.limits)


def judge_crashes(crashes: Iterable[Crashes], limits: Limits) -> Iterator[Finding]:
    for row in crashes:
        stop = command("cancel", "--name", row.task_name)
        advice = (
            f"see the signals with `horsies failures`; stop the task with `{stop}`; then set a memory limit "
            "or a timeout, or leave WORKER_CRASHED out of auto_retry_for"
        )
        if row.crashes >= limits.crashes_of_name or row.most_of_one_task >= limits.crashes_of_task:
            yield red(
                f"Task {row.task_name} ended its process {row.crashes} times within an hour.",
                advice,
                [f"{row.most_of_one_task} attempts of one task"],
            )


def _failing(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_failing((yield from facts.read(find_failing_tasks())))


def judge_failing(tasks: Iterable[FailingTask]) -> Iterator[Finding]:
    for task in tasks:
        if task.failures >= FAILURES_MIN and task.failures >= FAILURES_TIMES * task.usual:
            name = task.name or "other tasks"
            crashes = (
                f", {task.crashes:,} of them ended their process (crashes)" if task.crashes else ""
            )
            yield finding(
                "TASK_FAILING",
                f"Task {name} has {task.failures:,} failures in 10 minutes{crashes}; "
                f"usually {task.usual:.0f}.",
                subjects=[name],
                remedy=command("tasks", "--name", name, "--status", "failed"),
                subject=Subject("task name", name),
            )


def _retrying(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_retrying((yield from facts.read(find_failing_tasks())))


def judge_retrying(tasks: Iterable[FailingTask]) -> Iterator[Finding]:
    for task in tasks:
        is_unusual = task.retries >= FAILURES_TIMES * task.usual_retries
        if task.retries >= RETRIES_MIN and is_unusual:
            name = task.name or "other tasks"
            yield finding(
                "TASK_RETRYING",
                f"Attempts of task {name} were retried {task.retries:,} times in 10 minutes; usually "
                f"{task.usual_retries:.0f}.",
                subjects=[name],
                remedy=command("tasks", "--name", name),
                subject=Subject("task name", name),
            )


def _webhooks(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_webhooks((yield from facts.read(find_failing_tasks())))


def judge_webhooks(tasks: Iterable[FailingTask]) -> Iterator[Finding]:
    """Yield a finding if webhook deliveries fail. A single final failure counts, because its event is
    lost.
    """
    for task in tasks:
        name = (task.name or "").removeprefix(WEBHOOK_PREFIX)
        if name == (task.name or ""):
            continue
        failed = f"; {task.failures:,} deliveries have failed finally" if task.failures else ""
        yield finding(
            "WEBHOOK_FAILING",
            f"The receiver of webhook {name} refused {task.failures + task.retries:,} attempts in 10 "
            f"minutes{failed}.",
            subjects=[name],
            remedy=command("tasks", "--name", f"{WEBHOOK_PREFIX}{name}"),
            subject=Subject("task name", f"{WEBHOOK_PREFIX}{name}"),
        )


def _long_running(facts: Facts) -> Script[Iterable[Finding]]:
    tasks = yield from facts.read(find_overlong_tasks(facts.limits.long_running_seconds, SHOWN))
    return (one for task in tasks for one in overlong_reasons(task))


def overlong_reasons(task: OverlongTask) -> Iterator[Finding]:
    """Yield a finding for each listed task that should have ended."""
    found = list(running_reasons(task, f"Task {task.task_name} ({task.id})"))
    yield from found
    if not found:
        seconds = (task.looked_at - task.started_at).total_seconds()
        sentence = f"Task {task.task_name} has been running for {lasting(seconds)} without a limit."
        yield yellow(sentence, command("cancel", task.id), [f"task {task.id}"])


def _run_audit(facts: Facts) -> Script[Iterable[Finding]]:
    return judge_run_audit((yield from facts.read(find_broken_runs(SHOWN))))


def judge_run_audit(broken: Sequence[BrokenRun]) -> Iterator[Finding]:
    if broken:
        evidence = [f"run {run.id}: {run.problem}" for run in broken]
        sentence = "Rows of workflow runs contradict each other."
        yield red(sentence, "horsies workflow audit", evidence)


def _paused_runs(facts: Facts) -> Script[Iterable[Finding]]:
    runs = yield from facts.read(find_long_pauses(facts.limits.long_paused_seconds, SHOWN))
    by_hand = [f"run {run.id}" for run in runs if run.error_code is None]
    authors = (yield from authors_script(by_hand, "pause_run")) if by_hand else {}
    return [_by_hand(paused_run(run), authors.get(f"run {run.id}")) for run in runs]


def _by_hand(found: Finding, author: str | None) -> Finding:
    """Return the finding with the author and the reason of the pause. They are evidence, which webhooks omit:
    a reason may be about a person, and a delivery would keep it when the run is erased.
    """
    return found if author is None else replace(found, evidence=(f"paused by {author}",))


def _schedules(facts: Facts) -> Script[Iterable[Finding]]:
    names = [
        one.name
        for one in (
            yield from facts.read(find_overdue_schedules(facts.limits.overdue_seconds, SHOWN))
        )
    ]
    if not names:
        return []
    overdue = yield from facts.read(explain_schedules(names))
    found = [one for schedule in overdue for one in schedule_reasons(schedule)]
    return [one for one in found if one.level is not Level.GREEN]


def _retention(facts: Facts) -> Script[Iterable[Finding]]:
    states = yield from facts.read(newest_worker_states())
    (oldest,) = yield from facts.read(read_oldest_ended())
    tables = yield from facts.read(list_tables(facts.schema))
    hours = (
        (states[0].recovery_config or {}).get("terminal_record_retention_hours", 0) if states else 0
    )
    return judge_retention(hours, oldest.seconds, tables, facts.limits)


def judge_retention(
    hours: int | None, oldest_seconds: float | None, tables: Iterable[TableState], limits: Limits
) -> Iterator[Finding]:
    """Judge the age of the oldest finished task. ``hours`` is the retention in the newest snapshot: None
    keeps rows forever, and 0 means unknown.
    """
    kept = (hours or 0) * HOUR + limits.retention_slack_seconds
    rows = next((one.row_estimate for one in tables if one.name == "horsies_tasks"), 0.0)
    if hours is None and rows > limits.unlimited_rows:
        sentence = f"Finished tasks are kept forever; there are about {rows:,.0f}."
        yield yellow(sentence, "set terminal_record_retention_hours")
    elif hours and oldest_seconds is not None and oldest_seconds > kept:
        age = lasting(oldest_seconds)
        sentence = f"The oldest finished task is {age} old, and the retention is {hours} h."
        yield yellow(sentence, "start a worker: it deletes old rows once an hour")


WORK_CHECKS = (
    Check(
        "workers",
        "heartbeats of the workers",
        "a worker is silent, or receives no notifications",
        "a worker disappeared without a shutdown",
        _workers,
        is_cheap=True,
    ),
    Check(
        "losses",
        "workers that were lost within the last hour",
        "a worker was lost",
        "",
        _losses,
        is_cheap=True,
    ),
    Check(
        "caps",
        "caps of the running workers",
        "",
        "the caps differ; the cap of a queue with due tasks is 0",
        _caps,
        is_cheap=True,
    ),
    Check(
        "versions",
        "releases and tasks of the running workers",
        "the releases or tasks have differed for an hour",
        "",
        _versions,
        is_cheap=True,
    ),
    Check(
        "unserved",
        "queues with due tasks",
        "",
        "no running worker serves the queue",
        _of_queues(unserved_reasons),
        is_cheap=True,
    ),
    Check(
        "unknown-tasks",
        "names and calls of due tasks",
        "",
        "no running worker of the queue has the task or accepts the call's parameters",
        _of_queues(misfit_reasons),
        is_cheap=True,
    ),
    Check(
        "paused-queues",
        "paused queues with due tasks",
        "a paused queue has due tasks",
        "the queue has been paused for an hour",
        _of_queues(pause_reasons),
        is_cheap=True,
    ),
    Check(
        "paused-keys",
        "paused and halted keys with due tasks",
        "a paused key has due tasks",
        "the key has been paused for an hour",
        _paused_keys,
        is_cheap=True,
    ),
    Check(
        "blocked",
        "changes that the database refuses",
        "",
        "the database refuses a change",
        _blocked,
        is_cheap=True,
    ),
    Check(
        "held-runs",
        "runs of durable functions whose code does not fit their record",
        "",
        "a run is held",
        _held_runs,
        is_cheap=True,
    ),
    Check(
        "abandoned",
        "tasks of lost workers, expired leases, passed deadlines",
        "",
        "a task has been abandoned for a minute",
        _abandoned,
    ),
    Check(
        "crashes",
        "attempts of the last hour that crashed their child process",
        "",
        "3 crashes of one task, or 10 crashes of tasks with the same name",
        _crashes,
    ),
    Check(
        "stuck-queues",
        "due tasks that wait although children are idle and no cap or rate is reached, or while all "
        "children run the same tasks",
        "a task has waited for 5 minutes; if no child is idle, no child has started a task for 5 minutes",
        "",
        _stuck_queues,
        is_cheap=True,
    ),
    Check(
        "failing-tasks",
        "failures of the last ten minutes, by task",
        "10 failures, and five times as many as usual",
        "",
        _failing,
        is_cheap=True,
    ),
    Check(
        "retries",
        "retries of the last ten minutes, by task",
        "50 retries, and five times as many as usual",
        "",
        _retrying,
        is_cheap=True,
    ),
    Check(
        "webhooks",
        "webhook deliveries of the last ten minutes",
        "an attempt was refused",
        "",
        _webhooks,
        is_cheap=True,
    ),
    Check(
        "long-running",
        "running tasks",
        "a task exceeded its time limit, sent no heartbeat for 5 minutes, or has run for 6 "
        "hours without a time limit",
        "",
        _long_running,
        is_cheap=True,
    ),
    Check("run-audit", "rows of open runs", "", "the rows contradict each other", _run_audit),
    Check(
        "paused-runs",
        "paused runs",
        "a run was paused by a failure, or has been paused for a day",
        "",
        _paused_runs,
        is_cheap=True,
    ),
    Check(
        "schedules",
        "slots of schedules that are 15 seconds overdue",
        "the last task or run is unfinished; a scheduler is late",
        "no scheduler serves the schedule",
        _schedules,
        is_cheap=True,
    ),
    Check(
        "retention",
        "the oldest finished task",
        "the task is 2 hours past the retention; without a retention, there are 10 million rows",
        "",
        _retention,
    ),
)
