"""The pages without a route of their own: the login, the list of databases, and errors. They are accessible,
and the keyboard reaches everything on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.web_axe import found_on
from tests.support.web_keyboard import problems_of
from tests.support.web_server import DOWN, WebServer, served, watched

pytestmark = pytest.mark.browser

TOKEN = "t" * 32
# Each page with a part of its heading.
PAGES = {
    "/": "Databases",
    "/nowhere": "Not found",
    "/db/orders/tasks/00000000-0000-7000-8000-000000000000": "Not found",
    "/db/orders/orders/new?verb=cancel_task": "Not allowed",
    "/db/down/queues": "Database unavailable",
}


@pytest.fixture
def guarded(process_url: str, connection: Database) -> Iterator[WebServer]:
    """`horsies web` behind a token, with a database in use and one that is down."""
    add_task(connection, queue_name="mail")
    named = ("--database-url", f"orders={process_url}", "--database-url", f"down={DOWN}")
    with served(*named, "--auth", "token", env={"HORSIES_WEB_TOKEN": TOKEN}) as server:
        yield server


def test_login_list_of_databases_and_errors_are_accessible(
    browser: Browser, guarded: WebServer
) -> None:
    wrong: dict[str, Any] = {}
    with watched(browser, guarded, bypass_csp=True) as context:
        context.watch.expected.append("Failed to load resource")  # type: ignore[attr-defined]
        page = context.new_page()
        page.goto("/")
        wrong["login"] = look(page, "Log in")
        log_in(page, "not the token")
        expect(page.get_by_role("alert")).to_contain_text("The token is wrong")
        wrong["a wrong token"] = look(page, "Log in")
        log_in(page, TOKEN)
        for path, heading in PAGES.items():
            page.goto(path)
            wrong[path] = look(page, heading)
    assert {path: found for path, found in wrong.items() if any(found)} == {}


def look(page: Page, heading: str) -> tuple[dict[str, Any], list[str]]:
    """Return what axe finds on the open page, and what the keyboard does not reach."""
    expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    return found_on(page), problems_of(page)


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Token of this dashboard").fill(token)
    with page.expect_navigation():
        page.get_by_role("button", name="Log in").click()
