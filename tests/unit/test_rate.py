"""Rates in the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode, Rate
from horsies.errors import ConfigurationError
from horsies.worker.config import describe_caps
from tests.support.applications import NOWHERE


def test_a_rate_spaces_its_starts() -> None:
    assert Rate(count=100, per_seconds=60).seconds_per_start == 0.6
    assert Rate(count=4).seconds_per_start == 0.25


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"count": 0}, "count"),
        ({"count": 1.5}, "count"),
        ({"count": True}, "count"),
        ({"count": 1, "per_seconds": 0}, "per_seconds"),
        ({"count": 1, "per_seconds": float("nan")}, "per_seconds"),
        ({"count": 1, "burst": 0}, "burst"),
        ({}, "count"),
    ],
)
def test_a_bad_rate_is_refused_with_the_name_of_its_field(
    fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Rate(**fields)


def test_the_banner_of_a_worker_names_caps_and_rates() -> None:
    queues = [
        CustomQueueConfig(name="mail", max_concurrency=3),
        CustomQueueConfig(name="api", priority=2, rate=Rate(count=100, per_seconds=60)),
    ]
    config = AppConfig(
        broker=PostgresConfig(database_url=NOWHERE),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=queues,
        cluster_wide_cap=9,
    )
    assert describe_caps(Horsies(config)) == "cluster 9, mail 3, api 100 per 60 s"
