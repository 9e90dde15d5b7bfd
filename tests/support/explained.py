"""Explanations through every interface: the Python API, the command line, the JSON API and the page must
agree.
"""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from typer.testing import CliRunner

from horsies.app import Horsies
from horsies.cli.main import command_line
from horsies.logs import detach_handler
from horsies.monitoring import Explanation
from horsies.web import AllowAll, create_app

_CODE = re.compile(r'<span class="code">(\w+)</span>')


@dataclass
class Doors:
    """All interfaces that explain a subject, for one database."""

    app: Horsies

    def task(self, task_id: str) -> Explanation:
        return self._agreed(self.app.explain(task_id), f"/tasks/{task_id}", task_id)

    def run(self, run_id: str) -> Explanation:
        return self._agreed(self.app.explain(run_id), f"/workflows/{run_id}", run_id)

    def node(self, run_id: str, node_id: str) -> Explanation:
        path = f"/workflows/{run_id}/nodes/{quote(node_id, safe='')}"
        return self._agreed(self.app.explain(run_id, node_id), path, run_id, node_id)

    def queue(self, name: str) -> Explanation:
        path = f"/queues/{quote(name, safe='')}"
        return self._agreed(self.app.explain_queue(name), path, "queue", name)

    def schedule(self, name: str) -> Explanation:
        path = f"/schedules/{quote(name, safe='')}"
        return self._agreed(self.app.explain_schedule(name), path, "schedule", name)

    def _agreed(self, answer: Any, path: str, *words: str) -> Explanation:
        explanation: Explanation = answer.unwrap()
        expected = codes(explanation)
        document = self._command(explanation, words)
        page, api = asyncio.run(self._requests(path))
        is_found = explanation.status is not None
        assert [one["code"] for one in document["reasons"]] == expected
        assert (page.status_code, api.status_code) == ((200, 200) if is_found else (404, 404))
        assert [one["code"] for one in api.json()["reasons"]] == expected
        assert api.json().keys() == document.keys()
        assert _CODE.findall(page.text) == expected
        obstacles = [one.code for one in explanation.reasons if one.blocks]
        for said in (document, api.json()):
            assert [one["code"] for one in said["reasons"] if one["blocks"]] == obstacles
        assert page.text.count('class="blocks"') == len(obstacles)
        for one in explanation.reasons:
            if one.remedy is not None and " s " not in one.remedy:
                assert one.remedy in html.unescape(page.text)
        return explanation

    def shown(self, task_id: str) -> dict[str, Any]:
        """Return the document of `horsies show`."""
        return self._document("show", task_id)

    def task_page(self, task_id: str) -> str:
        async def read() -> str:
            async with _client(self.app) as client:
                return (await client.get(f"/tasks/{task_id}")).text

        return asyncio.run(read())

    def _document(self, *arguments: str, expected: int = 0) -> dict[str, Any]:
        url = self.app.config.broker.database_url
        try:
            words = [*arguments, "--database-url", url, "--json"]
            done = CliRunner().invoke(command_line(), words)
        finally:
            detach_handler()
        assert done.exit_code == expected, done.output
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def _command(self, explanation: Explanation, words: tuple[str, ...]) -> dict[str, Any]:
        expected = 0 if explanation.status is not None else 4
        return self._document("explain", *words, expected=expected)

    async def _requests(self, path: str) -> tuple[httpx.Response, httpx.Response]:
        async with _client(self.app) as client:
            page = await client.get(f"{path}/explain")
            return page, await client.get(f"/api{path}/explain")


@asynccontextmanager
async def _client(app: Horsies) -> AsyncIterator[httpx.AsyncClient]:
    dashboard: Any = create_app(app, policy=AllowAll())
    transport = httpx.ASGITransport(dashboard)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            yield client
        finally:
            await dashboard.site.broker.close_async()


def codes(explanation: Explanation) -> list[str]:
    return [one.code for one in explanation.reasons]


def the(explanation: Explanation, code: str) -> Any:
    """Return the only reason with this code."""
    (found,) = [one for one in explanation.reasons if one.code == code]
    return found
