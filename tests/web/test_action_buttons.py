"""The buttons in a real browser with a real worker, with JavaScript and without."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from horsies.testing.database import empty_tables
from tests.support.database import Database
from tests.support.routes import programs as programs
from tests.support.routes import route as route
from tests.support.rows import add_task, finish, row_of
from tests.support.wait import wait_until
from tests.support.web_server import WebServer, watched
from tests.support.workers import Fleet, Route

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def database(
    process_url: str,
    route: Route,
    programs: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Database]:
    """The tables, empty at first, with one worker for all tests of this module."""
    fleet = Fleet(process_url, tmp_path_factory.mktemp("buttons"), route=route)
    with psycopg.connect(process_url, autocommit=True) as connection:
        empty_tables(connection)
        try:
            fleet.start()
            yield connection
        finally:
            fleet.destroy()
            programs.app.close()


@pytest.mark.parametrize("has_script", [False, True], ids=["without script", "with script"])
def test_the_buttons_change_queues_and_tasks(
    browser: Browser,
    dashboard: WebServer,
    database: Database,
    programs: ModuleType,
    has_script: bool,
) -> None:
    reason = f"the bank is down <{has_script}>"
    with watched(browser, dashboard, java_script_enabled=has_script) as context:
        page = context.new_page()
        page.goto(f"{dashboard.url}/queues/default")
        page.get_by_text("Pause", exact=True).first.click()
        page.get_by_label("Reason").locator("visible=true").fill(reason)
        page.get_by_role("button", name="Pause default").click()
        expect(page.get_by_role("status")).to_contain_text(
            "Queue default is paused. To undo it: horsies queues resume default"
        )
        waiting = [programs.noop.send().unwrap().task_id for _ in range(2)]
        expect(page.locator("main")).to_contain_text(reason)
        page.goto(f"{dashboard.url}/tasks/{waiting[0]}")
        assert row_of(database, waiting[0])["status"] == "PENDING"  # the worker takes nothing
        page.get_by_text("Cancel", exact=True).click()
        page.get_by_role("button", name="Cancel the task").click()
        expect(page.get_by_role("status")).to_contain_text("it is cancelled. This cannot be undone")
        page.goto(f"{dashboard.url}/queues/default")
        page.get_by_role("button", name="Resume").first.click()
        expect(page.get_by_role("status")).to_contain_text("Queue default is not paused.")
        wait_until(lambda: row_of(database, waiting[1])["status"] == "COMPLETED")
        page.goto(f"{dashboard.url}/tasks/{waiting[1]}")
        page.get_by_text("Send again…", exact=True).click()
        page.get_by_role("button", name="Send the task again").click()
        expect(page.get_by_role("status")).to_contain_text("was sent again as this one")
        again = page.url.rpartition("/")[2]
        assert row_of(database, again)["retried_from_task_id"] == waiting[1]
        send_failed_tasks_again(page, dashboard, database)
        change_a_key(page, dashboard, f"{reason} & key")
        page.goto(f"{dashboard.url}/history")
        expect(page.locator("main")).to_contain_text(reason)


def send_failed_tasks_again(page: Page, dashboard: WebServer, database: Database) -> None:
    """Count the failures of one task, send them again in bulk, and one of them by its checkbox."""
    name = f"gone{database.execute('SELECT count(*) FROM horsies_actions').fetchone()}"[:8]
    failed = [add_task(database, task_name=name, queue_name="unserved") for _ in range(3)]
    finish(database, failed, status="FAILED")
    page.goto(f"{dashboard.url}/tasks?status=FAILED&task_name={name}")
    page.get_by_role("link", name="send again…").click()
    expect(page.locator('[data-count="eligible"]')).to_have_text("3")
    with page.expect_navigation():
        page.get_by_role("button", name="Send 3 tasks again").click()
    wait_until(lambda: count_again(database, failed) == 3)
    page.reload()
    expect(page.locator('[data-outcome="done"]')).to_contain_text("3 of 3 sent again")
    expect(page.locator("[data-undoing]")).to_contain_text("millisecond: horsies cancel --since")
    page.goto(f"{dashboard.url}/tasks?status=PENDING&task_name={name}")
    page.get_by_role("checkbox", name="Select task").first.check()
    page.get_by_role("button", name="Cancel").click()
    question = page.locator("[data-question]")
    expect(question).to_contain_text("Cancel 1 task? This cannot be undone; to send them again:")
    cancelled = "SELECT count(*) FROM horsies_tasks WHERE task_name = %s AND status = 'CANCELLED'"
    assert database.execute(cancelled, (name,)).fetchone() == (0,)
    page.get_by_role("button", name="Cancel 1 task").click()
    page.wait_for_url("**/orders/*")
    wait_until(lambda: database.execute(cancelled, (name,)).fetchone() == (1,))
    expect(page.locator("[data-undoing]")).to_contain_text("horsies retry")


def change_a_key(page: Page, dashboard: WebServer, key: str) -> None:
    """Press two buttons of the form for any key, each with its own address and token."""
    for label, value, button, notice in (
        ("Most in flight", "2", "Set the limits", f"{key} of queue default: at most 2."),
        ("Reason", "asked", "Pause the key", f"{key} of queue default is paused."),
    ):
        page.goto(f"{dashboard.url}/queues/default")
        page.get_by_text("Change a key…", exact=True).click()
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_label(label).locator("visible=true").fill(value)
        page.get_by_role("button", name=button).click()
        expect(page.get_by_role("status")).to_contain_text(notice)


def count_again(database: Database, ids: list[str]) -> int:
    found: Any = database.execute(
        "SELECT count(*) FROM horsies_tasks WHERE retried_from_task_id = ANY(%s::uuid[])", (ids,)
    ).fetchone()
    return int(found[0])
