"""Ticks of schedules that start workflows: every due slot becomes its run, once."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from horsies.db.statements.schedules import find_due_schedules, fire_slots
from horsies.scheduler import tick as tick_module
from horsies.scheduler.targets import jitter_share, run_id
from horsies.scheduler.tick import columns, decide_all
from horsies.timetable.patterns import IntervalSchedule
from tests.support.database import Database
from tests.support.runs import end_runs
from tests.support.scheduling import (
    LONG_AGO,
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    run_slots,
    runs,
    schedule,
    slots,
    state,
    tick,
    tick_at_once,
    workflow_schedule,
)
from tests.support.statements import count_statements

HOUR = timedelta(hours=1)


def nodes_and_tasks(connection: Database, workflow_id: str) -> list[Any]:
    return connection.execute(
        "SELECT node.node_id, node.status, task.status, task.kwargs, task.schedule_name "
        "FROM horsies_workflow_tasks AS node LEFT JOIN horsies_tasks AS task ON task.id = node.task_id "
        "WHERE node.workflow_id = %s ORDER BY node.task_index",
        (workflow_id,),
    ).fetchall()


def test_a_due_slot_becomes_a_run_and_the_next_one_is_noted(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(workflow_schedule())
    registry = enter(connection, app)
    assert state(connection, "books")["definition_key"] == "scheduled.books"
    assert state(connection, "books")["task_name"] is None
    due_at = ago(connection, 0)
    make_due(connection, due_at)
    before = database_now(connection)
    tick(connection, registry)
    (run,) = runs(connection)
    assert run["id"] == run_id("books", due_at)
    assert (run["scheduled_for"], run["sent_at"], run["status"]) == (due_at, due_at, "RUNNING")
    assert (run["name"], run["definition_key"]) == ("books", "scheduled.books")
    assert nodes_and_tasks(connection, run["id"]) == [
        ("count", "ENQUEUED", "PENDING", '{"text":"count"}', None),
        ("close", "PENDING", None, None, None),
    ]
    now = state(connection, "books")
    assert now["next_run_at"] == due_at + HOUR
    assert before <= now["last_run_at"] <= database_now(connection)
    assert (str(now["last_task_id"]), now["run_count"]) == (run["id"], 1)
    (listed,) = app.schedules.list().unwrap()
    assert (listed.definition_key, listed.last_task_id) == ("scheduled.books", run["id"])
    assert listed.last_status == "RUNNING"
    end_runs(connection)
    assert app.schedules.list().unwrap()[0].last_status == "COMPLETED"


def test_nothing_starts_early_or_twice(connection: Database, make_app: MakeApp) -> None:
    registry = enter(connection, make_app(workflow_schedule()))
    tick(connection, registry)
    assert runs(connection) == []
    make_due(connection, ago(connection, 1))
    tick(connection, registry)
    tick(connection, registry)
    assert len(runs(connection)) == 1


def test_catch_up_starts_a_run_for_every_missed_slot_and_tells_it_the_slot(
    connection: Database, make_app: MakeApp
) -> None:
    one = workflow_schedule(
        definition="scheduled.dated", kwargs={"label": "of", "days": [7]}, catch_up_missed=True
    )
    registry = enter(connection, make_app(one))
    first = ago(connection, 2 * 3600 + 60)
    make_due(connection, first)
    tick(connection, registry)
    expected = [first + number * HOUR for number in range(3)]
    assert run_slots(connection) == expected
    ids = [run["id"] for run in runs(connection)]
    assert ids == sorted(ids) == [run_id("books", slot) for slot in expected]
    # What a build does to its parameters is not there in the next one.
    texts = [nodes_and_tasks(connection, one)[0][3] for one in ids]
    assert texts == [f'{{"text":"of 2 {slot.isoformat()}"}}' for slot in expected]
    now = state(connection, "books")
    assert (now["run_count"], now["next_run_at"]) == (3, first + 3 * HOUR)
    assert str(now["last_task_id"]) == ids[-1]


def test_without_catch_up_the_latest_missed_slot_is_started(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(workflow_schedule()))
    first = ago(connection, 4 * 3600 + 60)
    make_due(connection, first)
    tick(connection, registry)
    assert run_slots(connection) == [first + 4 * HOUR]
    assert state(connection, "books")["skip_reason"] == "MISSED"


def test_a_run_between_two_of_its_nodes_is_unfinished(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(workflow_schedule(overlap="queue", catch_up_missed=True)))
    first = ago(connection, 2 * 3600 + 60)
    make_due(connection, first)
    tick(connection, registry)
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED', result = '{\"ok\":\"\"}'")
    tick(connection, registry)
    assert run_slots(connection) == [first]
    end_runs(connection)
    tick(connection, registry)
    assert run_slots(connection) == [first, first + HOUR]


def test_a_workflow_that_cannot_be_built_loses_its_slot_and_keeps_nobody_back(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    broken = workflow_schedule(
        "broken", definition="scheduled.dated", kwargs={"label": "broken", "days": []}
    )
    registry = enter(connection, make_app(broken, workflow_schedule(), schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    with caplog.at_level(logging.ERROR, "horsies"):
        tick(connection, registry)
    assert (run_slots(connection), slots(connection)) == ([due_at], [due_at])
    assert runs(connection, "broken") == []
    bad = state(connection, "broken")
    assert (bad["next_run_at"], bad["skip_reason"]) == (due_at + HOUR, "REFUSED")
    assert (bad["run_count"], bad["last_task_id"], bad["last_run_at"]) == (0, None, None)
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged.startswith("schedule 'broken', slot ")
    assert "Workflow Dated could not be built: RuntimeError: no data of that day" in logged


def test_runs_add_no_statement_to_those_of_a_thousand_due_tasks(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(
        *(schedule(f"task {number}") for number in range(950)),
        *(workflow_schedule(f"run {number}") for number in range(50)),
    )
    registry = enter(connection, app)
    make_due(connection, ago(connection, 1))
    assert count_statements(connection, lambda: tick(connection, registry)) == 3
    assert len(runs(connection, None)) == 50
    sent = connection.execute(
        "SELECT count(*) FILTER (WHERE schedule_name IS NOT NULL), count(*) FROM horsies_tasks"
    ).fetchone()
    assert sent == (950, 1_000)


def test_one_tick_starts_a_bounded_number_of_nodes(
    connection: Database, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_module, "RUNS_MAX", 3)
    registry = enter(connection, make_app(*(workflow_schedule(name) for name in "abcde")))
    make_due(connection, ago(connection, 1))
    counts = []
    for _ in range(3):
        tick(connection, registry)
        counts.append(len(runs(connection, None)))
    # Two nodes each, and whoever comes when there is still room is let in.
    assert counts == [2, 4, 5]


def test_a_workflow_schedule_another_scheduler_has_taken_is_left_alone(
    connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(workflow_schedule()))
    make_due(connection, ago(connection, 1))
    batch = columns(
        decide_all(registry, find_due_schedules.run(connection, registry.find_due()[1]))
    )
    assert [one.name for one in fire_slots.run(connection, batch)] == ["books"]
    before = state(connection, "books")
    assert fire_slots.run(connection, batch) == []
    assert state(connection, "books") == before
    assert len(runs(connection)) == 1


def test_a_run_that_is_there_already_is_not_started_again(
    connection: Database, make_app: MakeApp
) -> None:
    """As after a crash between a run and the note of it, were they not one statement."""
    registry = enter(connection, make_app(workflow_schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    tick(connection, registry)
    end_runs(connection)
    before = runs(connection)
    make_due(connection, due_at)
    tick(connection, registry)
    assert runs(connection) == before
    assert state(connection, "books")["next_run_at"] == due_at + HOUR


def test_a_crash_before_the_commit_leaves_nothing_behind(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    registry = enter(connection, make_app(workflow_schedule(), schedule()))
    make_due(connection, LONG_AGO)
    before = state(connection, "books")
    with psycopg.connect(process_url) as dying:
        due = find_due_schedules.run(dying, registry.find_due()[1])
        assert len(fire_slots.run(dying, columns(decide_all(registry, due)))) == 2
        dying.rollback()
    assert state(connection, "books") == before
    assert (runs(connection, None), slots(connection, None)) == ([], [])
    tick(connection, registry)
    assert (len(runs(connection)), len(slots(connection))) == (1, 1)


def test_schedulers_that_tick_together_start_every_slot_once(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    names = [f"schedule {number}" for number in range(10)]
    app = make_app(*(workflow_schedule(name, catch_up_missed=True) for name in names))
    registry = enter(connection, app)
    first = ago(connection, 3 * 3600 + 60)
    make_due(connection, first)
    tick_at_once(process_url, registry, schedulers=2, times=4)
    for name in names:
        assert run_slots(connection, name) == [first + number * HOUR for number in range(4)]
        assert state(connection, name)["run_count"] == 4


def test_a_run_the_database_refuses_does_not_keep_the_others_back(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    bad = workflow_schedule("bad", definition="scheduled.dated", kwargs={"label": "a", "days": []})
    registry = enter(connection, make_app(bad, workflow_schedule(), schedule()))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    connection.execute(
        "ALTER TABLE horsies_workflows ADD CONSTRAINT refusal CHECK (name <> 'dated') NOT VALID"
    )
    try:
        tick(connection, registry)
    finally:
        connection.execute("ALTER TABLE horsies_workflows DROP CONSTRAINT refusal")
    assert (run_slots(connection), slots(connection)) == ([due_at], [due_at])
    refused = state(connection, "bad")
    assert (refused["next_run_at"], refused["skip_reason"]) == (due_at + HOUR, "REFUSED")
    assert "schedule 'bad' cannot be stored" in caplog.text


def test_a_failure_that_may_pass_leaves_all_slots_due(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    registry = enter(connection, make_app(workflow_schedule(), schedule()))
    make_due(connection, LONG_AGO)
    with psycopg.connect(process_url) as holder:
        holder.execute("LOCK TABLE horsies_workflow_tasks IN SHARE MODE")
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            tick(connection, registry)
    assert state(connection, "books")["next_run_at"] == LONG_AGO
    assert (runs(connection), slots(connection)) == ([], [])
    tick(connection, registry)
    assert (len(runs(connection)), len(slots(connection))) == (1, 1)


def test_jitter_lets_the_first_tasks_of_a_run_wait(connection: Database, make_app: MakeApp) -> None:
    one = workflow_schedule(
        definition="scheduled.waiting",
        pattern=IntervalSchedule(days=2),
        jitter_seconds=86_400,
        catch_up_missed=True,
    )
    registry = enter(connection, make_app(one))
    latest = ago(connection, 0.5)
    make_due(connection, latest - timedelta(days=2))
    tick(connection, registry)
    old, new = (first_tasks(connection, run["id"]) for run in runs(connection))
    begins_at = latest + timedelta(seconds=86_400 * jitter_share(run_id("books", latest)))
    assert begins_at > database_now(connection)
    assert abs(new["plain"][0] - begins_at) < timedelta(seconds=1)
    assert abs(new["sleep"][0] - begins_at - timedelta(seconds=100)) < timedelta(seconds=1)
    assert abs(new["urgent"][1] - begins_at - timedelta(seconds=60)) < timedelta(seconds=1)
    assert new["until"][0] == datetime(2090, 1, 1, tzinfo=UTC)
    assert new["signal"][0] == datetime(9999, 1, 1, tzinfo=UTC)
    # The slot of two days ago has waited long enough.
    assert old["plain"][0] <= database_now(connection)
    assert old["until"][0] == new["until"][0]


def first_tasks(connection: Database, workflow_id: str) -> dict[str, tuple[datetime, Any]]:
    """When the tasks of a run's nodes may begin, and until when."""
    rows = connection.execute(
        "SELECT node.node_id, task.enqueued_at, task.good_until FROM horsies_workflow_tasks AS node "
        "JOIN horsies_tasks AS task ON task.id = node.task_id WHERE node.workflow_id = %s",
        (workflow_id,),
    )
    return {name: (at.astimezone(UTC), until and until.astimezone(UTC)) for name, at, until in rows}
