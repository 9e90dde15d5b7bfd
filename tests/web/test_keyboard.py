"""Every page without a mouse: each link, button and field can be reached, and shows that it has the focus.

The pages come from the table of routes. What the keyboard then does, and that focus survives live updates,
is in `test_every_page.py`, `test_script.py` and `test_task_browser.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

import pytest
from playwright.sync_api import Browser, Page

from horsies.app import Horsies
from horsies.web.rendering import static_files
from tests.support.database import Database
from tests.support.web_keyboard import WIDTHS, resize
from tests.support.web_rows import FILTERED, fill, path_of
from tests.support.web_server import WebServer, served, watched
from tests.support.workers import DATABASE_VARIABLE
from tests.web.test_every_page import PAGES

pytestmark = pytest.mark.browser

THEMES = ("light", "dark")
# WCAG 2.1, 1.4.11: the contrast of what shows the focus.
CONTRAST_MIN = 3.0
# Presses of Tab before the next look at what they reached; each look takes as long as several presses.
BATCH = 8
# Tabs beyond the number of parts of a page: the browser's own places, and parts of a live update.
SPARE_TABS = 12
# A machine with other work takes minutes for all pages.
PARTS = 4

# Everything that the keyboard must reach, in words. Of a group of radio buttons it reaches one.
REACHABLE = """() => {
    document.querySelectorAll("main details").forEach(one => { one.open = true; });
    const parts = document.querySelectorAll(
        "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']");
    return [...parts].filter(one => !one.disabled && one.tabIndex >= 0
        && one.type !== "radio" && one.checkVisibility({visibilityProperty: true})).map(WORDS); }"""

# Live updates change numbers in the text of links, such as ages, and the minutes to which charts link.
WORDS = r"""(one => [one.tagName, ...["name", "href", "value"].map(name =>
        (one.getAttribute(name) || "").replace(/T\d\d:\d\d/g, "T")),
    one.textContent.trim().replace(/\d+/g, "0").slice(0, 60)].join(" "))"""

# Records what gets the focus, in the same words, with the contrast in each theme between what shows the
# focus and what is around; 0 if nothing shows it. The themes differ in the values of `light-dark()` alone.
RECORD = """() => {
    const root = document.documentElement, known = {};
    const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const drawn = colour => { context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data]; };
    const rgb = colour => known[colour] ??= drawn(colour);
    const light = colour => { const [r, g, b] = rgb(colour).map(part => { const one = part / 255;
        return one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const contrast = at => {
        const style = getComputedStyle(at);
        let around = at.parentElement;
        const ground = () => getComputedStyle(around).backgroundColor;
        while (around && rgb(ground())[3] < 255) around = around.parentElement;
        const back = around ? ground() : "white";
        const [low, high] = [light(style.outlineColor), light(back)].sort((one, other) => one - other);
        const shown = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
        return shown ? (high + 0.05) / (low + 0.05) : 0; };
    const inTheme = (theme, at) => { root.style.colorScheme = theme; return contrast(at); };
    window.reached = {};
    document.addEventListener("focusin", ({target}) => {
        const words = WORDS(target);
        reached[words] ??= THEMES.map(theme => inTheme(theme, target));
        root.style.colorScheme = ""; }); }"""


def script(text: str) -> str:
    return text.replace("WORDS", WORDS).replace("THEMES", json.dumps(THEMES))


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


def problems_of(page: Page) -> list[str]:
    """Press Tab through a page; return what was not reached, or does not show the focus."""
    parts = page.evaluate(script(REACHABLE))
    wanted = set(parts)
    assert wanted
    page.evaluate(script(RECORD))
    reached: dict[str, list[float]] = {}
    for _ in range(0, len(parts) + SPARE_TABS, BATCH):
        for _ in range(BATCH):
            page.keyboard.press("Tab")
        reached = page.evaluate("reached")
        if wanted <= reached.keys():
            break
    return [f"not reached: {words}" for words in sorted(wanted - reached.keys())] + [
        f"contrast {contrast:.1f} in {theme}: {words}"
        for words, contrasts in sorted(reached.items())
        for theme, contrast in zip(THEMES, contrasts, strict=True)
        if contrast < CONTRAST_MIN
    ]
