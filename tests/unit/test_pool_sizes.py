"""The number of connections that a process may hold, by its role."""

from __future__ import annotations

import pytest

from horsies import AppConfig, Horsies, PostgresConfig
from horsies.db.database import pool_sizes
from tests.support.applications import NOWHERE

CONFIG = PostgresConfig(
    database_url="postgresql://localhost/unused",
    pool_size=4,
    max_overflow=6,
    worker_pool_size=2,
    worker_max_overflow=1,
    worker_child_pool_min_size=0,
    worker_child_pool_max_size=3,
)


@pytest.mark.parametrize(
    ("role", "sizes"),
    [("producer", (4, 10)), ("scheduler", (4, 10)), ("worker", (2, 3)), ("child", (0, 3))],
)
def test_every_role_has_pool_sizes_of_its_own(role: str, sizes: tuple[int, int]) -> None:
    assert pool_sizes(CONFIG, role) == sizes


def test_a_worker_without_sizes_of_its_own_takes_the_producer_s() -> None:
    config = CONFIG.model_copy(update={"worker_pool_size": None, "worker_max_overflow": None})
    assert pool_sizes(config, "worker") == (4, 10)


@pytest.mark.parametrize(("role", "sizes"), [("worker", (2, 3)), ("child", (0, 4))])
def test_a_broker_built_during_import_takes_the_pool_sizes_of_its_process(
    role: str, sizes: tuple[int, int]
) -> None:
    broker = PostgresConfig(
        database_url=NOWHERE,
        worker_pool_size=2,
        worker_max_overflow=1,
        worker_child_pool_max_size=4,
    )
    app = Horsies(AppConfig(broker=broker))
    database = app.get_broker().database
    app.role = role
    limits = database.pool()._limits
    assert (limits.kept, limits.most) == sizes
