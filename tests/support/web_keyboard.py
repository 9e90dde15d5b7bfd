"""A page in a browser without a mouse: window widths, and keyboard access to the page's parts."""

from __future__ import annotations

from playwright.sync_api import Page

# A phone, a narrow window, and a full screen.
WIDTHS = (390, 1024, 1440)

# Describe the element that has the focus.
FOCUS = """() => { const at = document.activeElement; return at === document.body ? "" :
    `${at.getAttribute("name") || ""} ${at.textContent.trim()}`; }"""


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
