"""The list of the overview, as a table: the findings of the rules, and the line that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import Horsies
from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.doctor import OverlongTask, PausedRun
from horsies.db.statements.explain import DueCount, NewestStart, ScheduleFacts
from horsies.db.statements.measures import FailingTask
from horsies.db.statements.monitor import WorkerSummary
from horsies.findings import Finding, Level, Urgency
from horsies.monitor.diagnose.attention import (
    figures_script,
    findings_script,
    needs_attention,
    seconds_to_empty,
)
from horsies.monitor.diagnose.queues import (
    QueueSituation,
    capacity_reasons,
    differing_caps,
    pause_reasons,
    stalled_reasons,
    stuck_reasons,
    unserved_reasons,
)
from horsies.monitor.diagnose.runs import paused_run, schedule_reasons
from horsies.monitor.diagnose.work import (
    judge_blocked,
    judge_failing,
    overlong_reasons,
    worker_reasons,
)
from horsies.monitor.facts import Facts
from horsies.monitor.overview import QueueOverview
from horsies.tasks.broker import BrokerErrorCode
from tests.support.database import Database
from tests.support.rows import add_heartbeat, add_run, add_task, add_worker, ago
from tests.support.worker_summaries import worker_summary

NOW = datetime(2026, 11, 16, 14, 0, tzinfo=UTC)
ID = "01a1dd43-0000-7000-8000-000000007e51"


def before(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def worker(**columns: Any) -> WorkerSummary:
    return worker_summary(**{"hostname": "vm-3", "pid": 412, "processes": 4} | columns)


def queue(due: int = 7, oldest: float = 2.0, **columns: Any) -> QueueSituation:
    name = columns.pop("name", "mail")
    waiting = DueCount(name, due, 0, before(oldest), True, None)
    return replace(QueueSituation(name, NOW, waiting=waiting), **columns)


def schedule(**columns: Any) -> ScheduleFacts:
    empty = dict.fromkeys(ScheduleFacts._fields)
    facts = {"name": "nightly", "next_run_at": before(360), "looked_at": NOW, "schedulers": 0}
    made: ScheduleFacts = ScheduleFacts(**{**empty, **facts, "is_disabled": False, **columns})
    return made


def running(**columns: Any) -> OverlongTask:
    task = OverlongTask(ID, "report", None, before(400), None, NOW)
    return task._replace(**columns)


def started(newest: float, oldest: float) -> NewestStart:
    return NewestStart(HUNG.worker_id, before(newest), before(oldest), ID)


HUNG = worker(tasks_running=4)
PAUSED: dict[str, Any] = {"paused_at": before(41 * 60), "oldest": 2280.0}
BLOCKED = BlockedRow(ID, "task", None, "record", "value too long", "w", NOW, 60.0, 3)

LINES = [
    (
        pause_reasons(queue(**PAUSED, due=1_204, paused_by="anna")),
        "Queue 'mail' was paused by anna 41 min ago: 1,204 due tasks, the oldest for 38 min.",
        ("/queues/mail", "pause_queue"),
    ),
    (
        pause_reasons(queue(**PAUSED, due=10_001)),
        "Queue 'mail' was paused 41 min ago: 10,000+ due tasks, the oldest for 38 min.",
        ("/queues/mail", "pause_queue"),
    ),
    (
        unserved_reasons(queue(name="a/b", due=1)),
        "No live worker serves queue 'a/b'; no worker is running: 1 due task, the oldest for 2 s.",
        ("/queues/a%2Fb", None),
    ),
    (
        capacity_reasons(queue(), [worker(queue_caps={"mail": 0})]),
        "The max_concurrency of queue 'mail' is 0, so none of its tasks starts: 7 due tasks, the oldest "
        "for 2 s.",
        ("/queues/mail", None),
    ),
    (
        stuck_reasons(queue(oldest=301.0, workers=[worker(tasks_running=3)])),
        "The oldest task of queue 'mail' has been due for 5 min, and 1 child of its workers idle.",
        ("/queues/mail/explain", None),
    ),
    (
        stuck_reasons(
            queue(oldest=301.0, workers=[worker(processes=10, async_places=8, tasks_running=1)])
        ),
        "The oldest task of queue 'mail' has been due for 5 min, and 9 children of its workers idle.",
        ("/queues/mail/explain", None),
    ),
    (
        stalled_reasons(queue(oldest=301.0, workers=[HUNG]), {HUNG.worker_id: started(301, 500)}),
        "The oldest task of queue 'mail' has been due for 5 min, and all children of its workers have run "
        f"the same tasks for 5 min or longer; the oldest is {ID}, for 8 min.",
        ("/queues/mail/explain", None),
    ),
    (
        differing_caps([worker(queue_caps={"mail": 3}), worker(name="b", queue_caps={})], "mail"),
        "Workers disagree about max_concurrency of queue mail: vm-3 pid 412 3, b without a cap.",
        ("/queues/mail", None),
    ),
    (
        worker_reasons(worker(seen_seconds_ago=25.0, holds_lock=False, tasks_running=4)),
        "Worker vm-3 pid 412 has been gone for 25 s without a shutdown: 4 of its tasks wait for recovery.",
        ("/workers/w%2F1", None),
    ),
    (
        worker_reasons(worker(seen_seconds_ago=25.0, tasks_claimed=1, name="pay-1")),
        "Worker pay-1 has sent no heartbeat for 25 s, but is still connected.",
        ("/workers/w%2F1", None),
    ),
    (
        worker_reasons(worker(hears=False)),
        "Notifications do not reach vm-3 pid 412; tasks are found by polling.",
        ("/workers/w%2F1", None),
    ),
    (
        judge_failing([FailingTask("charge card", 312, 2.4)]),
        "Task charge card has 312 failures in 10 minutes; usually 2.",
        ("/failures?task_name=charge%20card", None),
    ),
    (
        schedule_reasons(schedule()),
        "A slot of schedule nightly has been due for 6 min, and no scheduler is connected.",
        ("/schedules/nightly", None),
    ),
    (
        schedule_reasons(schedule(schedulers=1, unfinished_id=ID)),
        f"A slot of schedule nightly has been due for 6 min, but {ID} is unfinished.",
        ("/schedules/nightly", None),
    ),
    (
        [paused_run(PausedRun(ID, "orders", before(90), "NO_CARD", "charge", NOW))],
        "Run orders was paused 1 min ago because node charge failed with NO_CARD.",
        (f"/workflows/{ID}", None),
    ),
    (
        overlong_reasons(running(timeout_ms=60_000, heartbeat_at=before(3))),
        f"Task report ({ID}) has exceeded its timeout_ms=60,000 by 5 min.",
        (f"/tasks/{ID}", None),
    ),
    (
        overlong_reasons(running()),
        f"Task report ({ID}) has sent no heartbeat for 6 min.",
        (f"/tasks/{ID}", None),
    ),
    (
        judge_blocked([BLOCKED]),
        "The database refuses the next change of 3 task(s) or run(s): "
        f"task {ID}, record: value too long.",
        (f"/tasks/{ID}", None),
    ),
    (
        [Finding("HELD_XMIN", "A transaction is open for 3 h.", Level.RED)],
        "A transaction is open for 3 h.",
        ("/doctor#HELD_XMIN", None),
    ),
]


@pytest.mark.parametrize(
    ("found", "text", "target"), LINES, ids=[text[:40] for _, text, _ in LINES]
)
def test_a_finding_makes_one_line(
    found: Iterable[Finding], text: str, target: tuple[str, str | None]
) -> None:
    (line,) = needs_attention(found)
    assert line.sentence == text
    assert (line.link, line.verb) == target


IDLE: dict[str, Any] = {"oldest": 400.0}


@pytest.mark.parametrize(
    "found",
    [
        capacity_reasons(queue(), [worker(queue_caps={"mail": 9})]),
        stuck_reasons(queue(oldest=299.0, workers=[worker()])),
        stuck_reasons(queue(**IDLE, workers=[worker(tasks_running=3, tasks_claimed=1)])),
        stuck_reasons(queue(**IDLE, claimed=2, workers=[worker(queue_caps={"mail": 2})])),
        stuck_reasons(
            queue(**IDLE, workers=[worker(processes=10, async_places=8, tasks_running=2)])
        ),
        stuck_reasons(queue(**IDLE, due=0, workers=[worker()])),
        stalled_reasons(queue(**IDLE, workers=[HUNG]), {HUNG.worker_id: started(299, 500)}),
        stalled_reasons(queue(**IDLE, workers=[HUNG]), {}),
        stalled_reasons(queue(**IDLE, workers=[worker()]), {HUNG.worker_id: started(400, 500)}),
        worker_reasons(worker()),
        judge_failing([FailingTask("rare", 9, 0.0), FailingTask("usual", 50, 11.0)]),
        [Finding("VACUUM", "More dead rows than live ones.", Level.YELLOW)],
    ],
)
def test_nothing_to_say(found: Iterable[Finding]) -> None:
    assert needs_attention(found) == []


def test_the_worst_and_oldest_comes_first() -> None:
    found = [
        *worker_reasons(worker(hears=False)),
        *pause_reasons(queue(name="new", paused_at=before(1.0))),
        *pause_reasons(queue(name="old", paused_at=before(9.0))),
        *schedule_reasons(schedule()),
    ]
    lines = [(line.urgency, line.subject) for line in needs_attention(found)]
    assert lines == [
        (Urgency.STOPPED, "queue old"),
        (Urgency.STOPPED, "queue new"),
        (Urgency.FAILING, "schedule nightly"),
        (Urgency.SUSPICIOUS, "worker vm-3 pid 412"),
    ]


@pytest.mark.parametrize(
    ("due", "done", "arrivals", "seconds"),
    [(0, 0.0, 9.0, 0.0), (100, 150.0, 50.0, 60.0), (100, 50.0, 50.0, None), (1, 0.0, 0.0, None)],
)
def test_a_queue_empties_when_more_ends_than_arrives(
    due: int, done: float, arrivals: float, seconds: float | None
) -> None:
    overview = QueueOverview("mail", due=due, done_per_minute=done)
    assert seconds_to_empty(overview, arrivals) == seconds


def test_facts_come_from_the_tables(app: Horsies, connection: Database) -> None:
    add_task(connection, queue_name="mail", enqueued_at=ago(1))
    late = {"status": "RUNNING", "started_at": ago(400)}
    over = add_task(connection, task_name="over", timeout_ms=60_000, **late)
    add_heartbeat(connection, over, 1)
    add_task(connection, task_name="silent", **late)
    beating = add_task(connection, task_name="fine", **late)
    add_heartbeat(connection, beating, 1)
    add_run(connection, status="PAUSED", error="{}", paused_at=ago(9), name="broken")
    add_run(connection, status="PAUSED", paused_at=ago(9), name="by hand")
    add_run(connection)
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, paused_at, updated_at) VALUES "
        "('late', now() - interval '1 minute', NULL, now() - interval '1 hour'), "
        "('off', now() - interval '1 day', now(), now() - interval '1 hour'), "
        "('soon', now() - interval '1 second', NULL, now() - interval '1 hour')"
    )
    add_worker(connection)
    facts, broker = Facts(), app.get_broker()
    code = BrokerErrorCode.MONITORING_QUERY_FAILED
    figures = broker.perform(code, figures_script({"mail": None}, facts)).unwrap()
    found = broker.perform(code, findings_script(facts)).unwrap()
    assert figures.arrivals == {"default": 3.0, "mail": 1.0}
    assert figures.open_runs == {"PENDING": 0, "RUNNING": 1, "PAUSED": 2}
    assert figures.estimate is not None
    assert [queue.name for queue in figures.overview.queues] == ["default", "mail"]
    assert sorted((one.code, str(one.subject)) for one in found) == [
        ("NO_HEARTBEAT", "task silent"),
        ("NO_SCHEDULER", "schedule late"),
        ("OVER_LIMIT", "task over"),
        ("QUEUE_UNSERVED", "queue mail"),
        ("RUN_PAUSED", "run broken"),
    ]
