"""app.schedules: schedules that live in the database, and orders for all of them, in both faces."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, time, timedelta
from typing import Any

import psycopg
import pytest

from horsies import FernetCodec
from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import ErrorCode, HorsiesError
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.handle import TaskHandle
from horsies.timetable.patterns import CronSchedule, DailySchedule, IntervalSchedule
from tests.support.applications import Call
from tests.support.database import Database, lock_waiters
from tests.support.scheduling import (
    LONG_AGO,
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    registry_of,
    schedule,
    slots,
    state,
    stored_schedule,
    tasks,
    tick,
)
from tests.support.wait import wait_until


def code_of(done: Any) -> BrokerErrorCode:
    code = done.unwrap_err().code
    assert isinstance(code, BrokerErrorCode)
    return code


def test_an_added_schedule_is_served_by_every_scheduler_that_knows_its_task(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    before = database_now(connection)
    added = schedule("digest", task_name="dated", args=("hi",), queue_name="fast", priority=9)
    known = call(app, app.schedules, "add", added).unwrap()
    assert (known.name, known.task_name, known.is_dynamic) == ("digest", "dated", True)
    assert known.next_run_at.astimezone(UTC) >= before + timedelta(hours=1)
    # A scheduler that was running all the time, with no such schedule in its configuration.
    registry = registry_of(make_app(schedule("other")))
    due_at = ago(connection, 1)
    make_due(connection, due_at)
    tick(connection, registry)
    (task,) = tasks(connection, "digest")
    assert (task["queue_name"], task["priority"]) == ("fast", 9)
    passed = json.loads(task["kwargs"])
    assert passed["text"] == "hi"
    assert datetime.fromisoformat(passed["scheduled_for"]) == due_at


def test_a_scheduler_that_does_not_know_the_task_leaves_the_schedule_alone(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    make_app().schedules.add(schedule("digest")).unwrap()
    make_due(connection, LONG_AGO)
    stranger = Horsies(
        AppConfig(broker=PostgresConfig(database_url=process_url), schedule={"schedules": []})  # type: ignore[arg-type]
    )
    ticked = tick(connection, registry_of(stranger))
    assert (ticked.fired, ticked.seconds_until_next) == ([], None)
    assert state(connection, "digest")["next_run_at"] == LONG_AGO


def test_all_values_of_a_schedule_survive_the_database(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    whole = schedule(
        "digest",
        task_name="careful",
        kwargs={"a": 5},
        pattern=CronSchedule.parse("*/7 1-5 13 jan,feb fri", days="both"),
        timezone="Asia/Tokyo",
        on_dst_gap="shift",
        start_at=datetime(2026, 1, 1, tzinfo=UTC),
        end_at=datetime(2090, 1, 1, tzinfo=UTC),
        jitter_seconds=3,
        catch_up_missed=True,
        max_catch_up_runs=7,
        misfire_grace_seconds=60,
        overlap="queue",
        good_for_seconds=30,
        priority=4,
    )
    app.schedules.add(whole).unwrap()
    assert stored_schedule(connection, app) == whole


def test_adding_the_same_again_changes_nothing(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    call(app, app.schedules, "add", schedule("digest", args=("a",))).unwrap()
    make_due(connection, LONG_AGO)
    again = call(app, app.schedules, "add", schedule("digest", kwargs={"text": "a"})).unwrap()
    assert again.next_run_at.astimezone(UTC) == LONG_AGO


def test_another_schedule_of_that_name_needs_replace(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    call(app, app.schedules, "add", schedule("digest")).unwrap()
    make_due(connection, LONG_AGO)
    other = schedule("digest", kwargs={"text": "b"})
    refused = call(app, app.schedules, "add", other)
    assert code_of(refused) is BrokerErrorCode.SCHEDULE_EXISTS
    # With the same timing the next slot is kept; another timing gets a new one.
    kept = call(app, app.schedules, "add", other, replace=True).unwrap()
    assert kept.next_run_at.astimezone(UTC) == LONG_AGO
    moved = schedule("digest", pattern=IntervalSchedule(hours=2))
    anew = call(app, app.schedules, "add", moved, replace=True).unwrap()
    assert anew.next_run_at > database_now(connection)


def test_another_schedule_that_was_stored_meanwhile_is_not_overwritten(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    app = make_app()
    first = schedule("digest")
    app.schedules.add(first).unwrap()
    app.schedules.add(schedule("other", kwargs={"text": "b"})).unwrap()
    with ThreadPoolExecutor(1) as pool, psycopg.connect(process_url) as rival:
        rival.execute(
            "UPDATE horsies_schedule_state SET definition = other.definition "
            "FROM horsies_schedule_state AS other "
            "WHERE horsies_schedule_state.schedule_name = 'digest' AND other.schedule_name = 'other'"
        )
        adding = pool.submit(app.schedules.add, first)
        wait_until(lambda: lock_waiters(connection))
        rival.commit()
        assert code_of(adding.result()) is BrokerErrorCode.SCHEDULE_EXISTS
    assert state(connection, "digest")["definition"] == state(connection, "other")["definition"]


@pytest.mark.parametrize("is_same", [True, False])
def test_of_two_first_adds_at_once_the_second_finds_the_schedule_of_the_first(
    connection: Database, make_app: MakeApp, process_url: str, is_same: bool
) -> None:
    codec = FernetCodec(FernetCodec.new_key())
    app = make_app(broker=PostgresConfig(database_url=process_url, pool_size=1, codec=codec))
    app.schedules.add(schedule("digest")).unwrap()
    wanted = schedule("digest", kwargs={} if is_same else {"text": "b"})
    with ThreadPoolExecutor(1) as pool, psycopg.connect(process_url) as rival:
        rival.execute("CREATE TEMP TABLE kept AS SELECT * FROM horsies_schedule_state")
        rival.execute("DELETE FROM horsies_schedule_state")
        rival.commit()
        rival.execute("INSERT INTO horsies_schedule_state SELECT * FROM kept")
        adding = pool.submit(app.schedules.add, wanted)
        wait_until(lambda: lock_waiters(connection))
        rival.commit()
        added = adding.result()
    if is_same:
        assert added.unwrap().name == "digest"
    else:
        assert code_of(added) is BrokerErrorCode.SCHEDULE_EXISTS
        assert "There is another schedule 'digest' already" in added.unwrap_err().message


def test_names_of_configurations_are_not_given_away(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule())
    refused = call(app, app.schedules, "add", schedule(), replace=True)
    assert code_of(refused) is BrokerErrorCode.SCHEDULE_EXISTS
    assert "change its timing with app.schedules.edit" in refused.unwrap_err().message
    enter(connection, app)
    elsewhere = make_app()
    refused = call(elsewhere, elsewhere.schedules, "add", schedule(), replace=True)
    assert code_of(refused) is BrokerErrorCode.SCHEDULE_EXISTS
    assert state(connection)["definition"] is None


def test_a_configuration_takes_over_a_schedule_of_its_name(
    connection: Database, make_app: MakeApp
) -> None:
    make_app().schedules.add(schedule(kwargs={"text": "stored"})).unwrap()
    make_due(connection, LONG_AGO)
    registry = enter(connection, make_app(schedule(kwargs={"text": "configured"})))
    tick(connection, registry)
    assert [task["kwargs"] for task in tasks(connection)] == ['{"text":"configured"}']


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"task_name": "nothing"}, ErrorCode.TASK_NOT_REGISTERED, "there is no task 'nothing'"),
        ({"timezone": "Nowhere/Else"}, ErrorCode.CONFIG_INVALID_SCHEDULE, "no time zone"),
        ({"queue_name": "slow"}, ErrorCode.CONFIG_INVALID_SCHEDULE, "There is no queue 'slow'"),
        ({"kwargs": {"text": 5}}, ErrorCode.CONFIG_INVALID_SCHEDULE, "text"),
        ({"enabled": False}, ErrorCode.CONFIG_INVALID_SCHEDULE, "pause it instead"),
    ],
)
def test_mistakes_in_an_added_schedule_are_raised(
    connection: Database, make_app: MakeApp, fields: Any, code: ErrorCode, message: str
) -> None:
    app = make_app()
    with pytest.raises(HorsiesError, match=message) as raised:
        app.schedules.add(schedule("digest", **fields))
    assert raised.value.code is code
    assert app.schedules.list().unwrap() == []


def test_a_schedule_whose_task_has_changed_stays_due_and_is_reported_once(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    app.schedules.add(schedule("digest")).unwrap()
    app.schedules.add(schedule("fine")).unwrap()
    stored = state(connection, "digest")["definition"]
    changed = json.loads(stored) | {"kwargs": '{"removed_parameter":1}'}
    connection.execute(
        "UPDATE horsies_schedule_state SET definition = %s WHERE schedule_name = 'digest'",
        (json.dumps(changed),),
    )
    make_due(connection, LONG_AGO)
    registry = registry_of(app)
    tick(connection, registry)
    tick(connection, registry)
    assert state(connection, "digest")["next_run_at"] == LONG_AGO
    assert len(tasks(connection, "fine")) == 1
    assert caplog.text.count("schedule 'digest' cannot be served") == 1


def test_removing_ends_a_schedule_and_keeps_its_tasks(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    app.schedules.add(schedule("digest")).unwrap()
    make_due(connection, LONG_AGO)
    tick(connection, registry_of(app))
    assert call(app, app.schedules, "remove", "digest").unwrap() is None
    assert app.schedules.list().unwrap() == []
    assert len(tasks(connection, "digest")) == 1
    assert code_of(call(app, app.schedules, "remove", "digest")) is BrokerErrorCode.UNKNOWN_SCHEDULE


def test_a_configured_schedule_is_not_removed(connection: Database, make_app: MakeApp) -> None:
    app = make_app(schedule())
    enter(connection, app)
    refused = app.schedules.remove("report")
    assert "belongs to a configuration" in refused.unwrap_err().message
    assert state(connection)["schedule_name"] == "report"


def test_a_list_tells_where_every_schedule_stands(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule())
    registry = enter(connection, app)
    app.schedules.add(schedule("digest", pattern=DailySchedule(time=time(8)))).unwrap()
    make_due(connection, ago(connection, 1), "report")
    tick(connection, registry)
    connection.execute("UPDATE horsies_tasks SET status = 'RUNNING'")
    digest, report = call(app, app.schedules, "list").unwrap()
    assert (digest.name, digest.is_dynamic, digest.run_count) == ("digest", True, 0)
    assert (report.name, report.is_dynamic, report.run_count) == ("report", False, 1)
    assert (report.last_status, report.is_paused) == ("RUNNING", False)
    assert report.last_task_id == tasks(connection)[0]["id"]


def test_pausing_and_resuming_say_what_they_did(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    paused = call(app, app.schedules, "pause", "report").unwrap()
    assert paused.is_paused
    again = call(app, app.schedules, "pause", "report").unwrap()
    assert again.paused_at == paused.paused_at
    assert not call(app, app.schedules, "resume", "report").unwrap().is_paused
    resumed_at = state(connection)["resumed_at"]
    call(app, app.schedules, "resume", "report").unwrap()
    assert state(connection)["resumed_at"] == resumed_at
    for order in ("pause", "resume"):
        refused = call(app, app.schedules, order, "nothing")
        assert code_of(refused) is BrokerErrorCode.UNKNOWN_SCHEDULE


def test_a_run_by_order_is_one_more_task_and_leaves_the_timetable_alone(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule(task_name="dated", args=("x",)))
    enter(connection, app)
    before = state(connection)
    ordered_at = database_now(connection)
    handle = call(app, app.schedules, "run", "report").unwrap()
    (task,) = tasks(connection)
    assert (task["id"], task["scheduled_for"]) == (handle.task_id, None)
    moment = datetime.fromisoformat(json.loads(task["kwargs"])["scheduled_for"])
    assert ordered_at <= moment <= database_now(connection)
    after = state(connection)
    assert after["next_run_at"] == before["next_run_at"]
    assert (after["run_count"], str(after["last_task_id"])) == (1, handle.task_id)
    again = app.schedules.run("report").unwrap()
    assert isinstance(again, TaskHandle)
    assert again.task_id != handle.task_id


def test_a_schedule_can_be_run_before_any_scheduler_has_started(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(enabled=False))
    handle = app.schedules.run("report").unwrap()
    assert isinstance(handle, TaskHandle)
    assert [task["id"] for task in tasks(connection)] == [handle.task_id]
    assert code_of(app.schedules.run("nothing")) is BrokerErrorCode.UNKNOWN_SCHEDULE


def test_an_added_schedule_can_be_run_by_order(connection: Database, make_app: MakeApp) -> None:
    app = make_app()
    app.schedules.add(schedule("digest", task_name="careful", args=(5,))).unwrap()
    app.schedules.run("digest").unwrap()
    (task,) = tasks(connection, "digest")
    assert (json.loads(task["kwargs"]), task["max_retries"]) == ({"a": 5}, 2)


def test_an_ordered_run_counts_as_unfinished_for_the_next_slot(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(overlap="skip"))
    registry = enter(connection, app)
    app.schedules.run("report").unwrap()
    make_due(connection, ago(connection, 1))
    tick(connection, registry)
    assert slots(connection) == [None]
    assert state(connection)["skip_reason"] == "OVERLAP"


def test_the_next_slots_are_told_from_the_record(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    end_at = LONG_AGO + timedelta(hours=3)
    app = make_app(schedule(end_at=end_at), schedule("other"))
    enter(connection, app)
    make_due(connection, LONG_AGO)
    expected = [LONG_AGO + number * timedelta(hours=1) for number in range(4)]
    assert call(app, app.schedules, "next_runs", "report").unwrap() == expected
    assert len(call(app, app.schedules, "next_runs", "other", 3).unwrap()) == 3
    connection.execute("UPDATE horsies_schedule_state SET next_run_at = NULL")
    assert call(app, app.schedules, "next_runs", "report").unwrap() == []
    refused = call(app, app.schedules, "next_runs", "nothing")
    assert code_of(refused) is BrokerErrorCode.UNKNOWN_SCHEDULE


def test_a_name_or_a_count_left_empty_is_neither_the_first_schedule_nor_endless(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    for method in ("pause", "resume", "next_runs"):
        refused = call(app, app.schedules, method, None)
        assert code_of(refused) is BrokerErrorCode.UNKNOWN_SCHEDULE
    assert call(app, app.schedules, "next_runs", "report", None).is_err()
    assert call(app, app.schedules, "next_runs", "report", -1).unwrap() == []


def test_the_runs_of_a_schedule_are_its_tasks_newest_first(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule(catch_up_missed=True))
    registry = enter(connection, app)
    make_due(connection, ago(connection, 2 * 3600 + 60))
    tick(connection, registry)
    app.schedules.run("report").unwrap()
    runs = call(app, app.schedules, "runs", "report").unwrap()
    assert [run.scheduled_for is None for run in runs] == [True, False, False, False]
    assert [run.scheduled_for for run in runs[1:]] == slots(connection)[2::-1]
    assert {run.status for run in runs} == {"PENDING"}
    assert len(call(app, app.schedules, "runs", "report", 2).unwrap()) == 2
    assert code_of(call(app, app.schedules, "runs", "nothing")) is BrokerErrorCode.UNKNOWN_SCHEDULE


def test_nothing_is_changed_while_modules_are_imported(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    with app.sends_suppressed():
        refused = call(app, app.schedules, "add", schedule())
        assert "suppressed" in refused.unwrap_err().message
        assert call(app, app.schedules, "list").unwrap() == []


def test_a_change_of_a_schedule_without_a_database_is_a_value(call: Call) -> None:
    url = "postgresql://app:hunter2@127.0.0.1:1/shop"
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=url)))
    refused = call(app, app.schedules, "list").unwrap_err()
    assert refused.code is BrokerErrorCode.SCHEDULE_OPERATION_FAILED
    assert refused.retryable
    assert "hunter2" not in refused.message


def test_changes_are_told_to_schedulers(connection: Database, make_app: MakeApp) -> None:
    app = make_app()
    connection.execute("LISTEN horsies_schedules")
    app.schedules.add(schedule("digest")).unwrap()
    app.schedules.pause("digest").unwrap()
    app.schedules.resume("digest").unwrap()
    app.schedules.remove("digest").unwrap()
    heard = [note.payload for note in connection.notifies(timeout=30, stop_after=4)]
    assert heard == ["digest"] * 4
