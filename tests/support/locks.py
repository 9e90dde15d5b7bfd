"""A session of another program that keeps a table locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


@contextmanager
def locked(url: str, table: str) -> Iterator[int]:
    """Lock a table for the duration of the block; yield the pid of the session."""
    with psycopg.connect(url, application_name="report") as holder:
        holder.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        yield holder.info.backend_pid
