"""The checks of the soak run find what they are there to find, and excuse only what a fault explains."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.soak.checks import CHECKS, violations
from tests.soak.evidence import Condemned, Evidence, Window
from tests.soak.limits import LOST_AFTER_SECONDS, SCHEDULES
from tests.soak.plan import ONE_WORKER, Kind, make_plan

START = datetime(2026, 1, 1, tzinfo=UTC)
WORKER = "worker-0.0"
OTHER = "worker-1.0"


def moment(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def add_task(evidence: Evidence, task_id: str, **columns: Any) -> None:
    """A task that was sent, ran once on the first worker from second 10 to 11, and is recorded."""
    row = {
        "id": task_id,
        "task_name": "work_once",
        "status": "COMPLETED",
        "error_code": None,
        "result": '{"ok": 8}',
        "retry_count": 0,
        "created_at": moment(9),
        "schedule_name": None,
        "scheduled_for": None,
    }
    attempt = {
        "task_id": task_id,
        "attempt": 1,
        "will_retry": False,
        "error_code": None,
        "started_at": moment(10),
        "finished_at": moment(11),
        "worker_id": "id-of-worker",
    }
    begin = {
        "task_id": task_id,
        "attempt": 1,
        "other": None,
        "at": 10.0,
        "worker": WORKER,
        "pid": 7,
    }
    evidence.tasks[task_id] = SimpleNamespace(**row | columns)
    evidence.attempts[task_id].append(SimpleNamespace(**attempt))
    evidence.transitions[task_id] += ["RUNNING", "COMPLETED"]
    evidence.begins.append(begin)
    evidence.ends[task_id, 1] = {"value": 8}


def sound() -> Evidence:
    """A run without violations: one task, one run, a few slots of every schedule."""
    evidence = Evidence(clock_offset=START.timestamp())
    evidence.worker_names["id-of-worker"] = WORKER
    add_task(evidence, "sent")
    evidence.sent.append({"task_id": "sent", "answer": 8, "key": "k", "delay": 1})
    evidence.runs["run"] = SimpleNamespace(
        id="run", name="chain", status="COMPLETED", error=None, result='{"ok": 3}'
    )
    evidence.started.append({"run_id": "run", "answer": 3})
    for name, (seconds, _) in SCHEDULES.items():
        for place in range(4):
            at = moment(place * seconds)
            add_task(
                evidence, f"{name} {place}", schedule_name=name, scheduled_for=at, created_at=at
            )
        evidence.next_slots[name] = moment(4 * seconds)
    return evidence


def crash(evidence: Evidence) -> None:
    (attempt,) = evidence.attempts["sent"]
    attempt.error_code = "WORKER_CRASHED"
    evidence.tasks["sent"].status = "FAILED"
    evidence.tasks["sent"].error_code = "WORKER_CRASHED"
    evidence.transitions["sent"] = ["RUNNING", "FAILED"]


def crowd(evidence: Evidence) -> None:
    evidence.crowded.append(
        {"at": 10.0, "worker": OTHER, "holders": [WORKER], "place": 2, "cap": 1, "slots": "narrow"}
    )


def freeze(evidence: Evidence) -> None:
    evidence.signs[WORKER] = [0.0]
    evidence.watched_until = 200.0


DAMAGE: dict[str, list[Callable[[Evidence], object]]] = {
    "tasks and runs lost": [
        lambda evidence: evidence.tasks.pop("sent"),
        lambda evidence: evidence.runs.pop("run"),
        lambda evidence: setattr(evidence.tasks["sent"], "status", "PENDING"),
        lambda evidence: setattr(evidence.runs["run"], "status", "RUNNING"),
    ],
    "recorded or run twice": [
        lambda evidence: evidence.transitions["sent"].append("COMPLETED"),
        lambda evidence: evidence.attempts["sent"].append(evidence.attempts["sent"][0]),
        lambda evidence: evidence.begins.append(evidence.begins[0]),
    ],
    "results that disagree": [
        lambda evidence: setattr(evidence.tasks["sent"], "result", '{"ok": 9}'),
        lambda evidence: evidence.ends.pop(("sent", 1)),
        lambda evidence: setattr(evidence.tasks["sent"], "status", "FAILED"),
        lambda evidence: setattr(evidence.runs["run"], "result", '{"ok": 4}'),
    ],
    "attempts lost without a fault": [crash],
    "forbidden overlaps": [lambda evidence: evidence.begins[0].update(other=WORKER)],
    "breached caps": [crowd],
    "schedules": [
        lambda evidence: evidence.tasks.pop("every second 1"),
        lambda evidence: setattr(
            evidence.tasks["latest only 1"],
            "scheduled_for",
            evidence.tasks["latest only 2"].created_at,
        ),
        lambda evidence: setattr(evidence.tasks["every second 1"], "created_at", moment(0)),
    ],
    "idempotency keys": [
        lambda evidence: evidence.sent.append(
            {"task_id": "every second 1", "answer": 8, "key": "k"}
        )
    ],
    "early starts": [lambda evidence: evidence.sent[0].update(delay=2)],
    "living workers declared lost": [
        lambda evidence: evidence.condemned.append(Condemned(WORKER, OTHER, 10.0))
    ],
    "workers frozen": [freeze],
    "tasks held up by refused ones": [
        lambda evidence: evidence.common.append(Window(Kind.REFUSE_TASKS, 100.0, 200.0))
    ],
}


def test_a_sound_run_has_no_violations() -> None:
    assert not any(violations(sound()).values())


@pytest.mark.parametrize(
    ("name", "damage"), [(name, one) for name, several in DAMAGE.items() for one in several]
)
def test_every_damage_is_found(name: str, damage: Callable[[Evidence], object]) -> None:
    evidence = sound()
    damage(evidence)
    assert list(CHECKS[name](evidence))


def test_every_check_has_a_damage() -> None:
    assert DAMAGE.keys() == CHECKS.keys()


# The first worker was out of touch for longer than allowed until second 9.5, or only for a moment.
LONG = Window(Kind.CUT_WORKER, 9.5 - LOST_AFTER_SECONDS, 9.5)
SHORT = Window(Kind.CUT_WORKER, 8.5, 9.5)
KILLED = Window(Kind.KILL_CHILD, 10.5, 10.5)
EXCUSABLE = ("forbidden overlaps", "breached caps", "living workers declared lost")


@pytest.mark.parametrize(("window", "is_excused"), [(LONG, True), (SHORT, False), (KILLED, False)])
@pytest.mark.parametrize("name", EXCUSABLE)
def test_only_a_long_absence_excuses_a_takeover(
    name: str, window: Window, is_excused: bool
) -> None:
    evidence = sound()
    DAMAGE[name][0](evidence)
    evidence.faults[WORKER].append(window)
    assert bool(list(CHECKS[name](evidence))) is not is_excused


@pytest.mark.parametrize(("window", "is_excused"), [(LONG, True), (SHORT, False), (KILLED, True)])
def test_a_lost_attempt_needs_a_death_or_a_long_absence(window: Window, is_excused: bool) -> None:
    evidence = sound()
    crash(evidence)
    evidence.faults[WORKER].append(window)
    found = list(CHECKS["attempts lost without a fault"](evidence))
    assert bool(found) is not is_excused


def test_a_worker_that_has_ended_may_be_declared_lost() -> None:
    evidence = sound()
    evidence.condemned.append(Condemned(WORKER, OTHER, 10.0))
    evidence.ended_at[WORKER] = 9.5
    assert not list(CHECKS["living workers declared lost"](evidence))


def test_a_dead_worker_loses_its_claims() -> None:
    evidence = sound()
    crash(evidence)
    evidence.killed_at[WORKER] = 5.0
    assert not list(CHECKS["attempts lost without a fault"](evidence))


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_kind_and_leaves_a_worker(seed: int) -> None:
    plan = make_plan(seed, 120.0)
    assert {fault.kind for fault in plan} == set(Kind)
    assert plan == make_plan(seed, 120.0)
    for fault in plan:
        hit = {
            one.target
            for one in plan
            if one.kind in ONE_WORKER and one.at <= fault.at <= one.at + one.seconds
        }
        assert len(hit) < 3
