"""Pure functions that explain from facts why a task does not start or end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from horsies.db.statements.doctor import OverlongTask
from horsies.db.statements.explain import Ahead, Knowledge, MapPlace, OpenTransaction, TaskFacts
from horsies.db.statements.keys import KeyState
from horsies.db.statements.monitor import WorkerSummary
from horsies.errors import UNLIMITED_RETRIES
from horsies.findings import Finding, Subject, at_and_ago, between, command, finding
from horsies.monitor.diagnose.queues import (
    QueueSituation,
    at_least,
    capacity_reasons,
    key_pause,
    order_reasons,
    pause_reasons,
    session_label,
    unreadable_reason,
    unserved_reasons,
)
from horsies.monitor.overview import WorkerHealth, health_of, live
from horsies.retry import IN_A_STEP, LIMIT_REACHED, NOT_LISTED
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.tasks.outcome import RETURNED_TO_QUEUE, TOO_LATE
from horsies.words import counted, first_sentence, lasting

# The time for which the loss of a worker is reported.
LOSS_SHOWN_SECONDS = 600.0
# A running task is suspicious after this time without a heartbeat, counted from its start at the
# earliest.
HEARTBEAT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class TaskSituation:
    """A task, its queue, and the rows that are relevant for its state."""

    task: TaskFacts
    queue: QueueSituation
    ahead: Ahead | None = None
    per_minute: float = 0.0
    holder: OpenTransaction | None = None
    map_places: Sequence[MapPlace] = ()
    # The transaction of a running task (tx), in which its child records the outcome.
    transaction: OpenTransaction | None = None
    # The key of a waiting task.
    lane: KeyState | None = None

    @property
    def takers(self) -> list[WorkerSummary]:
        return takers_of(self.queue)


def takers_of(queue: QueueSituation) -> list[WorkerSummary]:
    """Return the queue's live workers that have the task and have not refused its call."""
    return [worker for worker in _knowing(queue) if _refusal(queue, worker) is None]


def _knowing(queue: QueueSituation) -> list[WorkerSummary]:
    known = queue.knowledge
    return [
        worker
        for worker in queue.servers
        if worker.worker_id not in known or known[worker.worker_id].knows_task
    ]


def _refusal(queue: QueueSituation, worker: WorkerSummary) -> Knowledge | None:
    known = queue.knowledge.get(worker.worker_id)
    return None if known is None or known.refusal is None else known


def task_reasons(situation: TaskSituation) -> list[Finding]:
    found = [*_blocked(situation.task)]
    match TaskStatus(situation.task.status):
        case TaskStatus.PENDING:
            found += _waiting(situation)
        case TaskStatus.CLAIMED:
            found += [*_claimed(situation), *_locked(situation)]
        case TaskStatus.RUNNING:
            found += [*_running(situation), *_in_transaction(situation), *_locked(situation)]
        case _:
            found += _ended(situation.task)
    return found


def _blocked(task: TaskFacts) -> Iterator[Finding]:
    if task.blocked_action is not None:
        yield blocked_reason(task.id, task.blocked_action, task.blocked_error, task.blocked_since)


def blocked_reason(
    blocked_id: str, action: str, error: str | None, since: datetime | None
) -> Finding:
    return finding(
        "BLOCKED",
        f"The database refuses to {action} it: {error}.",
        since=since,
        subjects=[blocked_id],
        remedy="remove the cause of the error; a worker tries again within five minutes",
    )


# A waiting task


def _waiting(situation: TaskSituation) -> list[Finding]:
    task, queue = situation.task, situation.queue
    if task.good_until is not None and task.good_until <= task.looked_at:
        return [_expired(situation), *_locked(situation)]
    found = [*_held(task)]
    # A held run keeps its place among the tasks of its key, because it is stored as due in the
    # distant future.
    is_delayed = task.due_at > task.looked_at and task.parked_problem is None
    if is_delayed:
        found.append(_delayed(situation))
    found += pause_reasons(queue)
    found += key_pause(situation.lane, task.looked_at) if situation.lane else ()
    found += _worker_reasons(situation)
    capacity = [*capacity_reasons(queue, situation.takers, [task.is_async])]
    # Slots that are in use now may be free when the task becomes due.
    if is_delayed or task.is_held_back:
        found += [one for one in capacity if one.code == "QUEUE_CAP_ZERO"]
    else:
        found += [*capacity, *_of_key(situation), *_ahead(situation), *order_reasons(queue)]
    found += _locked(situation)
    is_free = not any(one.blocks or one.code == "BEHIND" for one in (*_blocked(task), *found))
    found += _last_attempt(task)
    if is_free:
        found.append(
            finding(
                "SHOULD_START_NOW",
                "No obstacle was found; the task has been due for "
                f"{between(task.enqueued_at, task.looked_at)}.",
                since=task.enqueued_at,
                remedy=command("workers", "--ping"),
            )
        )
    return found


def _expired(situation: TaskSituation) -> Finding:
    task = situation.task
    assert task.good_until is not None
    workers = live(situation.queue.workers)
    ends = "a worker ends it as EXPIRED" if workers else "no live worker is there to end it"
    return finding(
        "EXPIRED_UNSWEPT",
        f"Its good_until passed {between(task.good_until, task.looked_at)} ago; {ends}.",
        since=task.good_until,
        remedy="send it again with a later good_until" if workers else "horsies worker APP",
    )


def _held(task: TaskFacts) -> Iterator[Finding]:
    if not task.held:
        return
    if task.parked_problem is not None:
        yield finding(
            "HELD_BY_RECORD",
            f"Its code does not fit its record: {task.parked_problem}",
            since=task.parked_since,
            remedy=command("durable", "resume", task.id),
        )
    is_paused = task.parked_problem is None or task.run_paused_at is not None
    if task.workflow_id is None or not task.is_held_back or not is_paused:
        return
    cause = f" because a node failed with {task.run_error_code}" if task.run_error_code else ""
    ago = f" {between(task.run_paused_at, task.looked_at)} ago" if task.run_paused_at else ""
    run_id = task.workflow_id or ""
    flags = ("--retry-failed",) if task.run_error_code else ()
    yield finding(
        "HELD_BY_RUN",
        f"Its run {task.run_name} ({run_id}) was paused{ago}{cause}.",
        since=task.run_paused_at,
        subjects=[run_id],
        remedy=command("workflow", "resume", run_id, *flags),
    )


def _delayed(situation: TaskSituation) -> Finding:
    task = situation.task
    due = f"is due in {between(task.looked_at, task.due_at)}"
    if task.parked_since is not None:
        return _parked_run(task)
    if task.node_kind == "signal":
        return _parked_signal(task)
    if task.is_parked and task.item_index is not None:
        return _parked_item(situation)
    if task.is_parked:
        return finding("SENT_FOR_LATER", "It is parked without a due time.")
    if task.node_kind == "sleep":
        return finding("SLEEPS", f"Sleep node {task.node_id} {due}.", subjects=[task.node_id or ""])
    if task.retry_count > 0:
        limit = task.max_retries
        of = "" if limit >= UNLIMITED_RETRIES else f" of {limit}"
        code = task.last_error_code or "an error without a code"
        return finding(
            "RETRY_LATER",
            f"Retry {task.retry_count}{of} {due}, after a failure with {code}.",
            since=task.last_finished_at,
        )
    return finding("SENT_FOR_LATER", f"It was sent for later and {due}.")


def signal_command(task_id: str, name: str) -> str:
    """Return the command that sends a signal; with an application, it checks and encrypts the value."""
    return f"{command('durable', 'signal', task_id, name)} VALUE APP"


def _parked_run(task: TaskFacts) -> Finding:
    """Return the finding for a parked run that waits for a time, a signal or the end of a task."""
    signals, children = list(task.parked_signals or ()), list(task.parked_children or ())
    events = [f"signal {name!r}" for name in signals] + [
        f"the end of task {one}" for one in children
    ]
    if not task.is_parked:
        events.append(f"the end of its wait in {between(task.looked_at, task.due_at)}")
    remedy = signal_command(task.id, signals[0]) if signals else None
    if children:
        remedy = command("explain", children[0])
    return finding(
        "PARKED_RUN",
        f"It is parked and waits for {' or '.join(events)}{_ends_by(task)}.",
        since=task.parked_since,
        subjects=[*signals, *children],
        remedy=remedy,
    )


def _ends_by(task: TaskFacts) -> str:
    """Describe when the deadline of a run cancels it."""
    if task.deadline is None or task.is_late:
        return ""
    return f"; its deadline cancels it in {between(task.looked_at, task.deadline)}"


def _parked_signal(task: TaskFacts) -> Finding:
    left = "" if task.is_parked else f", {between(task.looked_at, task.enqueued_at)} left"
    name, run_id = task.signal_name or "", task.workflow_id or ""
    return finding(
        "PARKED_SIGNAL",
        f"Node {task.node_id} waits for signal {name!r}{left}.",
        subjects=[name, run_id],
        remedy=f"{command('workflow', 'signal', run_id, name)} VALUE",
    )


def _parked_item(situation: TaskSituation) -> Finding:
    task, places = situation.task, situation.map_places
    number, total = (task.item_index or 0) + 1, task.items_total or 0
    shown = ", ".join(f"{place.id} ({place.status})" for place in places)
    taken = f": {shown}" if shown else ""
    return finding(
        "PARKED_MAP",
        f"It is item {number:,} of {total:,} of map {task.node_id}, which runs at most "
        f"{task.max_parallel} at a time; all places are taken{taken}.",
        subjects=[place.id for place in places],
        remedy=command("explain", places[0].id) if places else None,
    )


def _worker_reasons(situation: TaskSituation) -> Iterator[Finding]:
    task, queue = situation.task, situation.queue
    servers, knowing = queue.servers, _knowing(queue)
    if not servers:
        yield from unserved_reasons(queue)
    elif not knowing:
        yield _unknown(situation)
    elif not situation.takers:
        yield _unfit(situation, knowing)
    versions = {
        queue.knowledge[worker.worker_id].fingerprint
        for worker in knowing
        if worker.worker_id in queue.knowledge
    }
    if len(versions - {None}) > 1:
        yield finding(
            "PARAMETERS_DIFFER",
            f"The workers of queue {queue.name!r} have different parameters for "
            f"{_wanted(task)}; each worker leaves calls that do not fit to the other workers.",
            subjects=[worker.label for worker in knowing],
            remedy="deploy the same release to every worker of the queue",
        )


def _unknown(situation: TaskSituation) -> Finding:
    task, queue = situation.task, situation.queue
    ends = f"it fails with WORKER_RESOLUTION_ERROR{_after_grace(queue)}"
    if task.is_durable:
        ends = "it waits for a worker that does, keeps its recorded steps and uses up no attempt"
    return finding(
        "TASK_UNKNOWN",
        f"No live worker of queue {queue.name!r} knows {_wanted(task)}; {ends}.",
        since=task.enqueued_at,
        subjects=[worker.label for worker in queue.servers],
        remedy=f"deploy a worker of queue {queue.name} that has {_wanted(task)}",
    )


def _unfit(situation: TaskSituation, knowing: Sequence[WorkerSummary]) -> Finding:
    """Return the finding that no worker accepts the call; a worker's refusal message names the wrong
    parameter.
    """
    queue = situation.queue
    workers = counted(len(knowing), "live worker")
    refusals = [one for worker in knowing if (one := _refusal(queue, worker)) is not None]
    since = min((one.refused_since for one in refusals if one.refused_since), default=None)
    keys = [one.missing_key for one in refusals if one.missing_key is not None]
    if keys:
        held = f"{workers} of queue {queue.name!r} cannot read it"
        return unreadable_reason(queue, max(keys), held, since)
    fault = first_sentence(refusals[0].refusal or "")
    waits = "The task waits for a worker of another release"
    ends = f" and fails with WORKER_SERIALIZATION_ERROR{_after_grace(queue)}"
    if situation.task.has_record:
        ends = ", keeps its recorded steps and uses up no attempt"
    return finding(
        "CALL_DOES_NOT_FIT",
        f"{workers} of queue {queue.name!r} cannot run it: {fault}. {waits}{ends}.",
        since=since,
        subjects=[worker.label for worker in knowing],
        remedy=f"deploy a worker of queue {queue.name} with the release that sent the call; or "
        "cancel the task and send it again with the workers' parameters",
    )


def _after_grace(queue: QueueSituation) -> str:
    """Describe how long workers wait before they fail a task that none of them can run, if their
    settings are known.
    """
    graces = [_setting(queue, worker, "unknown_task_grace_ms") for worker in queue.servers]
    known = [grace for grace in graces if isinstance(grace, int)]
    return f" after {lasting(max(known) / 1000)}" if known else ""


def _wanted(task: TaskFacts) -> str:
    if task.definition_key is not None:
        return f"workflow {task.definition_key!r}"
    return f"task {task.task_name!r}"


def _setting(queue: QueueSituation, worker: WorkerSummary, name: str) -> object:
    return queue.recovery.get(worker.worker_id, {}).get(name)


def _ahead(situation: TaskSituation) -> Iterator[Finding]:
    ahead = situation.ahead
    if ahead is None or not ahead.due or situation.lane is not None:
        return
    at_rate = ""
    if rate := situation.per_minute:
        at_rate = f"; at {rate:,.0f} per minute that takes {lasting(ahead.due / rate * 60)}"
    are = "task is" if ahead.due == 1 else "tasks are"
    turns = _turns_of_keys(ahead.keys)
    yield finding(
        "BEHIND",
        f"{at_least(ahead.due)} {are} ahead of it in queue {situation.queue.name!r}{at_rate}{turns}.",
        subjects=[situation.queue.name],
        remedy=command("explain", "queue", situation.queue.name),
    )


def _turns_of_keys(keys: int) -> str:
    """Describe how many other keys are served in between; return an empty text if there are none."""
    if not keys:
        return ""
    many = (
        "more than 100 keys have"
        if keys >= 100
        else f"{counted(keys, 'key')} {'has' if keys == 1 else 'have'}"
    )
    return f"; {many} their turns in between"


def _of_key(situation: TaskSituation) -> Iterator[Finding]:
    """Yield findings about the limits of a waiting task's key, and about earlier tasks of the same key."""
    lane, task = situation.lane, situation.task
    if lane is None:
        return
    show = command("keys", "show", lane.queue_name, lane.key)
    cap = lane.max_concurrency
    if cap is not None and lane.in_flight >= cap:
        full = f"{lane.in_flight:,} of {cap:,} tasks of key {lane.key!r} are in flight."
        if lane.is_fifo and cap == 1:
            full = f"Key {lane.key!r} runs its tasks one after the other, and one is in flight."
        elif cap == 0:
            full = f"The max_concurrency of key {lane.key!r} is 0, so none of its tasks starts."
        yield finding("KEY_CAP", full, subjects=[lane.key], remedy=show)
    if lane.starts_at is not None and lane.starts_at > task.looked_at:
        wait = between(task.looked_at, lane.starts_at)
        sentence = f"The rate of key {lane.key!r} allows its next start in {wait}."
        yield finding("KEY_RATE", sentence, subjects=[lane.key], remedy=show)
    ahead = situation.ahead
    if ahead is None or not ahead.due:
        return
    are = f"task of key {lane.key!r} is" if ahead.due == 1 else f"tasks of key {lane.key!r} are"
    many = f"{at_least(ahead.due)} {are}"
    if lane.is_fifo:
        sentence = f"{many} before it, and the key runs them one after the other."
        yield finding("KEY_ORDER", sentence, subjects=[lane.key], remedy=show)
    else:
        sentence = f"{many} ahead of it{_turns_of_keys(ahead.keys - 1)}."
        yield finding("BEHIND", sentence, subjects=[lane.key], remedy=show)


def _has_recorded(situation: TaskSituation) -> bool:
    """Return whether the task's transaction has locked the task's row, which it does to record the
    outcome.
    """
    holder, own = situation.holder, situation.transaction
    return holder is not None and own is not None and holder.pid == own.pid


def _in_transaction(situation: TaskSituation) -> Iterator[Finding]:
    own = situation.transaction
    if own is None:
        return
    session = session_label(own, situation.task.looked_at)
    sentence = f"Its rows and its outcome commit together, in the transaction of {session}."
    if _has_recorded(situation):
        sentence = (
            f"Its outcome is recorded in the transaction of {session}, which has not committed yet."
        )
    yield finding("IN_TRANSACTION", sentence, since=own.since, subjects=[f"pid {own.pid}"])


def _locked(situation: TaskSituation) -> Iterator[Finding]:
    holder = situation.holder
    if holder is None or _has_recorded(situation):
        return
    end = None if holder.pid is None else f"SELECT pg_terminate_backend({holder.pid})"
    yield finding(
        "ROW_LOCKED",
        f"Its row is locked by {session_label(holder, situation.task.looked_at)}; workers skip it.",
        since=holder.since,
        subjects=[] if holder.pid is None else [f"pid {holder.pid}"],
        remedy=end,
    )


def _last_attempt(task: TaskFacts) -> Iterator[Finding]:
    ended_at = task.last_finished_at
    if ended_at is None or task.last_outcome != TaskAttemptOutcome.WORKER_FAILURE:
        return
    ago = between(ended_at, task.looked_at)
    if task.retry_reason == RETURNED_TO_QUEUE:
        text = f"A worker on {task.last_hostname} stopped {ago} ago and returned it to its queue."
        yield finding("RETURNED", text, since=ended_at)
    elif (task.looked_at - ended_at).total_seconds() < LOSS_SHOWN_SECONDS:
        text = f"The process of its last attempt ended {ago} ago on {task.last_hostname}."
        yield finding("WORKER_LOST_RECENTLY", text, since=ended_at)


def task_holds(situation: TaskSituation) -> list[str]:
    """Return the conditions for a start that a waiting task already meets."""
    task, queue = situation.task, situation.queue
    if task.status != TaskStatus.PENDING.value:
        return []
    holds = []
    if task.due_at <= task.looked_at:
        holds.append(f"It has been due for {between(task.due_at, task.looked_at)}.")
    if not task.is_held_back:
        holds.append("No workflow run holds it back.")
    if queue.paused_at is None:
        holds.append(f"Queue {queue.name!r} is not paused.")
    if takers := situation.takers:
        verbs = "serves the queue and knows" if len(takers) == 1 else "serve the queue and know"
        holds.append(f"{counted(len(takers), 'live worker')} {verbs} the task.")
    if situation.holder is None:
        holds.append("No other transaction locks its row.")
    return holds


# A claimed or running task


def _owner(situation: TaskSituation) -> WorkerSummary | None:
    workers = situation.queue.workers
    return next((one for one in workers if one.worker_id == situation.task.worker_id), None)


def _is_lost(situation: TaskSituation) -> bool:
    owner = _owner(situation)
    return owner is None or health_of(owner) is WorkerHealth.LOST


def _claimed(situation: TaskSituation) -> Iterator[Finding]:
    task, lease = situation.task, situation.task.claim_expires_at
    yield from silent_reasons(_owner(situation))
    if _is_lost(situation):
        yield _lost(
            situation, "CLAIMER_LOST", "auto_requeue_stale_claimed", "requeue_stale_claimed"
        )
    elif lease is not None and lease <= task.looked_at:
        yield finding(
            "LEASE_LAPSED",
            f"The lease of its claim ended {between(lease, task.looked_at)} ago; a worker returns it "
            "to its queue.",
            since=lease,
        )
    else:
        owner = _owner(situation)
        label = "" if owner is None else f" by worker {owner.label}"
        left = "" if lease is None else f", lease for another {between(task.looked_at, lease)}"
        yield finding(
            "PREFETCHED",
            f"It was claimed in advance{label} and waits for a free child{left}.",
            since=task.claimed_at,
            subjects=[] if owner is None else [owner.label],
        )


def _running(situation: TaskSituation) -> Iterator[Finding]:
    task, owner = situation.task, _owner(situation)
    if task.cancel_requested_at is not None:
        ago = between(task.cancel_requested_at, task.looked_at)
        text = f"Cancellation was requested {ago} ago; the worker is stopping the task."
        yield finding("STOPPING", text, since=task.cancel_requested_at)
    if owner is None or _is_lost(situation):
        yield _lost(
            situation, "RUNNER_LOST", "auto_fail_stale_running", "mark_stale_tasks_as_failed"
        )
        return
    yield from silent_reasons(owner)
    limit = _limit(task)
    yield from running_reasons(task)
    yield _runs(task, owner, limit)


def silent_reasons(owner: WorkerSummary | None) -> Iterator[Finding]:
    if owner is not None and health_of(owner) is WorkerHealth.SILENT:
        yield finding(
            "SILENT",
            f"Worker {owner.label} has sent no heartbeat for "
            f"{lasting(owner.seen_seconds_ago)}, but is still connected.",
            since=owner.seen_at,
            subjects=[owner.label],
            remedy=command("workers", "--ping"),
            subject=Subject("worker", owner.worker_id, owner.label),
        )


def running_reasons(task: TaskFacts | OverlongTask, who: str = "It") -> Iterator[Finding]:
    """Yield a finding if a running task should have ended, by its time limit or its missing heartbeats."""
    limit, subject = _limit(task), Subject("task", task.id, task.task_name)
    if limit is not None and limit < task.looked_at:
        yield finding(
            "OVER_LIMIT",
            f"{who} has exceeded its timeout_ms={task.timeout_ms:,} by "
            f"{between(limit, task.looked_at)}.",
            since=limit,
            remedy=command("cancel", task.id),
            subject=subject,
        )
    heard_at = max(filter(None, (task.heartbeat_at, task.started_at)), default=task.looked_at)
    if (task.looked_at - heard_at).total_seconds() > HEARTBEAT_SECONDS:
        yield finding(
            "NO_HEARTBEAT",
            f"{who} has sent no heartbeat for {between(heard_at, task.looked_at)}.",
            since=heard_at,
            remedy=command("workers", "--ping"),
            subject=subject,
        )


def _limit(task: TaskFacts | OverlongTask) -> datetime | None:
    if task.started_at is None or task.timeout_ms is None:
        return None
    return task.started_at + timedelta(milliseconds=task.timeout_ms)


def _runs(task: TaskFacts, owner: WorkerSummary, limit: datetime | None) -> Finding:
    started = task.started_at or task.looked_at
    parts = [f"It has run for {between(started, task.looked_at)} in pid {task.worker_pid}"]
    parts.append(f" of worker {owner.label}")
    if task.progress_done is not None:
        total = "" if task.progress_total is None else f" of {task.progress_total:g}"
        parts.append(f", progress {task.progress_done:g}{total}")
    if task.heartbeat_at is not None:
        parts.append(f", heartbeat {between(task.heartbeat_at, task.looked_at)} ago")
    if limit is not None and limit >= task.looked_at:
        parts.append(f", time limit in {between(task.looked_at, limit)}")
    return finding("RUNS", f"{''.join(parts)}.", since=started, subjects=[owner.label])


def _lost(situation: TaskSituation, code: str, switch: str, method: str) -> Finding:
    task, queue = situation.task, situation.queue
    workers = live(queue.workers)
    owner = task.worker_id or "unknown"
    if not task.owner_is_known:
        gone = f"Its worker {owner} is not on record"
    elif task.owner_stopped_at is not None:
        gone = f"Its worker {owner} ended {between(task.owner_stopped_at, task.looked_at)} ago"
    else:
        gone = f"Its worker {owner} is gone"
    if not workers:
        next_step, remedy = "no live worker is there to recover it", "horsies worker APP"
    elif all(_setting(queue, worker, switch) is False for worker in workers):
        next_step, remedy = (
            f"recovery is switched off ({switch}=False)",
            f"app.get_broker().{method}()",
        )
    else:
        next_step, remedy = "another worker recovers it", command("workers")
    return finding(
        code, f"{gone}; {next_step}.", since=task.owner_stopped_at, subjects=[owner], remedy=remedy
    )


# A task that has ended


def _ended(task: TaskFacts) -> Iterator[Finding]:
    when = at_and_ago(task.ended_at, task.looked_at)
    status = TaskStatus(task.status)
    verb = {
        TaskStatus.COMPLETED: f"It completed{when}",
        TaskStatus.FAILED: f"It failed with {task.error_code or 'an error without a code'}{when}",
        TaskStatus.CANCELLED: f"It was cancelled{when}{_late(task)}",
        TaskStatus.EXPIRED: f"It expired{when}: it did not start before its good_until",
    }[status]
    if status is not TaskStatus.FAILED:
        yield finding("ENDED", f"{verb}.", since=task.ended_at, remedy=_again(task))
        return
    # The message and the traceback may contain arguments, so they are shown only with --payload.
    cause = command("show", task.id, "--payload")
    yield finding("ENDED", f"{verb}.", since=task.ended_at, remedy=cause)
    yield replace(_not_retried(task), remedy=_again(task))


def _late(task: TaskFacts) -> str:
    return ": the run reached its deadline" if task.is_late else ""


def _again(task: TaskFacts) -> str | None:
    if task.status == TaskStatus.COMPLETED.value:
        return None
    if task.workflow_id is None:
        return command("retry", task.id)
    node = () if task.node_id is None else ("--node", task.node_id)
    return command("workflow", "retry", task.workflow_id, *node)


def _not_retried(task: TaskFacts) -> Finding:
    why = task.retry_reason
    if why is None:
        text = "It was not retried: the task has no retry policy."
        return finding("NOT_RETRIED_NO_POLICY", text)
    if why == TOO_LATE and task.cancel_requested_at is not None:
        return finding("NOT_RETRIED_CANCELLED", "It was not retried: a cancel was asked for.")
    if why == TOO_LATE:
        text = "It was not retried: the next attempt would start after its good_until."
        return finding("NOT_RETRIED_TOO_LATE", text, since=task.good_until)
    codes = {
        LIMIT_REACHED: "NOT_RETRIED_USED_UP",
        NOT_LISTED: "NOT_RETRIED_UNLISTED",
        IN_A_STEP: "NOT_RETRIED_STEP",
    }
    code = next((codes[end] for end in codes if why.endswith(end)), "NOT_RETRIED_NO_POLICY")
    return finding(code, f"It was {why}.")
