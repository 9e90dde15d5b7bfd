"""The documentation site in Chromium: search, the copy button, and no request to another host."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page

from tests.support import reader, site_map
from tests.support.commands import running_worker
from tests.support.doc_pages import REPOSITORY, blocks, page
from tests.support.documentation_site import (
    ADDRESS,
    build,
    built_once,
    hit_links,
    served_files,
    type_query,
)
from tests.support.followed_pages import COMMANDS, make_files, run, run_all, sessions
from tests.support.newcomer import QUESTIONS
from tests.support.web_server import WebServer, watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# Words of beginners, and the pages of which one must be the first or second hit.
QUERIES = {
    "retry": "retries.html",
    "cron": "schedule-patterns.html scheduling.html",
    "pydantic": "sending.html tutorial.html",
    "rate limit": "queues.html concurrency.html",
    "unique job": "idempotency.html",
    "faq": "faq.html",
    "outbox": "transactions.html",
    "windows": "faq.html install.html versioning.html",
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
    "exponential": "retries.html",
    "traceback": "results.html",
    "locator": "cli.html workers.html",
    "wait for result of a task value or error": "results.html",
    "stop task longer than 30 seconds timeout": "time-limits.html",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, built as for publishing, once for all test processes of this run."""
    own = tmp_path_factory.getbasetemp()
    return built_once(own if worker_id == "master" else own.parent)


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    """The site on a server of this process."""
    with served_files(directory) as served:
        yield served


@contextmanager
def tab(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A tab that fails its test if it complains or asks another host."""
    with watched(browser, SimpleNamespace(url=address), **options) as context:  # type: ignore[arg-type]
        yield context.new_page()


def hits(tab: Page, query: str) -> list[str]:
    """Type a query and return the pages that are found, in order."""
    type_query(tab, query)
    found = hit_links(tab)
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


def test_an_excerpt_shows_the_text_of_the_page_and_keeps_its_words_apart(
    browser: Browser, address: str
) -> None:
    with tab(browser, address) as shown:
        open_search(shown, "/index.html")
        type_query(shown, "dlq")
        assert "dlq" not in hit_links(shown).first.inner_text()
        type_query(shown, "postpones cause")
        found = hit_links(shown).filter(has_text="Which retry do you mean").inner_text()
        assert re.search(r"for instance by 30 seconds\s+to run a failed task again", found), found


def test_marked_words_of_a_search_leave_the_text_of_a_page_as_it_is(
    browser: Browser, address: str
) -> None:
    with tab(browser, address) as shown:
        shown.goto("/scheduling.html")
        text = shown.locator("article").inner_text()
        shown.goto("/scheduling.html?h=3+QUOT+timezone")
        shown.locator("mark", has_text="timezone").first.wait_for()
        assert shown.locator("article").inner_text() == text


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


def index_of_one_text(directory: Path) -> str:
    """The index of the search, shortened: each page that opens indexes all texts, which takes as much
    processor time as the page itself.
    """
    index = json.loads((directory / "search" / "search_index.json").read_text("utf-8"))
    return json.dumps({**index, "docs": index["docs"][:1]})


# It loads every page of the site, which takes minutes on a busy machine.
@pytest.mark.timeout(1200)
def test_no_page_needs_sideways_scrolling_on_a_phone(
    browser: Browser, address: str, directory: Path
) -> None:
    wide, index = {}, index_of_one_text(directory)
    with tab(browser, address, viewport={"width": 360, "height": 740}) as shown:
        shown.route(
            "**/search_index.json",
            lambda route: route.fulfill(content_type="application/json", body=index),
        )
        for entry in site_map.entries():
            shown.goto(f"/{entry.name.replace('.md', '.html')}", wait_until="load")
            for width in (360, 390):
                shown.set_viewport_size({"width": width, "height": 740})
                found = shown.evaluate("document.documentElement.scrollWidth")
                if found > width:
                    wide[entry.name, width] = found
    assert wide == {}


def copied(browser: Browser, address: str, name: str) -> list[str]:
    """What the copy buttons of a page take, block by block."""
    with tab(browser, address) as shown:
        shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
        shown.goto(f"/{name.replace('.md', '.html')}")
        return [_taken(shown, one) for one in shown.locator("div.highlight").all()]


def _taken(shown: Page, block: Locator) -> str:
    shown.evaluate("navigator.clipboard.writeText('')")
    block.scroll_into_view_if_needed()
    block.locator("[data-clipboard-target]").click()
    shown.wait_for_function("navigator.clipboard.readText().then(text => text !== '')")
    return str(shown.evaluate("navigator.clipboard.readText()"))


@pytest.mark.parametrize("name", ["install.md", "tutorial.md"])
def test_what_the_copy_buttons_take_can_be_run(
    browser: Browser, address: str, name: str, tmp_path: Path, database_url: str
) -> None:
    text = page(name)
    taken = list(zip(blocks(text), copied(browser, address, name), strict=True))
    made = {block.file_name: one for block, one in taken if block.file_name}
    pasted = "".join(one for block, one in taken if block.language == "console").splitlines()
    shown = [output for _, output in sessions(text)]
    assert pasted == [command for command, _ in sessions(text)]
    make_files(made, tmp_path)
    with running_worker(tmp_path, database_url):
        ran = run_all(list(zip(pasted, shown, strict=True)), tmp_path, database_url)
    assert len(ran) == sum(command.startswith(COMMANDS) for command, _ in sessions(text)) > 1


@pytest.mark.usefixtures("connection")  # which empties the tables: no queue is known
def test_a_copied_command_of_several_lines_can_be_run(
    browser: Browser, address: str, dashboard: WebServer, process_url: str, tmp_path: Path
) -> None:
    (_, both) = copied(browser, address, "dashboard-api.md")
    assert "\\\n" in both
    command = both.replace("localhost:8600", dashboard.url.removeprefix("http://"))
    finished = run(command, tmp_path, process_url)
    paused, order = json.loads(f"[{finished.stdout.replace('}{', '},{')}]")
    assert (paused["code"], order["verb"], order["matching"]) == ("UNKNOWN_QUEUE", "retry_tasks", 0)


def test_a_reader_answers_a_question_screen_by_screen(directory: Path, tmp_path: Path) -> None:
    process = reader.start(tmp_path, str(directory))
    try:
        assert QUESTIONS[7].text in reader.step(tmp_path, "question", "8")
        assert "idempotency.html" in reader.step(tmp_path, "search", "double click").splitlines()[0]
        shown = reader.step(tmp_path, "follow", "1")
        assert shown.startswith("Idempotency")
        assert "idempotency_key" in reader.step(tmp_path, "find", "one task per key")
        assert reader.step(tmp_path, "more", "") != shown
        assert "Not possible" in reader.step(tmp_path, "follow", "1")  # the list has gone
        reader.step(tmp_path, "answer", "with a key")
        (line,) = reader.report(tmp_path / "log.jsonl").splitlines()[1:]
        question, pages, searches, *_, answer = line.split(" | ")
        assert (question, pages, searches, answer) == ("8", "1", "1", "with a key")
    finally:
        reader.step(tmp_path, "stop", "")
        assert process.wait(60) == 0


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


def test_every_link_of_the_built_pages_leads_to_a_file_and_a_place_in_it(directory: Path) -> None:
    texts = texts_of(directory)
    places = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()}
    broken = [
        (name, target)
        for name, text in texts.items()
        for target in set(re.findall(r'\b(?:href|src)="([^"]*)"', text))
        if not _leads_somewhere(directory, places, urljoin(ADDRESS + name, html.unescape(target)))
    ]
    assert broken == []


def texts_of(directory: Path) -> dict[str, str]:
    """The text of every built page by its path in the site."""
    pages = directory.rglob("*.html")
    return {str(path.relative_to(directory)): path.read_text("utf-8") for path in pages}


def _leads_somewhere(directory: Path, places: dict[str, set[str]], address: str) -> bool:
    if not address.startswith(ADDRESS):
        return True
    found = urlsplit(address.removeprefix(ADDRESS) or "index.html")
    is_file = (directory / unquote(found.path)).is_file()
    return is_file and (not found.fragment or unquote(found.fragment) in places[found.path])


def test_no_page_loads_anything_from_another_host(directory: Path) -> None:
    loading = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(?:https?:)?//([^"/]+)')
    own = ADDRESS.split("/")[2]
    found = {
        path.name: hosts
        for path in directory.rglob("*.html")
        if (hosts := set(loading.findall(path.read_text("utf-8"))) - {own})
    }
    assert found == {}


def test_a_site_of_a_published_repository_links_to_its_files(tmp_path: Path) -> None:
    repository = "https://code.example/horsies"
    build(tmp_path / "site", HORSIES_REPOSITORY_URL=repository)
    texts = texts_of(tmp_path / "site")
    for entry in site_map.entries():
        source = f"{repository}/raw/main/docs/{entry.name}"
        shown = texts[entry.name.replace(".md", ".html")]
        assert (source in shown) == (entry.path.parent != REPOSITORY), entry.name
    link = re.compile(rf'href="{repository}/(?:blob|raw)/main/([^"#]+)')
    linked = {path for text in texts.values() for path in link.findall(text)}
    assert "src/horsies/worker/loop.py" in linked
    assert [path for path in linked if not (REPOSITORY / path).exists()] == []
    install = re.sub("<[^>]+>", "", texts["install.html"])
    assert f"$ git clone {repository} horsies" in install
    assert "ADDRESS" not in install
