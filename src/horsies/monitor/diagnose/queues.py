"""Pure functions that find the obstacles between a queue and its workers, for explanations and checks,
and the reasons for missing rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from horsies.db.statements.explain import (
    DueCount,
    Knowledge,
    LastServer,
    Meter,
    NewestStart,
    OpenTransaction,
    Place,
)
from horsies.db.statements.keys import KeyState
from horsies.db.statements.monitor import WorkerSummary
from horsies.db.statements.refusals import DAMAGED, UNREACHABLE, RefusedCalls
from horsies.encryption import store_of
from horsies.findings import Finding, Level, Subject, between, command, finding
from horsies.monitor.overview import (
    WorkerHealth,
    health_of,
    live,
    misses_notifications,
    servers_by_queue,
    servers_of,
)
from horsies.words import counted, first_sentence, lasting, listed

# The maximum number of entries of the claim index to count.
COUNT_MAX = 10_000
# The maximum age of an id whose send may not be committed yet.
SENDING_SECONDS = 3_600.0
# The maximum number of task names to show.
_NAMES_MAX = 5
# The time after which a paused queue with due tasks is red.
LONG_PAUSE_SECONDS = 3_600.0
# The waiting time of the oldest due task from which idle children are suspicious.
PATIENCE_SECONDS = 300.0
# The recorded reason of a pause that a failed task caused.
_HALTED = re.compile(r"task [0-9a-f-]{36} failed: ")


@dataclass(frozen=True, slots=True)
class QueueSituation:
    """A queue, the cluster's open workers, and the tasks in flight.

    ``workers`` are all workers that have not shut down; ``recovery`` has their recovery settings if
    needed. ``others`` are the due tasks of queues that all of this queue's workers serve first, without
    the tasks of paused keys; ``refused`` are the due tasks of any queue that none of its workers can
    call. ``paused_by`` is the operator who paused the queue, if recorded. ``unknown_names`` are the names
    of waiting tasks that no worker has.
    """

    name: str
    looked_at: datetime
    paused_at: datetime | None = None
    paused_by: str | None = None
    waiting: DueCount | None = None
    unknown_names: Sequence[str] = ()
    workers: Sequence[WorkerSummary] = ()
    knowledge: Mapping[str, Knowledge] = field(default_factory=dict)
    recovery: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last_server: LastServer | None = None
    places: Sequence[Place] = ()
    others: Sequence[DueCount] = ()
    refused: Sequence[RefusedCalls] = ()
    claimed: int = 0
    meter: Meter | None = None
    # Whether the queue's keys have limits or some keys are paused, so that tasks may wait although
    # children are idle.
    limits_keys: bool = False
    # Whether a rate has held tasks of the queue back within the last minute.
    is_rated: bool = False
    # The paused keys that have due tasks.
    paused_keys: Sequence[KeyState] = ()
    # The queue's live workers and the names of all served queues; precomputed when many queues are
    # judged together.
    known_servers: Sequence[WorkerSummary] | None = None
    known_names: Sequence[str] | None = None

    @property
    def subject(self) -> Subject:
        return Subject("queue", self.name)

    @property
    def due(self) -> int:
        return self.waiting.due if self.waiting else 0

    @property
    def oldest_seconds(self) -> float:
        first = self.waiting.first_at if self.waiting else None
        return (self.looked_at - first).total_seconds() if first else 0.0

    @property
    def evidence(self) -> tuple[str, ...]:
        """The due tasks, in words."""
        if not self.due:
            return ()
        return (f"{_counted(self.due, 'due')}, the oldest for {lasting(self.oldest_seconds)}",)

    @property
    def servers(self) -> list[WorkerSummary]:
        if self.known_servers is not None:
            return list(self.known_servers)
        return servers_of(self.name, self.workers)

    @property
    def served_names(self) -> Sequence[str]:
        """The names of the queues that live workers serve."""
        return (
            self.known_names
            if self.known_names is not None
            else sorted(servers_by_queue(self.workers))
        )

    @property
    def own_refused(self) -> list[RefusedCalls]:
        return [one for one in self.refused if one.queue_name == self.name]

    @property
    def running(self) -> int:
        return self.places[0].in_queue if self.places else self.claimed

    @property
    def in_flight(self) -> int:
        return self.places[0].in_cluster if self.places else 0


def queues_before(queue_name: str, workers: Sequence[WorkerSummary]) -> list[str]:
    """Return the queues that every live worker on this queue serves before this queue."""
    earlier = [
        set(worker.queues[: list(worker.queues).index(queue_name)])
        for worker in servers_of(queue_name, workers)
    ]
    return sorted(set.intersection(*earlier)) if earlier else []


def pause_reasons(queue: QueueSituation) -> Iterator[Finding]:
    if queue.paused_at is not None:
        by = f" by {queue.paused_by}" if queue.paused_by else ""
        is_long = (queue.looked_at - queue.paused_at).total_seconds() >= LONG_PAUSE_SECONDS
        yield finding(
            "QUEUE_PAUSED",
            f"Queue {queue.name!r} was paused{by} {between(queue.paused_at, queue.looked_at)} ago.",
            level=Level.RED if is_long else Level.YELLOW,
            since=queue.paused_at,
            subjects=[queue.name],
            remedy=command("queues", "resume", queue.name),
            evidence=queue.evidence,
            subject=queue.subject,
        )


def key_opening(queue: str, key: str) -> str:
    """Return the beginning of a sentence about a paused key, which names the key and its queue."""
    return f"{key_naming(key)}{queue!r} was "


def key_naming(key: str) -> str:
    """Return the beginning of a sentence about a paused key of any queue."""
    return f"Key {key!r} of queue "


def key_pause(lane: KeyState, looked_at: datetime) -> Iterator[Finding]:
    """Yield a finding if the key is paused, by an operator or after a failed task."""
    if lane.paused_at is None:
        return
    is_halted = lane.halts and _HALTED.match(lane.pause_reason or "") is not None
    code = "KEY_HALTED" if is_halted else "KEY_PAUSED"
    why = f": {lane.pause_reason}" if lane.pause_reason else ""
    first = (
        " If that task has to run, send it again before you resume the key." if is_halted else ""
    )
    is_long = (looked_at - lane.paused_at).total_seconds() >= LONG_PAUSE_SECONDS
    since = (
        ""
        if lane.first_due_at is None
        else f", the first for {between(lane.first_due_at, looked_at)}"
    )
    yield finding(
        code,
        f"{key_opening(lane.queue_name, lane.key)}{'halted' if is_halted else 'paused'} "
        f"{between(lane.paused_at, looked_at)} ago{why}.{first}",
        level=Level.RED if is_long else Level.YELLOW,
        since=lane.paused_at,
        subjects=[lane.key],
        remedy=command("keys", "resume", lane.queue_name, lane.key),
        evidence=[f"{at_least(lane.due)} of its tasks are due{since}"] if lane.due else (),
        subject=Subject("queue", lane.queue_name),
    )


def unserved_reasons(queue: QueueSituation) -> Iterator[Finding]:
    if queue.servers:
        return
    served = queue.served_names
    parts = [f"No live worker serves queue {queue.name!r}"]
    parts.append(f"; served are: {listed(served)}" if served else "; no worker is running")
    last = queue.last_server
    if last is not None:
        ended = "was lost" if last.was_lost else "shut down"
        label = last.name or f"{last.hostname}:{last.pid}"
        ago = between(last.stopped_at, queue.looked_at)
        parts.append(f". The last one, {label}, {ended} {ago} ago")
    yield finding(
        "QUEUE_UNSERVED",
        "".join(parts) + ".",
        since=None if last is None else last.stopped_at,
        subjects=[queue.name],
        remedy=f"horsies worker APP --queues {queue.name}" if served else "horsies worker APP",
        evidence=queue.evidence,
        subject=queue.subject,
    )


def capacity_reasons(
    queue: QueueSituation, servers: Sequence[WorkerSummary], kinds: Sequence[bool] = (False, True)
) -> Iterator[Finding]:
    """Yield the caps and the busy children that prevent these workers from claiming tasks of these kinds
    (``async def`` functions or others). Caps are checked even if no worker is passed.
    """
    yield from _cap_reasons(queue, servers or queue.servers)
    yield from _rate_reasons(queue)
    is_free = any(worker.free_places(kind) for worker in servers for kind in kinds)
    if servers and not is_free:
        oldest = queue.places[0] if queue.places else None
        since = None if oldest is None else oldest.claimed_at
        yield finding(
            "CHILDREN_BUSY",
            _busy_sentence(queue, servers, kinds),
            since=since,
            subjects=[worker.label for worker in servers],
            remedy="start another worker, or this one with more --processes",
        )


def _rate_reasons(queue: QueueSituation) -> Iterator[Finding]:
    meter, is_empty = queue.meter, queue.waiting is not None and not queue.due
    if meter is None or is_empty or meter.starts_at <= queue.looked_at:
        return
    seconds = meter.start_seconds
    pace = f"{1 / seconds:,.4g} in a second" if seconds < 1 else f"one every {lasting(seconds)}"
    yield finding(
        "QUEUE_RATE",
        f"The rate of queue {queue.name!r} allows {pace}, and the next task may start in "
        f"{between(queue.looked_at, meter.starts_at)}.",
        subjects=[queue.name],
        remedy=f"wait, or raise the rate of queue {queue.name} and restart the workers",
        evidence=queue.evidence,
        subject=queue.subject,
    )


def _busy_sentence(
    queue: QueueSituation, servers: Sequence[WorkerSummary], kinds: Sequence[bool]
) -> str:
    own = sum(one.places(False) for one in servers if False in kinds or not one.async_places)
    shared = sum(one.async_places for one in servers) if True in kinds else 0
    if not own + shared:
        return (
            f"The workers of queue {queue.name!r} have only async children, and those run only tasks "
            "that are `async def` functions."
        )
    parts = [f"all {own:,} child processes" if own > 1 else "the only child process"] if own else []
    if shared:
        parts.append(f"all {shared:,} places of async children")
    text = " and ".join(parts)
    workers = counted(len(servers), "worker")
    opening = f"{text[0].upper()}{text[1:]} of {workers} for queue {queue.name!r}"
    return f"{opening} run other tasks{_example(queue, servers)}."


def _example(queue: QueueSituation, servers: Sequence[WorkerSummary]) -> str:
    """Name a task that keeps a child busy, because it may hang; it runs at one of these workers if there are
    no others.
    """
    first = queue.places[0] if queue.places else None
    if first is None or first.claimed_at is None or len(servers) < len(live(queue.workers)):
        return ""
    return f", such as {first.id} for {between(first.claimed_at, queue.looked_at)}"


def _cap_reasons(queue: QueueSituation, servers: Sequence[WorkerSummary]) -> Iterator[Finding]:
    known = [worker for worker in servers if worker.queue_caps is not None]
    caps = [(worker.queue_caps or {}).get(queue.name) for worker in known]
    cluster_caps = [worker.cluster_wide_cap for worker in known]
    if known and len(known) == len(servers):
        yield from _reached(queue, caps, cluster_caps)
    yield from differing_caps(known, queue.name)
    yield from differing_caps(known)


def differing_caps(
    workers: Sequence[WorkerSummary], queue_name: str | None = None
) -> Iterator[Finding]:
    """Compare the caps of a queue, or of the cluster, in the workers' newest snapshots; each worker
    applies its own cap.
    """
    what, subject = "cluster_wide_cap", Subject("the workers")
    caps = [worker.cluster_wide_cap for worker in workers]
    if queue_name is not None:
        what, subject = f"max_concurrency of queue {queue_name}", Subject("queue", queue_name)
        caps = [(worker.queue_caps or {}).get(queue_name) for worker in workers]
    if len(set(caps)) > 1:
        labels = [worker.label for worker in workers]
        shown = [f"{label} {_cap(cap)}" for label, cap in zip(labels, caps, strict=True)]
        yield finding(
            "CAPS_DISAGREE",
            f"Workers disagree about {what}: {listed(shown, 5)}.",
            subjects=labels,
            remedy="deploy the same configuration to every worker",
            subject=subject,
        )


def _reached(
    queue: QueueSituation, caps: Sequence[int | None], cluster_caps: Sequence[int | None]
) -> Iterator[Finding]:
    cap = _largest(caps)
    if cap == 0:
        yield finding(
            "QUEUE_CAP_ZERO",
            f"The max_concurrency of queue {queue.name!r} is 0, so none of its tasks starts.",
            subjects=[queue.name],
            remedy=f"raise max_concurrency of queue {queue.name} and restart the workers",
            evidence=queue.evidence,
            subject=queue.subject,
        )
    elif cap is not None and queue.running >= cap:
        yield _cap_reason(
            "QUEUE_CAP",
            queue,
            f"Queue {queue.name!r} runs {counted(queue.running, 'task')}, and its cap is {cap:,}",
            [place for place in queue.places if place.queue_name == queue.name],
        )
    cluster_cap = _largest(cluster_caps)
    if cluster_cap is not None and queue.in_flight >= cluster_cap:
        yield _cap_reason(
            "CLUSTER_CAP",
            queue,
            f"The cluster has {counted(queue.in_flight, 'task')} in flight, and its cap is {cluster_cap:,}",
            queue.places,
        )


def _cap_reason(code: str, queue: QueueSituation, text: str, places: Sequence[Place]) -> Finding:
    since = places[0].claimed_at if places else None
    if since is not None:
        text += f"; the oldest, {places[0].id}, for {between(since, queue.looked_at)}"
    remedy = command("explain", places[0].id) if places else "raise the cap"
    subjects = [place.id for place in places]
    return finding(code, f"{text}.", since=since, subjects=subjects, remedy=remedy)


def _largest(caps: Sequence[int | None]) -> int | None:
    """Return the largest cap of the workers, or None if any worker has no cap."""
    limits = [cap for cap in caps if cap is not None]
    return max(limits) if caps and len(limits) == len(caps) else None


def _cap(cap: int | None) -> str:
    return "without a cap" if cap is None else f"{cap:,}"


def order_reasons(queue: QueueSituation) -> Iterator[Finding]:
    """Yield findings about queues that are served earlier and about workers that only poll."""
    startable = {other.name: _startable(queue, other) for other in queue.others}
    waiting = [other for other in queue.others if startable[other.name] and other.paused_at is None]
    if waiting:
        shown = ", ".join(f"{one.name} ({at_least(startable[one.name])} due)" for one in waiting)
        yield finding(
            "BETTER_QUEUES_FIRST",
            f"Its workers serve other queues first: {shown}.",
            subjects=[other.name for other in waiting],
            remedy=f"horsies worker APP --queues {queue.name}",
        )
    yield from polling_reasons(queue.servers)


def polling_reasons(workers: Sequence[WorkerSummary]) -> Iterator[Finding]:
    """Yield a finding about workers that receive no notifications."""
    polling = [worker for worker in workers if misses_notifications(worker)]
    if polling:
        first = polling[0]
        yield finding(
            "WORKERS_POLL",
            f"Notifications do not reach {listed([worker.label for worker in polling])}; tasks are found "
            "by polling.",
            subjects=[worker.label for worker in polling],
            remedy="set session_database_url to an address that bypasses the pooler",
            subject=Subject("worker", first.worker_id, first.label),
        )


def _startable(queue: QueueSituation, other: DueCount) -> int:
    """Return another queue's due tasks, without tasks that no worker can call, because these delay
    nothing.
    """
    if other.due > COUNT_MAX:
        return other.due
    refused = sum(one.tasks for one in queue.refused if one.queue_name == other.name)
    return max(other.due - refused, 0)


def at_least(count: int) -> str:
    """Format a count that is exact only below its limit."""
    return f"{COUNT_MAX:,}+" if count > COUNT_MAX else f"{count:,}"


def queue_reasons(queue: QueueSituation) -> list[Finding]:
    """Return the reasons why a queue's tasks do not start."""
    servers = queue.servers
    found = [
        *pause_reasons(queue),
        *(one for key in queue.paused_keys for one in key_pause(key, queue.looked_at)),
        *unserved_reasons(queue),
        *misfit_reasons(queue),
        *capacity_reasons(queue, servers),
        *order_reasons(queue),
        *stuck_reasons(queue),
    ]
    found.append(_backlog_reason(queue, bool(found)))
    if queue.due:
        found += _window_reasons(queue, servers)
    return found


def misfit_reasons(queue: QueueSituation) -> Iterator[Finding]:
    """Yield findings about waiting tasks that no worker of the queue has, and about calls that fit no
    worker.
    """
    refused = queue.own_refused
    if not (refused or queue.unknown_names) or not (servers := queue.servers):
        return
    workers = f"{counted(len(servers), 'live worker')} of queue {queue.name!r}"
    lacking = {one.name for one in refused if not one.is_known}
    if names := sorted(lacking.union(queue.unknown_names)):
        know = "does not know" if len(servers) == 1 else "do not know"
        yield finding(
            "TASK_UNKNOWN",
            f"{workers} {know} these waiting tasks: {', '.join(map(repr, names[:_NAMES_MAX]))}.",
            subjects=names[:_NAMES_MAX],
            remedy="deploy a worker that has these tasks",
            subject=queue.subject,
        )
    for one in [one for one in refused if one.is_known][:_NAMES_MAX]:
        if one.missing_key is not None:
            held = f"{workers} cannot read {counted(one.tasks, 'due task')} {one.name!r}"
            yield unreadable_reason(queue, one.missing_key, held, one.since)
            continue
        yield finding(
            "CALL_DOES_NOT_FIT",
            f"{workers} cannot run {counted(one.tasks, 'due task')} {one.name!r}: "
            f"{first_sentence(one.message)}.",
            since=one.since,
            subjects=[one.name],
            remedy=f"deploy a worker of queue {queue.name} with the release that sent the call;"
            " or cancel the call and send it again with the workers' parameters",
            subject=queue.subject,
        )


def _store_words(queue: QueueSituation, store_id: str, problem: str) -> tuple[str, str]:
    """Explain why the workers cannot read payload from a store, and return the remedy."""
    if problem == UNREACHABLE:
        return (
            f"the payload is kept in the store {store_id!r}, which does not respond. The workers try "
            "again after some seconds.",
            f"check the store {store_id!r} and the workers' connection to it",
        )
    if problem == DAMAGED:
        return (
            f"the payload is missing from the store {store_id!r}, or the store has another object "
            "under its name. It is held until you cancel it.",
            "restore the object and restart the workers; or cancel it and send it again",
        )
    return (
        f"the payload is kept in the store {store_id!r}, which no worker has. It is held until a "
        "worker with the store takes it.",
        f"add the store {store_id!r} to the workers of queue {queue.name} and restart them",
    )


def unreadable_reason(
    queue: QueueSituation, missing_key: str, opening: str, since: datetime | None
) -> Finding:
    """Return the finding for payload that the queue's workers cannot read: a missing key, or a missing
    or failing store.
    """
    key_id = missing_key.removesuffix(DAMAGED).removesuffix(UNREACHABLE)
    if (store_id := store_of(key_id)) is not None:
        text, remedy = _store_words(queue, store_id, missing_key.removeprefix(key_id))
    elif key_id != missing_key:
        text = (
            f"key {key_id} does not decrypt the payload: the text was changed, or it was encrypted with "
            "another key of this id. It is held until you cancel it."
        )
        remedy = (
            "restore the text or the key and restart the workers; or cancel it and send it again"
        )
    else:
        text = (
            f"the payload is encrypted with key {key_id}, which no worker has. It is held until"
            " a worker with the key takes it."
        )
        remedy = (
            f"add key {key_id} to the codec of the workers of queue {queue.name} and restart them"
        )
    return finding(
        "PAYLOAD_UNREADABLE",
        f"{opening}: {text}",
        since=since,
        subjects=[key_id],
        remedy=remedy,
        subject=queue.subject,
    )


def stuck_reasons(queue: QueueSituation) -> Iterator[Finding]:
    """Yield a finding about a due task that waits although children are idle and no cap or rate is
    reached.
    """
    if not waits_long(queue):
        return
    idle = sum(_idle(worker) for worker in queue.servers)
    if idle and not _is_at_cap(queue):
        children = "1 child" if idle == 1 else f"{idle:,} children"
        yield finding(
            "QUEUE_STUCK",
            f"The oldest task of queue {queue.name!r} has been due for "
            f"{lasting(queue.oldest_seconds)}, and {children} of its workers idle.",
            since=queue.waiting.first_at if queue.waiting else None,
            subjects=[queue.name],
            remedy=command("explain", "queue", queue.name),
            subject=queue.subject,
        )


def stalled_reasons(queue: QueueSituation, starts: Mapping[str, NewestStart]) -> Iterator[Finding]:
    """Yield a finding if tasks are due and no child of the queue's workers has started a task for a while,
    because all of them still run older tasks, which may hang. ``starts`` has the workers by id.
    """
    own = [starts[one.worker_id] for one in queue.servers if one.worker_id in starts]
    if not own or not is_occupied(queue):
        return
    newest, oldest = max(one.newest_at for one in own), min(own, key=lambda one: one.oldest_at)
    if (queue.looked_at - newest).total_seconds() <= PATIENCE_SECONDS:
        return
    yield finding(
        "QUEUE_STALLED",
        f"The oldest task of queue {queue.name!r} has been due for {lasting(queue.oldest_seconds)}, and all "
        f"children of its workers have run the same tasks for {between(newest, queue.looked_at)} or longer; "
        f"the oldest is {oldest.oldest_id}, for {between(oldest.oldest_at, queue.looked_at)}.",
        since=newest,
        subjects=[queue.name, f"task {oldest.oldest_id}"],
        remedy=command("explain", oldest.oldest_id),
        subject=queue.subject,
    )


def waits_long(queue: QueueSituation) -> bool:
    """Return whether a task has been due for a while, and no pause, limit of keys or rate explains it."""
    is_held = not queue.due or queue.paused_at is not None or queue.limits_keys or queue.is_rated
    return not is_held and queue.oldest_seconds > PATIENCE_SECONDS


def is_occupied(queue: QueueSituation) -> bool:
    """Return whether a task has been due for a while, and no child of the queue's workers is free."""
    if not waits_long(queue) or _is_at_cap(queue):
        return False
    return not any(one.free_places(kind) for one in queue.servers for kind in (False, True))


def _is_at_cap(queue: QueueSituation) -> bool:
    caps = [(worker.queue_caps or {}).get(queue.name) for worker in queue.servers]
    known = [cap for cap in caps if cap is not None]
    return bool(known) and queue.running >= max(known)


def _idle(worker: WorkerSummary) -> int:
    """Count a live worker's idle children. A worker with async children counts only if both kinds of
    children have free slots, because the queue's oldest task may need either kind.
    """
    if health_of(worker) is not WorkerHealth.ALIVE:
        return 0
    room = [worker.free_places(kind) for kind in (False, True)]
    free = sum(room) if worker.async_places and all(room) else min(room)
    return max(free - worker.tasks_claimed, 0)


def _window_reasons(queue: QueueSituation, servers: Sequence[WorkerSummary]) -> Iterator[Finding]:
    """Yield a finding about the cap that prevents workers from handing out very short tasks in windows."""
    causes = {
        "max_concurrency": all(queue.name in (one.queue_caps or {}) for one in servers),
        "cluster_wide_cap": all(one.cluster_wide_cap is not None for one in servers),
    }
    if servers and (names := [name for name, holds in causes.items() if holds]):
        yield finding(
            "NO_WINDOWS",
            f"Tasks of queue {queue.name!r} are given to children one at a time, even very "
            "short tasks, because of "
            f"{' and '.join(names)}.",
            subjects=[queue.name],
        )


def _backlog_reason(queue: QueueSituation, is_hindered: bool) -> Finding:
    name, waiting = queue.name, queue.waiting
    if waiting and waiting.due:
        since = waiting.first_at
        ago = "" if since is None else f", the first for {between(since, queue.looked_at)}"
        moves = "" if is_hindered else "; no obstacle was found"
        return finding(
            "TASKS_DUE",
            f"Queue {name!r} has {_counted(waiting.due, 'due')}{ago}{moves}.",
            since=since,
            subjects=[name],
        )
    if waiting and waiting.delayed:
        first = waiting.first_at or queue.looked_at
        ahead = lasting((first - queue.looked_at).total_seconds())
        return finding(
            "ALL_DELAYED",
            f"Queue {name!r} has {_counted(waiting.delayed, 'delayed')}, the first for another {ahead}.",
            subjects=[name],
        )
    return finding("QUEUE_EMPTY", f"No task is waiting in queue {name!r}.", subjects=[name])


def _counted(count: int, state: str) -> str:
    return f"{at_least(count)} {state} {'task' if count == 1 else 'tasks'}"


def queue_holds(queue: QueueSituation) -> list[str]:
    holds = []
    if queue.paused_at is None:
        holds.append(f"Queue {queue.name!r} is not paused.")
    if servers := queue.servers:
        free = sum(one.free_places(False) for one in servers)
        serve = "serves" if len(servers) == 1 else "serve"
        shared = [one.free_places(True) for one in servers if one.async_places]
        also = f"; free places of async children: {sum(shared):,}" if shared else ""
        holds.append(
            f"{counted(len(servers), 'live worker')} {serve} it; idle children: {free:,}{also}."
        )
    return holds


# Tasks and runs that are missing


def session_label(holder: OpenTransaction, looked_at: datetime) -> str:
    """Describe the session of an open transaction, with the details that this role may see."""
    if holder.pid is None:
        return "a prepared transaction"
    details = [part for part in (holder.application_name, holder.state) if part]
    if holder.since is not None:
        details.append(f"transaction open for {between(holder.since, looked_at)}")
    return f"pid {holder.pid}" + (f" ({', '.join(details)})" if details else "")


def missing_reason(
    what: str,
    row_id: str,
    looked_at: datetime,
    writers: Sequence[OpenTransaction],
    retention_hours: float | None,
) -> Finding:
    """Explain why a task or run does not exist, judging by the time in its id."""
    made_at = _made_at(row_id, looked_at)
    there = f"There is no {what} {row_id}"
    if made_at is None:
        return finding("NOT_FOUND", f"{there}; check the id, or try another database.")
    age = (looked_at - made_at).total_seconds()
    if writers and age < SENDING_SECONDS:
        shown = session_label(writers[0], looked_at)
        return finding(
            "NOT_FOUND_YET",
            f"{there} yet; the id was created {lasting(age)} ago, and an open transaction may "
            f"have inserted the row: {shown}.",
            since=made_at,
            subjects=[f"pid {writer.pid}" for writer in writers],
            remedy="commit the transaction of the sender",
        )
    if retention_hours is not None and age > retention_hours * 3_600:
        return finding(
            "NOT_FOUND_DELETED",
            f"{there} any more; the id was created {lasting(age)} ago, and finished rows are "
            f"kept for {lasting(retention_hours * 3_600)}.",
            since=made_at,
            remedy="raise terminal_record_retention_hours, or send with a longer retention",
        )
    return finding(
        "NOT_FOUND",
        f"{there}; the id was created {lasting(age)} ago. The send was rolled back, or the row "
        "is in another database.",
        since=made_at,
    )


def _made_at(row_id: str, looked_at: datetime) -> datetime | None:
    """Return the time in a UUIDv7; return None for any other id and for a future time."""
    number = UUID(row_id)
    seconds = (number.int >> 80) / 1000
    if number.version != 7 or seconds > looked_at.timestamp() + SENDING_SECONDS:
        return None
    return datetime.fromtimestamp(seconds, UTC)
