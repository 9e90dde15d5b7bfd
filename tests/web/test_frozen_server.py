"""A database session that falls silent: the page says so in bounded time, and the next one works."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from horsies import Horsies
from horsies.web import AllowAll, create_app, reading
from tests.support.database import Database

SILENCE_SECONDS = 1.0
INTENT = {"X-Horsies-Intent": "action"}


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
            again = await asyncio.wait_for(client.post(path, headers=INTENT), 30)
            assert again.json()["paused"] is True
        await dashboard.site.broker.close_async()

    asyncio.run(main())


def test_the_limit_of_a_silence_is_above_that_of_a_statement() -> None:
    assert reading.STATEMENT_TIMEOUT_MS / 1000 < reading.SILENCE_SECONDS < 10
