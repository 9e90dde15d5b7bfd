"""Schedules of workflows that live in the database, runs by order, and what operators see of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from horsies.errors import ErrorCode, HorsiesError
from horsies.scheduler.registry import Registry
from horsies.tasks.broker import BrokerErrorCode
from horsies.workflow.definition import definition_by_key
from horsies.workflow.run.handle import WorkflowHandle
from tests.support.applications import Call
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.runs import end_runs
from tests.support.scheduling import (
    LONG_AGO,
    MakeApp,
    ago,
    enter,
    make_due,
    registry_of,
    run_slots,
    runs,
    schedule,
    state,
    stored_schedule,
    tick,
    workflow_schedule,
)

FITTING = {"label": "a", "days": [1, 2]}


def test_an_added_schedule_is_stored_with_the_key_of_its_workflow_and_served(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app()
    dated = definition_by_key("scheduled.dated")
    added = workflow_schedule("digest", definition=dated, kwargs=FITTING)
    known = call(app, app.schedules, "add", added).unwrap()
    assert (known.definition_key, known.task_name) == ("scheduled.dated", None)
    assert known.is_dynamic
    # A scheduler that was running all the time, with no such schedule in its configuration.
    registry = registry_of(make_app(schedule("other")))
    due_at = ago(connection, 1)
    make_due(connection, due_at, "digest")
    tick(connection, registry)
    (run,) = runs(connection, "digest")
    assert (run["scheduled_for"], run["definition_key"]) == (due_at, "scheduled.dated")
    (text,) = connection.execute("SELECT kwargs FROM horsies_tasks").fetchall()[0]
    assert json.loads(text)["text"] == f"a 3 {due_at.isoformat()}"


def test_all_values_of_a_workflow_schedule_survive_the_database(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    whole = workflow_schedule(
        "digest",
        definition="scheduled.dated",
        kwargs=FITTING,
        timezone="Asia/Tokyo",
        on_dst_gap="shift",
        start_at=datetime(2026, 1, 1, tzinfo=UTC),
        end_at=datetime(2090, 1, 1, tzinfo=UTC),
        jitter_seconds=3,
        catch_up_missed=True,
        max_catch_up_runs=7,
        misfire_grace_seconds=60,
        overlap="queue",
    )
    app.schedules.add(whole).unwrap()
    assert stored_schedule(connection, app) == whole


def test_a_scheduler_that_builds_no_workflows_leaves_the_schedule_alone(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    app.schedules.add(workflow_schedule("digest")).unwrap()
    make_due(connection, LONG_AGO)
    ticked = tick(connection, Registry.of(app.config, app.definitions(), "tests"))
    assert (ticked.fired, ticked.seconds_until_next) == ([], None)
    assert state(connection, "digest")["next_run_at"] == LONG_AGO


def test_a_stored_schedule_whose_workflow_is_broken_today_loses_the_slot_and_goes_on(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    app.schedules.add(
        workflow_schedule("digest", definition="scheduled.dated", kwargs=FITTING)
    ).unwrap()
    stored = state(connection, "digest")["definition"]
    connection.execute(
        "UPDATE horsies_schedule_state SET definition = %s",
        (stored.replace(r"\"a\"", r"\"broken\""),),
    )
    make_due(connection, LONG_AGO)
    tick(connection, registry_of(app))
    now = state(connection, "digest")
    assert "broken" in now["definition"]
    assert (now["skip_reason"], now["run_count"]) == ("REFUSED", 0)
    assert now["next_run_at"] > LONG_AGO


def test_a_task_gives_way_to_a_workflow_under_the_same_name(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    app.schedules.add(schedule("digest")).unwrap()
    make_due(connection, ago(connection, 5_400))
    tick(connection, registry_of(app))
    assert app.schedules.add(workflow_schedule("digest"), replace=True).is_ok()
    now = state(connection, "digest")
    assert (now["task_name"], now["definition_key"]) == (None, "scheduled.books")
    make_due(connection, ago(connection, 1))
    tick(connection, registry_of(app))
    kinds = [run.is_workflow for run in app.schedules.runs("digest").unwrap()]
    assert kinds == [True, False]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"definition": "nothing"}, ErrorCode.CONFIG_INVALID_SCHEDULE),
        ({"kwargs": {"label": "a"}}, ErrorCode.CONFIG_INVALID_SCHEDULE),
        ({"kwargs": FITTING | {"label": "broken"}}, ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION),
    ],
)
def test_a_schedule_that_cannot_be_served_is_not_stored(
    connection: Database, make_app: MakeApp, fields: dict[str, Any], code: ErrorCode
) -> None:
    wrong = workflow_schedule("digest", **{"definition": "scheduled.dated", **fields})
    with pytest.raises(HorsiesError) as raised:
        make_app().schedules.add(wrong)
    assert raised.value.code is code
    assert connection.execute("SELECT FROM horsies_schedule_state").fetchall() == []


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_run_by_order_starts_the_workflow_and_leaves_the_timetable_alone(
    connection: Database, make_app: MakeApp, call: Call, is_dynamic: bool
) -> None:
    app = make_app(*(() if is_dynamic else (workflow_schedule(jitter_seconds=60),)))
    enter(connection, app)
    if is_dynamic:
        app.schedules.add(workflow_schedule()).unwrap()
    before = state(connection, "books")
    handle = call(app, app.schedules, "run", "books").unwrap()
    assert isinstance(handle, WorkflowHandle)
    (run,) = runs(connection)
    assert (run["id"], run["scheduled_for"], run["status"]) == (handle.workflow_id, None, "RUNNING")
    now = state(connection, "books")
    assert (now["run_count"], str(now["last_task_id"])) == (1, run["id"])
    assert now["next_run_at"] == before["next_run_at"]
    end_runs(connection)
    result = app.workflow_handle(handle.workflow_id).get(timeout_ms=30_000)
    assert result.ok_value == "done"
    (listed,) = call(app, app.schedules, "runs", "books").unwrap()
    assert (listed.task_id, listed.is_workflow, listed.status) == (run["id"], True, "COMPLETED")
    assert (listed.scheduled_for, listed.error_code) == (None, None)


def test_a_run_by_order_of_a_broken_workflow_is_an_error(
    connection: Database, make_app: MakeApp
) -> None:
    broken = workflow_schedule(definition="scheduled.dated", kwargs=FITTING | {"label": "broken"})
    app = make_app(broken)
    enter(connection, app)
    refused = app.schedules.run("books").unwrap_err()
    assert refused.code is BrokerErrorCode.SCHEDULE_OPERATION_FAILED
    assert "no data of that day" in refused.message
    assert runs(connection) == []
    assert state(connection, "books")["run_count"] == 0


def test_failed_runs_are_listed_with_their_errors_newest_first(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(workflow_schedule(catch_up_missed=True))
    registry = enter(connection, app)
    make_due(connection, ago(connection, 3_601))
    tick(connection, registry)
    old, new = runs(connection)
    connection.execute(
        "UPDATE horsies_tasks SET status = 'FAILED', error_code = 'BAD', "
        'result = \'{"err":{"error_code":"BAD","message":"no"}}\' WHERE workflow_id = %s',
        (old["id"],),
    )
    listed = app.schedules.runs("books").unwrap()
    assert [run.task_id for run in listed] == [new["id"], old["id"]]
    assert [run.status for run in listed] == ["RUNNING", "FAILED"]
    assert [run.error_code for run in listed] == [None, "BAD"]
    assert [run.scheduled_for.astimezone(UTC) for run in listed if run.scheduled_for] == list(
        reversed(run_slots(connection))
    )


def test_operators_see_the_workflow_of_a_schedule_and_the_schedule_of_a_run(
    horsies: Run, connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(workflow_schedule()))
    make_due(connection, LONG_AGO)
    tick(connection, registry)
    (run,) = runs(connection)
    assert "scheduled.books" in horsies("schedules").out
    (line,) = horsies("schedules", "runs", "books").out.splitlines()[1:]
    assert line.split()[:2] == [run["id"], "RUNNING"]
    shown = [line.split() for line in horsies("workflow", "show", run["id"]).out.splitlines()]
    assert ["schedule", "books"] in shown
    slot = run["scheduled_for"].strftime("%Y-%m-%d")
    assert any(line[:2] == ["slot", slot] for line in shown)
    document = json.loads(horsies("workflow", "show", run["id"], "--json").out)
    assert document["schedule_name"] == "books"
    assert datetime.fromisoformat(document["scheduled_for"]) == run["scheduled_for"]


APP = """
import os
from horsies import (AppConfig, Horsies, IntervalSchedule, PostgresConfig, ScheduleConfig, TaskError,
                     TaskResult, WorkflowDefinition, WorkflowSchedule)

app = Horsies(AppConfig(
    broker=PostgresConfig(database_url=os.environ["SHOP_URL"]),
    schedule=ScheduleConfig(schedules=[
        WorkflowSchedule(name="books", definition="shop.books", pattern=IntervalSchedule(hours=1)),
    ]),
))

@app.task("note")
def note(text: str) -> TaskResult[str, TaskError]:
    return TaskResult(ok=text)

class ShopBooks(WorkflowDefinition[str]):
    name = "shop books"
    definition_key = "shop.books"
    close = note.node()(text="close")

    class Meta:
        output = "close"
"""


def test_the_command_runs_a_workflow_through_its_application(
    horsies: Run,
    connection: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process_url: str,
) -> None:
    module = f"flowshop_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(APP.replace("shop.books", module))
    monkeypatch.setenv("SHOP_URL", process_url)
    monkeypatch.chdir(tmp_path)
    finished = horsies("schedules", "run", "books", "-m", f"{module}:app")
    (run,) = runs(connection)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out == f"Schedule books was started as workflow {run['id']}.\n"
    again = json.loads(horsies("schedules", "run", "books", "-m", f"{module}:app", "--json").out)
    assert set(again) == {"name", "workflow_id"}
    assert len(runs(connection)) == 2
