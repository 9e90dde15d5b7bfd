"""The checks of a soak run: each compares the journal with the tables and yields its violations."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from tests.soak.evidence import Evidence, Row, quiet_spans
from tests.soak.limits import FROZEN_SECONDS, SCHEDULES, STILL_SECONDS
from tests.soak.plan import Kind

TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}
CRASHED = "WORKER_CRASHED"
# Only these tasks have no retries after a crash.
MAY_FAIL = ("work_once", "blink")


def value_of(result: str | None) -> Any:
    """The value in the stored result of a task that succeeded."""
    return json.loads(result or "null").get("ok")


def lost(evidence: Evidence) -> Iterator[str]:
    """Every acknowledged send is in the table, and every task and run has ended."""
    for entry in evidence.sent:
        if entry["task_id"] not in evidence.tasks:
            yield f"task {entry['task_id']} was acknowledged and is not in the table: {entry}"
    for row in evidence.tasks.values():
        if row.status not in TERMINAL:
            yield f"task {row.id} ({row.task_name}) is still {row.status}"
    for entry in evidence.started:
        if entry["run_id"] not in evidence.runs:
            yield f"run {entry['run_id']} was acknowledged and is not in the table: {entry}"
    for run in evidence.runs.values():
        if run.status not in TERMINAL:
            yield f"run {run.id} ({run.name}) is still {run.status}"


def recorded_twice(evidence: Evidence) -> Iterator[str]:
    """Every task ended once, with one final attempt, and no attempt has two executions."""
    for row in evidence.tasks.values():
        path = evidence.transitions.get(row.id, [])
        if row.status in TERMINAL and [one in TERMINAL for one in path].count(True) != 1:
            yield f"task {row.id} ({row.task_name}) did not end once: {path}"
        attempts = evidence.attempts.get(row.id, [])
        numbers = [one.attempt for one in attempts]
        finals = [one.attempt for one in attempts if not one.will_retry]
        if numbers != list(range(1, len(numbers) + 1)) or len(finals) > 1:
            yield f"task {row.id} ({row.task_name}) has attempts {numbers}, final: {finals}"
    executions = Counter((entry["task_id"], entry["attempt"]) for entry in evidence.begins)
    for (task_id, attempt), count in executions.items():
        if count > 1:
            yield f"attempt {attempt} of task {task_id} began {count} times"


def wrong_results(evidence: Evidence) -> Iterator[str]:
    """Results are those the journal has, and those that were expected."""
    answers = {entry["task_id"]: entry["answer"] for entry in evidence.sent}
    for row in evidence.tasks.values():
        if row.status == "COMPLETED":
            yield from _wrong_completed(evidence, row, answers.get(row.id))
        elif row.task_name not in MAY_FAIL or row.error_code != CRASHED:
            yield f"task {row.id} ({row.task_name}) is {row.status} with {row.error_code}"
    for entry in evidence.started:
        run = evidence.runs.get(entry["run_id"])
        if run is None or run.status not in TERMINAL:
            continue
        if run.status != "COMPLETED" or value_of(run.result) != entry["answer"]:
            answer = f"expected COMPLETED with {entry['answer']}"
            yield f"run {run.id} ({run.name}) is {run.status} with {run.result or run.error}; {answer}"


def _wrong_completed(evidence: Evidence, row: Row, answer: Any) -> Iterator[str]:
    value, last = value_of(row.result), row.retry_count + 1
    end = evidence.ends.get((row.id, last))
    if not row.task_name.startswith("horsies.") and (end is None or end["value"] != value):
        yield f"task {row.id} ({row.task_name}) has {value} for attempt {last}; journal: {end}"
    if answer is not None and value != answer:
        yield f"task {row.id} ({row.task_name}) has {value}, expected {answer}"


def unexcused_crashes(evidence: Evidence) -> Iterator[str]:
    """An attempt is lost only with its process, or with a worker that was out of touch for long."""
    for attempts in evidence.attempts.values():
        for row in attempts:
            if row.error_code != CRASHED:
                continue
            worker = evidence.worker_names.get(row.worker_id, str(row.worker_id))
            began, recorded = map(evidence.monotonic, (row.started_at, row.finished_at))
            if evidence.may_have_crashed(worker, began, recorded):
                continue
            if row.task_id in evidence.given_up or evidence.was_harmed(row.task_id, row.attempt):
                continue
            end = evidence.ends.get((row.task_id, row.attempt))
            what = "the finished result" if end else "an attempt"
            spans = f"began {began:.1f}, recorded {recorded:.1f}"
            near = evidence.faults_near(worker, recorded)
            yield f"{what} of task {row.task_id} was lost on {worker}: {spans}; {near}"


def overlaps(evidence: Evidence) -> Iterator[str]:
    """No task runs twice at once, unless the first worker was out of touch for too long."""
    for entry in evidence.begins:
        other = entry["other"]
        if other is not None and not evidence.may_be_lost(other, entry["at"]):
            near = evidence.faults_near(other, entry["at"])
            yield f"task {entry['task_id']} ran on {other} when it began: {entry}; {near}"


def breached_caps(evidence: Evidence) -> Iterator[str]:
    """No more tasks run than a cap allows, unless a holder was out of touch for too long."""
    for entry in evidence.crowded:
        involved = {entry["worker"], *entry["holders"]}
        if not any(evidence.may_be_lost(worker, entry["at"]) for worker in involved):
            near = "; ".join(evidence.faults_near(one, entry["at"]) for one in sorted(involved))
            yield f"{entry['place']} tasks in {entry['slots']}, cap {entry['cap']}: {entry}; {near}"


def broken_schedules(evidence: Evidence) -> Iterator[str]:
    """Every slot was sent once, none early, and none is missing where missed slots are sent later."""
    slots = defaultdict(list)
    for row in evidence.tasks.values():
        if row.schedule_name is not None:
            slots[row.schedule_name].append(row.scheduled_for.astimezone(UTC))
            if row.created_at < row.scheduled_for:
                yield f"slot {row.scheduled_for} of {row.schedule_name!r} was sent early"
    for name, (seconds, catches_up) in SCHEDULES.items():
        found, step = sorted(slots[name]), timedelta(seconds=seconds)
        if len(found) < 3:
            yield f"{name!r} sent only {len(found)} slots"
            continue
        for slot, count in Counter(found).items():
            if count > 1:
                yield f"slot {slot} of {name!r} was sent {count} times"
        number = round((evidence.next_slots[name] - found[0]) / step)
        wanted = {found[0] + place * step for place in range(number)}
        missing = [one for one in sorted(wanted - set(found)) if not _may_be_refused(evidence, one)]
        unknown = sorted(set(found) - wanted)
        if unknown or (missing and catches_up):
            yield f"{name!r}: missing {missing[:5]}, not on its pattern {unknown[:5]}"


def _may_be_refused(evidence: Evidence, slot: datetime) -> bool:
    """Whether the database refused tasks when this slot was due: a scheduler drops a slot that it refuses."""
    at = evidence.monotonic(slot)
    windows = [one for one in evidence.common if one.kind is Kind.REFUSE_TASKS]
    return any(one.began - 2.0 <= at <= one.until + 2.0 for one in windows)


def split_keys(evidence: Evidence) -> Iterator[str]:
    """All sends with one idempotency key got one task."""
    ids = defaultdict(set)
    for entry in evidence.sent:
        if "key" in entry:
            ids[entry["key"]].add(entry["task_id"])
    for key, task_ids in ids.items():
        if len(task_ids) > 1:
            yield f"the key {key!r} has tasks {sorted(task_ids)}"


def early_starts(evidence: Evidence) -> Iterator[str]:
    """A delayed task starts after its delay."""
    for entry in evidence.sent:
        row = evidence.tasks.get(entry["task_id"])
        attempts = evidence.attempts.get(entry["task_id"])
        if "delay" not in entry or row is None or not attempts:
            continue
        waited = (attempts[0].started_at - row.created_at).total_seconds()
        if waited < entry["delay"] - 0.05:
            yield f"task {row.id} started after {waited:.2f} of {entry['delay']} s"


def wrongly_condemned(evidence: Evidence) -> Iterator[str]:
    """A worker is declared lost only after its death, or when it was out of touch for too long."""
    for one in evidence.condemned:
        ends = (evidence.killed_at.get(one.worker), evidence.ended_at.get(one.worker))
        is_dead = any(end is not None and end <= one.at + 0.1 for end in ends)
        if not is_dead and not evidence.may_be_lost(one.worker, one.at):
            near = evidence.faults_near(one.worker, one.at)
            yield f"{one.observer} declared {one.worker} lost at {one.at:.1f}, which lived; {near}"


def frozen(evidence: Evidence) -> Iterator[str]:
    """A worker that lives and is not hit by a fault writes that it lives."""
    for worker, signs in evidence.signs.items():
        ends = (evidence.killed_at.get(worker), evidence.stopped_at.get(worker))
        end = min((one for one in ends if one is not None), default=evidence.watched_until)
        for began, until in pairwise([*(one for one in signs if one < end), end]):
            quiet = evidence.quiet_seconds(worker, began, until)
            if quiet > FROZEN_SECONDS:
                span = f"from {began:.1f} to {until:.1f}, {quiet:.1f} s of it without a fault"
                yield f"{worker} gave no sign of life {span}"


def stood_still(evidence: Evidence) -> Iterator[str]:
    """While the database refuses some tasks, others end."""
    ends = [
        evidence.monotonic(row.finished_at)
        for attempts in evidence.attempts.values()
        for row in attempts
    ]
    for refusal in evidence.common:
        if refusal.kind is not Kind.REFUSE_TASKS:
            continue
        others = [one for one in evidence.common if one is not refusal]
        for began, until in quiet_spans(refusal.began, refusal.until, others):
            if until - began > STILL_SECONDS and not any(began <= one <= until for one in ends):
                yield f"no task ended from {began:.1f} to {until:.1f}, while some were refused"


CHECKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "tasks and runs lost": lost,
    "recorded or run twice": recorded_twice,
    "results that disagree": wrong_results,
    "attempts lost without a fault": unexcused_crashes,
    "forbidden overlaps": overlaps,
    "breached caps": breached_caps,
    "schedules": broken_schedules,
    "idempotency keys": split_keys,
    "early starts": early_starts,
    "living workers declared lost": wrongly_condemned,
    "workers frozen": frozen,
    "tasks held up by refused ones": stood_still,
}


def violations(evidence: Evidence) -> dict[str, list[str]]:
    """The violations of every check."""
    return {name: list(check(evidence)) for name, check in CHECKS.items()}
