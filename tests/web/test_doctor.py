"""The page and the JSON of the doctor."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from horsies.monitor.diagnose.doctor import CHEAP_IDS, CHECKS
from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.web_server import Ask


def test_the_page_shows_cheap_checks_with_their_remedies(ask: Ask, connection: Database) -> None:
    add_task(connection, queue_name="<b>mail</b>")
    page = ask("/doctor")
    assert page.status_code == 200
    assert "No live worker serves queue &#39;&lt;b&gt;mail&lt;/b&gt;&#39;" in page.text
    assert "1 due task, the oldest for" in page.text
    assert "claim-index" not in page.text
    full = ask("/doctor?full=1")
    assert all(f">{check.id}<" in full.text for check in CHECKS)


def test_the_api_returns_what_the_command_prints(ask: Ask, connection: Database) -> None:
    document = ask("/api/doctor").json()
    assert {check["id"] for check in document["checks"]} == CHEAP_IDS
    assert document["level"] == "green"
    add_task(connection)
    document = ask("/api/doctor?full=1").json()
    found = {check["id"]: check["level"] for check in document["checks"]}
    assert set(found) == {check.id for check in CHECKS}
    assert (found["unserved"], document["level"]) == ("red", "red")


@pytest.mark.browser
def test_the_button_runs_every_check(page: Page, connection: Database) -> None:
    page.goto("/doctor")
    expect(page.get_by_text("Nothing was found.")).to_be_visible()
    page.get_by_role("button", name="Run all checks").click()
    expect(page.get_by_role("cell", name="run-audit", exact=True)).to_be_visible()
