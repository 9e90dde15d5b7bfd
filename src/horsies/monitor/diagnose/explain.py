"""Explanations: read the facts about a task, node, run, queue or schedule, and return the reasons.

Every script reads a bounded number of rows with a few statements in one read-only transaction. Pure
functions in the neighbouring modules decide the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.doctor import find_silencers
from horsies.db.statements.explain import (
    DueCount,
    Knowledge,
    MapPlace,
    NodeFacts,
    OpenTransaction,
    RecoverySettings,
    RunFacts,
    TaskFacts,
    WantedTask,
    count_ahead,
    count_ahead_in_lane,
    count_due,
    explain_run,
    explain_schedules,
    explain_task,
    find_last_server,
    find_row_holder,
    find_task_transaction,
    find_writers,
    list_knowledge,
    list_map_places,
    list_open_nodes,
    list_places,
    list_rated_queues,
    list_recovery_settings,
    read_clock,
    read_meter,
)
from horsies.db.statements.keys import (
    KeyState,
    PausedDue,
    count_paused_due,
    find_paused_keys,
    list_limited_queues,
    read_lane,
)
from horsies.db.statements.monitor import (
    QueueName,
    RecentAttempts,
    WorkerSummary,
    count_recent_attempts,
    list_known_queues,
    list_workers,
)
from horsies.db.statements.refusals import RefusedCalls, list_refused
from horsies.findings import Explanation as Explanation
from horsies.findings import Finding as Finding
from horsies.findings import finding, obstacles_first
from horsies.ids import stored_form
from horsies.monitor.action_log import author_script
from horsies.monitor.diagnose.known_names import unknown_names_script
from horsies.monitor.diagnose.queues import (
    COUNT_MAX,
    QueueSituation,
    missing_reason,
    queue_holds,
    queue_reasons,
    queues_before,
)
from horsies.monitor.diagnose.runs import (
    node_reasons,
    run_reasons,
    schedule_holds,
    schedule_reasons,
)
from horsies.monitor.diagnose.schema import silent_triggers
from horsies.monitor.diagnose.tasks import TaskSituation, takers_of, task_holds, task_reasons
from horsies.monitor.overview import TaskReport, servers_of, task_script
from horsies.states import TaskStatus, WorkflowStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker
from horsies.words import listed

# The maximum number of attempts from which a queue's current rate is computed; a queue with more is
# fast enough.
RATE_SAMPLE = 2_000
# The maximum number of started nodes whose obstacles a run's explanation includes.
NODES_EXPLAINED = 3
# A queue's explanation names at most this many paused keys.
KEYS_EXPLAINED = 5
# The number up to which the due tasks of a queue's paused keys are counted.
PAUSED_COUNT_MAX = 100_000

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


def explain(broker: PostgresBroker, script: Script[Explanation]) -> BrokerResult[Explanation]:
    """Run one of the scripts below in a read-only transaction."""
    return broker.perform(_READING, script, read_only=True)


async def explain_async(
    broker: PostgresBroker, script: Script[Explanation]
) -> BrokerResult[Explanation]:
    return await broker.perform_async(_READING, script, read_only=True)


def read_task(
    broker: PostgresBroker, task_id: str, *, payload: bool = False
) -> BrokerResult[TaskReport | None]:
    """Describe one task, or return None if it does not exist; ``payload`` adds arguments and result."""
    return broker.perform(_READING, report_script(task_id, payload), read_only=True)


def report_script(task_id: str, payload: bool = False) -> Script[TaskReport | None]:
    """Describe one task, including its obstacles if it is unfinished."""
    report = yield from task_script(task_id, payload)
    if report is None or TaskStatus(report.task.status).is_terminal:
        return report
    explained = yield from explain_task_script(task_id)
    obstacles = [one.sentence for one in explained.reasons if one.blocks]
    own = [one.sentence for one in explained.reasons if one.code == "IN_TRANSACTION"]
    return replace(report, waits_because=obstacles, transaction=own[0] if own else None)


def explain_script(row_id: str, node_id: str | None = None) -> Script[Explanation]:
    if node_id is not None:
        return (yield from explain_node_script(row_id, node_id))
    if (stored := stored_form(row_id)) is None:
        return _not_an_id("task or run", row_id)
    if (task := (yield from _read_task(stored))) is not None:
        return task
    if (run := (yield from _read_run(stored))) is not None:
        return run
    return (yield from _missing("task or run", stored))


def explain_task_script(task_id: str) -> Script[Explanation]:
    """Explain why a task does not start or end; for an unknown id, the status is None."""
    if (stored := stored_form(task_id)) is None:
        return _not_an_id("task", task_id)
    found = yield from _read_task(stored)
    return found if found is not None else (yield from _missing("task", stored))


def obstacle_script(task_id: str) -> Script[Finding | None]:
    """Return the first obstacle of a task, for the message of a wait that timed out."""
    explained = yield from explain_task_script(task_id)
    return next((one for one in explained.reasons if one.blocks), None)


def explain_run_script(run_id: str) -> Script[Explanation]:
    """Explain why a workflow run is not making progress."""
    if (stored := stored_form(run_id)) is None:
        return _not_an_id("run", run_id)
    found = yield from _read_run(stored)
    return found if found is not None else (yield from _missing("run", stored))


def _read_task(task_id: str) -> Script[Explanation | None]:
    task = one_or_none((yield explain_task(task_id)))
    if task is None:
        return None
    situation = yield from _task_situation(task)
    reasons = obstacles_first(task_reasons(situation))
    return Explanation(f"task {task.id}", task.status, reasons, tuple(task_holds(situation)))


def _task_situation(task: TaskFacts) -> Script[TaskSituation]:
    status = TaskStatus(task.status)
    if status.is_terminal:
        return TaskSituation(task, QueueSituation(task.queue_name, task.looked_at))
    wanted = WantedTask(task.task_name, task.definition_key, task.id)
    queue = yield from _queue_situation(
        task.queue_name, task.looked_at, task.queue_paused_at, wanted
    )
    if status is not TaskStatus.PENDING or not takers_of(queue):
        queue = replace(queue, recovery=(yield from _recovery()))
    holder: OpenTransaction | None = one_or_none((yield find_row_holder(task.id)))
    own: OpenTransaction | None = None
    if status is TaskStatus.RUNNING:
        own = one_or_none((yield find_task_transaction(task.id)))
    places: Sequence[MapPlace] = ()
    if task.is_parked and task.item_index is not None and task.node_index is not None:
        places = yield list_map_places(task.workflow_id or "", task.node_index)
    ahead, per_minute = None, 0.0
    lane: KeyState | None = None
    if status is TaskStatus.PENDING and task.lane is not None:
        (lane,) = yield read_lane(task.queue_name, task.lane, most=COUNT_MAX + 1)
        place = (task.lane, task.priority, task.enqueued_at, task.id)
        (ahead,) = yield count_ahead_in_lane(task.queue_name, *place, limit=COUNT_MAX + 1)
    if status is TaskStatus.PENDING and not task.held and task.enqueued_at <= task.looked_at:
        key = count_ahead(
            task.queue_name, task.priority, task.enqueued_at, task.id, limit=COUNT_MAX + 1
        )
        (ahead,) = yield key
        if ahead.due:
            per_minute = yield from _rate(task.queue_name)
    return TaskSituation(task, queue, ahead, per_minute, holder, places, own, lane)


def _queue_situation(
    name: str, looked_at: datetime, paused_at: datetime | None, wanted: WantedTask
) -> Script[QueueSituation]:
    paused_by = None
    if paused_at is not None:
        paused_by = yield from author_script(f"queue {name}", "pause_queue")
    workers: list[WorkerSummary] = yield list_workers(include_stopped=False)
    known: list[Knowledge] = yield list_knowledge, wanted
    places = yield list_places(name)
    last = None
    if not servers_of(name, workers):
        last = one_or_none((yield find_last_server(name)))
    others = yield from _due_without_paused_keys(queues_before(name, workers))
    refused: list[RefusedCalls] = yield list_refused(COUNT_MAX)
    return QueueSituation(
        name=name,
        looked_at=looked_at,
        paused_at=paused_at,
        paused_by=paused_by,
        workers=workers,
        knowledge={one.worker_id: one for one in known},
        last_server=last,
        places=places,
        others=others,
        refused=refused,
        meter=one_or_none((yield read_meter(name))),
        limits_keys=name in [one.name for one in (yield list_limited_queues())],
        is_rated=bool((yield list_rated_queues([name]))),
    )


def _due_without_paused_keys(names: Sequence[str]) -> Script[list[DueCount]]:
    """Count the due tasks of these queues, except those of paused keys, which delay no other tasks."""
    if not names:
        return []
    held: list[PausedDue] = yield count_paused_due(names, PAUSED_COUNT_MAX)
    paused = {one.name: one.due for one in held}
    counts: list[DueCount] = yield count_due(names, COUNT_MAX + 1 + max(paused.values()))
    return [one._replace(due=max(0, one.due - paused[one.name])) for one in counts]


def _recovery() -> Script[dict[str, dict[str, Any]]]:
    rows: list[RecoverySettings] = yield list_recovery_settings()
    return {row.worker_id: row.recovery for row in rows if row.recovery is not None}


def _rate(queue_name: str) -> Script[float]:
    """Return the number of attempts that currently end per minute in a queue."""
    recent: list[RecentAttempts] = yield count_recent_attempts(RATE_SAMPLE)
    for one in recent:
        if one.queue_name == queue_name:
            return (one.done + one.failed + one.retried) * 60 / one.covered_seconds
    return 0.0


def _not_an_id(what: str, text: str) -> Explanation:
    sentence = f"{text!r} is not the id of a {what}."
    return Explanation(f"{what} {text}", None, (finding("NOT_FOUND", sentence),))


def _missing(what: str, row_id: str) -> Script[Explanation]:
    writers: list[OpenTransaction] = yield find_writers()
    (clock,) = yield read_clock()
    recovery = yield from _recovery()
    retentions = [one.get("terminal_record_retention_hours") for one in recovery.values()]
    hours = [one for one in retentions if isinstance(one, int)]
    found = missing_reason(what, row_id, clock.now, writers, min(hours) if hours else None)
    return Explanation(f"{what} {row_id}", None, (found,))


# Runs and nodes


def _read_run(run_id: str) -> Script[Explanation | None]:
    run = one_or_none((yield explain_run(run_id, None)))
    if run is None:
        return None
    nodes: list[NodeFacts] = yield list_open_nodes(run_id, None)
    begun = [node for node in nodes if node.status != "PENDING"]
    by_node: dict[str, Sequence[Finding]] = {}
    for node in begun[:NODES_EXPLAINED]:
        by_node[node.node_id] = yield from _reasons_of_node(run, node)
    paused_by = None
    if run.paused_at is not None and run.failed_node is None:
        paused_by = yield from author_script(f"run {run.id}", "pause_run")
    reasons = obstacles_first(
        [*(yield from _silent_triggers(run)), *run_reasons(run, nodes, by_node, paused_by)]
    )
    done = run.total_nodes - run.open_nodes
    holds = (
        f"{done:,} of {run.total_nodes:,} nodes have ended, {run.failed_nodes:,} of them failed.",
    )
    return Explanation(f"run {run.id}", run.status, reasons, holds)


def explain_node_script(run_id: str, node_id: str) -> Script[Explanation]:
    """Explain why a node of a run does not start or end."""
    subject = f"node {node_id} of run {run_id}"
    if (stored := stored_form(run_id)) is None:
        return _not_an_id("run", run_id)
    run: RunFacts | None = one_or_none((yield explain_run(stored, node_id)))
    if run is None:
        return (yield from _missing("run", stored))
    if run.task_index is None:
        sentence = f"Run {run.name} ({stored}) has no node {node_id!r}."
        return Explanation(subject, None, (finding("NOT_FOUND", sentence),))
    (node,) = yield list_open_nodes(stored, [run.task_index])
    reasons = yield from _reasons_of_node(run, node)
    silent = yield from _silent_triggers(run)
    return Explanation(subject, node.status, obstacles_first([*silent, *reasons]))


def _silent_triggers(run: RunFacts) -> Script[list[Finding]]:
    """Return the settings that prevent an unfinished run from advancing."""
    if WorkflowStatus(run.status).is_terminal:
        return []
    return list(silent_triggers((yield find_silencers())))


def _reasons_of_node(run: RunFacts, node: NodeFacts) -> Script[list[Finding]]:
    task: Sequence[Finding] = ()
    places: Sequence[MapPlace] = ()
    dependencies: list[NodeFacts] = []
    if node.task_id is not None:
        explained = yield from _read_task(node.task_id)
        task = () if explained is None else explained.reasons
    elif node.kind == "map":
        places = yield list_map_places(run.id, node.task_index)
    if node.status in ("PENDING", "SKIPPED") and run.dependencies:
        dependencies = yield list_open_nodes(run.id, list(run.dependencies))
    return node_reasons(run, node, dependencies, task, places)


# Queues and schedules


def explain_queue_script(name: str, configured: Sequence[str] = ()) -> Script[Explanation]:
    """Explain why a queue's tasks do not start; a queue in ``configured`` exists even if it is empty."""
    (waiting,) = yield count_due([name], COUNT_MAX + 1)
    (clock,) = yield read_clock()
    queue = yield from _queue_situation(name, clock.now, waiting.paused_at, WantedTask(None, None))
    is_known = bool(
        queue.servers or queue.running or queue.last_server or waiting.due or waiting.delayed
    )
    if not (is_known or name in configured or waiting.is_stored):
        stored: list[QueueName] = yield list_known_queues()
        names = sorted({*configured, *(one.name for one in stored)})
        known = f"; the known ones are: {listed(names)}" if names else ""
        sentence = f"There is no queue {name!r}: it has no worker and no task{known}."
        return Explanation(f"queue {name}", None, (finding("NOT_FOUND", sentence),))
    unknown = (yield from unknown_names_script([name], queue.workers)).get(name, ())
    paused: list[KeyState] = yield find_paused_keys(name, KEYS_EXPLAINED, COUNT_MAX + 1)
    queue = replace(queue, waiting=waiting, unknown_names=unknown, paused_keys=paused)
    reasons = obstacles_first(queue_reasons(queue))
    status = "PAUSED" if queue.paused_at is not None else "OPEN"
    return Explanation(f"queue {name}", status, reasons, tuple(queue_holds(queue)))


def explain_schedule_script(name: str) -> Script[Explanation]:
    """Explain why a schedule does not send its task or start its workflow."""
    schedule = one_or_none((yield explain_schedules([name])))
    if schedule is None:
        sentence = f"There is no schedule {name!r} on record; a scheduler stores it when it starts."
        found = finding("NOT_FOUND", sentence, remedy="horsies scheduler APP")
        return Explanation(f"schedule {name}", None, (found,))
    paused_by = None
    if schedule.paused_at is not None:
        paused_by = yield from author_script(f"schedule {name}", "pause_schedule")
    reasons = obstacles_first(schedule_reasons(schedule, paused_by))
    status = "PAUSED" if schedule.paused_at is not None else "OPEN"
    status = "ENDED" if schedule.next_run_at is None else status
    return Explanation(f"schedule {name}", status, reasons, tuple(schedule_holds(schedule)))
