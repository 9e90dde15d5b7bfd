"""The cost of dashboard viewers: a drain while ten viewers watch the overview."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from benchmarks.rounds import heading, spread
from benchmarks.worker import drain

VIEWERS = 10
CHILDREN = 2
TASKS = 20_000
ROUNDS = 3
TARGET = 0.95


def viewers(url: str) -> bool:
    """Drain alternately without and with ten live viewers, whose server runs on the same machine."""
    rates: dict[int, list[float]] = {0: [], VIEWERS: []}
    events = 0
    with _dashboard(url) as address:
        for _ in range(ROUNDS):
            for count, found in rates.items():
                with _looking(address, count) as seen:
                    found.append(drain(url, CHILDREN, TASKS, "--max-tasks-per-child", "0")["rate"])
                events += sum(seen)
    ratio = statistics.median(rates[VIEWERS]) / statistics.median(rates[0])
    heading(f"drain of {TASKS:,} no-op tasks, {CHILDREN} children, median (min-max) of {ROUNDS}")
    for count, found in rates.items():
        print(f"  {count:>2} viewers  {spread(found)} tasks/s")
    print(f"  events sent {events:,}; ratio {ratio:.3f} (target {TARGET})")
    return ratio >= TARGET and events > 0


@contextmanager
def _dashboard(url: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "horsies", "web", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "HORSIES_DATABASE_URL": url})
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_served(address)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_served(address: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/livez").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError("the dashboard did not start")


@contextmanager
def _looking(address: str, count: int) -> Iterator[list[int]]:
    """Keep this many streams of the overview open; yield the number of events that each has received."""
    seen, stop = [0] * count, threading.Event()
    with ExitStack() as stack:
        for index in range(count):
            thread = threading.Thread(target=_look, args=(address, index, seen, stop))
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        yield seen


def _look(address: str, index: int, seen: list[int], stop: threading.Event) -> None:
    # Each viewer has its own address, because a client may have only six streams.
    transport = httpx.HTTPTransport(local_address=f"127.0.0.{index + 2}")
    with httpx.Client(transport=transport, timeout=15) as client:
        while not stop.is_set():
            with client.stream("GET", f"{address}/live/") as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    seen[index] += line.startswith("data:")
                    if stop.is_set():
                        break


BENCHMARKS = {"viewers": viewers}
