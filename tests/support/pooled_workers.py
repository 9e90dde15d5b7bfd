"""Workers behind a real PgBouncer in transaction mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.pgbouncer import PgBouncer, find_pgbouncer, started_pgbouncer

# The time that workers wait for a response; PgBouncer itself would wait two minutes for a server.
PATIENCE_MS = 3_000


@contextmanager
def pooler_before(database_url: str) -> Iterator[tuple[PgBouncer, dict[str, Any]]]:
    """Yield a pooler that the test may kill, and its broker settings."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with started_pgbouncer(database_url) as pooler:
        yield (
            pooler,
            {
                "pgbouncer_transaction_mode": True,
                "session_database_url": database_url,
                "tcp_user_timeout_ms": PATIENCE_MS,
            },
        )


@contextmanager
def pooled(database_url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL through the pooler, and its broker settings."""
    with pooler_before(database_url) as (pooler, broker):
        yield pooler.url, broker
