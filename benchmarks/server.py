"""The database to measure on. This module imports no benchmark, so that the environment of the peers can
import it without the packages that the benchmarks need.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from horsies.db.embedded import program, start_or_join


@contextmanager
def server(connections: int = 100) -> Iterator[str]:
    """Yield the URL of a database to measure on; a private server accepts this many connections."""
    if named := os.environ.get("HORSIES_TEST_DATABASE_URL"):
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="horsies-bench-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        url = start_or_join(f"embedded://{place}/postgres", keep_data=False)
        _allow_connections(url, connections)
        yield url


def _allow_connections(url: str, connections: int) -> None:
    """Restart a private server with room for this many connections."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET max_connections = {connections}")
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    restart = [program("pg_ctl"), "restart", "--wait", "--pgdata", row[0], "--mode", "fast"]
    owner = Path(row[0]).stat().st_uid
    subprocess.run(restart, check=True, user=owner, stdout=subprocess.DEVNULL)
