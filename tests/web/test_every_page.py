"""Rules that hold for every route, whichever module defines it: these tests walk the table of routes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from psycopg import sql
from starlette.routing import compile_path

from horsies.app import Horsies
from horsies.web import VERBS, Access, ViewOnly
from horsies.web.masking import visible
from horsies.web.rendering import Route, static_files
from tests.support.applications import app_at
from tests.support.database import Database
from tests.support.rows import add_task, row_of
from tests.support.wait import wait_until
from tests.support.web_axe import found_on
from tests.support.web_keyboard import WIDTHS, enter, resize, tab_to
from tests.support.web_rows import FILTERED, GETS, PAGES, POSTS, add_rare_states, fill, path_of
from tests.support.web_server import WebServer, client_of, served, watched
from tests.support.web_site import Elements
from tests.support.workers import DATABASE_VARIABLE

# Three charts of an hour, each with its table, take 50 KB.
HTML_BYTES_MAX = 70 * 1024
STATIC_BYTES_MAX = 40 * 1024


@pytest.fixture(scope="module")
def dashboard(process_url: str) -> Iterator[WebServer]:
    """`horsies web` with actions, payload and the application, without which some pages do not open."""
    options = ("tests.support.apps.cards:app", "--enable-actions", "--payload")
    with served(*options, env={DATABASE_VARIABLE: process_url}) as server:
        yield server


@pytest.fixture
def examples(app: Horsies, connection: Database) -> dict[str, str]:
    return fill(app, connection)


@pytest.fixture
def paths(app: Horsies, connection: Database, examples: dict[str, str]) -> list[str]:
    """Every page, and the pages of what waits for a person, which have other buttons."""
    every = [path_of(route, examples) for route in PAGES]
    return [*every, *FILTERED, *add_rare_states(app, connection)]


def test_every_page_opens_is_small_and_has_nothing_inline(app: Horsies, paths: list[str]) -> None:
    async def main() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        async with client_of(app, actions=True, payload=True) as client:
            for path in paths:
                answer = await client.get(path)
                forbidden = Elements(answer.text).forbidden
                is_small = len(answer.content) <= HTML_BYTES_MAX
                if answer.status_code != 200 or forbidden or not is_small:
                    wrong[path] = (answer.status_code, forbidden, len(answer.content))
        return wrong

    assert asyncio.run(main()) == {}
    assert sum(len(data) for data, _ in static_files().values()) <= STATIC_BYTES_MAX


LABEL = re.compile(r'data-label="([^"]*)"|<th\b[^>]*>([^<]*)</th>')
# Names of quantities, which are written alike everywhere.
LOWER = re.compile(r"p\d\d ")
CHART_TABLE = re.compile(r'<details class="as-table">.*?</details>', re.DOTALL)


def test_the_labels_of_all_tables_begin_with_a_capital(app: Horsies, paths: list[str]) -> None:
    async def main() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        async with client_of(app, actions=True, payload=True) as client:
            for path in paths:
                text = CHART_TABLE.sub("", (await client.get(path)).text)
                labels = {first or second for first, second in LABEL.findall(text)}
                lower = {one for one in labels if one[:1].islower() and not LOWER.match(one)}
                if lower:
                    wrong[path] = lower
        return wrong

    assert asyncio.run(main()) == {}


REVERSED = "\u202egnp.exe\u2066\x1b[31m\x9b"


def test_characters_that_hide_or_reverse_text_show_on_every_page(
    app: Horsies, connection: Database, examples: dict[str, str]
) -> None:
    for table, column in (
        ("tasks", "error_code"),
        ("tasks", "failed_reason"),
        ("task_attempts", "error_message"),
        ("workers", "hostname"),
        ("workflows", "name"),
        ("workflows", "workflow_key"),
        ("actions", "actor"),
        ("actions", "detail"),
    ):
        columns = sql.Identifier(f"horsies_{table}"), sql.Identifier(column)
        connection.execute(sql.SQL("UPDATE {} SET {} = %s").format(*columns), [REVERSED])
    connection.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error, worker_id)"
        " SELECT id, 'task', status, generation, 'finish', %s, 'w' FROM horsies_tasks"
        " WHERE status = 'RUNNING'",
        [REVERSED],
    )

    async def main() -> dict[str, Any]:
        raw: dict[str, Any] = {}
        async with client_of(app, actions=True, payload=True) as client:
            for path in (path_of(route, examples) for route in PAGES):
                texts = Elements((await client.get(path)).text).texts
                if found := [text for text in texts if visible(text) != text]:
                    raw[path] = found
        return raw

    assert asyncio.run(main()) == {}


# Changes that another change undoes, and an order of selected tasks, which begins with its dry run.
CAN_BE_UNDONE = re.compile(
    r"/(queues|workflows|schedules)/.*/(pause|resume)|/schedules/.*/reset"
    r"|/workers/ping|/orders/(selected(\?verb=\w+)?|.*/stop)"
)
# Pages that are themselves the question.
QUESTIONS = (
    "/orders/new",
    "/orders/{id}",
    "/tasks/{id}/edit",
    "/schedules/{name:path}/edit",
    "/send",
)
# Changes without a button: the page of a queue links to the dry run of its purge.
WITHOUT_A_BUTTON = {"/queues/{name}/purge"}


def test_no_change_that_cannot_be_undone_is_one_click_away(app: Horsies, paths: list[str]) -> None:
    offered: set[str] = set()

    async def main() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        async with client_of(app, actions=True, payload=True) as client:
            for path in paths:
                elements = Elements((await client.get(path)).text)
                offered.update(elements.posts)
                final = {one for one in elements.at_once if not CAN_BE_UNDONE.fullmatch(one)}
                if final and not any(_fits(question, path) for question in QUESTIONS):
                    found[path] = final
        return found

    assert asyncio.run(main()) == {}
    changes = {route.path for route in POSTS if not route.path.startswith("/api/")}
    # A button that no page shows was not looked at.
    unseen = {one for one in changes if not any(_fits(one, action) for action in offered)}
    assert unseen == WITHOUT_A_BUTTON


def test_every_api_read_answers_with_json(app: Horsies, examples: dict[str, str]) -> None:
    async def main() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        async with client_of(app, payload=True) as client:
            reads = [route for route in GETS if route.path.startswith("/api/")]
            for path in (path_of(route, examples) for route in reads):
                answer = await client.get(path)
                is_json = answer.headers["content-type"].startswith("application/json")
                if answer.status_code != 200 or not is_json:
                    wrong[path] = (answer.status_code, answer.text[:200])
        return wrong

    assert asyncio.run(main()) == {}


def test_below_a_prefix_every_address_leads_somewhere(app: Horsies, paths: list[str]) -> None:
    prefix = "/ops/horsies"

    async def main() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        seen: set[str] = set()
        async with client_of(app, root_path=prefix, actions=True, payload=True) as client:
            for path in paths:
                text = (await client.get(prefix + path)).text
                elements = Elements(text)
                for address in elements.addresses - seen:
                    seen.add(address)
                    status = await _status(client, urljoin(prefix + path, address), prefix)
                    if status >= 400:
                        wrong[address] = (path, status)
                for action in elements.posts:
                    if not _is_post(action.removeprefix(prefix)):
                        wrong[action] = (path, "no such change")
        return wrong

    assert asyncio.run(main()) == {}


async def _status(client: httpx.AsyncClient, address: str, prefix: str) -> int:
    if address.startswith(("data:", "https://")):
        return 200
    if not address.startswith(f"{prefix}/"):
        return 599
    if address.startswith(f"{prefix}/live/"):  # an endless answer: see the tests of streams
        return 200
    return (await client.get(address)).status_code


def _is_post(path: str) -> bool:
    return any(_fits(route.path, path) for route in POSTS)


def _fits(pattern: str, path: str) -> bool:
    """Whether a route with this path serves an address."""
    return compile_path(pattern)[0].fullmatch(path.partition("?")[0]) is not None


class _With:
    """A policy with one answer."""

    def __init__(self, access: Access | None) -> None:
        self._access = access

    async def access(self, request: object) -> Access | None:
        return self._access


def test_every_change_refuses_viewers_strangers_and_forged_requests(app: Horsies) -> None:
    intent = {"X-Horsies-Intent": "action"}
    foreign = {**intent, "origin": "https://evil.example"}
    everything = _With(Access("anna", VERBS))

    async def status(route: Route, policy: Any, headers: Any, *, actions: bool = True) -> int:
        async with client_of(app, policy, actions=actions) as client:
            data = {"token": "x" * 43}
            return (await client.post(path_of(route, {}), headers=headers, data=data)).status_code

    async def main() -> dict[str, list[int]]:
        statuses = {}
        for route in POSTS:
            # The right to a bulk order depends on its form.
            others = frozenset() if callable(route.verb) else VERBS - {route.verb}
            statuses[route.path] = [
                await status(route, ViewOnly(), intent),
                await status(route, _With(Access("anna", others)), intent),
                await status(route, _With(None), intent),
                await status(route, everything, intent, actions=False),
                await status(route, everything, foreign),
                await status(route, everything, {}),
            ]
        return statuses

    assert len(POSTS) > 10
    assert {path: s for path, s in asyncio.run(main()).items() if s != [403] * 6} == {}


@pytest.fixture
def viewer_app(process_url: str, connection: Database) -> Iterator[Horsies]:
    """The application with a role that may only SELECT, as docs/security.md makes it."""
    role = "horsies_web_viewer"
    connection.execute(f"CREATE ROLE {role} LOGIN".encode())
    connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}".encode())
    parts = urlsplit(process_url)
    host = parts.netloc.rpartition("@")[2]
    app = app_at(urlunsplit(parts._replace(netloc=f"{role}@{host}")))
    yield app
    app.close()
    connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_a_role_with_select_alone_opens_every_page(
    viewer_app: Horsies, examples: dict[str, str]
) -> None:
    async def main() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        async with client_of(viewer_app) as client:
            for path in (path_of(route, examples) for route in PAGES if route.verb is None):
                answer = await client.get(path)
                if answer.status_code != 200:
                    wrong[path] = (answer.status_code, answer.text[-900:])
        return wrong

    assert asyncio.run(main()) == {}


def test_every_live_page_streams_regions_without_inline_code(
    dashboard: WebServer, paths: list[str]
) -> None:
    for path in paths:
        if "data-live=" not in (text := dashboard.get(path).text):
            continue
        regions = _first_sample(dashboard, path)
        assert set(regions) == set(re.findall(r'data-region="(\w+)"', text)), path
        assert Elements("".join(regions.values())).forbidden == [], path


def _first_sample(dashboard: WebServer, path: str) -> dict[str, str]:
    name = ""
    with dashboard.client.stream("GET", f"{dashboard.url}/live{path}") as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: ") and name == "sample":
                regions: dict[str, str] = json.loads(line.removeprefix("data: "))["regions"]
                return regions
    raise AssertionError(f"no sample of {path}")


@pytest.mark.browser
def test_without_javascript_every_page_opens_and_its_filters_work(
    browser: Browser, dashboard: WebServer, paths: list[str]
) -> None:
    with watched(browser, dashboard, java_script_enabled=False) as context:
        page = context.new_page()
        for path in paths:
            answer = page.goto(path)
            assert answer is not None
            assert (path, answer.status) == (path, 200)
            expect(page.locator("h1")).to_be_visible()
            for index in range(page.locator("#content form:not([method=post])").count()):
                form = page.locator("#content form:not([method=post])").nth(index)
                with page.expect_navigation() as navigation:
                    form.locator("button, input[type=submit]").first.click()
                assert navigation.value.ok, path
                page.goto(path)


@pytest.mark.browser
def test_no_page_complains_or_asks_another_host(
    browser: Browser, dashboard: WebServer, paths: list[str]
) -> None:
    with watched(browser, dashboard) as context:
        page = context.new_page()
        for path in paths:
            page.goto(path)
            if page.locator("main[data-live]").count():
                expect(page.locator("[data-badge][data-state=live]")).to_be_visible()


# A machine with other work takes minutes for all pages.
PARTS = 5


@pytest.mark.browser
@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_is_accessible_in_both_themes_and_all_widths(
    part: int, browser: Browser, dashboard: WebServer, paths: list[str]
) -> None:
    wrong = {}
    with watched(browser, dashboard, bypass_csp=True) as context:
        page = context.new_page()
        for path in paths[part::PARTS]:
            page.goto(path)
            if found := found_on(page):
                wrong[path] = found
    assert wrong == {}


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_timing_is_edited_with_the_keyboard_alone(
    page: Page, connection: Database, app: Horsies, width: int
) -> None:
    fill(app, connection)
    resize(page, width)
    page.goto("/schedules/hourly")
    tab_to(page, "Edit timing")
    enter(page)
    tab_to(page, "pattern")
    page.keyboard.press("Control+A")
    page.keyboard.type("every 2 hours")
    enter(page)  # shows the slots: the first button of the form
    expect(page.get_by_role("heading", name="After: every 2 hours")).to_be_visible()
    tab_to(page, "Save the edit")
    enter(page)
    expect(page.get_by_text("(edited)")).to_be_visible()
    tab_to(page, "Reset to")
    enter(page)
    expect(page.get_by_text("(edited)")).to_have_count(0)


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_task_is_cancelled_with_the_keyboard_alone(
    page: Page, connection: Database, width: int
) -> None:
    task = add_task(connection)
    resize(page, width)
    page.goto(f"/tasks/{task}")
    tab_to(page, "Cancel")
    page.keyboard.press("Enter")
    expect(page.get_by_text("A cancelled task cannot be resumed")).to_be_visible()
    assert row_of(connection, task)["status"] == "PENDING"
    tab_to(page, "reason")
    page.keyboard.type("a wrong address")
    tab_to(page, "Cancel the task")
    enter(page)
    again = f"This cannot be undone; to send it again: horsies retry {task}"
    expect(page.get_by_role("status")).to_contain_text(again)
    assert row_of(connection, task)["status"] == "CANCELLED"


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_selected_task_is_cancelled_with_the_keyboard_alone(
    page: Page, connection: Database, width: int
) -> None:
    task = add_task(connection)
    resize(page, width)
    page.goto("/tasks")
    page.keyboard.press("j")
    page.keyboard.press("x")
    tab_to(page, "Cancel…", "Shift+Tab")
    enter(page)
    expect(page.locator("[data-question]")).to_contain_text("Cancel 1 task? This cannot be undone")
    assert row_of(connection, task)["status"] == "PENDING"
    tab_to(page, "Cancel 1 task")
    enter(page)
    wait_until(lambda: row_of(connection, task)["status"] == "CANCELLED")
