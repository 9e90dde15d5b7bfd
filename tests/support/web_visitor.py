"""A user of a dashboard in this process, who presses buttons and calls the JSON API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from horsies import Horsies
from horsies.web import create_app
from horsies.web.access import Policy
from tests.support.wait import wait_until

INTENT = {"X-Horsies-Intent": "action"}


class Visitor:
    """One dashboard in this process and its user, with an event loop that lives as long."""

    def __init__(self, app: Horsies, policy: Policy, **switches: Any) -> None:
        self.dashboard: Any = create_app(app, policy=policy, **{"actions": True, **switches})
        self.runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.dashboard, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.run(self.dashboard.site.broker.close_async())
        self.runner.close()

    def get(self, path: str) -> httpx.Response:
        return self.runner.run(self.client.get(path))

    def post(
        self, path: str, right: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Press the button of a form."""
        token = self.dashboard.site.signer.form_token("anna", right)
        data = {"token": token, **fields}
        return self.runner.run(self.client.post(path, data=data, headers=headers))

    def api(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        given = {**INTENT, **{name.replace("_", "-"): value for name, value in headers.items()}}
        text = json.dumps(body or {})  # httpx would not escape a lone surrogate
        return self.runner.run(self.client.post(f"/api{path}", content=text, headers=given))

    def notice(self, answer: httpx.Response) -> str | None:
        """Return the notice that the page after a change shows."""
        assert answer.status_code == 303, answer.text
        sealed = answer.cookies.get("horsies_notice")
        signer = self.dashboard.site.signer
        notice: str | None = sealed and signer.opened("notice", sealed.strip('"'))
        return notice

    def finish(self, order_id: str) -> dict[str, Any]:
        """Wait for the end of an order, which continues while this loop runs; return its document."""
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            found.update(self.get(f"/api/orders/{order_id}").json())
            return found["outcome"] in ("done", "stopped")

        wait_until(has_ended)
        return found
