"""The notifications that a test's transactions send. They arrive in order, so a notification that is
missing when a later one arrives was never sent.
"""

from __future__ import annotations

import psycopg

from horsies.db.listen import Listener
from tests.support.wait import wait_until

SENTINEL = "test_sentinel"


CHANNELS = ("task_new", "task_done", "task_queue_a", "task_queue_b", "horsies_cancel", SENTINEL)


class Ears:
    """Listens on all channels; ``heard`` returns all notifications committed before the call."""

    def __init__(self, url: str, channels: tuple[str, ...] = CHANNELS) -> None:
        self._sender = psycopg.connect(url, autocommit=True)
        self._listener = Listener(lambda: psycopg.connect(url, autocommit=True), channels)
        self._listener.open()

    def heard(self) -> list[tuple[str, str]]:
        self._sender.execute("SELECT pg_notify(%s, '')", (SENTINEL,))
        notes: list[tuple[str, str]] = []

        def has_sentinel() -> bool:
            notes.extend(self._listener.receive().notifications)
            return (SENTINEL, "") in notes

        wait_until(has_sentinel)
        notes.remove((SENTINEL, ""))
        return notes

    def close(self) -> None:
        self._listener.close()
        self._sender.close()
