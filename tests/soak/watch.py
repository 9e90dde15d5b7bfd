"""The heartbeats of all workers during a soak run, read from the database twice a second."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from typing import Self

import psycopg

from tests.soak.refusals import EXEMPT

QUERY = b"SELECT pid, seen_at FROM horsies_workers WHERE stopped_at IS NULL"
INTERVAL_SECONDS = 0.5


class Watch:
    """Collects the times at which each worker has written that it lives; use as a context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        # By process number.
        self.signs: dict[int, set[datetime]] = defaultdict(set)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopping.wait(INTERVAL_SECONDS):
            # The server is away at times: every worker has an excuse then.
            with suppress(psycopg.Error):
                self._read()

    def _read(self) -> None:
        with psycopg.connect(self._url, autocommit=True, options=EXEMPT) as connection:
            while not self._stopping.wait(INTERVAL_SECONDS):
                for pid, seen_at in connection.execute(QUERY):
                    self.signs[pid].add(seen_at)
