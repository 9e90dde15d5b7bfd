"""Fixtures: the dashboard in this process and as a real server, and a real Chromium.

``ask`` asks the dashboard in this process, without a socket. ``dashboard`` is `horsies web` in a process
of its own on this test process's database; ``page`` is a tab of one Chromium for the whole session. Every
message on a tab's console and every request to another host fails its test.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from horsies.app import Horsies
from horsies.web.access import Policy
from tests.support.database import Database
from tests.support.web_server import (
    APT_LINE,
    CHROMIUM,
    FLAGS,
    Ask,
    WebServer,
    client_of,
    served,
    watched,
)
from tests.support.workers import Fleet

# The dashboard rests twenty times as long as it took to read a page, so a live update of a large graph
# may take longer than Playwright's five seconds on a slow machine.
expect.set_options(timeout=60_000)


@pytest.fixture
def ask(app: Horsies) -> Ask:
    """Send one request to a dashboard in this process: ``ask("/queues", actions=True)``."""

    def ask(
        path: str,
        *,
        method: str = "GET",
        policy: Policy | None = None,
        root_path: str = "",
        headers: dict[str, str] | None = None,
        data: dict[str, str] | None = None,
        json: Any = None,
        **switches: Any,
    ) -> httpx.Response:
        async def main() -> httpx.Response:
            async with client_of(app, policy, root_path, **switches) as client:
                return await client.request(
                    method, f"{root_path}{path}", headers=headers, data=data, json=json
                )

        return asyncio.run(main())

    return ask


@pytest.fixture(scope="module")
def dashboard(process_url: str) -> Iterator[WebServer]:
    """`horsies web` with actions and payload on this process's database.

    Not for the whole session: tests of other modules count processes and sessions.
    """
    options = ("--enable-actions", "--payload", "--database-url", process_url)
    with served(*options) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this process."""
    if shutil.which(CHROMIUM) is None:
        pytest.fail(f"{CHROMIUM} is missing; install it: {APT_LINE}", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def fleet(process_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers on this process's database, none at first."""
    fleet = Fleet(process_url, tmp_path)
    yield fleet
    fleet.destroy()


@pytest.fixture
def tabs(browser: Browser, dashboard: WebServer, connection: Database) -> Iterator[BrowserContext]:
    """A browser context on the dashboard, whose tables are empty at first."""
    with watched(browser, dashboard) as context:
        yield context


@pytest.fixture
def page(tabs: BrowserContext) -> Page:
    """A tab on the dashboard."""
    return tabs.new_page()
