"""The script of the pages in a real browser: live updates that disturb nothing, keys, times."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.support.ports import free_port
from tests.support.web_server import WebServer, running, watched

pytestmark = pytest.mark.browser


class Rows:
    """The rows of the live page, in the file that its server reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **words: str) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps([{"key": key, "word": word} for key, word in words.items()]))
        draft.replace(self._path)


@pytest.fixture(scope="module")
def rows_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "rows.json"
    Rows(path).write()
    return path


@pytest.fixture(scope="module")
def live_site(rows_path: Path) -> Iterator[WebServer]:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.apps.live_site", str(rows_path), str(port)]
    with running(command, f"http://127.0.0.1:{port}") as server:
        yield server


@pytest.fixture
def rows(rows_path: Path) -> Rows:
    return Rows(rows_path)


@pytest.fixture
def tabs(browser: Browser, live_site: WebServer) -> Iterator[BrowserContext]:
    with watched(browser, live_site, timezone_id="Asia/Tokyo") as context:
        yield context


@pytest.fixture
def page(tabs: BrowserContext, rows: Rows) -> Page:
    rows.write(one="first", two="second", three="third")
    page = tabs.new_page()
    page.goto("/rows")
    expect(badge(page)).to_have_text("live")
    return page


def badge(page: Page) -> Any:
    return page.locator("[data-badge]")


def row(page: Page, key: str) -> Any:
    return page.locator(f"tr[data-key={key}]")


def words(page: Page) -> list[str]:
    return page.locator("tr .word").all_inner_texts()


def test_an_update_changes_rows_in_place_and_disturbs_nothing(page: Page, rows: Rows) -> None:
    page.get_by_text("More").click()
    page.get_by_label("Filter").fill("typed")
    link = row(page, "two").get_by_role("link")
    link.focus()
    kept = row(page, "two").element_handle()
    rows.write(zero="new", one="first", two="changed", four="fourth")
    expect(row(page, "two").locator(".word")).to_have_text("changed")
    assert words(page) == ["new", "first", "changed", "fourth"]
    assert kept is not None
    assert kept.evaluate("row => row.isConnected")
    expect(page.get_by_text("More than three")).to_be_visible()  # above the table
    expect(link).to_be_focused()
    expect(page.get_by_text("4 rows")).to_be_visible()
    expect(page.get_by_label("Filter")).to_have_value("typed")
    assert page.locator("ul [data-key]").all_inner_texts() == [
        "one first",
        "two changed",
        "three third",
    ]


def test_a_line_that_goes_leaves_the_focus(page: Page, rows: Rows) -> None:
    rows.write(one="first", two="second", three="third", four="fourth")
    expect(page.get_by_text("More than three")).to_be_visible()
    link = row(page, "two").get_by_role("link")
    link.focus()
    rows.write(one="first", two="second", three="third")
    expect(page.get_by_text("More than three")).to_have_count(0)
    expect(link).to_be_focused()


def test_rows_are_never_reordered(page: Page, rows: Rows) -> None:
    rows.write(three="C", two="B", one="A")
    expect(row(page, "one").locator(".word")).to_have_text("A")
    assert words(page) == ["A", "B", "C"]


def test_nothing_moves_while_a_row_is_selected(page: Page, rows: Rows) -> None:
    row(page, "one").get_by_label("select").check()
    expect(page.locator("[data-selected-count]")).to_have_text("1")
    rows.write(one="later", two="second", three="third")
    expect(page.locator("ul [data-key=one]")).to_have_text("one later")
    assert words(page) == ["first", "second", "third"]
    row(page, "one").get_by_label("select").uncheck()
    expect(row(page, "one").locator(".word")).to_have_text("later")


def test_keys_move_select_open_search_and_go(page: Page) -> None:
    page.keyboard.press("j")
    expect(row(page, "one").get_by_role("link")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(row(page, "two").get_by_role("link")).to_be_focused()
    page.keyboard.press("x")
    expect(row(page, "two").get_by_label("select")).to_be_checked()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("jx?")
    expect(page.locator("#search")).to_have_value("jx?")
    page.keyboard.press("Escape")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rows?open=three")
    page.keyboard.press("?")
    page.wait_for_url("**/help")


def test_times_are_shown_in_utc_or_local_and_stay_so(page: Page, rows: Rows) -> None:
    time = page.locator("time")
    expect(time).to_have_text("12:00:00")
    page.keyboard.press("u")
    expect(time).to_have_text("21:00:00")
    rows.write(one="later")
    expect(row(page, "one").locator(".word")).to_have_text("later")
    expect(time).to_have_text("21:00:00")
    page.reload()
    expect(time).to_have_text("21:00:00")
    page.get_by_role("button", name="Local").click()
    expect(time).to_have_text("12:00:00")


def test_a_pause_holds_the_page_until_it_is_resumed(page: Page, rows: Rows) -> None:
    page.keyboard.press("p")
    expect(badge(page)).to_have_text("paused")
    rows.write(one="later")
    badge(page).click()
    expect(row(page, "one").locator(".word")).to_have_text("later")
    expect(badge(page)).to_have_text("live")


def test_a_page_without_answers_says_since_when_it_is_stale(
    browser: Browser, rows_path: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.apps.live_site", str(rows_path), str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command, url) as server, watched(browser, server) as context:
        context.watch.expected.append("Failed to load resource")  # type: ignore[attr-defined]
        page = context.new_page()
        page.clock.install()
        page.goto("/rows")
        expect(badge(page)).to_have_text("live")
        server.process.kill()
        server.process.wait()
        page.clock.fast_forward(12_000)
        expect(badge(page)).to_have_text(re.compile(r"stale since \d\d:\d\d:\d\d"))
        with running(command, url):
            page.clock.fast_forward(6_000)
            expect(badge(page)).to_have_text("live")
