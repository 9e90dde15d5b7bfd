"""The dashboard as a process: outages, streams, idle time, shutdown, tabs, and attacks in a browser."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from playwright.sync_api import Browser, Page, Request, expect

from tests.support.database import Database, backends
from tests.support.proxy import Proxy
from tests.support.wait import wait_until
from tests.support.web_server import WebServer, served, watched

TOKEN = "0123456789abcdef" * 2
ACTIVITY = (
    "SELECT max(query_start), bool_or(query ILIKE 'listen%'), "
    "extract(epoch FROM clock_timestamp() - max(query_start))::float8 "
    "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'horsies:web'"
)


def connections_of(server: WebServer) -> int:
    """The number of open connections of browsers to the server."""
    port = int(server.url.rpartition(":")[2])
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


@contextmanager
def stream(server: WebServer, path: str = "/live/") -> Iterator[Iterator[str]]:
    """The names of the events of a stream, until the end of the block."""
    with server.client.stream("GET", server.url + path) as response:
        lines = response.iter_lines()
        yield (line.removeprefix("event: ") for line in lines if line.startswith("event: "))


def test_pages_report_an_outage_and_recover_by_themselves(proxy: Proxy) -> None:
    with served("--database-url", proxy.url) as server:
        assert server.get("/").status_code == 200
        with stream(server) as events:
            assert next(events) == "sample"
            proxy.stop()
            answer = server.get("/")
            assert (answer.status_code, "Database unavailable" in answer.text) == (503, True)
            assert "Traceback" not in answer.text
            ready = server.get("/readyz")
            assert (ready.status_code, ready.text) == (503, "not ready: DATABASE_UNAVAILABLE\n")
            assert server.get("/livez").status_code == 200
            assert "stale" in events
            proxy.start()
            wait_until(lambda: server.get("/").status_code == 200)
            assert "sample" in events


def test_a_dashboard_that_starts_without_its_database_recovers(proxy: Proxy) -> None:
    proxy.stop()
    with served("--database-url", proxy.url) as server:
        assert server.get("/").status_code == 503
        proxy.start()
        wait_until(lambda: server.get("/").status_code == 200)


def test_without_viewers_the_database_gets_no_statement(
    process_url: str, connection: Database
) -> None:
    with served("--database-url", process_url) as server:
        with stream(server) as events:
            assert (next(events), next(events)) == ("sample", "sample")
            assert len(backends(connection, "horsies:web")) <= 4
        wait_until(lambda: connections_of(server) == 0)

        def idle_seconds() -> float:
            last, listens, seconds = connection.execute(ACTIVITY.encode()).fetchone() or (0, 0, 0)
            assert last is not None
            assert listens is False
            return float(seconds)

        # Two samples would have been due. Slow checks that had begun with the last sample may end first.
        wait_until(lambda: idle_seconds() > 4.5, what="a rest without a statement")


def test_sigterm_ends_the_process_in_time_although_streams_are_open(process_url: str) -> None:
    with served("--database-url", process_url) as server, ExitStack() as stack:
        for _ in range(5):
            assert next(stack.enter_context(stream(server))) == "sample"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


@pytest.mark.browser
def test_tabs_in_the_background_hold_no_connection(
    browser: Browser, dashboard: WebServer, connection: Database
) -> None:
    open_streams: set[Request] = set()

    def note(request: Request) -> None:
        if "/live/" in request.url:
            open_streams.add(request)

    with watched(browser, dashboard) as context:
        context.on("request", note)
        context.on("requestfailed", lambda request: open_streams.discard(request))
        context.on("requestfinished", lambda request: open_streams.discard(request))
        pages = [context.new_page() for _ in range(8)]
        for page in pages:
            page.goto("/")
            expect(page.locator("[data-badge][data-state=live]")).to_be_visible()
            set_hidden(page, True)
        set_hidden(pages[0], False)
        wait_until(lambda: pages[0].evaluate("1") and len(open_streams) == 1)


def set_hidden(page: Page, is_hidden: bool) -> None:
    """Hide or show the tab: a headless browser keeps all of its tabs visible."""
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )


@pytest.mark.browser
def test_an_outage_shows_on_the_badge_and_goes_away(browser: Browser, proxy: Proxy) -> None:
    with served("--database-url", proxy.url) as server, watched(browser, server) as context:
        page = context.new_page()
        page.goto("/")
        expect(page.locator("[data-badge]")).to_have_text("live")
        proxy.stop()
        stale = re.compile(r"stale since \d\d:\d\d:\d\d")
        expect(page.locator("[data-badge]")).to_have_text(stale)
        proxy.start()
        expect(page.locator("[data-badge]")).to_have_text("live")


@pytest.mark.browser
def test_a_token_does_not_stay_in_the_address(browser: Browser, process_url: str) -> None:
    options = ("--auth", "token", "--database-url", process_url)
    with (
        served(*options, env={"HORSIES_WEB_TOKEN": TOKEN}) as server,
        watched(browser, server) as context,
    ):
        context.watch.expected.append("401")  # type: ignore[attr-defined]
        page = context.new_page()
        page.goto("/help")
        page.get_by_label("Token of this dashboard").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{server.url}/")
        context.clear_cookies()
        page.goto(f"/help?token={TOKEN}")
        expect(page.get_by_role("heading", name="Help")).to_be_visible()
        assert page.url == f"{server.url}/help"
        addresses = page.evaluate("performance.getEntriesByType('navigation').map(e => e.name)")
        assert TOKEN not in json.dumps(addresses)
        page.go_back()
        assert TOKEN not in page.url


@pytest.mark.browser
def test_another_site_can_neither_post_nor_frame(
    browser: Browser, dashboard: WebServer, connection: Database
) -> None:
    evil = f"""<form method="post" action="{dashboard.url}/queues/default/pause">
    <input name="token" value="x"><button>Win</button></form>
    <iframe src="{dashboard.url}/help"></iframe>"""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.route(
            "http://localhost:1/", lambda route: route.fulfill(body=evil, content_type="text/html")
        )
        page.goto("http://localhost:1/")
        wait_until(
            lambda: page.evaluate("1") and page.frames[1].url.startswith("chrome-error:"),
            what=lambda: [frame.url for frame in page.frames],
        )
        with page.expect_navigation() as navigation:
            page.get_by_role("button", name="Win").click()
        assert navigation.value is not None
        assert navigation.value.status == 403
        expect(page.get_by_text("403 CROSS_SITE")).to_be_visible()
    finally:
        context.close()
