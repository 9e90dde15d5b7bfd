"""``/metrics`` of the dashboard."""

from __future__ import annotations

import asyncio
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from horsies.app import Horsies
from horsies.monitor.metrics import ClusterGauges
from tests.support.web_server import Ask, client_of


def test_scrapers_of_the_dashboard_share_one_collection(
    app: Horsies, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = []
    make_script = ClusterGauges.script

    def counted(gauges: ClusterGauges) -> object:
        scripts.append(gauges)
        return make_script(gauges)

    monkeypatch.setattr(ClusterGauges, "script", counted)

    async def main() -> list[str]:
        async with client_of(app) as client:
            answers = await asyncio.gather(*(client.get("/metrics") for _ in range(5)))
            return [answer.text for answer in answers]

    first, *others = asyncio.run(main())
    assert set(others) == {first}
    assert len(scripts) == 1
    names = {family.name for family in text_string_to_metric_families(first)}
    assert {"horsies_up", "horsies_queue_tasks", "horsies_table_bytes"} <= names


def test_metrics_without_the_extra_are_a_sentence(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = ask("/metrics")
    assert (answer.status_code, "horsies[metrics]" in answer.text) == (501, True)
