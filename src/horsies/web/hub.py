"""The hub: live page updates through server-sent events.

A page is sampled once for all of its viewers; a page without viewers is not sampled. A
sample calls the page's handler again, and every viewer gets the regions whose text has changed since
the last event in the viewer's own stream.

Every stream ends after a while, because a server that reloads or shuts down waits for open responses.
The browser then reconnects, and the first event of the new stream has all regions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from horsies.web.access import client_address
from horsies.web.reading import Problem
from horsies.web.rendering import Handler, Site, View, failure_of, render_regions

STREAMS_MAX = 64
STREAMS_PER_CLIENT_MAX = 6
STANDALONE_SECONDS = 55.0
MOUNTED_SECONDS = 20.0
REST_FACTOR = 20
# The page's script marks its numbers as stale after this time without an event.
TICK_SECONDS = 4.0
RETRY_MS = 1_000
# The time beyond its lifetime that a stream has to send its events.
SEND_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A page's regions at one time, or a sentence that explains why they could not be read."""

    at: datetime
    regions: dict[str, str] = field(default_factory=dict)
    problem: str | None = None
    is_last: bool = False


def rest_after(sample_seconds: float, live_seconds: float) -> float:
    """Return the pause after a sample that limits sampling to a twentieth of the time."""
    return max(live_seconds, REST_FACTOR * sample_seconds)


class Channel:
    """One page, which is sampled while it has viewers."""

    def __init__(self, view: View, handler: Handler, problem_seconds: float) -> None:
        self._view = view
        self._handler = handler
        self._problem_seconds = problem_seconds
        self._news: set[asyncio.Event] = set()
        self._sampling: asyncio.Task[None] | None = None
        self.sample: Sample | None = None

    def add(self, news: asyncio.Event) -> None:
        """Add a viewer, whose event is set after every sample."""
        self._news.add(news)
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._keep_sampling())
        elif self.sample is not None:
            news.set()

    def remove(self, news: asyncio.Event) -> bool:
        """Remove a viewer; return whether no viewer is left."""
        self._news.discard(news)
        if self._news:
            return False
        if self._sampling is not None:
            self._sampling.cancel()
        return True

    async def _keep_sampling(self) -> None:
        # Ignore the duration of the first sample, which opens connections and compiles templates.
        pause, seconds = await self._publish(), 0.0
        while pause is not None:
            await asyncio.sleep(rest_after(seconds, pause))
            started = time.monotonic()
            pause = await self._publish()
            seconds = time.monotonic() - started

    async def _publish(self) -> float | None:
        self.sample, pause = await self._take()
        for news in self._news:
            news.set()
        return pause

    async def _take(self) -> tuple[Sample, float | None]:
        """Return a sample and the pause after it, or no pause after the last sample."""
        now = datetime.now(UTC)
        try:
            page = await self._handler(self._view)
            if isinstance(page, Response):
                return Sample(now, is_last=True), None
            regions, rest = render_regions(self._view, page), page.live_seconds
        except Exception as error:
            problem = error if isinstance(error, Problem) else failure_of(self._view, error)
            return Sample(now, problem=problem.sentence), self._problem_seconds
        return Sample(now, regions, None, is_last=rest is None), rest


class EventStream(StreamingResponse):
    """A streaming response that also ends if its client does not read; otherwise the send would block
    forever.
    """

    def __init__(
        self, events: AsyncGenerator[str, None], seconds: float, ended: Callable[[], object]
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, 200, headers, "text/event-stream")
        self._events = events
        self._seconds = seconds
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            await self.close()

    async def close(self) -> None:
        """End the stream, even if it never started."""
        self._ended()
        await self._events.aclose()


class Hub:
    """One dashboard's channels and streams."""

    def __init__(self, site: Site) -> None:
        self.stream_seconds = STANDALONE_SECONDS if site.settings.is_standalone else MOUNTED_SECONDS
        # The pause before an unreadable page is sampled again.
        self.problem_seconds = 2.0
        self._channels: dict[Hashable, Channel] = {}
        self._streams: Counter[str] = Counter()

    def stream(self, view: View, handler: Handler) -> Response:
        """Return a page's stream, or 503 if too many streams are open."""
        client = f"{client_address(view.request)} {view.access.user}"
        if self._streams.total() >= STREAMS_MAX or self._streams[client] >= STREAMS_PER_CLIENT_MAX:
            return PlainTextResponse(
                "Live updates are off: too many streams; reload manually.", 503
            )
        # Count the stream before its first event, to limit simultaneous requests too.
        self._streams[client] += 1
        return EventStream(
            self._events(view, handler),
            self.stream_seconds + SEND_SECONDS,
            partial(self._forget, client),
        )

    def _forget(self, client: str) -> None:
        self._streams -= Counter([client])  # Remove clients without open streams.

    async def _events(self, view: View, handler: Handler) -> AsyncGenerator[str, None]:
        key = (
            *(asyncio.get_running_loop(), view.path, view.request.url.query),
            *(view.access.may, view.access.sees_payload),
        )
        channel = self._channels.setdefault(key, Channel(view, handler, self.problem_seconds))
        news = asyncio.Event()
        channel.add(news)
        try:
            yield f"retry: {RETRY_MS}\n\n"
            async for event in _follow(channel, news, view, time.monotonic() + self.stream_seconds):
                yield event
        finally:
            if channel.remove(news) and self._channels.get(key) is channel:
                del self._channels[key]


async def _follow(
    channel: Channel, news: asyncio.Event, view: View, deadline: float
) -> AsyncIterator[str]:
    sent: dict[str, str] = {}
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(left, TICK_SECONDS)):
                await news.wait()
        except TimeoutError:
            yield event("tick", {})
            continue
        news.clear()
        sample = channel.sample
        assert sample is not None
        changed = {name: text for name, text in sample.regions.items() if sent.get(name) != text}
        sent |= changed
        yield _sample_event(sample, changed, view)
        if sample.is_last:
            yield event("end", {})
            return


def _sample_event(sample: Sample, changed: dict[str, str], view: View) -> str:
    if sample.problem is not None:
        return event("stale", {"sentence": sample.problem})
    filled = {name: view.site.with_tokens(text, view.access.user) for name, text in changed.items()}
    return event("sample", {"at": sample.at.isoformat(), "regions": filled})


def event(name: str, data: dict[str, object]) -> str:
    """Format one server-sent event; JSON escapes line breaks in the data."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
