"""Pure functions that explain from facts why a run, a node or a schedule is not making progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from horsies.db.statements.doctor import PausedRun
from horsies.db.statements.explain import MapPlace, NodeFacts, RunFacts, ScheduleFacts
from horsies.db.statements.schedules import LATE_SECONDS
from horsies.findings import (
    CATALOGUE,
    Finding,
    Level,
    Subject,
    at_and_ago,
    between,
    command,
    finding,
)
from horsies.monitor.defaults import OVERDUE_SECONDS
from horsies.monitor.diagnose.tasks import blocked_reason
from horsies.states import WorkflowStatus, WorkflowTaskStatus
from horsies.words import counted, lasting


def run_reasons(
    run: RunFacts,
    nodes: Sequence[NodeFacts],
    node_reasons: Mapping[str, Sequence[Finding]],
    paused_by: str | None = None,
) -> list[Finding]:
    """Return the reasons why a run is not making progress: its own obstacles, then its started nodes'
    obstacles.
    """
    found = run_obstacles(run, paused_by)
    for node in nodes:
        if node.status == WorkflowTaskStatus.PENDING.value:
            continue
        found.append(
            finding(
                "NODE_OPEN",
                f"The task of node {node.node_id} is {node.task_status}."
                if node.task_status
                else f"Node {node.node_id} is {node.status}.",
                since=node.begun_at,
                subjects=[node.node_id],
                remedy=command("explain", run.id, node.node_id),
            )
        )
        for one in node_reasons.get(node.node_id, ()):
            if one.blocks and one.code not in ("HELD_BY_RUN", "RUN_PAUSED"):
                prefix = f"Node {node.node_id}"
                named = one.sentence.startswith(f"{prefix} ")
                sentence = one.sentence if named else f"{prefix}: {one.sentence}"
                found.append(replace(one, sentence=sentence))
    return found


def run_obstacles(run: RunFacts, paused_by: str | None = None) -> list[Finding]:
    """Return the obstacles that concern a run as a whole."""
    found = []
    if run.blocked_action is not None:
        found.append(
            blocked_reason(run.id, run.blocked_action, run.blocked_error, run.blocked_since)
        )
    status = WorkflowStatus(run.status)
    if status is WorkflowStatus.PAUSED:
        found.append(paused_run(run, paused_by))
    elif status.is_terminal:
        found.append(_run_ended(run, status))
    return found


def paused_run(run: RunFacts | PausedRun, paused_by: str | None = None) -> Finding:
    ago = f" {between(run.paused_at, run.looked_at)} ago" if run.paused_at else ""
    by = f" by {paused_by}" if paused_by else ""
    cause = ""
    if run.failed_node is not None:
        cause = f" because node {run.failed_node} failed"
        cause += f" with {run.error_code}" if run.error_code else ""
    flags = ("--retry-failed",) if run.failed_node else ()
    return finding(
        "RUN_PAUSED",
        f"Run {run.name} was paused{by}{ago}{cause}.",
        since=run.paused_at,
        subjects=[run.id, *([run.failed_node] if run.failed_node else [])],
        remedy=command("workflow", "resume", run.id, *flags),
        subject=Subject("run", run.id, run.name),
    )


def _run_ended(run: RunFacts, status: WorkflowStatus) -> Finding:
    when = at_and_ago(run.completed_at, run.looked_at)
    error = f" with {run.error_code}" if run.error_code else ""
    again = command("workflow", "retry", run.id) if status is WorkflowStatus.FAILED else None
    first = f"; the first node that failed is {run.failed_node}" if run.failed_node else ""
    text = f"Run {run.name} ended as {status.value}{error}{when}{first}."
    return finding("RUN_ENDED", text, since=run.completed_at, subjects=[run.id], remedy=again)


def node_reasons(
    run: RunFacts,
    node: NodeFacts,
    dependencies: Sequence[NodeFacts],
    task: Sequence[Finding],
    map_places: Sequence[MapPlace] = (),
) -> list[Finding]:
    """Return the reasons why a node does not start or end; ``task`` has the reasons of its task."""
    match WorkflowTaskStatus(node.status):
        case WorkflowTaskStatus.PENDING:
            return [*run_obstacles(run), _waits_for(run, dependencies)]
        case WorkflowTaskStatus.SKIPPED:
            return [_never(run, node, dependencies), *run_obstacles(run)]
        case WorkflowTaskStatus.COMPLETED | WorkflowTaskStatus.FAILED:
            return [_node_ended(run, node), *(one for one in task if one.code != "ENDED")]
        case _ if node.sub_run_id is not None:
            return [*run_obstacles(run), _sub_run(node)]
        case _ if node.kind == "map":
            return [*run_obstacles(run), _map_open(node, map_places)]
        case _:
            return [*task]


def _waits_for(run: RunFacts, dependencies: Sequence[NodeFacts]) -> Finding:
    open_ones = [one for one in dependencies if not WorkflowTaskStatus(one.status).is_terminal]
    ended = [one for one in dependencies if WorkflowTaskStatus(one.status).is_terminal]
    shown = ", ".join(f"{one.node_id} ({_state(one)})" for one in (*open_ones, *ended))
    total = len(run.dependencies or ())
    first = next((one for one in open_ones if one.status != "PENDING"), None) or next(
        iter(open_ones), None
    )
    joins = {"all": "all", "any": "one", "quorum": f"{run.min_success}"}
    return finding(
        "WAITS_FOR",
        f"It waits for {joins[run.join_type or 'all']} of its dependencies: {shown}"
        + (f" and {total - len(dependencies):,} more." if total > len(dependencies) else "."),
        subjects=[one.node_id for one in open_ones],
        remedy=None if first is None else command("explain", run.id, first.node_id),
    )


def _state(node: NodeFacts) -> str:
    error = f" with {node.error_code}" if node.error_code else ""
    # A PENDING node waits for other nodes; a PENDING task would hide that the node no longer waits.
    is_begun = node.status == "ENQUEUED" and node.task_status not in (None, "PENDING")
    return f"{node.task_status if is_begun else node.status}{error}"


def _never(run: RunFacts, node: NodeFacts, dependencies: Sequence[NodeFacts]) -> Finding:
    bad = [one for one in dependencies if one.status in ("FAILED", "SKIPPED")]
    because = f"the run ended as {run.status} before it began"
    if bad:
        shown = ", ".join(f"{one.node_id} ({_state(one)})" for one in bad)
        because = f"{shown}, and it needs "
        needs = {"all": "all of its dependencies", "any": "one of its dependencies"}
        because += needs.get(run.join_type or "", f"{run.min_success} of its dependencies")
    return finding(
        "NEVER",
        f"Node {node.node_id} was skipped: {because}.",
        subjects=[one.node_id for one in bad],
        remedy=command("workflow", "retry", run.id),
    )


def _node_ended(run: RunFacts, node: NodeFacts) -> Finding:
    when = at_and_ago(node.completed_at, run.looked_at)
    if node.status == WorkflowTaskStatus.COMPLETED.value:
        return finding("ENDED", f"Node {node.node_id} completed{when}.", since=node.completed_at)
    error = f" with {node.error_code}" if node.error_code else ""
    remedy = command("workflow", "retry", run.id, "--node", node.node_id)
    text = f"Node {node.node_id} failed{error}{when}."
    return finding("ENDED", text, since=node.completed_at, remedy=remedy)


def _sub_run(node: NodeFacts) -> Finding:
    child = node.sub_run_id or ""
    if node.sub_run_status == WorkflowStatus.PAUSED.value:
        return finding(
            "SUB_RUN_PAUSED",
            f"The child run {child} of node {node.node_id} is paused.",
            subjects=[child],
            remedy=command("workflow", "resume", child),
        )
    return finding(
        "SUB_RUN_OPEN",
        f"The child run {child} of node {node.node_id} is {node.sub_run_status}.",
        since=node.begun_at,
        subjects=[child],
        remedy=command("explain", child),
    )


def _map_open(node: NodeFacts, places: Sequence[MapPlace]) -> Finding:
    shown = ", ".join(f"{place.id} ({place.status})" for place in places)
    return finding(
        "MAP_OPEN",
        f"{node.items_open or 0:,} of {counted(node.items_total or 0, 'item')} of map {node.node_id} "
        f"have not ended{': ' + shown if shown else ''}.",
        since=node.begun_at,
        subjects=[place.id for place in places],
        remedy=command("explain", places[0].id) if places else None,
    )


# Schedules


def schedule_reasons(schedule: ScheduleFacts, paused_by: str | None = None) -> list[Finding]:
    """Return the reasons why a schedule does not send its task or start its workflow."""
    return [*_schedule_state(schedule, paused_by), *_skipped(schedule)]


def _schedule_state(schedule: ScheduleFacts, paused_by: str | None) -> Iterator[Finding]:
    name, due_at, now = schedule.name, schedule.next_run_at, schedule.looked_at
    if schedule.paused_at is not None:
        by = f" by {paused_by}" if paused_by else ""
        yield finding(
            "PAUSED",
            f"Schedule {name} was paused{by} {between(schedule.paused_at, now)} ago.",
            since=schedule.paused_at,
            subjects=[name],
            remedy=command("schedules", "resume", name),
        )
    if due_at is None:
        yield finding("SCHEDULE_ENDED", f"Schedule {name} has no further slot.", subjects=[name])
    elif due_at > now:
        text = f"The next slot of schedule {name} is in {between(now, due_at)}."
        remedy = f"{command('schedules', 'run', name)} LOCATOR"
        yield finding("NOT_DUE", text, subjects=[name], remedy=remedy)
    elif schedule.paused_at is None:
        yield _due(schedule, (now - due_at).total_seconds())


def _due(schedule: ScheduleFacts, late_seconds: float) -> Finding:
    name, late = schedule.name, lasting(late_seconds)
    is_late = late_seconds > LATE_SECONDS
    about = partial(finding, since=schedule.next_run_at, subject=Subject("schedule", schedule.name))
    if not schedule.schedulers and (is_late or schedule.unfinished_id is None):
        text = f"A slot of schedule {name} has been due for {late}, and no scheduler is connected."
        return about("NO_SCHEDULER", text, subjects=[name], remedy="horsies scheduler APP")
    if schedule.unfinished_id is not None:
        return about(
            "OVERLAP",
            f"A slot of schedule {name} has been due for {late}, but {schedule.unfinished_id} "
            "is unfinished.",
            subjects=[schedule.unfinished_id],
            remedy=command("explain", schedule.unfinished_id),
        )
    if is_late or schedule.is_disabled:
        off = "it is switched off" if schedule.is_disabled else "none of them serves it"
        schedulers = counted(schedule.schedulers, "scheduler")
        return about(
            "NOT_SERVED",
            f"A slot of schedule {name} has been due for {late}; {schedulers} connected, but "
            f"{off}." + (f" It was stored by {schedule.owner}." if schedule.owner else ""),
            subjects=[schedule.owner or ""],
            remedy=f"start a scheduler of {schedule.owner or 'its application'}, or enable the "
            "schedule there",
        )
    text = f"A slot of schedule {name} has been due for {late}; a scheduler will fire it on its next tick."
    level = Level.YELLOW if late_seconds > OVERDUE_SECONDS else Level.GREEN
    return about("SHOULD_FIRE_NOW", text, level=level, subjects=[name])


def _skipped(schedule: ScheduleFacts) -> Iterator[Finding]:
    if schedule.skip_reason is None or schedule.skipped_at is None:
        return
    code = f"SKIPPED_{schedule.skip_reason}"
    yield finding(
        code,
        f"Slots until {between(schedule.skipped_at, schedule.looked_at)} ago were skipped: "
        f"{CATALOGUE[code].clause}.",
        since=schedule.skipped_at,
        subjects=[schedule.name],
    )


def schedule_holds(schedule: ScheduleFacts) -> list[str]:
    holds = []
    if schedule.paused_at is None:
        holds.append("It is not paused.")
    if schedule.schedulers:
        are = "is" if schedule.schedulers == 1 else "are"
        holds.append(f"{counted(schedule.schedulers, 'scheduler')} {are} connected.")
    if schedule.unfinished_id is None:
        holds.append("It has no unfinished task or run.")
    return holds
