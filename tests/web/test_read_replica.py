"""The dashboard on a hot standby: its pages read there, so that they cost the primary nothing."""

from __future__ import annotations

import asyncio

import httpx

from horsies import Horsies
from horsies.web import ViewOnly, create_app
from tests.support.replicated_server import ReplicatedServer, sent_to_standby

PAGES = ("/", "/tasks", "/failures", "/queues", "/workers", "/workflows", "/schedules", "/metrics")


def test_every_page_is_served_from_a_standby() -> None:
    with ReplicatedServer() as servers:
        task_id = sent_to_standby(servers)
        reader = Horsies(servers.standby.url, migrate=False)
        paths = (*PAGES, f"/tasks/{task_id}", f"/tasks/{task_id}/explain")
        assert asyncio.run(_statuses(reader, paths)) == dict.fromkeys(paths, 200)


async def _statuses(app: Horsies, paths: tuple[str, ...]) -> dict[str, int]:
    transport = httpx.ASGITransport(app=create_app(app, policy=ViewOnly()))
    async with httpx.AsyncClient(transport=transport, base_url="http://dashboard") as client:
        found = {path: (await client.get(path)).status_code for path in paths}
    await app.close_async()
    return found
