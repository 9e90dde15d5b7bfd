"""Pages of schedules: next slots as the command prints them, history, skipped and overdue slots."""

from __future__ import annotations

import json
import re
from datetime import time
from urllib.parse import quote, unquote

import httpx
import psycopg
import pytest
from markupsafe import escape

from horsies.app import Horsies
from horsies.config.schedules import TaskSchedule
from horsies.timetable.patterns import (
    CronSchedule,
    DailySchedule,
    IntervalSchedule,
    SchedulePattern,
)
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.web_server import Ask

PATTERNS: dict[str, tuple[SchedulePattern, str, str]] = {
    "nightly": (DailySchedule(time=time(3)), "Europe/Berlin", "every day at 03:00, Europe/Berlin"),
    "sync": (
        CronSchedule.parse("*/15 8-18 * * mon-fri"),
        "America/New_York",
        "every 15 minutes from 08:00 to 18:45, Monday to Friday, America/New_York",
    ),
    "beat": (IntervalSchedule(seconds=30), "UTC", "every 30 seconds"),
}


@pytest.fixture
def scheduled(app: Horsies) -> Horsies:
    """An application with a few stored schedules, which no scheduler serves."""

    @app.task("report")
    def report() -> None: ...

    for name, (pattern, zone, _) in PATTERNS.items():
        schedule = TaskSchedule(name=name, task_name="report", pattern=pattern, timezone=zone)
        app.schedules.add(schedule).unwrap()
    return app


def test_the_next_slots_are_those_that_the_command_prints(
    ask: Ask, scheduled: Horsies, horsies: Run
) -> None:
    for name, (_, _, words) in PATTERNS.items():
        printed = json.loads(horsies("schedules", "next", name, "--json").out)["slots"]
        page = ask(f"/schedules/{name}").text
        listed = page.split('<ol class="slot-list">')[1].split("</ol>")[0]
        shown = re.findall(r'datetime="([^"]+)"', listed)
        assert [slot[:19] for slot in shown] == [slot[:19] for slot in printed]
        assert len(shown) == 10
        assert words in page
        overview = ask("/schedules").text
        assert words in overview
        assert f'datetime="{shown[0]}"' in overview


def test_the_newest_slots_show_runs_and_the_skip(
    ask: Ask, scheduled: Horsies, connection: Database
) -> None:
    for _ in range(3):
        scheduled.schedules.run("nightly").unwrap()
    connection.execute(
        "UPDATE horsies_schedule_state SET skipped_at = now() + interval '1 minute', "
        "skip_reason = 'OVERLAP' WHERE schedule_name = 'nightly'"
    )
    page = ask("/schedules/nightly").text
    history = page.split('data-region="history"')[1].split("</table>")[0]
    assert history.count("by hand") == 3
    assert "the run before had not ended" in history
    assert history.index("overlap") < history.index("by hand")
    changes = page.split('data-region="changes"')[1]
    assert changes.count("run schedule") == 3
    signs = ask("/schedules").text.split('class="slots"')
    assert sum("skipped, overlap" in part for part in signs) == 1


def test_an_overdue_schedule_is_a_banner_that_names_the_missing_scheduler(
    ask: Ask, scheduled: Horsies, connection: Database, process_url: str
) -> None:
    assert "is overdue" not in ask("/schedules").text
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = now() - interval '6 minutes' "
        "WHERE schedule_name = 'sync'"
    )
    for path in ("/schedules", "/schedules/sync"):
        page = ask(path).text
        assert "1 schedule is overdue" in page
        assert "No scheduler is connected to this database" in page
    with psycopg.connect(process_url, application_name="horsies:scheduler"):
        page = ask("/schedules").text
    assert "A scheduler is connected, but" in page
    connection.execute("UPDATE horsies_schedule_state SET paused_at = now()")
    assert "is overdue" not in ask("/schedules").text


def test_buttons_pause_resume_and_run(ask: Ask, scheduled: Horsies) -> None:
    assert "<form" not in ask("/schedules/sync").text.split('id="content"')[1]
    page = ask("/schedules/sync", actions=True).text
    assert 'action="/schedules/sync/pause"' in page
    assert 'action="/schedules/sync/run"' in page
    scheduled.schedules.pause("sync").unwrap()
    for path in ("/schedules/sync", "/schedules"):
        page = ask(path, actions=True).text
        assert 'action="/schedules/sync/resume"' in page


def test_schedules_have_pages_and_odd_names(
    ask: Ask, scheduled: Horsies, connection: Database
) -> None:
    assert "No scheduler is connected" in ask("/schedules").text
    connection.execute("DELETE FROM horsies_schedule_state")
    assert "No schedule is on record" in ask("/schedules").text
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, config_hash, task_name, timing) "
        "SELECT 'a <b> & ' || n, now() + interval '1 hour', 'hash', 'report', '{}' "
        "FROM generate_series(101, 160) AS n"
    )
    page = ask("/schedules").text
    assert page.count("<tr data-key") == 50
    assert "a pattern that this release cannot read" in page
    following = re.search(r'rel="next" href="([^"]*)"', page)
    assert following is not None
    assert ask(following[1].replace("&amp;", "&")).text.count("<tr data-key") == 10
    link = re.search(r'<a href="([^"]*)"><bdi>a &lt;b&gt;', page)
    assert link is not None
    assert ask(link[1].replace("&amp;", "&")).status_code == 200


def test_slots_of_the_next_day_are_counted_without_frequent_schedules(
    ask: Ask, scheduled: Horsies
) -> None:
    page = ask("/schedules").text
    hours = page.split('<ol class="hours">')[1].split("</ol>")[0]
    assert hours.count("<li") == 24
    assert "more than ten times an hour: <bdi>beat</bdi>" in page


@pytest.mark.parametrize("name", ["reports/daily", "50% off? #1 & more", "a/run", "%41"])
def test_a_name_with_any_characters_has_its_pages(ask: Ask, scheduled: Horsies, name: str) -> None:
    schedule = TaskSchedule(name=name, task_name="report", pattern=IntervalSchedule(hours=1))
    scheduled.schedules.add(schedule).unwrap()
    path = f"/schedules/{quote(name)}"
    assert f'href="{path}"' in ask("/schedules").text
    page = ask(path, actions=True).text
    assert f"<bdi>{escape(name)}</bdi>" in page
    (live,) = re.findall(r'data-live="/live([^"]+)"', page)
    assert unquote(live) == f"/schedules/{name}"
    assert ask(f"/api{path}").json()["name"] == name
    assert len(ask(f"/api{path}/next").json()["slots"]) == 10
    assert ask(f"{path}/explain").status_code == 200
    intent = {"X-Horsies-Intent": "action"}
    paused = ask(f"/api{path}/pause", method="POST", headers=intent, actions=True)
    assert paused.json() == {"name": name, "paused": True}


PRESS = {"X-Horsies-Intent": "action"}


def edit(ask: Ask, name: str, **body: object) -> httpx.Response:
    path = f"/api/schedules/{name}/edit"
    return ask(path, method="POST", headers=PRESS, actions=True, json=body)


def test_a_timing_is_previewed_edited_and_reset(
    ask: Ask, scheduled: Horsies, connection: Database
) -> None:
    form = ask("/schedules/nightly/edit", actions=True).text
    assert 'value="every day at 03:00"' in form
    assert 'value="Europe/Berlin"' in form
    shown = edit(ask, "nightly", pattern="every day at 04:00", dry_run=True).json()
    assert (shown["changed"], len(shown["slots"])) == (False, 10)
    assert "(edited)" not in ask("/schedules/nightly").text
    stored = edit(ask, "nightly", pattern="every day at 04:00", reason="too early").json()
    assert stored["changed"] is True
    assert stored["timing"]["pattern"] == {"time": "04:00:00", "type": "daily"}
    assert stored["original_timing"]["pattern"]["time"] == "03:00:00"
    page = ask("/schedules/nightly", actions=True).text
    assert "(edited)" in page
    assert "every day at 03:00, Europe/Berlin; a restart or a deployment keeps the edit" in page
    assert "from every day at 03:00, Europe/Berlin to every day at 04:00" in page
    assert 'action="/schedules/nightly/reset"' in page
    reset = ask("/api/schedules/nightly/reset", method="POST", headers=PRESS, actions=True)
    assert reset.json()["original_timing"] is None
    assert "(edited)" not in ask("/schedules/nightly").text


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "An edit needs a pattern or a timezone."),
        ({"pattern": "now and then"}, "it has none of these forms"),
        ({"timezone": "Mars/Olympus"}, "unknown time zone"),
        ({"pattern": 17}, "pattern must be text."),
    ],
)
def test_an_edit_that_cannot_be_is_refused(
    ask: Ask, scheduled: Horsies, body: dict[str, object], sentence: str
) -> None:
    before = ask("/api/schedules/sync").json()
    refused = edit(ask, "sync", **body)
    assert refused.status_code == 400
    assert sentence in refused.json()["title"]
    assert ask("/api/schedules/sync").json() == before
    assert edit(ask, "nobody", pattern="every hour").status_code == 404
    assert ask("/schedules/nobody/edit", actions=True).status_code == 404
