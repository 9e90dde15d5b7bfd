"""The cost of counting: drains without the tally, with it, and with metrics scraped every second."""

from __future__ import annotations

import os
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.rounds import alternate, heading, ratios, spread
from benchmarks.worker import drain

# The environment variable that noop_app.py reads.
TALLY_VARIABLE = "HORSIES_BENCH_TALLY"
CHILDREN = 4
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ROUNDS = 5
TARGET = 0.98
SCRAPE_SECONDS = 1.0
FLAGS = ("--max-tasks-per-child", "0", "--quiet-tasks")


def tally(url: str) -> bool:
    """Drain alternately without the tally, with it (the default), and with it and a scraper."""
    kinds = {"no tally": _untallied, "tally": _plain, "tally, scraped": _scraped}
    found = alternate({name: partial(kind, url) for name, kind in kinds.items()}, ROUNDS)
    heading(
        f"drain of {TASKS:,} no-op tasks, {CHILDREN} children, median (min-max) of {ROUNDS}; "
        f"ratio to no tally round by round"
    )
    medians = []
    for name, runs in found.items():
        parts = ratios(runs, found["no tally"], "rate")
        medians.append(statistics.median(parts))
        print(
            f"  {name:<15}{spread([run['rate'] for run in runs]):>24} tasks/s   {spread(parts, 3)}"
            f"   parent {spread([run['parent_us'] for run in runs])} µs/task"
        )
    print(f"  target {TARGET}")
    return min(medians) >= TARGET


def _untallied(url: str) -> dict[str, float]:
    os.environ[TALLY_VARIABLE] = "off"
    try:
        return _plain(url)
    finally:
        del os.environ[TALLY_VARIABLE]


def _plain(url: str, *flags: str) -> dict[str, float]:
    return drain(url, CHILDREN, TASKS, *FLAGS, *flags)


def _scraped(url: str) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with _scraping(port) as seen:
        drained = _plain(url, "--metrics-port", str(port))
    assert seen, "no scrape succeeded"
    return drained


@contextmanager
def _scraping(port: int) -> Iterator[list[int]]:
    """Scrape every second until the block ends; yield a list of the sizes of the responses."""
    stopped, seen = threading.Event(), list[int]()

    def scrape() -> None:
        while not stopped.wait(SCRAPE_SECONDS):
            with (
                suppress(URLError, ConnectionError),
                urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response,
            ):
                seen.append(len(response.read()))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield seen
    finally:
        stopped.set()
        thread.join()


BENCHMARKS = {"tally": tally}
