"""The overview of queues and workers, and lists of tasks."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import Horsies, TaskStatus
from horsies.db.statements.monitor import (
    InFlightCount,
    QueueState,
    RecentAttempts,
    TaskSummary,
    WaitingCount,
)
from horsies.ids import first_id_at, new_id
from horsies.monitor import overview, paging
from horsies.monitor.diagnose import explain
from horsies.monitor.overview import Overview, WorkerHealth
from horsies.monitor.paging import Page
from horsies.monitor.queries import TaskFilters, list_tasks
from tests.support.database import Database
from tests.support.rows import (
    UNKNOWN_ID,
    add_attempt,
    add_run,
    add_snapshot,
    add_task,
    add_worker,
    ago,
)
from tests.support.worker_summaries import worker_summary

# The same in every test process, or they would not agree on the names of the tests.


def read_overview(app: Horsies, *configured: str, cap: int | None = None) -> Overview:
    caps = dict.fromkeys(configured, cap)
    return overview.read_overview(app.get_broker(), caps).unwrap()


def test_an_empty_database_has_only_the_configured_queues(app: Horsies) -> None:
    found = read_overview(app, "default")
    assert [(queue.name, queue.due, queue.paused_at) for queue in found.queues] == [
        ("default", 0, None)
    ]
    assert found.workers == []


def test_a_queue_counts_what_waits_and_what_runs(app: Horsies, connection: Database) -> None:
    for seconds in (100, 50, 10):
        add_task(connection, queue_name="mail", enqueued_at=ago(seconds))
    add_task(connection, queue_name="mail", enqueued_at=ago(-3600))
    add_task(connection, queue_name="mail", held=True)
    add_task(connection, queue_name="mail", status="CLAIMED")
    for status in ("RUNNING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "EXPIRED"):
        add_task(connection, queue_name="mail", status=status)
    (mail,) = read_overview(app).queues
    assert (mail.due, mail.delayed, mail.claimed, mail.running) == (3, 1, 1, 2)
    assert mail.oldest_waiting_seconds is not None
    assert 100 <= mail.oldest_waiting_seconds < 160


def test_waiting_tasks_are_counted_up_to_a_bound(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for priority, seconds in [(1, -900), (1, -900), (1, -900), (2, 9), (3, 90), (3, 8)]:
        add_task(connection, queue_name="long", priority=priority, enqueued_at=ago(seconds))
    for seconds in (-500, -600):
        add_task(connection, queue_name="later", enqueued_at=ago(seconds))
    add_task(connection, queue_name="other", enqueued_at=ago(1))
    for _ in range(3):
        add_task(connection, queue_name="other", enqueued_at=ago(-900))
    monkeypatch.setattr(overview, "WAITING_MOST", 2)
    later, long, other = read_overview(app).queues
    assert (later.due, later.delayed, later.waiting_at_least) == (0, 2, False)
    assert later.oldest_waiting_seconds is None
    assert (other.due, other.delayed, other.waiting_at_least) == (1, 2, True)
    assert (other.is_at_least(other.due), other.is_at_least(other.delayed)) == (False, True)
    assert (long.due, long.delayed, long.waiting_at_least) == (2, 2, True)
    assert long.oldest_waiting_seconds is not None
    assert long.oldest_waiting_seconds >= 90


def test_rates_are_what_ended_within_the_last_minute(app: Horsies, connection: Database) -> None:
    def ended(queue: str, **columns: Any) -> None:
        add_attempt(connection, add_task(connection, queue_name=queue, status="FAILED"), **columns)

    ended("mail")
    ended("mail", finished_at=ago(20))
    ended("mail", finished_at=ago(70))
    ended("mail", outcome="FAILED", error_code="BROKE")
    ended("mail", outcome="WORKER_FAILURE")
    ended("mail", outcome="FAILED", will_retry=True)
    ended("mail", outcome="FAILED", error_code="TASK_CANCELLED")
    ended("reports")
    mail, reports = read_overview(app).queues
    rates = (mail.done_per_minute, mail.failed_per_minute, mail.retried_per_minute)
    assert rates == (2.0, 2.0, 1.0)
    assert (reports.done_per_minute, reports.failed_per_minute) == (1.0, 0.0)


def test_a_sample_that_covers_less_than_a_minute_is_scaled_up(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        add_attempt(
            connection, add_task(connection, status="COMPLETED"), finished_at=ago(4 * (20 - number))
        )
    monkeypatch.setattr(overview, "RATE_SAMPLE", 10)
    (queue,) = read_overview(app).queues
    assert 10 < queue.done_per_minute < 15.1


def test_queues_are_known_from_work_workers_switches_and_configuration(
    app: Horsies, connection: Database
) -> None:
    add_task(connection, queue_name="waiting")
    add_task(connection, queue_name="running", status="RUNNING")
    add_worker(connection, queues=["served"])
    add_worker(connection, queues=["gone"], stopped_at=ago(1))
    connection.execute("INSERT INTO horsies_queues VALUES ('paused', now()), ('resumed', NULL)")
    found = read_overview(app, "configured", cap=3).queues
    assert [queue.caps for queue in found if queue.name == "configured"] == [[3]]
    assert [queue.name for queue in found] == [
        "configured",
        "paused",
        "resumed",
        "running",
        "served",
        "waiting",
    ]
    assert [queue.name for queue in found if queue.paused_at] == ["paused"]


def test_merging_puts_every_answer_at_its_queue() -> None:
    moment = datetime.now(UTC)
    (merged,) = overview.merge_queues(
        ["mail"],
        [WaitingCount("mail", 1, 2, 3.0)],
        [InFlightCount("mail", 4, 5)],
        [RecentAttempts("mail", 30.0, 6, 7, 8)],
        [QueueState("mail", moment)],
    )
    assert merged == overview.QueueOverview("mail", moment, 1, 2, 4, 5, 3.0, 12.0, 14.0, 16.0)


WORKER = worker_summary(processes=1, queues=[], seen_seconds_ago=0.0)


@pytest.mark.parametrize(
    ("changes", "health"),
    [
        ({}, WorkerHealth.ALIVE),
        ({"holds_lock": False}, WorkerHealth.ALIVE),
        ({"seen_seconds_ago": 60.0}, WorkerHealth.ALIVE),
        ({"seen_seconds_ago": 60.0, "tasks_claimed": 1}, WorkerHealth.SILENT),
        ({"seen_seconds_ago": 600.0}, WorkerHealth.SILENT),
        ({"seen_seconds_ago": 60.0, "holds_lock": False}, WorkerHealth.LOST),
        ({"stopped_at": datetime.now(UTC)}, WorkerHealth.STOPPED),
        ({"stopped_at": datetime.now(UTC), "was_lost": True}, WorkerHealth.LOST),
    ],
)
def test_the_health_of_a_worker(changes: dict[str, Any], health: WorkerHealth) -> None:
    assert overview.health_of(WORKER._replace(**changes)) is health


@pytest.mark.parametrize(
    ("changes", "misses_notifications"),
    [
        ({}, False),
        ({"hears": False}, True),
        ({"hears": False, "seen_seconds_ago": 600.0}, False),
        ({"hears": False, "stopped_at": datetime.now(UTC)}, False),
    ],
)
def test_only_a_live_worker_can_miss_notifications(
    changes: dict[str, Any], misses_notifications: bool
) -> None:
    worker = WORKER._replace(**changes)
    assert overview.misses_notifications(worker) is misses_notifications


def test_a_worker_is_shown_with_its_work_its_lock_and_its_newest_snapshot(
    app: Horsies, connection: Database
) -> None:
    key = 0x7ABC_DEF0_8765_4321
    worker_id = add_worker(connection, lock_key=key, seen_at=ago(100), queues=["a", "b"])
    add_snapshot(connection, worker_id, snapshot_at=ago(60), memory_usage_mb=1.0)
    add_snapshot(
        connection, worker_id, snapshot_at=ago(5), memory_usage_mb=80.0, children_memory_mb=320.0
    )
    for status in ("RUNNING", "RUNNING", "CLAIMED", "COMPLETED"):
        add_task(connection, status=status, claimed_by_worker_id=worker_id)
    (before,) = overview.read_workers(app.get_broker()).unwrap()
    assert overview.health_of(before) is WorkerHealth.LOST
    connection.execute("SELECT pg_advisory_lock(%s)", (key,))
    (worker,) = overview.read_workers(app.get_broker()).unwrap()
    connection.execute("SELECT pg_advisory_unlock(%s)", (key,))
    assert overview.health_of(worker) is WorkerHealth.SILENT
    assert (worker.memory_mb, worker.children_private_mb) == (400.0, None)
    children = json.dumps([{"rss_mb": 160, "private_mb": 12.5}, {"rss_mb": 160, "private_mb": 7.5}])
    connection.execute("UPDATE horsies_workers SET children = %s::jsonb", (children,))
    (worker,) = overview.read_workers(app.get_broker()).unwrap()
    assert (worker.memory_mb, worker.children_private_mb) == (100.0, 20.0)
    assert (worker.tasks_running, worker.tasks_claimed) == (2, 1)
    assert worker.queues == ["a", "b"]


@pytest.mark.parametrize("key", [-1, -(2**63), 2**63 - 1, 0])
def test_any_lock_key_is_recognised(app: Horsies, connection: Database, key: int) -> None:
    add_worker(connection, lock_key=key)
    connection.execute("SELECT pg_advisory_lock(%s)", (key,))
    (worker,) = overview.read_workers(app.get_broker()).unwrap()
    connection.execute("SELECT pg_advisory_unlock(%s)", (key,))
    assert worker.holds_lock


def test_workers_that_stopped_are_listed_on_request_and_last(
    app: Horsies, connection: Database
) -> None:
    gone = add_worker(connection, stopped_at=ago(1))
    here = add_worker(connection, seen_at=ago(10))
    broker = app.get_broker()
    assert [one.worker_id for one in overview.read_workers(broker).unwrap()] == [here]
    everyone = overview.read_workers(broker, include_stopped=True).unwrap()
    assert [one.worker_id for one in everyone] == [here, gone]


def page(app: Horsies, **filters: Any) -> Page[TaskSummary]:
    return list_tasks(app.get_broker(), TaskFilters(**filters)).unwrap()


def ids(page: Page[TaskSummary]) -> list[str]:
    return [task.id for task in page.rows]


def test_tasks_are_listed_newest_first_and_page_by_page(app: Horsies, connection: Database) -> None:
    stored = sorted(
        (add_task(connection, id=numbered(number)) for number in range(7)), reverse=True
    )
    first = page(app, limit=3)
    assert ids(first) == stored[:3]
    second = page(app, limit=3, after=first.next_cursor)
    assert ids(second) == stored[3:6]
    third = page(app, limit=3, after=second.next_cursor)
    assert ids(third) == stored[6:]
    assert third.next_cursor is None
    assert ids(page(app, limit=7)) == stored


def numbered(number: int) -> str:
    """Return an id made so many milliseconds after a certain moment."""
    return first_id_at(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=number))


def test_filters_are_alternatives_within_and_conditions_between_dimensions(
    app: Horsies, connection: Database
) -> None:
    failed = add_task(connection, status="FAILED", error_code="BROKE", queue_name="mail")
    expired = add_task(connection, status="EXPIRED", error_code="TASK_EXPIRED", queue_name="mail")
    waiting = add_task(connection, task_name="resize", queue_name="images")
    running = add_task(connection, status="RUNNING", queue_name="images")
    everything = {failed, expired, waiting, running}
    assert set(ids(page(app))) == everything
    assert ids(page(app, statuses=[TaskStatus.FAILED])) == [failed]
    both = page(app, statuses=[TaskStatus.FAILED, TaskStatus.EXPIRED])
    assert set(ids(both)) == {failed, expired}
    mixed = page(app, statuses=[TaskStatus.FAILED, TaskStatus.RUNNING, TaskStatus.PENDING])
    assert set(ids(mixed)) == {failed, running, waiting}
    assert set(ids(page(app, queues=["mail"]))) == {failed, expired}
    assert ids(page(app, names=["resize"])) == [waiting]
    assert ids(page(app, names=["resize"], queues=["mail"])) == []
    assert ids(page(app, error_codes=["BROKE"])) == [failed]
    assert ids(page(app, error_codes=["BROKE"], statuses=[TaskStatus.EXPIRED])) == []
    assert ids(page(app, statuses=[TaskStatus.RUNNING], names=["nothing"])) == []


def test_tasks_held_back_by_their_workflow_are_waiting_tasks(
    app: Horsies, connection: Database
) -> None:
    run, paused_run = add_run(connection), add_run(connection, status="PAUSED")
    parked = add_task(connection, held=True, workflow_id=run, queue_name="mail")
    paused = add_task(connection, held=True, workflow_id=paused_run)
    add_task(connection, status="COMPLETED", workflow_id=run)
    plain = add_task(connection)
    assert set(ids(page(app, statuses=[TaskStatus.PENDING]))) == {parked, paused, plain}
    assert ids(page(app, statuses=[TaskStatus.PENDING], queues=["mail"])) == [parked]
    assert ids(page(app, statuses=[TaskStatus.RUNNING])) == []


def test_since_is_when_a_task_was_sent(app: Horsies, connection: Database) -> None:
    old = add_task(connection, id=numbered(0))
    new = add_task(connection, id=new_id())
    assert ids(page(app, since=datetime.now(UTC) - timedelta(minutes=5))) == [new]
    assert ids(page(app, since=datetime(2025, 1, 1, tzinfo=UTC))) == [new, old]
    assert ids(page(app, statuses=[TaskStatus.PENDING], since=datetime(1, 1, 2, tzinfo=UTC))) == [
        new,
        old,
    ]


def test_what_waits_or_runs_is_found_behind_any_amount_of_history(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", 3)
    stuck = add_task(connection, id=numbered(0), status="RUNNING")
    for number in range(1, 8):
        add_task(connection, id=numbered(number), status="COMPLETED")
    assert ids(page(app, statuses=[TaskStatus.RUNNING])) == [stuck]


def test_an_error_code_is_found_behind_any_amount_of_history(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", 3)
    old = add_task(connection, id=numbered(0), status="FAILED", error_code="RARE")
    for number in range(1, 8):
        add_task(connection, id=numbered(number), status="COMPLETED")
    recent = add_task(connection, id=numbered(8), status="FAILED", error_code="RARE")
    found = page(app, error_codes=["RARE"])
    assert ids(found) == [recent, old]
    assert found.looked_at_all


def test_another_filter_looks_at_the_newest_tasks_and_says_where_it_stopped(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", 3)
    wanted = add_task(connection, id=numbered(0), task_name="rare", status="COMPLETED")
    for number in range(1, 8):
        add_task(connection, id=numbered(number), status="COMPLETED")
    found = page(app, names=["rare"])
    looks = 1
    while found.next_cursor is not None:
        assert (found.rows, found.looked_at_all) == ([], False)
        found = page(app, names=["rare"], after=found.next_cursor)
        looks += 1
    assert ids(found) == [wanted]
    assert looks == 3


def test_pages_of_live_and_finished_tasks_together_skip_nothing(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", 3)
    wanted = []
    for number in range(20):
        status = ("RUNNING", "COMPLETED", "FAILED")[number % 3]
        task_id = add_task(connection, id=numbered(number), status=status)
        wanted += [] if status == "COMPLETED" else [task_id]
    seen: list[str] = []
    before: str | None = None
    while True:
        statuses = [TaskStatus.RUNNING, TaskStatus.FAILED]
        found = page(app, statuses=statuses, limit=4, after=before)
        seen += ids(found)
        before = found.next_cursor
        if before is None:
            break
    assert seen == sorted(wanted, reverse=True)


def test_a_task_is_read_with_its_attempts_and_without_its_payload(
    app: Horsies, connection: Database
) -> None:
    task_id = add_task(connection, args="[1]", kwargs="{}", result='{"ok":1}', status="COMPLETED")
    add_attempt(connection, task_id, outcome="FAILED", will_retry=True)
    add_attempt(connection, task_id, attempt=2)
    report = explain.read_task(app.get_broker(), task_id.upper()).unwrap()
    assert report is not None
    assert [attempt.attempt for attempt in report.attempts] == [2, 1]
    assert (report.task.args, report.task.kwargs, report.task.result) == (None, None, None)
    opened = explain.read_task(app.get_broker(), task_id, payload=True).unwrap()
    assert opened is not None
    assert (opened.task.args, opened.task.kwargs, opened.task.result) == ("[1]", "{}", '{"ok":1}')


@pytest.mark.parametrize("task_id", [UNKNOWN_ID, "nonsense", ""])
def test_a_task_that_does_not_exist_is_none(app: Horsies, task_id: str) -> None:
    assert explain.read_task(app.get_broker(), task_id).unwrap() is None


def test_places_of_async_children_are_counted_from_the_snapshot_of_the_children(
    app: Horsies, connection: Database
) -> None:
    ordinary, shared = '{"pid": 1, "task_id": null}', '{"pid": 2, "task_id": null, "tasks": 1}'
    worker_id = add_worker(connection, processes=10, children=f"[{ordinary}, {ordinary}, {shared}]")
    add_worker(connection, children=f"[{ordinary}]", worker_id="without", seen_at=ago(9))
    for options in ('{"async":true}', '{"retry":{}}', None):
        running = {"claimed_by_worker_id": worker_id, "task_options": options}
        add_task(connection, status="RUNNING", **running)
    both, without = overview.read_workers(app.get_broker()).unwrap()
    assert (both.async_places, both.async_running, both.tasks_running) == (8, 1, 3)
    assert (both.free_places(is_async=True), both.free_places(is_async=False)) == (7, 0)
    assert (without.async_places, without.free_places(is_async=True)) == (0, 4)


@pytest.mark.parametrize(
    ("options", "code"), [('{"async":true}', "SHOULD_START_NOW"), ("{}", "CHILDREN_BUSY")]
)
def test_a_place_of_an_async_child_is_free_for_async_tasks_alone(
    app: Horsies, connection: Database, options: str, code: str
) -> None:
    children = '[{"pid": 1}, {"pid": 2, "tasks": 0}]'
    worker_id = add_worker(connection, processes=5, children=children)
    add_task(connection, status="RUNNING", claimed_by_worker_id=worker_id, claimed_at=ago(1))
    waiting = add_task(connection, task_options=options)
    script = explain.explain_task_script(waiting)
    found = explain.explain(app.get_broker(), script).unwrap()
    assert code in [reason.code for reason in found.reasons]
