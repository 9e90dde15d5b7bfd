"""Fixtures: more ways to a database than the shared ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pgbouncer import find_pgbouncer, running_pgbouncer
from tests.support.private_server import PrivateServer


@pytest.fixture(scope="session")
def private_server() -> Iterator[PrivateServer]:
    """A server this test process may stop and start."""
    server = PrivateServer()
    yield server
    server.remove()


@pytest.fixture
def pgbouncer_url(process_url: str) -> Iterator[str]:
    """A way to this process's database through PgBouncer in transaction mode."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with running_pgbouncer(process_url) as url:
        yield url
