"""The dashboard in this process or as a real server, and a browser that watches its own tabs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import httpx

from horsies.app import Horsies
from horsies.web import AllowAll, create_app
from horsies.web.access import Policy
from tests.support.ports import free_port
from tests.support.wait import wait_until

# Import Playwright lazily, because tests without a browser use the dashboard without it.
if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# The address of a database that refuses connections.
DOWN = "postgresql://app:hunter2@127.0.0.1:1/down"
CHROMIUM = "/usr/bin/chromium"
APT_LINE = "apt-get install -y --no-install-recommends chromium"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]

Ask: TypeAlias = Callable[..., httpx.Response]


@asynccontextmanager
async def client_of(
    app: Horsies, policy: Policy | None = None, root_path: str = "", **switches: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Return an HTTP client of a dashboard in this process, with these settings for actions and payload."""
    dashboard: Any = create_app(app, policy=policy or AllowAll(), **switches)
    transport = httpx.ASGITransport(dashboard, raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", verify=False
    ) as client:
        try:
            yield client
        finally:
            await dashboard.site.broker.close_async()


class WebServer:
    """A server process that serves the dashboard at ``url``, and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, client: httpx.Client) -> None:
        self.process = process
        self.url = url
        self.client = client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)


@contextmanager
def served(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[WebServer]:
    """Run `horsies web` with these arguments on a free port for the duration of the block."""
    port = free_port()
    command = [sys.executable, "-m", "horsies", "web", "--port", str(port), *arguments]
    with running(command, f"http://127.0.0.1:{port}", env={**os.environ, **(env or {})}) as server:
        yield server


@contextmanager
def running(command: list[str], url: str, **options: Any) -> Iterator[WebServer]:
    """Yield a server process that serves /livez below this URL, for the duration of the block."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options
    )
    assert process.stderr is not None
    # Load no certificates, because loading them takes longer than most requests.
    client = httpx.Client(verify=False, timeout=20)
    try:
        wait_until(lambda: process.poll() is not None or _is_alive(client, url), 60, url)
        assert process.poll() is None, process.stderr.read().decode()
        yield WebServer(process, url, client)
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def _is_alive(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/livez").status_code == 200
    except httpx.TransportError:
        return False


class Watch:
    """The console messages, page errors and requested hosts of the tabs of one context."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.hosts: set[str] = set()
        # Texts of console messages that are not errors.
        self.expected: list[str] = []

    def follow(self, page: Page) -> None:
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def unexpected(self) -> list[str]:
        return [
            message
            for message in self.messages
            if not any(expected in message for expected in self.expected)
        ]


@contextmanager
def watched(browser: Browser, server: WebServer, **options: Any) -> Iterator[BrowserContext]:
    """Yield a new browser context on a server; fail if a tab reports an error or contacts another host."""
    context = browser.new_context(base_url=server.url, **options)
    watch = Watch()
    context.on("page", watch.follow)
    context.watch = watch  # type: ignore[attr-defined]
    try:
        yield context
        assert watch.unexpected() == []
        assert watch.hosts <= {urlsplit(server.url).netloc, ""}
    finally:
        context.close()
