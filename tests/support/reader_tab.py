"""The browser for a reader of a built site: one tab, its steps, and the notes about them.

`python -m tests.support.reader` starts it and sends it the steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from playwright.sync_api import Error, sync_playwright

from tests.support import reader
from tests.support.documentation_site import hit_links, served_files, type_query
from tests.support.newcomer import QUESTIONS
from tests.support.web_server import CHROMIUM, FLAGS

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

SCREEN = {"width": 1280, "height": 900}
# The text of the screen: the article's blocks on the screen, without blocks inside other blocks.
ON_SCREEN = """() => {
  const kinds = "h1,h2,h3,h4,p,li,pre,tr,dt,dd,summary,svg.drawing";
  const top = document.querySelector(".md-header").offsetHeight;
  const seen = one => {
    const box = one.getBoundingClientRect();
    return box.height > 0 && box.bottom > top && box.top < innerHeight;
  };
  const outer = one => !one.parentElement.closest("article :is(" + kinds + ")");
  const text = one => one.matches("svg")
    ? "[drawing: " + [...one.querySelectorAll("text")].map(t => t.textContent).join(" / ") + "]"
    : one.matches("h1,h2,h3,h4") ? "\\n## " + one.innerText.replace("¶", "") : one.innerText;
  return [...document.querySelectorAll("article :is(" + kinds + ")")]
    .filter(one => outer(one) && seen(one)).map(text).join("\\n");
}"""
# Finds the next occurrence of some words in the article; the menus beside the article are skipped.
FIND = """words => {
  for (let tries = 0; tries < 200; tries++) {
    if (!window.find(words, false, false, true)) return false;
    const node = getSelection().anchorNode;
    const place = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
    if (place.closest("article")) { place.scrollIntoView({block: "center"}); return true; }
  }
  return false;
}"""
PLACE = """() => [scrollY, innerHeight, document.documentElement.scrollHeight]"""
LINKS = "article a[href]:not(.headerlink):not(.md-content__button)"
MENU = ".md-nav--primary a.md-nav__link:not([href^='#'])"
CONTENTS = ".md-sidebar--secondary a.md-nav__link"


class Reading:
    """One tab on the site, its last list of links, and the notes on the current question."""

    def __init__(self, tab: Page, address: str, log: Path) -> None:
        self.tab, self.address, self.log = tab, address, log
        self.listed: list[Locator] = []
        self.question, self.began = 0, time.monotonic()

    def do(self, command: str, words: str) -> str:
        """Take one step; return the resulting screen, or the reason for an error."""
        if command not in STEPS:
            return reader.__doc__ or ""
        try:
            shown = STEPS[command](self, words)
        except (Error, LookupError, ValueError) as error:
            shown = f"Not possible: {error}"
        self.note(command, words)
        return shown

    def note(self, command: str, words: str) -> None:
        """Append the step, the open page and the seconds since the start of the question."""
        line = {
            "question": self.question,
            "step": command,
            "words": words,
            "page": urlsplit(self.tab.url).path.lstrip("/"),
            "seconds": round(time.monotonic() - self.began, 1),
        }
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def ask(self, words: str) -> str:
        """Open the home page for a question and start its clock."""
        self.question, self.began = int(words), time.monotonic()
        self.tab.goto(f"{self.address}/index.html")
        return f"Question {words}: {QUESTIONS[self.question - 1].text}\n\n{self.view()}"

    def view(self, _: str = "") -> str:
        """Return the text on the screen, and its position in the page."""
        self.listed = []
        top, height, whole = self.tab.evaluate(PLACE)
        place = f"{self.tab.title()} ({self.tab.url.removeprefix(self.address)})"
        part = f"pixels {top:.0f} to {min(top + height, whole):.0f} of {whole:.0f}"
        return f"{place}, {part}\n{self.tab.evaluate(ON_SCREEN)}"

    def search(self, words: str) -> str:
        """Return the hits of the site's own search, numbered."""
        type_query(self.tab, words)
        return self._list(hit_links(self.tab))

    def links(self, _: str) -> str:
        """Return the links on the screen, numbered."""
        height = SCREEN["height"]
        boxes = [(one, one.bounding_box()) for one in self.tab.locator(LINKS).all()]
        return self._numbered([one for one, box in boxes if box and 0 <= box["y"] < height])

    def menu(self, _: str) -> str:
        """Return every page of the site's menu, numbered."""
        return self._list(self.tab.locator(MENU))

    def contents(self, _: str) -> str:
        """Return the headings of the page, numbered."""
        return self._list(self.tab.locator(CONTENTS))

    def _list(self, found: Locator) -> str:
        return self._numbered(found.all())

    def _numbered(self, found: list[Locator]) -> str:
        """Store the links, and return them with their numbers and targets."""
        lines = []
        for number, one in enumerate(found, 1):
            text = " ".join(one.inner_text().split())
            lines.append(f"{number}. {text[:240]} -> {_short(one.get_attribute('href') or '')}")
        self.listed = found
        return "\n".join(lines) or "nothing"

    def follow(self, words: str) -> str:
        """Open a link from the last list, as if it were clicked, and return the screen."""
        if not (words.isdigit() and 1 <= int(words) <= len(self.listed)):
            raise ValueError(
                f"follow takes a number of the last list, which has {len(self.listed)}"
            )
        found = self.listed[int(words) - 1]
        target = found.evaluate("link => link.href")
        if found.is_visible():
            found.click()
        else:  # The entry is in a folded menu, whose folds a reader would open first.
            self.tab.goto(target)
        self.tab.wait_for_load_state()
        return self.view()

    def more(self, _: str) -> str:
        """Scroll down by most of a screen."""
        return self._scroll(0.85)

    def up(self, _: str) -> str:
        """Scroll up by most of a screen."""
        return self._scroll(-0.85)

    def _scroll(self, part: float) -> str:
        self.tab.evaluate(f"scrollBy({{top: {part} * innerHeight, behavior: 'instant'}})")
        return self.view()

    def find(self, words: str) -> str:
        """Go to the next occurrence of these words on the page, as a browser's search does."""
        found = self.tab.evaluate(FIND, words)
        return self.view() if found else f"The page does not contain: {words}"

    def back(self, _: str) -> str:
        """Return to the previous page."""
        self.tab.go_back()
        return self.view()

    def answer(self, words: str) -> str:
        """End the question; `do` notes the answer and the time."""
        return f"Noted for question {self.question} after {time.monotonic() - self.began:.0f} s."


STEPS: dict[str, Callable[[Reading, str], str]] = {
    "question": Reading.ask,
    "view": Reading.view,
    "search": Reading.search,
    "links": Reading.links,
    "menu": Reading.menu,
    "contents": Reading.contents,
    "follow": Reading.follow,
    "more": Reading.more,
    "up": Reading.up,
    "find": Reading.find,
    "back": Reading.back,
    "answer": Reading.answer,
}


def _short(target: str) -> str:
    """Return an address without its host and without the words that the search highlights."""
    parts = urlsplit(target)
    return parts.path.lstrip("/") + (f"#{parts.fragment}" if parts.fragment else "")


def serve(notes: Path, site: Path) -> None:
    """Serve the site and one tab on it, and take steps from the socket in `notes` until `stop`."""
    with served_files(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_page(viewport=SCREEN)  # type: ignore[arg-type]
        tab.set_default_timeout(20_000)
        tab.goto(f"{address}/index.html")
        reading = Reading(tab, address, notes / "log.jsonl")
        with Listener(str(notes / "socket"), "AF_UNIX") as listener:
            take_steps(listener, reading)
        browser.close()


def take_steps(listener: Listener, reading: Reading) -> None:
    """Handle one step per connection, until the step `stop`."""
    stopped = False
    while not stopped:
        with listener.accept() as connection:
            command, words = connection.recv()
            stopped = command == "stop"
            connection.send("Stopped." if stopped else reading.do(command, words))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
