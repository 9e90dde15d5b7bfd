"""Fixtures: pools of real child processes, all gone after the test."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import Any

import pytest

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
