"""The search: parts of names, queues, schedules, keys of runs, beginnings of ids, words of error messages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect
from psycopg.types.json import Jsonb

from horsies.monitor.search import PREFIX_MIN, id_range
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_attempt, add_run, add_task, add_worker, ago
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
def test_the_search_works_with_the_keyboard_alone(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("mail")
    page.keyboard.press("Enter")
    expect(page.get_by_text("matches for")).to_be_visible()
    link = page.locator("main a").first
    expect(link).to_have_text("mail")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/queues/mail")


@pytest.mark.browser
@pytest.mark.usefixtures("_rows")
def test_suggestions_are_chosen_by_keys_alone(page: Page) -> None:
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
