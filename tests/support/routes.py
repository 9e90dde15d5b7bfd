"""The route of producers and workers to the database: direct, or through PgBouncer."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import pytest

from tests.support.pooled_workers import pooled
from tests.support.workers import CONFIG_VARIABLE, DATABASE_VARIABLE, Fleet, Route

FLEETS = pytest.StashKey[list[Fleet]]()
THROUGH_PGBOUNCER = os.environ.get("HORSIES_TEST_POOLER") == "1"


def routed(database_url: str) -> AbstractContextManager[Route]:
    """Yield the route of this test run's producers and workers: direct, or through a transaction pooler."""
    return pooled_route(database_url) if THROUGH_PGBOUNCER else nullcontext(Route(database_url))


@contextmanager
def pooled_route(database_url: str) -> Iterator[Route]:
    """Connect through our own PgBouncer; notifications come directly from the server."""
    with pooled(database_url) as (pooled_url, broker):
        # A pooler may pass a send to a server connection that has just died.
        yield Route(pooled_url, broker, {"resend_on_transient_err": True})


@pytest.fixture(scope="session")
def route(process_url: str) -> Iterator[Route]:
    """The route to this process's database."""
    with routed(process_url) as route:
        yield route


@pytest.fixture(scope="session")
def programs(route: Route) -> Iterator[ModuleType]:
    """Import the workers' application, for sends; the database must be known before the import."""
    os.environ[DATABASE_VARIABLE] = route.url
    os.environ[CONFIG_VARIABLE] = json.dumps({"broker": route.broker, **route.producer})
    module = importlib.import_module("tests.support.apps.programs")
    yield module
    module.app.close()
