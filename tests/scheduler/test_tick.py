"""Ticks on a real database: every due slot becomes its task, once, with the options of a send."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import LiteralString, NamedTuple

import psycopg
import pytest

from horsies.config.schedules import TaskSchedule, WorkflowSchedule
from horsies.db.statement import run_script
from horsies.db.statements.schedules import (
    find_due_schedules,
    fire_slots,
    pause_schedule,
    resume_schedule,
)
from horsies.scheduler import tick as tick_module
from horsies.scheduler.api import switch_script
from horsies.scheduler.targets import jitter_share, run_id
from horsies.scheduler.tick import Refused, columns, decide_all
from horsies.tasks.blocked import PATIENCE
from horsies.tasks.keys import lane_of
from horsies.timetable.patterns import DailySchedule, HourlySchedule, IntervalSchedule
from tests.support.database import Database
from tests.support.keys import Ring
from tests.support.poison import DEFERRED, IMMEDIATE, poisoned
from tests.support.scheduling import (
    LONG_AGO,
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    run_slots,
    schedule,
    slots,
    state,
    tasks,
    tick,
    tick_at_once,
    workflow_schedule,
)
from tests.support.statements import count_statements

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


class Kind(NamedTuple):
    """What schedules start: tasks or runs."""

    schedule: Callable[..., TaskSchedule | WorkflowSchedule]
    slots: Callable[[Database, str], list[datetime]]
    change: LiteralString
    unfinished: Sequence[str]
    ended: str


TASKS = Kind(
    schedule,
    slots,
    "UPDATE horsies_tasks SET status = %s",
    ("PENDING", "CLAIMED", "RUNNING"),
    "COMPLETED",
)
RUNS = Kind(
    workflow_schedule,
    run_slots,
    "UPDATE horsies_workflows SET status = %s",
    ("PENDING", "RUNNING", "PAUSED"),
    "FAILED",
)


def test_a_due_slot_becomes_a_task_and_the_next_one_is_noted(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule(kwargs={"text": "hello"})))
    due_at = ago(connection, 0)
    make_due(connection, due_at)
    before = database_now(connection)
    ticked = tick(connection, registry)
    after = database_now(connection)
    (task,) = tasks(connection)
    assert (task["scheduled_for"], task["sent_at"]) == (due_at, due_at)
    assert before <= task["enqueued_at"] <= after
    assert (task["task_name"], task["queue_name"], task["priority"]) == ("note", "plain", 50)
    assert (task["args"], task["kwargs"], task["status"]) == ("[]", '{"text":"hello"}', "PENDING")
    assert task["id"] == run_id("report", due_at)
    now = state(connection)
    assert now["next_run_at"] == due_at + HOUR
    assert before <= now["last_run_at"] <= after
    assert (str(now["last_task_id"]), now["run_count"]) == (task["id"], 1)
    assert (now["skipped_at"], now["skip_reason"]) == (None, None)
    assert ticked.seconds_until_next is not None
    assert 3590 < ticked.seconds_until_next < 3601


@pytest.mark.parametrize("queue_name", [None, "fast"])
def test_a_scheduled_task_has_the_key_of_its_arguments(
    connection: Database, make_app: MakeApp, queue_name: str | None
) -> None:
    one = schedule(task_name="sync", kwargs={"tenant": "acme"}, queue_name=queue_name)
    app = make_app(one)

    @app.task("sync", queue_name="plain", key="tenant")
    def sync(tenant: str) -> None: ...

    registry = enter(connection, app)
    make_due(connection, ago(connection, 0))
    tick(connection, registry)
    (task,) = tasks(connection)
    lane = lane_of(queue_name or "plain", "acme")
    assert (task["lane_key"], task["lane"], task["held"]) == (*lane, True)
    assert Ring(connection, task["queue_name"]).claim(4) == ["acme"]


def test_nothing_fires_early_or_twice(connection: Database, make_app: MakeApp) -> None:
    registry = enter(connection, make_app(schedule()))
    make_due(connection, database_now(connection) + timedelta(minutes=1))
    ticked = tick(connection, registry)
    assert tasks(connection) == []
    assert ticked.seconds_until_next is not None
    assert 50 < ticked.seconds_until_next <= 60
    make_due(connection, ago(connection, 1))
    tick(connection, registry)
    tick(connection, registry)
    assert len(tasks(connection)) == 1


def test_catch_up_sends_all_missed_slots_in_order_and_counts_each(
    connection: Database, make_app: MakeApp
) -> None:
    pattern = IntervalSchedule(minutes=5)
    registry = enter(connection, make_app(schedule(pattern=pattern, catch_up_missed=True)))
    first = ago(connection, 17 * 60)
    make_due(connection, first)
    tick(connection, registry)
    expected = [first + number * timedelta(minutes=5) for number in range(4)]
    assert slots(connection) == expected
    ids = [task["id"] for task in tasks(connection)]
    assert ids == sorted(ids), "lists of tasks are in the order of ids"
    assert len(set(ids)) == 4
    now = state(connection)
    assert (now["run_count"], now["next_run_at"]) == (4, first + timedelta(minutes=20))
    assert str(now["last_task_id"]) == run_id("report", expected[-1])


def test_what_exceeds_the_limit_follows_at_once_in_the_next_ticks(
    connection: Database, make_app: MakeApp
) -> None:
    one = schedule(catch_up_missed=True, max_catch_up_runs=3)
    registry = enter(connection, make_app(one))
    first = ago(connection, 4 * 3600 + 60)
    make_due(connection, first)
    assert tick(connection, registry).seconds_until_next == 0
    assert len(tasks(connection)) == 3
    assert tick(connection, registry).seconds_until_next != 0
    assert slots(connection) == [first + number * HOUR for number in range(5)]


def test_without_catch_up_the_latest_missed_slot_is_sent_and_the_rest_is_noted(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    registry = enter(connection, make_app(schedule()))
    first = ago(connection, 4 * 3600 + 60)
    make_due(connection, first)
    with caplog.at_level(logging.WARNING, "horsies"):
        tick(connection, registry)
    assert slots(connection) == [first + 4 * HOUR]
    now = state(connection)
    assert now["next_run_at"] == first + 5 * HOUR
    assert (now["skip_reason"], now["skipped_at"]) == ("MISSED", first + 4 * HOUR)
    assert "dropped (missed)" in caplog.text


def test_slots_are_exact_whatever_the_time_zone_of_the_session(
    connection: Database, make_app: MakeApp
) -> None:
    # In the zone of this session an hour was added or taken away between these slots.
    connection.execute("SET TIME ZONE 'Europe/Berlin'")
    one = schedule(pattern=IntervalSchedule(days=30), catch_up_missed=True)
    registry = enter(connection, make_app(one))
    first = datetime(2026, 3, 1, 12, tzinfo=UTC)
    make_due(connection, first)
    tick(connection, registry)
    found = slots(connection)
    assert len(found) > 5
    assert found == [first + number * timedelta(days=30) for number in range(len(found))]


def test_scheduled_tasks_keep_the_retry_policy_and_the_options_of_their_task(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(task_name="careful", args=(1,), kwargs={"b": 3}))
    sent = app.tasks()["careful"].send(1, b=3).unwrap()
    (by_hand,) = (row for row in tasks(connection, None) if row["id"] == sent.task_id)
    registry = enter(connection, app)
    make_due(connection, ago(connection, 1))
    tick(connection, registry)
    (task,) = tasks(connection)
    same = ("task_name", "queue_name", "priority", "max_retries", "task_options", "timeout_ms")
    assert {name: task[name] for name in same} == {name: by_hand[name] for name in same}
    assert (task["max_retries"], task["timeout_ms"]) == (2, 5_000)
    assert json.loads(task["task_options"])["retry_policy"]["intervals"] == [7, 8]
    assert (task["args"], json.loads(task["kwargs"])) == ("[]", {"a": 1, "b": 3})


def test_a_schedule_may_choose_queue_priority_and_expiry(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(
        schedule("queued", queue_name="fast"),
        schedule("chosen", queue_name="fast", priority=7, good_for_seconds=90),
    )
    registry = enter(connection, app)
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    tick(connection, registry)
    (queued,), (chosen,) = tasks(connection, "queued"), tasks(connection, "chosen")
    assert (queued["queue_name"], queued["priority"], queued["good_until"]) == ("fast", 3, None)
    assert (chosen["queue_name"], chosen["priority"]) == ("fast", 7)
    assert chosen["good_until"] == due_at + timedelta(seconds=90)
    assert json.loads(chosen["task_options"])["good_until"] is not None


def test_jitter_delays_each_slot_by_its_own_share(connection: Database, make_app: MakeApp) -> None:
    one = schedule(jitter_seconds=1_000, catch_up_missed=True)
    registry = enter(connection, make_app(one))
    first = ago(connection, 3_600.5)
    make_due(connection, first)
    tick(connection, registry)
    old, new = tasks(connection)
    share = jitter_share(new["id"])
    assert 0 < share < 1
    waits = new["enqueued_at"] - new["scheduled_for"]
    assert abs(waits.total_seconds() - 1_000 * share) < 1
    # The slot of an hour ago has waited long enough.
    assert old["enqueued_at"] <= database_now(connection)
    shares = [jitter_share(run_id("report", first + number * HOUR)) for number in range(50)]
    assert max(shares) - min(shares) > 0.5


def test_the_slot_is_passed_to_a_task_that_asks_for_it(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(task_name="dated", args=("for",), catch_up_missed=True))
    registry = enter(connection, app)
    first = ago(connection, 3_601).replace(microsecond=0)
    make_due(connection, first)
    tick(connection, registry)
    passed = [json.loads(task["kwargs"]) for task in tasks(connection)]
    assert [one["text"] for one in passed] == ["for", "for"]
    moments = [datetime.fromisoformat(one["scheduled_for"]) for one in passed]
    assert moments == [first, first + HOUR]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *(pytest.param(TASKS, status, id=f"task-{status}") for status in TASKS.unfinished),
        *(pytest.param(RUNS, status, id=f"run-{status}") for status in RUNS.unfinished),
    ],
)
def test_overlap_waits_for_or_gives_way_to_an_unfinished_task_or_run(
    connection: Database, make_app: MakeApp, kind: Kind, status: str
) -> None:
    names = ("allow", "skip", "queue")
    registry = enter(connection, make_app(*(kind.schedule(name, overlap=name) for name in names)))
    first = ago(connection, 3_601)
    make_due(connection, first)
    tick(connection, registry)
    connection.execute(kind.change, (status,))
    second = ago(connection, 1)
    make_due(connection, second)
    tick(connection, registry)
    assert kind.slots(connection, "allow") == [first + HOUR, second]
    assert kind.slots(connection, "skip") == kind.slots(connection, "queue") == [first + HOUR]
    skipped, queued = state(connection, "skip"), state(connection, "queue")
    assert (skipped["skip_reason"], skipped["next_run_at"]) == ("OVERLAP", second + HOUR)
    assert (queued["next_run_at"], queued["run_count"]) == (second, 1)
    connection.execute(kind.change, (kind.ended,))
    tick(connection, registry)
    assert kind.slots(connection, "queue") == [first + HOUR, second]
    assert kind.slots(connection, "skip") == [first + HOUR]


def test_a_waiting_schedule_does_not_keep_the_scheduler_busy(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule(overlap="queue"), schedule("other")))
    make_due(connection, ago(connection, 3_601), "report")
    tick(connection, registry)
    make_due(connection, ago(connection, 1), "report")
    ticked = tick(connection, registry)
    assert ticked.fired == []
    assert ticked.seconds_until_next is not None
    assert ticked.seconds_until_next > 3_000


def test_a_queueing_schedule_catches_up_one_task_at_a_time(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule(overlap="queue", catch_up_missed=True)))
    first = ago(connection, 2 * 3600 + 60)
    make_due(connection, first)
    for count in (1, 2, 3, 3):
        tick(connection, registry)
        tick(connection, registry)
        assert slots(connection) == [first + number * HOUR for number in range(count)]
        connection.execute("UPDATE horsies_tasks SET status = 'FAILED'")


def test_a_paused_schedule_does_not_fire_and_goes_on_after_the_pause(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(), schedule("thorough", catch_up_missed=True))
    registry = enter(connection, app)
    for name in ("report", "thorough"):
        run_script(connection, switch_script(name, pause_schedule))
    first = ago(connection, 2 * 3600 + 60)
    make_due(connection, first)
    assert tick(connection, registry).seconds_until_next is None
    assert tasks(connection, None) == []
    for name in ("report", "thorough"):
        run_script(connection, switch_script(name, resume_schedule))
    tick(connection, registry)
    assert slots(connection) == []
    assert state(connection)["next_run_at"] == first + 3 * HOUR
    assert state(connection)["skip_reason"] == "PAUSED"
    assert slots(connection, "thorough") == [first + number * HOUR for number in range(3)]


def test_a_thousand_due_schedules_are_sent_by_at_most_three_statements(
    connection: Database, make_app: MakeApp
) -> None:
    names = [f"schedule {number}" for number in range(1_000)]
    patterns = [IntervalSchedule(hours=1), HourlySchedule(minute=5), DailySchedule(time="06:00")]  # type: ignore[arg-type]
    app = make_app(
        *(
            schedule(name, pattern=patterns[number % 3], timezone="Europe/Berlin")
            for number, name in enumerate(names)
        )
    )
    registry = enter(connection, app)
    make_due(connection, ago(connection, 1))
    assert count_statements(connection, lambda: tick(connection, registry)) == 3
    # Reading, sending, looking ahead: without anything due the second is left out.
    assert count_statements(connection, lambda: tick(connection, registry)) == 2
    assert {task["schedule_name"] for task in tasks(connection, None)} == set(names)
    assert len(tasks(connection, None)) == 1_000
    due = connection.execute(
        "SELECT count(*) FROM horsies_schedule_state WHERE next_run_at <= now()"
    ).fetchone()
    assert due == (0,)


def test_one_tick_sends_a_bounded_number_of_tasks(
    connection: Database, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_module, "RUNS_MAX", 5)
    app = make_app(
        schedule("a", catch_up_missed=True),
        schedule("b", catch_up_missed=True),
        schedule("c", catch_up_missed=True),
    )
    registry = enter(connection, app)
    make_due(connection, ago(connection, 2 * 3600 + 60))
    counts = []
    for _ in range(2):
        tick(connection, registry)
        counts.append(len(tasks(connection, None)))
    assert counts == [5, 9]


def test_a_schedule_another_scheduler_has_taken_is_left_alone(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule()))
    make_due(connection, ago(connection, 1))
    # Both have read the same; the second to write finds that it is too late.
    due = find_due_schedules.run(connection, registry.find_due()[1])
    batch = columns(decide_all(registry, due))
    assert [one.name for one in fire_slots.run(connection, batch)] == ["report"]
    before = state(connection)
    assert fire_slots.run(connection, batch) == []
    assert state(connection) == before
    assert len(tasks(connection)) == 1


def test_a_schedule_that_is_locked_is_skipped_and_not_waited_for(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    registry = enter(connection, make_app(schedule(), schedule("other")))
    make_due(connection, ago(connection, 1))
    with psycopg.connect(process_url) as holder:
        holder.execute(
            "SELECT FROM horsies_schedule_state WHERE schedule_name = 'report' FOR UPDATE"
        )
        connection.execute("SET lock_timeout = '2s'")
        tick(connection, registry)
        assert (len(tasks(connection)), len(tasks(connection, "other"))) == (0, 1)
    tick(connection, registry)
    assert len(tasks(connection)) == 1


def test_a_pause_between_reading_and_writing_counts(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    due = find_due_schedules.run(connection, registry.find_due()[1])
    run_script(connection, switch_script("report", pause_schedule))
    assert fire_slots.run(connection, columns(decide_all(registry, due))) == []
    assert tasks(connection) == []


def test_schedulers_that_tick_together_send_every_slot_once(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    names = [f"schedule {number}" for number in range(20)]
    app = make_app(*(schedule(name, catch_up_missed=True) for name in names))
    registry = enter(connection, app)
    first = ago(connection, 5 * 3600 + 60)
    make_due(connection, first)
    tick_at_once(process_url, registry, schedulers=4, times=5)
    for name in names:
        assert slots(connection, name) == [first + number * HOUR for number in range(6)]
        assert state(connection, name)["run_count"] == 6


def test_a_task_that_is_there_already_is_not_sent_again(
    connection: Database, make_app: MakeApp
) -> None:
    """As after a crash between a task and the note of it, were they not one statement."""
    registry = enter(connection, make_app(schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    tick(connection, registry)
    before = tasks(connection)
    make_due(connection, due_at)
    tick(connection, registry)
    assert tasks(connection) == before
    assert state(connection)["next_run_at"] == due_at + HOUR


def test_a_schedule_the_database_refuses_does_not_keep_the_others_back(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    registry = enter(connection, make_app(schedule("bad"), schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    connection.execute(
        "ALTER TABLE horsies_tasks ADD CONSTRAINT refusal CHECK (schedule_name <> 'bad') NOT VALID"
    )
    try:
        tick(connection, registry)
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refusal")
    assert slots(connection) == [due_at]
    bad = state(connection, "bad")
    assert (bad["next_run_at"], bad["skip_reason"]) == (due_at + HOUR, "REFUSED")
    assert (bad["run_count"], bad["last_task_id"]) == (0, None)
    assert "schedule 'bad' cannot be stored" in caplog.text


@pytest.mark.parametrize("trigger", [IMMEDIATE, DEFERRED], ids=["immediate", "deferred"])
@pytest.mark.parametrize("state_of_error", ["23514", "42P01", "08001"])
def test_a_trigger_that_refuses_one_schedule_does_not_keep_the_others_back(
    connection: Database, make_app: MakeApp, trigger: LiteralString, state_of_error: str
) -> None:
    names = ["a", "b", "c", "d"]
    registry = enter(connection, make_app(schedule("bad"), *map(schedule, names)))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    refused = "NEW.schedule_name = 'bad'"
    with poisoned(connection, refused, state=state_of_error, event="INSERT", trigger=trigger):
        tick(connection, registry)
    for name in names:
        assert slots(connection, name) == [due_at]
    assert slots(connection, "bad") == []
    bad = state(connection, "bad")
    assert (bad["next_run_at"], bad["skip_reason"]) == (due_at + HOUR, "REFUSED")
    assert (bad["run_count"], bad["last_task_id"]) == (0, None)


@pytest.mark.parametrize("trigger", [IMMEDIATE, DEFERRED], ids=["immediate", "deferred"])
def test_a_schedule_whose_state_cannot_be_stored_stays_due_and_the_others_fire(
    connection: Database,
    make_app: MakeApp,
    trigger: LiteralString,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = enter(connection, make_app(schedule("bad"), schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    refused, table = "NEW.schedule_name = 'bad'", "horsies_schedule_state"
    with poisoned(connection, refused, table=table, trigger=trigger):
        tick(connection, registry)
    assert (slots(connection), slots(connection, "bad")) == ([due_at], [])
    assert state(connection, "bad")["next_run_at"] == due_at
    assert "schedule 'bad' cannot be stored and stays due" in caplog.text
    tick(connection, registry)
    assert (slots(connection), slots(connection, "bad")) == ([due_at], [due_at])


def test_a_failure_that_may_pass_leaves_the_slot_due(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    registry = enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    with psycopg.connect(process_url) as holder:
        holder.execute("LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            tick(connection, registry)
    assert state(connection)["next_run_at"] == LONG_AGO
    tick(connection, registry)
    assert len(tasks(connection)) == 1


def test_a_schedule_that_fails_again_and_again_with_an_error_that_may_pass_stays_due_alone(
    connection: Database,
    make_app: MakeApp,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = enter(connection, make_app(schedule("bad"), schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    refused = Refused()
    condition = "NEW.schedule_name = 'bad'"
    with poisoned(connection, condition, state="57014", event="INSERT"):
        for _ in range(PATIENCE - 1):
            with pytest.raises(psycopg.errors.QueryCanceled):
                tick(connection, registry, refused)
        for _ in range(2):
            tick(connection, registry, refused)
    assert (slots(connection), slots(connection, "bad")) == ([due_at], [])
    assert state(connection, "bad")["next_run_at"] == due_at
    assert caplog.text.count("schedule 'bad' cannot be stored and stays due") == 1
    refused.resting["bad"] = 0.0
    tick(connection, registry, refused)
    assert slots(connection, "bad") == [due_at]
