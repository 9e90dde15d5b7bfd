"""Every page without a mouse: each link, button and field can be reached, and shows that it has the focus.

The pages come from the table of routes. What the keyboard then does, and that focus survives live updates,
is in `test_every_page.py`, `test_script.py` and `test_task_browser.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from playwright.sync_api import Browser

from horsies.app import Horsies
from horsies.web.rendering import static_files
from tests.support.database import Database
from tests.support.web_keyboard import WIDTHS, problems_of, resize
from tests.support.web_rows import FILTERED, PAGES, fill, path_of
from tests.support.web_server import WebServer, served, watched
from tests.support.workers import DATABASE_VARIABLE

pytestmark = pytest.mark.browser

# A machine with other work takes minutes for all pages.
PARTS = 4


@pytest.fixture(scope="module")
def dashboard(process_url: str) -> Iterator[WebServer]:
    """`horsies web` with actions, payload and the application, without which some pages do not open."""
    options = ("tests.support.apps.cards:app", "--enable-actions", "--payload")
    with served(*options, env={DATABASE_VARIABLE: process_url}) as server:
        yield server


@pytest.mark.parametrize("part", range(PARTS))
def test_the_keyboard_reaches_everything_on_every_page_and_shows_where_it_is(
    part: int, browser: Browser, dashboard: WebServer, app: Horsies, connection: Database
) -> None:
    examples = fill(app, connection)
    paths = [*(path_of(route, examples) for route in PAGES), *FILTERED][part::PARTS]
    wrong: dict[str, list[str]] = {}
    with watched(browser, dashboard) as context:
        page = context.new_page()
        for path, width in product(paths, WIDTHS):
            resize(page, width)
            page.goto(path)
            if found := problems_of(page):
                wrong[f"{path} {width}"] = found
    assert wrong == {}


def test_the_themes_differ_in_nothing_but_the_values_of_colours() -> None:
    """So one round of the keyboard serves both themes."""
    texts = [data.decode() for data, _ in static_files().values()]
    assert any("light-dark(" in text for text in texts)
    assert [text for text in texts if "prefers-color-scheme" in text] == []
