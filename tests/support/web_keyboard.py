"""A page in a browser without a mouse: window widths, keyboard access to the page's parts, and the parts
that the keyboard does not reach or that do not show the focus.
"""

from __future__ import annotations

import json

from playwright.sync_api import Page

# A phone, a narrow window, and a full screen.
WIDTHS = (390, 1024, 1440)

# Describe the element that has the focus.
FOCUS = """() => { const at = document.activeElement; return at === document.body ? "" :
    `${at.getAttribute("name") || ""} ${at.textContent.trim()}`; }"""

THEMES = ("light", "dark")
# WCAG 2.1, 1.4.11: the contrast of what shows the focus.
CONTRAST_MIN = 3.0
# Presses of Tab before the next check of what they reached; a check takes as long as several presses.
BATCH = 8
# Tabs beyond the number of parts of a page: the browser's own places, and parts of a live update.
SPARE_TABS = 12

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


def resize(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})


def enter(page: Page) -> None:
    """Press Enter, and wait until another page is open."""
    with page.expect_navigation():
        page.keyboard.press("Enter")


def tab_to(page: Page, words: str, key: str = "Tab") -> None:
    """Press the key until an element with these words has the focus."""
    for _ in range(80):
        page.keyboard.press(key)
        if words in page.evaluate(FOCUS):
            return
    raise AssertionError(f"the keyboard does not reach {words!r}")


def problems_of(page: Page) -> list[str]:
    """Press Tab through a page; return what was not reached, or does not show the focus."""
    parts = page.evaluate(_script(REACHABLE))
    wanted = set(parts)
    assert wanted
    page.evaluate(_script(RECORD))
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


def _script(text: str) -> str:
    return text.replace("WORDS", WORDS).replace("THEMES", json.dumps(THEMES))
