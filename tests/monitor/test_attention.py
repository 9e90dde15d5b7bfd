"""Rules of the attention list, as a table: facts, and the line that they make."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import Horsies
from horsies.db.statements.blocked import BlockedRow
from horsies.db.statements.dashboard import FailedPause, OverdueSchedule, OverlongTask
from horsies.db.statements.measures import FailingTask
from horsies.db.statements.monitor import WorkerSummary
from horsies.monitor.attention import (
    Facts,
    Urgency,
    facts_script,
    needs_attention,
    seconds_to_empty,
)
from horsies.monitor.overview import Overview, QueueOverview
from horsies.tasks.broker import BrokerErrorCode
from tests.support.database import Database
from tests.support.rows import add_heartbeat, add_run, add_task, add_worker, ago

NOW = datetime(2026, 11, 16, 14, 0, tzinfo=UTC)
ID = "01a1dd43-0000-7000-8000-000000007e51"


def worker(**columns: Any) -> WorkerSummary:
    made = WorkerSummary(
        worker_id="w/1",
        hostname="vm-3",
        pid=412,
        processes=4,
        queues=["mail"],
        started_at=NOW,
        seen_at=NOW,
        stopped_at=None,
        was_lost=False,
        hears=True,
        seen_seconds_ago=1.0,
        holds_lock=True,
        tasks_running=0,
        tasks_claimed=0,
        memory_usage_mb=None,
        children_memory_mb=None,
        cpu_percent=None,
    )
    return made._replace(**columns)


def queue(**columns: Any) -> QueueOverview:
    return replace(QueueOverview("mail", due=7, oldest_waiting_seconds=2.0, workers=1), **columns)


def of(*parts: QueueOverview | WorkerSummary, **columns: Any) -> Facts:
    queues = [part for part in parts if isinstance(part, QueueOverview)]
    workers = [part for part in parts if isinstance(part, WorkerSummary)]
    return Facts(Overview(queues, workers), now=NOW, **columns)


PAUSED = {"paused_at": NOW - timedelta(minutes=41), "oldest_waiting_seconds": 2280.0}
BLOCKED = BlockedRow(ID, "task", None, "record", "value too long", "w", NOW, 60.0, 3)

LINES = [
    (
        of(queue(**PAUSED, due=1_204), paused_by={"mail": "anna"}),
        "queue mail: paused for 41 min by anna; 1,204 tasks due, the oldest for 38 min",
        ("/queues/mail", "pause_queue"),
    ),
    (
        of(queue(due=10_000, waiting_at_least=True, **PAUSED)),
        "queue mail: paused for 41 min; 10,000+ tasks due, the oldest for 38 min",
        ("/queues/mail", "pause_queue"),
    ),
    (
        of(queue(name="a/b", workers=0, due=1)),
        "queue a/b: 1 task due for up to 2 s, and no live worker serves the queue",
        ("/queues/a%2Fb", None),
    ),
    (
        of(queue(caps=[0])),
        "queue mail: 7 tasks due, and the cap of the queue is 0",
        ("/queues/mail", None),
    ),
    (
        of(queue(oldest_waiting_seconds=301.0), worker(tasks_running=3)),
        "queue mail: the oldest task is due for 5 min, and 1 child of its workers idle",
        ("/queues/mail/explain", None),
    ),
    (
        of(
            queue(oldest_waiting_seconds=301.0),
            worker(processes=10, async_places=8, tasks_running=1),
        ),
        "queue mail: the oldest task is due for 5 min, and 9 children of its workers idle",
        ("/queues/mail/explain", None),
    ),
    (
        of(queue(due=0, caps=[3, None])),
        "queue mail: its workers disagree about the cap: 3 and no cap",
        ("/queues/mail", None),
    ),
    (
        of(worker(seen_seconds_ago=25.0, holds_lock=False, tasks_running=4)),
        "worker vm-3 pid 412: lost, seen 25 s ago with 4 tasks that another worker has to take over",
        ("/workers/w%2F1", None),
    ),
    (
        of(worker(seen_seconds_ago=25.0, holds_lock=False)),
        "worker vm-3 pid 412: lost, seen 25 s ago",
        ("/workers/w%2F1", None),
    ),
    (
        of(worker(seen_seconds_ago=25.0, tasks_claimed=1, name="pay-1")),
        "worker pay-1: connected, but without a sign of life for 25 s; it holds 1 task",
        ("/workers/w%2F1", None),
    ),
    (
        of(worker(hears=False)),
        "worker vm-3 pid 412: receives no notifications and finds work by polling",
        ("/workers/w%2F1", None),
    ),
    (
        of(failing=[FailingTask("charge card", 312, 2.4)]),
        "task charge card: 312 failures in 10 minutes; usually 2",
        ("/failures?task_name=charge%20card", None),
    ),
    (
        of(overdue=[OverdueSchedule("nightly", NOW, 360.0, False)]),
        "schedule nightly: overdue for 6 min: no scheduler has taken its slot",
        ("/schedules/nightly", None),
    ),
    (
        of(overdue=[OverdueSchedule("nightly", NOW, 360.0, True)]),
        "schedule nightly: overdue for 6 min: its last task or run has not ended",
        ("/schedules/nightly", None),
    ),
    (
        of(failed_pauses=[FailedPause(ID, "orders", NOW, 90.0)]),
        "run orders: paused by a failure 1 min ago",
        (f"/workflows/{ID}", None),
    ),
    (
        of(overlong=[OverlongTask(ID, "report", 400.0, 60_000, 3.0)]),
        "task report: runs for 6 min, past its time limit of 1 min",
        (f"/tasks/{ID}", None),
    ),
    (
        of(overlong=[OverlongTask(ID, "report", 400.0, None, 390.0)]),
        "task report: runs for 6 min, without a heartbeat for 6 min",
        (f"/tasks/{ID}", None),
    ),
    (
        of(findings=["A transaction is open for 3 h."]),
        "the database server: a transaction is open for 3 h",
        ("/doctor", None),
    ),
    (
        Facts(Overview([], [], [BLOCKED], 3)),
        f"task {ID}: the database refuses to record it: value too long; 3 are blocked",
        (f"/tasks/{ID}", None),
    ),
]


@pytest.mark.parametrize(
    ("facts", "text", "target"), LINES, ids=[text[:40] for _, text, _ in LINES]
)
def test_a_rule_makes_one_line(facts: Facts, text: str, target: tuple[str, str | None]) -> None:
    (line,) = needs_attention(facts)
    assert f"{line.subject}: {line.sentence}" == text
    assert (line.link, line.verb) == target


@pytest.mark.parametrize(
    "facts",
    [
        of(queue(due=0, workers=0)),
        of(queue(due=0, paused_at=NOW)),
        of(queue(due=0, caps=[0])),
        of(queue(oldest_waiting_seconds=299.0), worker()),
        of(queue(oldest_waiting_seconds=400.0), worker(tasks_running=3, tasks_claimed=1)),
        of(queue(oldest_waiting_seconds=400.0, running=2, caps=[2]), worker()),
        of(
            queue(oldest_waiting_seconds=400.0),
            worker(processes=10, async_places=8, tasks_running=2),
        ),
        of(worker()),
        of(failing=[FailingTask("rare", 9, 0.0), FailingTask("usual", 50, 11.0)]),
    ],
)
def test_nothing_to_say(facts: Facts) -> None:
    assert needs_attention(facts) == []


def test_the_worst_and_oldest_comes_first() -> None:
    facts = of(
        queue(name="new", workers=0, oldest_waiting_seconds=1.0),
        queue(name="old", workers=0, oldest_waiting_seconds=9.0),
        worker(hears=False),
        overdue=[OverdueSchedule("nightly", NOW, 360.0, False)],
    )
    found = [(line.urgency, line.subject) for line in needs_attention(facts)]
    assert found == [
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
    assert seconds_to_empty(queue(due=due, done_per_minute=done), arrivals) == seconds


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
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, paused_at) VALUES "
        "('late', now() - interval '1 minute', NULL), ('off', now() - interval '1 day', now()), "
        "('soon', now() - interval '1 second', NULL)"
    )
    add_worker(connection)
    script = facts_script({"mail": None})
    facts = app.get_broker().perform(BrokerErrorCode.MONITORING_QUERY_FAILED, script).unwrap()
    assert facts.arrivals == {"default": 3.0, "mail": 1.0}
    assert facts.open_runs == {"PENDING": 0, "RUNNING": 1, "PAUSED": 2}
    assert [run.name for run in facts.failed_pauses] == ["broken"]
    assert [late.name for late in facts.overdue] == ["late"]
    assert sorted(task.task_name for task in facts.overlong) == ["over", "silent"]
    assert facts.estimate is not None
    assert [queue.name for queue in facts.overview.queues] == ["default", "mail"]
