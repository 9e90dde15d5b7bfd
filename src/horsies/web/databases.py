"""Several databases below one address: ``/`` lists them all, and ``/db/NAME/`` is one database's
dashboard.

Each dashboard has its own connections and live updates, so an unreachable database does not affect other
databases. The list shows the reason in the unreachable database's row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from horsies.app import Horsies
from horsies.config.postgres import PostgresConfig
from horsies.database_url import mask_url
from horsies.monitor.diagnose.attention import figures_script
from horsies.web.access import Policy, Signer
from horsies.web.app import Dashboard, help_page
from horsies.web.metrics import answer_scrape
from horsies.web.pages import totals_of
from horsies.web.reading import Problem, web_broker
from horsies.web.rendering import Page, Route, Settings, Site, View, environment

# The time that the list waits for a database; a later update fills in the row of a slower database.
ANSWER_SECONDS = 1.0


class Served(NamedTuple):
    """A database that the dashboard shows, with its application if it has one."""

    name: str
    config: PostgresConfig
    app: Horsies | None


def build_all(
    served: Sequence[Served], settings: Settings, policy: Policy, signer: Signer
) -> ASGIApp:
    """Combine several databases' dashboards with a list of them."""
    settings = replace(settings, databases=tuple(one.name for one in served))
    sites = {
        one.name: Site(
            web_broker(one.config),
            one.app,
            replace(settings, database=one.name),
            signer,
            environment(),
        )
        for one in served
    }
    listing = Listing(sites)
    # The list needs no database and never uses its site's broker.
    front = Site(next(iter(sites.values())).broker, None, settings, signer, environment())
    routes = [
        StarletteRoute("/readyz", listing.readyz),
        *(StarletteRoute(f"/db/{name}", _with_slash) for name in sites),
        *(Mount(f"/db/{name}", Dashboard(site, policy)) for name, site in sites.items()),
        Mount("/", Dashboard(front, policy, listing.routes())),
    ]
    return Starlette(routes=routes)


async def _with_slash(request: Request) -> Response:
    return RedirectResponse(request.url.path + "/")


class Listing:
    """The pages about all databases together."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self._sites = sites
        self._rows = {name: _Row(name, site) for name, site in sites.items()}

    def routes(self) -> Sequence[Route]:
        return (
            Route("GET", "/", None, self.databases),
            Route("GET", "/metrics", None, self.metrics),
            Route("GET", "/help", None, help_page),
        )

    async def databases(self, view: View) -> Page:
        """Show every database's figures, or the reason why a database cannot be read."""
        rows = await asyncio.gather(*(row.current() for row in self._rows.values()))
        return Page("databases.html", "Databases", {"rows": rows})

    async def metrics(self, view: View) -> Response:
        """Return the gauges of all databases, distinguished by the label ``database``."""
        return await answer_scrape(self._sites, view.request.headers.get("accept", ""))

    async def readyz(self, request: Request) -> Response:
        """Return 200 if at least one database can be read; name the unreadable databases."""
        rows = await asyncio.gather(*(row.current() for row in self._rows.values()))
        down = [row["name"] for row in rows if row["problem"]]
        text = f"cannot be read: {', '.join(down)}" if down else "ready"
        return PlainTextResponse(f"{text}\n", 503 if len(down) == len(rows) else 200)


class _Row:
    """One database's latest figures, or the reason why they could not be read; only one asyncio task
    reads at a time.
    """

    def __init__(self, name: str, site: Site) -> None:
        self._name = name
        self._site = site
        self._reading: asyncio.Task[None] | None = None
        self._problem: str | None = f"The database did not answer within {ANSWER_SECONDS:g} s."
        # The totals, or the statement that ends the session which holds a lock.
        self._facts: dict[str, Any] = {}

    async def current(self) -> dict[str, Any]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=ANSWER_SECONDS)
        return {"name": self._name, "problem": self._problem, **self._facts}

    async def _read(self) -> None:
        try:
            figures = await self._site.reader.read(figures_script(self._site.queue_caps))
        except Problem as problem:
            self._problem = mask_url(problem.sentence)
            self._facts = {"remedy": problem.members.get("remedy")}
        else:
            self._problem, self._facts = None, totals_of(figures, None)
