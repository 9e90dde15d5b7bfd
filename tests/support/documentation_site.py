"""The documentation site: built, served by this process, and searched in a browser as its readers do."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.doc_pages import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ADDRESS = "https://docs.example/horsies/"
MKDOCS = REPOSITORY / ".venv-site" / "bin" / "mkdocs"


def build(place: Path, **changed: str) -> None:
    """Build the site as for publishing, with these environment variables; fail for a broken link or a page
    outside the navigation.
    """
    assert MKDOCS.exists(), "the tools of the site are missing; run: make site"
    settings = {**os.environ, "HORSIES_SITE_URL": ADDRESS, "NO_MKDOCS_2_WARNING": "1", **changed}
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(
        command, cwd=REPOSITORY, env=settings, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr


def built_once(parent: Path) -> Path:
    """Return the site below a directory that test processes share; the first process builds the site
    while the others wait.
    """
    place = parent / "site"
    with (parent / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            draft = parent / "site-draft"
            build(draft)
            draft.rename(place)
    return place


class _Quiet(SimpleHTTPRequestHandler):
    """Serve files without logging a line per request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def served_files(directory: Path) -> Iterator[str]:
    """Yield the address of a built site that a server of this process serves during the block."""
    handler = functools.partial(_Quiet, directory=str(directory))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def type_query(tab: Page, query: str) -> None:
    """Type a query into the site's search field, and wait for the response."""
    field = tab.locator("[data-md-component=search-query]")
    field.focus()
    for text, answer in (("", "Type to start"), (query, "matching document")):
        field.fill(text)
        field.dispatch_event("keyup")
        tab.locator(".md-search-result__meta", has_text=answer).wait_for()


def hit_links(tab: Page) -> Locator:
    """Return the links that the search shows now, best first."""
    return tab.locator(".md-search-result__item > a.md-search-result__link")
