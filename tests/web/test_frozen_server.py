"""A database session that falls silent, or a whole server: pages say so in bounded time, and then work again.

`HORSIES_TEST_OUTAGES=long pytest -s tests/web/test_frozen_server.py` asks every page, every change and the
whole API on a frozen server, and prints the time of each.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import httpx
import psycopg
import pytest

from horsies import Horsies
from horsies.db.migrate import apply_migrations
from horsies.web import AllowAll, create_app, reading
from horsies.web.app import ROUTES
from tests.support.applications import app_at
from tests.support.database import Database
from tests.support.ports import free_port
from tests.support.private_server import PrivateServer
from tests.support.wait import wait_until
from tests.support.web_rows import fill, path_of
from tests.support.web_server import WebServer, running, served
from tests.support.web_visitor import INTENT
from tests.support.workers import DATABASE_VARIABLE

SILENCE_SECONDS = 1.0
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
SAMPLE = ("/", "/tasks", "/tasks/{id}", "/doctor", "/orders/new", "/api/overview", "/metrics")
SEARCHES = ["/search?q=mail", "/api/search?q=mail"]
# Without a query, these send no statement.
NEEDS_NO_DATABASE = ("/help", "/send", "/explain", "/search", "/api/search")
# The limit of a silence or of an attempt to connect, and the slack of a busy machine.
PAGE_SECONDS = reading.SILENCE_SECONDS + 12.0
CHANGE_SECONDS = reading.CHANGE_SECONDS + 12.0


@asynccontextmanager
async def frozen(app: Horsies) -> AsyncIterator[httpx.AsyncClient]:
    """A dashboard whose only session is stopped."""
    dashboard: Any = create_app(app, policy=AllowAll("anna"), actions=True)
    transport = httpx.ASGITransport(dashboard, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
    broker = dashboard.site.broker
    try:
        assert (await client.get("/queues")).status_code == 200
        async with broker.database.connection_async() as connection:
            row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
        pid: int = row[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield client
        finally:
            os.kill(pid, signal.SIGCONT)
    finally:
        await client.aclose()
        await broker.close_async()


@pytest.mark.parametrize("path", ["/queues", "/api/queues", "/readyz"])
def test_a_frozen_session_ends_a_page_and_the_next_one_works(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(reading, "SILENCE_SECONDS", SILENCE_SECONDS)

    async def main() -> None:
        async with frozen(app) as client:
            began = time.monotonic()
            answer = await asyncio.wait_for(client.get(path), 30)
            assert SILENCE_SECONDS <= time.monotonic() - began < 10
            assert answer.status_code == 503, answer.text
            if path != "/readyz":
                assert "The database did not answer for 1 s" in answer.text
            monkeypatch.setattr(reading, "SILENCE_SECONDS", 25.0)
            assert (await asyncio.wait_for(client.get(path), 30)).status_code == 200

    asyncio.run(main())


def test_a_change_on_a_frozen_session_is_refused_and_not_made(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SILENCE_SECONDS", SILENCE_SECONDS)

    async def main() -> None:
        async with frozen(app) as client:
            path = "/api/queues/default/pause"
            answer = await asyncio.wait_for(client.post(path, headers=INTENT), 30)
            assert answer.status_code == 503, answer.text
            assert connection.execute("SELECT 1 FROM horsies_actions").fetchall() == []
            monkeypatch.setattr(reading, "SILENCE_SECONDS", 25.0)
            again = await asyncio.wait_for(client.post(path, headers=INTENT), 30)
            assert again.json()["paused"] is True

    asyncio.run(main())


def test_a_change_whose_session_freezes_after_its_first_read_ends(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is as good as frozen: its change waits for a lock that is held."""
    monkeypatch.setattr(reading, "CHANGE_SECONDS", SILENCE_SECONDS)
    path = "/api/queues/default/pause"

    async def main() -> None:
        dashboard: Any = create_app(app, policy=AllowAll("anna"), actions=True)
        transport = httpx.ASGITransport(dashboard, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with connection.transaction():
                connection.execute("LOCK TABLE horsies_queues IN SHARE MODE")
                answer = await asyncio.wait_for(client.post(path, headers=INTENT), 30)
            assert answer.status_code == 504, answer.text
            assert "look at the page again before you repeat" in answer.json()["title"]
            assert connection.execute("SELECT 1 FROM horsies_actions").fetchall() == []
            monkeypatch.setattr(reading, "CHANGE_SECONDS", 25.0)
            again = await asyncio.wait_for(client.post(path, headers=INTENT), 30)
            assert again.json()["paused"] is True
        await dashboard.site.broker.close_async()

    asyncio.run(main())


@contextmanager
def private_dashboard() -> Iterator[tuple[PrivateServer, WebServer, list[str]]]:
    """A server with the rows of every page, a dashboard that has read from it, and the paths to ask."""
    server = PrivateServer()
    try:
        with (
            psycopg.connect(server.url, autocommit=True) as connection,
            closing(app_at(server.url)) as app,
        ):
            apply_migrations(connection)
            examples = fill(app, connection)
        gets = [route for route in ROUTES if route.method == "GET"]
        paths = [path_of(route, examples) for route in gets if IS_LONG or route.path in SAMPLE]
        paths += SEARCHES if IS_LONG else []
        options = ("tests.support.apps.cards:app", "--enable-actions", "--payload")
        with served(*options, env={DATABASE_VARIABLE: server.url}) as dashboard:
            for path in paths:  # as viewers do before an outage: sessions are open
                assert dashboard.get(path).status_code < 400, path
            yield server, dashboard, paths
    finally:
        server.remove()


@contextmanager
def servers_of_all(url: str) -> Iterator[list[str]]:
    """The addresses of the list of databases and its metrics, and of `horsies metrics`, after a first
    answer.
    """
    port = free_port()
    words = [sys.executable, "-m", "horsies", "metrics", "--port", str(port), "--database-url", url]
    several = ("--database-url", f"one={url}", "--database-url", f"two={url}")
    with (
        served(*several) as listing,
        running(words, f"http://127.0.0.1:{port}") as scraper,
    ):
        addresses = [f"{listing.url}/", f"{listing.url}/metrics", f"{scraper.url}/metrics"]
        for address in addresses:
            listing.client.get(address)
        yield addresses


def names_the_silence(path: str, answer: httpx.Response) -> bool:
    if path in NEEDS_NO_DATABASE:
        return answer.status_code == 200
    text = answer.text
    if path.endswith("/metrics"):
        return re.search(r"^horsies_up(\{.*\})? 0\.0$", text, re.M) is not None
    if path.startswith("http"):  # the list of all databases has the last figures at first
        return answer.status_code == 200
    return answer.status_code == 503 and count_silent(answer) > 0


def count_silent(answer: httpx.Response) -> int:
    """The number of databases that a page calls silent: in a session that was open, or to a new one."""
    return len(re.findall("did not answer|does not answer", answer.text))


@pytest.mark.slow
@pytest.mark.timeout(1_200 if IS_LONG else 240)
def test_on_a_frozen_server_every_page_and_change_ends_and_says_so() -> None:
    """Several viewers at a time; the postmaster accepts connections in the kernel, and nothing answers."""
    with (
        private_dashboard() as (server, dashboard, paths),
        servers_of_all(server.url) as addresses,
    ):
        paths += addresses
        posts = [path_of(route, {}) for route in ROUTES if route.method == "POST" and IS_LONG]
        asked = [*(("GET", path) for path in paths), *(("POST", path) for path in posts)]

        def ask(request: tuple[str, str]) -> tuple[httpx.Response, float]:
            method, path = request
            began = time.monotonic()
            url = path if path.startswith("http") else dashboard.url + path
            answer = dashboard.client.request(method, url, headers=INTENT, timeout=120)
            return answer, time.monotonic() - began

        before = changes_of(server)
        with server.frozen(), ThreadPoolExecutor(6) as viewers:
            seen = list(viewers.map(ask, asked))
            wait_until(lambda: count_silent(dashboard.client.get(addresses[0])) == 2)
        assert dashboard.get("/queues").status_code == 200
        assert changes_of(server) == before
    wrong = []
    for (method, path), (answer, seconds) in zip(asked, seen, strict=True):
        if IS_LONG:
            print(f"{method:4} {path:60.60} {answer.status_code} {seconds:6.2f} s")
        limit = PAGE_SECONDS if method == "GET" else CHANGE_SECONDS
        # A form may be wrong before its change needs the database.
        is_refused = method == "POST" and answer.status_code in (400, 403, 422)
        if seconds > limit or not (is_refused or names_the_silence(path, answer)):
            wrong.append(f"{path}: {answer.status_code}, {seconds:.1f} s, {answer.text[-900:]}")
    assert wrong == []


def changes_of(server: PrivateServer) -> int:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT count(*) FROM horsies_actions").fetchone()
    assert row is not None
    return int(row[0])


def test_the_limit_of_a_silence_is_above_that_of_a_statement() -> None:
    assert reading.STATEMENT_TIMEOUT_MS / 1000 < reading.SILENCE_SECONDS < 10
