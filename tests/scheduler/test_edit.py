"""Timings edited by a person: they outlive restarts and deployments, and every slot is sent once."""

from __future__ import annotations

import json
import logging
import threading
from datetime import timedelta
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.errors import HorsiesError
from horsies.tasks.recording import acting_as
from horsies.timetable.patterns import DailySchedule, IntervalSchedule
from horsies.timetable.texts import read_pattern
from tests.support.applications import Call
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.scheduling import (
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    refresh,
    registry_of,
    schedule,
    slots,
    state,
    tick,
    tick_at_once,
)

EVERY_MINUTE = IntervalSchedule(minutes=1)


def timing(connection: Database) -> Any:
    return json.loads(state(connection)["timing"])["pattern"]


def test_an_edited_timing_of_a_configured_schedule_is_served_and_outlives_restarts(
    connection: Database, make_app: MakeApp, call: Call
) -> None:
    app = make_app(schedule())
    registry = enter(connection, app)
    edited = call(app, app.schedules, "edit", "report", pattern="every 1 minute").unwrap()
    assert edited.is_edited
    assert edited.next_run_at <= database_now(connection) + timedelta(minutes=1)
    # The running scheduler, a restarted one, and one that refreshes what it has stored.
    for served in (registry, enter(connection, app), enter(connection, make_app(schedule()))):
        refresh(connection, served)
        assert timing(connection)["minutes"] == 1
        due_at = database_now(connection)
        make_due(connection, due_at)
        tick(connection, served)
        assert slots(connection)[-1] == due_at
        assert state(connection)["next_run_at"] == due_at + timedelta(minutes=1)
    assert len(slots(connection)) == 3
    back = call(app, app.schedules, "reset", "report").unwrap()
    assert not back.is_edited
    assert timing(connection)["hours"] == 1
    assert back.next_run_at > database_now(connection) + timedelta(minutes=59)
    assert call(app, app.schedules, "reset", "report").unwrap() == back


def test_a_deployment_with_another_timing_keeps_the_edit_and_says_so(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    following = state(connection)["next_run_at"]
    deployed = make_app(schedule(pattern=IntervalSchedule(hours=2)))
    with caplog.at_level(logging.WARNING, "horsies"):
        enter(connection, deployed)
    assert "keeps the one that was edited at run time" in caplog.text
    assert timing(connection)["minutes"] == 1
    assert state(connection)["next_run_at"] == following
    deployed.schedules.reset("report").unwrap()
    assert timing(connection)["hours"] == 2


def test_a_deployment_with_the_edited_timing_ends_the_edit(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    following = state(connection)["next_run_at"]
    enter(connection, make_app(schedule(pattern=EVERY_MINUTE)))
    row = state(connection)
    assert (row["original_timing"], row["next_run_at"]) == (None, following)


def test_an_added_schedule_keeps_its_edit_until_another_is_added(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app()
    added = schedule(kwargs={"text": "hi"})
    app.schedules.add(added).unwrap()
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    for replace in (False, True):
        assert app.schedules.add(added, replace=replace).unwrap().is_edited
    make_due(connection, due_at := database_now(connection))
    tick(connection, registry_of(app))
    assert state(connection)["next_run_at"] == due_at + timedelta(minutes=1)
    other = schedule(kwargs={"text": "ho"})
    assert not app.schedules.add(other, replace=True).unwrap().is_edited
    assert timing(connection)["hours"] == 1


@pytest.mark.parametrize("catches_up", [False, True])
def test_a_slot_that_is_due_at_the_edit_is_sent_once_and_the_new_timing_counts_from_there(
    connection: Database, make_app: MakeApp, catches_up: bool
) -> None:
    app = make_app(schedule(catch_up_missed=catches_up))
    registry = enter(connection, app)
    due_at = ago(connection, 1800)
    make_due(connection, due_at)
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    edited_at = state(connection)["edited_at"]
    tick(connection, registry)
    tick(connection, registry)
    assert slots(connection) == [due_at]
    assert state(connection)["next_run_at"] == edited_at + timedelta(minutes=1)


def test_of_several_overdue_slots_the_latest_is_sent_and_the_others_are_on_record(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule())
    registry = enter(connection, app)
    due_at = ago(connection, 3 * 3600 + 60)
    make_due(connection, due_at)
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    tick(connection, registry)
    assert slots(connection) == [due_at + timedelta(hours=3)]
    assert state(connection)["skip_reason"] == "MISSED"


def test_an_overdue_slot_follows_the_rules_of_its_schedule(
    connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule(misfire_grace_seconds=60))
    registry = enter(connection, app)
    make_due(connection, ago(connection, 600))
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    tick(connection, registry)
    assert slots(connection) == []
    row = state(connection)
    assert row["skip_reason"] == "MISFIRE"
    assert row["next_run_at"] == row["edited_at"] + timedelta(minutes=1)


def test_slots_of_a_pause_are_not_sent_by_an_edit(connection: Database, make_app: MakeApp) -> None:
    app = make_app(schedule(catch_up_missed=True))
    registry = enter(connection, app)
    app.schedules.pause("report").unwrap()
    make_due(connection, ago(connection, 600))
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    app.schedules.resume("report").unwrap()
    tick(connection, registry)
    assert slots(connection) == []


def test_edits_while_schedulers_serve_neither_lose_nor_repeat_a_slot(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    app = make_app(schedule())
    registry = enter(connection, app)
    stop = threading.Event()

    def edit() -> None:
        while not stop.is_set():
            app.schedules.edit("report", pattern="every 2 hours").unwrap()
            app.schedules.reset("report").unwrap()

    editor = threading.Thread(target=edit)
    editor.start()
    expected = []
    try:
        for _ in range(10):
            with connection.transaction():
                due_at = database_now(connection)
                make_due(connection, due_at)
            expected.append(due_at)
            for _ in range(100):
                tick_at_once(process_url, registry, 2, 1)
                if slots(connection)[-1:] == [due_at]:
                    break
    finally:
        stop.set()
        editor.join()
    assert slots(connection) == expected


def test_what_cannot_be_is_refused_and_changes_nothing(
    connection: Database, make_app: MakeApp
) -> None:
    ending = schedule(end_at=database_now(connection) + timedelta(minutes=90))
    app = make_app(ending)
    enter(connection, app)
    before = state(connection)
    with pytest.raises(HorsiesError, match="none of these forms"):
        app.schedules.edit("report", pattern="sometimes")
    zone = app.schedules.edit("report", timezone="Mars/Olympus").unwrap_err()
    assert "unknown time zone 'Mars/Olympus'" in zone.message
    never = app.schedules.edit("report", pattern=IntervalSchedule(days=9)).unwrap_err()
    assert never.message == "Schedule 'report' would have no more slots; pause it instead."
    unknown = app.schedules.edit("nobody", pattern=EVERY_MINUTE).unwrap_err()
    assert "the known ones are report" in unknown.message
    assert state(connection) == before


def test_an_edited_timing_of_a_later_release_stays_due_until_it_is_reset(
    connection: Database, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(schedule())
    registry = enter(connection, app)
    app.schedules.edit("report", pattern=EVERY_MINUTE).unwrap()
    connection.execute('UPDATE horsies_schedule_state SET timing = \'{"pattern": "moon"}\'')
    make_due(connection, due_at := ago(connection, 1))
    with caplog.at_level(logging.ERROR, "horsies"):
        tick(connection, registry)
    assert "cannot read its edited timing; reset it" in caplog.text
    assert slots(connection) == []
    app.schedules.reset("report").unwrap()
    tick(connection, registry)
    assert slots(connection) == [due_at]


def test_the_record_of_changes_names_both_timings(connection: Database, make_app: MakeApp) -> None:
    app = make_app(schedule(pattern=DailySchedule(time="03:00"), timezone="Europe/Berlin"))  # type: ignore[arg-type]
    enter(connection, app)
    with acting_as("anna"):
        app.schedules.edit("report", pattern="every day at 04:00", reason="too early").unwrap()
        app.schedules.edit("report", pattern="every day at 04:00").unwrap()
        app.schedules.reset("report").unwrap()
    rows = connection.execute(
        "SELECT actor, verb, outcome, detail FROM horsies_actions ORDER BY id"
    ).fetchall()
    both = "from every day at 03:00, Europe/Berlin to every day at 04:00, Europe/Berlin: too early"
    assert rows[0] == ("anna", "edit_schedule", "done", both)
    assert rows[1][2] == "unchanged"
    assert rows[2][1:3] == ("reset_schedule", "done")


def test_the_command_previews_edits_undoes_and_prints_json(
    connection: Database, make_app: MakeApp, horsies: Run
) -> None:
    enter(connection, make_app(schedule(pattern=DailySchedule(time="03:00"))))  # type: ignore[arg-type]
    before = state(connection)
    shown = horsies("schedules", "edit", "report", "--pattern", "every day at 04:00", "--dry-run")
    assert shown.out.startswith("Schedule report would fire every day at 04:00, UTC:\n  ")
    assert shown.out.count("04:00:00") == 10
    assert state(connection) == before
    done = horsies(
        "schedules", "edit", "report", "--pattern", "0 4 * * *", "--timezone", "Asia/Tokyo"
    )
    assert "To undo it: horsies schedules reset report" in done.out
    assert "edited" in horsies("schedules").out
    again = horsies("schedules", "edit", "report", "--pattern", "every 90s")
    undoing = "horsies schedules edit report --pattern '0 4 * * *' --timezone Asia/Tokyo"
    assert undoing in again.out
    document = json.loads(horsies("schedules", "reset", "report", "--json").out)
    assert document["changed"] is True
    assert document["timing"]["pattern"] == {"type": "daily", "time": "03:00:00"}
    assert document["original_timing"] is None
    assert "nothing to reset" in horsies("schedules", "reset", "report").out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("edit", "report"), 1, "needs a pattern or a time zone"),
        (("edit", "nobody", "--pattern", "every hour"), 4, "There is no schedule 'nobody'"),
        (("edit", "report", "--pattern", "0 9 13 * fri"), 1, 'end it with "either"'),
    ],
)
def test_the_command_refuses_with_a_sentence(
    connection: Database,
    make_app: MakeApp,
    horsies: Run,
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    enter(connection, make_app(schedule()))
    ran = horsies("schedules", *arguments)
    assert ran.code == code
    assert sentence in " ".join((ran.out + ran.err).split())


def test_adding_a_configured_name_advises_the_edit(make_app: MakeApp, connection: Database) -> None:
    enter(connection, make_app(schedule()))
    stranger: Horsies = make_app()
    for app, replace in ((make_app(schedule()), True), (stranger, False), (stranger, True)):
        refused = app.schedules.add(schedule(pattern=EVERY_MINUTE), replace=replace)
        assert "horsies schedules edit" in refused.unwrap_err().message
        assert "replace=True" not in refused.unwrap_err().message


def test_the_pattern_in_words_is_what_an_edit_takes() -> None:
    assert read_pattern("every day at 03:00") == DailySchedule(time="03:00")  # type: ignore[arg-type]
