"""Reasons: tables of facts, and the codes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from horsies.db.statements.doctor import Loss, Silencer
from horsies.db.statements.explain import (
    Ahead,
    DueCount,
    Knowledge,
    LastServer,
    MapPlace,
    Meter,
    NewestStart,
    NodeFacts,
    OpenTransaction,
    Place,
    RunFacts,
    ScheduleFacts,
    TaskFacts,
)
from horsies.db.statements.keys import KeyState
from horsies.db.statements.measures import FailingTask
from horsies.db.statements.monitor import WorkerSummary
from horsies.db.statements.refusals import RefusedCalls
from horsies.findings import CATALOGUE, Finding, obstacles_first
from horsies.monitor.diagnose.queues import (
    QueueSituation,
    missing_reason,
    queue_reasons,
    stalled_reasons,
)
from horsies.monitor.diagnose.runs import node_reasons, run_reasons, schedule_reasons
from horsies.monitor.diagnose.schema import silent_triggers
from horsies.monitor.diagnose.tasks import TaskSituation, task_reasons
from horsies.monitor.diagnose.work import (
    judge_failing,
    judge_losses,
    judge_retrying,
    judge_webhooks,
    worker_reasons,
)
from horsies.retry import IN_A_STEP
from horsies.tasks.outcome import RETURNED_TO_QUEUE, TOO_LATE
from tests.support.worker_summaries import worker_summary

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
ID = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a"
RUN = "01a1dd42-0000-74ac-a8e3-bab50b3dfa8b"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def blank(row_type: Any, **columns: Any) -> Any:
    """Return a row with these columns and None elsewhere."""
    return row_type(**dict.fromkeys(row_type._fields) | columns)


def task(**columns: Any) -> TaskFacts:
    facts = {
        "id": ID,
        "task_name": "charge",
        "queue_name": "mail",
        "status": "PENDING",
        "priority": 100,
        "retry_count": 0,
        "max_retries": 0,
        "held": False,
        "enqueued_at": ago(2),
        "is_parked": False,
        "ended_at": ago(1),
        "owner_is_known": True,
        "node_id": "step",
        "signal_name": "approve",
        "blocked_error": "22012",
        "last_hostname": "vm",
        "looked_at": NOW,
    }
    made: TaskFacts = blank(TaskFacts, **facts | columns)
    return made


def worker(worker_id: str = "w1", **columns: Any) -> WorkerSummary:
    return worker_summary(worker_id=worker_id, **{"queue_caps": {}} | columns)


def sharing(**columns: Any) -> WorkerSummary:
    return worker(**{"processes": 10, "async_places": 8} | columns)


def knowing(worker_id: str = "w1", **columns: Any) -> Knowledge:
    facts: dict[str, Any] = {"knows_task": True, "fingerprint": "a"}
    return Knowledge(worker_id, **facts | columns)


def queue(workers: Sequence[WorkerSummary] = (worker(),), **columns: Any) -> QueueSituation:
    known = columns.pop("known", [knowing(one.worker_id) for one in workers])
    by_id = {one.worker_id: one for one in known}
    return QueueSituation("mail", NOW, workers=workers, knowledge=by_id, **columns)


def place(number: int = 1, **columns: Any) -> Place:
    facts: dict[str, Any] = {
        "queue_name": "mail",
        "claimed_at": ago(540),
        "in_queue": 1,
        "in_cluster": 1,
    }
    return Place(**{"id": f"task-{number}"} | facts | columns)


def due(name: str = "mail", **columns: Any) -> DueCount:
    facts: dict[str, Any] = {
        "due": 0,
        "delayed": 0,
        "first_at": None,
        "is_stored": False,
        "paused_at": None,
    }
    return DueCount(**{"name": name} | facts | columns)


def refused(queue_name: str = "mail", **columns: Any) -> RefusedCalls:
    facts: dict[str, Any] = {"is_known": True, "tasks": 1, "since": ago(9), "message": "No. Do."}
    return RefusedCalls(queue_name, "charge", **facts | columns)


def keyed(**columns: Any) -> dict[str, Any]:
    """A task with a key, the state of that key, and the tasks of it that start first."""
    ahead = Ahead(columns.pop("before", 0), keys=1)
    free = {"queue_name": "mail", "key": "acme", "due": 5, "in_flight": 0, "weight": 1.0}
    state = free | {"is_fifo": False, "halts": False, "is_own": False} | columns
    of_key = blank(KeyState, **state)
    return {"held": True, "lane_key": "acme", "lane": 7, "of_key": of_key, "ahead": ahead}


def waits(place: QueueSituation | None = None, /, **columns: Any) -> TaskSituation:
    extra: dict[str, Any] = {
        name: columns.pop(name)
        for name in ("ahead", "holder", "map_places", "per_minute", "transaction")
        if name in columns
    }
    if (of_key := columns.pop("of_key", None)) is not None:
        extra["lane"] = of_key
    return TaskSituation(task(**columns), place or queue(), **extra)


HELD = {"held": True, "workflow_id": RUN, "run_name": "orders", "run_paused_at": ago(60)}
PARKED: dict[str, Any] = {"parked_signals": ["go"], "parked_children": ["c1"]}
ITEM = {"is_parked": True, "item_index": 30, "items_total": 50, "max_parallel": 10}
LATER = datetime(9999, 1, 1, tzinfo=UTC)
RUNNING = {"status": "RUNNING", "worker_id": "w1", "worker_pid": 9, "started_at": ago(240)}
CLAIMED = {"status": "CLAIMED", "worker_id": "w1", "claimed_at": ago(2)}
FAILED = {"status": "FAILED", "error_code": "BROKE", "max_retries": 3}
OWN = OpenTransaction(812, "horsies:child-tx", "idle in transaction", ago(3))
LOST: dict[str, Any] = {"seen_seconds_ago": 60.0, "holds_lock": False}
WAITING = [
    (waits(), ["SHOULD_START_NOW"]),
    (waits(blocked_action="claim", blocked_error="22012"), ["BLOCKED"]),
    (waits(**HELD), ["HELD_BY_RUN"]),
    (
        waits(held=True, parked_since=ago(9), parked_problem="DURABLE_MISMATCH: no."),
        ["HELD_BY_RECORD"],
    ),
    (
        waits(
            parked_since=ago(9),
            parked_problem="DURABLE_MISMATCH: no.",
            next_retry_at=LATER,
            **keyed(is_fifo=True),
        ),
        ["HELD_BY_RECORD"],
    ),
    (
        waits(parked_since=ago(9), is_parked=True, next_retry_at=LATER, **PARKED, **keyed()),
        ["PARKED_RUN"],
    ),
    (waits(enqueued_at=LATER, is_parked=True, parked_since=ago(9), **PARKED), ["PARKED_RUN"]),
    (waits(enqueued_at=ago(-60), parked_since=ago(9)), ["PARKED_RUN"]),
    (waits(enqueued_at=LATER, is_parked=True, node_kind="signal"), ["PARKED_SIGNAL"]),
    (waits(enqueued_at=ago(-60), node_kind="signal"), ["PARKED_SIGNAL"]),
    (waits(enqueued_at=LATER, **ITEM, map_places=[MapPlace("i1", "RUNNING")]), ["PARKED_MAP"]),
    (waits(enqueued_at=LATER, is_parked=True), ["SENT_FOR_LATER"]),
    (waits(enqueued_at=ago(-40), node_kind="sleep", node_id="nap"), ["SLEEPS"]),
    (waits(enqueued_at=ago(-40), retry_count=2, max_retries=4), ["RETRY_LATER"]),
    (waits(enqueued_at=ago(-40)), ["SENT_FOR_LATER"]),
    (waits(good_until=ago(12)), ["EXPIRED_UNSWEPT"]),
    (waits(good_until=ago(12), **HELD), ["EXPIRED_UNSWEPT"]),
    (waits(queue(paused_at=ago(60))), ["QUEUE_PAUSED"]),
    (waits(queue(paused_at=ago(60)), enqueued_at=ago(-40)), ["SENT_FOR_LATER", "QUEUE_PAUSED"]),
    (waits(queue([])), ["QUEUE_UNSERVED"]),
    (waits(queue([worker(queues=["other"])])), ["QUEUE_UNSERVED"]),
    (waits(queue([worker(**LOST)])), ["QUEUE_UNSERVED"]),
    (waits(queue(known=[knowing(knows_task=False)])), ["TASK_UNKNOWN"]),
    # A cap keeps back every worker of the queue, also the one that is to be deployed.
    (
        waits(
            queue(
                [worker(queue_caps={"mail": 1}, cluster_wide_cap=1, tasks_running=2)],
                known=[knowing(knows_task=False)],
                places=[place()],
            )
        ),
        ["TASK_UNKNOWN", "QUEUE_CAP", "CLUSTER_CAP"],
    ),
    (
        waits(queue([worker(), worker("w2")], known=[knowing(), knowing("w2", fingerprint="b")])),
        ["PARAMETERS_DIFFER", "SHOULD_START_NOW"],
    ),
    (waits(queue(known=[knowing(refusal="no")])), ["CALL_DOES_NOT_FIT"]),
    (waits(queue(known=[knowing(refusal="no", missing_key="k1")])), ["PAYLOAD_UNREADABLE"]),
    (
        waits(
            queue(
                [worker(), worker("w2")],
                known=[knowing(refusal="no"), knowing("w2", fingerprint="b")],
            )
        ),
        ["PARAMETERS_DIFFER", "SHOULD_START_NOW"],
    ),
    (
        waits(
            queue(
                [worker(), worker("w2")],
                known=[knowing(refusal="no"), knowing("w2", fingerprint="b", refusal="no")],
            )
        ),
        ["CALL_DOES_NOT_FIT", "PARAMETERS_DIFFER"],
    ),
    (waits(queue([worker(queue_caps={"mail": 0})])), ["QUEUE_CAP_ZERO"]),
    (waits(queue([worker(queue_caps={"mail": 0})]), **HELD), ["HELD_BY_RUN", "QUEUE_CAP_ZERO"]),
    (
        waits(queue([worker(queue_caps={"mail": 0})]), enqueued_at=ago(-40)),
        ["SENT_FOR_LATER", "QUEUE_CAP_ZERO"],
    ),
    (waits(queue([worker(queue_caps={"mail": 1})], places=[place()])), ["QUEUE_CAP"]),
    (waits(queue([worker(queue_caps={"mail": 2})], places=[place()])), ["SHOULD_START_NOW"]),
    (waits(queue(meter=Meter(ago(-5), 60.0))), ["QUEUE_RATE"]),
    (waits(queue(meter=Meter(ago(1), 60.0))), ["SHOULD_START_NOW"]),
    (waits(**keyed()), ["SHOULD_START_NOW"]),
    (waits(**keyed(in_flight=1, max_concurrency=2)), ["SHOULD_START_NOW"]),
    (waits(**keyed(in_flight=2, max_concurrency=2)), ["KEY_CAP"]),
    (waits(**keyed(starts_at=ago(-3))), ["KEY_RATE"]),
    (waits(**keyed(starts_at=ago(3))), ["SHOULD_START_NOW"]),
    (waits(**keyed(before=4)), ["BEHIND"]),
    (waits(**keyed(before=4, is_fifo=True)), ["KEY_ORDER"]),
    (waits(**keyed(paused_at=ago(9))), ["KEY_PAUSED"]),
    (waits(**keyed(paused_at=ago(9), pause_reason=f"task {ID} failed: DOWN")), ["KEY_PAUSED"]),
    (
        waits(**keyed(paused_at=ago(9), pause_reason=f"task {ID} failed: DOWN", halts=True)),
        ["KEY_HALTED"],
    ),
    (waits(**keyed(paused_at=ago(9), halts=True)), ["KEY_PAUSED"]),
    # Places that are taken now may be free by then.
    (
        waits(**keyed(in_flight=2, max_concurrency=2), enqueued_at=ago(-40)),
        ["SENT_FOR_LATER"],
    ),
    (
        waits(queue([worker(cluster_wide_cap=1)], places=[place(queue_name="x", in_queue=0)])),
        ["CLUSTER_CAP"],
    ),
    (
        waits(
            queue([worker(queue_caps={"mail": 1}), worker("w2", queue_caps={})], places=[place()])
        ),
        ["CAPS_DISAGREE", "SHOULD_START_NOW"],
    ),
    # A worker without a snapshot may have any cap.
    (
        waits(
            queue([worker(queue_caps={"mail": 1}), worker("w2", queue_caps=None)], places=[place()])
        ),
        ["SHOULD_START_NOW"],
    ),
    (waits(queue([worker(tasks_running=2)])), ["CHILDREN_BUSY"]),
    (waits(queue([worker(tasks_running=2), worker("w2")])), ["SHOULD_START_NOW"]),
    # Ten places, of which eight are for `async def` tasks.
    (waits(queue([sharing(tasks_running=2)])), ["CHILDREN_BUSY"]),
    (waits(queue([sharing(tasks_running=2)]), is_async=True), ["SHOULD_START_NOW"]),
    (waits(queue([sharing(tasks_running=8, async_running=8)])), ["SHOULD_START_NOW"]),
    (waits(queue([sharing(tasks_running=8, async_running=8)]), is_async=True), ["CHILDREN_BUSY"]),
    (waits(ahead=Ahead(3)), ["BEHIND"]),
    (waits(ahead=Ahead(0)), ["SHOULD_START_NOW"]),
    (waits(queue(others=[due("pay", due=5)])), ["BETTER_QUEUES_FIRST", "SHOULD_START_NOW"]),
    (waits(queue(others=[due("pay", due=5, paused_at=NOW)])), ["SHOULD_START_NOW"]),
    (waits(queue([worker(hears=False)])), ["WORKERS_POLL", "SHOULD_START_NOW"]),
    (waits(holder=OpenTransaction(811, "psql", "idle in transaction", ago(240))), ["ROW_LOCKED"]),
    (waits(holder=OpenTransaction(None, None, None, None)), ["ROW_LOCKED"]),
    (
        waits(last_outcome="WORKER_FAILURE", last_finished_at=ago(20)),
        ["WORKER_LOST_RECENTLY", "SHOULD_START_NOW"],
    ),
    (waits(last_outcome="WORKER_FAILURE", last_finished_at=ago(2_000)), ["SHOULD_START_NOW"]),
    (
        waits(
            last_outcome="WORKER_FAILURE", last_finished_at=ago(20), retry_reason=RETURNED_TO_QUEUE
        ),
        ["RETURNED", "SHOULD_START_NOW"],
    ),
    (
        waits(queue([], paused_at=ago(9)), **HELD, ahead=Ahead(9)),
        ["HELD_BY_RUN", "QUEUE_PAUSED", "QUEUE_UNSERVED"],
    ),
]
OTHERS = [
    (waits(**CLAIMED, claim_expires_at=ago(-50)), ["PREFETCHED"]),
    (waits(**CLAIMED, claim_expires_at=ago(1)), ["LEASE_LAPSED"]),
    (
        waits(
            queue([worker(seen_seconds_ago=60.0, tasks_claimed=1)]),
            **CLAIMED,
            claim_expires_at=ago(-50),
        ),
        ["SILENT", "PREFETCHED"],
    ),
    (waits(queue([worker(**LOST)]), **CLAIMED, claim_expires_at=ago(-50)), ["CLAIMER_LOST"]),
    (waits(**RUNNING), ["RUNS"]),
    (waits(**RUNNING, transaction=OWN), ["RUNS", "IN_TRANSACTION"]),
    (waits(**RUNNING, transaction=OWN, holder=OWN), ["RUNS", "IN_TRANSACTION"]),
    (waits(queue([worker(**LOST)]), **RUNNING, transaction=OWN), ["RUNNER_LOST", "IN_TRANSACTION"]),
    (
        waits(**RUNNING, transaction=OWN, holder=OpenTransaction(811, "psql", None, None)),
        ["RUNS", "IN_TRANSACTION", "ROW_LOCKED"],
    ),
    (waits(**RUNNING, cancel_requested_at=ago(3)), ["STOPPING", "RUNS"]),
    (waits(queue([worker(**LOST)]), **RUNNING), ["RUNNER_LOST"]),
    (waits(queue([]), **RUNNING, owner_stopped_at=ago(9)), ["RUNNER_LOST"]),
    (waits(queue([]), **RUNNING | {"owner_is_known": False}), ["RUNNER_LOST"]),
    (waits(queue([worker(seen_seconds_ago=60.0, tasks_running=1)]), **RUNNING), ["SILENT", "RUNS"]),
    (waits(**RUNNING, timeout_ms=1_000), ["OVER_LIMIT", "RUNS"]),
    (waits(**RUNNING, timeout_ms=1_000_000), ["RUNS"]),
    (waits(**{**RUNNING, "started_at": ago(301)}), ["NO_HEARTBEAT", "RUNS"]),
    (waits(**{**RUNNING, "started_at": ago(301)}, heartbeat_at=ago(9)), ["RUNS"]),
    (
        waits(**RUNNING, blocked_action="record", holder=OpenTransaction(1, None, None, None)),
        ["BLOCKED", "RUNS", "ROW_LOCKED"],
    ),
    (waits(status="COMPLETED"), ["ENDED"]),
    (waits(status="CANCELLED"), ["ENDED"]),
    (waits(status="EXPIRED"), ["ENDED"]),
    (waits(**FAILED), ["ENDED", "NOT_RETRIED_NO_POLICY"]),
    (
        waits(**FAILED, retry_reason="not retried: max_retries=3 is reached"),
        ["ENDED", "NOT_RETRIED_USED_UP"],
    ),
    (
        waits(**FAILED, retry_reason="not retried: code X is not listed in auto_retry_for"),
        ["ENDED", "NOT_RETRIED_UNLISTED"],
    ),
    (
        waits(**FAILED, retry_reason=f"not retried: code X is recorded; list it {IN_A_STEP}"),
        ["ENDED", "NOT_RETRIED_STEP"],
    ),
    (
        waits(**FAILED, retry_reason="not retried: the task has no retry policy"),
        ["ENDED", "NOT_RETRIED_NO_POLICY"],
    ),
    (waits(**FAILED, retry_reason=TOO_LATE), ["ENDED", "NOT_RETRIED_TOO_LATE"]),
    (
        waits(**FAILED, retry_reason=TOO_LATE, cancel_requested_at=ago(1)),
        ["ENDED", "NOT_RETRIED_CANCELLED"],
    ),
]


class Backlog(NamedTuple):
    """The waiting tasks of a queue, and the names among them that no worker knows."""

    waiting: DueCount
    unknown_names: Sequence[str] = ()

    def of(self, situation: QueueSituation) -> QueueSituation:
        return replace(situation, waiting=self.waiting, unknown_names=self.unknown_names)


def codes(reasons: Sequence[Finding]) -> list[str]:
    return [one.code for one in reasons]


@pytest.mark.parametrize(("situation", "expected"), [*WAITING, *OTHERS])
def test_the_state_of_a_task_has_these_reasons(
    situation: TaskSituation, expected: list[str]
) -> None:
    reasons = task_reasons(situation)
    assert codes(reasons) == expected
    for one in reasons:
        assert one.sentence.endswith(".")
        assert "None" not in one.sentence
        assert one.blocks == CATALOGUE[one.code].blocks


def sentence(situation: TaskSituation, code: str) -> str:
    (found,) = [one for one in task_reasons(situation) if one.code == code]
    return found.sentence


def test_an_end_is_described_by_its_kind_and_time() -> None:
    when = "at 2026-11-15 11:56:00 UTC, 4 min ago"
    ended = {**FAILED, "ended_at": ago(240)}
    assert sentence(waits(**ended), "ENDED") == f"It failed with BROKE {when}."
    completed = waits(status="COMPLETED", ended_at=ago(240))
    assert sentence(completed, "ENDED") == f"It completed {when}."
    (found,) = run_reasons(run(status="CANCELLED", completed_at=ago(240)), [], {})
    assert found.sentence == f"Run orders ended as CANCELLED {when}."
    (found,) = run_reasons(
        run(status="FAILED", completed_at=ago(240), failed_node="charge"), [], {}
    )
    assert found.sentence == (
        f"Run orders ended as FAILED {when}; the first node that failed is charge."
    )


def test_sentences_name_those_in_the_way_and_the_numbers() -> None:
    capped = queue(
        [worker(queue_caps={"mail": 3})], places=[place(in_queue=3), place(2, in_queue=3)]
    )
    assert sentence(waits(capped), "QUEUE_CAP") == (
        "Queue 'mail' runs 3 tasks, and its cap is 3; the oldest, task-1, for 9 min."
    )
    last = LastServer("w0", "pay-1", "vm", 9, ago(10_800), was_lost=True)
    unserved = queue([worker(queues=["x", "y"])], last_server=last)
    assert sentence(waits(unserved), "QUEUE_UNSERVED") == (
        "No live worker serves queue 'mail'; served are: x, y. The last one, pay-1, was lost "
        "3 h ago."
    )
    behind = waits(ahead=Ahead(1_187), per_minute=40.0)
    assert sentence(behind, "BEHIND") == (
        "1,187 tasks are ahead of it in queue 'mail'; at 40 per minute that takes 29 min."
    )
    assert "10,000+ tasks" in sentence(waits(ahead=Ahead(10_001)), "BEHIND")
    grace: dict[str, Any] = {
        "known": [knowing(knows_task=False)],
        "recovery": {"w1": {"unknown_task_grace_ms": 600_000}},
    }
    assert sentence(waits(queue(**grace)), "TASK_UNKNOWN") == (
        "No live worker of queue 'mail' knows task 'charge'; it fails with "
        "WORKER_RESOLUTION_ERROR after 10 min."
    )
    assert "workflow 'sub'" in sentence(waits(queue(**grace), definition_key="sub"), "TASK_UNKNOWN")
    assert sentence(waits(queue(**grace), is_durable=True), "TASK_UNKNOWN") == (
        "No live worker of queue 'mail' knows task 'charge'; it waits for a worker that does, "
        "keeps its recorded steps and uses up no attempt."
    )
    grace["known"] = [knowing(refusal="There is no parameter 'note'. Correct the call.")]
    assert sentence(waits(queue(**grace)), "CALL_DOES_NOT_FIT") == (
        "1 live worker of queue 'mail' cannot run it: There is no parameter 'note'. The task waits for a "
        "worker of another release and fails with WORKER_SERIALIZATION_ERROR after 10 min."
    )
    assert sentence(waits(queue(**grace), has_record=True), "CALL_DOES_NOT_FIT").endswith(
        "The task waits for a worker of another release, keeps its recorded steps and uses up no attempt."
    )
    item = waits(enqueued_at=LATER, **ITEM, node_id="m", map_places=[MapPlace("i1", "RUNNING")])
    assert sentence(item, "PARKED_MAP") == (
        "It is item 31 of 50 of map m, which runs at most 10 at a time; all places are taken: "
        "i1 (RUNNING)."
    )
    locked = waits(holder=OpenTransaction(811, "psql", "idle in transaction", ago(240)))
    assert sentence(locked, "ROW_LOCKED") == (
        "Its row is locked by pid 811 (psql, idle in transaction, transaction open for 4 min); workers "
        "skip it."
    )
    runs = waits(**RUNNING, timeout_ms=1_800_000, heartbeat_at=ago(11), progress_done=3.0)
    assert sentence(runs, "RUNS") == (
        "It has run for 4 min in pid 9 of worker vm pid 7, progress 3, heartbeat 11 s ago, time limit in "
        "26 min."
    )


@pytest.mark.parametrize(
    ("workers", "is_async", "expected"),
    [
        ([sharing(tasks_running=2)], False, "All 2 child processes of 1 worker for"),
        (
            [sharing(tasks_running=8, async_running=8), worker("w2", tasks_running=2)],
            True,
            "All 2 child processes and all 8 places of async children of 2 workers for",
        ),
        ([sharing(processes=8)], False, "have only async children"),
        ([worker(processes=1, tasks_running=1)], True, "The only child process of 1 worker for"),
    ],
)
def test_places_of_async_children_are_told_apart(
    workers: list[WorkerSummary], is_async: bool, expected: str
) -> None:
    assert expected in sentence(waits(queue(workers), is_async=is_async), "CHILDREN_BUSY")


def test_recovery_that_is_switched_off_is_named() -> None:
    off = {"auto_fail_stale_running": False, "auto_requeue_stale_claimed": False}
    lost, other = worker("w1", **LOST), worker("w2")
    silenced = queue([lost, other], recovery={"w2": off})
    (found,) = task_reasons(waits(silenced, **RUNNING))
    assert "auto_fail_stale_running=False" in found.sentence
    assert found.remedy == "app.get_broker().mark_stale_tasks_as_failed()"
    (claimed,) = task_reasons(waits(silenced, **CLAIMED))
    assert claimed.remedy == "app.get_broker().requeue_stale_claimed()"
    (recovered,) = task_reasons(waits(queue([lost, other]), **RUNNING))
    assert "another worker recovers it" in recovered.sentence


WRITER = OpenTransaction(811, "psql", "active", ago(120))
MADE = datetime.fromtimestamp(int(ID.replace("-", "")[:12], 16) / 1000, UTC)


@pytest.mark.parametrize(
    ("row_id", "seconds", "writers", "hours", "expected"),
    [
        (ID, 40, [WRITER], 720, "NOT_FOUND_YET"),
        (ID, 40, [], 720, "NOT_FOUND"),
        (ID, 31 * 86_400, [WRITER], 720, "NOT_FOUND_DELETED"),
        (ID, 31 * 86_400, [], None, "NOT_FOUND"),
        ("8c5e3b1a-1f57-4f2e-9a0b-0d6f6f0b1c11", 40, [WRITER], 720, "NOT_FOUND"),
    ],
)
def test_a_missing_row_is_judged_by_the_time_in_its_id(
    row_id: str, seconds: float, writers: list[OpenTransaction], hours: int | None, expected: str
) -> None:
    looked_at = MADE + timedelta(seconds=seconds)
    assert missing_reason("task", row_id, looked_at, writers, hours).code == expected


def run(**columns: Any) -> RunFacts:
    facts = {
        "id": RUN,
        "name": "orders",
        "status": "RUNNING",
        "open_nodes": 2,
        "total_nodes": 3,
        "failed_nodes": 0,
        "join_type": "all",
        "dependencies": [0, 1],
        "looked_at": NOW,
    }
    made: RunFacts = blank(RunFacts, **facts | columns)
    return made


def node(node_id: str, status: str, **columns: Any) -> NodeFacts:
    facts = {"task_index": 0, "node_id": node_id, "kind": "task", "status": status}
    made: NodeFacts = blank(NodeFacts, **facts | columns)
    return made


PAUSED = {"status": "PAUSED", "paused_at": ago(60)}
DEPENDENCIES = [node("parse", "ENQUEUED", task_status="RUNNING"), node("check", "FAILED")]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (run_reasons(run(), [node("parse", "ENQUEUED")], {}), ["NODE_OPEN"]),
        (run_reasons(run(), [node("parse", "PENDING")], {}), []),
        (run_reasons(run(**PAUSED), [], {}), ["RUN_PAUSED"]),
        (run_reasons(run(blocked_action="advance", blocked_error="x"), [], {}), ["BLOCKED"]),
        (run_reasons(run(status="FAILED", completed_at=ago(9)), [], {}), ["RUN_ENDED"]),
        (
            run_reasons(
                run(),
                [node("a", "ENQUEUED")],
                {"a": task_reasons(waits(queue([]), ahead=Ahead(2)))},
            ),
            ["NODE_OPEN", "QUEUE_UNSERVED"],
        ),
        (node_reasons(run(), node("x", "PENDING"), DEPENDENCIES, ()), ["WAITS_FOR"]),
        (
            node_reasons(run(**PAUSED), node("x", "PENDING"), DEPENDENCIES, ()),
            ["RUN_PAUSED", "WAITS_FOR"],
        ),
        (node_reasons(run(), node("x", "SKIPPED"), DEPENDENCIES, ()), ["NEVER"]),
        (
            node_reasons(run(status="CANCELLED"), node("x", "SKIPPED"), [], ()),
            ["NEVER", "RUN_ENDED"],
        ),
        (node_reasons(run(), node("x", "COMPLETED"), [], ()), ["ENDED"]),
        (
            node_reasons(run(), node("x", "FAILED"), [], task_reasons(waits(**FAILED))),
            ["ENDED", "NOT_RETRIED_NO_POLICY"],
        ),
        (
            node_reasons(
                run(), node("x", "RUNNING", sub_run_id=RUN, sub_run_status="PAUSED"), [], ()
            ),
            ["SUB_RUN_PAUSED"],
        ),
        (
            node_reasons(
                run(), node("x", "RUNNING", sub_run_id=RUN, sub_run_status="RUNNING"), [], ()
            ),
            ["SUB_RUN_OPEN"],
        ),
        (node_reasons(run(), node("x", "RUNNING", kind="map", items_open=3), [], ()), ["MAP_OPEN"]),
        (
            node_reasons(run(), node("x", "ENQUEUED"), [], task_reasons(waits())),
            ["SHOULD_START_NOW"],
        ),
    ],
)
def test_the_state_of_a_run_or_node_has_these_reasons(
    found: list[Finding], expected: list[str]
) -> None:
    assert codes(found) == expected
    assert all("None" not in one.sentence for one in found)


def test_the_run_names_the_failure_that_paused_it_and_the_node_its_dependencies() -> None:
    (paused,) = run_reasons(run(**PAUSED, failed_node="charge", error_code="NO_CARD"), [], {})
    assert paused.sentence == (
        "Run orders was paused 1 min ago because node charge failed with NO_CARD."
    )
    assert paused.remedy == f"horsies workflow resume {RUN} --retry-failed"
    (waiting,) = node_reasons(run(), node("x", "PENDING"), DEPENDENCIES, ())
    assert (
        waiting.sentence == "It waits for all of its dependencies: parse (RUNNING), check (FAILED)."
    )
    assert waiting.subjects == ("parse",)
    quorum = run(join_type="quorum", min_success=2, dependencies=[0, 1, 2])
    (waiting,) = node_reasons(quorum, node("x", "PENDING"), DEPENDENCIES, ())
    assert waiting.sentence == (
        "It waits for 2 of its dependencies: parse (RUNNING), check (FAILED) and 1 more."
    )


def schedule(**columns: Any) -> ScheduleFacts:
    facts = {
        "name": "nightly",
        "owner": "shop:app",
        "next_run_at": ago(5),
        "is_disabled": False,
        "created_at": ago(999),
        "schedulers": 1,
        "looked_at": NOW,
    }
    made: ScheduleFacts = blank(ScheduleFacts, **facts | columns)
    return made


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (schedule(), ["SHOULD_FIRE_NOW"]),
        (schedule(next_run_at=ago(-60)), ["NOT_DUE"]),
        (schedule(next_run_at=None), ["SCHEDULE_ENDED"]),
        (schedule(paused_at=ago(9)), ["PAUSED"]),
        (schedule(paused_at=ago(9), next_run_at=ago(-60)), ["PAUSED", "NOT_DUE"]),
        (schedule(schedulers=0), ["NO_SCHEDULER"]),
        (schedule(schedulers=0, next_run_at=ago(90), unfinished_id=ID), ["NO_SCHEDULER"]),
        (schedule(unfinished_id=ID), ["OVERLAP"]),
        (schedule(next_run_at=ago(90)), ["NOT_SERVED"]),
        (schedule(is_disabled=True), ["NOT_SERVED"]),
        *(
            (
                schedule(next_run_at=ago(-60), skip_reason=why, skipped_at=ago(60)),
                ["NOT_DUE", f"SKIPPED_{why}"],
            )
            for why in ("MISSED", "MISFIRE", "PAUSED", "OVERLAP", "REFUSED")
        ),
    ],
)
def test_the_state_of_a_schedule_has_these_reasons(
    facts: ScheduleFacts, expected: list[str]
) -> None:
    assert codes(schedule_reasons(facts)) == expected


@pytest.mark.parametrize(
    ("situation", "backlog", "expected"),
    [
        (queue(), Backlog(due()), ["QUEUE_EMPTY"]),
        (queue(), Backlog(due(delayed=2, first_at=ago(-9))), ["ALL_DELAYED"]),
        (queue(), Backlog(due(due=2, first_at=ago(9))), ["TASKS_DUE"]),
        (queue(), Backlog(due(due=2), ["charge"]), ["TASK_UNKNOWN", "TASKS_DUE"]),
        (queue(refused=[refused()]), Backlog(due(due=2)), ["CALL_DOES_NOT_FIT", "TASKS_DUE"]),
        (
            queue(refused=[refused(is_known=False)]),
            Backlog(due(due=2)),
            ["TASK_UNKNOWN", "TASKS_DUE"],
        ),
        (queue(refused=[refused("pay")]), Backlog(due(due=2)), ["TASKS_DUE"]),
        (
            queue(others=[due("pay", due=1)], refused=[refused("pay")]),
            Backlog(due(due=2)),
            ["TASKS_DUE"],
        ),
        (queue([], refused=[refused()]), Backlog(due(due=2)), ["QUEUE_UNSERVED", "TASKS_DUE"]),
        (
            queue([worker(queue_caps={"mail": 9})]),
            Backlog(due(due=2)),
            ["TASKS_DUE", "NO_WINDOWS"],
        ),
        (
            queue([worker(queue_caps={}, cluster_wide_cap=9)]),
            Backlog(due(due=2)),
            ["TASKS_DUE", "NO_WINDOWS"],
        ),
        (
            queue([worker(queue_caps={"mail": 9}), worker(queue_caps={})]),
            Backlog(due(due=2)),
            ["CAPS_DISAGREE", "TASKS_DUE"],
        ),
        (queue(), Backlog(due(due=2, first_at=ago(301))), ["QUEUE_STUCK", "TASKS_DUE"]),
        (queue([]), Backlog(due(due=2), ["charge"]), ["QUEUE_UNSERVED", "TASKS_DUE"]),
        (
            queue([worker(tasks_running=2)], paused_at=ago(9)),
            Backlog(due()),
            ["QUEUE_PAUSED", "CHILDREN_BUSY", "QUEUE_EMPTY"],
        ),
    ],
)
def test_the_state_of_a_queue_has_these_reasons(
    situation: QueueSituation, backlog: Backlog, expected: list[str]
) -> None:
    assert codes(queue_reasons(backlog.of(situation))) == expected


@pytest.mark.parametrize(
    ("backlog", "sentence"),
    [
        (due(due=1, first_at=ago(9)), "has 1 due task, the first for 9 s"),
        (due(delayed=2, first_at=ago(-9)), "has 2 delayed tasks, the first for another 9 s"),
    ],
)
def test_the_tasks_of_a_queue_are_counted_with_their_noun(backlog: DueCount, sentence: str) -> None:
    (found,) = queue_reasons(Backlog(backlog).of(queue()))
    assert sentence in found.sentence


def test_silent_triggers_are_named_with_their_place() -> None:
    silencer = Silencer("app", is_of_database=True, is_stored=True, database_name="shop")
    (found,) = silent_triggers([silencer])
    assert (found.code, found.blocks, found.is_sql) == ("TRIGGERS_SILENT", True, True)
    assert "for the role app in the database shop" in found.sentence
    assert found.remedy is not None
    assert found.remedy.startswith('ALTER ROLE "app" IN DATABASE "shop" RESET')
    (everywhere,) = silent_triggers([silencer._replace(role_name=None, is_of_database=False)])
    assert "for every database" in everywhere.sentence
    (own,) = silent_triggers(
        [silencer._replace(role_name=None, is_of_database=False, is_stored=False)]
    )
    assert "for this session" in own.sentence
    assert not own.is_sql


def test_workers_and_failing_tasks_have_findings() -> None:
    lost = worker(seen_seconds_ago=60.0, holds_lock=False)
    assert codes(list(worker_reasons(lost))) == ["WORKER_LOST"]
    assert codes(list(judge_failing([FailingTask("pay", 12, 1.0)]))) == ["TASK_FAILING"]
    storm = FailingTask("pay", 0, 0.0, retries=60, usual_retries=2.0)
    assert codes(list(judge_retrying([storm, storm._replace(retries=49)]))) == ["TASK_RETRYING"]
    (found,) = judge_webhooks([storm._replace(name="horsies.webhook.alerts", failures=2), storm])
    assert found.code == "WEBHOOK_FAILING"
    assert "webhook alerts refused" in found.sentence
    assert "2 deliveries have failed finally" in found.sentence
    loss = Loss("w", "alpha", ago(60), ago(0), ["mail"])
    (found,) = judge_losses([loss])
    assert (found.code, found.evidence) == ("WORKERS_LOST", ("it served mail",))
    (both,) = judge_losses([loss, loss._replace(label="beta")])
    assert both.evidence[1] == "worker beta, 1 min ago, of mail"
    assert "its tasks run again or have failed" in found.sentence
    assert "horsies tasks --error-code WORKER_CRASHED" in str(found.remedy)
    assert list(judge_losses([])) == []


def test_children_that_run_old_tasks_while_others_are_due_stall_their_queue() -> None:
    full = queue([worker(tasks_running=2)], waiting=due(due=2, first_at=ago(301)))
    starts = {"w1": NewestStart("w1", ago(301), ago(999), ID)}
    assert codes(list(stalled_reasons(full, starts))) == ["QUEUE_STALLED"]
    (found,) = stalled_reasons(full, starts)
    assert found.remedy == f"horsies explain {ID}"
    capped = replace(full, workers=[worker(tasks_running=2, queue_caps={"mail": 2})], claimed=2)
    assert list(stalled_reasons(capped, starts)) == []


def test_obstacles_come_before_remarks() -> None:
    found = task_reasons(waits(queue([worker(hears=False)], paused_at=ago(1)), ahead=Ahead(1)))
    ordered = obstacles_first(found)
    assert codes(ordered) == ["QUEUE_PAUSED", "BEHIND", "WORKERS_POLL"]


def test_every_code_of_the_catalogue_is_tested_here() -> None:
    here = Path(__file__).read_text("utf-8")
    assert [code for code in CATALOGUE if code.removeprefix("SKIPPED_") not in here] == []


def test_a_dependency_in_the_queue_is_not_called_pending() -> None:
    parked = node("approval", "ENQUEUED", task_status="PENDING")
    (waiting,) = node_reasons(run(), node("x", "PENDING"), [parked], ())
    assert "approval (ENQUEUED)" in waiting.sentence
