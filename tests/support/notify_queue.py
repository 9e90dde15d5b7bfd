"""A server whose notification queue is full: no transaction that notifies can commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.support.private_server import PrivateServer

# The smallest queue that PostgreSQL allows, in pages of 8 KiB.
PAGES = 64


def limit_queue(server: PrivateServer) -> None:
    """Restart the server with a small notification queue; needs PostgreSQL 17."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET max_notify_queue_pages = {PAGES}".encode())
    server.stop()
    server.start()


@contextmanager
def full_queue(url: str) -> Iterator[None]:
    """Keep the queue full with a session that listens but stays in a transaction, so that it reads
    nothing.
    """
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute("LISTEN test_full")
        listener.execute("BEGIN")
        listener.execute("SELECT 1")
        fill(url)
        yield


def fill(url: str) -> None:
    """Send notifications until the server rejects one."""
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(2 * PAGES):
            try:
                connection.execute("SELECT pg_notify('test_full', repeat('x', 7990))")
            except psycopg.errors.ProgramLimitExceeded:
                break
        else:
            raise AssertionError("the queue is not full")
        # Fill the last bytes with short notifications.
        try:
            while True:
                connection.execute("SELECT pg_notify('test_full', '')")
        except psycopg.errors.ProgramLimitExceeded:
            return
