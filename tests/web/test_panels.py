"""The overview, queues and workers: facts from the tables, empty states, buttons by right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import psycopg
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from horsies.web import ViewOnly, attention, pages
from tests.support.database import Database
from tests.support.rows import (
    add_attempt,
    add_heartbeat,
    add_run,
    add_snapshot,
    add_task,
    add_worker,
    ago,
)
from tests.support.wait import wait_until
from tests.support.web_server import Ask
from tests.support.web_site import cells, plain

HOSTILE = '"><script>alert(1)</script>'
PATHS = ("/", "/queues", "/queues/mail", "/workers")


def add_measure(connection: Database, minutes_ago: int, **columns: Any) -> None:
    values = {"queue_name": "mail", "task_name": "send_mail", "done": 60, "failed": 0, **columns}
    buckets = [0, 0, 0, values["done"], *([0] * 12)]
    connection.execute(
        "INSERT INTO horsies_measures VALUES (date_trunc('minute', now()) - %s * interval '1 minute', "
        "1, %s, %s, %s, %s, 3, 0, 0, 1000, 2000, %s, %s)",
        (minutes_ago, *values.values(), buckets, buckets),
    )


def fill(connection: Database) -> str:
    """A worker with a running task, and queues in every state; returns the id of the worker."""
    for seconds in (90, 30, 5):
        add_task(connection, queue_name="mail", task_name="send_mail", enqueued_at=ago(seconds))
    add_task(connection, queue_name="mail", enqueued_at=ago(-600))
    add_task(connection, queue_name="legacy", enqueued_at=ago(600))
    connection.execute("INSERT INTO horsies_queues VALUES ('mail', now() - interval '41 minutes')")
    worker = add_worker(
        connection, queues=["mail"], name="pay-1", known_tasks='{"tasks": {"a": ""}}'
    )
    caps = json.dumps({"mail": 10})
    add_snapshot(connection, worker, memory_usage_mb=61, queue_max_concurrency=caps)
    running = {"status": "RUNNING", "claimed_by_worker_id": worker, "started_at": ago(70)}
    task = add_task(connection, queue_name="mail", task_name="report", worker_pid=1788, **running)
    add_heartbeat(connection, task, 11)
    done = add_task(connection, queue_name="mail", status="COMPLETED")
    add_attempt(connection, done, finished_at=ago(1))
    return worker


def test_an_empty_database_explains_how_to_fill_the_pages(ask: Ask) -> None:
    overview = plain(ask("/").text)
    assert "No attempt has ended in this time. Workers store their counts every" in overview
    assert "workers alive" in overview
    assert "Nothing needs attention" not in overview
    assert "No worker is running." in plain(ask("/workers").text)


def test_the_overview_agrees_with_the_status_command(
    ask: Ask, connection: Database, process_url: str
) -> None:
    fill(connection)
    command = [sys.executable, "-m", "horsies", "status", "--json", "--database-url", process_url]
    status = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    page = ask("/").text
    for queue in status["queues"]:
        if queue["name"] == "default":  # configured in the application of the page only
            continue
        row = cells(page, queue["name"])
        in_flight = queue["claimed"] + queue["running"]
        assert row["Due"] == str(queue["due"])
        assert row["Delayed"] == str(queue["delayed"])
        assert row["In flight"].split(" / ")[0] == str(in_flight)
        assert row["Done/min"] == f"{queue['done_per_minute']:.0f}"
    assert {queue["name"] for queue in status["queues"]} >= {"mail", "legacy"}
    assert " due 4 " in plain(page)


def test_problems_come_first_with_their_buttons(ask: Ask, connection: Database) -> None:
    fill(connection)
    connection.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome) "
        "VALUES ('anna', 'web', 'pause_queue', 'queue mail', 'done')"
    )
    run = add_run(connection, status="PAUSED", error="{}", paused_at=ago(90))
    page = ask("/", actions=True).text
    text = plain(page)
    assert (
        "‖ paused Queue 'mail' was paused by anna 41 min ago: 3 due tasks, the oldest for 1 min."
        in text
    )
    assert "✗ stopped No live worker serves queue 'legacy'" in text
    assert "1 due task, the oldest for 10 min." in text
    assert f'href="/workflows/{run}"' in page
    assert 'action="/queues/mail/resume"' in page
    for limited in (ask("/").text, ask("/", actions=True, policy=ViewOnly()).text):
        assert "/resume" not in limited
        assert "Queue &#39;mail&#39; was paused" in limited


def test_more_than_twelve_problems_are_counted(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 60.0)  # the page shows the slow findings too
    for number in range(15):
        add_task(connection, queue_name=f"queue-{number}", enqueued_at=ago(600 + number))
    page = ask("/").text
    assert page.count('data-key="QUEUE_UNSERVED') == 12
    lines = ask("/api/overview").json()["attention"]
    assert len(lines) >= 15
    assert f"and {len(lines) - 12} more" in page


def test_rates_and_failures_come_from_the_measures(ask: Ask, connection: Database) -> None:
    add_worker(connection, queues=["mail"])
    # The figures of a minute become those of the minute before when the next one begins.
    early = "SELECT extract(second FROM now()) < 40"
    wait_until(lambda: connection.execute(early).fetchone() == (True,))
    for minute in range(1, 50):
        add_measure(connection, minute, failed=4 if minute < 10 else 0)
    page = ask("/").text
    assert "60 done now" in page
    assert "Task send_mail has 36 failures in 10 minutes; usually 0." in plain(page)
    assert 'href="/failures?task_name=send_mail"' in page
    link = re.search(r'href="(/tasks\?since=[^"]*)" tabindex', page)
    assert link is not None
    assert re.fullmatch(r"/tasks\?since=[\dT:-]{16}&amp;until=[\dT:-]{16}", link[1])
    assert "p95 wait 49ms" in plain(page)
    assert 'id="spark-mail-d">60 now, highest 60' in page
    queue = ask("/queues/mail?range=6h").text
    assert "&amp;until=" in queue
    assert "queue=mail&amp;since=" in queue
    assert cells(queue, "send_mail")["Failed"] == "36"


def test_rates_that_take_too_long_do_not_cost_the_page(
    ask: Ask, connection: Database, process_url: str
) -> None:
    fill(connection)
    with psycopg.connect(process_url) as holder:
        holder.execute("LOCK TABLE horsies_measures IN ACCESS EXCLUSIVE MODE")
        page, pid = ask("/").text, holder.info.backend_pid
    charts = page.partition('data-region="charts"')[2].partition("</section>")[0]
    assert f"pid {pid} (user" in charts
    assert cells(page, "mail")["Due"] == "3"


def test_a_wrong_range_is_refused_with_the_right_ones(ask: Ask) -> None:
    answer = ask("/?range=1y")
    assert answer.status_code == 400
    assert "range must be one of 1h, 6h, 24h, 14d" in answer.text


def test_a_queue_shows_its_front_in_the_order_of_claims(ask: Ask, connection: Database) -> None:
    worker = fill(connection)
    urgent = add_task(connection, queue_name="mail", priority=1, enqueued_at=ago(3))
    for verb, detail in (("pause_queue", "the bank is down"), ("resume_queue", None)):
        connection.execute(
            "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
            "VALUES ('anna', 'cli', %s, 'queue mail', 'done', %s)",
            (verb, detail),
        )
    page = ask("/queues/mail", actions=True).text
    front = re.findall(r'href="/tasks/([^"]*)"', page)
    assert front[0] == urgent
    assert len(front) == 4
    assert f'href="/workers/{worker}"' in page
    assert "anna pause queue: the bank is down" in plain(page)
    assert "in flight, cap 10" in plain(page)
    connection.execute("UPDATE horsies_worker_states SET queue_max_concurrency = '{}'")
    assert "in flight, no cap" in plain(ask("/queues/mail").text)
    assert 'action="/queues/mail/resume"' in page
    connection.execute("UPDATE horsies_queues SET paused_at = NULL")
    resumed = ask("/queues/mail", actions=True).text
    assert 'action="/queues/mail/pause"' in resumed
    assert 'name="reason"' in resumed


def test_an_unserved_queue_names_the_command(ask: Ask, connection: Database) -> None:
    fill(connection)
    page = ask("/queues/legacy").text
    assert "! no worker Start a worker: horsies worker myapp:app --queues legacy" in plain(page)


def test_unknown_queues_and_workers_are_404(ask: Ask) -> None:
    answer = ask("/queues/nothing")
    assert answer.status_code == 404
    assert "There is no queue" in answer.text
    assert ask("/workers/nothing").status_code == 404


def test_workers_are_listed_with_their_state(ask: Ask, connection: Database) -> None:
    fill(connection)
    add_worker(connection, worker_id="quiet", hears=False)
    lost = {"seen_at": ago(400), "lock_key": 7}
    add_worker(connection, worker_id="lost", **lost)
    add_task(connection, status="CLAIMED", claimed_by_worker_id="lost")
    add_worker(connection, worker_id="gone", stopped_at=ago(9))
    page = ask("/workers", actions=True).text
    text = plain(page)
    assert "~ polling" in text
    assert "receives no notifications, finds work by polling" in text
    assert "✗ lost" in text
    assert "1 of its tasks will be taken over" in text
    assert 'action="/workers/ping"' in page
    assert 'data-key="gone"' not in page
    stopped = ask("/workers?stopped=1").text
    assert 'data-key="gone"' in stopped
    assert "/workers/ping" not in stopped


def test_workers_have_pages_and_those_in_trouble_come_first(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WORKERS_PER_PAGE", 2)
    for name in ("b", "a", "c"):
        add_worker(connection, worker_id=name, name=name)
    add_worker(connection, worker_id="lost", name="lost", seen_at=ago(400), lock_key=7)
    texts = [ask(f"/workers?page={number}").text for number in (1, 2, 3)]
    keys = [re.findall(r'<tr data-key="([^"]*)">', text) for text in texts]
    assert keys == [["lost", "a"], ["b", "c"], []]
    assert 'rel="next" href="/workers?page=2"' in texts[0]
    assert "4 workers" in plain(texts[1])
    assert 'rel="next"' not in texts[1]
    assert "There are no more workers." in plain(texts[2])
    assert ask("/workers?page=0").status_code == 400


def test_a_worker_shows_its_children_and_their_tasks(ask: Ask, connection: Database) -> None:
    worker = fill(connection)
    page = plain(ask(f"/workers/{worker}").text)
    assert "The children appear with the first snapshot of the worker." in page
    assert "▶ running" in page
    children = [
        {
            "pid": 1788,
            "rss_mb": 61.2,
            "done": 73,
            "since": "2026-11-16T09:00:00+00:00",
            "task_id": None,
        },
        {"pid": 1790, "rss_mb": 58.0, "done": 2, "since": None, "task_id": None},
    ]
    connection.execute("UPDATE horsies_workers SET children = %s::jsonb", (json.dumps(children),))
    add_task(connection, status="CLAIMED", claimed_by_worker_id=worker, task_name="ahead")
    page = ask(f"/workers/{worker}").text
    busy, idle = cells(page, "1788"), cells(page, "1790")
    assert (busy["Memory"], busy["Tasks done"]) == ("61 MB", "73")
    assert busy["Runs"].startswith("report ")
    assert busy["For"].startswith("1m1")
    assert re.fullmatch(r"1\ds ago", busy["Heartbeat"])  # 11 s, and what the pages took
    assert (idle["Runs"], idle["Since"]) == ("idle", "-")
    text = plain(page)
    assert "ahead" in text
    assert "children that run a task 1 of 4" in text
    assert "tasks claimed in advance 1" in text
    assert "Caps cluster: none, queue mail : 10" in text
    assert "Known tasks 1" in text
    assert 'id="memory-d">61 now, highest 61' in page


def test_all_tasks_of_an_async_child_are_shown(ask: Ask, connection: Database) -> None:
    worker = add_worker(connection)
    children = json.dumps([{"pid": 1788, "rss_mb": 61.2, "done": 73, "since": None, "tasks": 3}])
    connection.execute("UPDATE horsies_workers SET children = %s::jsonb", (children,))
    running = {"status": "RUNNING", "claimed_by_worker_id": worker, "worker_pid": 1788}
    ids = [add_task(connection, **running, started_at=ago(5)) for _ in range(3)]
    page = ask(f"/workers/{worker}").text
    assert all(page.count(f'href="/tasks/{task_id}"') == 1 for task_id in ids)
    assert "places that run a task 3 of 4" in plain(page)


def test_hostile_names_are_escaped(ask: Ask, connection: Database) -> None:
    add_task(connection, queue_name="mail", task_name=HOSTILE)
    add_task(connection, queue_name=HOSTILE[:90], enqueued_at=ago(900))
    add_worker(connection, worker_id="w", hostname=HOSTILE, name=HOSTILE, queues=["mail", HOSTILE])
    add_measure(connection, 2, task_name=HOSTILE)
    connection.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
        "VALUES (%s, 'cli', 'pause_queue', 'queue mail', 'done', %s)",
        (HOSTILE, HOSTILE),
    )
    for path in (*PATHS, "/workers/w"):
        answer = ask(path, actions=True)
        assert answer.status_code == 200
        assert "alert(1)" in answer.text
        assert "<script>alert" not in answer.text


# The tables of which a part is behind the edge of their box.
CLIPPED = """[...document.querySelectorAll("main table")]
    .filter(table => table.scrollWidth > table.clientWidth + 1)
    .map(table => table.closest("section").dataset.region)"""


@pytest.mark.browser
def test_no_page_scrolls_sideways(tabs: BrowserContext, connection: Database) -> None:
    worker = fill(connection)
    for minute in range(1, 60):
        add_measure(connection, minute)
    page = tabs.new_page()
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        for path in (*PATHS, f"/workers/{worker}"):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
            assert page.evaluate(CLIPPED) == [], (path, width)


@pytest.mark.browser
def test_an_open_table_stays_open_while_numbers_change(page: Page, connection: Database) -> None:
    add_measure(connection, 2)
    add_task(connection, queue_name="mail")
    streams: list[Route] = []
    page.route("**/live/**", lambda stream: streams.append(stream))
    with page.expect_request("**/live/**"):
        page.goto("/")
    page.get_by_text("as a table").first.click()
    add_measure(connection, 3, done=70)
    add_task(connection, queue_name="mail")
    streams[0].continue_()
    due = page.locator('tr[data-key="mail"] td[data-label="Due"]')
    expect(due).to_have_text("2")
    expect(page.get_by_role("cell", name="70", exact=True)).to_be_visible()


def test_of_very_many_queues_the_overview_shows_those_in_need_and_the_list_has_pages(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "QUEUES_SHOWN", 3)
    monkeypatch.setattr(pages, "QUEUES_PER_PAGE", 4)
    names = [f"queue-{number}" for number in range(9)]
    add_worker(connection, queues=names[:8])
    add_task(connection, queue_name="queue-8", enqueued_at=ago(5))
    for _ in range(2):
        add_task(connection, queue_name="queue-5", enqueued_at=ago(5))
    connection.execute("INSERT INTO horsies_queues VALUES ('queue-2', now())")
    shown = re.findall(r'<tr data-key="([^"]+)"', ask("/").text)
    assert shown == ["queue-2", "queue-5", "queue-8"]
    assert "7 more queues" in ask("/").text  # one of the configuration among them
    seen: list[str] = []
    path: str | None = "/queues"
    while path:
        page = ask(path).text
        seen += re.findall(r'<tr data-key="([^"]+)"', page)
        following = re.search(r'rel="next" href="([^"]*)"', page)
        path = following[1] if following else None
    assert seen == ["default", *names]


def test_a_worker_of_thousands_of_queues_names_the_first(ask: Ask, connection: Database) -> None:
    worker = add_worker(connection, queues=[f"queue-{number:04}" for number in range(3_000)])
    for path in ("/workers", f"/workers/{worker}"):
        page = ask(path).text
        assert "and 2,980 more" in page
        assert len(page) < 40_000
