"""The documentation site in Chromium: search, the copy button, and no request to another host."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support import site_map
from tests.support.commands import environment
from tests.support.doc_pages import REPOSITORY, blocks, page
from tests.support.web_server import watched

pytestmark = pytest.mark.browser

ADDRESS = "https://docs.example/horsies/"
MKDOCS = REPOSITORY / ".venv-site" / "bin" / "mkdocs"
# Words of beginners, and the pages of which one must be the first or second hit.
QUERIES = {
    "retry": "retries.html",
    "cron": "scheduling.html",
    "pydantic": "sending.html tutorial.html",
    "rate limit": "queues.html concurrency.html",
    "unique job": "idempotency.html",
    "faq": "faq.html",
    "outbox": "transactions.html",
    "windows": "faq.html install.html versioning.html concurrency.html",
    "timeout": "time-limits.html",
    "cancel": "time-limits.html",
    "priority": "queues.html",
    "install": "install.html",
    "celery": "coming-from-celery.html",
    "django": "django.html",
    "fastapi": "fastapi.html",
    "progress": "inside-a-task.html cookbook.html",
    "dashboard": "dashboard.html",
    "deploy": "deployment.html",
    "exactly once": "exactly-once.html",
    "first workflow": "workflow-tutorial.html",
    "test": "testing.html ci.html",
    "task does not run": "troubleshooting.html",
    "backoff": "retries.html",
    "double click": "idempotency.html",
    "duplicate": "idempotency.html",
    "human in the loop": "cookbook.html workflow-tutorial.html workflows-steering.html",
    "without a database": "testing.html embedded.html",
    "dead letter": "cookbook.html",
    "poison": "cookbook.html",
    "throttle": "queues.html",
    "semaphore": "queues.html",
    "recurring": "scheduling.html",
    "periodic task": "scheduling.html",
    "eta": "sending.html",
    "batch": "batches.html",
    "batch insert": "batches.html",
    "saga": "durable-functions.html",
    "dag": "workflows.html",
    "multi tenant": "keys.html cookbook.html",
    "mock": "testing.html",
    "stuck": "troubleshooting.html doctor.html",
    "docker": "deployment.html",
    "graceful shutdown": "stopping.html",
    "logging": "logs.html",
    "retention": "recovery.html",
    "revoke": "time-limits.html",
    "crash": "recovery.html how-it-works.html",
    "event loop": "async-tasks.html sending.html",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a line per request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""
    "encrypt": "encryption.html",
    "gdpr": "personal-data.html",
    "personal data": "personal-data.html",
    "webhook": "webhooks.html",
    "s3": "large-payload.html",
    "large result": "large-payload.html",
    "upload": "large-payload.html",
    "per-tenant limit": "keys.html",
    "memory limit": "time-limits.html",
    "task logs": "logs.html",


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as for publishing."""
    if not MKDOCS.exists():
        pytest.fail("the tools of the site are missing; run: make site", pytrace=False)
    place = tmp_path_factory.mktemp("site")
    settings = {**os.environ, "HORSIES_SITE_URL": ADDRESS, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(
        command, cwd=REPOSITORY, env=settings, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return place


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    """The site on a server of this process."""
    handler = functools.partial(Quiet, directory=str(directory))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def tab(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A tab that fails its test if it complains or asks another host."""
    with watched(browser, SimpleNamespace(url=address), **options) as context:  # type: ignore[arg-type]
        yield context.new_page()


def hits(tab: Page, query: str) -> list[str]:
    """Type a query and return the pages that are found, in order."""
    field, said = (
        tab.locator("[data-md-component=search-query]"),
        tab.locator(".md-search-result__meta"),
    )
    for text, answer in (("", "Type to start"), (query, "matching document")):
        field.fill(text)
        field.dispatch_event("keyup")
        expect(said).to_contain_text(answer)
    found = tab.locator(".md-search-result__item > a.md-search-result__link")
    addresses = found.evaluate_all("links => links.map(link => link.pathname)")
    return list(dict.fromkeys(one.rpartition("/")[2] for one in addresses))


def open_search(tab: Page, address: str) -> None:
    tab.goto(address)
    tab.locator("[data-md-component=search-query]").focus()


def test_a_search_finds_the_guide_first_or_second(browser: Browser, address: str) -> None:
    wrong = {}
    with tab(browser, address) as shown:
        open_search(shown, "/index.html")
        for query, wanted in QUERIES.items():
            found = hits(shown, query)[:2]
            if not set(found) & set(wanted.split()):
                wrong[query] = found
    assert wrong == {}


def test_the_search_works_on_files(browser: Browser, directory: Path) -> None:
    with tab(browser, directory.as_uri()) as shown:
        open_search(shown, f"{directory.as_uri()}/index.html")
        assert "transactions.html" in hits(shown, "outbox")[:2]


def test_pages_show_drawings_and_the_way_on_and_ask_no_other_host(
    browser: Browser, address: str
) -> None:
    with tab(browser, address) as shown:
        shown.goto("/how-it-works.html")
        assert shown.locator("svg.drawing").count() == 3
        assert shown.locator("a.md-footer__link--next").count() == 1
        shown.goto("/exactly-once.html")
        assert shown.locator("svg.drawing").count() == 3
        shown.goto("/time-limits.html")
        assert shown.locator(".admonition").count() >= 2


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, address: str) -> None:
    with tab(browser, address, viewport={"width": 360, "height": 740}) as shown:
        for name in ("index", "how-it-works", "cookbook", "transactions"):
            shown.goto(f"/{name}.html")
            wide = shown.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, name


def test_the_copy_button_takes_commands_that_run(browser: Browser, address: str) -> None:
    with tab(browser, address) as shown:
        shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
        shown.goto("/install.html")
        copied = []
        for block in shown.locator(".language-console").all():
            block.scroll_into_view_if_needed()
            block.locator("[data-clipboard-target]").click()
            copied.append(shown.evaluate("navigator.clipboard.readText()"))
    consoles = [one.text for one in blocks(page("install.md")) if one.language == "console"]
    commands = ["\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE)) for text in consoles]
    assert [one.strip() for one in copied] == commands
    (version,) = [one for one in copied if "version" in one]
    done = subprocess.run(
        ["bash", "-c", version], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("horsies "), done.stderr


def test_every_page_has_its_own_description_and_place_in_the_sitemap(directory: Path) -> None:
    names = [entry.name.replace(".md", ".html") for entry in site_map.entries()]
    texts = {name: (directory / name).read_text("utf-8") for name in names}
    described = [
        re.search('<meta name="description" content="([^"]+)"', one) for one in texts.values()
    ]
    assert len({found[1] for found in described if found}) == len(names)
    sitemap = (directory / "sitemap.xml").read_text("utf-8")
    assert [name for name in names if f"<loc>{ADDRESS}{name}</loc>" not in sitemap] == []
    full = (directory / "llms-full.txt").read_text("utf-8")
    assert page("cookbook.md") in full


def test_no_page_loads_anything_from_another_host(directory: Path) -> None:
    loading = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(?:https?:)?//([^"/]+)')
    own = ADDRESS.split("/")[2]
    found = {
        path.name: hosts
        for path in directory.rglob("*.html")
        if (hosts := set(loading.findall(path.read_text("utf-8"))) - {own})
    }
    assert found == {}
