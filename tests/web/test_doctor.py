"""The page and the JSON of the doctor."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from horsies import Ok
from horsies.findings import Finding, Level
from horsies.monitor.diagnose import slow
from horsies.monitor.diagnose.doctor import CHEAP_IDS, CHECKS, CheckReport
from horsies.web import attention
from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.web_server import Ask
from tests.support.web_site import Elements


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the slow checks take longer than a page waits for them."""
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 60.0)


def test_the_page_shows_checks_with_their_remedies(
    ask: Ask, connection: Database, patient: None
) -> None:
    add_task(connection, queue_name="<b>mail</b>")
    for path in ("/doctor", "/doctor?full=1"):
        page = ask(path)
        assert page.status_code == 200
        assert "No live worker serves queue &#39;&lt;b&gt;mail&lt;/b&gt;&#39;" in page.text
        assert "1 due task, the oldest for" in page.text
        assert all(f">{check.id}<" in page.text for check in CHECKS)


def test_every_line_of_the_overview_leads_to_its_finding(
    ask: Ask, connection: Database, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a finding of a slow check, whose subject has no page."""
    found = Finding("SETTINGS", "fsync is off.", Level.RED)
    reports = [CheckReport("settings", "", (found, found))]
    monkeypatch.setattr(slow, "run_doctor", lambda *_: Ok(reports))
    add_task(connection, queue_name="mail")
    overview, doctor = Elements(ask("/").text), ask("/doctor")
    assert {"/doctor#SETTINGS", "/queues/mail"} <= overview.addresses
    assert doctor.text.count('id="SETTINGS"') == 1
    assert "fsync is off." in doctor.text
    assert "/queues/mail" in Elements(doctor.text).addresses


def test_the_page_does_not_wait_long_for_slow_checks(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 0.0)
    page = ask("/doctor").text
    assert "appear when they have ended" in page
    assert ">schema<" in page


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
    expect(page.get_by_role("cell", name="schema", exact=True)).to_be_visible()
    page.get_by_role("button", name="Run all checks now").click()
    expect(page.get_by_role("cell", name="run-audit", exact=True)).to_be_visible()


def test_long_evidence_is_cut(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tuple(f"function {number}." for number in range(25))
    found = Finding("SETTINGS", "They differ.", Level.RED, evidence=lines)
    monkeypatch.setattr(slow, "run_doctor", lambda *_: Ok([CheckReport("settings", "", (found,))]))
    page = ask("/doctor").text
    assert ("function 9." in page, "function 10." in page) == (True, False)
    assert "and 15 more: <code>horsies doctor --only settings</code>" in page
