"""``/metrics``: the cluster's gauges for Prometheus, collected once for all scrapers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from starlette.responses import PlainTextResponse, Response

from horsies.monitor.diagnose.attention import findings_of
from horsies.monitor.diagnose.slow import SCRAPED_SECONDS
from horsies.monitor.metrics import ClusterGauges, MissingExtraError, Sample, exposition_of
from horsies.tasks.broker import PostgresBroker
from horsies.web.attention import slow_checks
from horsies.web.reading import Problem
from horsies.web.rendering import Route, Site, View


class _Shared(NamedTuple):
    gauges: ClusterGauges
    collecting: asyncio.Lock


# One entry per event loop and database, because an asyncio lock belongs to a loop.
_SHARED: WeakKeyDictionary[
    asyncio.AbstractEventLoop, WeakKeyDictionary[PostgresBroker, _Shared]
] = WeakKeyDictionary()


async def metrics(view: View) -> Response:
    """Return the gauges; while the database cannot be reached, ``horsies_up`` is 0."""
    return await answer_scrape({"": view.site}, view.request.headers.get("accept", ""))


async def answer_scrape(sites: Mapping[str, Site], accept: str) -> Response:
    """Return the gauges of these databases, read concurrently."""
    collected = await asyncio.gather(*map(_collect, sites.values()))
    try:
        body, content_type = exposition_of(dict(zip(sites, collected, strict=True)), accept)
    except MissingExtraError as error:
        return PlainTextResponse(f"{error}\n", 501)
    return Response(body, media_type=content_type)


async def _collect(site: Site) -> Sequence[Sample]:
    gauges, collecting = _shared(site)
    async with collecting:
        if (fresh := gauges.fresh()) is not None:
            return fresh
        try:
            await site.reader.read(gauges.script())
        except Problem:
            gauges.note_failure()
        else:
            await _add_details(site, gauges)
        return gauges.samples()


async def _add_details(site: Site, gauges: ClusterGauges) -> None:
    if gauges.wants_details():
        slow = await slow_checks(site.broker, SCRAPED_SECONDS)
        gauges.note_slow_findings(findings_of(slow.reports))
        try:
            await site.reader.read(gauges.details_script())
        except Problem:
            gauges.note_no_details()


def _shared(site: Site) -> _Shared:
    of_loop = _SHARED.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if (found := of_loop.get(site.broker)) is None:
        gauges = ClusterGauges(site.broker.config.schema_name, site.queue_caps)
        found = of_loop[site.broker] = _Shared(gauges, asyncio.Lock())
    return found


ROUTES = (Route("GET", "/metrics", None, metrics),)
