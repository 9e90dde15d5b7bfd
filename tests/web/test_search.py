"""The search: parts of names, queues, schedules, keys of runs, beginnings of ids, words of error messages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect
from psycopg.types.json import Jsonb

from horsies.monitor import search
from horsies.monitor.search import PREFIX_MIN, SHOWN, id_range
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_attempt, add_run, add_task, add_worker, ago
from tests.support.web_keyboard import WIDTHS, enter, resize, tab_to
from tests.support.web_server import Ask

TASK = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a"
TWIN = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8b"
RUN = "01a1dd43-0000-7000-8000-000000000001"


@pytest.fixture
def _rows(connection: Database) -> None:
    failed = {"status": "FAILED", "failed_at": ago(1), "error_code": "CARD_REFUSED"}
    add_task(connection, id=TASK, task_name="payments.charge", queue_name="mail", **failed)
    add_attempt(
        connection,
        TASK,
        outcome="FAILED",
        error_code="CARD_REFUSED",
        error_message="the card was Declined by the issuer",
    )
    add_run(connection, id=RUN, root_workflow_id=RUN, name="orders", workflow_key="order-666")
    known = Jsonb({"tasks": {"payments.charge": "f", "reports.render": "f"}, "workflows": {}})
    add_worker(connection, queues=["mail", "mailings"], known_tasks=known)
    connection.execute(
        "INSERT INTO horsies_measures VALUES "
        "(now(), 1, 'mail', 'payments.charge', 7, 2, 0, 0, 0, 0, 0, "
        "array_fill(0, ARRAY[16]), array_fill(0, ARRAY[16]))"
    )
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at) "
        "VALUES ('nightly mail', now(), now())"
    )


def found(ask: Ask, text: str) -> list[dict[str, Any]]:
    matches: list[dict[str, Any]] = ask(f"/api/search?{urlencode({'q': text})}").json()["matches"]
    return matches


FOUND = {
    "CHARGE": ("task name", "payments.charge", "/tasks?task_name=payments.charge"),
    "render": ("task name", "reports.render", "/tasks?task_name=reports.render"),
    "mail": ("queue", "mail", "/queues/mail"),
    "nightly": ("schedule", "nightly mail", "/schedules/nightly%20mail"),
    "order-666": ("run", "order-666", f"/workflows/{RUN}"),
    "orders": ("run", "order-666", f"/workflows/{RUN}"),
    "01a1dd42": ("task", TASK, f"/tasks/{TASK}"),
    "01a1dd43": ("run", RUN, f"/workflows/{RUN}"),
    "declined by the issuer": (
        "error",
        "payments.charge: CARD_REFUSED",
        "/tasks?task_name=payments.charge&status=FAILED&error_code=CARD_REFUSED",
    ),
}


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("text", FOUND)
def test_a_part_of_anything_is_found(ask: Ask, text: str) -> None:
    matches = found(ask, text)
    assert FOUND[text] in [(one["kind"], one["name"], one["path"]) for one in matches]
    answer = ask(f"/tasks?{urlencode({'q': text})}")
    assert answer.status_code == 303
    page = ask(answer.headers["location"])
    if len(matches) == 1:
        assert page.headers["location"] == FOUND[text][2]
    else:
        assert f"{len(matches)} matches for" in page.text


@pytest.mark.usefixtures("_rows")
def test_matches_have_counts_and_details(ask: Ask) -> None:
    details = {one["kind"]: one["detail"] for one in found(ask, "charge")}
    assert details["task name"] == "9 attempts in a day"
    (failure,) = found(ask, "declined")
    assert failure["detail"] == "1 failure, the last one: the card was Declined by the issuer"
    assert found(ask, "01a1dd42")[0]["detail"] == "payments.charge, FAILED"


@pytest.mark.usefixtures("_rows")
def test_queues_schedules_and_runs_have_counts(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        add_task(connection, queue_name="mail", enqueued_at=ago(9))
    add_task(connection, queue_name="mail", enqueued_at=ago(-999))
    connection.execute("UPDATE horsies_schedule_state SET run_count = 41")
    for number in range(SHOWN + 2):
        add_run(connection, name="orders", workflow_key=f"order-7{number}")
    details = {one["name"]: one["detail"] for one in found(ask, "mail")}
    assert details == {"mail": "3 due", "mailings": "0 due", "nightly mail": "fired 41 times"}
    runs = [one for one in found(ask, "order-7") if one["kind"] == "run"]
    assert {one["detail"] for one in runs} == {"orders, RUNNING; 12 runs found"}
    assert len(runs) == SHOWN
    monkeypatch.setattr(search, "WAITING_MOST", 2)
    assert found(ask, "mailings")[0]["detail"] == "0 due"
    assert found(ask, "mail")[0]["detail"] == "2+ due"


def suggested(ask: Ask, text: str) -> list[dict[str, Any]]:
    """The suggestions for a viewer who may see arguments."""
    path = f"/api/search?{urlencode({'q': text})}"
    matches: list[dict[str, Any]] = ask(path, payload=True).json()["matches"]
    return matches


@pytest.mark.usefixtures("_rows")
def test_a_search_of_arguments_is_suggested_when_nothing_else_matches(
    ask: Ask, connection: Database
) -> None:
    add_task(connection, kwargs='{"customer": "Miller & Sons"}')
    (match,) = suggested(ask, "Miller & Sons")
    assert (match["kind"], match["name"]) == ("arguments", "Miller & Sons")
    assert match["path"] == "/tasks?argument=Miller+%26+Sons"
    listed = ask(match["path"], payload=True)
    assert listed.status_code == 200
    assert "None of the" not in listed.text
    assert "arguments" not in {one["kind"] for one in suggested(ask, "charge")}
    assert found(ask, "Miller & Sons") == [], "this viewer may not see arguments"
    assert suggested(ask, "password=x") == [], "a masked value cannot be searched"
    page = ask("/search?q=Miller", payload=True)
    assert page.status_code == 200, "the page offers it as a link"
    assert "/tasks?argument=Miller" in page.text


def test_nothing_found_says_what_was_searched(ask: Ask, connection: Database) -> None:
    page = ask("/search?q=%3Cb%3Enothing")
    assert page.status_code == 200
    assert "Nothing contains" in page.text
    assert "<b>nothing" not in page.text
    assert ask(f"/search?q={'x' * 201}").status_code == 400
    assert ask("/search").status_code == 200
    assert found(ask, "%_\\") == []


def test_the_beginning_of_an_id_is_a_range() -> None:
    assert id_range("01A1DD42-fbaa") == (
        "01a1dd42-fbaa-0000-0000-000000000000",
        "01a1dd42-fbaa-ffff-ffff-ffffffffffff",
    )
    assert id_range(TASK) == (TASK, TASK)
    assert id_range("f" * (PREFIX_MIN - 1)) is None
    assert id_range("charge") is None
    assert id_range(TASK + "0") is None


@pytest.mark.usefixtures("_rows")
def test_commands_take_the_first_digits_of_an_id(horsies: Run, connection: Database) -> None:
    assert TASK in horsies("show", "01a1dd42").out
    assert f"task {TASK}: FAILED" in horsies("explain", "01a1dd42-fb").out
    assert f"run {RUN}" in horsies("explain", "01a1dd43").out
    missing = horsies("show", "01a1dd44")
    assert (missing.code, missing.err) == (4, "error: There is no task 01a1dd44.\n")
    add_task(connection, id=TWIN, task_name="other")
    several = horsies("show", "01a1dd42")
    assert several.code == 4
    assert "Several ids begin with 01a1dd42; the newest are:" in several.err
    assert f"{TWIN} task other, PENDING" in several.err
    assert TASK in several.err


@pytest.mark.browser
@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_works_with_the_keyboard_alone(page: Page, width: int) -> None:
    resize(page, width)
    page.goto("/")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("mail")
    page.keyboard.press("Enter")
    expect(page.get_by_text("matches for")).to_be_visible()
    expect(page.locator("main a").first).to_have_text("mail")
    tab_to(page, "mail")
    enter(page)
    page.wait_for_url("**/queues/mail")


@pytest.mark.browser
@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("width", WIDTHS)
def test_suggestions_are_chosen_by_keys_alone(page: Page, width: int) -> None:
    resize(page, width)
    page.goto("/queues")
    page.keyboard.press("/")
    page.keyboard.type("mail")
    options = page.get_by_role("option")
    expect(options.first).to_contain_text("mail")
    box = page.get_by_role("combobox")
    expect(box).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowUp")
    expect(options.last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(box).to_have_attribute("aria-activedescendant", "suggestion-0")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queues/mail")
    page.keyboard.press("/")
    page.keyboard.type("payments")
    expect(options.first).to_contain_text("9 attempts in a day")
    page.keyboard.press("Escape")
    expect(options).to_have_count(0)


@pytest.mark.browser
def test_a_value_leads_to_the_search_of_arguments_by_keys_alone(
    page: Page, connection: Database
) -> None:
    task = add_task(connection, task_name="charge", kwargs='{"customer": "Miller"}')
    page.goto("/queues")
    page.keyboard.press("/")
    page.keyboard.type("miller")
    option = page.get_by_role("option")
    expect(option).to_contain_text("search the arguments of the newest tasks")
    page.keyboard.press("Control+A")
    page.keyboard.type("Miller")
    expect(option).to_contain_text("Miller")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tasks?argument=Miller")
    expect(page.locator(f'[data-key="{task}"]')).to_be_visible()
