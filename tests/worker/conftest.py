"""Fixtures: the connection of a turn, and pools of real child processes, all gone after the test."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.worker.connection import TURN_SETTINGS
from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildPool
from horsies.worker.protocol import ChildBoot
from tests.support.pool import BOOT, MakePool


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def make_pool(selector: selectors.BaseSelector) -> Iterator[MakePool]:
    pools: list[ChildPool] = []

    def make(processes: int = 2, *, boot: ChildBoot = BOOT, **settings: Any) -> ChildPool:
        # The quickest way to children; the tests that are about start methods name all of them.
        settings.setdefault("start_method", StartMethod.FORK)
        pool = ChildPool(PoolSettings(processes, **settings), boot, selector)
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        pool.kill_all()
        pool.shutdown()


@pytest.fixture
def pipeline(process_url: str, connection: Connection[Any]) -> Iterator[Pipeline]:
    """A worker's connection for its turns, to this process's database with empty tables."""
    with psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS) as own:
        yield Pipeline(own)
