"""The dashboard below a prefix: in FastAPI and Django as the documentation shows, and behind a proxy."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from horsies.app import Horsies
from horsies.web import create_monitoring_app
from tests.support import doc_pages
from tests.support.ports import free_port
from tests.support.web_server import running, served
from tests.support.web_site import Elements

PREFIX = "/ops/horsies"
FILES = doc_pages.files(doc_pages.page("dashboard-access.md"))
SETTINGS = """from horsies.web import hub
hub.MOUNTED_SECONDS = 6.0
SECRET_KEY, ROOT_URLCONF, ALLOWED_HOSTS, urlpatterns = "x", "site_settings", ["*"], []
"""

Get = Callable[[str], Awaitable[httpx.Response]]


async def addresses(get: Get) -> dict[str, int]:
    """Follow the links of the overview and of the help page; return the status of each."""
    found: dict[str, int] = {}
    for start in (f"{PREFIX}/", f"{PREFIX}/help"):
        page = await get(start)
        assert page.status_code == 200
        for address in Elements(page.text).addresses:
            if address.startswith(PREFIX) and not address.startswith(f"{PREFIX}/live"):
                found[address] = (await get(address)).status_code
            else:
                assert address.startswith(("#", "data:", f"{PREFIX}/live/")), address
    assert any("/static/" in address for address in found)
    return found


async def addresses_of_server(url: str, stripped: str = "") -> dict[str, int]:
    async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client:
        return await addresses(lambda path: client.get(path.removeprefix(stripped)))


def wrong(statuses: dict[str, int]) -> dict[str, int]:
    return {path: status for path, status in statuses.items() if status not in (200, 405)}


@pytest.fixture
def database_variable(process_url: str, connection: object, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    return process_url


def test_mounted_in_fastapi_every_address_works(database_variable: str) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(FILES["main.py"], "main.py", "exec"), namespace)
    dashboard = namespace["api"].routes[-1].app
    dashboard.hub.stream_seconds = 6

    async def main() -> tuple[dict[str, int], httpx.Response]:
        transport = httpx.ASGITransport(namespace["api"])
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            try:
                return await addresses(client.get), await client.get(f"{PREFIX}/live/")
            finally:
                await dashboard.site.broker.close_async()

    statuses, live = asyncio.run(main())
    namespace["app"].close()
    assert wrong(statuses) == {}
    assert "event: sample" in live.text


def test_mounted_in_django_every_address_works(database_variable: str, tmp_path: Path) -> None:
    (tmp_path / "asgi.py").write_text(FILES["asgi.py"])
    (tmp_path / "site_settings.py").write_text(SETTINGS)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "asgi:application", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running([*command, "--log-level", "error"], url + PREFIX, cwd=tmp_path) as server:
        assert server.client.get(url + PREFIX).status_code == 307
        assert server.client.get(f"{url}/other").status_code == 404
        assert wrong(asyncio.run(addresses_of_server(url))) == {}
        with server.client.stream("GET", f"{url}{PREFIX}/live/") as live:
            assert "event: sample" in live.iter_lines()
            # A server waits for open responses without a limit: the end of the stream lets it go.
            server.process.terminate()
            server.process.wait(30)


def test_behind_a_proxy_that_strips_the_prefix_every_address_works(process_url: str) -> None:
    options = ("--database-url", process_url, "--root-path", f"{PREFIX}/")
    with served(*options) as server:
        assert wrong(asyncio.run(addresses_of_server(server.url, stripped=PREFIX))) == {}


def test_the_older_name_takes_policies_with_two_questions(app: Horsies) -> None:
    class OnlyLocal:
        async def can_view(self, request: Any) -> bool:
            return bool(request.headers["host"] == "localhost")

        async def can_act(self, request: Any) -> bool:
            return False

    dashboard = create_monitoring_app(
        app, auth_policy=OnlyLocal(), config={"payload": True}, actions_enabled=True
    )

    async def main(host: str) -> httpx.Response:
        transport = httpx.ASGITransport(dashboard)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.get("/help")

    assert asyncio.run(main("localhost")).status_code == 200
    assert asyncio.run(main("other")).status_code == 403


def test_processes_with_one_secret_accept_each_others_forms(
    app: Horsies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HORSIES_WEB_SECRET", "shared by all processes")
    first, second = (create_monitoring_app(app, auth_policy=_Anna()).site.signer for _ in range(2))
    assert second.is_form_token(first.form_token("anna", "ping"), "anna", "ping")


class _Anna:
    async def can_view(self, request: Any) -> bool:
        return True

    async def can_act(self, request: Any) -> bool:
        return True
