"""The hub: one sample for all viewers of a page, finite streams, no work without viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.responses import Response

from horsies.web.hub import STREAMS_MAX, STREAMS_PER_CLIENT_MAX, EventStream, Hub, rest_after
from horsies.web.reading import Unavailable
from horsies.web.rendering import Page, View
from tests.support.web_site import Counter, site_of, view_of


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(bounded())


class Events:
    """The events of one stream."""

    def __init__(self, response: Response) -> None:
        assert isinstance(response, EventStream)
        self._response = response
        self._texts: Any = response.body_iterator

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        while not (text := await anext(self._texts)).startswith("event: "):
            pass
        name, data = text.removeprefix("event: ").strip().split("\ndata: ")
        return name, json.loads(data)

    async def close(self) -> None:
        await self._response.close()


def test_the_first_event_has_all_regions_and_later_ones_those_that_changed() -> None:
    async def main() -> None:
        site = site_of()
        events = Events(Hub(site).stream(view_of(site), Counter()))
        first, second = await anext(events), await anext(events)
        assert first[0] == second[0] == "sample"
        assert set(first[1]["regions"]) == {"count", "still"}
        assert second[1]["regions"] == {"count": "<p>sample 2</p>"}
        await events.close()

    run(main())


def test_viewers_of_one_page_share_its_samples() -> None:
    async def main() -> None:
        site, counter = site_of(), Counter(live_seconds=60)
        hub = Hub(site)
        streams = [
            Events(hub.stream(view_of(site, client=f"10.0.0.{one}"), counter)) for one in range(20)
        ]
        for stream in streams:
            name, data = await anext(stream)
            assert (name, data["regions"]["count"]) == ("sample", "<p>sample 1</p>")
        assert counter.samples == 1
        for stream in streams:
            await stream.close()

    run(main())


def test_a_page_without_viewers_is_not_sampled() -> None:
    async def main() -> None:
        site, counter = site_of(), Counter()
        events = Events(Hub(site).stream(view_of(site), counter))
        await anext(events)
        await events.close()
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - the sampling would go on for ever
            await asyncio.sleep(0)

    run(main())


def test_forms_of_shared_regions_carry_the_token_of_each_viewer() -> None:
    async def main() -> None:
        site = site_of()
        view = view_of(site)
        events = Events(Hub(site).stream(view, Counter()))
        _, data = await anext(events)
        token = site.signer.form_token("anna", "pause_queue")
        assert f'value="{token}"' in data["regions"]["still"]
        assert site.token_marker not in json.dumps(data)
        await events.close()

    run(main())


def test_a_stream_ends_after_its_time_and_the_next_one_starts_complete() -> None:
    async def main() -> None:
        site = site_of()
        hub = Hub(site)
        hub.stream_seconds = 1.0  # enough for a first sample on a busy machine
        counter = Counter()
        for _ in range(2):
            events = [event async for event in Events(hub.stream(view_of(site), counter))]
            assert set(events[0][1]["regions"]) == {"count", "still"}

    run(main())


def test_a_stream_ends_when_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horsies.web.hub.SEND_SECONDS", 0.05)

    async def never(*_message: Any) -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    async def main() -> None:
        site, counter = site_of(), Counter(live_seconds=60)
        hub = Hub(site)
        hub.stream_seconds = 0.05
        for _ in range(STREAMS_PER_CLIENT_MAX + 1):
            view = view_of(site)
            response = hub.stream(view, counter)
            assert response.status_code == 200
            await response(view.request.scope, never, send)

    run(main())


def test_streams_are_limited_per_client_and_in_all() -> None:
    async def main() -> None:
        site, counter = site_of(), Counter(live_seconds=60)
        hub = Hub(site)
        clients = [f"10.0.0.{one}" for one in range(20)]

        def ask(client: str, times: int) -> list[Response]:
            return [hub.stream(view_of(site, client=client), counter) for _ in range(times)]

        first = ask(clients[0], STREAMS_PER_CLIENT_MAX + 1)
        assert [one.status_code for one in first] == [*[200] * STREAMS_PER_CLIENT_MAX, 503]
        assert "reload manually" in bytes(first[-1].body).decode()
        others = [one for client in clients[1:] for one in ask(client, STREAMS_PER_CLIENT_MAX)]
        streams = [Events(one) for one in (*first, *others) if one.status_code == 200]
        assert len(streams) == STREAMS_MAX
        await anext(streams[0])
        assert ask("10.9.9.9", 1)[0].status_code == 503
        for stream in streams:
            await stream.close()
        assert ask(clients[0], 1)[0].status_code == 200

    run(main())


def test_a_page_that_cannot_be_read_is_stale_with_its_sentence_until_it_can() -> None:
    attempts = iter([Unavailable("The database is away."), ValueError("a row"), None])

    async def handler(view: View) -> Page:
        if problem := next(attempts, None):
            raise problem
        return Page("counter.html", "Counter", {"count": 1}, 0.01)

    async def main() -> None:
        site = site_of()
        hub = Hub(site)
        hub.problem_seconds = 0.01
        events = Events(hub.stream(view_of(site), handler))
        assert await anext(events) == ("stale", {"sentence": "The database is away."})
        name, data = await anext(events)
        assert (name, data["sentence"][:32]) == ("stale", "The page failed with ValueError;")
        assert (await anext(events))[0] == "sample"
        await events.close()

    run(main())


def test_a_page_that_is_complete_ends_its_stream_for_good() -> None:
    async def main() -> None:
        site = site_of()
        counter = Counter(live_seconds=None)
        names = [name async for name, _ in Events(Hub(site).stream(view_of(site), counter))]
        assert names == ["sample", "end"]

    run(main())


def test_samples_use_a_twentieth_of_the_time_at_most() -> None:
    assert rest_after(0.01, 2.0) == 2.0
    assert rest_after(0.5, 2.0) == 10.0
